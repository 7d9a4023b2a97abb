"""Writes one JSON line per request to the service log, in batches: formatting and writing each by itself
would cost more than forwarding the request.

Lines carry ids, sizes and times, never content. A gateway that is killed loses the lines of the last
moment; one that ends writes them all.
"""

import asyncio
import logging
import sys
from collections.abc import Callable
from datetime import datetime
from typing import Final

import msgspec
from msgspec import Struct

log = logging.getLogger("gateway")

FLUSH_EVERY_S = 0.1
FLUSH_AT_LINES = 500


class AccessLine(Struct, frozen=True, kw_only=True):
    """What is said of one request; the first four fields are those of every line of a service log.

    `status` 499 with code `client_gone`: nobody was there to be answered. `moves` counts how often
    the request lost its replica. `why` is the reason of an answer that was cut. `scope` is the card
    whose base URL was asked, as `node~card`. `adapter` is the catalog's name of the adapter that was asked for,
    `how` how it came to be there. `key` is the id of the caller's API key. Tokens are
    those of the account (gateway/domain/tokens.py), `first_ms` from the request's head to the first byte of the
    answer's body, -1 where none came. `prio` is what it stood in line with, `trace` the id of its trace.
    """

    time: datetime
    request: str
    peer: str
    method: str
    path: str
    status: int
    code: str
    waited_ms: int
    duration_ms: int
    sent_bytes: int
    complete: bool
    level: str = "info"
    logger: str = "gateway.access"
    message: str = "request"
    model: str = ""
    replica: str = ""
    moves: int = 0
    why: str = ""
    scope: str = ""
    adapter: str = ""
    how: str = ""
    key: str = ""
    prompt_tokens: int = 0
    completion_tokens: int = 0
    first_ms: int = -1
    prio: str = ""
    trace: str = ""


_VARYING: Final = {
    "time": b"%b",
    "request": b'"%b"',
    "duration_ms": b"%d",
    "sent_bytes": b"%d",
    "prompt_tokens": b"%d",
    "completion_tokens": b"%d",
    "first_ms": b"%d",
    "trace": b'"%b"',
}
encoded: Final = msgspec.json.Encoder().encode


def template_of(line: AccessLine) -> bytes:
    """The line of all requests that differ from this one in a few fields alone: a format of those, in their order in
    `AccessLine`. The time is JSON already, ids are of our own making, so that nothing in them needs to be escaped."""
    fields = [
        b'"%b":%b'
        % (
            name.encode(),
            _VARYING.get(name) or encoded(getattr(line, name)).replace(b"%", b"%%"),
        )
        for name in line.__struct_fields__
    ]
    return b"{%b}" % b",".join(fields)


class AccessLog:
    """Collects lines and hands them to `write` every 100 ms, or 500 at a time."""

    def __init__(self, write: Callable[[bytes], object] | None = None) -> None:
        self._write = write or _to_stderr
        self._lines: list[bytes] = []
        self._timer: asyncio.TimerHandle | None = None

    def add(self, line: AccessLine) -> None:
        self.add_line(encoded(line))

    def add_line(self, line: bytes) -> None:
        """One that is JSON already, as `template_of` makes them."""
        self._lines.append(line)
        if len(self._lines) >= FLUSH_AT_LINES:
            self.flush()
        elif self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(FLUSH_EVERY_S, self.flush)

    def flush(self) -> None:
        """Writes what was collected; a log that cannot be written loses lines, not requests."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        lines, self._lines = self._lines, []
        if not lines:
            return
        lines.append(b"")
        try:
            self._write(b"\n".join(lines))
        except OSError as error:
            log.warning("access log not written", extra={"why": str(error), "lines": len(lines)})


def _to_stderr(block: bytes) -> None:
    sys.stderr.buffer.write(block)
    sys.stderr.buffer.flush()
