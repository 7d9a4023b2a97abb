"""The desk for adapters with an engine that does as it is told: who is answered what, what is asked, what is said."""

import asyncio

import pytest

from nodeagent.domain.pins import uses_in
from nodeagent.drivers.driver import AdapterFault
from nodeagent.slotwork import SlotTimes
from schemas import codes
from schemas.adapterasks import AdapterHolders, LoadAdapter, UnloadAdapter
from schemas.beacons import GatewayBeacon, Pin
from schemas.slots import SlotsDrifted, SlotsEvicted, SlotsFailed, SlotsLeaving, SlotsLoaded
from tests.support.aio import run
from tests.support.slot_yard import QUICK, SlotYard, slot_yard

BROKEN = AdapterFault(whose="adapter", code=codes.RANK_TOO_HIGH, text="LoRA rank 64 is greater")
BUSY = AdapterFault(whose="replica", code=codes.LOAD_FAILED, text="worker died")


def _beacon(yard: SlotYard, pins: dict[str, int]) -> GatewayBeacon:
    """A beacon that lists pins by their own names."""
    yard.beats += 1
    return GatewayBeacon(
        gateway="g1",
        incarnation="i1",
        n=yard.beats,
        position=0,
        pins={"r-1": {name: Pin(uses) for name, uses in pins.items()}},
    )


def story(tmp_path, tell, *adapters: str, **fields) -> None:
    async def told():
        async with slot_yard(tmp_path, *adapters, **fields) as yard:
            await tell(yard)

    run(told())


def test_a_cold_adapter_is_loaded_answered_and_said_with_its_cause(tmp_path):
    async def tell(yard: SlotYard):
        yard.serve()
        answer = await yard.ask("a", request="q-1")
        assert (answer.status, answer.how) == ("ready", "loaded")
        assert answer.engine_name == yard.pin("a")
        assert answer.load_s is not None
        assert yard.engine.loaded[answer.engine_name] == str(
            yard.files.folder(yard.files.adapters["a"])
        )
        ((slots, event),) = yard.said
        assert isinstance(event, SlotsLoaded)
        assert (event.adapter, event.how) == ("a", "loaded")
        assert [slot.adapter for slot in slots.loaded] == ["a"]
        again = await yard.ask("a")
        assert (again.status, again.how) == ("ready", "hit")
        assert yard.engine.names("load") == ["a"]

    story(tmp_path, tell, "a")


def test_req_b38_who_starts_a_load_who_joins_it_and_who_finds_it_there(tmp_path):
    async def tell(yard: SlotYard):
        yard.serve()
        yard.engine.gates["a"] = asyncio.Event()
        asks = [asyncio.ensure_future(yard.ask("a", f"g{n}")) for n in range(10)]
        await yard.until(lambda: yard.engine.names("load") == ["a"], "the load")
        yard.engine.gates["a"].set()
        answers = await asyncio.gather(*asks)
        assert [a.status for a in answers] == ["ready"] * 10
        assert [a.how for a in answers] == ["loaded", *["joined"] * 9]
        assert (await yard.ask("a")).how == "hit"
        assert yard.engine.names("load") == ["a"]

    story(tmp_path, tell, "a")


def test_inv_4_one_load_per_adapter_and_replica_also_when_those_who_asked_leave(tmp_path):
    """B36: the load goes on without its first asker; B39: who waits too long is told so, and the load goes on."""

    async def tell(yard: SlotYard):
        yard.serve()
        yard.engine.gates["a"] = asyncio.Event()
        first = asyncio.ensure_future(yard.ask("a"))
        await yard.until(lambda: yard.engine.names("load") == ["a"], "the load")
        first.cancel()
        await asyncio.gather(first, return_exceptions=True)
        late = await yard.ask("a", wait_s=0.05)
        assert (late.status, late.how) == ("loading", "joined")
        yard.engine.gates["a"].set()
        assert (await yard.have("a")).how in ("hit", "joined")
        assert yard.engine.names("load") == ["a"]

    story(tmp_path, tell, "a")


def test_req_b36_the_client_of_a_load_going_away_does_not_abandon_those_who_joined(tmp_path):
    async def tell(yard: SlotYard):
        yard.serve()
        yard.engine.gates["a"] = asyncio.Event()
        first = asyncio.ensure_future(yard.ask("a"))
        await yard.until(lambda: yard.engine.names("load") == ["a"], "the load")
        second = asyncio.ensure_future(yard.ask("a", "g2"))
        await asyncio.sleep(0)
        first.cancel()
        yard.engine.gates["a"].set()
        assert (await second).status == "ready"

    story(tmp_path, tell, "a")


