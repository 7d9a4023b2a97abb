"""What an agent's death does to engines, and what the next agent makes of what it finds: nothing that is lost."""

import asyncio
import os

import psutil

from nodeagent.launching import Launcher
from schemas.node import NodeStarted
from schemas.settings import GIB
from tests.support.agent_engines import engines_of, journal_has, pid_of, plan_in_journal, serves
from tests.support.agent_yard import a_stop, alive, an_item, memory_yard
from tests.support.aio import run, until
from tests.support.ports import engine_ports


def test_scn_a10_an_agent_that_dies_while_an_engine_loads_is_followed_by_one_owner(tmp_path):
    async def story():
        async with memory_yard(tmp_path) as yard:
            hand = yard.hand
            item = an_item("r-1", "--load-s", "0.8")
            async with yard.agent() as first:
                await hand.plan(item)
                await hand.phase("r-1", "starting")
                await until(lambda: len(engines_of(yard, "r-1")) == 1, "the engine's process")
                await first.die()
            (engine,) = engines_of(yard, "r-1")
            async with yard.agent():
                ready = await hand.phase("r-1", "ready")
                assert [p.pid for p in engines_of(yard, "r-1")] == [engine.pid]
                assert await serves(ready.endpoint, "r-1")
                assert ready.load_s >= 0.8
                starts = [i for i in hand.seen if i.type == "replica.starting"]
                # Said again under the new epoch, of the same process.
                assert [i.state.pid for i in starts][-1] == engine.pid
                epochs = [i.seq for i in hand.seen if i.type == "node.started"]
                assert ready.epoch == epochs[-1]

    run(story())


def test_inv_6_an_agent_that_dies_leaves_its_ready_engine_serving_and_the_next_adopts_it(tmp_path):
    async def story():
        async with memory_yard(tmp_path) as yard:
            hand = yard.hand
            async with yard.agent() as first:
                await hand.plan(an_item("r-1"))
                ready = await hand.phase("r-1", "ready")
                pid = await pid_of(yard, "r-1")
                await first.die()
            assert alive(pid)
            assert await serves(ready.endpoint, "r-1")
            async with yard.agent():
                await hand.expect(
                    lambda: hand.types().count("node.started") == 2, "the second start"
                )
                second = next(i for i in reversed(hand.seen) if i.type == "node.started")
                assert second.event == NodeStarted(adopted=("r-1",))
                await hand.expect(
                    lambda: hand.replica("r-1").epoch == second.seq, "the state under the new epoch"
                )
                again = hand.replica("r-1")
                assert (again.phase, again.pid, again.endpoint, again.ready_at) == (
                    "ready",
                    pid,
                    ready.endpoint,
                    ready.ready_at,
                )
                await hand.expect(lambda: hand.card().epoch == second.seq, "the card said again")
                assert [lease.holder for lease in hand.card().leases] == ["r-1"]
                # It is its owner: it can stop it.
                await hand.plan(an_item("r-1", stop=a_stop()))
                await hand.phase("r-1", "stopped")
                assert not alive(pid)
                await hand.expect(lambda: hand.card().leases == (), "the lease to end")

    run(story())


def test_req_x5_an_engine_that_ended_while_no_agent_lived_is_declared_failed(tmp_path):
    async def story():
        async with memory_yard(tmp_path) as yard:
            hand = yard.hand
            async with yard.agent() as first:
                await hand.plan(an_item("r-1"))
                await hand.phase("r-1", "ready")
                pid = await pid_of(yard, "r-1")
                await first.die()
            psutil.Process(pid).kill()
            await until(lambda: not alive(pid), "the engine's end")
            async with yard.agent():
                failed = await hand.phase("r-1", "failed")
                assert failed.was_ready
                assert failed.exit_status == -9
                await hand.expect(lambda: hand.card().leases == (), "the lease to end")
            assert hand.types("r-1").count("replica.failed") == 1
            assert hand.types().count("card.released") == 1

    run(story())


