"""One base URL per card over real HTTP: which engine answers, and which is asked for.

The test is the control plane and the agents.
"""

import asyncio
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
from openai import AsyncOpenAI, NotFoundError

from tests.support.aio import run, until
from tests.support.gateway_cards import (
    GPU0,
    GPU1,
    PATH,
    nothing_left,
    scopes_asked_for,
    two_gpus,
    waits,
)
from tests.support.gateway_world import a_profile
from tests.support.gateway_yard import chat, memory_yard


def test_req_d2_each_cards_base_url_is_answered_by_the_engine_on_that_card(tmp_path: Path) -> None:
    async def story() -> None:
        async with two_gpus(tmp_path, "gpu0", "gpu1", aliases=("tiny",)) as (yard, engines):
            gateway = await yard.gateway()
            async with yard.client(gateway) as client:
                for n, base in enumerate((GPU0, GPU1)):
                    for path in (PATH, "/v1/completions"):
                        for name in ("m", "tiny"):
                            answer = await client.post(base + path, json=chat(name))
                            assert answer.status_code == 200
                    assert [s.path for s in engines[n].seen] == [PATH] * 2 + ["/v1/completions"] * 2
                    assert {s.body["model"] for s in engines[n].seen} == {"m"}
                # Without a card the least busy one is chosen, as ever.
                for engine in engines:
                    engine.gate.clear()
                plain = [asyncio.create_task(client.post(PATH, json=chat())) for _ in range(4)]
                await until(
                    lambda: [e.running for e in engines] == [2, 2], "both to be given their share"
                )
                for engine in engines:
                    engine.gate.set()
                assert {a.status_code for a in await asyncio.gather(*plain)} == {200}
            assert await yard.activates() == []
            nothing_left(gateway)

    run(story())


def test_req_d2_an_openai_client_takes_a_card_as_its_base_url(tmp_path: Path) -> None:
    async def story() -> None:
        async with two_gpus(tmp_path, "gpu0", "gpu1") as (yard, engines):
            await yard.model("elsewhere", profiles=(a_profile("cpu"),))
            gateway = await yard.gateway()
            base = f"http://127.0.0.1:{gateway.port}{GPU1}/v1"
            async with AsyncOpenAI(base_url=base, api_key="x", max_retries=0) as client:
                messages: Any = [{"role": "user", "content": "hi"}]
                told = await client.chat.completions.create(model="m", messages=messages)
                assert told.choices[0].message.content
                stream = await client.chat.completions.create(
                    model="m", messages=messages, stream=True
                )
                assert [c async for c in stream][-1].choices[0].finish_reason == "stop"
                assert [m.id async for m in client.models.list()] == ["m"]
                assert (await client.models.retrieve("m")).id == "m"
                with pytest.raises(NotFoundError, match="no profile for the card n1/gpu1"):
                    await client.models.retrieve("elsewhere")
            assert [len(e.seen) for e in engines] == [0, 2]

    run(story())


def test_req_d4_an_engine_that_is_up_answers_before_anything_is_asked(tmp_path: Path) -> None:
    async def story() -> None:
        async with two_gpus(tmp_path, "gpu1") as (yard, engines):
            # A load elsewhere is under way; whoever can be answered now is.
            await yard.activation("loading", scope="n1~gpu0", since=datetime.now(UTC))
            await yard.replica(None, "r-gpu0", "starting", cards=("gpu0",))
            gateway = await yard.gateway()
            async with yard.client(gateway) as client:
                for base in ("", GPU1):
                    answer = await client.post(base + PATH, json=chat())
                    assert answer.status_code == 200
                    assert answer.headers["x-yard-waited-ms"] == "0"
            assert len(engines[0].seen) == 2
            assert await yard.activates() == []

    run(story())


def test_req_d9_with_one_entry_on_one_card_everything_is_as_before(tmp_path: Path) -> None:
    async def story() -> None:
        async with memory_yard(tmp_path) as yard:
            await yard.cards("n1")
            await yard.model(profiles=(a_profile("cpu"),))
            engine = await yard.engine()
            gateway = await yard.gateway()
            async with yard.client(gateway) as client:
                asked = asyncio.create_task(client.post(PATH, json=chat()))
                wish = await yard.wish()
                assert (wish.model, wish.scope, wish.rev) == ("m", "any", 0)
                await yard.activation("loading", replica="r-1")
                await yard.replica(engine)
                assert (await asked).status_code == 200
                assert (await client.post(f"/cards/n1/cpu{PATH}", json=chat())).status_code == 200
            assert len(await yard.activates()) == 1
            nothing_left(gateway)

    run(story())


