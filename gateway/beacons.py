"""Tells the yard what this gateway has in use: every second, and at once when it begins, ends or a drain comes.

Beacons decide whether engines are stopped and adapters evicted, so they only ever repeat what
gateway/domain/usage.py and pins.py counted; a beacon that is lost is replaced by the next.
"""

import asyncio
import contextlib
from collections.abc import Callable

from events.log import Wire
from gateway.gateway import Gateway
from gateway.metrics import Metrics
from schemas.beacons import GatewayBeacon

KIND = "gateway"

MIN_GAP_S = 0.02
"""Edges closer than this share one beacon: a busy model crosses 0 and 1 with every request."""


EDGE_DELAY_S = 0.01
"""The request that made an edge goes out to its engine before a beacon tells of it, and so does one whose adapter
is loaded first: what hears a beacon is what it waits for. Nobody waits for a beacon of a mere edge."""


class Beacons:
    """One task, `run`; `edge` wakes it."""

    def __init__(
        self,
        gateway: Gateway,
        wire: Wire,
        metrics: Metrics,
        *,
        incarnation: str,
        told: Callable[[int], None] = lambda n: None,
    ) -> None:
        """`told` hears each beacon's number the moment its contents are fixed."""
        self._gateway = gateway
        self._wire = wire
        self._metrics = metrics
        self._incarnation = incarnation
        self._told = told
        self._n = 0
        self._due = asyncio.Event()
        self._urgent = asyncio.Event()
        self._later: asyncio.TimerHandle | None = None

    def edge(self, urgent: bool) -> None:
        """Something began or ended. `urgent`: somebody waits for exactly this beacon (a drain)."""
        if urgent:
            self._urgent.set()
            self._due.set()
        elif self._later is None:
            self._later = asyncio.get_running_loop().call_later(EDGE_DELAY_S, self._edge)

    def _edge(self) -> None:
        self._later = None
        self._due.set()

    def beacon(self, *, leaving: bool = False) -> GatewayBeacon:
        """What is in use now; counts up `n`."""
        gateway = self._gateway
        self._n += 1
        if leaving:
            gateway.pins.clear()
        pins = gateway.pins.tell(self._n, gateway.clock.now_s())
        self._told(self._n)
        return GatewayBeacon(
            gateway=gateway.id,
            incarnation=self._incarnation,
            n=self._n,
            # A table from a snapshot knows nothing of events since: it confirms none of them.
            position=gateway.table.position if gateway.table is not None and gateway.synced else 0,
            inflight=dict(gateway.usage.by_replica),
            waiting=gateway.waiting(),
            last_use_age_s=gateway.usage.last_use_age_s(gateway.clock.now_s()),
            leaving=leaving,
            pins=pins,
        )

    async def run(self) -> None:
        """Publishes until cancelled."""
        clock = self._gateway.clock
        interval_s = self._gateway.settings.beacon_s
        while True:
            self._due.clear()
            self._urgent.clear()
            await self._wire.beacon(KIND, self._gateway.id, self.beacon())
            sent_s = clock.now_s()
            await _wait(self._due, interval_s)
            now_s = clock.now_s()
            self._metrics.loop_lag.set(max(0.0, now_s - sent_s - interval_s))
            # More edges may come meanwhile; only an urgent one ends the pause.
            await _wait(self._urgent, sent_s + MIN_GAP_S - now_s)

    async def leave(self) -> None:
        """The last word: nothing runs here any more and nothing will."""
        await self._wire.beacon(KIND, self._gateway.id, self.beacon(leaving=True))


async def _wait(event: asyncio.Event, longest_s: float) -> None:
    """Until the event, at most that long. Not wait_for: on 3.11 it may swallow a cancellation."""
    if longest_s <= 0:
        return
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(longest_s):
            await event.wait()