def test_an_agent_that_dies_in_a_drain_is_followed_by_one_that_ends_it(tmp_path):
    async def story():
        async with memory_yard(tmp_path, gateway=False) as yard:
            hand = yard.hand
            await hand.beacon(position=10**9, inflight={"r-1": 1})
            async with yard.agent() as first:
                await hand.plan(an_item("r-1"))
                await hand.phase("r-1", "ready")
                await hand.beacon(position=10**9, inflight={"r-1": 1})
                await hand.plan(an_item("r-1", stop=a_stop()))
                await hand.phase("r-1", "draining")
                await first.die()
            assert len(engines_of(yard, "r-1")) == 1
            async with yard.agent():
                await hand.phase("r-1", "stopped")
                assert engines_of(yard, "r-1") == []

    run(story())


def test_inv_7_without_its_journal_it_goes_on_from_the_log_and_the_processes(tmp_path):
    async def story():
        async with memory_yard(tmp_path) as yard:
            hand = yard.hand
            loading = an_item("r-2", "--load-s", "2")
            async with yard.agent() as first:
                await hand.plan(an_item("r-1"))
                await hand.phase("r-1", "ready")
                await hand.expect(lambda: hand.replica("r-1").measured_memory_bytes, "measured")
                await hand.plan(an_item("r-1"), loading)
                await hand.phase("r-2", "starting")
                await until(lambda: len(engines_of(yard, "r-2")) == 1, "the second engine")
                await first.die()
            pids = {p.pid for name in ("r-1", "r-2") for p in engines_of(yard, name)}
            yard.lose_journal()
            async with yard.agent():
                await hand.phase("r-2", "ready")
                assert {p.pid for name in ("r-1", "r-2") for p in engines_of(yard, name)} == pids
                assert hand.replica("r-1").phase == "ready"
                assert sorted(lease.holder for lease in hand.card().leases) == ["r-1", "r-2"]
                assert "replica.failed" not in hand.types()

    run(story())


def test_inv_7_an_engine_that_neither_journal_nor_log_knows_is_ended_and_its_id_refused(tmp_path):
    """Its agent died before the log heard of the start, and the journal is lost: the plan alone names it."""

    async def story():
        async with memory_yard(tmp_path) as yard:
            hand = yard.hand
            async with yard.agent() as first:
                await hand.plan(an_item("r-1"))
                await hand.phase("r-1", "ready")
                await first.die()
            plan_in_journal(yard, an_item("r-1"), an_item("r-2"))
            agent = yard.agent()
            yard.cut()
            async with agent as second:
                await until(lambda: journal_has(yard, "r-2", "ready"), "r-2 ready in the journal")
                (engine,) = engines_of(yard, "r-2")
                await second.die()
            yard.mend()
            assert hand.types("r-2") == []
            yard.lose_journal()
            await hand.plan(an_item("r-1"), an_item("r-2"))
            async with yard.agent():
                refused = await hand.phase("r-2", "refused")
                assert refused.card_revs == {}
                await until(lambda: not alive(engine.pid), "the end of the engine")
                await hand.plan(an_item("r-1"), an_item("r-3"))
                await hand.phase("r-3", "ready")
                assert sorted(lease.holder for lease in hand.card().leases) == ["r-1", "r-3"]
            assert hand.types("r-2") == ["replica.refused"]

    run(story())


def test_scn_a10_an_engine_that_nobody_knows_is_killed(tmp_path):
    async def story():
        async with memory_yard(tmp_path) as yard:
            hand = yard.hand
            async with yard.agent() as first:
                await hand.plan(an_item("r-1"))
                await hand.phase("r-1", "ready")
                pid = await pid_of(yard, "r-1")
                await first.die()
            yard.lose_journal()
            # Another yard's log: neither it nor a journal knows of this launch.
            async with memory_yard(tmp_path) as other, other.agent():
                await until(lambda: not alive(pid), "the end of the engine without an owner")
                assert other.hand.types("r-1") == []

    run(story())


