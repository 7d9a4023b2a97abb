"""What an engine really has: read when it is taken over, after each unload, after a rest, and now and then."""

import asyncio
from datetime import UTC, datetime

from msgspec.structs import replace

from nodeagent.domain.adapterfiles import set_of
from nodeagent.drivers.driver import AdapterFault
from schemas import codes
from schemas.slots import BadAdapter, Slot, Slots, SlotsDrifted, SlotsEvicted
from tests.support.slot_yard import QUICK, ScriptedEngine, SlotYard, story

LONG_AGO = datetime(2026, 1, 1, tzinfo=UTC)
VERSION = "0123456789ab"
BUSY = AdapterFault(whose="replica", code=codes.LOAD_FAILED, text="not now")


def known(*adapters: str, bad: tuple[BadAdapter, ...] = ()) -> Slots:
    """What an earlier agent told."""
    loaded = tuple(Slot(adapter=a, version=VERSION, since=LONG_AGO) for a in adapters)
    return Slots(
        node="n1",
        replica="r-1",
        model="m",
        epoch=5,
        limit=2,
        since=LONG_AGO,
        loaded=loaded,
        bad=bad,
    )


def has(yard: SlotYard, *adapters: str) -> None:
    """The engine has these loaded, from where they belong."""
    for name in adapters:
        folder = yard.files.folder(yard.files.adapters[name])
        yard.engine.loaded[yard.pin(name)] = str(folder)


def drifts(yard: SlotYard) -> list[tuple[tuple[str, ...], tuple[str, ...]]]:
    return [(e.lost, e.found) for _, e in yard.said if isinstance(e, SlotsDrifted)]


