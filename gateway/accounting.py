"""Counts what each request used and tells YARD_USAGE once a second, as long as there is something to tell.

It is accounting and no state: nothing waits for it, nothing is decided by it, and a gateway that is killed loses its
last second. Without NATS it goes on adding up (gateway/domain/tally.py).
"""

import asyncio
import logging
from collections.abc import Callable
from datetime import datetime
from typing import Final

from events.log import EventLog, LogError
from gateway.domain.tally import MAX_DAYS, Sum, Tally
from gateway.metrics import Metrics, Reading

log = logging.getLogger("gateway.accounting")

EVERY_S: Final = 1.0
LONGEST_PAUSE_S: Final = 30.0
LAST_S: Final = 2.0
"""So long a gateway that ends tries to have its last second stored."""


class Accounting:
    """One per gateway; `run` is its task, `close` its last word."""

    def __init__(self, gateway: str, incarnation: str, events: EventLog, metrics: Metrics) -> None:
        self._tally = Tally(gateway, incarnation)
        self._events = events
        self._metrics = metrics
        self._failing = ""
        self._lost = self._lost_said = 0
        self.before_telling: Callable[[], None] = lambda: None
        metrics.watch(self._gauges)

    def _gauges(self) -> dict[str, Reading]:
        text = "Rows of usage that the log does not have yet."
        return {"yard_gateway_usage_rows": Reading(text=text, values={"": float(self.rows)})}

    @property
    def rows(self) -> int:
        """Rows that are not stored yet."""
        return self._tally.rows

    def add(self, came_to: Sum, *, model: str, key: str, adapter: str, now: datetime) -> None:
        """Requests for a model of the catalog have ended, `now` or of late."""
        self._tally.sum_of(model, key, adapter, now).add(came_to)
        if self._tally.lost != self._lost:
            self._lose()

    def _lose(self) -> None:
        """Counts what had to be forgotten; it is said once, until the log takes something again."""
        more, self._lost = self._tally.lost - self._lost, self._tally.lost
        self._metrics.usage_lost.inc(more)
        if not self._lost_said:
            log.error(
                "usage is lost: the log took none for longer than it keeps any",
                extra={"rows": more, "days": MAX_DAYS},
            )
        self._lost_said += more

    async def run(self) -> None:
        """Tells it until cancelled; what the log does not take is tried again, less and less often."""
        left_s = pause_s = EVERY_S
        while True:
            await asyncio.sleep(EVERY_S)
            left_s -= EVERY_S
            if left_s > 0:
                # What was used is added up meanwhile: it may be of another day, or of connections that are gone.
                self.before_telling()
                continue
            refused = not await self._tell() and self._events.connected
            left_s = pause_s = min(pause_s * 2, LONGEST_PAUSE_S) if refused else EVERY_S

    async def close(self) -> None:
        """Tells the rest, unless that takes too long."""
        try:
            async with asyncio.timeout(LAST_S):
                told = await self._tell()
        except TimeoutError:
            told = False
        if not told:
            log.warning("usage not stored at the end", extra={"rows": self._tally.rows})

    async def _tell(self) -> bool:
        """Stores all there is; False when the log did not take it."""
        self.before_telling()
        while (batch := self._tally.take()) is not None:
            if not self._events.connected:
                return False
            try:
                await self._events.account(batch)
            except LogError as error:
                self._metrics.usage_failed.inc()
                if self._failing != type(error).__name__:
                    self._failing = type(error).__name__
                    log.warning("usage not stored", extra={"why": str(error)})
                return False
            self._tally.stored()
            self._failing = ""
            if self._lost_said:
                log.warning("usage is stored again", extra={"rows_lost": self._lost_said})
                self._lost_said = 0
        return True
