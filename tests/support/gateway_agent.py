"""A node's agent as a gateway meets it: it answers asks for adapters, hears beacons and sends its own when told.

It loads at once and evicts when the test says; what it says to an ask can be scripted (`script`) or held (`gate`).
Its engines are those of the test, whose `names` it keeps. What real agents decide is not here.
"""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

import httpx

from events.memory import MemoryLog, MemoryWire
from gateway.app import RunningGateway
from gateway.clock import LoopClock
from schemas.adapterasks import Ensure, EnsureAnswer
from schemas.adapternames import engine_name, pin_name
from schemas.beacons import AgentBeacon, GatewayBeacon
from schemas.slots import Slot
from tests.support.fake_engine import FakeEngine
from tests.support.gateway_world import NOW
from tests.support.gateway_yard import Yard


@dataclass
class FakeAgent:
    """`asks` are all that came. `tells`: whether loads become `slots` events. `echoes`: whether its beacons say
    what it heard. `answers` are taken first, one for each ask; a callable makes one of the ask."""

    yard: Yard
    node: str
    wire: MemoryWire
    engines: dict[str, FakeEngine] = field(default_factory=dict)
    limit: int = 4
    tells: bool = True
    gate: asyncio.Event = field(default_factory=asyncio.Event)
    asks: list[Ensure] = field(default_factory=list)
    answers: list[EnsureAnswer | Callable[[Ensure], EnsureAnswer]] = field(default_factory=list)
    loads: list[tuple[str, str]] = field(default_factory=list)
    heard: dict[str, GatewayBeacon] = field(default_factory=dict)
    beacons: list[GatewayBeacon] = field(default_factory=list)
    slots: dict[str, dict[str, Slot]] = field(default_factory=dict)
    changed: asyncio.Condition = field(default_factory=asyncio.Condition)

    def __post_init__(self) -> None:
        self.gate.set()

    async def on_ask(self, ask: Ensure) -> EnsureAnswer:
        self.asks.append(ask)
        async with self.changed:
            self.changed.notify_all()
        if self.answers:
            scripted = self.answers.pop(0)
            return scripted if isinstance(scripted, EnsureAnswer) else scripted(ask)
        try:
            async with asyncio.timeout(ask.wait_s):
                await self.gate.wait()
        except TimeoutError:
            return EnsureAnswer(status="loading", how="loaded")
        return await self.load(ask)

    async def load(self, ask: Ensure) -> EnsureAnswer:
        """What an agent does that has room: a hit, or one load."""
        pin = pin_name(ask.adapter, ask.version)
        here = self.slots.setdefault(ask.replica, {})
        name = engine_name(ask.adapter, ask.version)
        if pin in here and ask.gone != name:
            return EnsureAnswer(status="ready", engine_name=name, how="hit")
        engine = self.engines[ask.replica]
        assert engine.names is not None
        engine.names.add(name)
        self.loads.append((ask.replica, ask.adapter))
        here[pin] = Slot(adapter=ask.adapter, version=ask.version, since=NOW)
        if self.tells:
            await self.tell(ask.replica)
        return EnsureAnswer(status="ready", engine_name=name, how="loaded", load_s=0.01)

    async def tell(self, replica: str, **fields: Any) -> int:
        """Its `slots` event as things are."""
        loaded = self.slots.get(replica, {}).values()
        fields.setdefault("limit", self.limit)
        made = self.yard.story.slots(replica, *loaded, node=self.node, **fields)
        return await self.yard.tell(made)

    async def evict(self, replica: str, adapter: str) -> int:
        """The engine forgets it, and the log says so."""
        here = self.slots[replica]
        for pin, slot in list(here.items()):
            if slot.adapter == adapter:
                del here[pin]
                names = self.engines[replica].names
                assert names is not None
                names.discard(engine_name(slot.adapter, slot.version))
        return await self.tell(replica)

    def on_beacon(self, _: str, beacon: GatewayBeacon) -> None:
        self.heard[beacon.gateway] = beacon
        self.beacons.append(beacon)

    async def beacon(self, *, echoes: bool = True, **fields: Any) -> None:
        """Sends its beacon now."""
        heard = {g: b.n for g, b in self.heard.items()} if echoes else {}
        whose = {g: b.incarnation for g, b in self.heard.items()} if echoes else {}
        defaults: dict[str, Any] = {"epoch": 1, "position": 0, "heard": heard, "heard_from": whose}
        body = AgentBeacon(node=self.node, **(defaults | fields))
        await self.wire.beacon("agent", self.node, body)

    async def until_asked(self, count: int, timeout_s: float = 10.0) -> None:
        async with asyncio.timeout(timeout_s), self.changed:
            await self.changed.wait_for(lambda: len(self.asks) >= count)


@asynccontextmanager
async def agent(yard: Yard, node: str = "n1", **fields: Any) -> AsyncIterator[FakeAgent]:
    """An agent that answers for a node for the length of the block."""
    log = MemoryLog(yard.broker, source=f"/agent/{node}")
    made = FakeAgent(yard=yard, node=node, wire=MemoryWire(log.connection), **fields)
    serving = await made.wire.serve("adapters", node, Ensure, made.on_ask)
    hearing = await made.wire.on_beacon("gateway", GatewayBeacon, made.on_beacon)
    try:
        yield made
    finally:
        await serving.close()
        await hearing.close()


async def a_replica_with_slots(
    yard: Yard, made: FakeAgent, id: str = "r-1", **fields: Any
) -> FakeEngine:
    """An engine that loads adapters, ready, under an agent."""
    engine = await yard.engine(names=set())
    made.engines[id] = engine
    fields.setdefault("adapter_slots", made.limit)
    await yard.replica(engine, id, node=made.node, **fields)
    return engine


async def a_yard_with(yard: Yard, made: FakeAgent, *replicas: str) -> list[FakeEngine]:
    """The model `m`, its adapter `poet`, and replicas that load adapters."""
    await yard.model(max_loaded_adapters=4, aliases=("em",))
    await yard.tell(yard.story.adapter("poet", aliases=("rhymer",)))
    return [await a_replica_with_slots(yard, made, id) for id in replicas or ("r-1",)]


def refused(**fields: Any) -> EnsureAnswer:
    defaults: dict[str, Any] = {"code": "load_failed", "sentence": "the engine said no"}
    return EnsureAnswer(status="refused", **(defaults | fields))


def for_now(**fields: Any) -> EnsureAnswer:
    """A refusal that is remembered for half a minute."""
    return refused(until=LoopClock().now() + timedelta(seconds=30), **fields)


def nothing_left(gateway: RunningGateway) -> None:
    """What every story must end with: no question, no waiter, nothing counted as running."""
    state = gateway.gateway
    assert gateway.adapters.open_questions == 0
    assert state.open_tickets == 0
    assert dict(state.usage.by_replica) == {}
    told = state.pins.tell(1_000_000, state.clock.now_s())
    assert all(pin.uses == 0 for pins in told.values() for pin in pins.values())


def error(answer: httpx.Response) -> tuple[int, str, str]:
    told = answer.json()["error"]
    return answer.status_code, told["code"], told["message"]


__all__ = [
    "EnsureAnswer",
    "FakeAgent",
    "a_replica_with_slots",
    "a_yard_with",
    "agent",
    "error",
    "for_now",
    "nothing_left",
    "refused",
]
