"""A node that parks: drained engines go to RAM and come back proven, and whatever fails ends as a stop with its reason."""

import asyncio
import contextlib
from collections.abc import AsyncIterator
from datetime import timedelta
from typing import Any

import httpx
import psutil
import pytest
from msgspec.structs import replace

from nodeagent import parking
from nodeagent.cards.nvml import Nvml
from nodeagent.drivers.command import CommandDriver
from nodeagent.drivers.vllm import VllmDriver
from schemas.cardasks import (
    CardAnswer,
    CardAsk,
    CardRequest,
    ClaimEnd,
    ClaimStart,
    VmAttach,
    VmDetach,
)
from schemas.model import EngineName, Parking
from schemas.node import CardInfo, EngineInfo
from schemas.plan import PlanItem
from schemas.replica import Replica, ReplicaParked, ReplicaReady, ReplicaStarting
from schemas.settings import GIB, MIB
from tests.support import fake_nvml
from tests.support.agent_yard import (
    Hand,
    MemoryYard,
    a_launch,
    a_node,
    a_stop,
    alive,
    an_item,
    memory_yard,
)
from tests.support.aio import run, until
from tests.support.fake_cuda_checkpoint import FakeCheckpoint
from tests.support.fake_nvml import FakeNvml
from tests.support.fake_vllm import fake_env, vllm_program
from tests.support.scripted import ask

STORY_S = 60.0
CPU = CardInfo(id="cpu", kind="cpu", memory_bytes=4 * GIB)
GPUS = tuple(CardInfo(id=f"gpu{n}", kind="gpu", memory_bytes=2 * GIB) for n in (0, 1))


def vllm_item(
    replica: str,
    *,
    model: str = "m",
    cards: tuple[str, ...] = ("gpu0",),
    memory_bytes: int = 512 * MIB,
    parking: Parking | None = None,
    stop: Any = None,
    **script: object,
) -> PlanItem:
    """A fake vLLM that may be parked by its own sleep, each step within 3 s."""
    launch = a_launch(
        engine="vllm",
        command=(),
        key_env=None,
        model=model,
        source="org/weights",
        env=fake_env(**script),
        parking=parking or Parking(way="sleep", timeout_s=3.0),
    )
    return an_item(replica, launch=launch, cards=cards, memory_bytes=memory_bytes, stop=stop)


def to_park(decision: str = "d-1", **fields: Any):
    return a_stop(decision, **{"reason": "drain", "park": "may", **fields})


def parks(yard: MemoryYard, **fields: Any) -> Any:
    """An agent with two declared cards and a fake vLLM."""
    program = vllm_program(yard.folder / "bin")
    drivers: dict[EngineName, Any] = {"vllm": VllmDriver(program), "command": CommandDriver()}
    node = a_node(
        cards=fields.pop("cards", (CPU, *GPUS)),
        engines=(EngineInfo(name="vllm", version="1"), EngineInfo(name="command", version="1")),
    )
    return yard.agent(node=node, drivers=drivers, **fields)


async def parked(hand: Hand, item: PlanItem, decision: str = "d-1") -> Replica:
    """Has one engine ready and then parked; its state."""
    others = [other for name, other in hand.items.items() if name != item.replica]
    await hand.plan(*others, item)
    await hand.phase(item.replica, "ready")
    await stop(hand, item.replica, to_park(decision))
    return await hand.phase(item.replica, "parked")


async def stop(hand: Hand, replica: str, wish: Any) -> None:
    """Changes the stop of one item of the plan; None takes it back."""
    items = {**hand.items, replica: replace(hand.items[replica], stop=wish)}
    await hand.plan(*items.values())


def counters(state: Replica) -> dict[str, Any]:
    assert state.endpoint is not None
    return ask(state.endpoint, "/fake/counters")


def kinds(hand: Hand, card: str) -> dict[str, str]:
    """Who has a lease there, and of which kind."""
    state = hand.card(card)
    return {lease.holder: lease.kind for lease in state.leases} if state is not None else {}


async def free(hand: Hand, *cards: str) -> None:
    for card in cards:
        await hand.expect(lambda card=card: kinds(hand, card) == {}, f"{card} to be free")


