"""Runs real gateways on a log in memory with engines in this process; the test is the control plane.

`Yard.put…` append what the control plane and the agent would; `Yard.activates` are the wishes that came.
"""

import asyncio
import contextlib
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import httpx
import msgspec

from events.log import Draft, StoredCommand
from events.memory import MemoryLog, MemoryWire
from events.memory_broker import MemoryBroker
from events.secrets import engine_key, node_secret
from events.subjects import event_subject
from gateway import description
from gateway.accesslog import AccessLog
from gateway.app import RunningGateway, run_gateway
from gateway.keys import engine_keys
from schemas.beacons import GatewayBeacon
from schemas.commands import ModelActivate
from schemas.messages import Event, State
from schemas.node import NodeStarted
from schemas.replica import ReplicaPhase
from schemas.settings import GatewaySettings
from tests.support.aio import until
from tests.support.fake_engine import FakeEngine
from tests.support.gateway_world import NOW, Story, a_replica
from tests.support.openapi import Described

YARD_SECRET = "a-secret-of-this-test"


@dataclass
class Yard:
    """One broker, the test's own log on it, and the gateways and engines made so far."""

    broker: MemoryBroker
    log: MemoryLog
    data: Path
    story: Story = field(default_factory=Story)
    heads: dict[str, tuple[int, int]] = field(default_factory=dict)
    epochs: dict[str, int] = field(default_factory=dict)
    access: list[bytes] = field(default_factory=list)
    beacons: list[GatewayBeacon] = field(default_factory=list)
    logs: dict[str, MemoryLog] = field(default_factory=dict)
    engines: list[FakeEngine] = field(default_factory=list)
    stack: contextlib.AsyncExitStack = field(default_factory=contextlib.AsyncExitStack)

    async def put(self, noun: str, key: tuple[str, ...], event: Event, state: State | None) -> int:
        """Appends one event; returns its sequence."""
        subject = event_subject(noun, *key)
        seq, rev = self.heads.get(subject, (0, 0))
        draft = Draft(subject=subject, event=event, state=state, expected_seq=seq, rev=rev + 1)
        of_agent = noun in ("node", "card", "replica", "slots")
        epoch = self.epochs.get(key[0], 1) if of_agent else 1
        appended = await self.log.append(draft, epoch=epoch)
        self.heads[subject] = (appended.seqs[0], rev + 1)
        if isinstance(event, NodeStarted):
            self.epochs[key[0]] = appended.seqs[0]
        return appended.seqs[0]

    async def tell(self, made: Any) -> int:
        """Appends what a method of `Story` made: `await yard.tell(yard.story.model("m"))`."""
        return await self.put(made.noun, made.key, made.event, made.state)

    async def model(self, name: str = "m", **fields: Any) -> int:
        return await self.tell(self.story.model(name, **fields))

    async def activation(self, phase: Any = "loading", **fields: Any) -> int:
        return await self.tell(self.story.activation(phase, **fields))

    async def cards(self, node: str = "n1", *ids: str, **fields: Any) -> int:
        """What an agent tells of its machine: its cards."""
        return await self.tell(self.story.cards(node, *ids, **fields))

    async def engine(self, **fields: Any) -> FakeEngine:
        """An engine that listens."""
        engine = FakeEngine(**fields)
        await engine.start()
        self.engines.append(engine)
        return engine

    async def replica(
        self,
        engine: FakeEngine | None,
        id: str = "r-1",
        phase: ReplicaPhase = "ready",
        **fields: Any,
    ) -> int:
        """What the agent writes about a replica; with an engine, its endpoint and key."""
        if engine is not None:
            fields.setdefault("endpoint", engine.endpoint)
            fields.setdefault("pid", engine.port)
            if fields.get("has_key"):
                engine.key = engine_key(node_secret(YARD_SECRET, fields.get("node", "n1")), id)
        made = self.story.replica(id, phase, **fields)
        return await self.tell(made)

    @asynccontextmanager
    async def own_gateway(
        self, id: str = "gw", *, connected: bool = True, **settings: Any
    ) -> AsyncIterator[RunningGateway]:
        """A gateway for the length of a block; its end is a clean SIGTERM."""
        log = MemoryLog(self.broker, source=f"/gateway/{id}")
        if not connected:
            log.connection.disconnect()
        self.logs[id] = log
        settings.setdefault("listen", "127.0.0.1:0")
        settings.setdefault("beacon_s", 0.1)
        settings.setdefault("drain_s", 2.0)
        async with run_gateway(
            id,
            GatewaySettings(**settings),
            data=self.data,
            events=log,
            wire=MemoryWire(log.connection),
            engine_key=engine_keys(YARD_SECRET),
            access=AccessLog(self.access.append),
        ) as running:
            yield running

    async def gateway(self, id: str = "gw", **settings: Any) -> RunningGateway:
        """Starts a gateway; it ends with the yard."""
        return await self.stack.enter_async_context(self.own_gateway(id, **settings))

    def client(self, gateway: RunningGateway, **fields: Any) -> httpx.AsyncClient:
        """One whose answers must be those that the gateway's own description allows."""
        fields.setdefault("timeout", 20.0)
        fields.setdefault("event_hooks", {"response": [described().hook]})
        return httpx.AsyncClient(base_url=f"http://127.0.0.1:{gateway.port}", **fields)

    async def activates(self) -> list[StoredCommand]:
        """Every wish stored so far."""
        follower = self.log.follow_commands(after=0)
        try:
            async with asyncio.timeout(0.05):
                stored = list(await follower.next())
        except TimeoutError:
            stored = []
        finally:
            await follower.close()
        return stored

    async def wish(self, timeout_s: float = 5.0, after: int = 0) -> ModelActivate:
        """The first wish stored behind `after`."""
        follower = self.log.follow_commands(after=after)
        try:
            async with asyncio.timeout(timeout_s):
                stored = await follower.next()
        finally:
            await follower.close()
        command = stored[0].command
        assert command is not None
        assert isinstance(command.body, ModelActivate)
        return command.body

    async def applied(self, gateway: RunningGateway, seq: int) -> None:
        """Waits until the gateway has read the event."""

        def there() -> bool:
            table = gateway.gateway.table
            return table is not None and table.position >= seq

        await until(there, f"event {seq} to be applied")


@cache
def described() -> Described:
    """What the gateway says of itself."""
    return Described(
        msgspec.json.decode(description.page()), errors=("ErrorBody", "AnthropicError")
    )


@asynccontextmanager
async def memory_yard(data: Path) -> AsyncIterator[Yard]:
    """A yard that ends all it started."""
    broker = MemoryBroker()
    log = MemoryLog(broker, source="/cp/test")
    yard = Yard(broker=broker, log=log, data=data)
    wire = MemoryWire(log.connection)
    heard = await wire.on_beacon("gateway", GatewayBeacon, lambda _, b: yard.beacons.append(b))
    try:
        async with yard.stack:
            yield yard
    finally:
        for engine in yard.engines:
            await engine.kill()
        await heard.close()


def chat(model: str = "m", **fields: Any) -> dict[str, Any]:
    """The body of a short chat."""
    return {"model": model, "messages": [{"role": "user", "content": "hello"}], **fields}


__all__ = ["NOW", "FakeEngine", "Yard", "a_replica", "chat", "memory_yard"]