def test_req_b33_a_load_that_fails_answers_everybody_who_waited_for_it_alike(tmp_path):
    async def tell(yard: SlotYard):
        yard.serve()
        yard.engine.gates["a"] = asyncio.Event()
        yard.engine.faults["a"] = [BROKEN]
        asks = [asyncio.ensure_future(yard.ask("a", f"g{n}")) for n in range(3)]
        await yard.until(lambda: yard.engine.names("load") == ["a"], "the load")
        yard.engine.gates["a"].set()
        answers = await asyncio.gather(*asks)
        assert {(a.status, a.whose, a.code, a.sentence) for a in answers} == {
            ("refused", "adapter", codes.RANK_TOO_HIGH, BROKEN.text)
        }
        assert all(a.until is not None for a in answers)
        ((slots, event),) = yard.said
        assert isinstance(event, SlotsFailed)
        assert [bad.adapter for bad in slots.bad] == ["a"]
        assert (await yard.ask("a")).status == "refused"
        assert yard.engine.names("load") == ["a"]
        assert yard.desk.recall() == {}

    story(tmp_path, tell, "a")


def test_scn_d1_a_rank_above_the_engines_is_the_adapters_fault_and_evicts_nothing(tmp_path):
    async def tell(yard: SlotYard):
        yard.serve()
        for name in ("a", "b"):
            await yard.have(name)
        yard.beat()
        yard.engine.faults["c"] = [BROKEN]
        for _ in range(5):
            answer = await yard.ask("c")
            assert (answer.status, answer.whose) == ("refused", "adapter")
            yard.beat()
        assert yard.loaded() == {"a", "b"}
        assert yard.engine.names("unload") == []

    story(tmp_path, tell, "a", "b", "c")


def test_scn_d6_another_replica_may_take_what_one_cannot(tmp_path):
    async def tell(yard: SlotYard):
        yard.serve("r-1")
        yard.serve("r-2")
        yard.engine.faults["a"] = [BUSY]
        first = await yard.ask("a", replica="r-1")
        assert (first.status, first.whose, first.known) == ("refused", "replica", True)
        second = await yard.ask("a", replica="r-2")
        assert second.status == "ready"
        assert (await yard.ask("a", replica="r-1")).status == "refused"

    story(tmp_path, tell, "a")


def test_req_bugb6_the_same_unknown_words_of_two_replicas_are_the_adapters_fault(tmp_path):
    async def tell(yard: SlotYard):
        yard.serve("r-1")
        yard.serve("r-2")
        words = AdapterFault(whose="replica", code=codes.LOAD_FAILED, text="eh?", known=False)
        yard.engine.faults["a"] = [words, words]
        first = await yard.ask("a", replica="r-1")
        assert (first.whose, first.known) == ("replica", False)
        assert (await yard.ask("a", replica="r-2")).whose == "adapter"

    story(tmp_path, tell, "a")


def test_it_is_loaded_before_anything_leaves_and_the_pin_is_asked_back_first(tmp_path):
    async def tell(yard: SlotYard):
        yard.serve()
        for name in ("a", "b"):
            await yard.have(name)
        yard.beat({"a": 0, "b": 0})
        answer = await yard.have("c")
        assert answer.how == "loaded"
        assert yard.engine.most == 3
        assert yard.desk.recall() == {"r-1": (yard.pin("a"),)}
        assert yard.recalls
        yard.beat({"b": 0, "c": 1})
        await yard.until(lambda: yard.loaded() == {"b", "c"}, "a to leave")
        assert yard.engine.names("unload") == ["a"]
        assert yard.desk.recall() == {}

    story(tmp_path, tell, "a", "b", "c")


def test_scn_d7_with_all_in_use_asks_wait_for_a_bounded_time_and_get_the_first_free_place(
    tmp_path,
):
    async def tell(yard: SlotYard):
        yard.serve(room=2)
        for name in ("a", "b"):
            await yard.have(name)
        yard.beat({"a": 1, "b": 1})
        waiting = await yard.ask("c", wait_s=0.1)
        assert waiting.status == "waiting"
        assert yard.loaded() == {"a", "b"}
        ask = asyncio.ensure_future(yard.ask("c", wait_s=5.0))
        await asyncio.sleep(0)
        yard.beat({"b": 1, "c": 0})
        assert (await ask).status == "ready"
        assert yard.engine.names("unload") == ["a"]

    story(tmp_path, tell, "a", "b", "c")