def test_req_d5_a_parked_copy_comes_back_from_ram(tmp_path):
    async def story():
        async with memory_yard(tmp_path) as yard, parks(yard):
            hand = yard.hand
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
            assert start == ReplicaStarting(
                port=int(back.endpoint.rpartition(":")[2]), resumed=True
            )
            ready = [i.event for i in hand.seen if i.type == "replica.ready"][-1]
            assert ready == ReplicaReady(load_s=back.load_s, resume_s=back.resume_s)
            assert back.resume_s is not None
            await free(hand, "cpu")
            assert kinds(hand, "gpu0") == {"r-1": "replica"}

    run(story(), STORY_S)


def test_inv_1_a_parked_engine_is_asked_nothing_and_routed_to_only_after_it_answered(tmp_path):
    async def story():
        async with memory_yard(tmp_path) as yard, parks(yard, beacon_s=0.02):
            hand = yard.hand
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

    run(story(), STORY_S)


def test_inv_3_a_running_request_ends_before_its_engine_is_parked(tmp_path):
    async def story():
        async with memory_yard(tmp_path) as yard, parks(yard):
            hand = yard.hand
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

    run(story(), STORY_S)


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
    async def story():
        async with memory_yard(tmp_path) as yard, parks(yard):
            hand = yard.hand
            quick = Parking(way="sleep", timeout_s=1.0)
            await hand.plan(vllm_item("r-1", parking=quick, faults=fault))
            ready = await hand.phase("r-1", "ready")
            await stop(hand, "r-1", to_park())
            stopped = await hand.phase("r-1", "stopped")
            assert stopped.reason == f"drained; its park failed: {reason}"
            assert not alive(ready.pid)
            await free(hand, "gpu0", "cpu")
            await hand.plan(vllm_item("r-2", parking=quick))
            await hand.phase("r-2", "ready")
            await stop(hand, "r-2", to_park())
            stopped = await hand.phase("r-2", "stopped")
            assert stopped.reason.startswith("drained; not parked: a park failed ")

    run(story(), STORY_S)


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
    async def story():
        async with memory_yard(tmp_path) as yard, parks(yard):
            hand = yard.hand
            quick = Parking(way="sleep", timeout_s=1.0)
            gone = await parked(hand, vllm_item("r-1", parking=quick, faults=fault))
            await stop(hand, "r-1", None)
            failed = await hand.phase("r-1", "failed")
            assert failed.code == "resume_failed"
            if reason:
                assert failed.reason == f"not resumed: {reason}"
            assert not alive(gone.pid)
            assert (
                "replica.ready"
                not in hand.types("r-1")[hand.types("r-1").index("replica.parked") :]
            )
            await free(hand, "gpu0", "cpu")

    run(story(), STORY_S)


def test_a_parked_engine_that_dies_is_told_and_gives_its_ram_back(tmp_path):
    async def story():
        async with memory_yard(tmp_path) as yard, parks(yard):
            hand = yard.hand
            gone = await parked(hand, vllm_item("r-1"))
            psutil.Process(gone.pid).kill()
            failed = await hand.phase("r-1", "failed")
            assert failed.code == "parked_lost"
            await free(hand, "gpu0", "cpu")

    run(story(), STORY_S)


def test_a_card_that_does_not_show_its_memory_back_is_not_given_away(tmp_path):
    """The engine says that it sleeps, the driver says that nothing came back: the driver is believed."""

    async def story():
        async with memory_yard(tmp_path) as yard, metered(yard) as device:
            hand = yard.hand
            quick = Parking(way="sleep", timeout_s=1.0)
            item = vllm_item("r-1", parking=quick, faults="sleep-keeps", **SIZES)
            await hand.plan(with_device(item, device))
            await hand.phase("r-1", "ready")
            await stop(hand, "r-1", to_park())
            stopped = await hand.phase("r-1", "stopped")
            assert stopped.reason == (
                "drained; its park failed: gpu0 still shows 1000 MiB of 1000 MiB after its"
                " sleep: the memory did not come back"
            )
            await free(hand, "gpu0", "cpu")

    run(story(), STORY_S)