def test_sigterm_leaves_engines_and_sigint_ends_them(tmp_path):
    async def story():
        async with memory_yard(tmp_path) as yard:
            hand = yard.hand
            async with yard.agent() as first:
                await hand.plan(an_item("r-1"), an_item("r-2", "--load-s", "30"))
                await hand.phase("r-1", "ready")
                await until(lambda: len(engines_of(yard, "r-2")) == 1, "the loading engine")
                await first.leave()
            left = next(i for i in hand.seen if i.type == "node.stopped")
            assert left.event.engines_left == 2
            assert not left.state.running
            assert len(engines_of(yard, "r-1")) == len(engines_of(yard, "r-2")) == 1
            async with yard.agent() as second:
                await hand.expect(lambda: hand.types().count("node.started") == 2, "its start")
                await hand.expect(lambda: second.agent.registered.is_set(), "its registration")
                await second.leave(stop_engines=True)
            assert engines_of(yard, "r-1") == engines_of(yard, "r-2") == []
            last = next(i for i in reversed(hand.seen) if i.type == "node.stopped")
            assert last.event.engines_left == 0
            assert hand.replica("r-1").phase == hand.replica("r-2").phase == "stopped"
            assert hand.card().leases == ()

    run(story())


def test_sigint_during_the_start_ends_engines_and_begins_none(tmp_path):
    """The start goes on beside the leaving; what it decides then must not bring up anything."""

    async def story():
        async with memory_yard(tmp_path) as yard:
            hand = yard.hand
            async with yard.agent() as first:
                await hand.plan(an_item("r-1", "--ignore-sigterm"))
                await hand.phase("r-1", "ready")
                pid = await pid_of(yard, "r-1")
                await first.die()
            plan_in_journal(yard, an_item("r-1"), an_item("r-2"))
            agent = yard.agent()
            yard.cut()
            async with agent as second:
                await second.leave(stop_engines=True)
            assert not alive(pid)
            launched = os.listdir(tmp_path / "nodeagent" / "replicas")
            assert launched == ["r-1"]

    run(story())


def test_inv_6_an_engine_that_ends_before_the_log_tells_of_it_is_declared_failed(tmp_path):
    """Without a journal an engine has no owner until the log was read, and that may take long."""

    async def story():
        async with memory_yard(tmp_path) as yard:
            hand = yard.hand
            async with yard.agent() as first:
                await hand.plan(an_item("r-1"))
                await hand.phase("r-1", "ready")
                pid = await pid_of(yard, "r-1")
                await first.die()
            yard.lose_journal()
            made: list[Launcher] = []
            adopted = asyncio.Event()

            class Watched(Launcher):
                async def adopt(self, replica: str):
                    found = await super().adopt(replica)
                    made.append(self)
                    adopted.set()
                    return found

            agent = yard.agent(make_launcher=Watched)
            yard.cut()
            async with agent:
                await adopted.wait()
                psutil.Process(pid).kill()

                async def heard() -> bool:
                    return (await made[0].read_log("r-1")).ended and made[0].events.empty()

                await until(heard, "the agent to hear of the end")
                yard.mend()
                await hand.phase("r-1", "failed")

    run(story())


def test_leases_on_a_full_card_survive_the_agent_so_nothing_is_given_twice(tmp_path):
    async def story():
        async with memory_yard(tmp_path) as yard:
            hand = yard.hand
            big = an_item("r-1", memory_bytes=3 * GIB)
            async with yard.agent() as first:
                await hand.plan(big)
                await hand.phase("r-1", "ready")
                await first.die()
            async with yard.agent():
                await hand.plan(big, an_item("r-2", memory_bytes=3 * GIB))
                await hand.phase("r-2", "refused")

    run(story())


def test_scn_a11_ports_given_before_the_journal_was_lost_are_not_given_again_soon(tmp_path):
    async def story():
        async with memory_yard(tmp_path) as yard:
            hand = yard.hand
            ports = engine_ports()
            async with yard.agent(ports=ports) as first:
                await hand.plan(an_item("r-1"))
                before = (await hand.phase("r-1", "ready")).endpoint
                await first.leave(stop_engines=True)
            yard.lose_journal()
            async with yard.agent(ports=ports):
                await hand.plan(an_item("r-2"))
                assert (await hand.phase("r-2", "ready")).endpoint != before

    run(story())


def test_a_journal_nobody_can_read_is_put_aside(tmp_path):
    async def story():
        folder = tmp_path / "nodeagent"
        folder.mkdir()
        (folder / "journal.sqlite").write_bytes(os.urandom(8192))
        async with memory_yard(tmp_path) as yard, yard.agent():
            await yard.hand.plan(an_item("r-1"))
            await yard.hand.phase("r-1", "ready")
        assert (folder / "journal.sqlite.broken").exists()

    run(story())
