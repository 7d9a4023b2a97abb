"""Adapters on a whole agent: asked for over the wire, said in the log, taken over, and ended with their replica."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from msgspec.structs import replace

from events.log import Unavailable
from nodeagent.app import Times
from schemas.adapter import Adapter
from schemas.adapterasks import (
    AdapterHolders,
    Ensure,
    EnsureAnswer,
    SlotsAnswer,
    SlotsRequest,
    UnloadAdapter,
)
from schemas.adapternames import pin_name
from schemas.beacons import AgentBeacon, Pin
from schemas.node import EngineInfo
from schemas.slots import Slots
from tests.support.adapter_files import Editor, a_base, a_profile, adapter_set, an_adapter
from tests.support.agent_yard import (
    QUICK,
    MemoryYard,
    Running,
    a_launch,
    a_node,
    a_stop,
    an_item,
    memory_yard,
)
from tests.support.aio import run, until
from tests.support.fetch_items import announced
from tests.support.scripted_mirror import TOKEN, serving_mirror
from tests.support.slot_yard import QUICK as SLOTS
from tests.support.slot_yard import ScriptedEngine

NODE = a_node(engines=(EngineInfo(name="command", version="1", adapters=True),))
BASE = a_base(profiles=(a_profile(engine="command", card=("cpu",)),))
TIMES = replace(QUICK, slots=SLOTS)


@dataclass
class SlotsOnAnAgent:
    """A yard, an engine that loads adapters, and whoever asks for them."""

    yard: MemoryYard
    engine: ScriptedEngine
    adapters: dict[str, Adapter]
    editor: Editor
    beacons: list[AgentBeacon] = field(default_factory=list)

    def agent(self, times: Times = TIMES, **fields: Any) -> Any:
        return self.yard.agent(
            node=NODE,
            drivers={"command": self.engine},
            times=times,
            mirror_token=TOKEN,
            files_keep_free_bytes=0,
            **fields,
        )

    async def serve(self, slots: int = 2) -> None:
        await self.yard.hand.plan(
            an_item("r-1", launch=a_launch(incarnation="i-m", adapters=slots))
        )
        await self.yard.hand.phase("r-1", "ready")

    async def ask(self, adapter: str, gateway: str = "g2", **fields: Any) -> EnsureAnswer:
        given: dict[str, Any] = {
            "replica": "r-1",
            "version": self.adapters[adapter].version,
            "incarnation": "x",
            "n": 0,
            **fields,
        }
        ask = Ensure(adapter=adapter, gateway=gateway, **given)
        async with asyncio.timeout(20):
            while True:
                try:
                    return await self.yard.hand.wire.request(
                        "adapters", "n1", ask, EnsureAnswer, timeout_s=15.0
                    )
                except Unavailable:  # an agent that is about to start
                    await asyncio.sleep(0.02)

    async def have(self, adapter: str, **fields: Any) -> EnsureAnswer:
        answer = await self.ask(adapter, **fields)
        assert answer.status == "ready", answer
        return answer

    async def person(self, ask: Any, wait_s: float = 5.0) -> SlotsAnswer:
        request = SlotsRequest(ask=ask, wait_s=wait_s)
        return await self.yard.hand.wire.request(
            "slots", "n1", request, SlotsAnswer, timeout_s=15.0
        )

    def pin(self, adapter: str) -> str:
        return pin_name(adapter, self.adapters[adapter].version)

    def told(self) -> Slots | None:
        """What the log tells of the replica's slots."""
        for item in reversed(self.yard.hand.seen):
            if item.noun == "slots":
                return item.state if isinstance(item.state, Slots) else None
        return None

    def loaded(self) -> set[str]:
        told = self.told()
        return {slot.adapter for slot in told.loaded} if told is not None else set()

    async def expect(self, adapters: set[str]) -> None:
        await self.yard.hand.expect(lambda: self.loaded() == adapters, f"slots with {adapters}")


@asynccontextmanager
async def slots_yard(tmp_path: Path, *names: str) -> AsyncIterator[SlotsOnAnAgent]:
    """A catalog with these adapters, and mirrors that have their files."""
    with serving_mirror() as mirror:
        adapters: dict[str, Adapter] = {}
        for name in names:
            manifest, *contents = adapter_set(name)
            mirror.add(manifest, *contents)
            adapters[name] = an_adapter(name, manifest)
        async with memory_yard(tmp_path, gateway=False) as yard:
            editor = Editor(yard.hand.log)
            await editor.write(BASE, *adapters.values())
            made = SlotsOnAnAgent(yard, ScriptedEngine(), adapters, editor)
            hearing = await yard.hand.wire.on_beacon(
                "agent", AgentBeacon, lambda _, beacon: made.beacons.append(beacon)
            )
            async with announced(yard.hand.wire, mirror):
                yield made
            await hearing.close()
        assert made.engine.crossed == []
        assert made.engine.evicted_in_use == []