def test_what_stays_on_the_card_is_read_from_the_driver_and_stays_leased(tmp_path):
    async def story():
        async with memory_yard(tmp_path) as yard, metered(yard) as device:
            hand = yard.hand
            gone = await parked(hand, with_device(vllm_item("r-1", **SIZES), device))
            assert gone.residual_bytes == 100 * MIB
            (lease,) = hand.card("gpu0").leases
            assert (lease.kind, lease.memory_bytes) == ("parked", 100 * MIB)
            assert gone.ram_bytes >= 44 * MIB
            await stop(hand, "r-1", None)
            await hand.phase("r-1", "ready")
            (lease,) = hand.card("gpu0").leases
            assert (lease.kind, lease.memory_bytes) == ("replica", 512 * MIB)

    run(story(), STORY_S)


SIZES = {"weights_mib": 40, "kv_mib": 860, "context_mib": 100}


@contextlib.asynccontextmanager
async def metered(yard: MemoryYard) -> AsyncIterator[dict[str, str]]:
    """An agent with one card that the fake driver reads; yields what tells an engine of that driver."""
    state = yard.folder / "nvml.json"
    fake_nvml.write(state, fake_nvml.a_card(0))
    gpus = Nvml(lambda: FakeNvml(state))
    found = gpus.cards()
    async with parks(yard, cards=(CPU, *found), gpus=gpus, card_look_s=0.2):
        yield {"FAKE_NVML": str(state)}


def with_device(item: PlanItem, device: dict[str, str]) -> PlanItem:
    launch = replace(item.launch, env={**item.launch.env, **device})
    return replace(item, launch=launch)


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
            for file in (tmp_path / "nodeagent").glob("journal*"):
                file.unlink()
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
                for file in (tmp_path / "nodeagent").glob("journal*"):
                    file.unlink()
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


def test_the_least_recently_parked_copy_makes_way_when_ram_is_short(tmp_path):
    async def story():
        small = CardInfo(id="cpu", kind="cpu", memory_bytes=110 * MIB)
        async with memory_yard(tmp_path) as yard, parks(yard, cards=(small, *GPUS)):
            hand = yard.hand
            # Each takes some 33 MiB once it is parked; before that nobody knows, and 55 are asked for.
            sizes = {"memory_bytes": 40 * MIB, "weights_mib": 20}
            first = await parked(hand, vllm_item("r-1", model="a", **sizes), "d-1")
            other = vllm_item("r-2", model="b", cards=("gpu1",), **sizes)
            second = await parked(hand, other, "d-2")
            assert alive(first.pid)
            await parked(hand, vllm_item("r-3", model="c", **sizes), "d-3")
            stopped = await hand.phase("r-1", "stopped")
            assert stopped.stop_decision == "ram-r-3"
            assert not alive(first.pid)
            assert alive(second.pid)
            assert sorted(kinds(hand, "cpu")) == ["r-2", "r-3"]

    run(story(), STORY_S)


def test_inv_9_without_the_ram_it_is_stopped_and_told_with_numbers(tmp_path):
    async def story():
        tiny = CardInfo(id="cpu", kind="cpu", memory_bytes=8 * MIB)
        async with memory_yard(tmp_path) as yard, parks(yard, cards=(tiny, *GPUS)):
            hand = yard.hand
            await hand.plan(vllm_item("r-1"))
            await hand.phase("r-1", "ready")
            await stop(hand, "r-1", to_park())
            stopped = await hand.phase("r-1", "stopped")
            assert stopped.reason.startswith("drained; not parked: cpu: its parked copy needs ")
            assert stopped.reason.endswith(" MiB, 8 MiB free")
            await free(hand, "gpu0", "cpu")

    run(story(), STORY_S)


def test_an_engine_without_a_way_is_stopped_and_one_that_had_to_be_parked_serves_on(tmp_path):
    async def story():
        async with memory_yard(tmp_path) as yard, parks(yard):
            hand = yard.hand
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

    run(story(), STORY_S)


