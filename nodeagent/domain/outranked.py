"""Decides whether an engine was started for a rank as high as an adapter's.

The catalog lets an adapter in whose rank its base's engines can be started for, and has those started for less
replaced. Until that is done they would refuse it in words that blame the adapter, which fits. It asks nobody.
"""

from nodeagent.domain.badloads import Fault
from schemas import codes, vllm_flags
from schemas.adapter import Adapter
from schemas.plan import Launch


def outranked(adapter: Adapter, launch: Launch | None) -> Fault | None:
    """Why this engine takes no adapter of that rank; None when it does, or when nobody can tell."""
    if launch is None or launch.engine != "vllm":
        return None
    started_for = vllm_flags.lora_rank(launch.args, launch.lora_rank)
    if adapter.rank <= started_for:
        return None
    return Fault(
        whose="replica",
        code=codes.RANK_TOO_HIGH,
        text=f"its rank is {adapter.rank}, and this engine was started for {started_for}",
    )
