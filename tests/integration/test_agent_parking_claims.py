"""Games, apps and VMs that take a card on a node that parks: who is waited for, and what comes back afterwards."""

from schemas.cardasks import ClaimEnd, ClaimStart, VmAttach, VmDetach
from schemas.model import Parking
from tests.support.agent_parking import (
    STORY_S,
    asked,
    checkpointed,
    free,
    kinds,
    on_a_node,
    parked,
    stop,
    to_park,
    vllm_item,
)
from tests.support.agent_yard import alive
from tests.support.aio import run


def test_a_game_waits_for_no_park_that_is_under_way(tmp_path):
    async def story(hand):
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

    on_a_node(tmp_path, story)


def test_an_app_that_claims_a_card_has_its_engine_parked_and_brought_back_afterwards(tmp_path):
    async def story(hand):
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

    on_a_node(tmp_path, story)


def test_a_vm_ends_a_sleeping_engine_that_still_holds_the_device(tmp_path):
    async def story(hand):
        gone = await parked(hand, vllm_item("r-1"))
        vm = VmAttach(name="windows", card="gpu0", wait_s=20.0)
        assert (await asked(hand, vm)).status in ("waiting", "granted")
        await hand.phase("r-1", "stopped")
        assert not alive(gone.pid)
        await hand.expect(lambda: hand.card("gpu0").vm.attached, "the VM to have its card")

    on_a_node(tmp_path, story)


def test_a_vm_gets_the_card_of_a_checkpointed_engine_which_lives_on(tmp_path):
    async def story():
        async with checkpointed(tmp_path) as (hand, _, pid):
            await asked(hand, VmAttach(name="windows", card="gpu0", wait_s=20.0))
            await hand.expect(
                lambda: (vm := hand.card("gpu0").vm) is not None and vm.attached, "its card"
            )
            assert hand.replica("r-1").phase == "parked"
            await asked(hand, VmDetach(card="gpu0"))
            back = await hand.phase("r-1", "ready")
            assert back.pid == pid

    run(story(), STORY_S)