def test_force_stops_what_could_have_been_parked(tmp_path):
    """As for a game: nobody waits for a park."""

    async def story():
        async with memory_yard(tmp_path) as yard, parks(yard):
            hand = yard.hand
            await hand.plan(vllm_item("r-1"))
            await hand.phase("r-1", "ready")
            await stop(hand, "r-1", to_park(force=True))
            stopped = await hand.phase("r-1", "stopped")
            assert stopped.reason == "forced"

    run(story(), STORY_S)


def test_commands_park_an_engine_that_has_no_way_of_its_own(tmp_path):
    """Frozen by a signal, it would answer nobody; thawed, it has to answer before anybody is sent there."""

    async def story():
        async with memory_yard(tmp_path) as yard, parks(yard):
            hand = yard.hand
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

    run(story(), STORY_S)


def test_a_command_that_says_no_ends_the_engine(tmp_path):
    async def story():
        async with memory_yard(tmp_path) as yard, parks(yard):
            hand = yard.hand
            failing = Parking(
                way="command", park=("sh", "-c", "echo no room; exit 7"), resume=("true",)
            )
            item = an_item("r-1", launch=a_launch(parking=failing), cards=("gpu0",))
            await hand.plan(item)
            await hand.phase("r-1", "ready")
            await stop(hand, "r-1", to_park())
            stopped = await hand.phase("r-1", "stopped")
            told = "the park command ended with 7: no room"
            assert stopped.reason == f"drained; its park failed: {told}"

    run(story(), STORY_S)


def test_a_parked_copy_that_is_unloaded_is_ended(tmp_path):
    async def story():
        async with memory_yard(tmp_path) as yard, parks(yard):
            hand = yard.hand
            gone = await parked(hand, vllm_item("r-1"))
            await stop(hand, "r-1", a_stop("d-2", reason="unload"))
            stopped = await hand.phase("r-1", "stopped")
            assert stopped.stop_decision == "d-2"
            assert not alive(gone.pid)
            await free(hand, "gpu0", "cpu")

    run(story(), STORY_S)


def test_req_d16_a_parked_copy_whose_card_was_given_away_stays_parked_and_says_so(tmp_path):
    async def story():
        async with memory_yard(tmp_path) as yard, parks(yard):
            hand = yard.hand
            big = 1500 * MIB
            gone = await parked(hand, vllm_item("r-1", memory_bytes=big))
            other = an_item("r-2", cards=("gpu0",), memory_bytes=big)
            await hand.plan(*hand.items.values(), other)
            await hand.phase("r-2", "ready")
            await stop(hand, "r-1", None)
            await hand.expect(lambda: hand.replica("r-1").card_revs != {}, "the refusal")
            refused = hand.replica("r-1")
            assert (refused.phase, refused.pid) == ("parked", gone.pid)
            assert refused.reason.startswith("gpu0: needs 1.5 GiB, ")
            told = [i.event for i in hand.seen if i.type == "replica.parked"][-1]
            assert told.refused
            # Once the other is gone it comes back by itself: the wish still stands.
            await stop(hand, "r-2", a_stop("d-9", force=True))
            await hand.phase("r-1", "ready")

    run(story(), STORY_S)


def test_inv_1_an_engine_is_stopped_when_a_gateway_that_fell_silent_may_still_send_to_it(tmp_path):
    async def story():
        async with memory_yard(tmp_path) as yard, parks(yard, gateway_gone_s=0.3):
            hand = yard.hand
            await hand.plan(vllm_item("r-1"))
            await hand.phase("r-1", "ready")
            await hand.beacon("g2")
            await stop(hand, "r-1", to_park())
            stopped = await hand.phase("r-1", "stopped")
            assert stopped.reason == "drained; not parked: g2 fell silent and may not know of it"

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


def test_a_node_that_does_not_park_stops(tmp_path):
    async def story():
        async with memory_yard(tmp_path) as yard, parks(yard, parking=False):
            hand = yard.hand
            await hand.plan(vllm_item("r-1"))
            await hand.phase("r-1", "ready")
            await stop(hand, "r-1", to_park())
            stopped = await hand.phase("r-1", "stopped")
            assert "its setting parking is false" in stopped.reason

    run(story(), STORY_S)


