"""A key's limits at gateways that serve: what is refused when, what is told of it, and that all of it is given back."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from gateway.app import RunningGateway
from schemas.key import Key, KeyChanged, KeyCreated
from tests.support.aio import run, until
from tests.support.gateway_keys import ID, a_key, text_of
from tests.support.gateway_yard import Yard, chat, memory_yard

CHAT = "/v1/chat/completions"
HEADERS = {"authorization": f"Bearer {text_of()}"}


@asynccontextmanager
async def a_yard(
    tmp_path: Path, key: Key, *names: str, **model: Any
) -> AsyncIterator[tuple[Yard, list[tuple[RunningGateway, httpx.AsyncClient]]]]:
    """A model `m` that is ready, this key and gateways of these names."""
    async with memory_yard(tmp_path) as yard:
        await yard.model("m", **model)
        await yard.replica(await yard.engine())
        await yard.put("key", (key.id,), KeyCreated(by="admin"), key)
        gateways = [await yard.gateway(name) for name in names or ("gw",)]
        clients = [
            await yard.stack.enter_async_context(yard.client(g, headers=HEADERS)) for g in gateways
        ]
        yield yard, list(zip(gateways, clients, strict=True))


def running(gateway: RunningGateway) -> int:
    """How many requests of the key this gateway says to run."""
    use = gateway.limits.ledger.tell(gateway.gateway.clock.now_s(), {}).keys.get(ID)
    return 0 if use is None else use.running


async def until_sharing(gateway: RunningGateway, count: int) -> None:
    """Waits until this gateway shares limits with so many, itself among them."""
    ledger = gateway.limits.ledger
    await until(lambda: ledger.gateways == count, f"{count} gateways to share")


def test_a_used_up_limit_is_told_with_when_to_come_back(tmp_path: Path) -> None:
    async def story() -> None:
        async with a_yard(tmp_path, a_key(rpm=2)) as (yard, [(_, client)]):
            first = await client.post(CHAT, json=chat())
            assert first.headers["x-ratelimit-limit-requests"] == "2"
            assert first.headers["x-ratelimit-remaining-requests"] == "1"
            assert first.headers["x-ratelimit-reset-requests"] in ("1m0s", "1m1s")
            assert "x-ratelimit-limit-tokens" not in first.headers
            await client.post(CHAT, json=chat())
            refused = await client.post(CHAT, json=chat())
            assert refused.status_code == 429
            error = refused.json()["error"]
            assert (error["code"], error["type"]) == ("rate_limit_exceeded", "rate_limit_error")
            assert "'ci'" in error["message"]
            assert 50 <= int(refused.headers["retry-after"]) <= 60
            assert refused.headers["x-should-retry"] == "true"
            assert refused.headers["x-ratelimit-remaining-requests"] == "0"
            assert len(yard.engines[0].seen) == 2
            # What is no inference is no use of it.
            assert (await client.get("/v1/models")).status_code == 200

    run(story())


def test_scn_b14_a_limit_is_decided_before_the_first_byte_of_a_stream(tmp_path: Path) -> None:
    async def story() -> None:
        async with a_yard(tmp_path, a_key(parallel=1)) as (yard, [(gateway, client)]):
            engine = yard.engines[0]
            engine.gate.clear()
            streaming = asyncio.create_task(client.post(CHAT, json=chat(stream=True)))
            await engine.until_seen(1)
            refused = await client.post(CHAT, json=chat(stream=True))
            assert refused.status_code == 429
            assert refused.headers["content-type"] == "application/json"
            assert refused.headers["retry-after"] == "1"
            engine.gate.set()
            assert (await streaming).status_code == 200
            assert running(gateway) == 0
            assert (await client.post(CHAT, json=chat())).status_code == 200
            assert len(engine.seen) == 2

    run(story())


def test_openai_clients_see_a_rate_limit(tmp_path: Path) -> None:
    hello: Any = [{"role": "user", "content": "hello"}]

    async def story() -> None:
        async with AsyncExitStack() as stack:
            yard = await stack.enter_async_context(a_yard(tmp_path, a_key(rpm=1)))
            port = yard[1][0][0].port
            client = await stack.enter_async_context(
                openai.AsyncOpenAI(
                    base_url=f"http://127.0.0.1:{port}/v1", api_key=text_of(), max_retries=0
                )
            )
            chats = client.chat.completions
            raw = await chats.with_raw_response.create(model="m", messages=hello)
            assert raw.headers["x-ratelimit-remaining-requests"] == "0"
            with pytest.raises(openai.RateLimitError) as refused:
                await chats.create(model="m", messages=hello)
            assert refused.value.code == "rate_limit_exceeded"

    run(story())


def test_whatever_ends_a_request_gives_its_place_back(tmp_path: Path) -> None:
    """A client that leaves, an engine that fails, a name that is not there, a wait that is given up."""

    async def story() -> None:
        key = a_key(parallel=1, may_activate=True)
        async with a_yard(tmp_path, key) as (yard, [(gateway, client)]):
            engine = yard.engines[0]
            engine.gate.clear()
            leaving = asyncio.create_task(client.post(CHAT, json=chat()))
            await engine.until_seen(1)
            assert running(gateway) == 1
            leaving.cancel()
            await until(lambda: running(gateway) == 0, "the one that left to be counted out")
            engine.gate.set()
            assert (await client.post(CHAT, json=chat("none"))).status_code == 404
            assert running(gateway) == 0
            engine.status = 500
            assert (await client.post(CHAT, json=chat())).status_code == 500
            assert running(gateway) == 0
            await yard.applied(gateway, await yard.model("cold"))
            waiting = asyncio.create_task(client.post(CHAT, json=chat("cold")))
            await until(lambda: gateway.gateway.open_tickets == 1, "it to wait")
            assert running(gateway) == 1, "who waits has a place, too"
            waiting.cancel()
            await until(lambda: running(gateway) == 0, "the one that waited to be counted out")

    run(story())


def test_tokens_are_reserved_by_the_body_and_what_was_asked_for(tmp_path: Path) -> None:
    async def story() -> None:
        async with a_yard(tmp_path, a_key(tpm=1000), context_length=400) as (yard, [(_, client)]):
            engine = yard.engines[0]
            engine.gate.clear()
            body = chat(max_tokens=100, padding="x" * 400)
            first = asyncio.create_task(client.post(CHAT, json=body))
            await engine.until_seen(1)
            # A body far larger than its tokens, as with an image, takes no more than the model's context.
            second = asyncio.create_task(client.post(CHAT, json=chat(padding="x" * 100_000)))
            await engine.until_seen(2)
            refused = await client.post(CHAT, json=chat(padding="x" * 100_000))
            assert refused.status_code == 429
            assert "1000 tokens in 60 s, and this request may take 400" in refused.text
            assert 350 <= int(refused.headers["x-ratelimit-remaining-tokens"]) <= 399
            engine.gate.set()
            assert (await first).status_code == (await second).status_code == 200

    run(story())


def test_a_model_that_says_nothing_of_its_context_is_limited_too(tmp_path: Path) -> None:
    async def story() -> None:
        async with a_yard(tmp_path, a_key(tpm=1000)) as (_, [(_, client)]):
            for _ in range(2):
                assert (await client.post(CHAT, json=chat(max_tokens=9))).status_code == 200
            whole = await client.post(CHAT, json=chat(max_tokens=5000))
            assert whole.status_code == 429
            assert "this request may take 1000" in whole.text

    run(story())


def test_who_leaves_an_engine_that_reads_is_charged_for_what_it_read(tmp_path: Path) -> None:
    async def story() -> None:
        async with a_yard(tmp_path, a_key(tpm=10_000)) as (yard, [(gateway, client)]):
            engine = yard.engines[0]
            engine.gate.clear()
            body = chat(max_tokens=500, padding="x" * 4000)
            leaving = asyncio.create_task(client.post(CHAT, json=body))
            await engine.until_seen(1)
            leaving.cancel()
            await until(lambda: running(gateway) == 0, "it to be counted out")
            ledger, now_s = gateway.limits.ledger, gateway.gateway.clock.now_s()
            assert 1000 <= ledger.read(a_key(), now_s).tokens <= 1100
            engine.gate.set()
            before = ledger.read(a_key(), now_s).tokens
            assert (await client.post(CHAT, json=chat())).status_code == 200
            assert ledger.read(a_key(), now_s).tokens > before
            engine.status = 400
            before = ledger.read(a_key(), now_s).tokens
            assert (await client.post(CHAT, json=chat())).status_code == 400
            assert ledger.read(a_key(), now_s).tokens == before

    run(story())


def test_a_changed_limit_holds_from_then_on(tmp_path: Path) -> None:
    async def story() -> None:
        async with a_yard(tmp_path, a_key(rpm=1)) as (yard, [(gateway, client)]):
            assert (await client.post(CHAT, json=chat())).status_code == 200
            assert (await client.post(CHAT, json=chat())).status_code == 429
            changed = KeyChanged(by="admin", fields=("rpm",))
            await yard.applied(gateway, await yard.put("key", (ID,), changed, a_key(rpm=3)))
            assert (await client.post(CHAT, json=chat())).status_code == 200
            await yard.applied(gateway, await yard.put("key", (ID,), changed, a_key()))
            answer = await client.post(CHAT, json=chat())
            assert answer.status_code == 200
            assert "x-ratelimit-limit-requests" not in answer.headers

    run(story())


def test_gateways_share_a_limit(tmp_path: Path) -> None:
    """Two gateways, a limit of 20, 60 requests at once at each: 20 are served, one more at the most."""

    async def story() -> None:
        async with a_yard(tmp_path, a_key(rpm=20), "g1", "g2") as (yard, gateways):
            for gateway, _ in gateways:
                await until_sharing(gateway, 2)

            async def ask(client: httpx.AsyncClient) -> int:
                return (await client.post(CHAT, json=chat())).status_code

            served = 0
            for _ in range(3):
                async with asyncio.TaskGroup() as group:
                    tasks = [
                        group.create_task(ask(client)) for _ in range(20) for _, client in gateways
                    ]
                statuses = [task.result() for task in tasks]
                assert set(statuses) <= {200, 429}
                served += statuses.count(200)

            # One of them may use what the other leaves, as soon as both know what was used.
            async def used_up() -> bool:
                nonlocal served
                served += await ask(gateways[0][1]) == 200
                return served >= 20

            await until(used_up, "the whole limit to be used")
            for _, client in gateways:
                served += await ask(client) == 200
            assert 20 <= served <= 21
            assert len(yard.engines[0].seen) == served

    run(story())


def test_a_gateway_that_joins_knows_what_was_used(tmp_path: Path) -> None:
    async def story() -> None:
        async with a_yard(tmp_path, a_key(rpm=5), "g1") as (yard, [(first, client)]):
            for _ in range(5):
                assert (await client.post(CHAT, json=chat())).status_code == 200
            late = await yard.gateway("g2")
            async with yard.client(late, headers=HEADERS) as other:
                refused = await other.post(CHAT, json=chat())
                assert refused.status_code == 429
                assert refused.headers["x-ratelimit-remaining-requests"] == "0"
            await until_sharing(first, 2)

    run(story())


def test_a_gateway_that_leaves_shares_nothing_any_more(tmp_path: Path) -> None:
    async def story() -> None:
        async with a_yard(tmp_path, a_key(rpm=8), "g1") as (yard, [(first, client)]):
            async with yard.own_gateway("g2") as second, yard.client(second, headers=HEADERS) as c:
                await until_sharing(first, 2)
                assert (await c.post(CHAT, json=chat())).status_code == 200
            assert first.limits.ledger.gateways == 1
            statuses = [(await client.post(CHAT, json=chat())).status_code for _ in range(8)]
            assert statuses == [200] * 7 + [429]

    run(story())


def test_gateways_hear_what_runs_at_the_others(tmp_path: Path) -> None:
    async def story() -> None:
        async with a_yard(tmp_path, a_key(rpm=100), "g1", "g2") as (yard, gateways):
            (first, client), (second, _) = gateways
            engine = yard.engines[0]
            engine.gate.clear()
            asking = asyncio.create_task(client.post(CHAT, json=chat()))
            await engine.until_seen(1)
            ledger = second.limits.ledger
            await until(lambda: ledger.inflight() == {"r-1": 1}, "the other to hear of it")
            assert first.limits.ledger.inflight() == {}
            engine.gate.set()
            await asking
            await until(lambda: ledger.inflight() == {}, "the other to hear of its end")

    run(story())
