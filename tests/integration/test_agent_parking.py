"""A node that parks: drained engines go to RAM and come back proven, and whatever fails ends as a stop with its reason."""

import asyncio
from datetime import timedelta

import httpx
import psutil
import pytest
from msgspec.structs import replace

from schemas.model import Parking
from schemas.replica import ReplicaParked, ReplicaReady, ReplicaStarting
from schemas.settings import MIB
from tests.support.agent_parking import (
    counters,
    ended,
    free,
    kinds,
    on_a_node,
    parked,
    stop,
    to_park,
    vllm_item,
)
from tests.support.agent_yard import a_stop, alive
from tests.support.aio import until


def test_req_d5_a_parked_copy_comes_back_from_ram(tmp_path):
    async def story(hand):
        gone = await parked(hand, vllm_item("r-1", weights_mib=40))
        assert (gone.park_way, gone.residual_bytes) == ("sleep", 0)
        assert alive(gone.pid)
        assert counters(gone)["sleeping"]
        assert kinds(hand, "gpu0") == {"r-1": "parked"}
        assert kinds(hand, "cpu") == {"r-1": "parked"}
        (lease,) = hand.card("cpu").leases
        assert lease.memory_bytes == gone.ram_bytes >= 44 * MIB
        told = next(i for i in hand.seen if i.type == "replica.parked")
        assert told.event == ReplicaParked(way="sleep", ram_bytes=gone.ram_bytes)
        assert told.reason.startswith("parked by sleep, ")
        await stop(hand, "r-1", None)
        back = await hand.phase("r-1", "ready")
        assert (back.pid, back.endpoint, back.load_s) == (gone.pid, gone.endpoint, gone.load_s)
        assert (back.park_way, back.ram_bytes, back.parked_at) == ("", 0, None)
        assert back.ready_at > gone.ready_at
        start = [i.event for i in hand.seen if i.type == "replica.starting"][-1]
        assert start == ReplicaStarting(port=int(back.endpoint.rpartition(":")[2]), resumed=True)
        ready = [i.event for i in hand.seen if i.type == "replica.ready"][-1]
        assert ready == ReplicaReady(load_s=back.load_s, resume_s=back.resume_s)
        assert back.resume_s is not None
        await free(hand, "cpu")
        assert kinds(hand, "gpu0") == {"r-1": "replica"}

    on_a_node(tmp_path, story)


def test_inv_1_a_parked_engine_is_asked_nothing_and_routed_to_only_after_it_answered(tmp_path):
    async def story(hand):
        gone = await parked(hand, vllm_item("r-1", lag_s=0.3))
        before = counters(gone)["connections"]
        beats = hand.beat
        # Many beacons of the agent's, each of which asks the engines that serve.
        await until(lambda: hand.beat > beats + 10, "beacons")
        told = counters(gone)
        assert told["connections"] == before + 1
        # One question may have been on its way when it was put to sleep.
        assert told["metrics_asleep"] <= 1
        await stop(hand, "r-1", None)
        back = await hand.phase("r-1", "ready")
        told = counters(back)
        assert (told["completions"], told["finished"], told["asked_asleep"]) == (1, 1, 0)
        assert back.resume_s >= 0.3

    on_a_node(tmp_path, story, beacon_s=0.02)


def test_inv_3_a_running_request_ends_before_its_engine_is_parked(tmp_path):
    async def story(hand):
        await hand.plan(vllm_item("r-1", tokens=40, pace_s=0.02))
        ready = await hand.phase("r-1", "ready")
        headers = {"Authorization": "Bearer key-of-r-1"}
        async with httpx.AsyncClient(timeout=20) as client:
            body = {"model": "m", "prompt": "x"}
            url = f"{ready.endpoint}/v1/completions"
            running = asyncio.create_task(client.post(url, json=body, headers=headers))
            await until(lambda: counters(ready)["running"] == 1, "the request")
            await stop(hand, "r-1", to_park())
            await hand.phase("r-1", "parked")
            answer = await running
        assert len(answer.json()["choices"][0]["text"].split()) == 40

    on_a_node(tmp_path, story)


@pytest.mark.parametrize(
    ("fault", "reason"),
    [
        ("sleep-hangs", "no answer to /sleep within 1 s"),
        ("sleep-never-ends", "it took more than 1 s to park"),
        ("sleep-dies", "its engine ended meanwhile"),
        ("sleep-fails", "/sleep was answered 500: Internal Server Error"),
    ],
)
def test_a_park_that_fails_ends_the_engine_and_is_not_tried_again_soon(tmp_path, fault, reason):
    async def story(hand):
        quick = Parking(way="sleep", timeout_s=1.0)
        await hand.plan(vllm_item("r-1", parking=quick, faults=fault))
        ready = await hand.phase("r-1", "ready")
        await stop(hand, "r-1", to_park())
        stopped = await hand.phase("r-1", "stopped")
        assert stopped.reason == f"drained; its park failed: {reason}"
        assert not alive(ready.pid)
        await free(hand, "gpu0", "cpu")
        stopped = await ended(hand, vllm_item("r-2", parking=quick))
        assert stopped.reason.startswith("drained; not parked: a park failed ")

    on_a_node(tmp_path, story)


