"""A replica says how many adapters its agent keeps loaded in it once it is ready, and nothing where it loads none."""

import pytest
from msgspec.structs import replace

from nodeagent.drivers.command import CommandDriver
from nodeagent.drivers.vllm import PREFIXES, RUNTIME, VllmDriver
from schemas.node import EngineInfo
from schemas.replica import Replica
from tests.support.agent_yard import a_launch, a_node, an_item, memory_yard
from tests.support.aio import run
from tests.support.fake_vllm import vllm_program
from tests.support.scripted import ask


def arguments(replica: Replica) -> list[str]:
    """What its engine was started with."""
    assert replica.endpoint is not None
    return ask(replica.endpoint, "/fake/counters")["argv"]


def test_a_ready_replica_tells_its_slots_and_its_engine_was_started_for_them(tmp_path):
    async def story():
        async with memory_yard(tmp_path) as yard:
            root = tmp_path / "sets"
            driver = VllmDriver(vllm_program(tmp_path / "bin"), adapter_root=root)
            node = a_node(engines=(EngineInfo(name="vllm", version="1", adapters=True),))
            async with yard.agent(node=node, drivers={"vllm": driver}):
                launch = a_launch(engine="vllm", command=(), key_env=None, source="org/weights")
                with_some = an_item("r-1", launch=replace(launch, adapters=3, lora_rank=64))
                await yard.hand.plan(with_some, an_item("r-2", launch=launch))
                ready = await yard.hand.phase("r-1", "ready")
                assert ready.adapter_slots == 3
                argv = arguments(ready)
                expected = ["--enable-lora", "--max-loras", "3", "--max-cpu-loras", "4"]
                assert argv[-7:] == [*expected, "--max-lora-rank", "64"]
                none = await yard.hand.phase("r-2", "ready")
                assert none.adapter_slots == 0
                assert "--enable-lora" not in arguments(none)

    run(story(), 60)


@pytest.mark.parametrize("adapters", [0, 3])
def test_an_engine_that_loads_no_adapters_has_no_slots_whatever_is_asked_for(tmp_path, adapters):
    async def story():
        async with memory_yard(tmp_path) as yard:
            node = a_node(engines=(EngineInfo(name="command", version="1"),))
            async with yard.agent(node=node, drivers={"command": CommandDriver()}):
                await yard.hand.plan(an_item("r-1", launch=replace(a_launch(), adapters=adapters)))
                assert (await yard.hand.phase("r-1", "ready")).adapter_slots == 0

    run(story(), 60)


def test_the_variables_are_those_vllm_reads():
    assert (RUNTIME, PREFIXES) == (
        "VLLM_ALLOW_RUNTIME_LORA_UPDATING",
        "VLLM_RUNTIME_LORA_ALLOWED_PATH_PREFIXES",
    )
