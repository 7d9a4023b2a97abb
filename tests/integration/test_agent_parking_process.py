"""A parked engine outlives kill -9 of its agent and of the server, and comes back by the agent that follows."""

import json
import signal

import pytest

from schemas.settings import GIB, MIB
from tests.support.agent_process import server_yard
from tests.support.agent_yard import a_launch, a_stop, alive, an_item
from tests.support.aio import run
from tests.support.fake_vllm import vllm_program
from tests.support.scripted import ask


@pytest.mark.timeout(120)
def test_req_d13_e_kill_9_of_agent_and_server_leaves_a_parked_copy_that_the_next_agent_resumes(
    tmp_path,
):
    async def story():
        async with server_yard(tmp_path / "yard") as yard:
            hand = yard.hand
            settings = {
                "YARD_NODEAGENT_VLLM": vllm_program(tmp_path / "bin"),
                "YARD_NODEAGENT_GPUS": "false",
                "YARD_NODEAGENT_CARDS": json.dumps(
                    [{"id": name, "memory_bytes": GIB} for name in ("gpu0", "gpu1")]
                ),
            }
            first = yard.start_agent(**settings)
            launch = a_launch(engine="vllm", command=(), key_env=None, source="org/weights")
            item = an_item("r-1", launch=launch, cards=("gpu1",), memory_bytes=256 * MIB)
            await hand.plan(item)
            await hand.phase("r-1", "ready", 30.0)
            node = next(i.state for i in hand.seen if i.type == "node.started")
            ways = {engine.name: engine.park_ways for engine in node.engines}
            assert {"command", "sleep"} <= set(ways["vllm"])
            assert "sleep" not in ways["llamacpp"]
            wish = a_stop(reason="drain", park="may")
            parked = an_item(
                "r-1", launch=launch, cards=("gpu1",), memory_bytes=256 * MIB, stop=wish
            )
            await hand.plan(parked)
            gone = await hand.phase("r-1", "parked", 30.0)
            first.send(signal.SIGKILL)
            await first.ended()
            await yard.kill_server()
            assert alive(gone.pid)
            await yard.serve()
            yard.start_agent(**settings)
            await hand.expect(
                lambda: hand.replica("r-1").epoch > gone.epoch, "its next agent", 30.0
            )
            again = hand.replica("r-1")
            assert (again.phase, again.pid) == ("parked", gone.pid)
            for card in ("gpu1", "cpu"):
                (lease,) = hand.card(card).leases
                assert (lease.holder, lease.kind) == ("r-1", "parked")
            assert hand.card("gpu0").leases == ()
            await hand.plan(item)
            back = await hand.phase("r-1", "ready", 30.0)
            assert (back.pid, back.endpoint) == (gone.pid, gone.endpoint)
            told = ask(back.endpoint, "/fake/counters")
            assert (told["asked_asleep"], told["finished"]) == (0, 1)

    run(story(), 110.0)
