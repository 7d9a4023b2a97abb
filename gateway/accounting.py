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
from gateway.domain.tally import Tally
from gateway.domain.tokens import Tokens
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
        self.before_telling: Callable[[], None] = lambda: None
        metrics.watch(self._gauges)

    def _gauges(self) -> dict[str, Reading]:
        text = "Rows of usage that the log does not have yet."
        return {"yard_gateway_usage_rows": Reading(text=text, values={"": float(self.rows)})}

    @property
    def rows(self) -> int:
        """Rows that are not stored yet."""
        return self._tally.rows

    def add(
        self,
        *,
        model: str,
        key: str,
        adapter: str,
        failed: bool,
        tokens: Tokens | None,
        first_s: float | None,
        duration_s: float,
        waited_s: float,
        now: datetime,
    ) -> None:
        """One request for a model of the catalog has ended `now`; `first_s` is None when no body came."""
        found = self._tally.sum_of(model, key, adapter, now)
        found.requests += 1
        if failed:
            found.failed += 1
        if tokens is not None:
            found.prompt_tokens += tokens.prompt
            found.cached_tokens += tokens.cached
            found.completion_tokens += tokens.completion
            if tokens.estimated:
                found.estimated += 1
        if first_s is not None:
            found.first_token_ms += round(first_s * 1000)
            found.first_tokens += 1
        found.duration_ms += round(duration_s * 1000)
        found.waited_ms += round(waited_s * 1000)

    def add_many(
        self,
        *,
        model: str,
        key: str,
        adapter: str,
        requests: int,
        tokens: tuple[int, int, int],
        ms: int,
        now: datetime,
    ) -> None:
        """So many requests have ended of late that were answered in one piece, after `ms` in all: prompt, cached and
        completion tokens of them."""
        found = self._tally.sum_of(model, key, adapter, now)
        found.requests += requests
        found.prompt_tokens += tokens[0]
        found.cached_tokens += tokens[1]
        found.completion_tokens += tokens[2]
        found.first_token_ms += ms
        found.first_tokens += requests
        found.duration_ms += ms

    async def run(self) -> None:
        """Tells it until cancelled; what the log does not take is tried again, less and less often."""
        pause_s = EVERY_S
        while True:
            await asyncio.sleep(pause_s)
            refused = not await self._tell() and self._events.connected
            pause_s = min(pause_s * 2, LONGEST_PAUSE_S) if refused else EVERY_S

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
        return True
