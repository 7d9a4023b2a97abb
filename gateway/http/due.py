"""Keeps a request whose head is here and whose body is not, for the moment in which it nearly always comes.

Many clients write the two apart, and read one by one no request of theirs would ever be whole. Whose moment is over goes
on with what there is. It reads nothing and answers nothing: that is the connection's, in server_protocol.py.
"""

import asyncio
from typing import Final, Protocol

from gateway.http.request_head import RequestHead

DUE_S: Final = 0.01
"""It waits at least so long, at most twice."""

DUE_BYTES: Final = 64 * 1024
"""Longer bodies are not waited for: they come in pieces anyhow."""


class Due:
    """A request of this head, whose body of `framing` bytes is here as far as `body` goes; `received_s` is `loop.time()`
    when its head was."""

    __slots__ = ("body", "framing", "head", "received_s")

    def __init__(self, head: RequestHead, framing: int, body: bytes, received_s: float) -> None:
        self.head = head
        self.framing = framing
        self.body = body
        self.received_s = received_s


class Expecting(Protocol):
    """A connection that keeps one."""

    def overdue(self, due: Due) -> None:
        """Its moment is over, if it is still kept."""
        ...


class DueBodies:
    """Whatever is kept at one server, with one timer for all: one for each would cost more than the keeping."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._timer: asyncio.TimerHandle | None = None
        self._new: list[tuple[Expecting, Due]] = []
        self._old: list[tuple[Expecting, Due]] = []

    def add(self, connection: Expecting, due: Due) -> None:
        """Kept from now on; that it came is not told here."""
        self._new.append((connection, due))
        if self._timer is None:
            self._timer = self._loop.call_later(DUE_S, self._pass)

    def close(self) -> None:
        """Nothing is waited for any more."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _pass(self) -> None:
        over, self._old, self._new = self._old, self._new, []
        self._timer = self._loop.call_later(DUE_S, self._pass) if self._old else None
        for connection, due in over:
            connection.overdue(due)
