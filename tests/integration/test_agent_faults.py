"""What an agent's death, an absent log and a second agent do to engines and to the log: nothing that is lost."""

import asyncio
import os
import sqlite3

import httpx
import msgspec
import psutil
import pytest

from events.log import Draft
from events.memory import MemoryLog, MemoryWire
from events.memory_broker import MemoryBroker
from events.retry import ServerError
from events.subjects import event_subject
from nodeagent.agent import Unreadable
from nodeagent.app import Locked
from nodeagent.journal import KnownPlan
from nodeagent.launching import Launcher
from nodeagent.reporter import Deposed, Reporter
from schemas.node import NodeStarted
from schemas.plan import Plan
from schemas.replica import Replica
from schemas.settings import GIB
from tests.support.agent_yard import (
    MemoryYard,
    a_node,
    a_stop,
    alive,
    an_item,
    memory_yard,
    running_agent,
)
from tests.support.aio import run, until
from tests.support.ports import engine_ports


async def pid_of(yard: MemoryYard, replica: str) -> int:
    """The engine's pid, as the log tells it."""
    await yard.hand.expect(
        lambda: (r := yard.hand.replica(replica)) is not None and r.pid, f"the pid of {replica}"
    )
    found = yard.hand.replica(replica)
    assert found is not None
    assert found.pid is not None
    return found.pid


async def serves(endpoint: str | None, replica: str) -> bool:
    headers = {"Authorization": f"Bearer key-of-{replica}"}
    async with httpx.AsyncClient() as client:
        return (await client.get(f"{endpoint}/v1/models", headers=headers)).status_code == 200


def engines_of(yard: MemoryYard, replica: str) -> list[psutil.Process]:
    """Living engine processes of a launch of this very yard, the launcher left out."""
    folder = str(yard.folder)
    found = []
    for process in psutil.process_iter():
        try:
            above = process.parent()
            if (
                above is not None
                and any(word.startswith(folder) for word in above.cmdline())
                and process.environ().get("YARD_LAUNCH_ID") == replica
                and process.status() != psutil.STATUS_ZOMBIE
            ):
                found.append(process)
        except psutil.Error:
            continue
    return found


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
            _plan_in_journal(yard, an_item("r-1"), an_item("r-2"))
            agent = yard.agent()
            yard.cut()
            async with agent as second:
                await until(lambda: _journal_has(yard, "r-2", "ready"), "r-2 ready in the journal")
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


def test_log_18_during_an_outage_engines_run_on_and_changes_follow_in_order_with_their_times(
    tmp_path,
):
    async def story():
        async with memory_yard(tmp_path) as yard, yard.agent():
            hand = yard.hand
            await hand.plan(an_item("r-1"))
            ready = await hand.phase("r-1", "ready")
            await hand.expect(lambda: hand.replica("r-1").measured_memory_bytes, "measured")
            await hand.expect(lambda: hand.card().used_bytes, "the card's use")
            await hand.plan(an_item("r-1"), an_item("r-2", "--load-s", "2"))
            await hand.phase("r-2", "starting")
            await until(lambda: len(engines_of(yard, "r-2")) == 1, "the second engine")
            pid = await pid_of(yard, "r-1")
            before = len(hand.seen)
            yard.cut()
            # While nobody hears: r-2 becomes ready, then r-1 dies.
            launched = engines_of(yard, "r-2")
            assert len(launched) == 1
            assert await serves(ready.endpoint, "r-1")
            await until(lambda: _journal_has(yard, "r-2", "ready"), "r-2 ready in the journal")
            psutil.Process(pid).kill()
            await until(lambda: _journal_has(yard, "r-1", "failed"), "r-1 failed in the journal")
            told_at = [i.time for i in hand.seen][-1]
            assert len(hand.seen) == before
            yard.mend()
            await hand.phase("r-1", "failed")
            await hand.expect(
                lambda: [lease.holder for lease in hand.card().leases] == ["r-2"], "one lease left"
            )
            later = [i for i in hand.seen[before:] if i.noun == "replica"]
            kinds = [f"{i.key[1]} {i.type}" for i in later]
            assert kinds.index("r-2 replica.ready") < kinds.index("r-1 replica.failed")
            times = [i.time for i in later]
            assert times == sorted(times)
            assert times[0] >= told_at
            for item in later:
                assert (item.stored_at - item.time).total_seconds() > 0.005
            assert engines_of(yard, "r-2")[0].pid == launched[0].pid

    run(story())


