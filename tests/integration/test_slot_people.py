"""The desk for adapters when the catalog changes, and what people ask of it."""

import asyncio

from nodeagent.domain.slotasks import LONGEST_WAIT_S
from schemas import codes
from schemas.adapterasks import AdapterHolders, LoadAdapter, UnloadAdapter
from schemas.beacons import GatewayBeacon, Pin
from schemas.slots import SlotsEvicted, SlotsLeaving
from tests.support.aio import until
from tests.support.slot_yard import BUSY, SlotYard, story


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


def test_scn_d8_who_asks_for_what_leaves_is_told_at_once_and_need_not_keep_it(tmp_path):
    async def tell(yard: SlotYard):
        yard.serve()
        await yard.have("a")
        yard.beat({"a": 1})
        await yard.person(UnloadAdapter(replica="r-1", adapter="a"), wait_s=0.0)
        async with asyncio.timeout(LONGEST_WAIT_S / 2):
            answer = await yard.ask("a", gateway="g2", wait_s=LONGEST_WAIT_S)
        assert (answer.status, answer.code) == ("waiting", codes.IN_USE)
        # The one that waits counts on it no more, and what ran has ended.
        yard.beat(gateway="g2")
        yard.beat()
        await until(lambda: yard.loaded() == set(), "the unload")
        assert (await yard.ask("a", gateway="g2")).how == "loaded"

    story(tmp_path, tell, "a")


def test_scn_d8_an_unload_is_done_although_a_request_has_it_loaded_anew_at_once(tmp_path):
    async def tell(yard: SlotYard):
        yard.serve()
        await yard.have("a")
        yard.beat()
        yard.engine.unload_gate = asyncio.Event()
        unload = asyncio.ensure_future(yard.person(UnloadAdapter(replica="r-1", adapter="a")))
        await yard.until(lambda: yard.engine.names("unload") == ["a"], "the unload to begin")
        ask = asyncio.ensure_future(yard.ask("a", "g2"))
        await asyncio.sleep(0.01)
        yard.engine.unload_gate.set()
        assert (await ask).how == "loaded"
        assert (await unload).status == "done"
        # Asked for once, it left once.
        assert yard.engine.names("unload") == ["a"]
        assert yard.loaded() == {"a"}

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