@pytest.mark.parametrize(
    ("fault", "reason"),
    [
        ("wake-hangs", "no answer to /wake_up within 1 s"),
        ("wake-never-ends", "it took more than 1 s to resume"),
        ("wake-dies", ""),
        ("wake-fails", "/wake_up was answered 500: Internal Server Error"),
        ("first-hangs", "no answer to a request for one token within 1 s"),
        ("first-fails", "a request for one token was answered 500"),
    ],
)
def test_a_resume_that_fails_is_no_failed_start_of_its_model(tmp_path, fault, reason):
    async def story(hand):
        quick = Parking(way="sleep", timeout_s=1.0)
        gone = await parked(hand, vllm_item("r-1", parking=quick, faults=fault))
        await stop(hand, "r-1", None)
        failed = await hand.phase("r-1", "failed")
        assert failed.code == "resume_failed"
        if reason:
            assert failed.reason == f"not resumed: {reason}"
        assert not alive(gone.pid)
        assert "replica.ready" not in hand.types("r-1")[hand.types("r-1").index("replica.parked") :]
        await free(hand, "gpu0", "cpu")

    on_a_node(tmp_path, story)


def test_a_parked_engine_that_dies_is_told_and_gives_its_ram_back(tmp_path):
    async def story(hand):
        gone = await parked(hand, vllm_item("r-1"))
        psutil.Process(gone.pid).kill()
        failed = await hand.phase("r-1", "failed")
        assert failed.code == "parked_lost"
        await free(hand, "gpu0", "cpu")

    on_a_node(tmp_path, story)


def test_force_stops_what_could_have_been_parked(tmp_path):
    """As for a game: nobody waits for a park."""

    async def story(hand):
        stopped = await ended(hand, vllm_item("r-1"), to_park(force=True))
        assert stopped.reason == "forced"

    on_a_node(tmp_path, story)


def test_a_parked_copy_that_is_unloaded_is_ended(tmp_path):
    async def story(hand):
        gone = await parked(hand, vllm_item("r-1"))
        await stop(hand, "r-1", a_stop("d-2", reason="unload"))
        stopped = await hand.phase("r-1", "stopped")
        assert stopped.stop_decision == "d-2"
        assert not alive(gone.pid)
        await free(hand, "gpu0", "cpu")

    on_a_node(tmp_path, story)


def test_inv_1_an_engine_is_stopped_when_a_gateway_that_fell_silent_may_still_send_to_it(tmp_path):
    async def story(hand):
        await hand.plan(vllm_item("r-1"))
        await hand.phase("r-1", "ready")
        await hand.beacon("g2")
        await stop(hand, "r-1", to_park())
        stopped = await hand.phase("r-1", "stopped")
        assert stopped.reason == "drained; not parked: g2 fell silent and may not know of it"

    on_a_node(tmp_path, story, gateway_gone_s=0.3)


def test_what_comes_back_no_quicker_than_it_loads_is_stopped_the_next_time(tmp_path):
    async def story(hand):
        slow = Parking(way="sleep", timeout_s=20.0)
        await parked(hand, vllm_item("r-1", parking=slow, lag_s=4.0))
        await stop(hand, "r-1", None)
        back = await hand.phase("r-1", "ready", 20.0)
        assert back.resume_s > back.load_s
        await stop(hand, "r-1", to_park("d-2"))
        stopped = await hand.phase("r-1", "stopped")
        assert stopped.reason == (
            f"drained; not parked: resuming took {back.resume_s:.1f} s, loading {back.load_s:.1f} s"
        )

    on_a_node(tmp_path, story)


def test_two_on_one_card_are_parked_one_after_the_other(tmp_path):
    """One falling asleep while another does, or wakes, on the same card has crashed both."""

    async def story(hand):
        items = [
            vllm_item(f"r-{n}", model=f"m{n}", memory_bytes=64 * MIB, lag_s=0.6) for n in (1, 2)
        ]
        await hand.plan(*items)
        for item in items:
            await hand.phase(item.replica, "ready")
        await hand.plan(*(replace(item, stop=to_park(f"d-{item.replica}")) for item in items))
        states = [await hand.phase(item.replica, "parked") for item in items]
        first, second = sorted(states, key=lambda state: state.parked_at)
        assert second.parked_at - first.parked_at >= timedelta(seconds=0.6)

    on_a_node(tmp_path, story)
