"""One agent, real processes, the log in memory: start, ready, drain, stop, and the memory back."""

from pathlib import Path

import httpx
import psutil
from msgspec.structs import replace

from nodeagent.launching import Launcher, LaunchFault, StopResult
from schemas.beacons import AgentBeacon, LogsReply, LogsRequest
from schemas.settings import GIB, MIB
from tests.support.agent_yard import (
    QUICK,
    a_launch,
    a_node,
    a_stop,
    alive,
    an_item,
    memory_yard,
)
from tests.support.aio import run, until


def test_a_planned_replica_starts_is_ready_drains_and_gives_its_memory_back(tmp_path):
    async def story():
        async with memory_yard(tmp_path) as yard, yard.agent():
            hand = yard.hand
            item = an_item("r-1", "--load-s", "0.1", "--memory-mib", "8")
            await hand.plan(item)
            ready = await hand.phase("r-1", "ready")
            assert ready.endpoint is not None
            assert ready.has_key
            assert ready.load_s is not None
            assert ready.load_s >= 0.1
            assert "/v1/chat/completions" in ready.paths
            async with httpx.AsyncClient() as client:
                refused = await client.get(f"{ready.endpoint}/v1/models")
                assert refused.status_code == 401
                allowed = await client.get(
                    f"{ready.endpoint}/v1/models",
                    headers={"Authorization": "Bearer key-of-r-1"},
                )
                assert allowed.status_code == 200
            await hand.expect(
                lambda: (hand.replica("r-1").measured_memory_bytes or 0) > 8 * MIB,
                "the measured memory",
            )
            await hand.expect(lambda: hand.card().used_bytes > 8 * MIB, "the card's use")
            await hand.plan(an_item("r-1", stop=a_stop()))
            stopped = await hand.phase("r-1", "stopped")
            assert stopped.stop_decision == "d-1"
            await hand.expect(lambda: "card.released" in hand.types(), "card.released")
            card = hand.card()
            assert card.leases == ()
            assert card.used_bytes == 0
            assert not alive(ready.pid)
            await hand.plan()
        kinds = [t for t in hand.types() if t not in ("card.measured", "plan.changed")]
        assert kinds == [
            "node.started",
            "card.leased",
            "replica.starting",
            "replica.ready",
            "replica.ready",
            "replica.draining",
            "replica.stopped",
            "card.released",
            "node.stopped",
        ]
        # The key is nowhere in the log.
        assert "key-of-r-1" not in hand.story() + str([i.state for i in hand.seen])

    run(story())


def test_req_x3_a_load_needs_nobody_who_waits_for_it(tmp_path):
    async def story():
        async with memory_yard(tmp_path, gateway=False) as yard, yard.agent():
            await yard.hand.plan(an_item("r-1", "--load-s", "0.3"))
            assert (await yard.hand.phase("r-1", "ready")).load_s >= 0.3

    run(story())


def test_an_engine_that_dies_while_loading_is_a_failed_start_with_its_last_line(tmp_path):
    async def story():
        async with memory_yard(tmp_path) as yard, yard.agent():
            hand = yard.hand
            await hand.plan(
                an_item("r-1", "--crash-at-start", "no such tensor", "--load-s", "0.05")
            )
            failed = await hand.phase("r-1", "failed")
            assert (failed.code, failed.exit_status, failed.was_ready) == ("exited", 3, False)
            assert "no such tensor" in failed.last_line
            assert "no such tensor" in failed.reason
            await hand.expect(lambda: hand.card().leases == (), "the lease to end")

    run(story())


def test_an_engine_that_dies_while_it_serves_failed_as_one_that_was_ready(tmp_path):
    async def story():
        async with memory_yard(tmp_path) as yard, yard.agent():
            hand = yard.hand
            await hand.plan(an_item("r-1"))
            ready = await hand.phase("r-1", "ready")
            await hand.expect(lambda: hand.replica("r-1").pid, "its pid")
            psutil.Process(hand.replica("r-1").pid).kill()
            failed = await hand.phase("r-1", "failed")
            assert (failed.code, failed.was_ready, failed.exit_status) == ("exited", True, -9)
            assert failed.reason.startswith("the engine was ended by signal 9: ")
            assert failed.ready_at == ready.ready_at
            await hand.expect(lambda: hand.card().leases == (), "the lease to end")

    run(story())


def test_a_program_that_does_not_exist_is_a_failed_start(tmp_path):
    async def story():
        async with memory_yard(tmp_path) as yard, yard.agent():
            hand = yard.hand
            launch = a_launch(command=("/nonexistent/engine", "${PORT}"))
            await hand.plan(an_item("r-1", launch=launch))
            failed = await hand.phase("r-1", "failed")
            assert failed.code in ("invalid", "spawn_failed")
            assert "/nonexistent/engine" in failed.reason
            await hand.expect(lambda: hand.card().leases == (), "the lease to end")

    run(story())