def _journal_has(yard: MemoryYard, replica: str, phase: str) -> bool:
    database = sqlite3.connect(yard.folder / "nodeagent" / "journal.sqlite")
    try:
        rows = database.execute(
            "SELECT body FROM kept WHERE kind = 'held' AND key = ?", (replica,)
        ).fetchall()
    finally:
        database.close()
    return any(msgspec.json.decode(row[0])["replica"]["phase"] == phase for row in rows)


def test_log_23_without_a_server_at_its_start_an_agent_adopts_and_acts_on_its_last_plan(tmp_path):
    async def story():
        async with memory_yard(tmp_path) as yard:
            hand = yard.hand
            async with yard.agent() as first:
                await hand.plan(an_item("r-1"))
                await hand.phase("r-1", "ready")
                pid = await pid_of(yard, "r-1")
                await first.die()
            # The plan it remembers names one more, which it had no time to begin.
            _plan_in_journal(yard, an_item("r-1"), an_item("r-2"))
            agent = yard.agent()
            yard.cut()
            async with agent as second:
                await until(lambda: _journal_has(yard, "r-2", "ready"), "r-2 ready in the journal")
                assert alive(pid)
                assert not second.task.done()
                assert hand.types().count("node.started") == 1
                yard.mend()
                # The log's plan never named r-2: it is stopped as lost, after it was told of.
                await hand.phase("r-2", "stopped")
                assert hand.types("r-2")[:2] == ["replica.starting", "replica.ready"]
                assert hand.replica("r-1").phase == "ready"
                assert alive(pid)

    run(story())


def _plan_in_journal(yard: MemoryYard, *items) -> None:
    known = KnownPlan(plan=Plan(node="n1", items=items), seq=yard.hand.seq)
    database = sqlite3.connect(yard.folder / "nodeagent" / "journal.sqlite")
    with database:
        database.execute(
            "UPDATE kept SET body = ? WHERE kind = 'fact' AND key = 'plan'",
            (msgspec.json.encode(known),),
        )
    database.close()


def test_log_20_two_agents_of_one_node_the_later_stays_and_the_first_leaves_its_engines(tmp_path):
    async def story():
        async with memory_yard(tmp_path) as yard:
            hand = yard.hand
            async with yard.agent("one") as first:
                await hand.plan(an_item("r-1"))
                await hand.phase("r-1", "ready")
                pid = await pid_of(yard, "r-1")
                async with yard.agent("two", node=a_node(pid=2)) as second:
                    with pytest.raises(Deposed, match="another agent runs the node 'n1'"):
                        await first.task
                    assert alive(pid)
                    # The second cannot adopt from a folder it does not have.
                    assert (await hand.phase("r-1", "failed")).code == "lost"
                    await hand.expect(lambda: hand.card().leases == (), "the lease to end")
                    assert not second.task.done()
                    await hand.plan(an_item("r-2"))
                    await hand.phase("r-2", "ready")
                    assert hand.types().count("node.started") == 2
                    assert "node.stopped" not in hand.types()
                    assert alive(pid)
                    psutil.Process(pid).kill()

    with pytest.raises(Deposed):
        run(story())


def test_a_second_agent_on_the_same_folder_is_refused(tmp_path):
    async def story():
        async with memory_yard(tmp_path) as yard, yard.agent() as first:
            with pytest.raises(Locked, match="another agent works in"):
                async with yard.agent():
                    pass
            assert not first.task.done()

    run(story())


def test_log_05_an_answer_that_got_lost_stores_the_event_once(tmp_path):
    async def story():
        async with memory_yard(tmp_path) as yard, yard.agent():
            hand = yard.hand
            await hand.expect(lambda: "card.measured" in hand.types(), "the registration")
            yard.broker.lose_acks = 1
            await hand.plan(an_item("r-1"))
            await hand.phase("r-1", "ready")
            revs = [i.rev for i in hand.seen if i.noun == "replica"]
            assert revs == list(range(1, len(revs) + 1))

    run(story())


