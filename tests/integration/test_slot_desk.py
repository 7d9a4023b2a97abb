"""The desk for adapters with an engine that does as it is told: who is answered what, what is asked, what is said."""

import asyncio

import pytest
from msgspec.structs import replace

from nodeagent.domain.pins import uses_in
from nodeagent.drivers.driver import AdapterFault
from schemas import codes
from schemas.slots import SlotsDrifted, SlotsFailed, SlotsLoaded
from tests.support.aio import run
from tests.support.slot_yard import BUSY, QUICK, SlotYard, slot_yard, story

BROKEN = AdapterFault(whose="adapter", code=codes.RANK_TOO_HIGH, text="LoRA rank 64 is greater")


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


def test_whoever_asked_is_answered_before_anything_is_told_or_asked_back(tmp_path):
    async def whole():
        times = replace(QUICK, answered_s=0.02)
        async with slot_yard(tmp_path, "a", "b", times=times) as yard:
            yard.serve(slots=1)
            await yard.have("a")
            assert yard.said == []
            await yard.have("b")
            assert yard.desk.recall() == {}
            await yard.until(lambda: yard.loaded() == {"a", "b"}, "the log to be told")
            await yard.until(lambda: bool(yard.desk.recall()), "a to be asked back")

    run(whole())


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
        assert (waiting.status, waiting.sentence) == ("waiting", "")
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
        assert (waiting.status, waiting.sentence) == ("waiting", "another one is being unloaded")
        leaving = await yard.ask("a", "g2", wait_s=0.1)
        assert (leaving.status, leaving.sentence) == ("waiting", "it is being unloaded")
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


def test_an_agent_that_has_not_read_what_runs_here_sends_nobody_away(tmp_path):
    async def tell(yard: SlotYard):
        yard.desk.knows = lambda: False
        assert (await yard.ask("a", wait_s=0.0)).status == "waiting"
        ask = asyncio.ensure_future(yard.ask("a", wait_s=10.0))
        await asyncio.sleep(0)
        yard.desk.knows = lambda: True
        yard.serve()
        assert (await ask).status == "ready"
        assert (await yard.ask("a", replica="r-9", wait_s=10.0)).status == "not_here"

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


def test_req_b31_what_was_granted_is_kept_before_any_beacon_tells_of_it(tmp_path):
    async def tell(yard: SlotYard):
        yard.serve(slots=1)
        await yard.have("a")
        await yard.have("b", gateway="g2")
        assert yard.desk.recall() == {"r-1": (yard.pin("a"),)}
        await asyncio.sleep(0.05)
        assert yard.engine.names("unload") == []
        yard.beat()
        await yard.until(lambda: yard.loaded() == {"b"}, "a to leave once it was given up")

    story(tmp_path, tell, "a", "b")


def test_who_is_refused_holds_nothing(tmp_path):
    async def tell(yard: SlotYard):
        yard.serve()
        yard.engine.faults["a"] = [BROKEN]
        assert (await yard.ask("a")).status == "refused"
        assert (await yard.ask("b", replica="r-9")).status == "not_here"
        now = asyncio.get_running_loop().time()
        for replica in ("r-1", "r-9"):
            assert uses_in(yard.gateways.pins, replica, now) == {}

    story(tmp_path, tell, "a", "b")
