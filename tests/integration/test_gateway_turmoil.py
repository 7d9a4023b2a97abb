"""Replicas come, drain, fail and go, clients ask and leave at random: each is answered, and nothing is left in hand.

On uvloop, as gateways run: its timers and transports are not those of asyncio.
"""

import asyncio
import json
import random
from collections import Counter
from pathlib import Path

import httpx
import pytest
import uvloop

from schemas.replica import ReplicaPhase
from tests.support.aio import until
from tests.support.gateway_yard import Yard, chat, memory_yard

PATH = "/v1/chat/completions"
PHASES: tuple[ReplicaPhase, ...] = ("draining", "stopped", "failed", "ready", "parked")
SAID = {"", "queue_full", "model_busy", "model_loading", "start_failed", "engine_error"}
"""What may be said to a client; `yard_unavailable`, when nobody decides: nobody does here."""


async def move(yard: Yard, rng: random.Random, over: asyncio.Event) -> None:
    """One step after another until it is over, each of one of three engines."""
    there: dict[int, tuple[str, ReplicaPhase]] = {}
    count = 0
    while not over.is_set():
        index = rng.randrange(3)
        engine = yard.engines[index]
        replica, phase = there.get(index, ("", "stopped"))
        if phase in ("stopped", "failed"):
            count += 1
            replica, phase = f"r-{count}", "ready"
        else:
            phase = rng.choice(PHASES)
        there[index] = replica, phase
        await yard.replica(engine, replica, phase)
        if rng.random() < 0.3:
            await yard.activation(rng.choice(("loading", "ready", "wanted")))
        if rng.random() < 0.2:
            engine.drop_next = rng.randrange(2)
        await asyncio.sleep(rng.random() * 0.03)


async def asks(client: httpx.AsyncClient, rng: random.Random, said: Counter[str]) -> None:
    """Eight requests, some of which nobody waits for to the end."""

    async def one(body: dict[str, object], query: str) -> None:
        async with client.stream("POST", PATH + query, json=body) as answer:
            text = await answer.aread()
            refused = answer.status_code >= 400
            said[json.loads(text)["error"]["code"] if refused else ""] += 1

    for _ in range(8):
        body = chat(stream=rng.random() < 0.5)
        if rng.random() < 0.2:
            body["user"] = "x" * 400_000
        task = asyncio.create_task(one(body, "?loading=stream" if rng.random() < 0.3 else ""))
        if rng.random() < 0.4:
            await asyncio.wait((task,), timeout=rng.random() * 0.2)
            task.cancel()
        await asyncio.wait((task,))
        if not task.cancelled():
            task.result()


@pytest.mark.timeout(120)
@pytest.mark.parametrize("concurrency", [0, 1])
def test_scn_b8_whatever_happens_each_is_answered_and_nothing_is_left(
    tmp_path: Path, concurrency: int
) -> None:
    rng = random.Random(concurrency)
    said: Counter[str] = Counter()

    async def story() -> None:
        async with memory_yard(tmp_path) as yard:
            await yard.model(concurrency=concurrency)
            for _ in range(3):
                await yard.engine(pace_s=0.005, tokens=20)
            settings = {"waiting_requests": 20, "wait_s": 0.3, "no_decision_s": 30.0}
            gateways = [await yard.gateway(name, **settings) for name in ("gw", "gw2")]
            over = asyncio.Event()
            mover = asyncio.create_task(move(yard, rng, over))
            async with yard.client(gateways[0]) as one, yard.client(gateways[1]) as two:
                await asyncio.gather(*(asks(c, rng, said) for c in (one, two) for _ in range(20)))
            over.set()
            await mover
            for running in gateways:
                gateway = running.gateway
                await until(lambda g=gateway: not g.usage.by_replica, "all requests to end")
                assert gateway.open_tickets == len(gateway.room) == len(gateway.line) == 0
                assert not gateway._runs
                assert gateway.room.timers == 0
            await until(lambda: not any(e.running for e in yard.engines), "engines to be idle")

    uvloop.run(asyncio.wait_for(story(), 100))
    assert said.keys() <= SAID, said
    assert said[""] > 5, said