def test_log_15_a_full_log_keeps_the_agents_events_waiting_in_order(tmp_path, monkeypatch):
    monkeypatch.setitem(Reporter.__init__.__kwdefaults__, "full_retry_s", 0.2)

    async def story():
        async with memory_yard(tmp_path) as yard, yard.agent():
            hand = yard.hand
            await hand.expect(lambda: "card.measured" in hand.types(), "the registration")
            seq = await hand.plan(an_item("r-1"))
            assert seq
            full = ServerError(code=503, err_code=10077, description="maximum bytes exceeded")
            yard.broker.refusals.extend([full] * 3)
            await hand.phase("r-1", "ready", 20.0)
            assert hand.types("r-1")[:2] == ["replica.starting", "replica.ready"]

    run(story(), 40.0)


def test_log_17_after_the_log_was_replaced_it_registers_anew_and_says_everything_again(tmp_path):
    async def story():
        async with memory_yard(tmp_path) as yard, yard.agent():
            hand = yard.hand
            item = an_item("r-1")
            await hand.plan(item)
            ready = await hand.phase("r-1", "ready")
            await hand.expect(lambda: hand.replica("r-1").measured_memory_bytes, "measured")
            hand.seen.clear()
            yard.broker.replace_events()
            hand.seq = hand.rev = 0
            await hand.plan(item)
            again = await hand.phase("r-1", "ready")
            assert again.endpoint == ready.endpoint
            assert "node.started" in hand.types()
            started = next(i for i in hand.seen if i.type == "node.started")
            assert again.epoch == started.seq
            await hand.expect(lambda: hand.card() is not None and hand.card().leases, "the lease")
            # And it still follows.
            await hand.plan(an_item("r-1", stop=a_stop()))
            await hand.phase("r-1", "stopped")

    run(story())


def test_log_17_after_a_restored_backup_what_ended_since_is_said_again(tmp_path):
    async def story():
        async with memory_yard(tmp_path) as yard, yard.agent():
            hand = yard.hand
            await hand.plan(an_item("r-1"))
            await hand.phase("r-1", "ready")
            await hand.expect(lambda: hand.replica("r-1").measured_memory_bytes, "measured")
            backup = hand.seen[-1].seq
            plan_then = (hand.seq, hand.rev)
            await hand.plan(an_item("r-1", stop=a_stop(force=True)))
            await hand.phase("r-1", "stopped")
            await hand.plan()
            await hand.expect(lambda: hand.card().leases == (), "the lease to end")
            hand.seen.clear()
            yard.broker.lose_tail(backup)
            hand.seq, hand.rev = plan_then
            over = await hand.phase("r-1", "failed")
            assert over.code == "lost"
            await hand.expect(lambda: hand.card() and hand.card().leases == (), "no lease")
            assert engines_of(yard, "r-1") == []

    run(story())


def test_a_late_word_of_the_agent_before_does_not_stop_the_new_one(tmp_path):
    async def story():
        async with memory_yard(tmp_path) as yard, yard.agent():
            hand = yard.hand
            await hand.plan(an_item("r-1"))
            await hand.phase("r-1", "ready")
            await hand.expect(lambda: hand.replica("r-1").measured_memory_bytes, "measured")
            last = next(i for i in reversed(hand.seen) if i.noun == "replica")
            late = MemoryLog(yard.broker, source="/agent/n1")
            assert isinstance(last.state, Replica)
            await late.append(
                Draft(
                    subject=event_subject("replica", "n1", "r-1"),
                    event=last.event,
                    state=last.state,
                    expected_seq=last.seq,
                    rev=last.rev + 1,
                ),
                epoch=last.epoch,
            )
            await hand.plan(an_item("r-1", stop=a_stop(force=True)))
            await hand.phase("r-1", "stopped")

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
            _plan_in_journal(yard, an_item("r-1"), an_item("r-2"))
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


def test_log_22_a_node_subject_nobody_can_read_ends_the_agent_with_a_sentence(tmp_path):
    async def story():
        broker = MemoryBroker()
        broker.put(event_subject("node", "n1"), b'{"specversion": "9.0"}')
        log = MemoryLog(broker, source="/agent/n1")
        wire = MemoryWire(log.connection)
        async with running_agent(tmp_path / "nodeagent", log, wire) as agent:
            await agent.task

    with pytest.raises(Unreadable, match="yardctl repair"):
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
