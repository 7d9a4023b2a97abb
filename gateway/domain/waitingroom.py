"""Holds the requests that wait for a model: who joined when, how much they keep, who leaves with what.

Being admitted and being counted is one step, and so is being taken out and being answered: a ticket
leaves exactly once, and who takes it out owes the answer. It must not do I/O or ask a clock; times are
seconds of the gateway's monotonic clock.
"""

import heapq
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Literal

from msgspec import Struct

Key = tuple[str, str]
"""(model, scope)."""


class Waiter(Struct, frozen=True, kw_only=True):
    """A request in the room. `position` is how far the table had read when it joined."""

    ticket: int
    key: Key
    size_bytes: int
    joined_s: float
    deadline_s: float
    position: int


class Joined(Struct, frozen=True, kw_only=True):
    """Admitted and counted. `first`: it is the only one of its model."""

    waiter: Waiter
    first: bool


class Full(Struct, frozen=True, kw_only=True):
    """Not admitted; nothing changed. `limit` is the bound it met, in the unit of `what`."""

    what: Literal["requests", "bytes"]
    limit: int


@dataclass(slots=True)
class WaitingRoom:
    """All waiting requests of one gateway, bounded per model; first come, first served.

    Deadlines are a heap whose entries of requests long gone are dropped when they are the majority, so
    that abandoned waits leave nothing behind.
    """

    max_requests: int
    max_bytes: int
    _by_key: dict[Key, dict[int, Waiter]] = field(default_factory=dict)
    _bytes: dict[Key, int] = field(default_factory=dict)
    _key_of: dict[int, Key] = field(default_factory=dict)
    _deadlines: list[tuple[float, int]] = field(default_factory=list)
    _next_ticket: int = 1

    # -- coming and going ------------------------------------------------------------------------

    def join(
        self,
        key: Key,
        *,
        size_bytes: int,
        now_s: float,
        deadline_s: float,
        position: int,
        accepted: bool = False,
    ) -> Joined | Full:
        """Admits a request and counts it, or says which bound it met.

        `accepted`: it waited before, or lost the replica it had; no bound turns it away.
        """
        waiting = self._by_key.get(key, {})
        held = self._bytes.get(key, 0)
        if not accepted:
            if len(waiting) >= self.max_requests:
                return Full(what="requests", limit=self.max_requests)
            # One body larger than the bound may wait alone: else it could never be served at all.
            if waiting and held + size_bytes > self.max_bytes:
                return Full(what="bytes", limit=self.max_bytes)
        waiter = Waiter(
            ticket=self._next_ticket,
            key=key,
            size_bytes=size_bytes,
            joined_s=now_s,
            deadline_s=deadline_s,
            position=position,
        )
        self._next_ticket += 1
        self._by_key.setdefault(key, {})[waiter.ticket] = waiter
        self._bytes[key] = held + size_bytes
        self._key_of[waiter.ticket] = key
        heapq.heappush(self._deadlines, (deadline_s, waiter.ticket))
        return Joined(waiter=waiter, first=not waiting)

    def leave(self, ticket: int) -> bool:
        """The client went away. False: the ticket was taken out before, by whoever answers it."""
        taken = self._take(ticket) is not None
        self._compact()
        return taken

    def release(self, key: Key) -> tuple[Waiter, ...]:
        """Everybody who waits for `key`, in order of arrival; the caller lets them go on."""
        waiting = self._by_key.pop(key, None)
        if waiting is None:
            return ()
        del self._bytes[key]
        for ticket in waiting:
            del self._key_of[ticket]
        self._compact()
        return tuple(waiting.values())

    def refuse(self, key: Key, *, decided_at: int) -> tuple[Waiter, ...]:
        """Those of `key` that joined before the event `decided_at`: it is the answer to their wish.

        Who joined knowing that event waits for a later one.
        """
        return self._take_where(key, lambda w: w.position < decided_at)

    def give_up(self, key: Key, *, joined_until_s: float) -> tuple[Waiter, ...]:
        """Those of `key` that joined at or before `joined_until_s`."""
        return self._take_where(key, lambda w: w.joined_s <= joined_until_s)

    def expire(self, now_s: float) -> tuple[Waiter, ...]:
        """Those whose deadline has come, earliest first."""
        expired: list[Waiter] = []
        while self._deadlines and self._deadlines[0][0] <= now_s:
            waiter = self._take(heapq.heappop(self._deadlines)[1])
            if waiter is not None:
                expired.append(waiter)
        return tuple(expired)

    # -- looking ---------------------------------------------------------------------------------

    def next_deadline_s(self) -> float | None:
        """When `expire` will next take somebody out; None when nobody waits."""
        while self._deadlines and self._deadlines[0][1] not in self._key_of:
            heapq.heappop(self._deadlines)
        return self._deadlines[0][0] if self._deadlines else None

    def oldest_joined_s(self, key: Key) -> float | None:
        waiting = self._by_key.get(key)
        return next(iter(waiting.values())).joined_s if waiting else None

    def count(self, key: Key) -> int:
        return len(self._by_key.get(key, ()))

    def held_bytes(self, key: Key) -> int:
        return self._bytes.get(key, 0)

    def waited_for(self) -> tuple[Key, ...]:
        """Every (model, scope) somebody waits for."""
        return tuple(self._by_key)

    def by_model(self, scope: str | None = None) -> dict[str, int]:
        """How many wait for each model, over its scopes, or in one."""
        counts: dict[str, int] = {}
        for (model, of), waiting in self._by_key.items():
            if scope is not None and of != scope:
                continue
            counts[model] = counts.get(model, 0) + len(waiting)
        return counts

    def by_scope(self) -> dict[str, int]:
        """How many wait in each scope, over its models."""
        counts: dict[str, int] = {}
        for (_, scope), waiting in self._by_key.items():
            counts[scope] = counts.get(scope, 0) + len(waiting)
        return counts

    def __len__(self) -> int:
        return len(self._key_of)

    @property
    def timers(self) -> int:
        """Deadlines still kept, those of requests long gone included."""
        return len(self._deadlines)

    # -- taking a ticket out; `release` does it for all of a key at once ----------------------------------------------

    def _take_where(self, key: Key, wanted: Callable[[Waiter], bool]) -> tuple[Waiter, ...]:
        taken = tuple(w for w in self._by_key.get(key, {}).values() if wanted(w))
        for waiter in taken:
            self._take(waiter.ticket)
        self._compact()
        return taken

    def _take(self, ticket: int) -> Waiter | None:
        key = self._key_of.pop(ticket, None)
        if key is None:
            return None
        waiting = self._by_key[key]
        waiter = waiting.pop(ticket)
        if waiting:
            self._bytes[key] -= waiter.size_bytes
        else:
            del self._by_key[key]
            del self._bytes[key]
        return waiter

    def _compact(self) -> None:
        """Drops deadlines of requests long gone once they outnumber the waiting ones."""
        if len(self._deadlines) > 2 * len(self._key_of) + 16:
            self._deadlines = [d for d in self._deadlines if d[1] in self._key_of]
            heapq.heapify(self._deadlines)
