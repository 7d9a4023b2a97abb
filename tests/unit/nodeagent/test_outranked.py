"""An engine that was started before the rank of its entry grew is no place for an adapter of the new rank."""

import pytest
from msgspec.structs import replace

from nodeagent.domain.badloads import Fault
from nodeagent.domain.outranked import outranked
from schemas import codes
from schemas.plan import Launch
from tests.support.adapter_files import an_adapter
from tests.support.agent_yard import a_launch

LAUNCH = a_launch(engine="vllm", command=(), adapters=2)


@pytest.mark.parametrize(
    ("launch", "rank", "started_for"),
    [
        (LAUNCH, 16, None),
        (LAUNCH, 17, 16),
        (replace(LAUNCH, lora_rank=8), 16, None),
        (replace(LAUNCH, lora_rank=64), 64, None),
        (replace(LAUNCH, lora_rank=32), 64, 32),
        (replace(LAUNCH, lora_rank=64, args=("--max-lora-rank", "32")), 64, 32),
        (replace(LAUNCH, args=("--max-lora-rank=128",)), 64, None),
        (replace(LAUNCH, engine="command"), 512, None),
        (None, 512, None),
    ],
)
def test_inv_9_a_rank_above_what_the_engine_was_started_for_is_told_with_both_numbers(
    launch: Launch | None, rank: int, started_for: int | None
) -> None:
    found = outranked(replace(an_adapter("a"), rank=rank), launch)
    if started_for is None:
        assert found is None
    else:
        assert found == Fault(
            whose="replica",
            code=codes.RANK_TOO_HIGH,
            text=f"its rank is {rank}, and this engine was started for {started_for}",
        )
