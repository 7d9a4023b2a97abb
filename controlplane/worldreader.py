"""Brings the log into the leader's World: one task reads batches, the owner takes them in when it turns.

It decides nothing and appends nothing. The queue between is bounded, so a busy owner slows the reader
down instead of filling memory.
"""

import asyncio
import logging
from collections.abc import Callable

from controlplane.domain.world import World
from events.log import Batch, Broken, EventLog

log = logging.getLogger(__name__)

WAITING_BATCHES = 4
"""Batches of at most 1,000 events that may wait for the owner."""

BROKEN_KEPT = 100
"""Broken and unknown events remembered one by one for `yardctl doctor`; the rest is only counted."""


class WorldReader:
    """The World, how far it was read, and whether it is all there is.

    `position` is the follower's: everything up to it has been applied. (`world.position` may be ahead,
    by this process's own events.) `generation` grows when the history was replaced, `connection` with
    every loss of the connection. `stopped` names the event whose fold raised; then nothing more is applied.
    """

    def __init__(self, source: EventLog, *, prefix: str, wake: Callable[[], None]) -> None:
        self._source = source
        self._prefix = prefix
        self._filter = f"{prefix}.evt.>"
        self._wake = wake
        self._inbox: asyncio.Queue[Batch] = asyncio.Queue(WAITING_BATCHES)
        self.world = World(prefix=self._prefix)
        self.position = 0
        self.synced = False
        self.connected = False
        self.generation = 0
        self.connection = 0
        self.stopped: str | None = None
        self.broken: dict[str, tuple[int, str]] = {}

    async def run(self) -> None:
        """Reads until cancelled. Raises what the follower raises: such an error ends the process."""
        follower = self._source.follow([self._filter])
        try:
            while True:
                batch = await follower.next()
                await self._inbox.put(batch)
                self._wake()
        finally:
            await follower.close()

    def take_in(self) -> bool:
        """Applies every batch that has arrived; True when there was one."""
        taken = False
        while not self._inbox.empty():
            taken = True
            self._apply(self._inbox.get_nowait())
        return taken

    def _apply(self, batch: Batch) -> None:
        if self.stopped is not None:
            return
        if batch.reset:
            log.warning("the history was replaced; reading it from the start")
            self.world = World(prefix=self._prefix)
            self.broken = {}
            self.position = 0
            self.synced = False
            self.generation += 1
        if not batch.connected:
            if self.connected:
                self.connection += 1
            # Behind from now on, by an unknown number of events.
            self.connected = self.synced = False
            return
        self.connected = True
        for item in batch.items:
            try:
                self.world.apply(item)
            except Exception as error:
                # Our own bug: this projection stops and names the event, the others go on.
                self.stopped = f"applying event {item.seq} on {item.subject} failed: {error!r}"
                log.critical("the world stopped", exc_info=error, extra={"seq": item.seq})
                return
            problem = item.why if isinstance(item, Broken) else item.problem
            if problem is None:
                self.broken.pop(item.subject, None)
            elif len(self.broken) < BROKEN_KEPT:
                self.broken[item.subject] = (item.seq, problem)
        self.position = max(self.position, batch.position)
        self.synced = self.synced or batch.synced