def test_scn_a9_a_load_without_progress_ends_at_its_bound_and_the_next_id_starts(tmp_path):
    async def story():
        async with memory_yard(tmp_path) as yard, yard.agent():
            hand = yard.hand
            slow = a_launch("--hang-in-load", "1", start_timeout_s=0.5)
            await hand.plan(an_item("r-1", launch=slow))
            failed = await hand.phase("r-1", "failed")
            assert failed.code == "start_timeout"
            assert "silent for 0.5 s" in failed.reason
            await hand.expect(lambda: hand.card().leases == (), "the lease to end")
            await hand.plan(an_item("r-2"))
            await hand.phase("r-2", "ready")

    run(story())


def test_inv_9_without_room_the_answer_is_a_refusal_with_numbers_and_no_process(tmp_path):
    async def story():
        async with memory_yard(tmp_path) as yard, yard.agent():
            hand = yard.hand
            await hand.plan(an_item("r-1"), an_item("r-2", memory_bytes=8 * GIB))
            refused = await hand.phase("r-2", "refused")
            assert refused.reason == "cpu: needs 8.0 GiB, 3.8 GiB free of 4.0 GiB"
            await hand.phase("r-1", "ready")
            assert not (tmp_path / "nodeagent" / "replicas" / "r-2").exists()
            event = next(i.event for i in hand.seen if i.type == "replica.refused")
            assert event.card_revs == {"cpu": 1}

    run(story())


def test_inv_2_a_node_that_allows_no_commands_runs_none(tmp_path):
    async def story():
        node = a_node(allow_commands=False)
        async with memory_yard(tmp_path) as yard, yard.agent(node=node):
            await yard.hand.plan(an_item("r-1"))
            refused = await yard.hand.phase("r-1", "refused")
            assert "allow_commands" in refused.reason

    run(story())


def test_a_loading_replica_that_is_to_stop_is_stopped_at_once(tmp_path):
    async def story():
        async with memory_yard(tmp_path) as yard, yard.agent():
            hand = yard.hand
            await hand.plan(an_item("r-1", "--load-s", "30"))
            await hand.phase("r-1", "starting")
            await hand.plan(an_item("r-1", "--load-s", "30", stop=a_stop("d-7")))
            stopped = await hand.phase("r-1", "stopped", 5.0)
            assert stopped.stop_decision == "d-7"
            await hand.expect(lambda: hand.card().leases == (), "the lease to end")
            assert "replica.draining" not in hand.types("r-1")

    run(story())


def test_scn_a14_a_wrapper_that_forked_the_engine_ends_with_its_whole_group(tmp_path):
    async def story():
        async with memory_yard(tmp_path) as yard, yard.agent(stop_grace_s=0.3):
            hand = yard.hand
            await hand.plan(an_item("r-1", "--fork-grandchild", "1"))
            await hand.phase("r-1", "ready")
            await hand.expect(lambda: hand.replica("r-1").pid, "its pid")
            family = psutil.Process(hand.replica("r-1").pid).children(recursive=True)
            assert family, "the wrapper forked"
            await hand.plan(an_item("r-1", "--fork-grandchild", "1", stop=a_stop()))
            await hand.phase("r-1", "stopped")
            assert not [p for p in family if alive(p.pid)]
            await hand.expect(lambda: hand.card().leases == (), "the memory back")

    run(story())


class Sticky(Launcher):
    """A launcher whose kill does not reach one process, as with one that hangs in the kernel."""

    stuck = True

    async def stop(self, replica: str, grace_s: float) -> StopResult:
        if self.stuck:
            return StopResult(exit_status=None, survivors=(4711,), killed=True)
        return await super().stop(replica, grace_s)


def test_scn_a14_processes_that_outlive_the_kill_keep_the_lease_and_say_so(tmp_path):
    async def story():
        made: list[Sticky] = []

        def make(root: Path, sock: Path) -> Sticky:
            made.append(Sticky(root, sock))
            return made[0]

        async with memory_yard(tmp_path) as yard, yard.agent(make_launcher=make):
            hand = yard.hand
            await hand.plan(an_item("r-1"))
            await hand.phase("r-1", "ready")
            await hand.plan(an_item("r-1", stop=a_stop()))
            stuck = await hand.phase("r-1", "stop_failed")
            assert "4711" in stuck.reason
            assert [lease.holder for lease in hand.card().leases] == ["r-1"]
            made[0].stuck = False
            await hand.phase("r-1", "stopped")
            await hand.expect(lambda: hand.card().leases == (), "the memory back")
            assert hand.types("r-1").count("replica.stop_failed") == 1

    run(story())


def test_scn_a11_the_next_engine_gets_another_port(tmp_path):
    async def story():
        async with memory_yard(tmp_path) as yard, yard.agent():
            hand = yard.hand
            await hand.plan(an_item("r-1"))
            first = (await hand.phase("r-1", "ready")).endpoint
            await hand.plan(an_item("r-1", stop=a_stop(force=True)))
            await hand.phase("r-1", "stopped")
            await hand.plan(an_item("r-2"))
            assert (await hand.phase("r-2", "ready")).endpoint != first

    run(story())


