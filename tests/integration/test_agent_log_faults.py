"""What an absent, full or replaced log and a second agent do to an agent, its events and its engines."""

import psutil
import pytest

from events.log import Draft
from events.memory import MemoryLog, MemoryWire
from events.memory_broker import MemoryBroker
from events.retry import ServerError
from events.subjects import event_subject
from nodeagent.agent import Unreadable
from nodeagent.app import Locked
from nodeagent.reporter import Deposed, Reporter
from schemas.replica import Replica
from tests.support.agent_engines import engines_of, journal_has, pid_of, plan_in_journal, serves
from tests.support.agent_yard import a_node, a_stop, alive, an_item, memory_yard, running_agent
from tests.support.aio import run, until


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
            await until(lambda: journal_has(yard, "r-2", "ready"), "r-2 ready in the journal")
            psutil.Process(pid).kill()
            await until(lambda: journal_has(yard, "r-1", "failed"), "r-1 failed in the journal")
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
            plan_in_journal(yard, an_item("r-1"), an_item("r-2"))
            agent = yard.agent()
            yard.cut()
            async with agent as second:
                await until(lambda: journal_has(yard, "r-2", "ready"), "r-2 ready in the journal")
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
