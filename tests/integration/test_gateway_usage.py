"""What requests used, from the engine's answer to the stream of accounts, through a gateway that serves."""

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx

from events.usage import decode_usage
from gateway.app import RunningGateway
from schemas.key import KeyCreated
from schemas.model import Scaling
from schemas.usage import UsageRow
from tests.support.aio import run, until
from tests.support.express_yard import ask, body_of, says, scene
from tests.support.fake_engine import FakeEngine
from tests.support.gateway_keys import ID, a_key, text_of
from tests.support.gateway_yard import Yard, memory_yard
from tests.support.http_wire import SSE_HEAD, chunk, connected, post

CHAT: dict[str, Any] = {"model": "m", "messages": [{"role": "user", "content": "hi"}]}
USAGE = {"prompt_tokens": 11, "completion_tokens": 5, "total_tokens": 16}


def told(usage: dict[str, Any]) -> bytes:
    """An engine's whole answer that tells this."""
    body = json.dumps({"object": "chat.completion", "model": "m", "choices": [], "usage": usage})
    head = "HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: "
    return f"{head}{len(body)}\r\n\r\n{body}".encode()


def rows(yard: Yard) -> list[UsageRow]:
    """All that was accounted for so far, each message once."""
    found = [decode_usage(m).batch for m in yard.broker.usage.messages.values()]
    return [row for batch in found if batch is not None for row in batch.rows]


def total(yard: Yard, field: str) -> int:
    return sum(getattr(row, field) for row in rows(yard))


@asynccontextmanager
async def serving(
    data: Path, **engine: Any
) -> AsyncIterator[tuple[Yard, RunningGateway, httpx.AsyncClient, FakeEngine]]:
    async with memory_yard(data) as yard:
        await yard.model()
        fake = await yard.engine(**engine)
        await yard.replica(fake)
        gateway = await yard.gateway()
        async with yard.client(gateway) as client:
            yield yard, gateway, client, fake


def test_what_the_engine_told_is_accounted_for_within_a_second(tmp_path: Path) -> None:
    async def story() -> None:
        async with serving(tmp_path, raw=told(USAGE)) as (yard, _, client, _fake):
            for _ in range(3):
                answer = await client.post("/v1/chat/completions", json=CHAT)
                assert answer.json()["usage"] == USAGE
            await until(lambda: total(yard, "requests") == 3, "the account")
            assert {r.model for r in rows(yard)} == {"m"}
            assert (total(yard, "prompt_tokens"), total(yard, "completion_tokens")) == (33, 15)
            assert (total(yard, "failed"), total(yard, "estimated")) == (0, 0)
            assert total(yard, "first_tokens") == 3
            line = json.loads(yard.access[-1].splitlines()[-1])
            assert (line["prompt_tokens"], line["completion_tokens"]) == (11, 5)

    run(story())


def test_a_stream_that_tells_none_is_counted_by_its_events(tmp_path: Path) -> None:
    async def story() -> None:
        async with serving(tmp_path, tokens=7) as (yard, _, client, _fake):
            answer = await client.post("/v1/chat/completions", json={**CHAT, "stream": True})
            assert answer.text.rstrip().endswith("[DONE]")
            await until(lambda: total(yard, "requests") == 1, "the account")
            # Seven words and the event that says why it ended.
            assert (total(yard, "completion_tokens"), total(yard, "estimated")) == (8, 1)

    run(story())


def test_the_usage_of_a_stream_is_read_under_an_alias_and_by_old_clients_too(
    tmp_path: Path,
) -> None:
    events = [
        {"model": "m", "choices": [{"delta": {"content": "w"}}], "usage": None},
        {"model": "m", "choices": [], "usage": USAGE},
    ]
    payloads = [f"data: {json.dumps(e)}\n\n".encode() for e in events] + [b"data: [DONE]\n\n"]
    body = b"".join(chunk(p) for p in payloads) + b"0\r\n\r\n"

    async def story() -> None:
        async with serving(tmp_path, raw=SSE_HEAD + body) as (yard, gateway, client, _fake):
            await yard.model(aliases=("an alias",))
            table = gateway.gateway.table
            await until(lambda: table is not None and table.model("an alias") is not None, "alias")
            for model in ("an alias", "m"):
                asked = {**CHAT, "model": model, "stream": True}
                answer = await client.post("/v1/chat/completions", json=asked)
                assert f'"model": "{model}"' in answer.text
                assert answer.text.rstrip().endswith("[DONE]")
                async with connected(gateway.port) as peer:
                    request = post(json.dumps(asked).encode()).replace(b"HTTP/1.1", b"HTTP/1.0")
                    await peer.send(request)
                    assert b'"completion_tokens": 5' in await peer.rest()
            await until(lambda: total(yard, "requests") == 4, "the account")
            assert (total(yard, "prompt_tokens"), total(yard, "completion_tokens")) == (44, 20)
            assert total(yard, "estimated") == 0

    run(story())


