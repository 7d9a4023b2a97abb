"""What a park frees and what it needs: the driver's reading of the card, RAM by lease, and who makes way for whom."""

import contextlib
from collections.abc import AsyncIterator

from msgspec.structs import replace

from nodeagent.cards.nvml import Nvml
from schemas.model import Parking
from schemas.node import CardInfo
from schemas.plan import PlanItem
from schemas.settings import MIB
from tests.support import fake_nvml
from tests.support.agent_parking import (
    CPU,
    GPUS,
    STORY_S,
    ended,
    free,
    kinds,
    on_a_node,
    parked,
    parks,
    stop,
    to_park,
    vllm_item,
)
from tests.support.agent_yard import MemoryYard, a_stop, alive, an_item, memory_yard
from tests.support.aio import run
from tests.support.fake_nvml import FakeNvml

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


def test_the_least_recently_parked_copy_makes_way_when_ram_is_short(tmp_path):
    small = CardInfo(id="cpu", kind="cpu", memory_bytes=110 * MIB)

    async def story(hand):
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

    on_a_node(tmp_path, story, cards=(small, *GPUS))


def test_inv_9_without_the_ram_it_is_stopped_and_told_with_numbers(tmp_path):
    tiny = CardInfo(id="cpu", kind="cpu", memory_bytes=8 * MIB)

    async def story(hand):
        stopped = await ended(hand, vllm_item("r-1"))
        assert stopped.reason.startswith("drained; not parked: cpu: its parked copy needs ")
        assert stopped.reason.endswith(" MiB, 8 MiB free")
        await free(hand, "gpu0", "cpu")

    on_a_node(tmp_path, story, cards=(tiny, *GPUS))


def test_inv_3_an_engine_that_serves_makes_no_way_for_a_parked_copy(tmp_path):
    small = CardInfo(id="cpu", kind="cpu", memory_bytes=200 * MIB)

    async def story(hand):
        serving = an_item("r-1", memory_bytes=150 * MIB)
        await hand.plan(serving, vllm_item("r-2", memory_bytes=60 * MIB))
        await hand.phase("r-1", "ready")
        await hand.phase("r-2", "ready")
        await stop(hand, "r-2", to_park())
        stopped = await hand.phase("r-2", "stopped")
        assert stopped.reason.endswith(" MiB, 50 MiB free")
        assert hand.replica("r-1").phase == "ready"

    on_a_node(tmp_path, story, cards=(small, *GPUS))


def test_req_d16_a_parked_copy_whose_card_was_given_away_stays_parked_and_says_so(tmp_path):
    async def story(hand):
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

    on_a_node(tmp_path, story)