def test_req_b44_over_the_limit_while_all_are_in_use_and_back_when_one_is_not(tmp_path):
    async def tell(yard: SlotYard):
        yard.serve(room=4)
        for name in ("a", "b"):
            await yard.have(name)
        yard.beat({"a": 1, "b": 1})
        await yard.have("c")
        yard.beat({"a": 1, "b": 1, "c": 1})
        await yard.have("d")
        yard.beat({"a": 1, "b": 1, "c": 1, "d": 1})
        assert yard.loaded() == {"a", "b", "c", "d"}
        assert (await yard.ask("e", wait_s=0.05)).status == "waiting"
        yard.beat({"b": 1, "d": 1})
        await yard.until(lambda: yard.loaded() >= {"b", "d"} and len(yard.loaded()) == 2, "room")
        assert yard.engine.names("unload") == ["a", "c"]

    story(tmp_path, tell, "a", "b", "c", "d", "e")


def test_inv_3_an_adapter_the_engine_says_is_running_stays_whatever_gateways_say(tmp_path):
    async def tell(yard: SlotYard):
        yard.serve(slots=1)
        await yard.have("a")
        yard.engine.running = {yard.pin("a")}
        yard.beat()
        await yard.have("b")
        yard.beat({"b": 1})
        await yard.until(lambda: not yard.engine.busy, "the engine to rest")
        assert yard.loaded() == {"a", "b"}
        yard.engine.running = set()
        await yard.until(lambda: yard.loaded() == {"b"}, "a to leave when it runs no more")

    story(tmp_path, tell, "a", "b")


def test_req_b34_an_ask_for_one_on_its_way_out_waits_and_the_calls_do_not_cross(tmp_path):
    async def tell(yard: SlotYard):
        yard.serve(slots=1)
        await yard.have("a")
        yard.beat()
        yard.engine.unload_gate = asyncio.Event()
        await yard.have("b")
        await yard.until(lambda: yard.engine.names("unload") == ["a"], "the unload")
        ask = asyncio.ensure_future(yard.ask("a"))
        await asyncio.sleep(0.02)
        assert yard.engine.names("load") == ["a", "b"]
        yard.engine.unload_gate.set()
        answer = await ask
        assert (answer.status, answer.how) == ("ready", "loaded")
        assert yard.engine.calls.index(("unload", yard.pin("a"))) < len(yard.engine.calls)
        assert yard.engine.names("load") == ["a", "b", "a"]

    story(tmp_path, tell, "a", "b")


def test_req_bugb8_a_slow_unload_takes_nothing_from_the_loads_time(tmp_path):
    """There is no room to load before one leaves, and that takes its time."""

    async def tell(yard: SlotYard):
        yard.serve(slots=1, room=1)
        await yard.have("a")
        yard.beat()
        yard.engine.unload_gate = asyncio.Event()
        asked: list[float] = []
        load = yard.engine.load_adapter

        async def timed(*args, timeout_s: float, **fields):
            asked.append(timeout_s)
            return await load(*args, timeout_s=timeout_s, **fields)

        yard.engine.load_adapter = timed  # type: ignore[method-assign]
        ask = asyncio.ensure_future(yard.ask("b", wait_s=5.0))
        await yard.until(lambda: yard.engine.names("unload") == ["a"], "the unload")
        waiting = await yard.ask("b", "g2", wait_s=0.2)
        assert waiting.status == "waiting"
        yard.engine.unload_gate.set()
        assert (await ask).status == "ready"
        assert asked == [QUICK.load_s]

    story(tmp_path, tell, "a", "b")


def test_req_b50_an_unload_that_fails_is_said_and_tried_again_once_the_engine_shows_it(tmp_path):
    async def tell(yard: SlotYard):
        yard.serve(slots=1)
        await yard.have("a")
        yard.beat()
        yard.engine.unload_faults = [BUSY]
        await yard.have("b")
        await yard.until(lambda: "slots.drifted" in yard.tags(), "the list to be read")
        failed = [event for _, event in yard.said if isinstance(event, SlotsFailed)]
        assert [(event.adapter, event.what) for event in failed] == [("a", "unload")]
        drifted = [event for _, event in yard.said if isinstance(event, SlotsDrifted)]
        assert drifted[0].found == (yard.pin("a"),)
        assert yard.loaded() == {"a", "b"}

    story(tmp_path, tell, "a", "b")