def test_req_b2_a_gateways_ask_has_the_agent_load_an_adapter_and_the_log_tells_it(tmp_path):
    async def story():
        async with slots_yard(tmp_path, "a", "b") as it, it.agent():
            await it.serve()
            replica = it.yard.hand.replica("r-1")
            assert replica is not None
            assert replica.adapter_slots == 2
            answer = await it.have("a", request="q-7")
            assert answer.engine_name == it.pin("a")
            await it.expect({"a"})
            item = next(i for i in it.yard.hand.seen if i.noun == "slots")
            assert (item.type, item.causationid) == ("slots.loaded", "q-7")
            assert it.engine.loaded[it.pin("a")].startswith(str(tmp_path))
            (holder,) = (await it.person(AdapterHolders())).holders
            assert (holder.adapter, holder.gateways) == ("a", ("g2",))

    run(story(), 40)


def test_pins_are_heard_echoed_and_asked_back_by_beacons(tmp_path):
    async def story():
        async with slots_yard(tmp_path, "a", "b", "c") as it, it.agent(beacon_s=30.0):
            await it.serve()
            for name in ("a", "b"):
                await it.have(name, gateway="g1")
            pins = {"r-1": {it.pin("a"): Pin(0, 2.0), it.pin("b"): Pin(1)}}
            await it.yard.hand.beacon(pins=pins)
            full = asyncio.ensure_future(it.ask("c", gateway="g2"))
            # At once, not with the next beacon that is due.
            await until(lambda: any(b.recall for b in it.beacons), "the recall")
            recall = it.beacons[-1]
            assert recall.recall == {"r-1": (it.pin("a"),)}
            assert (recall.heard, recall.heard_from) == ({"g1": 1}, {"g1": "x"})
            await it.yard.hand.beacon(pins={"r-1": {it.pin("b"): Pin(1)}})
            assert (await full).status == "ready"
            assert it.engine.names("unload") == ["a"]

    run(story(), 40)


def test_inv_6_a_killed_agents_successor_goes_on_with_what_is_loaded(tmp_path):
    async def story():
        async with slots_yard(tmp_path, "a", "b", "c") as it:
            async with it.agent() as first:
                await it.serve()
                await it.have("a")
                await it.have("b")
                await it.expect({"a", "b"})
                await first.die()
            async with it.agent(adapter_pin_s=0.5):
                answer = await it.ask("a", wait_s=10.0)
                assert (answer.status, answer.how) == ("ready", "hit")
                assert it.engine.names("load") == ["a", "b"]
                before = it.told()
                assert before is not None
                # It has the place only after every pin of before could be heard.
                await it.yard.hand.beacon("g2", pins={"r-1": {it.pin("a"): Pin(1)}})
                assert (await it.ask("c", wait_s=10.0)).status == "ready"
                assert it.engine.names("unload") == ["b"]
                await it.expect({"a", "c"})
                after = it.told()
                assert after is not None
                assert after.epoch > before.epoch

    run(story(), 60)


def test_inv_6_a_load_that_an_agent_was_killed_in_is_found_by_its_successor(tmp_path):
    async def story():
        async with slots_yard(tmp_path, "a") as it:
            async with it.agent() as first:
                await it.serve()
                it.engine.gates["a"] = asyncio.Event()
                ask = asyncio.ensure_future(it.ask("a"))
                await until(lambda: it.engine.names("load") == ["a"], "the load")
                await first.die()
                ask.cancel()
                await asyncio.gather(ask, return_exceptions=True)
            folder = tmp_path / "nodeagent" / "files" / "sets" / it.adapters["a"].files[0].key
            it.engine.loaded[it.pin("a")] = str(folder)
            async with it.agent():
                assert (await it.ask("a", wait_s=10.0)).how == "hit"
                await it.expect({"a"})
                assert it.engine.names("load") == ["a"]

    run(story(), 60)