async def asked(hand: Hand, ask: CardAsk) -> CardAnswer:
    return await hand.wire.request(
        "cards", hand.node, CardRequest(ask=ask), CardAnswer, timeout_s=5.0
    )


def test_a_game_waits_for_no_park_that_is_under_way(tmp_path):
    async def story():
        async with memory_yard(tmp_path) as yard, parks(yard):
            hand = yard.hand
            slow = Parking(way="sleep", timeout_s=30.0)
            await hand.plan(vllm_item("r-1", parking=slow, lag_s=25.0))
            ready = await hand.phase("r-1", "ready")
            await stop(hand, "r-1", to_park())
            await hand.expect(lambda: "r-1" in kinds(hand, "cpu"), "the park to begin")
            answer = await asked(hand, ClaimStart(id="c-abcdefgh23", name="doom", card="gpu0"))
            assert answer.status == "granted"
            stopped = await hand.phase("r-1", "stopped")
            assert stopped.reason == "drained; its park was broken off: doom has claimed gpu0"
            assert not alive(ready.pid)
            await free(hand, "gpu0", "cpu")
            assert (await asked(hand, ClaimEnd(what="doom"))).status == "done"
            # No fault of the engine: its model is parked the next time.
            await parked(hand, vllm_item("r-2"), "d-2")

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


def test_an_app_that_claims_a_card_has_its_engine_parked_and_brought_back_afterwards(tmp_path):
    async def story():
        async with memory_yard(tmp_path) as yard, parks(yard):
            hand = yard.hand
            await hand.plan(vllm_item("r-1"))
            ready = await hand.phase("r-1", "ready")
            claim = ClaimStart(id="c-abcdefgh23", name="krita", card="gpu0", kind="app")
            assert (await asked(hand, claim)).status == "granted"
            gone = await hand.phase("r-1", "parked")
            assert (gone.pid, gone.stop_decision) == (ready.pid, "c-abcdefgh23")
            assert (await asked(hand, ClaimEnd(what="krita"))).status == "done"
            # The plan wants it all along; nobody has to ask again.
            back = await hand.phase("r-1", "ready")
            assert back.pid == ready.pid

    run(story(), STORY_S)


def test_a_vm_ends_a_sleeping_engine_that_still_holds_the_device(tmp_path):
    async def story():
        async with memory_yard(tmp_path) as yard, parks(yard):
            hand = yard.hand
            gone = await parked(hand, vllm_item("r-1"))
            vm = VmAttach(name="windows", card="gpu0", wait_s=20.0)
            assert (await asked(hand, vm)).status in ("waiting", "granted")
            await hand.phase("r-1", "stopped")
            assert not alive(gone.pid)
            await hand.expect(lambda: hand.card("gpu0").vm.attached, "the VM to have its card")

    run(story(), STORY_S)


def test_what_comes_back_no_quicker_than_it_loads_is_stopped_the_next_time(tmp_path):
    async def story():
        async with memory_yard(tmp_path) as yard, parks(yard):
            hand = yard.hand
            slow = Parking(way="sleep", timeout_s=20.0)
            await parked(hand, vllm_item("r-1", parking=slow, lag_s=4.0))
            await stop(hand, "r-1", None)
            back = await hand.phase("r-1", "ready", 20.0)
            assert back.resume_s > back.load_s
            await stop(hand, "r-1", to_park("d-2"))
            stopped = await hand.phase("r-1", "stopped")
            assert stopped.reason == (
                f"drained; not parked: resuming took {back.resume_s:.1f} s,"
                f" loading {back.load_s:.1f} s"
            )

    run(story(), STORY_S)


def test_inv_3_an_engine_that_serves_makes_no_way_for_a_parked_copy(tmp_path):
    async def story():
        small = CardInfo(id="cpu", kind="cpu", memory_bytes=200 * MIB)
        async with memory_yard(tmp_path) as yard, parks(yard, cards=(small, *GPUS)):
            hand = yard.hand
            serving = an_item("r-1", memory_bytes=150 * MIB)
            await hand.plan(serving, vllm_item("r-2", memory_bytes=60 * MIB))
            await hand.phase("r-1", "ready")
            await hand.phase("r-2", "ready")
            await stop(hand, "r-2", to_park())
            stopped = await hand.phase("r-2", "stopped")
            assert stopped.reason.endswith(" MiB, 50 MiB free")
            assert hand.replica("r-1").phase == "ready"

    run(story(), STORY_S)


