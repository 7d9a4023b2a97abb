"""Counts the gateways that have read the log up to an event, from the beacons they send.

It asks nobody: a gateway tells its position every second. One that cannot reach NATS is not heard, and not
counted.
"""

import asyncio
from typing import Final

from msgspec import Struct

from events.log import Wire
from schemas.beacons import GatewayBeacon

LISTEN_S: Final = 2.5
"""Long enough for two beacons of every gateway: after that who was not heard is not there."""
PATIENCE_S: Final = 10.0
"""How long those that are behind are waited for."""


class Reached(Struct, frozen=True, kw_only=True):
    """Names of gateways, sorted: who has read the event, who is heard and has not yet."""

    known_to: tuple[str, ...] = ()
    behind: tuple[str, ...] = ()


class GatewaysHeard:
    """Listens while it is entered. The last beacon of each name counts; one that leaves counts no more."""

    def __init__(
        self, wire: Wire, *, listen_s: float = LISTEN_S, patience_s: float = PATIENCE_S
    ) -> None:
        self._wire = wire
        self._listen_s = listen_s
        self._patience_s = patience_s
        self._positions: dict[str, int] = {}
        self._news = asyncio.Event()
        self._opened_at = 0.0

    async def __aenter__(self) -> "GatewaysHeard":
        self._subscription = await self._wire.on_beacon("gateway", GatewayBeacon, self._hear)
        self._opened_at = asyncio.get_running_loop().time()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._subscription.close()

    def _hear(self, name: str, beacon: GatewayBeacon) -> None:
        if beacon.leaving:
            self._positions.pop(name, None)
        else:
            self._positions[name] = beacon.position
        self._news.set()

    async def reached(self, seq: int) -> Reached:
        """Returns once everyone heard has read event `seq`, at the latest after the patience."""
        loop = asyncio.get_running_loop()
        heard_at = self._opened_at + self._listen_s
        until = max(loop.time(), heard_at) + self._patience_s
        while True:
            behind = tuple(sorted(name for name, at in self._positions.items() if at < seq))
            now = loop.time()
            if (now >= heard_at and not behind) or now >= until:
                known_to = tuple(sorted(self._positions.keys() - set(behind)))
                return Reached(known_to=known_to, behind=behind)
            self._news.clear()
            try:
                async with asyncio.timeout_at(until if now >= heard_at else heard_at):
                    await self._news.wait()
            except TimeoutError:
                continue
