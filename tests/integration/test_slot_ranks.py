"""While engines are replaced for a higher rank, one started for less refuses the adapter without being asked."""

from schemas import codes
from schemas.slots import SlotsFailed
from tests.support.agent_yard import a_launch
from tests.support.aio import run
from tests.support.slot_yard import slot_yard


def test_scn_d1_an_engine_started_for_less_is_not_asked_and_blames_no_adapter(tmp_path):
    async def story():
        async with slot_yard(tmp_path) as yard:
            yard.files.put("high", rank=64)
            yard.files.put("low", rank=16)
            yard.serve("r-1")
            launch = a_launch(engine="vllm", command=(), adapters=2, lora_rank=64)
            yard.serve("r-2", launch=launch)
            refused = await yard.ask("high")
            assert (refused.status, refused.whose, refused.code) == (
                "refused",
                "replica",
                codes.RANK_TOO_HIGH,
            )
            assert refused.sentence == "its rank is 64, and this engine was started for 16"
            assert refused.until is not None
            assert yard.engine.names("load") == []
            ((slots, event),) = yard.said
            assert isinstance(event, SlotsFailed)
            assert [(bad.adapter, bad.whose) for bad in slots.bad] == [("high", "replica")]
            # What the old one takes it goes on taking, and the new one takes both.
            assert (await yard.ask("low")).status == "ready"
            assert (await yard.ask("high", replica="r-2")).status == "ready"

    run(story())
