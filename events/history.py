"""Reads what happened from the audit, which keeps what the events stream has trimmed, then goes on live.

It decodes and orders; what of it is shown, and since when, is the reader's affair. Sequences are always
those of the events stream, also of what comes from the audit.
"""

import logging
from collections.abc import Callable
from datetime import datetime
from typing import Final

import msgspec

from events.codec import StoredMessage
from events.follower import MAX_ITEMS, EventFollower
from events.log import Batch, Broken, Misconfigured, Recorded, Unavailable
from events.lookup import StreamReads
from events.pull import Lost, StandingPull
from events.reading import Reader

log = logging.getLogger(__name__)

TRIES: Final = 3
"""Failures to open the audit before the log is read without it."""


class HistoryFollower:
    """Follower over past and present; see EventLog.history. `next` goes through, in order:

    1 what the events stream still holds from before the audit began;
    2 the audit;
    3 the events stream behind the last event the audit had.

    An audit that is missing or cannot be read hides nothing of what the log itself holds.
    """

    def __init__(
        self,
        audit: StandingPull,
        reads: StreamReads,
        follow: Callable[[int], EventFollower],
        *,
        prefix: str,
        after: int,
        since: datetime | None,
    ) -> None:
        self._audit = audit
        self._reads = reads
        self._follow = follow
        self._all = f"{prefix}.evt.>"
        self._reader = Reader(prefix)
        self._after = self._position = after
        self._since = since
        self._follower: EventFollower | None = None
        self._older_until: int | None = None
        self._at: int | None = None
        self._open = False
        self._failures = 0
        self._told_down = False
        self._over: list[EventFollower | StandingPull] = []

    async def next(self) -> Batch:
        """Waits without a bound for the next batch; see Follower.next. May be cancelled without loss."""
        while True:
            while self._over:
                await self._over[-1].close()
                self._over.pop()
            if self._follower is None:
                batch = await self._of_audit()
            elif self._older_until is None:
                return await self._follower.next()
            else:
                batch = self._older(await self._follower.next(), self._older_until)
            if batch is not None:
                return batch

    async def close(self) -> None:
        """Deletes whatever consumers are left."""
        for one in (*self._over, self._follower):
            if one is not None:
                await one.close()
        await self._audit.close()

    def _older(self, batch: Batch, until: int) -> Batch | None:
        """1: a batch of the events stream, without what the audit holds too."""
        if batch.reset:
            # The log is another one than the audit was made from: it alone counts from here on.
            self._older_until = None
            return batch
        items = tuple(item for item in batch.items if item.seq < until)
        if batch.connected and (batch.synced or batch.position >= until - 1):
            assert self._follower is not None
            self._over.append(self._follower)
            self._follower = self._older_until = None
        elif not batch.connected:
            return batch
        return Batch(items=items, position=items[-1].seq, synced=False) if items else None

    async def _of_audit(self) -> Batch | None:
        """2: a batch of the audit, None when there is nothing to tell yet."""
        if not self._open:
            return await self._reopen()
        try:
            taken, connected = await self._audit.take(MAX_ITEMS)
        except Lost as lost:
            log.info("the audit's reader reopens", extra={"why": str(lost)})
            self._open = False
            return None
        if not connected:
            self._open = False
            return None
        # What the audit came to store after the search ended may be older than what was asked for.
        items = tuple(self._item(m) for m, _ in taken if m.origin > self._after)
        last, pending = taken[-1]
        self._at = last.seq + 1
        if pending == 0:
            self._go_live()
        return Batch(items=items, position=self._position, synced=False)

    async def _reopen(self) -> Batch | None:
        if not self._audit.connected:
            if not self._told_down:
                self._told_down = True
                return Batch(items=(), position=self._position, synced=False, connected=False)
            await self._audit.wait_connected()
            return None
        self._told_down = False
        try:
            if self._at is None:
                self._at = await self._find_start()
                if self._at is None:
                    self._go_live()
                if self._follower is not None:
                    return None
            pending = await self._audit.open(self._at)
        except (Lost, Unavailable, Misconfigured) as error:
            self._failures += 1
            if self._failures < TRIES:
                await self._audit.pause()
            else:
                log.warning("the audit cannot be read", extra={"why": str(error)})
                self._go_live()
            return None
        self._open = True
        if pending == 0:
            self._go_live()
        return None

    def _go_live(self) -> None:
        """3: from here on the events stream."""
        self._over.append(self._audit)
        self._follower = self._follow(self._position)

    async def _find_start(self) -> int | None:
        """The audit's sequence to begin at, None when it holds no event; prepares 1 when that is due."""
        first = await self._reads.next(self._all, 1)
        if first is None:
            return None
        begins_late = self._since is None or first.stored_at > self._since
        if first.origin > self._position + 1 and begins_late:
            self._older_until = first.origin
            self._follower = self._follow(self._position)
            return first.seq
        low, high = first.seq, (await self._reads.identity()).last_seq + 1
        while low < high:
            middle = (low + high) // 2
            found = await self._reads.next(self._all, middle)
            if found is None or found.seq >= high or self._is_asked_for(found):
                high = middle
            else:
                low = found.seq + 1
                self._position = max(self._position, found.origin)
        return low

    def _is_asked_for(self, message: StoredMessage) -> bool:
        if self._since is not None:
            return message.stored_at >= self._since
        return message.origin > self._position

    def _item(self, message: StoredMessage) -> Recorded | Broken:
        if message.origin < self._position:
            # A log that was made anew counts from the start: epochs of the former one mean nothing.
            self._reader.forget()
        self._position = message.origin
        return self._reader.read(msgspec.structs.replace(message, seq=message.origin))
