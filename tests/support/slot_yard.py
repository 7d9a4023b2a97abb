"""A desk for adapters in a test: an engine that does as it is told, files that are there, books on a real journal."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from msgspec.structs import replace

from events.ids import utc_now
from events.memory import MemoryLog
from events.memory_broker import MemoryBroker
from nodeagent.beacons import Gateways
from nodeagent.books import Books
from nodeagent.drivers.command import CommandDriver
from nodeagent.drivers.driver import AdapterDone, AdapterFault, Capabilities, ListedAdapter
from nodeagent.files.fetches import FetchFailed
from nodeagent.journal import Journal
from nodeagent.reporter import Reporter
from nodeagent.slotdesk import SlotDesk
from nodeagent.slotwork import SlotTimes
from schemas import codes
from schemas.adapter import Adapter
from schemas.adapterasks import Ensure, EnsureAnswer, SlotsAnswer, SlotsRequest
from schemas.adapternames import of_engine_name, pin_name
from schemas.beacons import GatewayBeacon, Pin
from schemas.messages import tag_of
from schemas.slots import Slots, SlotsEvent
from tests.support.adapter_files import an_adapter
from tests.support.agent_yard import a_held, a_launch, some_books
from tests.support.aio import run, until

QUICK = SlotTimes(
    load_s=2.0,
    unload_s=0.5,
    list_s=0.5,
    ask_s=0.5,
    audit_s=60.0,
    again_s=0.2,
    rest_s=0.1,
    catalog_s=0.2,
    answered_s=0.0,
)

BUSY = AdapterFault(whose="replica", code=codes.LOAD_FAILED, text="worker died")


class ScriptedEngine(CommandDriver):
    """A driver whose engine lives in the test. It loads what it is told to, unless the test says otherwise.

    `gates` hold the load of an adapter back until they are set. `faults` are answers to the next loads, by
    adapter. `running` are engine-side names with requests. `listing` replaces what it lists. `evicted_in_use` are
    unloads of what ran just then: none of that may ever be.
    """

    capabilities = Capabilities(adapters=True)

    def __init__(self) -> None:
        super().__init__()
        self.loaded: dict[str, str] = {}
        self.calls: list[tuple[str, str]] = []
        self.busy: set[str] = set()
        self.crossed: list[str] = []
        self.gates: dict[str, asyncio.Event] = {}
        self.unload_gate: asyncio.Event | None = None
        self.faults: dict[str, list[AdapterFault | Exception]] = {}
        self.unload_faults: list[AdapterFault] = []
        self.list_faults: list[AdapterFault] = []
        self.running: set[str] | None = set()
        self.evicted_in_use: list[str] = []
        self.keeps: bool = False
        self.has_routes: bool | None = True
        self.most = 0

    def names(self, call: str) -> list[str]:
        """The adapters of these calls, in order."""
        return [name.partition("@")[0] for made, name in self.calls if made == call]

    @contextlib.contextmanager
    def _alone(self, name: str, call: str) -> Any:
        self.calls.append((call, name))
        if name in self.busy:
            self.crossed.append(name)
        self.busy.add(name)
        try:
            yield
        finally:
            self.busy.discard(name)

    async def load_adapter(
        self, endpoint: str, key: str, *, name: str, path: str, timeout_s: float
    ) -> AdapterDone | AdapterFault:
        adapter = (of_engine_name(name) or (name, ""))[0]
        with self._alone(name, "load"):
            if (gate := self.gates.get(adapter)) is not None:
                try:
                    async with asyncio.timeout(timeout_s):
                        await gate.wait()
                except TimeoutError:
                    text = "no answer to the load"
                    return AdapterFault(whose="replica", code=codes.LOAD_TIMEOUT, text=text)
            else:
                await asyncio.sleep(0)
            if queued := self.faults.get(adapter):
                fault = queued.pop(0)
                if isinstance(fault, Exception):
                    raise fault
                return fault
            if name in self.loaded:
                return AdapterDone(already=True)
            self.loaded[name] = path
            self.most = max(self.most, len(self.loaded))
            return AdapterDone()

    async def unload_adapter(
        self, endpoint: str, key: str, *, name: str, timeout_s: float
    ) -> AdapterDone | AdapterFault:
        with self._alone(name, "unload"):
            if name in (self.running or ()):
                self.evicted_in_use.append(name)
            if self.unload_gate is not None:
                try:
                    async with asyncio.timeout(timeout_s):
                        await self.unload_gate.wait()
                except TimeoutError:
                    return AdapterFault(whose="replica", code=codes.LOAD_FAILED, text="late")
            await asyncio.sleep(0)
            if self.unload_faults:
                return self.unload_faults.pop(0)
            if self.keeps:
                return AdapterDone()
            return AdapterDone(already=self.loaded.pop(name, None) is None)

    async def list_adapters(
        self, endpoint: str, key: str
    ) -> tuple[ListedAdapter, ...] | AdapterFault:
        self.calls.append(("list", ""))
        told = tuple(ListedAdapter(name=n, root=r) for n, r in self.loaded.items())
        await asyncio.sleep(0)
        return self.list_faults.pop(0) if self.list_faults else told

    async def running_adapters(self, endpoint: str, key: str) -> frozenset[str] | None:
        return None if self.running is None else frozenset(self.running)

    async def loads_adapters(self, endpoint: str, key: str) -> bool | None:
        return self.has_routes


@dataclass
class SomeFiles:
    """Files of adapters that are there; `missing` cannot be had."""

    root: Path
    adapters: dict[str, Adapter] = field(default_factory=dict)
    missing: set[str] = field(default_factory=set)
    kept: dict[str, frozenset[str]] = field(default_factory=dict)
    synced: bool = True
    on_change: Callable[[frozenset[str]], None] = lambda _: None

    def adapter(self, name: str) -> Adapter | None:
        return self.adapters.get(name)

    def folder(self, adapter: Adapter) -> Path:
        return self.root / adapter.files[0].key

    async def obtain(self, adapter: Adapter) -> Path:
        if adapter.name in self.missing:
            raise FetchFailed("disk_full", f"no room for {adapter.name}")
        return self.folder(adapter)

    def keep(self, replica: str, sets: frozenset[str]) -> None:
        self.kept[replica] = sets

    def give_back(self, replica: str) -> None:
        self.kept.pop(replica, None)

    def put(self, name: str, **fields: Any) -> Adapter:
        """The catalog tells of an adapter."""
        given = {"base_incarnation": "i-1", **fields}
        self.adapters[name] = an_adapter(name, **given)
        self.on_change(frozenset({name}))
        return self.adapters[name]

    def drop(self, name: str) -> None:
        del self.adapters[name]
        self.on_change(frozenset({name}))


@dataclass
class SlotYard:
    """One node's desk and what it works with. `said` are the slots events in order, `reasons` theirs."""

    desk: SlotDesk
    books: Books
    gateways: Gateways
    files: SomeFiles
    engine: ScriptedEngine
    said: list[tuple[Slots, SlotsEvent]] = field(default_factory=list)
    reasons: list[str] = field(default_factory=list)
    recalls: list[Mapping[str, tuple[str, ...]]] = field(default_factory=list)
    up: bool = True
    beats: int = 0
    running: "asyncio.Task[None] | None" = None

    def serve(
        self,
        name: str = "r-1",
        *,
        slots: int = 2,
        room: int | None = None,
        adopted: bool = False,
        **fields: Any,
    ) -> None:
        """A replica is ready that keeps so many adapters; its engine has room for `room`, one more by default."""
        args = () if room is None else ("--max-cpu-loras", str(room))
        given: dict[str, Any] = {
            "adapter_slots": slots,
            "endpoint": "http://engine",
            "engine": "vllm",
            "launch": a_launch(engine="vllm", args=args, command=(), adapters=slots),
            **fields,
        }
        held = a_held(name, "ready", **given)
        self.books.held[name] = held
        self.desk.serve(name, adopted=adopted)

    def phase(self, phase: Any, name: str = "r-1") -> None:
        held = self.books.held[name]
        self.books.held[name] = replace(held, replica=replace(held.replica, phase=phase))

    async def ask(self, adapter: str, gateway: str = "g1", **fields: Any) -> EnsureAnswer:
        known = self.files.adapters.get(adapter)
        given: dict[str, Any] = {
            "replica": "r-1",
            "version": known.version if known is not None else "0123456789ab",
            "incarnation": "i1",
            "n": self.beats,
            **fields,
        }
        return await self.desk.ensure(Ensure(adapter=adapter, gateway=gateway, **given))

    async def have(self, adapter: str, **fields: Any) -> EnsureAnswer:
        """Asks and expects it."""
        answer = await self.ask(adapter, **fields)
        assert answer.status == "ready", answer
        return answer

    async def person(self, ask: Any, wait_s: float = 2.0) -> SlotsAnswer:
        return await self.desk.ask(SlotsRequest(ask=ask, wait_s=wait_s))

    def beat(
        self,
        pins: Mapping[str, int | None] | None = None,
        gateway: str = "g1",
        replica: str = "r-1",
    ) -> None:
        """A beacon: `pins` by adapter, requests running now."""
        self.beats += 1
        listed = {self.pin(name): Pin(uses or 0, 0.0) for name, uses in (pins or {}).items()}
        beacon = GatewayBeacon(
            gateway=gateway,
            incarnation="i1",
            n=self.beats,
            position=0,
            pins={replica: listed} if listed else {},
        )
        self.gateways.hear(gateway, beacon)

    def pin(self, adapter: str) -> str:
        return pin_name(adapter, self.files.adapters[adapter].version)

    def loaded(self, replica: str = "r-1") -> set[str]:
        """The adapters that the replica's slots tell."""
        told = self.books.slots.get(replica)
        return {slot.adapter for slot in told.loaded} if told is not None else set()

    def tags(self) -> list[str]:
        return [tag_of(event) for _, event in self.said]

    async def until(self, condition: Callable[[], bool], what: str, timeout_s: float = 5.0) -> None:
        await until(condition, what, timeout_s)