def test_the_prompt_is_read_of_a_stream_of_known_length_too(tmp_path: Path) -> None:
    start = {"type": "message_start", "message": {"usage": {"input_tokens": 7, "output_tokens": 1}}}
    delta = {"type": "message_delta", "usage": {"output_tokens": 5}}
    body = b"".join(f"data: {json.dumps(event)}\n\n".encode() for event in (start, delta))
    head = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ncontent-length: %d\r\n\r\n"

    async def story() -> None:
        async with scene(tmp_path) as made, connected(made.gateway.port) as peer:
            made.engine.next.append(says(head % len(body) + body))
            await peer.send(ask(body_of(stream=True), "/v1/messages"))
            assert (await peer.message())[1] == body
            (line,) = await made.until_lines(1)
            assert (line["prompt_tokens"], line["completion_tokens"]) == (7, 5)

    run(story())


def test_a_client_that_leaves_is_accounted_for_what_it_got(tmp_path: Path) -> None:
    async def story() -> None:
        async with serving(tmp_path, tokens=100_000, pace_s=0.005) as (yard, _, client, fake):
            asked = {**CHAT, "stream": True}
            async with client.stream("POST", "/v1/chat/completions", json=asked) as answer:
                got = b""
                async for block in answer.aiter_bytes():
                    got += block
                    if got.count(b"data:") >= 5:
                        break
            await until(lambda: fake.aborted == 1, "the engine to hear of it")
            await until(lambda: total(yard, "requests") == 1, "the account")
            assert total(yard, "completion_tokens") >= 5
            assert (total(yard, "estimated"), total(yard, "failed")) == (1, 0)

    run(story())


def test_an_engines_error_is_a_failed_request_without_tokens(tmp_path: Path) -> None:
    async def story() -> None:
        async with serving(tmp_path, status=400) as (yard, _, client, _fake):
            assert (await client.post("/v1/chat/completions", json=CHAT)).status_code == 400
            unknown = {**CHAT, "model": "unknown"}
            assert (await client.post("/v1/chat/completions", json=unknown)).status_code == 404
            await until(lambda: total(yard, "requests") >= 1, "the account")
            assert (total(yard, "requests"), total(yard, "failed")) == (1, 1)
            assert (total(yard, "prompt_tokens"), total(yard, "first_tokens")) == (0, 0)

    run(story())


def test_rows_are_by_key_and_a_limit_is_charged_what_was_used(tmp_path: Path) -> None:
    async def story() -> None:
        async with serving(tmp_path, raw=told(USAGE)) as (yard, gateway, client, _fake):
            key = a_key(tpm=1000)
            await yard.put("key", (ID,), KeyCreated(by="test"), key)
            await until(
                lambda: bool(gateway.gateway.table and gateway.gateway.table.keys.any), "key"
            )
            headers = {"authorization": f"Bearer {text_of()}"}
            asked = {**CHAT, "max_tokens": 500}
            first = await client.post("/v1/chat/completions", json=asked, headers=headers)
            assert first.status_code == 200
            # Of the 500 that were held for it, what was not used is free again.
            second = await client.post("/v1/chat/completions", json=asked, headers=headers)
            assert second.status_code == 200
            await until(lambda: total(yard, "requests") == 2, "the account")
            assert {r.key for r in rows(yard)} == {ID}
            reading = gateway.limits.ledger.read(key, gateway.gateway.clock.now_s())
            assert reading.tokens == 32

    run(story())


