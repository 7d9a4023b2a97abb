"""Tells the other gateways what keys used here, every second and at once when somebody waits for it, and hears theirs.

What that means for a limit is gateway/domain/ledger.py's affair. A beacon that is lost is made up for by the next.
"""

import asyncio
import contextlib
from collections.abc import Mapping

from events.log import Subscription, Wire
from gateway.gateway import Gateway
from gateway.limits import Limits
from schemas.beacons import LimitsBeacon

KIND = "limits"

INTERVAL_S = 1.0

MIN_GAP_S = 0.02
"""Beacons that somebody waits for are never closer than this, however many requests press."""

REST = 4
"""Between two beacons it rests this many times what one takes all gateways' time: each tells its own and hears those
of the others, and with thousands of keys either takes long. Shares then become known later; limits hold as before."""

INTRODUCTION_S = 0.1
"""So long a gateway that begins listens to the others, who answer its first beacon at once."""


class LimitsBeacons:
    """One task, `run`; `introduce` before it, `leave` and `close` after it."""

    def __init__(self, gateway: Gateway, wire: Wire, limits: Limits) -> None:
        self._gateway = gateway
        self._wire = wire
        self._ledger = limits.ledger
        self._pressed = asyncio.Event()
        self._subscription: Subscription | None = None
        limits.on_pressed = self._pressed.set

    def others_inflight(self) -> Mapping[str, int]:
        """Requests at each replica that other gateways told of."""
        return self._ledger.inflight()

    async def introduce(self) -> None:
        """Listens, and makes itself known: before the first request it has heard what others used, and they reckon
        with it. Who is not connected, or in a yard without keys and seats to share, has nobody to wait for."""
        self._subscription = await self._wire.on_beacon(KIND, LimitsBeacon, self._heard)
        table = self._gateway.table
        if table is None or not self._gateway.is_connected():
            return
        if not table.keys.any and not any(e.model.concurrency for e in table.models.values()):
            return
        await self._tell()
        await asyncio.sleep(INTRODUCTION_S)
        await self._tell()

    async def run(self) -> None:
        """Publishes until cancelled."""
        clock = self._gateway.clock
        while True:
            now_s = clock.now_s()
            self._ledger.look(now_s, connected=self._gateway.is_connected())
            self._gateway.line.look_all(changed=False)
            table = self._gateway.table
            if table is not None:
                self._ledger.forget(table.keys.keys, now_s)
            self._pressed.clear()
            began_s = clock.now_s()
            await self._tell()
            gap_s = (clock.now_s() - began_s) * self._ledger.gateways * REST
            gap_s = min(max(gap_s, MIN_GAP_S), INTERVAL_S)
            await asyncio.sleep(gap_s)
            # Not wait_for: on 3.11 it may swallow a cancellation.
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(INTERVAL_S - gap_s):
                    await self._pressed.wait()

    async def leave(self) -> None:
        """The last word: nothing runs here any more; what was used stays used."""
        await self._tell(leaving=True)

    async def close(self) -> None:
        """Listens no more."""
        if self._subscription is not None:
            await self._subscription.close()
            self._subscription = None

    async def _tell(self, *, leaving: bool = False) -> None:
        gateway = self._gateway
        beacon = self._ledger.tell(gateway.clock.now_s(), gateway.usage.by_replica, leaving=leaving)
        await self._wire.beacon(KIND, gateway.id, beacon)

    def _heard(self, _: str, beacon: LimitsBeacon) -> None:
        if self._ledger.hear(beacon, self._gateway.clock.now_s()):
            self._pressed.set()
        if self._gateway.line:
            # A seat may have become free elsewhere, or a part of one may be used now.
            self._gateway.line.look_all(changed=False)

    def seat_free(self) -> None:
        """A request has ended at a replica with few seats: another gateway's may wait for it."""
        if self._ledger.gateways > 1:
            self._pressed.set()
