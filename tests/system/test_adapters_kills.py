"""kill -9 of a gateway, an engine and the agent under a load of adapters: never a wrong answer, none evicted in use."""

import asyncio
import os
import signal
import time
from pathlib import Path

import pytest

from tests.support.aio import run
from tests.system.adapters import (
    ADAPTERS,
    GATEWAYS,
    PACED,
    REPLICAS,
    REQUESTS,
    Asked,
    Diary,
    Traffic,
    add_adapters,
    base_entry,
    replicas_ready,
    running_replicas,
    settings_for,
    zipf_trace,
)
from tests.system.cards import agent_again
from tests.system.hubs import kill, tell
from tests.system.yard import system_yard

ROOM = ("--max-cpu-loras", "64")
"""More than the limit: an agent that has just started evicts nothing for half a minute, and loads all the same."""

HONEST = ("engine_error", "model_loading", "no_capacity", "start_failed", "yard_unavailable")
"""What a request may be told whose engine was killed."""


def honest(answer: Asked, killed_gateway: int) -> bool:
    """Whether this failure says what happened: the connection ended, or an error that names a reason."""
    if answer.status is None:
        return answer.gateway == killed_gateway
    if answer.status == 200:
        return not answer.finished
    return answer.status in (502, 503) and answer.code.split(":")[0] in HONEST


@pytest.mark.alone
@pytest.mark.timeout(300)
def test_inv_3_no_kill_makes_a_wrong_answer_or_evicts_an_adapter_in_use(tmp_path: Path) -> None:
    async def story() -> None:
        settings = settings_for(tmp_path, REPLICAS, controlplane={"backoff": "200ms"})
        async with system_yard(tmp_path, gateways=GATEWAYS, settings=settings) as yard:
            await yard.add(base_entry(tmp_path, *ROOM, replicas=REPLICAS, script=PACED))
            await add_adapters(yard, tmp_path / "adapters", ADAPTERS)
            await replicas_ready(yard, REPLICAS)
            bases = [yard.gateway(n) for n in range(GATEWAYS)]
            traffic = Traffic(bases, zipf_trace(REQUESTS, ADAPTERS), tries=4)

            alone: list[float] = []
            """When the engines lost their agent, and when the next one had them."""

            async def kills() -> None:
                await traffic.answered(400, 120)
                await kill(yard, "gateway-2")
                await traffic.answered(900, 120)
                before = yard.position
                id, pid = min(running_replicas(yard).items())
                os.kill(pid, signal.SIGKILL)
                failed = await yard.event("replica.failed", after=before, timeout_s=60)
                assert failed.key[1] == id
                await yard.event("replica.ready", after=failed.seq, timeout_s=60)
                await traffic.answered(1400, 120)
                alone.append(time.monotonic())
                started = await agent_again(yard, signal.SIGKILL)
                alone.append(time.monotonic())
                assert set(started.event.adopted) == set(running_replicas(yard))

            async with asyncio.TaskGroup() as group:
                group.create_task(traffic.run())
                group.create_task(kills())
            diary = Diary(tmp_path / "diary")
            tell(f"{len(diary.loads())} loads; {traffic.how()}; {len(traffic.bad())} failures")
            assert traffic.wrong() == []
            assert diary.wrong() == []
            assert diary.evicted_in_use() == []
            # Without an agent gateways go by the log, which is told of swaps once a second: the engine says no.
            begun, ended = alone
            assert [line for line in diary.gone() if not begun < line["at"] < ended] == []
            assert traffic.unanswered == []
            assert [a for a in traffic.bad() if not honest(a, killed_gateway=1)] == []
            of_engine = [a for a in traffic.bad() if a.status is not None]
            assert len(of_engine) <= traffic.clients, "no more than was under way"
            await replicas_ready(yard, REPLICAS)

    run(story(), 290)