def test_an_outage_is_added_up_and_told_once_it_is_over(tmp_path: Path) -> None:
    async def story() -> None:
        async with serving(tmp_path, raw=told(USAGE)) as (yard, gateway, client, _fake):
            connection = yard.logs[gateway.gateway.id].connection
            yard.broker.lose_acks = 1
            await client.post("/v1/chat/completions", json=CHAT)
            await until(lambda: total(yard, "requests") == 1, "the account")
            connection.disconnect()
            for _ in range(20):
                await client.post("/v1/chat/completions", json=CHAT)
            assert gateway.accounting.rows <= 2
            await asyncio.sleep(0)
            assert total(yard, "requests") == 1
            connection.reconnect()
            await until(lambda: total(yard, "requests") == 21, "the rest")
            assert total(yard, "completion_tokens") == 21 * 5

    run(story())


def test_an_engine_is_told_whose_request_it_is_and_the_log_tells_its_trace(tmp_path: Path) -> None:
    async def story() -> None:
        async with serving(tmp_path) as (yard, _, client, fake):
            trace = "4bf92f3577b34da6a3ce929d0e0e4736"
            headers = {
                "x-request-id": "mine:1",
                "traceparent": f"00-{trace}-00f067aa0ba902b7-01",
                "tracestate": "vendor=1",
                "x-yard-priority": "low",
            }
            for given in (headers, headers, {}):
                answer = await client.post("/v1/chat/completions", json=CHAT, headers=given)
                assert answer.headers["x-request-id"]
            first, second, third = (seen.headers for seen in fake.seen)
            assert first["traceparent"].split("-")[1] == trace
            assert first["tracestate"] == "vendor=1"
            assert first["x-request-id"].startswith("mine-1-")
            # The spans are ours, and no two requests are one to an engine.
            assert "00f067aa0ba902b7" not in first["traceparent"]
            assert first["x-request-id"] != second["x-request-id"]
            assert third["traceparent"].split("-")[1] not in (trace, "0" * 32)
            assert "tracestate" not in third
            await until(lambda: len(b"".join(yard.access).splitlines()) == 3, "the access log")
            lines = [json.loads(line) for line in b"".join(yard.access).splitlines()]
            assert [line["trace"] == trace for line in lines] == [True, True, False]
            assert [line["prio"] for line in lines] == ["low", "low", "normal"]
            assert lines[0]["request"] == "mine:1"

    run(story())


def test_a_gateway_that_ends_tells_its_last_second(tmp_path: Path) -> None:
    async def story() -> None:
        async with memory_yard(tmp_path) as yard:
            await yard.model()
            await yard.replica(await yard.engine(raw=told(USAGE)))
            async with yard.own_gateway() as gateway, yard.client(gateway) as client:
                await client.post("/v1/chat/completions", json=CHAT)
            assert total(yard, "completion_tokens") == 5

    run(story())


def test_a_model_that_is_refused_is_named_and_one_that_is_not_there_never(tmp_path: Path) -> None:
    """Otherwise nobody could see which model it is that answers with refusals."""

    async def story() -> None:
        async with serving(tmp_path) as (yard, gateway, client, _fake):
            await yard.model("off", scaling=Scaling(min=0, max=0))
            table = gateway.gateway.table
            await until(lambda: table is not None and table.model("off") is not None, "the model")
            for path, model, code in (
                ("/v1/chat/completions", "off", "model_off"),
                ("/v1/rerank", "m", "endpoint_not_supported"),
                ("/v1/chat/completions", "made up", "model_not_found"),
            ):
                answer = await client.post(path, json={**CHAT, "model": model})
                assert answer.json()["error"]["code"] == code
            await until(lambda: total(yard, "requests") == 2, "the account")
            assert {(r.model, r.failed) for r in rows(yard)} == {("off", 1), ("m", 1)}
            lines = [json.loads(line) for text in yard.access for line in text.splitlines()]
            assert [line["model"] for line in lines] == ["off", "m", ""]
            text = gateway.metrics.render().decode()
            assert 'yard_gateway_requests_total{code="model_off",model="off"} 1.0' in text
            assert 'code="endpoint_not_supported",model="m"' in text
            assert "made up" not in text

    run(story())
