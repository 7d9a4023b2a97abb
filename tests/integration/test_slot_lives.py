"""Loads and unloads from their first ask to their end, through drains and endings of their replica."""

import asyncio

from nodeagent.domain.pins import uses_in
from nodeagent.slotwork import SlotTimes
from schemas import codes
from schemas.adapterasks import AdapterHolders
from tests.support.slot_yard import BUSY, SlotYard, story


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


def test_a_desk_that_ends_begins_nothing_any_more(tmp_path):
    async def tell(yard: SlotYard):
        yard.serve(slots=1, room=1)
        await yard.have("a")
        waiting = asyncio.ensure_future(yard.ask("b", wait_s=5.0))
        await asyncio.sleep(0.01)
        assert yard.running is not None
        yard.running.cancel()
        await asyncio.wait({yard.running})
        assert (await waiting).status == "not_here"
        assert (await yard.ask("c")).status == "not_here"
        # The one that waited was looked at again in a while.
        yard.beat()
        await asyncio.sleep(1.1)
        assert yard.engine.names("load") == ["a"]
        assert yard.engine.names("unload") == []

    story(tmp_path, tell, "a", "b", "c")


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
        # What is told to leave is not loaded any more from the first unload on.
        await yard.until(lambda: set(yard.engine.loaded) == {yard.pin("c")}, "two to leave")
        assert (most, yard.engine.names("unload")) == (1, ["a", "b"])
        assert yard.loaded() == {"c"}
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