def test_req_b49_one_that_is_not_there_is_unloaded_already(tmp_path):
    async def tell(yard: SlotYard):
        yard.serve(slots=1)
        await yard.have("a")
        yard.beat()
        yard.engine.loaded.clear()
        await yard.have("b")
        await yard.until(lambda: yard.loaded() == {"b"}, "a to be gone")
        assert "slots.failed" not in yard.tags()

    story(tmp_path, tell, "a", "b")


def test_req_b52_already_loaded_is_success_when_the_list_shows_the_wanted_folder(tmp_path):
    async def tell(yard: SlotYard):
        yard.serve()
        adapter = yard.files.adapters["a"]
        await yard.until(lambda: ("list", "") in yard.engine.calls, "the first list")
        yard.engine.loaded[yard.pin("a")] = str(yard.files.folder(adapter))
        answer = await yard.have("a")
        assert answer.engine_name == yard.pin("a")

    story(tmp_path, tell, "a")


def test_scn_d2_already_loaded_from_elsewhere_is_loaded_under_the_next_name(tmp_path):
    async def tell(yard: SlotYard):
        yard.serve()
        await yard.until(lambda: ("list", "") in yard.engine.calls, "the first list")
        yard.engine.loaded[yard.pin("a")] = "/somewhere/else"
        yard.engine.loaded[f"{yard.pin('a')}.1"] = str(yard.files.root / "other")
        answer = await yard.have("a")
        assert answer.engine_name == f"{yard.pin('a')}.2"
        (slot,) = yard.books.slots["r-1"].loaded
        assert slot.engine_name == answer.engine_name
        assert (await yard.have("a")).engine_name == answer.engine_name

    story(tmp_path, tell, "a")


def test_scn_d4_an_engine_that_forgot_it_is_asked_again_once_however_many_were_told(tmp_path):
    async def tell(yard: SlotYard):
        yard.serve()
        name = (await yard.have("a")).engine_name
        yard.engine.loaded.clear()
        answers = await asyncio.gather(
            *(yard.ask("a", f"g{n}", gone=name, request="q-9") for n in range(5))
        )
        assert {a.status for a in answers} == {"ready"}
        assert yard.engine.names("load") == ["a", "a"]
        assert yard.tags() == ["slots.loaded", "slots.drifted", "slots.loaded"]
        assert yard.loaded() == {"a"}

    story(tmp_path, tell, "a")


def test_req_b59_a_load_without_an_answer_is_the_replicas_fault(tmp_path):
    async def tell(yard: SlotYard):
        yard.serve()
        yard.engine.gates["a"] = asyncio.Event()
        answer = await yard.ask("a", wait_s=5.0)
        assert (answer.status, answer.whose, answer.code) == (
            "refused",
            "replica",
            codes.LOAD_TIMEOUT,
        )
        assert answer.until is not None

    story(tmp_path, tell, "a")


def test_files_that_cannot_be_had_are_the_replicas_fault_and_no_engine_is_asked(tmp_path):
    async def tell(yard: SlotYard):
        yard.serve()
        yard.files.missing.add("a")
        answer = await yard.ask("a")
        assert (answer.status, answer.whose, answer.code) == (
            "refused",
            "replica",
            codes.FILES_MISSING,
        )
        assert yard.engine.names("load") == []

    story(tmp_path, tell, "a")


def test_a_driver_that_raises_is_a_failed_load_and_nothing_else(tmp_path):
    async def tell(yard: SlotYard):
        yard.serve()
        yard.engine.faults["a"] = [RuntimeError("boom")]
        answer = await yard.ask("a")
        assert (answer.status, answer.code) == ("refused", codes.LOAD_FAILED)
        assert (await yard.have("b")).status == "ready"

    story(tmp_path, tell, "a", "b")


@pytest.mark.parametrize("phase", ["draining", "parked", "starting", "failed"])
def test_a_replica_that_does_not_serve_loads_nothing(tmp_path, phase):
    async def tell(yard: SlotYard):
        yard.serve()
        await yard.have("a")
        yard.phase(phase)
        yard.desk.rest("r-1")
        for name in ("a", "b"):
            assert (await yard.ask(name)).status == "not_here"
        assert yard.engine.names("load") == ["a"]
        assert (await yard.ask("a", replica="r-9")).status == "not_here"

    story(tmp_path, tell, "a", "b")


