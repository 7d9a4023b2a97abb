"""The agent as a process on a real server with its role's rights: killed, told to leave, doubled."""

import json
import os
import signal

import httpx

from events.service import EXIT_DEPOSED, EXIT_LOCKED
from tests.support.agent_process import server_yard
from tests.support.agent_yard import a_stop, alive, an_item
from tests.support.aio import run, until


async def pid_of(hand, replica: str) -> int:
    await hand.expect(lambda: (r := hand.replica(replica)) and r.pid, "the engine's pid", 20.0)
    return hand.replica(replica).pid


def test_inv_6_kill_9_of_the_agent_leaves_the_engine_and_its_successor_adopts_it(tmp_path):
    async def story():
        async with server_yard(tmp_path) as yard:
            hand = yard.hand
            first = yard.start_agent()
            await hand.plan(an_item("r-1"))
            ready = await hand.phase("r-1", "ready", 20.0)
            pid = await pid_of(hand, "r-1")
            first.send(signal.SIGKILL)
            assert await first.ended() == -signal.SIGKILL
            assert alive(pid)
            async with httpx.AsyncClient() as client:
                assert (await client.get(f"{ready.endpoint}/health")).status_code == 200
            second = yard.start_agent()
            await hand.expect(lambda: hand.types().count("node.started") == 2, "its start", 20.0)
            epoch = [i.seq for i in hand.seen if i.type == "node.started"][-1]
            await hand.expect(lambda: hand.replica("r-1").epoch == epoch, "its state said again")
            assert (hand.replica("r-1").phase, hand.replica("r-1").pid) == ("ready", pid)
            await hand.plan(an_item("r-1", stop=a_stop()))
            await hand.phase("r-1", "stopped", 20.0)
            assert not alive(pid)
            second.send(signal.SIGTERM)
            assert await second.ended() == 0

    run(story(), 55.0)


def test_log_19_kill_9_while_an_engine_loads_the_next_agent_adopts_it_and_nothing_starts_twice(
    tmp_path,
):
    async def story():
        async with server_yard(tmp_path) as yard:
            hand = yard.hand
            first = yard.start_agent()
            item = an_item("r-1", "--load-s", "3")
            await hand.plan(item)
            await hand.phase("r-1", "starting", 20.0)
            launched = tmp_path / "nodeagent" / "replicas" / "r-1" / "launch.json"
            await until(launched.exists, "the launcher's folder")
            first.send(signal.SIGKILL)
            await first.ended()
            yard.start_agent()
            ready = await hand.phase("r-1", "ready", 30.0)
            assert ready.load_s >= 3
            assert hand.types().count("replica.failed") == 0
            assert hand.types().count("card.leased") == 1

    run(story(), 58.0)


def test_sigterm_leaves_the_engine_and_sigint_ends_it(tmp_path):
    async def story():
        async with server_yard(tmp_path) as yard:
            hand = yard.hand
            first = yard.start_agent()
            await hand.plan(an_item("r-1"))
            await hand.phase("r-1", "ready", 20.0)
            pid = await pid_of(hand, "r-1")
            first.send(signal.SIGTERM)
            assert await first.ended() == 0
            await hand.expect(lambda: "node.stopped" in hand.types(), "its goodbye")
            assert alive(pid)
            second = yard.start_agent()
            await hand.expect(lambda: hand.types().count("node.started") == 2, "its start", 20.0)
            second.send(signal.SIGINT)
            assert await second.ended() == 0
            assert not alive(pid)
            await hand.phase("r-1", "stopped")
            left = [i.event.engines_left for i in hand.seen if i.type == "node.stopped"]
            assert left == [1, 0]

    run(story(), 55.0)


def test_log_20_a_second_agent_of_the_node_takes_over_and_the_first_ends_with_its_own_code(
    tmp_path,
):
    async def story():
        async with server_yard(tmp_path) as yard:
            hand = yard.hand
            first = yard.start_agent()
            await hand.plan(an_item("r-1"))
            await hand.phase("r-1", "ready", 20.0)
            locked = yard.start_agent()
            assert await locked.ended() == EXIT_LOCKED
            assert "another agent works in" in locked.log.read_text()
            assert first.process.poll() is None
            second = yard.start_agent(tmp_path / "elsewhere")
            assert await first.ended() == EXIT_DEPOSED
            assert "another agent runs the node" in first.log.read_text()
            assert "Traceback" not in first.log.read_text()
            await hand.plan(an_item("r-2"))
            await hand.phase("r-2", "ready", 20.0)
            assert second.process.poll() is None
            assert hand.types().count("node.started") == 2
            # The engine of the deposed one goes on; on its own machine the next agent would end it.
            left = tmp_path / "nodeagent" / "replicas" / "r-1" / "running.json"
            launcher = json.loads(left.read_text())["launcher_pid"]
            os.kill(launcher, signal.SIGTERM)
            await until(lambda: not alive(launcher), "the engine left behind to end")

    run(story(), 58.0)


def test_log_01_the_server_killed_under_it_costs_no_event_and_no_engine(tmp_path):
    async def story():
        async with server_yard(tmp_path) as yard:
            hand = yard.hand
            yard.start_agent()
            await hand.plan(an_item("r-1"))
            await hand.phase("r-1", "ready", 20.0)
            pid = await pid_of(hand, "r-1")
            await yard.kill_server()
            await yard.serve()
            await hand.plan(an_item("r-1"), an_item("r-2"))
            await hand.phase("r-2", "ready", 30.0)
            assert alive(pid)
            for name in ("r-1", "r-2"):
                revs = [i.rev for i in hand.seen if i.noun == "replica" and i.key[1] == name]
                assert revs == list(range(1, len(revs) + 1))

    run(story(), 58.0)


def test_log_23_started_without_a_server_it_adopts_and_connects_when_there_is_one(tmp_path):
    async def story():
        async with server_yard(tmp_path) as yard:
            hand = yard.hand
            first = yard.start_agent()
            await hand.plan(an_item("r-1"))
            await hand.phase("r-1", "ready", 20.0)
            pid = await pid_of(hand, "r-1")
            first.send(signal.SIGKILL)
            await first.ended()
            await yard.kill_server()
            second = yard.start_agent()
            await until(lambda: "replica adopted" in second.log.read_text(), "the adoption", 20.0)
            assert alive(pid)
            await yard.serve()
            await hand.expect(lambda: hand.types().count("node.started") == 2, "its start", 30.0)
            assert second.process.poll() is None
            assert hand.replica("r-1").phase == "ready"

    run(story(), 58.0)
