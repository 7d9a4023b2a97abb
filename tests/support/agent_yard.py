"""A node agent in a test: the real launcher and real processes, the log in memory or on a server, a hand that plays
control plane and gateways."""

import asyncio
import contextlib
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import psutil

from events.ids import utc_now
from events.log import Broken, Draft, EventLog, Recorded, Unavailable, Wire
from events.memory import MemoryLog, MemoryWire
from events.memory_broker import MemoryBroker
from events.subjects import event_subject
from nodeagent.agent import Agent
from nodeagent.app import Times, open_agent
from nodeagent.books import Books
from nodeagent.cards.provider import Provider
from nodeagent.domain.assignments import Held
from nodeagent.domain.ports import PortBook
from nodeagent.drivers.command import CommandDriver
from nodeagent.drivers.driver import Driver, SecretMissing
from nodeagent.journal import Journal, Memory
from nodeagent.launching import Launcher
from nodeagent.reporter import Reporter
from schemas.beacons import GatewayBeacon
from schemas.card import Card
from schemas.model import EngineName
from schemas.node import CardInfo, EngineInfo, Node
from schemas.plan import Launch, Plan, PlanChanged, PlanItem, Stop
from schemas.replica import Replica
from schemas.settings import GIB, MIB, NodeagentSettings
from tests.support.ports import engine_ports

SCRIPTED = Path(__file__).parents[1] / "engines" / "scripted.py"
LONG_AGO = datetime(2026, 1, 1, tzinfo=UTC)
QUICK = Times(listen_s=0.2, plan_grace_s=0.3, retry_s=0.05, endings_look_s=0.05, leave_s=1.0)


def a_launch(*flags: str, **fields: Any) -> Launch:
    """A scripted engine with these flags."""
    given: dict[str, Any] = {
        "model": "m",
        "incarnation": "i-1",
        "profile": "p",
        "revision": "rev-1",
        "engine": "command",
        "command": (sys.executable, "-I", "-S", str(SCRIPTED), "--port", "${PORT}", *flags),
        "key_env": "API_KEY",
        **fields,
    }
    return Launch(**given)


def an_item(replica: str, *flags: str, **fields: Any) -> PlanItem:
    """A plan item of a scripted engine; `launch` may be given, else it is made of the flags."""
    given: dict[str, Any] = {
        "launch": a_launch(*flags),
        "cards": ("cpu",),
        "memory_bytes": 256 * MIB,
        "decided_at": utc_now(),
        "cause": "e-cause",
        **fields,
    }
    return PlanItem(replica=replica, **given)


def a_stop(decision: str = "d-1", **fields: Any) -> Stop:
    given: dict[str, Any] = {"reason": "idle", "decided_at": utc_now(), **fields}
    return Stop(decision=decision, **given)


def some_books(
    journal: Journal, memory: Memory, reporter: Reporter, now: Callable[[], datetime]
) -> Books:
    """The books of node n1, with a few ports to give."""
    return Books(
        node="n1",
        prefix="yard",
        memory=memory,
        book=PortBook(first=20000, last=20010, rest_s=600.0),
        journal=journal,
        reporter=reporter,
        now=now,
    )


def a_held(id: str = "r-1", phase: str = "ready", **fields: Any) -> Held:
    """A replica as the agent holds it; fields of Held go there, the others into its state."""
    outer = {k: fields.pop(k) for k in ("stop", "ending", "launch", "port", "cause") if k in fields}
    given: dict[str, Any] = {
        "node": "n1",
        "model": "m",
        "incarnation": "i-1",
        "profile": "p",
        "revision": "rev-1",
        "engine": "command",
        "phase": phase,
        "since": LONG_AGO,
        "epoch": 5,
        **fields,
    }
    return Held(replica=Replica(id=id, **given), **outer)


def a_node(id: str = "n1", **fields: Any) -> Node:
    given: dict[str, Any] = {
        "running": True,
        "started_at": utc_now(),
        "host": "testhost",
        "pid": 1,
        "version": "t",
        "cards": (CardInfo(id="cpu", kind="cpu", memory_bytes=4 * GIB),),
        "engines": (EngineInfo(name="command", version="1"),),
        "allow_commands": True,
        **fields,
    }
    return Node(id=id, **given)


