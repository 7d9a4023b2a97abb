"""Hears the gateways' beacons and sends the agent's own: who is alive, what is in use, what is asked back.

Silence is measured on the monotonic clock of this process. It only remembers and repeats; what silence
means for a drain is decided by `domain/drains.py`, what a pin keeps loaded by `domain/evicting.py`.
"""

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from typing import Final

from events.log import Wire
from nodeagent.domain import pins
from nodeagent.domain.drains import GatewayHeard
from schemas.beacons import AgentBeacon, EngineCounters, GatewayBeacon

FORGET_S = 3600.0

PIN_S: Final = 30.0
"""A pin keeps its adapter loaded so long after the last word of it; gateways trust one for less long."""


class Gateways:
    """The last beacon of every gateway, and since when this agent can hear any.

    `pins` are what they count on. `on_pins` is told what they were before, whenever a beacon changed them.
    """

    def __init__(
        self,
        *,
        monotonic: Callable[[], float],
        connected: Callable[[], bool],
        pin_s: float = PIN_S,
    ) -> None:
        self._monotonic = monotonic
        self._connected = connected
        self._since: float | None = None
        self._heard: dict[str, tuple[GatewayBeacon, float]] = {}
        self.pin_s = pin_s
        self.pins = pins.Pins()
        self.on_heard: Callable[[], None] = lambda: None
        self.on_pins: Callable[[pins.Pins], None] = lambda _: None

    def hear(self, name: str, beacon: GatewayBeacon) -> None:
        at = self._monotonic()
        self._heard[name] = (beacon, at)
        before = self.pins
        self.pins = pins.heard(before, beacon, at, self.pin_s)
        self.on_heard()
        self.on_pins(before)

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

    def incarnations(self) -> dict[str, str]:
        """Of each gateway, the process whose number `numbers` tells."""
        return {name: beacon.incarnation for name, (beacon, _) in sorted(self._heard.items())}


class Pulse:
    """Sends the agent's beacon. Engines are asked for their counters just before each; one that asks pins back does
    not wait for that, and repeats what they told last."""

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
        recall: Callable[[], Mapping[str, tuple[str, ...]]] = dict,
    ) -> None:
        self._wire = wire
        self._gateways = gateways
        self._node = node
        self._every_s = every_s
        self._epoch = epoch
        self._position = position
        self._counters = counters
        self._recall = recall
        self._told: Mapping[str, EngineCounters] = {}
        self._now = asyncio.Event()
        self._whole = True

    def beat_now(self) -> None:
        """Sends the next beacon at once."""
        self._whole = True
        self._now.set()

    def recall_now(self) -> None:
        """What is asked back changed: sends a beacon at once that tells nothing else new."""
        self._now.set()

    async def run(self) -> None:
        """Beats until cancelled; not before the node is registered."""
        loop = asyncio.get_running_loop()
        next_at = loop.time()
        while True:
            whole, self._whole = self._whole, False
            if self._epoch():
                await self.beat(whole=whole)
            # Looking keeps the age of the connection right when no drain looks.
            self._gateways.connected_s()
            if whole:
                next_at = loop.time() + self._every_s
            try:
                async with asyncio.timeout_at(next_at):
                    await self._now.wait()
            except TimeoutError:
                self._whole = True
            self._now.clear()

    async def beat(self, *, leaving: bool = False, whole: bool = True) -> None:
        """Sends one beacon. `whole`: with counters read for it."""
        counters: Mapping[str, EngineCounters] = {}
        if not leaving:
            if whole:
                self._told = await self._counters()
            counters = self._told
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
                heard_from=self._gateways.incarnations(),
                recall={} if leaving else dict(self._recall()),
            ),
        )
