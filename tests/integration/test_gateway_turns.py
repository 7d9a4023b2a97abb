"""A model with a `concurrency` at gateways that serve: what its engine sees at once, and what those hear who wait."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx

from gateway.app import RunningGateway
from tests.support.aio import run, until
from tests.support.gateway_yard import FakeEngine, Yard, chat, memory_yard

CHAT = "/v1/chat/completions"


@asynccontextmanager
async def a_yard(
    tmp_path: Path, concurrency: int, *names: str, **settings: Any
) -> AsyncIterator[tuple[Yard, FakeEngine, list[tuple[RunningGateway, httpx.AsyncClient]]]]:
    """One replica of the model `m`, its engine held, and gateways of these names."""
    async with memory_yard(tmp_path) as yard:
        await yard.model("m", concurrency=concurrency)
        engine = await yard.engine()
        engine.gate.clear()
        await yard.replica(engine)
        gateways = [await yard.gateway(name, **settings) for name in names or ("gw",)]
        clients = [await yard.stack.enter_async_context(yard.client(g)) for g in gateways]
        yield yard, engine, list(zip(gateways, clients, strict=True))


async def in_line(gateway: RunningGateway, count: int) -> None:
    await until(lambda: len(gateway.gateway.line) == count, f"{count} to wait for a turn")


def test_an_engine_gets_no_more_at_once_than_its_model_says(tmp_path: Path) -> None:
    async def story() -> None:
        async with a_yard(tmp_path, 2) as (yard, engine, [(gateway, client)]):
            asked = [asyncio.create_task(client.post(CHAT, json=chat())) for _ in range(7)]
            await engine.until_seen(2)
            await in_line(gateway, 5)
            assert engine.running == 2
            listed = (await client.get("/v1/models")).json()["data"][0]
            assert listed["waiting"] == 5
            await until(lambda: yard.beacons[-1].waiting == {"m": 5}, "a beacon to tell of them")
            # A client that leaves while it waits never reaches the engine.
            asked[-1].cancel()
            await in_line(gateway, 4)
            engine.gate.set()
            answers = await asyncio.gather(*asked[:-1])
            assert {a.status_code for a in answers} == {200}
            waited = sorted(int(a.headers["x-yard-waited-ms"]) for a in answers)
            assert waited[:2] == [0, 0]
            assert waited[2] > 0
            assert answers[0].headers["x-yard-why"] == "only"
            assert answers[0].headers["x-yard-replica"] == "r-1"
            assert answers[0].headers["x-yard-model"] == "m"
            assert len(engine.seen) == 6
            assert not gateway.gateway.usage.by_replica

    run(story())


def test_scn_b14_a_full_line_and_a_wait_that_ends_are_said_before_a_stream_begins(
    tmp_path: Path,
) -> None:
    async def story() -> None:
        settings = {"waiting_requests": 1, "wait_s": 0.5}
        async with a_yard(tmp_path, 1, **settings) as (_, engine, [(gateway, client)]):
            stream = chat(stream=True)
            running = asyncio.create_task(client.post(CHAT, json=stream))
            await engine.until_seen(1)
            waiting = asyncio.create_task(client.post(CHAT, json=stream))
            await in_line(gateway, 1)
            full = await client.post(CHAT, json=stream)
            assert (full.status_code, full.json()["error"]["code"]) == (503, "queue_full")
            assert full.headers["x-should-retry"] == "true"
            busy = await waiting
            assert (busy.status_code, busy.json()["error"]["code"]) == (503, "model_busy")
            assert 1 <= int(busy.headers["retry-after"]) <= 60
            assert int(busy.headers["x-yard-waited-ms"]) >= 500
            assert busy.headers["content-type"] == "application/json"
            engine.gate.set()
            assert (await running).status_code == 200
            assert len(engine.seen) == 1

    run(story())


def test_gateways_share_the_seats_of_a_replica_and_all_are_served(tmp_path: Path) -> None:
    async def story() -> None:
        async with a_yard(tmp_path, 2, "g1", "g2") as (_, engine, gateways):
            for gateway, _ in gateways:
                ledger = gateway.limits.ledger
                await until(lambda of=ledger: of.gateways == 2, "both to know each other")
            most = 0
            asked: list[asyncio.Task[httpx.Response]] = []
            for _ in range(6):
                asked += [asyncio.create_task(c.post(CHAT, json=chat())) for _, c in gateways]
            await until(
                lambda: sum(len(g.gateway.line) for g, _ in gateways) >= 9, "the others to wait"
            )
            # One more for the other gateway, as of any limit that is shared.
            assert engine.running <= 3
            engine.gate.set()
            while not all(task.done() for task in asked):
                most = max(most, engine.running)
                await asyncio.sleep(0)
            assert {task.result().status_code for task in asked} == {200}
            assert most <= 3

    run(story())


def test_inv_1_a_stopped_replica_costs_nobody_its_place(tmp_path: Path) -> None:
    async def story() -> None:
        async with a_yard(tmp_path, 1) as (yard, engine, [(gateway, client)]):
            asked = [asyncio.create_task(client.post(CHAT, json=chat())) for _ in range(3)]
            await engine.until_seen(1)
            await in_line(gateway, 2)
            await yard.replica(engine, phase="stopped")
            await until(lambda: gateway.gateway.room.count(("m", "any")) == 3, "all to wait for it")
            other = await yard.engine()
            await yard.replica(other, "r-2")
            answers = await asyncio.gather(*asked)
            assert {a.status_code for a in answers} == {200}
            assert {a.headers["x-yard-replica"] for a in answers} == {"r-2"}
            assert "retried" in {a.headers["x-yard-why"] for a in answers}

    run(story())