def test_whoever_waits_when_the_replica_leaves_is_told_so_at_once(tmp_path):
    async def tell(yard: SlotYard):
        yard.serve()
        yard.engine.gates["a"] = asyncio.Event()
        ask = asyncio.ensure_future(yard.ask("a", wait_s=10.0))
        await yard.until(lambda: yard.engine.names("load") == ["a"], "the load")
        yard.phase("failed")
        yard.desk.leave("r-1")
        assert (await ask).status == "not_here"
        assert yard.files.kept == {}

    story(tmp_path, tell, "a")


def test_a_replica_without_slots_has_none(tmp_path):
    async def tell(yard: SlotYard):
        yard.serve(slots=0)
        assert (await yard.ask("a")).status == "not_here"
        assert yard.engine.calls == []

    story(tmp_path, tell, "a")


def test_req_bugb7_an_engine_whose_routes_are_off_is_found_out_and_asked_no_load(tmp_path):
    async def tell(yard: SlotYard):
        yard.engine.has_routes = False
        yard.serve()
        replica = yard.desk._replicas["r-1"]
        await yard.until(lambda: replica.state.route_off, "the routes to be probed")
        answer = await yard.ask("a")
        assert (answer.status, answer.whose, answer.code) == (
            "refused",
            "replica",
            codes.ROUTE_OFF,
        )
        assert yard.engine.names("load") == []

    story(tmp_path, tell, "a")


# The catalog.


def test_what_the_catalog_does_not_have_is_refused_once_it_could_have_been_heard_of(tmp_path):
    async def tell(yard: SlotYard):
        yard.serve()
        answer = await yard.ask("x")
        assert (answer.status, answer.whose, answer.code) == (
            "refused",
            "replica",
            codes.NOT_FOUND,
        )
        ask = asyncio.ensure_future(yard.ask("x"))
        await asyncio.sleep(0)
        yard.files.put("x")
        assert (await ask).status == "ready"
        other = await yard.ask("x", version="ffffffffffff")
        assert "version" in other.sentence
        yard.files.put("y", base_incarnation="i-other")
        assert (await yard.ask("y")).code == codes.NOT_FOUND
        yard.files.put("z", phase="refused", reason="rank 64 is above 16")
        assert "rank 64" in (await yard.ask("z")).sentence

    story(tmp_path, tell)


def test_a_removed_adapter_leaves_once_nobody_uses_it(tmp_path):
    async def tell(yard: SlotYard):
        yard.serve()
        await yard.have("a")
        pin = yard.pin("a")
        yard.beat({"a": 1})
        yard.files.drop("a")
        await asyncio.sleep(0.02)
        assert yard.engine.names("unload") == []
        yard.gateways.hear("g1", _beacon(yard, {pin: 0}))
        assert yard.desk.recall() == {"r-1": (pin,)}
        yard.beat()
        await yard.until(lambda: yard.loaded() == set(), "a to leave")
        evicted = [event for _, event in yard.said if isinstance(event, SlotsEvicted)]
        assert [event.why for event in evicted] == ["removed"]

    story(tmp_path, tell, "a")


def test_a_new_version_is_another_adapter_and_the_old_one_leaves(tmp_path):
    async def tell(yard: SlotYard):
        yard.serve()
        old = await yard.have("a")
        yard.beat()
        yard.files.put("a", version="fedcba987654")
        await yard.until(lambda: yard.loaded() == set(), "the old one to leave")
        new = await yard.have("a")
        assert new.engine_name == "a@fedcba98" != old.engine_name
        evicted = [event for _, event in yard.said if isinstance(event, SlotsEvicted)]
        assert [event.why for event in evicted] == ["version"]

    story(tmp_path, tell, "a")


def test_one_that_a_person_pinned_in_the_catalog_is_no_victim(tmp_path):
    async def tell(yard: SlotYard):
        yard.serve()
        yard.files.put("a", pinned=True)
        for name in ("a", "b", "c"):
            await yard.have(name)
            yard.beat()
        await yard.until(lambda: yard.loaded() == {"a", "c"}, "b to leave")

    story(tmp_path, tell, "a", "b", "c")


