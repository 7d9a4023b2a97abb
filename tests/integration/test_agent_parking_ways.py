"""The ways to park besides an engine's own sleep: commands, cuda-checkpoint, and what has none."""

import psutil

from schemas.model import Parking
from tests.support.agent_parking import (
    CHECKPOINT,
    STORY_S,
    checkpointed,
    ended,
    free,
    on_a_node,
    parked,
    stop,
    to_park,
    vllm_item,
)
from tests.support.agent_yard import a_launch, a_stop, alive, an_item
from tests.support.aio import run
from tests.support.scripted import ask


def test_an_engine_without_a_way_is_stopped_and_one_that_had_to_be_parked_serves_on(tmp_path):
    async def story(hand):
        await hand.plan(an_item("r-1", cards=("gpu0",)), an_item("r-2", cards=("gpu1",)))
        await hand.phase("r-1", "ready")
        await hand.phase("r-2", "ready")
        await stop(hand, "r-1", to_park())
        stopped = await hand.phase("r-1", "stopped")
        told = "neither its profile nor its engine has a way to park"
        assert stopped.reason == f"drained; not parked: {told}"
        await stop(hand, "r-2", to_park("d-2", reason="park", park="must"))
        await hand.phase("r-2", "draining")
        back = await hand.phase("r-2", "ready")
        assert (back.taken_back, back.reason) == ("d-2", f"not parked: {told}")

    on_a_node(tmp_path, story)


def test_a_node_that_does_not_park_stops(tmp_path):
    async def story(hand):
        stopped = await ended(hand, vllm_item("r-1"))
        assert "its setting parking is false" in stopped.reason

    on_a_node(tmp_path, story, parking=False)


def test_commands_park_an_engine_that_has_no_way_of_its_own(tmp_path):
    """Frozen by a signal, it would answer nobody; thawed, it has to answer before anybody is sent there."""

    async def story(hand):
        frozen = Parking(
            way="command",
            park=("kill", "-STOP", "{pid}"),
            resume=("kill", "-CONT", "{pid}"),
            timeout_s=3.0,
        )
        item = an_item("r-1", launch=a_launch(parking=frozen), cards=("gpu0",))
        gone = await parked(hand, item)
        assert gone.park_way == "command"
        assert psutil.Process(gone.pid).status() == psutil.STATUS_STOPPED
        await stop(hand, "r-1", None)
        back = await hand.phase("r-1", "ready")
        assert back.pid == gone.pid
        assert ask(back.endpoint, "/script/counters")["finished"] == 1
        # Parked again and then ended: it cannot hear the polite signal.
        await stop(hand, "r-1", to_park("d-2"))
        await hand.phase("r-1", "parked")
        await stop(hand, "r-1", a_stop("d-3", reason="unload"))
        await hand.phase("r-1", "stopped")
        assert not alive(gone.pid)
        await free(hand, "gpu0", "cpu")

    on_a_node(tmp_path, story)


def test_a_command_that_says_no_ends_the_engine(tmp_path):
    async def story(hand):
        failing = Parking(
            way="command", park=("sh", "-c", "echo no room; exit 7"), resume=("true",)
        )
        item = an_item("r-1", launch=a_launch(parking=failing), cards=("gpu0",))
        stopped = await ended(hand, item)
        told = "the park command ended with 7: no room"
        assert stopped.reason == f"drained; its park failed: {told}"

    on_a_node(tmp_path, story)


def test_a_checkpointed_engine_comes_back_too(tmp_path):
    async def story():
        async with checkpointed(tmp_path) as (hand, fake, pid):
            await stop(hand, "r-1", to_park())
            gone = await hand.phase("r-1", "parked")
            assert (gone.park_way, fake.state(pid)) == ("checkpoint", "checkpointed")
            await stop(hand, "r-1", None)
            await hand.phase("r-1", "ready")
            assert fake.state(pid) == "running"
            steps = [call.split()[0] for call in fake.calls()]
            assert steps == ["lock", "checkpoint", "restore", "unlock"]

    run(story(), STORY_S)


def test_a_checkpoint_that_fails_is_a_process_lost(tmp_path):
    async def story():
        async with checkpointed(tmp_path) as (hand, fake, pid):
            fake.fails("lock", "timeout")
            await stop(hand, "r-1", to_park())
            stopped = await hand.phase("r-1", "stopped")
            told = f"cuda-checkpoint lock of {pid} ended with 1: timeout"
            assert stopped.reason == f"drained; its park failed: {told}"
            assert not alive(pid)
            await free(hand, "gpu0", "cpu")

    run(story(), STORY_S)


def test_a_node_without_cuda_checkpoint_stops_what_would_need_it(tmp_path):
    gone = str(tmp_path / "cuda-checkpoint")

    async def story(hand):
        item = an_item("r-1", launch=a_launch(parking=CHECKPOINT), cards=("gpu0",))
        stopped = await ended(hand, item)
        told = "drained; not parked: this node has no way checkpoint to park"
        assert stopped.reason == told

    on_a_node(tmp_path, story, cuda_checkpoint=gone)
