"""What is asked of an agent about its cards, over its unix socket or by request/reply, and its answers.

Over the socket each ask and each answer is one line of JSON; the agent answers `waiting` as often as that
changes and then once for good. By request/reply (`yard.rpc.cards.<node>`) there is one answer, and whoever
got `waiting` follows the card's events. An ask that is repeated under its `id` has no second effect.
"""

from typing import Literal

from msgspec import Struct

from schemas.card import ClaimKind, Priority


class LeaseAcquire(
    Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag_field="ask", tag="acquire"
):
    """A lease `id` (`l-` and 10 base32 characters, made by the asker) over all of `cards`, or none.

    `memory_bytes` None: the whole card. `process` is a pid whose life the lease shares; only over the
    socket, and only the asker's own. It waits in line for `wait_s` at most (0: not at all).
    """

    id: str
    name: str
    cards: tuple[str, ...]
    memory_bytes: int | None = None
    pinned: bool = False
    priority: Priority = "interactive"
    ttl_s: float | None = None
    wait_s: float = 0.0
    process: int | None = None


class LeaseRelease(
    Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag_field="ask", tag="release"
):
    """Ends a named lease, or takes a waiter out of line: `what` is an id or a name."""

    what: str


class ClaimStart(
    Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag_field="ask", tag="claim"
):
    """Keeps the card for a game or an app from now on; `process` as in `acquire`, any pid of the asker's user."""

    id: str
    name: str
    card: str
    kind: ClaimKind = "game"
    process: int | None = None


class ClaimEnd(
    Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag_field="ask", tag="unclaim"
):
    what: str


class VmAttach(
    Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag_field="ask", tag="vm.attach"
):
    name: str
    card: str
    wait_s: float = 0.0


class VmDetach(
    Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag_field="ask", tag="vm.detach"
):
    """Takes the card back from its VM; with `name` from that one and no other."""

    card: str
    name: str = ""


CardAsk = LeaseAcquire | LeaseRelease | ClaimStart | ClaimEnd | VmAttach | VmDetach


class CardAnswer(Struct, frozen=True, kw_only=True):
    """`granted` (a lease, a claim, a VM that has its card), `waiting`, `done` or `refused` (code, sentence).

    `fences` are the card revisions a lease was granted at, `environment` what a process under it needs
    to see its cards and no others.
    """

    status: Literal["granted", "waiting", "done", "refused"]
    id: str = ""
    code: str = ""
    sentence: str = ""
    fences: dict[str, int] = {}
    waiting_for: tuple[str, ...] = ()
    environment: dict[str, str] = {}


class CardRequest(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The body of `yard.rpc.cards.<node>`."""

    ask: CardAsk