def no_secrets(name: str) -> str:
    raise SecretMissing(f"no secret {name}")


@dataclass(slots=True)
class Hand:
    """Plays the control plane and the gateways of one node, and remembers every event of it."""

    log: EventLog
    wire: Wire
    node: str = "n1"
    items: dict[str, PlanItem] = field(default_factory=dict)
    seen: list[Recorded] = field(default_factory=list)
    seq: int = 0
    rev: int = 0
    changed: asyncio.Event = field(default_factory=asyncio.Event)
    beat: int = 0

    async def plan(self, *items: PlanItem) -> int:
        """Writes a plan of exactly these items; its sequence."""
        self.items = {item.replica: item for item in items}
        self.rev += 1
        draft = Draft(
            subject=event_subject("plan", self.node),
            event=PlanChanged(),
            state=Plan(node=self.node, items=items),
            expected_seq=self.seq,
            rev=self.rev,
        )
        async with asyncio.timeout(15):
            while True:
                try:
                    stored = await self.log.append(draft, epoch=1)
                except Unavailable:  # a server that was just started again
                    await asyncio.sleep(0.05)
                else:
                    break
        self.seq = stored.seqs[0]
        return self.seq

    async def watch(self) -> None:
        """Remembers everything the node says, until cancelled."""
        follower = self.log.follow(["yard.evt.>"])
        try:
            while True:
                batch = await follower.next()
                for item in batch.items:
                    assert not isinstance(item, Broken), item
                    self.seen.append(item)
                self.changed.set()
        finally:
            await follower.close()

    async def expect(
        self, condition: Callable[[], object], what: str, timeout_s: float = 10.0
    ) -> None:
        """Waits until `condition` holds of what was seen."""
        try:
            async with asyncio.timeout(timeout_s):
                while not condition():
                    self.changed.clear()
                    await self.changed.wait()
        except TimeoutError:
            raise AssertionError(f"waited {timeout_s} s for {what}; seen: {self.story()}") from None

    async def phase(self, replica: str, phase: str, timeout_s: float = 10.0) -> Replica:
        """Waits until the replica's last state is of this phase."""
        await self.expect(
            lambda: (r := self.replica(replica)) is not None and r.phase == phase,
            f"{replica} to be {phase}",
            timeout_s,
        )
        found = self.replica(replica)
        assert found is not None
        return found

    async def beacons(self, every_s: float = 0.05, **fields: Any) -> None:
        """Beats as gateway g1 at the newest position, until cancelled. `fields` may change meanwhile."""
        while True:
            await self.beacon(**fields)
            await asyncio.sleep(every_s)

    async def beacon(self, name: str = "g1", **fields: Any) -> None:
        self.beat += 1
        position = self.seen[-1].seq if self.seen else 0
        given: dict[str, Any] = {"position": position, **fields}
        body = GatewayBeacon(gateway=name, incarnation="x", n=self.beat, **given)
        await self.wire.beacon("gateway", name, body)

    def replica(self, name: str) -> Replica | None:
        for item in reversed(self.seen):
            if item.noun == "replica" and item.key[1] == name:
                return item.state if isinstance(item.state, Replica) else None
        return None

    def card(self, name: str = "cpu") -> Card | None:
        for item in reversed(self.seen):
            if item.noun == "card" and item.key[1] == name and isinstance(item.state, Card):
                return item.state
        return None

    def types(self, replica: str | None = None, noun: str | None = None) -> list[str]:
        """The event types in order, of one replica or one noun."""
        return [
            item.type
            for item in self.seen
            if (replica is None or (item.noun == "replica" and item.key[1] == replica))
            and (noun is None or item.noun == noun)
        ]

    def story(self) -> str:
        return "; ".join(f"{i.seq} {i.type} {'/'.join(i.key)} {i.reason}" for i in self.seen)


@dataclass(slots=True)
class Running:
    """A running agent and how to end it."""

    agent: Agent
    task: "asyncio.Task[None]"
    stopping: asyncio.Event
    stop_engines: bool = False

    async def leave(self, *, stop_engines: bool = False) -> None:
        """As SIGTERM (or SIGINT) would."""
        self.stop_engines = stop_engines
        self.stopping.set()
        await self.task

    async def die(self) -> None:
        """As kill -9 would, as far as the log and the engines are concerned: no last word."""
        self.task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await self.task