CHECKPOINT = Parking(way="checkpoint", timeout_s=10.0)


def test_a_checkpointed_engine_comes_back_too(tmp_path):
    async def story():
        fake = FakeCheckpoint(tmp_path / "cuda")
        async with (
            memory_yard(tmp_path) as yard,
            parks(yard, cuda_checkpoint=str(fake.program)),
        ):
            hand = yard.hand
            item = an_item("r-1", launch=a_launch(parking=CHECKPOINT), cards=("gpu0",))
            await hand.plan(item)
            await hand.phase("r-1", "ready")
            await hand.expect(lambda: hand.replica("r-1").pid, "its pid")
            pid = hand.replica("r-1").pid
            fake.uses_cuda(pid)
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
        fake = FakeCheckpoint(tmp_path / "cuda")
        async with (
            memory_yard(tmp_path) as yard,
            parks(yard, cuda_checkpoint=str(fake.program)),
        ):
            hand = yard.hand
            item = an_item("r-1", launch=a_launch(parking=CHECKPOINT), cards=("gpu0",))
            await hand.plan(item)
            await hand.phase("r-1", "ready")
            await hand.expect(lambda: hand.replica("r-1").pid, "its pid")
            pid = hand.replica("r-1").pid
            fake.uses_cuda(pid)
            fake.fails("lock", "timeout")
            await stop(hand, "r-1", to_park())
            stopped = await hand.phase("r-1", "stopped")
            told = f"cuda-checkpoint lock of {pid} ended with 1: timeout"
            assert stopped.reason == f"drained; its park failed: {told}"
            assert not alive(pid)
            await free(hand, "gpu0", "cpu")

    run(story(), STORY_S)


def test_a_vm_gets_the_card_of_a_checkpointed_engine_which_lives_on(tmp_path):
    async def story():
        fake = FakeCheckpoint(tmp_path / "cuda")
        async with (
            memory_yard(tmp_path) as yard,
            parks(yard, cuda_checkpoint=str(fake.program)),
        ):
            hand = yard.hand
            item = an_item("r-1", launch=a_launch(parking=CHECKPOINT), cards=("gpu0",))
            await hand.plan(item)
            await hand.phase("r-1", "ready")
            await hand.expect(lambda: hand.replica("r-1").pid, "its pid")
            pid = hand.replica("r-1").pid
            fake.uses_cuda(pid)
            await asked(hand, VmAttach(name="windows", card="gpu0", wait_s=20.0))
            await hand.expect(
                lambda: (vm := hand.card("gpu0").vm) is not None and vm.attached, "its card"
            )
            assert hand.replica("r-1").phase == "parked"
            await asked(hand, VmDetach(card="gpu0"))
            back = await hand.phase("r-1", "ready")
            assert back.pid == pid

    run(story(), STORY_S)


def test_a_node_without_cuda_checkpoint_stops_what_would_need_it(tmp_path):
    async def story():
        gone = str(tmp_path / "cuda-checkpoint")
        async with memory_yard(tmp_path) as yard, parks(yard, cuda_checkpoint=gone):
            hand = yard.hand
            item = an_item("r-1", launch=a_launch(parking=CHECKPOINT), cards=("gpu0",))
            await hand.plan(item)
            await hand.phase("r-1", "ready")
            await stop(hand, "r-1", to_park())
            stopped = await hand.phase("r-1", "stopped")
            told = "drained; not parked: this node has no way checkpoint to park"
            assert stopped.reason == told

    run(story(), STORY_S)


def test_two_on_one_card_are_parked_one_after_the_other(tmp_path):
    """One falling asleep while another does, or wakes, on the same card has crashed both."""

    async def story():
        async with memory_yard(tmp_path) as yard, parks(yard):
            hand = yard.hand
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

    run(story(), STORY_S)
