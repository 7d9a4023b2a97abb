"""Hears the gateways' beacons and sends the agent's own: who is alive, and what is in use.

Silence is measured on the monotonic clock of this process. It only remembers and repeats; what silence
means for a drain is decided by `domain/drains.py`.
"""

import asyncio
from collections.abc import Awaitable, Callable, Mapping

from events.log import Wire
from nodeagent.domain.drains import GatewayHeard
from schemas.beacons import AgentBeacon, EngineCounters, GatewayBeacon

FORGET_S = 3600.0


class Gateways:
    """The last beacon of every gateway, and since when this agent can hear any."""

    def __init__(self, *, monotonic: Callable[[], float], connected: Callable[[], bool]) -> None:
        self._monotonic = monotonic
        self._connected = connected
        self._since: float | None = None
        self._heard: dict[str, tuple[GatewayBeacon, float]] = {}
        self.on_heard: Callable[[], None] = lambda: None

    def hear(self, name: str, beacon: GatewayBeacon) -> None:
        self._heard[name] = (beacon, self._monotonic())
        self.on_heard()

    def connection_lost(self) -> None:
        """What was heard before says nothing about now; listening begins anew."""
        self._since = None

    def connected_s(self) -> float | None:
        """Seconds since the connection stands, as far as anybody looked; None while there is none."""
        if not self._connected():
            self._since = None
            return None
        now = self._monotonic()
        if self._since is None:
            self._since = now
        return now - self._since

    def about(self, replica: str, model: str) -> tuple[GatewayHeard, ...]:
        """What each gateway said last about a replica, by name."""
        now = self._monotonic()
        for name in [n for n, (_, at) in self._heard.items() if now - at > FORGET_S]:
            del self._heard[name]
        return tuple(
            GatewayHeard(
                name=name,
                age_s=now - at,
                position=beacon.position,
                inflight=beacon.inflight.get(replica, 0),
                waiting=beacon.waiting.get(model, 0),
                leaving=beacon.leaving,
            )
            for name, (beacon, at) in sorted(self._heard.items())
        )

    def numbers(self) -> dict[str, int]:
        """The last beacon number heard of each gateway."""
        return {name: beacon.n for name, (beacon, _) in sorted(self._heard.items())}


class Pulse:
    """Sends the agent's beacon. Engines are asked for their counters just before each."""

    def __init__(
        self,
        wire: Wire,
        gateways: Gateways,
        *,
        node: str,
        every_s: float,
        epoch: Callable[[], int],
        position: Callable[[], int],
        counters: Callable[[], Awaitable[Mapping[str, EngineCounters]]],
    ) -> None:
        self._wire = wire
        self._gateways = gateways
        self._node = node
        self._every_s = every_s
        self._epoch = epoch
        self._position = position
        self._counters = counters
        self._now = asyncio.Event()

    def beat_now(self) -> None:
        """Sends the next beacon at once."""
        self._now.set()

    async def run(self) -> None:
        """Beats until cancelled; not before the node is registered."""
        while True:
            if self._epoch():
                await self.beat()
            # Looking keeps the age of the connection right when no drain looks.
            self._gateways.connected_s()
            try:
                async with asyncio.timeout(self._every_s):
                    await self._now.wait()
            except TimeoutError:
                continue
            self._now.clear()

    async def beat(self, *, leaving: bool = False) -> None:
        counters: Mapping[str, EngineCounters] = {} if leaving else await self._counters()
        await self._wire.beacon(
            "agent",
            self._node,
            AgentBeacon(
                node=self._node,
                epoch=self._epoch(),
                position=self._position(),
                replicas=dict(counters),
                heard=self._gateways.numbers(),
                leaving=leaving,
            ),
        )