def test_the_files_of_what_is_loaded_are_kept_and_no_others(tmp_path):
    async def tell(yard: SlotYard):
        yard.serve(slots=1)
        await yard.have("a")
        key = yard.files.adapters["a"].files[0].key
        assert yard.files.kept["r-1"] == {key}
        yard.beat()
        await yard.have("b")
        await yard.until(lambda: yard.loaded() == {"b"}, "a to leave")
        assert yard.files.kept["r-1"] == {yard.files.adapters["b"].files[0].key}

    story(tmp_path, tell, "a", "b")


# People.


def test_a_person_loads_an_adapter_and_nobody_is_pinned_by_it(tmp_path):
    async def tell(yard: SlotYard):
        yard.serve(slots=1)
        answer = await yard.person(LoadAdapter(replica="r-1", adapter="a"))
        assert answer.status == "done"
        (holder,) = answer.holders
        assert (holder.adapter, holder.state, holder.how, holder.gateways, holder.uses) == (
            "a",
            "loaded",
            "person",
            (),
            0,
        )
        assert yard.said[0][0].loaded[0].how == "person"
        await yard.have("b")
        await yard.until(lambda: yard.loaded() == {"b"}, "a to make room")
        nowhere = await yard.person(LoadAdapter(replica="r-9", adapter="a"))
        assert (nowhere.status, nowhere.code) == ("refused", codes.NOT_HERE)
        unknown = await yard.person(LoadAdapter(replica="r-1", adapter="x"), wait_s=0.05)
        assert (unknown.status, unknown.code) == ("refused", codes.NOT_FOUND)

    story(tmp_path, tell, "a", "b")


def test_what_came_of_a_load_a_person_wants_is_the_answer_and_it_is_tried_once(tmp_path):
    async def tell(yard: SlotYard):
        yard.serve()
        yard.engine.faults["a"] = [BUSY, BUSY, BUSY]
        for tries in (1, 2):
            # The failure before does not keep a person from having it tried, once for each ask.
            answer = await yard.person(LoadAdapter(replica="r-1", adapter="a"))
            assert (answer.status, answer.code) == ("refused", codes.LOAD_FAILED)
            assert answer.sentence == "worker died"
            assert yard.engine.names("load") == ["a"] * tries
        yard.engine.faults.clear()
        done = await yard.person(LoadAdapter(replica="r-1", adapter="a"))
        assert done.status == "done"
        assert yard.said[-1][0].loaded[0].how == "person"

    story(tmp_path, tell, "a")


def test_scn_d8_an_unload_drains_unloads_and_reads_back(tmp_path):
    async def tell(yard: SlotYard):
        yard.serve()
        await yard.have("a")
        yard.beat({"a": 1})
        waiting = await yard.person(UnloadAdapter(replica="r-1", adapter="a"), wait_s=0.05)
        assert waiting.status == "waiting"
        assert [(h.state, h.uses, h.gateways) for h in waiting.holders] == [("leaving", 1, ("g1",))]
        (slot,) = yard.books.slots["r-1"].loaded
        assert slot.leaving
        assert (await yard.ask("a", wait_s=0.05)).status == "waiting"
        lists = yard.engine.calls.count(("list", ""))
        ask = asyncio.ensure_future(yard.person(UnloadAdapter(replica="r-1", adapter="a")))
        await asyncio.sleep(0)
        yard.beat()
        assert (await ask).status == "done"
        assert yard.engine.calls.count(("list", "")) > lists
        assert yard.loaded() == set()
        evicted = [event for _, event in yard.said if isinstance(event, SlotsEvicted)]
        assert [event.why for event in evicted] == ["person"]
        leaving = [event for _, event in yard.said if isinstance(event, SlotsLeaving)]
        assert len(leaving) == 1
        again = await yard.person(UnloadAdapter(replica="r-1", adapter="a"))
        assert (again.status, again.code) == ("refused", codes.NOT_FOUND)

    story(tmp_path, tell, "a")


def test_an_unload_that_the_engine_does_not_follow_is_not_done(tmp_path):
    async def tell(yard: SlotYard):
        yard.serve()
        await yard.have("a")
        yard.beat()
        yard.engine.keeps = True
        ask = UnloadAdapter(replica="r-1", adapter="a")
        assert (await yard.person(ask, wait_s=0.3)).status == "waiting"
        assert "slots.drifted" in yard.tags()
        assert yard.engine.names("unload") == ["a"]

    story(tmp_path, tell, "a")