def test_req_d2_a_card_is_asked_for_and_waited_for_by_itself(tmp_path: Path) -> None:
    """gpu1 is up and idle all along: a request on gpu0 never goes there."""

    async def story() -> None:
        async with two_gpus(tmp_path, "gpu1") as (yard, (other,)):
            await yard.activation("ready", replica="r-gpu1")
            gateway = await yard.gateway()
            async with yard.client(gateway) as client:
                asked = [asyncio.create_task(client.post(GPU0 + PATH, json=chat())) for _ in "ab"]
                wish = await yard.wish()
                assert (wish.model, wish.scope, wish.rev) == ("m", "n1~gpu0", 0)
                await waits(gateway, 2, "n1~gpu0")
                # The beacon tells by model, whatever the scope.
                await until(
                    lambda: yard.beacons[-1].waiting == {"m": 2}, "the beacon with those who wait"
                )
                await yard.activation("loading", scope="n1~gpu0", replica="r-gpu0")
                # Another replica of the model is ready, and it is not on that card.
                third = await yard.engine()
                seq = await yard.replica(third, "r-third", cards=("gpu1",))
                await yard.applied(gateway, seq)
                await waits(gateway, 2, "n1~gpu0")
                engine = await yard.engine()
                await yard.replica(engine, "r-gpu0", cards=("gpu0",))
                assert {a.status_code for a in await asyncio.gather(*asked)} == {200}
                assert [len(e.seen) for e in (engine, other, third)] == [2, 0, 0]
            assert len(await yard.activates()) == 1
            nothing_left(gateway)

    run(story())


def test_inv_4_many_requests_on_one_card_over_two_gateways_are_one_wish(tmp_path: Path) -> None:
    async def story() -> None:
        async with two_gpus(tmp_path) as (yard, _):
            gateways = [await yard.gateway("gw-1"), await yard.gateway("gw-2")]
            async with yard.client(gateways[0]) as one, yard.client(gateways[1]) as two:
                asked = [
                    asyncio.create_task(c.post(GPU0 + PATH, json=chat())) for c in [one, two] * 10
                ]
                for gateway in gateways:
                    await waits(gateway, 10, "n1~gpu0")
                engine = await yard.engine()
                await yard.replica(engine, "r-0", cards=("gpu0",))
                assert {a.status_code for a in await asyncio.gather(*asked)} == {200}
            assert await scopes_asked_for(yard) == ["n1~gpu0"]

    run(story())


def test_inv_1_a_request_on_a_card_that_loses_its_engine_waits_for_that_card(
    tmp_path: Path,
) -> None:
    async def story() -> None:
        async with two_gpus(tmp_path, "gpu0", "gpu1") as (yard, (first, other)):
            first.gate.clear()
            gateway = await yard.gateway()
            async with yard.client(gateway) as client:
                asked = asyncio.create_task(client.post(GPU0 + PATH, json=chat()))
                plain = asyncio.create_task(client.post(PATH, json=chat()))
                await first.until_seen(1)
                await yard.replica(first, "r-gpu0", "stopped", cards=("gpu0",))
                assert (await plain).status_code == 200
                await waits(gateway, 1, "n1~gpu0")
                assert (await yard.wish()).scope == "n1~gpu0"
                successor = await yard.engine()
                await yard.replica(successor, "r-next", cards=("gpu0",))
                assert (await asked).status_code == 200
            assert len(successor.seen) == 1
            assert len(other.seen) == 1
            nothing_left(gateway)

    run(story())


def test_inv_1_a_broken_connection_on_a_card_is_waited_out_on_that_card(tmp_path: Path) -> None:
    async def story() -> None:
        async with two_gpus(tmp_path, "gpu0", "gpu1") as (yard, (first, other)):
            first.drop_next = 1
            gateway = await yard.gateway()
            async with yard.client(gateway) as client:
                answer = await client.post(GPU0 + PATH, json=chat())
                assert answer.status_code == 200
            assert [len(first.seen), len(other.seen)] == [2, 0]
            assert await yard.activates() == []

    run(story())