def test_the_beacon_tells_epoch_plan_and_what_engines_say(tmp_path):
    async def story():
        async with memory_yard(tmp_path) as yard, yard.agent():
            hand = yard.hand
            heard: list[AgentBeacon] = []
            listening = await hand.wire.on_beacon(
                "agent", AgentBeacon, lambda _, b: heard.append(b)
            )
            seq = await hand.plan(an_item("r-1"))
            await hand.phase("r-1", "ready")
            await until(
                lambda: bool(heard) and "r-1" in heard[-1].replicas and "g1" in heard[-1].heard,
                "a beacon with the replica and the gateway",
            )
            last = heard[-1]
            started = next(i for i in hand.seen if i.type == "node.started")
            assert (last.node, last.epoch, last.position) == ("n1", started.seq, seq)
            assert last.replicas["r-1"].inflight == 0
            await listening.close()

    run(story())


def test_an_engines_log_is_read_over_the_wire(tmp_path):
    async def story():
        async with memory_yard(tmp_path) as yard, yard.agent():
            hand = yard.hand
            await hand.plan(an_item("r-1", "--crash-at-start", "out of memory"))
            await hand.phase("r-1", "failed")

            async def ask(**fields) -> LogsReply:
                request = LogsRequest(**fields)
                return await hand.wire.request(
                    "replica_logs", "n1", request, LogsReply, timeout_s=5.0
                )

            whole = await ask(replica="r-1")
            assert "out of memory" in whole.text
            rest = await ask(replica="r-1", offset=whole.next_offset, wait_s=5.0)
            assert (rest.text, rest.ended) == ("", True)
            for name in ("r-2", "../journal.sqlite", "."):
                unknown = await ask(replica=name)
                assert unknown.ended
                assert "no log" in (unknown.problem or "")

    run(story())


def test_log_29_a_replica_long_over_ends_its_subject_and_its_folder(tmp_path):
    async def story():
        times = replace(QUICK, endings_after_s=0.3)
        async with memory_yard(tmp_path) as yard, yard.agent(times=times):
            hand = yard.hand
            await hand.plan(an_item("r-1"))
            await hand.phase("r-1", "ready")
            await hand.plan(an_item("r-1", stop=a_stop(force=True)))
            await hand.phase("r-1", "stopped")
            await hand.plan()
            await hand.expect(lambda: "replica.deleted" in hand.types("r-1"), "the tombstone")
            await until(
                lambda: not (tmp_path / "nodeagent" / "replicas" / "r-1").exists(), "no folder"
            )
            # The id stays used for good.
            await hand.plan(an_item("r-1"))
            await hand.plan(an_item("r-1"), an_item("r-2"))
            await hand.phase("r-2", "ready")
            assert hand.types("r-1")[-1] == "replica.deleted"

    run(story())


def test_a_subject_whose_process_may_still_run_is_not_ended_and_costs_nobody_else(tmp_path):
    class Doubtful(Launcher):
        def forget(self, replica: str) -> None:
            if replica == "r-1":
                raise LaunchFault("r-1 may still run")
            super().forget(replica)

    async def story():
        times = replace(QUICK, endings_after_s=0.1)
        async with (
            memory_yard(tmp_path) as yard,
            yard.agent(times=times, make_launcher=Doubtful) as running,
        ):
            hand = yard.hand
            await hand.plan(an_item("r-1"), an_item("r-2"))
            await hand.phase("r-2", "ready")
            await hand.phase("r-1", "ready")
            stop = a_stop(force=True)
            await hand.plan(an_item("r-1", stop=stop), an_item("r-2", stop=stop))
            await hand.phase("r-2", "stopped")
            await hand.phase("r-1", "stopped")
            await hand.plan()
            await hand.expect(lambda: "replica.deleted" in hand.types("r-2"), "the tombstone")
            assert not running.task.done()
            assert "replica.deleted" not in hand.types("r-1")

    run(story())


def test_no_subject_ends_while_the_audit_lags(tmp_path):
    async def story():
        times = replace(QUICK, endings_after_s=0.1)
        async with memory_yard(tmp_path) as yard, yard.agent(times=times):
            hand = yard.hand
            yard.broker.audit_lags = True
            await hand.plan(an_item("r-1"))
            await hand.phase("r-1", "ready")
            await hand.plan(an_item("r-1", stop=a_stop(force=True)))
            await hand.phase("r-1", "stopped")
            await hand.plan()
            await until(lambda: yard.broker.audit_asked > 2, "the agent to look at the audit")
            assert "replica.deleted" not in hand.types("r-1")
            yard.broker.audit_lags = False
            await hand.expect(lambda: "replica.deleted" in hand.types("r-1"), "the tombstone")

    run(story())


def test_fifty_plans_at_once_start_each_id_once(tmp_path):
    async def story():
        async with memory_yard(tmp_path) as yard, yard.agent():
            hand = yard.hand
            for n in range(50):
                await hand.plan(an_item("r-1"), an_item(f"x-{n}", cards=("none",)))
            await hand.phase("r-1", "ready")
            await hand.phase("x-49", "refused")
            assert hand.types("r-1").count("replica.starting") == 1

    run(story())
