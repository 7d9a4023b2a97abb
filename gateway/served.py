"""What is known of one request from its head to its last byte, for the access log, the counters and the accounts.

It is filled by whoever serves the request, and decides nothing but what it is charged with.
"""

from dataclasses import dataclass
from typing import Final

from gateway.domain.keytable import ANYBODY, Caller
from gateway.domain.places import BY_ID
from gateway.domain.tokens import Tail, Tokens, read_tokens
from gateway.limits import BYTES_PER_TOKEN, Grant

CLIENT_GONE: Final = 499
"""What the log says when nobody was there to be answered; never sent."""


@dataclass(slots=True)
class Served:
    """How a request ended, for the access log and the counters. `scope` is that of a known card.

    `to_count_s`: a wait that is in `waited_s` and not in the counters yet. `how` tells how an adapter came to
    be where it was asked: hit, joined, loaded or unpinned; `adapter_waited_s` what of the wait was for it, at
    however many replicas (None: no agent was asked). `caller` sent it, `grant` is what it holds of the limits of the
    caller's key, `stood` whether it waited for a turn, `used` the tokens it came to (None: nobody told).
    `tail` is kept of the answer it got at `path`; `whole`: that came in one piece, and was read already.
    """

    status: int = 0
    code: str = "ok"
    model: str = ""
    adapter: str = ""
    how: str = ""
    replica: str = ""
    scope: str = ""
    waited_s: float = 0.0
    to_count_s: float | None = None
    adapter_waited_s: float | None = None
    moves: int = 0
    sent_bytes: int = 0
    complete: bool = True
    why: str = ""
    caller: Caller = ANYBODY
    grant: Grant | None = None
    stood: bool = False
    used: Tokens | None = None
    tail: Tail | None = None
    path: str = ""
    sse: bool = False
    asked_bytes: int = 0
    whole: bool = False

    @property
    def has_body(self) -> bool:
        """Whether anything of an answer's body came."""
        return self.whole or (self.tail is not None and bool(self.tail.last))

    def end(self) -> None:
        """The request is over: what it held of its key's limits is given back, what it used is charged."""
        if self.path in BY_ID:
            # What it repeats was used, and counted, when it was made.
            self.used = Tokens()
        elif self.tail is not None and self.tail.last:
            self.used = read_tokens(self.tail, path=self.path, sse=self.sse)
        if self.grant is not None:
            if self.used is None:
                self.grant.end(self._untold(self.grant))
            else:
                self.grant.end(charge(self.grant, self.used, self.asked_bytes, self.sent_bytes))

    def _untold(self, grant: Grant) -> int:
        """What a request is charged of whose tokens nobody told: all it held for an answer, what it asked for when its
        client left an engine that was reading it, nothing when it was refused."""
        if self.status < 400 and self.sent_bytes:
            return charge(grant, None, self.asked_bytes, self.sent_bytes)
        if self.code == "client_gone" and self.replica:
            return min(grant.estimate, self.asked_bytes // BYTES_PER_TOKEN)
        return 0


def charge(grant: Grant, used: Tokens | None, asked_bytes: int, sent_bytes: int) -> int:
    """The tokens an answered request is charged with: what it used, as far as that was told. An answer with nothing in
    it used nothing."""
    if used is None:
        return grant.estimate if sent_bytes else 0
    if used.estimated and not used.prompt:
        return asked_bytes // BYTES_PER_TOKEN + used.completion
    return used.total