@contextlib.asynccontextmanager
async def slot_yard(
    tmp_path: Path,
    *adapters: str,
    pin_s: float = 30.0,
    times: SlotTimes = QUICK,
    engine: ScriptedEngine | None = None,
) -> AsyncIterator[SlotYard]:
    """A desk at work; the catalog has these adapters."""
    loop = asyncio.get_running_loop()
    journal, memory = await Journal.open(tmp_path / "j")
    log = MemoryLog(MemoryBroker(), source="/agent/n1")
    books = some_books(
        journal, memory, Reporter(log, journal, node="n1", actor="agent-n1"), utc_now
    )
    engine = engine or ScriptedEngine()
    holder: list[SlotYard] = []
    gateways = Gateways(
        monotonic=loop.time, connected=lambda: not holder or holder[0].up, pin_s=pin_s
    )
    files = SomeFiles(root=tmp_path / "sets")
    desk = SlotDesk(
        books=books,
        gateways=gateways,
        files=files,
        drivers={"vllm": engine},
        engine_key=lambda name: f"key-{name}",
        epoch=lambda: 7,
        now=utc_now,
        monotonic=loop.time,
        times=times,
    )
    yard = SlotYard(desk=desk, books=books, gateways=gateways, files=files, engine=engine)
    holder.append(yard)
    say = books.say_slots

    def said(slots: Slots, event: SlotsEvent, **fields: Any) -> None:
        yard.said.append((slots, event))
        yard.reasons.append(fields.get("reason", ""))
        say(slots, event, **fields)

    books.say_slots = said  # type: ignore[method-assign]
    desk.on_recall = lambda: yard.recalls.append(desk.recall())
    gateways.connected_s()
    for name in adapters:
        files.put(name)
    running = yard.running = asyncio.ensure_future(desk.run())
    writing = asyncio.ensure_future(journal.run())
    await asyncio.sleep(0)
    try:
        yield yard
        assert engine.crossed == []
        assert engine.evicted_in_use == []
    finally:
        for task in (running, writing):
            task.cancel()
        for result in await asyncio.gather(running, writing, return_exceptions=True):
            if isinstance(result, Exception):
                raise result
        await journal.close()


def story(
    tmp_path: Path, tell: Callable[[SlotYard], Awaitable[None]], *adapters: str, **fields: Any
) -> None:
    """Tells one story of a desk at work; `adapters` and `fields` as for `slot_yard`."""

    async def told() -> None:
        async with slot_yard(tmp_path, *adapters, **fields) as yard:
            await tell(yard)

    run(told())