class SlowToList(ScriptedEngine):
    """Its first list is held back."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = asyncio.Event()

    async def list_adapters(self, endpoint: str, key: str):
        told = await super().list_adapters(endpoint, key)
        await self.gate.wait()
        return told


def test_req_b15_an_engine_that_is_taken_over_is_asked_before_anybody_is_answered(tmp_path):
    async def tell(yard: SlotYard):
        assert isinstance(yard.engine, SlowToList)
        has(yard, "a")
        yard.serve(adopted=True)
        asks = [asyncio.ensure_future(yard.ask("a", f"g{n}")) for n in range(5)]
        assert (await yard.ask("a", "g9", wait_s=0.05)).status == "waiting"
        assert not any(ask.done() for ask in asks)
        yard.engine.gate.set()
        answers = await asyncio.gather(*asks)
        assert {(a.status, a.how) for a in answers} == {("ready", "hit")}
        assert yard.engine.names("load") == []
        # B17: one first read, however many waited for it.
        assert yard.engine.calls == [("list", "")]
        assert drifts(yard) == [((), (yard.pin("a"),))]
        assert yard.books.slots["r-1"].loaded[0].how == "found"

    story(tmp_path, tell, "a", engine=SlowToList())


def test_req_b16_one_that_was_met_is_not_met_again(tmp_path):
    async def tell(yard: SlotYard):
        yard.serve(adopted=True)
        await yard.have("a")
        yard.desk.serve("r-1", adopted=True)
        await yard.have("b")
        assert yard.engine.calls.count(("list", "")) == 1

    story(tmp_path, tell, "a", "b")


def test_req_bugb3_who_asks_first_and_leaves_does_not_spoil_the_first_read(tmp_path):
    async def tell(yard: SlotYard):
        assert isinstance(yard.engine, SlowToList)
        has(yard, "a")
        yard.serve(adopted=True)
        first = asyncio.ensure_future(yard.ask("a"))
        await asyncio.sleep(0.01)
        first.cancel()
        await asyncio.gather(first, return_exceptions=True)
        yard.engine.gate.set()
        assert (await yard.have("a")).how == "hit"

    story(tmp_path, tell, "a", engine=SlowToList())


def test_req_b20_an_engine_whose_list_does_not_come_is_taken_to_have_what_was_told(tmp_path):
    async def tell(yard: SlotYard):
        yard.books.slots["r-1"] = known("a")
        yard.engine.list_faults = [BUSY]
        yard.serve(adopted=True)
        assert (await yard.have("a")).how == "hit"
        assert drifts(yard) == []
        # B21, and the next read corrects it.
        await yard.until(lambda: drifts(yard) == [((yard.pin("a"),), ())], "the next read")
        assert yard.loaded() == set()

    story(tmp_path, tell, "a")


def test_what_is_remembered_of_an_engine_and_still_there_is_no_drift(tmp_path):
    async def tell(yard: SlotYard):
        yard.books.slots["r-1"] = known("a", "b")
        has(yard, "a", "b")
        yard.serve(adopted=True)
        await yard.have("a")
        assert yard.said == []
        assert yard.files.kept["r-1"] == {
            yard.files.adapters[name].files[0].key for name in ("a", "b")
        }

    story(tmp_path, tell, "a", "b")


def test_inv_3_what_an_engine_may_have_is_told_only_once_list_and_catalog_were_read(tmp_path):
    async def tell(yard: SlotYard):
        assert isinstance(yard.engine, SlowToList)
        a, b = yard.files.adapters["a"], yard.files.adapters.pop("b")
        yard.books.slots["r-1"] = known("a")
        yard.engine.loaded = {
            f"{n}@01234567": str(yard.files.folder(x)) for n, x in zip("ab", (a, b), strict=True)
        }
        yard.serve(adopted=True)
        await asyncio.sleep(0.01)
        assert yard.files.kept == {}
        yard.engine.gate.set()
        await yard.until(lambda: "r-1" in yard.files.kept, "the list")
        # Also what the catalog does not have.
        assert yard.files.kept["r-1"] == {set_of(a), set_of(b)}

    story(tmp_path, tell, "a", "b", engine=SlowToList())


def test_inv_3_what_a_parked_engine_has_is_told_only_once_the_catalog_was_read(tmp_path):
    async def tell(yard: SlotYard):
        adapter = yard.files.adapters.pop("a")
        yard.files.synced = False
        yard.books.slots["r-1"] = known("a")
        yard.serve("r-2", adopted=True)
        yard.books.held["r-1"] = replace(
            held := yard.books.held["r-2"], replica=replace(held.replica, id="r-1", phase="parked")
        )
        yard.desk.rest("r-1")
        assert yard.files.kept == {"r-2": frozenset()} or yard.files.kept == {}
        yard.files.adapters["a"] = adapter
        yard.files.synced = True
        yard.files.on_change(frozenset({"a"}))
        assert yard.files.kept["r-1"] == {set_of(adapter)}

    story(tmp_path, tell, "a")


def test_one_that_is_there_already_and_cannot_be_looked_at_is_found_a_little_later(tmp_path):
    async def tell(yard: SlotYard):
        yard.serve(slots=1, room=1)
        await yard.until(lambda: ("list", "") in yard.engine.calls, "the first list")
        has(yard, "a")
        yard.engine.list_faults = [BUSY]
        assert (await yard.ask("a")).status == "refused"
        await yard.until(lambda: yard.loaded() == {"a"}, "the list")
        assert yard.engine.names("load") == ["a"]

    story(tmp_path, tell, "a")


def test_while_nobody_knows_what_became_of_a_load_the_list_is_read_more_often(tmp_path):
    async def tell(yard: SlotYard):
        yard.serve()
        late = AdapterFault(whose="replica", code=codes.LOAD_TIMEOUT, text="no answer")
        yard.engine.faults["a"] = [late]
        assert (await yard.ask("a")).status == "refused"
        before = yard.engine.calls.count(("list", ""))
        await yard.until(
            lambda: yard.engine.calls.count(("list", "")) > before + 2, "several more lists"
        )

    story(tmp_path, tell, "a")


def test_a_root_that_is_no_path_is_another_place(tmp_path):
    async def tell(yard: SlotYard):
        yard.engine.loaded = {yard.pin("a"): "/x\0/y"}
        yard.serve(adopted=True)
        assert (await yard.have("a")).engine_name == f"{yard.pin('a')}.1"

    story(tmp_path, tell, "a")


def test_a_failure_outlives_the_agent_that_saw_it(tmp_path):
    async def tell(yard: SlotYard):
        until = datetime(2099, 1, 1, tzinfo=UTC)
        bad = BadAdapter(
            adapter="a", version=VERSION, code="x", reason="no", until=until, whose="adapter"
        )
        yard.books.slots["r-1"] = known(bad=(bad,))
        yard.serve(adopted=True)
        answer = await yard.ask("a")
        assert (answer.status, answer.whose, answer.until) == ("refused", "adapter", until)
        assert yard.engine.names("load") == []

    story(tmp_path, tell, "a")


def test_an_agent_that_took_an_engine_over_evicts_nothing_until_every_pin_was_heard(tmp_path):
    async def tell(yard: SlotYard):
        has(yard, "a", "b", "c")
        yard.serve(adopted=True)
        await yard.have("c")
        yard.beat({"c": 0})
        asked = asyncio.get_running_loop().time()
        await yard.until(lambda: len(yard.loaded()) == 2, "one to leave")
        assert asyncio.get_running_loop().time() - asked > 0.2
        assert yard.loaded() == {"b", "c"}

    story(tmp_path, tell, "a", "b", "c", pin_s=0.4)


def test_an_agent_without_a_connection_evicts_nothing_and_not_at_once_after(tmp_path):
    async def tell(yard: SlotYard):
        yard.serve(slots=1, room=1)
        await yard.have("a")
        yard.up = False
        yard.gateways.connection_lost()
        assert (await yard.ask("b", wait_s=0.1)).status == "waiting"
        yard.up = True
        yard.beat()
        began = asyncio.get_running_loop().time()
        answer = await yard.ask("b", wait_s=5.0)
        assert answer.status == "ready"
        assert asyncio.get_running_loop().time() - began > 0.3

    story(tmp_path, tell, "a", "b", pin_s=0.4)


def test_a_pin_of_a_gateway_that_fell_silent_runs_out_and_what_it_used_only_by_the_engines_word(
    tmp_path,
):
    async def tell(yard: SlotYard):
        yard.serve(slots=1)
        await yard.have("a")
        yard.beat({"a": 1})
        yard.engine.running = None
        await yard.have("b", gateway="g2")
        await asyncio.sleep(0.5)
        assert yard.loaded() == {"a", "b"}
        yard.beat({"b": 1}, gateway="g2")
        yard.engine.running = set()
        await yard.until(lambda: yard.loaded() == {"b"}, "a to leave")

    story(tmp_path, tell, "a", "b", pin_s=0.2)


def test_req_b7_the_list_is_read_now_and_then_and_what_differs_is_said(tmp_path):
    async def tell(yard: SlotYard):
        yard.serve()
        await yard.have("a")
        yard.beat()
        yard.engine.loaded.clear()
        await yard.until(lambda: bool(drifts(yard)), "the loss to be seen")
        assert drifts(yard) == [((yard.pin("a"),), ())]
        assert (await yard.have("a")).how == "loaded"
        has(yard, "b")
        await yard.until(lambda: len(drifts(yard)) == 2, "the find to be seen")
        assert drifts(yard)[1] == ((), (yard.pin("b"),))

    times = type(QUICK)(
        load_s=2.0, unload_s=0.5, list_s=0.5, ask_s=0.5, audit_s=0.05, again_s=0.05, rest_s=0.1
    )
    story(tmp_path, tell, "a", "b", times=times)


def test_req_bugb1_a_list_asked_for_before_an_unload_puts_nothing_back(tmp_path):
    async def tell(yard: SlotYard):
        assert isinstance(yard.engine, SlowToList)
        yard.engine.gate.set()
        yard.serve(slots=1)
        await yard.have("a")
        yard.engine.gate.clear()
        replica = yard.desk._replicas["r-1"]
        replica._audit_soon(0.0)
        lists = yard.engine.calls.count(("list", ""))
        await yard.until(lambda: yard.engine.calls.count(("list", "")) > lists, "the list")
        yard.beat()
        await yard.have("b")
        await yard.until(lambda: yard.loaded() == {"b"}, "a to leave")
        yard.engine.gate.set()
        await yard.until(lambda: yard.engine.calls.count(("list", "")) > lists + 1, "the next")
        await asyncio.sleep(0.02)
        assert yard.loaded() == {"b"}
        assert drifts(yard) == []
        assert (await yard.have("a")).how == "loaded"

    story(tmp_path, tell, "a", "b", engine=SlowToList())


def test_req_bugb2_an_engine_that_lists_before_it_answers_changes_nothing(tmp_path):
    async def tell(yard: SlotYard):
        yard.serve()
        yard.engine.gates["a"] = asyncio.Event()
        asks = [asyncio.ensure_future(yard.ask("a", f"g{n}")) for n in range(3)]
        await yard.until(lambda: yard.engine.names("load") == ["a"], "the load")
        lists = yard.engine.calls.count(("list", ""))
        # Registered already, and not answered yet.
        has(yard, "a")
        replica = yard.desk._replicas["r-1"]
        replica._audit_soon(0.0)
        await yard.until(lambda: yard.engine.calls.count(("list", "")) > lists, "the list")
        await asyncio.sleep(0.02)
        assert drifts(yard) == []
        assert len(replica.state.places) == 1
        yard.engine.gates["a"].set()
        assert {(await ask).status for ask in asks} == {"ready"}
        assert len(replica.state.places) == 1

    story(tmp_path, tell, "a")


def test_an_engine_that_rested_is_asked_again_before_anybody_is_answered(tmp_path):
    async def tell(yard: SlotYard):
        yard.serve()
        await yard.have("a")
        yard.beat()
        yard.phase("parked")
        yard.desk.rest("r-1")
        assert yard.desk.recall() == {}
        yard.engine.loaded.clear()
        yard.phase("ready")
        yard.desk.serve("r-1", adopted=False)
        answer = await yard.ask("a")
        assert (answer.status, answer.how) == ("ready", "loaded")
        assert drifts(yard) == [((yard.pin("a"),), ())]

    story(tmp_path, tell, "a")


def test_found_ones_of_older_versions_and_of_nobody_leave_and_foreign_ones_stay(tmp_path):
    async def tell(yard: SlotYard):
        has(yard, "a")
        yard.engine.loaded |= {
            "a@ffffffff": str(yard.files.root / "old"),
            "gone@ffffffff": str(yard.files.root / "gone"),
            "static": "/models/static",
            "a@eeeeeeee": "/somewhere/else",
        }
        yard.serve(adopted=True)
        await yard.have("a")
        await yard.until(lambda: len(yard.engine.loaded) == 3, "two to leave")
        assert set(yard.engine.loaded) == {yard.pin("a"), "static", "a@eeeeeeee"}
        whys = {(e.adapter, e.why) for _, e in yard.said if isinstance(e, SlotsEvicted)}
        assert whys == {("a", "version"), ("gone", "removed")}
        assert yard.books.slots["r-1"].foreign == 2
        assert "its engine lists something else; 2 are foreign" in yard.reasons

    story(tmp_path, tell, "a", pin_s=0.1)


def test_until_the_catalog_was_read_nothing_counts_as_removed(tmp_path):
    async def tell(yard: SlotYard):
        yard.files.synced = False
        has(yard, "a")
        adapter = yard.files.adapters.pop("a")
        yard.serve(adopted=True)
        await yard.until(lambda: yard.loaded() == {"a"}, "a to be found")
        await asyncio.sleep(0.05)
        assert yard.engine.names("unload") == []
        yard.files.synced = True
        yard.files.adapters["a"] = adapter
        yard.files.on_change(frozenset({"a"}))
        answer = await yard.have("a")
        assert answer.how == "hit"

    story(tmp_path, tell, "a", pin_s=0.01)


def test_until_the_catalog_was_read_nobody_is_answered_by_what_came_from_elsewhere(tmp_path):
    async def tell(yard: SlotYard):
        # Ours by its name and by where its files lie, and yet another's.
        yard.engine.loaded[yard.pin("a")] = str(yard.files.folder(yard.files.adapters["b"]))
        yard.files.synced = False
        adapter = yard.files.adapters.pop("a")
        yard.serve(adopted=True)
        await yard.until(lambda: yard.loaded() == {"a"}, "a to be found")
        yard.files.synced = True
        yard.files.adapters["a"] = adapter
        yard.files.on_change(frozenset({"a"}))
        answer = await yard.have("a")
        assert answer.how == "loaded"
        assert yard.engine.loaded[answer.engine_name] == str(yard.files.folder(adapter))

    story(tmp_path, tell, "a", "b")


def test_an_agent_that_starts_lets_asks_wait_for_its_engines(tmp_path):
    async def tell(yard: SlotYard):
        yard.serve()
        held = yard.books.held["r-1"]
        yard.desk.leave("r-1")
        ask = asyncio.ensure_future(yard.ask("a", wait_s=5.0))
        await asyncio.sleep(0.01)
        assert (await yard.ask("a", wait_s=0.01)).status == "waiting"
        yard.books.held["r-1"] = held
        yard.desk.serve("r-1", adopted=True)
        assert (await ask).status == "ready"

    story(tmp_path, tell, "a")


def test_req_b17_all_who_come_at_first_share_one_read(tmp_path):
    async def tell(yard: SlotYard):
        assert isinstance(yard.engine, SlowToList)
        yard.serve(adopted=True)
        names = ("a", "b") * 5
        asks = [asyncio.ensure_future(yard.ask(name, f"g{n}")) for n, name in enumerate(names)]
        await asyncio.sleep(0.01)
        yard.engine.gate.set()
        assert {(await ask).status for ask in asks} == {"ready"}
        assert yard.engine.calls.count(("list", "")) == 1

    story(tmp_path, tell, "a", "b", engine=SlowToList())


def test_req_b19_a_list_that_comes_when_its_replica_has_left_is_dropped(tmp_path):
    async def tell(yard: SlotYard):
        assert isinstance(yard.engine, SlowToList)
        has(yard, "a")
        yard.serve(adopted=True)
        await yard.until(lambda: ("list", "") in yard.engine.calls, "the list")
        yard.phase("failed")
        yard.desk.leave("r-1")
        yard.engine.gate.set()
        await asyncio.sleep(0.02)
        assert (yard.said, yard.books.slots, yard.files.kept) == ([], {}, {})

    story(tmp_path, tell, "a", engine=SlowToList())


def test_req_b21_a_read_that_failed_changes_nothing_that_was_known(tmp_path):
    async def tell(yard: SlotYard):
        yard.serve()
        await yard.have("a")
        replica = yard.desk._replicas["r-1"]
        before = replica.state
        lists = yard.engine.calls.count(("list", ""))
        yard.engine.list_faults = [BUSY]
        yard.engine.loaded.clear()
        replica._audit_soon(0.0)
        await yard.until(lambda: yard.engine.calls.count(("list", "")) > lists, "the read")
        await asyncio.sleep(0.01)
        assert replica.state.places == before.places
        assert drifts(yard) == []

    story(tmp_path, tell, "a")


def test_a_parked_engine_that_is_taken_over_is_asked_nothing_and_its_files_stay(tmp_path):
    async def tell(yard: SlotYard):
        yard.serve()
        yard.desk.leave("r-1")
        calls = len(yard.engine.calls)
        yard.books.slots["r-1"] = known("a")
        yard.phase("parked")
        yard.desk.rest("r-1")
        assert yard.files.kept["r-1"] == {yard.files.adapters["a"].files[0].key}
        assert len(yard.engine.calls) == calls
        assert (await yard.ask("a")).status == "not_here"

    story(tmp_path, tell, "a")


def test_a_list_asked_for_before_an_engine_rested_is_no_meeting_after_it(tmp_path):
    async def tell(yard: SlotYard):
        assert isinstance(yard.engine, SlowToList)
        yard.serve()
        await yard.have("a")
        await yard.until(lambda: ("list", "") in yard.engine.calls, "the list before")
        yard.phase("parked")
        yard.desk.rest("r-1")
        yard.engine.loaded.clear()
        yard.phase("ready")
        yard.desk.serve("r-1", adopted=False)
        yard.engine.gate.set()
        answer = await yard.have("a")
        assert answer.how == "loaded"
        assert yard.engine.calls.count(("list", "")) >= 2

    story(tmp_path, tell, "a", engine=SlowToList())