def test_inv_7_without_its_journal_an_agent_knows_its_slots_from_log_and_engine(tmp_path):
    async def story():
        async with slots_yard(tmp_path, "a", "b") as it:
            async with it.agent() as first:
                await it.serve()
                await it.have("a")
                await it.expect({"a"})
                await first.die()
            it.yard.lose_journal()
            async with it.agent():
                assert (await it.ask("a", wait_s=10.0)).how == "hit"
                assert it.engine.names("load") == ["a"]
                await it.have("b")
                await it.expect({"a", "b"})

    run(story(), 60)


def test_log_05_what_changed_without_a_connection_is_told_afterwards_in_order(tmp_path):
    async def story():
        async with slots_yard(tmp_path, "a", "b") as it, it.agent() as running:
            await it.serve()
            await it.have("a")
            await it.expect({"a"})
            it.yard.cut()
            desk = _desk(running)
            ask = Ensure(
                replica="r-1",
                adapter="b",
                version=it.adapters["b"].version,
                gateway="g2",
                incarnation="i1",
                n=0,
            )
            assert (await desk.ensure(ask)).status == "ready"
            assert it.loaded() == {"a"}
            it.yard.mend()
            await it.expect({"a", "b"})

    run(story(), 40)


def test_the_slots_end_with_their_replica(tmp_path):
    async def story():
        times = replace(TIMES, endings_after_s=0.1)
        async with slots_yard(tmp_path, "a") as it, it.agent(times=times):
            await it.serve()
            await it.have("a")
            await it.expect({"a"})
            hand = it.yard.hand
            await hand.plan(replace(hand.items["r-1"], stop=a_stop(force=True)))
            await hand.phase("r-1", "stopped")
            assert (await it.ask("a")).status == "not_here"
            assert (await it.person(AdapterHolders())).holders == ()
            await hand.plan()
            await hand.expect(lambda: "slots.deleted" in hand.types(noun="slots"), "the tombstone")
            await hand.expect(
                lambda: "replica.deleted" in hand.types(noun="replica"), "the replica's"
            )

    run(story(), 40)


def test_an_adapter_that_leaves_the_catalog_leaves_the_engine(tmp_path):
    async def story():
        async with slots_yard(tmp_path, "a", "b") as it, it.agent():
            await it.serve()
            await it.have("a", gateway="g1")
            await it.have("b", gateway="g1")
            await it.editor.end("adapter", "a")
            await it.yard.hand.beacon(pins={"r-1": {it.pin("b"): Pin(0)}})
            await it.expect({"b"})
            assert it.engine.names("unload") == ["a"]

    run(story(), 40)


def test_a_drained_replica_loads_nothing_and_one_that_is_taken_back_goes_on(tmp_path):
    async def story():
        async with slots_yard(tmp_path, "a") as it, it.agent():
            await it.serve()
            hand = it.yard.hand
            item = hand.items["r-1"]
            await hand.beacon(inflight={"r-1": 1})
            await hand.plan(replace(item, stop=a_stop(take_back=True, drain_timeout_s=60.0)))
            await hand.phase("r-1", "draining")
            assert (await it.ask("a")).status == "not_here"
            await hand.plan(item)
            await hand.phase("r-1", "ready")
            assert (await it.ask("a")).status == "ready"

    run(story(), 40)


def test_a_person_unloads_over_the_wire(tmp_path):
    async def story():
        async with slots_yard(tmp_path, "a") as it, it.agent():
            await it.serve()
            await it.have("a", gateway="g1")
            await it.yard.hand.beacon()
            answer = await it.person(UnloadAdapter(replica="r-1", adapter="a"))
            assert answer.status == "done"
            await it.expect(set())

    run(story(), 40)


def _desk(running: Running) -> Any:
    return running.agent._a.tools.slots


def test_log_17_after_the_log_was_replaced_the_slots_are_said_again(tmp_path):
    async def story():
        async with slots_yard(tmp_path, "a") as it, it.agent():
            await it.serve()
            await it.have("a")
            await it.expect({"a"})
            hand = it.yard.hand
            item = hand.items["r-1"]
            hand.seen.clear()
            it.yard.broker.replace_events()
            hand.seq = hand.rev = 0
            it.editor._heads.clear()
            await it.editor.write(BASE, *it.adapters.values())
            await hand.plan(item)
            await it.expect({"a"})
            told = it.told()
            started = next(i for i in hand.seen if i.type == "node.started")
            assert told is not None
            assert told.epoch == started.seq
            assert it.engine.names("unload") == []

    run(story(), 40)