@asynccontextmanager
async def running_agent(
    folder: Path,
    log: EventLog,
    wire: Wire,
    *,
    node: Node | None = None,
    times: Times = QUICK,
    drivers: Mapping[EngineName, Driver] | None = None,
    key_of: Callable[[str], str] = lambda launch: f"key-of-{launch}",
    ports: range | None = None,
    mirror_token: str = "",
    gpus: Provider | None = None,
    make_launcher: Callable[[Path, Path], Launcher] = Launcher,
    **settings: Any,
) -> AsyncIterator[Running]:
    """An agent on `folder`; at the end it leaves unless it was ended before."""
    node = node or a_node()
    ports = engine_ports() if ports is None else ports
    given: dict[str, Any] = {
        "port_first": ports[0],
        "port_last": ports[-1],
        "beacon_s": 0.1,
        "stop_grace_s": 2.0,
        "gateway_gone_s": 1.0,
        "allow_commands": node.allow_commands,
        **settings,
    }
    async with open_agent(
        node=node,
        folder=folder,
        settings=NodeagentSettings(**given),
        log=log,
        wire=wire,
        drivers=drivers or {"command": CommandDriver()},
        key_of=key_of,
        secrets=no_secrets,
        mirror_token=mirror_token,
        gpus=gpus,
        times=times,
        make_launcher=make_launcher,
    ) as agent:
        stopping = asyncio.Event()
        holder: list[Running] = []
        task = asyncio.create_task(
            agent.run(stopping, lambda: holder[0].stop_engines), name="agent"
        )
        running = Running(agent=agent, task=task, stopping=stopping)
        holder.append(running)
        try:
            yield running
        finally:
            if not task.done():
                # Whatever a test leaves behind must not outlive it.
                running.stop_engines = True
                stopping.set()
            results = await asyncio.gather(task, return_exceptions=True)
    for result in results:
        if isinstance(result, Exception):
            raise result


@asynccontextmanager
async def beside(*work: Awaitable[Any]) -> AsyncIterator[None]:
    """Runs coroutines beside the body and cancels them after it; a failure of theirs is told."""
    tasks = [asyncio.ensure_future(one) for one in work]
    try:
        yield
    finally:
        for task in tasks:
            task.cancel()
        for result in await asyncio.gather(*tasks, return_exceptions=True):
            if isinstance(result, Exception):
                raise result


@dataclass(slots=True)
class MemoryYard:
    """A log in memory, a hand on it, and a connection of its own for each agent."""

    folder: Path
    broker: MemoryBroker
    hand: Hand
    logs: list[MemoryLog] = field(default_factory=list)

    def agent(self, folder: str = "nodeagent", **fields: Any) -> Any:
        """An agent on its own connection (`logs[-1]`), to be entered."""
        node = fields.get("node")
        log = MemoryLog(self.broker, source=f"/agent/{node.id if node else 'n1'}")
        self.logs.append(log)
        return running_agent(self.folder / folder, log, MemoryWire(log.connection), **fields)

    def cut(self) -> None:
        """The agents lose their connections."""
        for log in self.logs:
            log.connection.disconnect()

    def mend(self) -> None:
        """The agents' connections are back."""
        for log in self.logs:
            log.connection.reconnect()

    def lose_journal(self) -> None:
        """What a dead agent remembered on its disk is gone."""
        for file in (self.folder / "nodeagent").glob("journal.sqlite*"):
            file.unlink()


@asynccontextmanager
async def memory_yard(folder: Path, *, gateway: bool = True) -> AsyncIterator[MemoryYard]:
    """A yard in memory whose hand watches everything and, with `gateway`, beats as an idle gateway."""
    broker = MemoryBroker()
    log = MemoryLog(broker)
    hand = Hand(log, MemoryWire(log.connection))
    work = [hand.watch()]
    if gateway:
        work.append(hand.beacons())
    async with beside(*work):
        yield MemoryYard(folder=folder, broker=broker, hand=hand)


def alive(pid: int | None) -> bool:
    """Whether a process runs; one in state Z is dead."""
    if pid is None:
        return False
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False
