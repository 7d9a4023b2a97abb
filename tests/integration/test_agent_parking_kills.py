"""An agent that dies or leaves while engines are parked, being parked or coming back, and a step nobody can break off."""

import asyncio
import contextlib

import pytest

from nodeagent import parking
from schemas.model import Parking
from tests.support.agent_parking import (
    STORY_S,
    counters,
    free,
    kinds,
    parked,
    parks,
    stop,
    to_park,
    vllm_item,
)
from tests.support.agent_yard import alive, memory_yard
from tests.support.aio import run, until


def test_req_d13_e_a_parked_copy_is_still_there_after_an_agent_was_killed(tmp_path):
    async def story():
        async with memory_yard(tmp_path) as yard:
            hand = yard.hand
            async with parks(yard) as first:
                gone = await parked(hand, vllm_item("r-1", cards=("gpu1",)))
                await first.die()
            assert alive(gone.pid)
            async with parks(yard):
                await hand.expect(lambda: hand.replica("r-1").epoch > gone.epoch, "its next agent")
                again = hand.replica("r-1")
                assert (again.phase, again.pid, again.ram_bytes) == (
                    "parked",
                    gone.pid,
                    gone.ram_bytes,
                )
                assert kinds(hand, "gpu1") == kinds(hand, "cpu") == {"r-1": "parked"}
                await stop(hand, "r-1", None)
                back = await hand.phase("r-1", "ready")
                assert (back.pid, back.endpoint) == (gone.pid, gone.endpoint)
                assert counters(back)["asked_asleep"] == 0
                await free(hand, "cpu")

    run(story(), STORY_S)


def test_req_d15_a_parked_copy_is_re_attached_from_the_log_alone(tmp_path):
    """The journal is lost with its disk: leases, way and process are found again."""

    async def story():
        async with memory_yard(tmp_path) as yard:
            hand = yard.hand
            async with parks(yard) as first:
                gone = await parked(hand, vllm_item("r-1"))
                await first.die()
            yard.lose_journal()
            async with parks(yard):
                await hand.expect(lambda: hand.replica("r-1").epoch > gone.epoch, "its next agent")
                assert hand.replica("r-1").phase == "parked"
                assert kinds(hand, "gpu0") == kinds(hand, "cpu") == {"r-1": "parked"}
                await stop(hand, "r-1", None)
                back = await hand.phase("r-1", "ready")
                assert back.pid == gone.pid
                await free(hand, "cpu")

    run(story(), STORY_S)


@pytest.mark.parametrize("journal", ["kept", "lost"])
def test_inv_6_an_agent_that_dies_while_an_engine_comes_back_is_followed_by_one_that_brings_it_back(
    tmp_path, journal
):
    async def story():
        async with memory_yard(tmp_path) as yard:
            hand = yard.hand
            async with parks(yard) as first:
                gone = await parked(hand, vllm_item("r-1", lag_s=0.8))
                await stop(hand, "r-1", None)
                await hand.phase("r-1", "starting")
                await first.die()
            if journal == "lost":
                yard.lose_journal()
            async with parks(yard):
                back = await hand.phase("r-1", "ready")
                assert back.pid == gone.pid
                told = counters(back)
                assert (told["asked_asleep"], told["finished"]) == (0, 1)
                await free(hand, "cpu")

    run(story(), STORY_S)


def test_inv_6_an_agent_that_dies_while_it_parks_leaves_an_engine_that_is_ended(tmp_path):
    """Nobody can tell how far it came, so nobody trusts it: it is stopped, and its card is free."""

    async def story():
        async with memory_yard(tmp_path) as yard:
            hand = yard.hand
            async with parks(yard) as first:
                await hand.plan(vllm_item("r-1", lag_s=1.5))
                ready = await hand.phase("r-1", "ready")
                await stop(hand, "r-1", to_park())
                await hand.expect(lambda: "r-1" in kinds(hand, "cpu"), "the RAM to be reserved")
                await first.die()
            assert alive(ready.pid)
            async with parks(yard):
                await hand.phase("r-1", "stopped")
                await free(hand, "gpu0", "cpu")
                assert not alive(ready.pid)

    run(story(), STORY_S)


def test_inv_6_an_engine_comes_back_only_once_an_agent_after_this_one_would_know(tmp_path):
    async def story():
        async with memory_yard(tmp_path) as yard, parks(yard, beacon_s=0.02) as agent:
            hand = yard.hand
            gone = await parked(hand, vllm_item("r-1"))
            around = agent.agent._a
            async with around.journal._writing:
                await stop(hand, "r-1", None)
                await until(lambda: around.books.held["r-1"].resuming, "the way back to begin")
                beats = hand.beat
                await until(lambda: hand.beat > beats + 10, "time to pass")
                assert counters(gone)["sleeping"]
            await hand.phase("r-1", "ready")
            assert not counters(gone)["sleeping"]

    run(story(), STORY_S)


def test_inv_5_a_step_that_cannot_even_be_broken_off_holds_nothing_up(tmp_path, monkeypatch):
    """As a program that hangs in its driver: no signal ends it before the driver answers."""
    monkeypatch.setattr(parking, "CANCEL_S", 0.1)

    async def story():
        async with memory_yard(tmp_path) as yard, parks(yard) as agent:
            hand = yard.hand
            answers = asyncio.Event()

            async def hangs(_: object) -> None:
                while not answers.is_set():
                    with contextlib.suppress(asyncio.CancelledError):
                        await answers.wait()

            way = agent.agent._a.tools.parkbook.ways["sleep"]
            monkeypatch.setattr(way, "park", hangs)
            quick = Parking(way="sleep", timeout_s=0.2)
            await hand.plan(vllm_item("r-1", parking=quick))
            ready = await hand.phase("r-1", "ready")
            await stop(hand, "r-1", to_park())
            stopped = await hand.phase("r-1", "stopped")
            assert stopped.reason == "drained; its park failed: it took more than 0.2 s to park"
            assert not alive(ready.pid)
            await free(hand, "gpu0", "cpu")
            answers.set()

    run(story(), STORY_S)


def test_inv_6_an_agent_that_leaves_with_its_engines_leaves_none_behind_that_is_being_parked(
    tmp_path,
):
    async def story():
        async with memory_yard(tmp_path) as yard:
            hand = yard.hand
            async with parks(yard) as agent:
                slow = Parking(way="sleep", timeout_s=30.0)
                await hand.plan(vllm_item("r-1", parking=slow, lag_s=25.0))
                ready = await hand.phase("r-1", "ready")
                await stop(hand, "r-1", to_park())
                await hand.expect(lambda: "r-1" in kinds(hand, "cpu"), "the park to begin")
                await agent.leave(stop_engines=True)
            assert not alive(ready.pid)
            stopped = await hand.phase("r-1", "stopped")
            assert stopped.reason == "drained; its park was broken off: it is to end at once"

    run(story(), STORY_S)