def test_a_forced_unload_waits_for_nobody(tmp_path):
    async def tell(yard: SlotYard):
        yard.serve()
        await yard.have("a")
        yard.beat({"a": 3})
        answer = await yard.person(UnloadAdapter(replica="r-1", adapter="a", force=True))
        assert answer.status == "done"
        assert yard.loaded() == set()

    story(tmp_path, tell, "a")


def test_a_load_takes_back_that_it_is_leaving(tmp_path):
    async def tell(yard: SlotYard):
        yard.serve()
        await yard.have("a")
        yard.beat({"a": 1})
        await yard.person(UnloadAdapter(replica="r-1", adapter="a"), wait_s=0.0)
        assert (await yard.person(LoadAdapter(replica="r-1", adapter="a"))).status == "done"
        assert not yard.books.slots["r-1"].loaded[0].leaving
        taken = [e.taken_back for _, e in yard.said if isinstance(e, SlotsLeaving)]
        assert taken == [False, True]
        yard.beat()
        assert (await yard.have("a")).how == "hit"

    story(tmp_path, tell, "a")


def test_holders_tell_where_it_is_who_uses_it_and_how_it_came(tmp_path):
    async def tell(yard: SlotYard):
        yard.serve("r-1")
        yard.serve("r-2")
        await yard.have("a", replica="r-1")
        await yard.have("b", replica="r-2")
        yard.beat({"a": 2})
        every = (await yard.person(AdapterHolders())).holders
        assert [(h.replica, h.adapter) for h in every] == [("r-1", "a"), ("r-2", "b")]
        (a,) = (await yard.person(AdapterHolders(adapter="a"))).holders
        assert (a.uses, a.idle_s, a.gateways, a.model) == (2, 0.0, ("g1",), "m")
        assert (await yard.person(AdapterHolders(adapter="x"))).holders == ()

    story(tmp_path, tell, "a", "b")


# What is left of the list.


def test_req_b5_a_load_has_two_minutes_and_the_replica_that_took_longer_is_left(tmp_path):
    async def tell(yard: SlotYard):
        yard.serve()
        yard.engine.gates["a"] = asyncio.Event()
        answer = await yard.ask("a", wait_s=5.0)
        assert (answer.status, answer.whose, answer.code) == (
            "refused",
            "replica",
            codes.LOAD_TIMEOUT,
        )
        assert answer.until is not None

    assert SlotTimes().load_s == 120.0
    story(tmp_path, tell, "a")


def test_req_b10_a_launch_begins_with_nothing_and_its_address_is_followed(tmp_path):
    async def tell(yard: SlotYard):
        asked: list[tuple[str, str]] = []
        load = yard.engine.load_adapter

        async def noted(endpoint: str, key: str, **fields):
            asked.append((endpoint, key))
            return await load(endpoint, key, **fields)

        yard.engine.load_adapter = noted  # type: ignore[method-assign]
        yard.serve("r-1")
        await yard.have("a")
        yard.serve("r-1", endpoint="http://moved")
        await yard.have("b")
        assert asked == [("http://engine", "key-r-1"), ("http://moved", "key-r-1")]
        yard.desk.leave("r-1")
        yard.engine.loaded.clear()
        yard.serve("r-2")
        assert (await yard.person(AdapterHolders())).holders == ()
        assert (await yard.have("a", replica="r-2")).how == "loaded"

    story(tmp_path, tell, "a", "b")


def test_req_b28_a_replica_that_drains_keeps_its_uses_and_one_that_left_has_none(tmp_path):
    async def tell(yard: SlotYard):
        yard.serve()
        await yard.have("a")
        yard.beat({"a": 2})
        yard.phase("draining")
        (holder,) = (await yard.person(AdapterHolders())).holders
        assert (holder.adapter, holder.uses) == ("a", 2)
        yard.phase("failed")
        yard.desk.leave("r-1")
        assert (await yard.person(AdapterHolders())).holders == ()

    story(tmp_path, tell, "a")


def test_req_b30_all_that_was_known_of_a_launch_is_forgotten_when_it_leaves(tmp_path):
    async def tell(yard: SlotYard):
        yard.serve(slots=1, room=1)
        await yard.have("a")
        yard.beat({"a": 0})
        assert (await yard.ask("b", wait_s=0.05)).status == "waiting"
        assert yard.desk.recall()
        yard.phase("stopped")
        yard.desk.leave("r-1")
        assert (yard.desk.recall(), yard.files.kept) == ({}, {})
        assert uses_in(yard.gateways.pins, "r-1", asyncio.get_running_loop().time()) == {}

    story(tmp_path, tell, "a", "b")


def test_req_bugb5_a_replica_that_drains_and_comes_back_keeps_uses_and_loads_under_way(tmp_path):
    async def tell(yard: SlotYard):
        yard.serve(slots=1)
        await yard.have("a")
        yard.beat({"a": 1})
        yard.engine.gates["b"] = asyncio.Event()
        ask = asyncio.ensure_future(yard.ask("b", wait_s=5.0))
        await yard.until(lambda: yard.engine.names("load") == ["a", "b"], "the load")
        yard.phase("draining")
        await yard.until(ask.done, "the ask to be told")
        assert ask.result().status == "not_here"
        yard.phase("ready")
        yard.desk.serve("r-1", adopted=False)
        again = asyncio.ensure_future(yard.ask("b", wait_s=5.0))
        await asyncio.sleep(0)
        yard.engine.gates["b"].set()
        assert ((await again).status, (await again).how) == ("ready", "joined")
        assert yard.engine.names("load") == ["a", "b"]
        assert yard.loaded() == {"a", "b"}
        assert yard.engine.names("unload") == []

    story(tmp_path, tell, "a", "b")


def test_req_b39_a_waiter_whose_time_is_over_is_told_so_and_the_load_goes_on(tmp_path):
    async def tell(yard: SlotYard):
        yard.serve()
        yard.engine.gates["a"] = asyncio.Event()
        assert (await yard.ask("a", wait_s=0.05)).status == "loading"
        yard.engine.gates["a"].set()
        await yard.until(lambda: yard.loaded() == {"a"}, "the load to be done")

    story(tmp_path, tell, "a")


def test_req_b46_victims_leave_one_after_another_and_after_the_load_where_there_is_room(tmp_path):
    async def tell(yard: SlotYard):
        yard.serve(slots=1, room=3)
        for name in ("a", "b", "c"):
            await yard.have(name)
            yard.beat(dict.fromkeys(yard.loaded(), 1))
        most = 0
        unload = yard.engine.unload_adapter

        async def counted(*args, **fields):
            nonlocal most
            most = max(most, len(yard.engine.busy) + 1)
            return await unload(*args, **fields)

        yard.engine.unload_adapter = counted  # type: ignore[method-assign]
        yard.beat()
        await yard.until(lambda: yard.loaded() == {"c"}, "two to leave")
        assert (most, yard.engine.names("unload")) == (1, ["a", "b"])
        made = [(call, name[0]) for call, name in yard.engine.calls if call != "list"]
        assert made.index(("unload", "a")) > made.index(("load", "c"))

    story(tmp_path, tell, "a", "b", "c")


def test_req_b51_who_waits_for_an_unload_is_woken_however_it_ended(tmp_path):
    async def tell(yard: SlotYard):
        yard.serve(slots=1)
        await yard.have("a")
        yard.beat()
        yard.engine.unload_gate = asyncio.Event()
        yard.engine.unload_faults = [BUSY]
        await yard.have("b")
        await yard.until(lambda: yard.engine.names("unload") == ["a"], "the unload")
        ask = asyncio.ensure_future(yard.ask("a", wait_s=5.0))
        await asyncio.sleep(0.01)
        assert not ask.done()
        yard.engine.unload_gate.set()
        assert (await ask).status == "ready"

    story(tmp_path, tell, "a", "b")


def test_req_b55_from_its_first_ask_on_it_is_loading_or_loaded_at_any_moment(tmp_path):
    async def tell(yard: SlotYard):
        yard.serve()
        phases: list[str] = []
        replica = yard.desk._replicas["r-1"]

        class Watched(type(replica)):
            def __setattr__(self, name: str, value: object) -> None:
                super().__setattr__(name, value)
                if name == "state":
                    place = self.state.places.get(yard.pin("a"))
                    phases.append(place.phase if place is not None else "absent")

        replica.__class__ = Watched
        await asyncio.gather(*(yard.ask("a", f"g{n}") for n in range(3)))
        first = phases.index("loading")
        told = phases[first:]
        assert told == sorted(told, key=["loading", "loaded"].index)
        assert told[-1] == "loaded"

    story(tmp_path, tell, "a")
