"""Streams that are told how far the start of their model is: `?loading=stream` and `x-yard-loading: stream`."""

import asyncio
import json
from pathlib import Path
from typing import Any

import openai
import pytest

from events.memory import MemoryWire
from gateway import loadingstream
from gateway.app import RunningGateway
from schemas.progress import FileProgress
from tests.support.aio import run, until
from tests.support.gateway_yard import Yard, chat, memory_yard
from tests.support.http_wire import connected, post

PATH = "/v1/chat/completions"
HEADER = {"x-yard-loading": "stream"}


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """A tenth of a second where clients see a whole one."""
    monkeypatch.setattr(loadingstream, "EVERY_S", 0.1)
    monkeypatch.setattr(loadingstream, "GRACE_S", 0.1)


async def is_waiting(gateway: RunningGateway) -> None:
    await until(lambda: gateway.gateway.open_tickets == 1, "the request to wait")


def comments(text: str) -> list[str]:
    return [line for line in text.split("\n") if line.startswith(":")]


def events(text: str) -> list[str]:
    return [line.removeprefix("data: ") for line in text.split("\n") if line.startswith("data:")]


async def written(yard: Yard, count: int) -> list[Any]:
    """The access log, once it has so many lines."""

    def lines() -> list[bytes]:
        return b"".join(yard.access).splitlines()

    await until(lambda: len(lines()) >= count, "the access log to be written")
    return [json.loads(line) for line in lines()]


async def until_line(lines: Any, begins: str) -> str:
    async with asyncio.timeout(10.0):
        async for line in lines:
            if line.startswith(begins):
                return line
    raise AssertionError(f"the stream ended before {begins!r}")


@pytest.mark.parametrize("way", ["query", "header"])
def test_comments_tell_the_step_until_the_engine_s_own_stream_follows(
    tmp_path: Path, way: str
) -> None:
    async def story() -> None:
        async with memory_yard(tmp_path) as yard:
            await yard.model()
            gateway = await yard.gateway()
            agent = MemoryWire(yard.log.connection)
            url, headers = (f"{PATH}?loading=stream", {}) if way == "query" else (PATH, HEADER)
            async with (
                yard.client(gateway) as client,
                client.stream("POST", url, json=chat(stream=True), headers=headers) as answer,
            ):
                assert answer.status_code == 200
                assert answer.headers["content-type"].startswith("text/event-stream")
                assert answer.headers["cache-control"] == "no-cache"
                assert answer.headers["x-accel-buffering"] == "no"
                assert answer.headers["x-yard-loading"] == "stream"
                assert answer.headers["x-request-id"]
                lines = answer.aiter_lines()
                await until_line(lines, ": loading step=asking elapsed_s=0")
                await yard.activation("loading", replica="r-1")
                await yard.replica(None, "r-1", "fetching")
                told = FileProgress(key="k", bytes=42, total_bytes=100, replica="r-1")
                await until_line(lines, ": loading step=fetching")
                await agent.progress("n1", "fetch", "r-1", told)
                await until_line(lines, ": loading step=fetching percent=42 elapsed_s=")
                engine = await yard.engine(tokens=2)
                await yard.replica(engine, "r-1", "ready")
                rest = [line async for line in lines if line and not line.startswith(":")]
            assert rest[-1] == "data: [DONE]"
            assert [json.loads(e[6:])["model"] for e in rest[:-1]] == ["m"] * 3
            assert engine.seen[0].path == PATH
            assert gateway.gateway.open_tickets == 0
            (line,) = await written(yard, 1)
            assert (line["status"], line["code"], line["complete"]) == (200, "ok", True)

    run(story())


def test_nobody_listens_to_progress_while_nobody_waits_so(tmp_path: Path) -> None:
    async def story() -> None:
        async with memory_yard(tmp_path) as yard:
            await yard.model()
            gateway = await yard.gateway()
            agent = MemoryWire(yard.log.connection)
            engine = await yard.engine(tokens=1)
            told = FileProgress(key="k", bytes=1, total_bytes=2)
            await agent.progress("n1", "fetch", "r-1", told)
            async with yard.client(gateway) as client:
                asked = asyncio.create_task(
                    client.post(PATH, json=chat(stream=True), headers=HEADER)
                )
                await is_waiting(gateway)
                await yard.replica(None, "r-1", "fetching")
                await yard.activation("loading", replica="r-1")
                await asyncio.sleep(0.3)
                await yard.replica(engine, "r-1", "ready")
                text = (await asked).text
            # What was told before somebody waited was not heard.
            assert any("step=fetching elapsed" in c for c in comments(text))
            assert not any("percent" in c for c in comments(text))

    run(story())


def test_a_refusal_that_comes_at_once_is_a_status_and_a_later_one_an_event(tmp_path: Path) -> None:
    async def story() -> None:
        async with memory_yard(tmp_path) as yard:
            await yard.model()
            gateway = await yard.gateway(wait_s=0.6)
            async with yard.client(gateway, headers=HEADER) as client:
                unknown = await client.post(PATH, json=chat("nobody", stream=True))
                assert (unknown.status_code, unknown.json()["error"]["code"]) == (
                    404,
                    "model_not_found",
                )
                late = await client.post(PATH, json=chat(stream=True))
            assert late.status_code == 200
            assert len(comments(late.text)) >= 2
            (event,) = events(late.text)
            error = json.loads(event)["error"]
            assert error["code"] in ("model_loading", "yard_unavailable")
            assert error["message"]
            assert late.text.endswith("\n\n")
            last = (await written(yard, 2))[-1]
            assert (last["status"], last["code"]) == (200, error["code"])

    run(story())


def test_a_refusal_of_the_start_that_comes_soon_is_still_a_status(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loadingstream, "GRACE_S", 10.0)

    async def story() -> None:
        async with memory_yard(tmp_path) as yard:
            await yard.model()
            gateway = await yard.gateway()
            async with yard.client(gateway, headers=HEADER) as client:
                asked = asyncio.create_task(client.post(PATH, json=chat(stream=True)))
                await is_waiting(gateway)
                await yard.activation("refused", code="no_capacity", reason="no card")
                answer = await asked
            assert answer.status_code == 503
            assert answer.json()["error"]["code"] == "no_capacity"
            assert answer.headers["retry-after"]

    run(story())


def test_scn_b14_of_a_stream_that_is_told_of_the_load_admission_is_decided_before_its_head(
    tmp_path: Path,
) -> None:
    """The queue is full: no head of a stream went out, and nothing waits."""

    async def story() -> None:
        async with memory_yard(tmp_path) as yard:
            await yard.model()
            gateway = await yard.gateway(waiting_requests=1)
            async with yard.client(gateway, headers=HEADER) as client:
                first = asyncio.create_task(client.post(PATH, json=chat(stream=True)))
                await is_waiting(gateway)
                refused = await client.post(PATH, json=chat(stream=True))
                assert (refused.status_code, refused.json()["error"]["code"]) == (503, "queue_full")
                await yard.replica(await yard.engine(tokens=1))
                assert (await first).status_code == 200

    run(story())


def test_who_asks_for_no_stream_waits_without_a_head(tmp_path: Path) -> None:
    async def story() -> None:
        async with memory_yard(tmp_path) as yard:
            await yard.model()
            gateway = await yard.gateway()
            async with yard.client(gateway, headers=HEADER) as client:
                asked = asyncio.create_task(client.post(PATH, json=chat()))
                await is_waiting(gateway)
                await asyncio.sleep(0.3)
                await yard.replica(await yard.engine())
                answer = await asked
            assert answer.headers["content-type"] == "application/json"
            assert "x-yard-loading" not in answer.headers

    run(story())


@pytest.mark.parametrize("path", [PATH, "/v1/messages"])
def test_an_engine_s_refusal_behind_the_head_is_an_event_in_the_form_of_the_place(
    tmp_path: Path, path: str
) -> None:
    async def story() -> None:
        async with memory_yard(tmp_path) as yard:
            await yard.model()
            gateway = await yard.gateway()
            async with yard.client(gateway, headers=HEADER) as client:
                asked = asyncio.create_task(client.post(path, json=chat(stream=True)))
                await is_waiting(gateway)
                await asyncio.sleep(0.25)
                engine = await yard.engine(status=400)
                await yard.replica(engine, paths=(PATH, "/v1/messages"))
                answer = await asked
            assert answer.status_code == 200
            assert comments(answer.text)
            (event,) = events(answer.text)
            error = json.loads(event)["error"]
            if path == PATH:
                assert error == {"message": "no", "type": "t", "code": "c"}
            else:
                assert "event: error\n" in answer.text
                assert (error["type"], error["message"]) == ("invalid_request_error", "no")

    run(story())


RAW = {
    "length": (
        b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ncontent-length: 9\r\n\r\n"
        b"data: 1\n\n"
    ),
    "close": (
        b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\nconnection: close\r\n\r\n"
        b"data: 1\n\n"
    ),
    "json": (b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: 2\r\n\r\n{}"),
}


@pytest.mark.parametrize("version", ["1.0", "1.1"])
@pytest.mark.parametrize("kind", ["length", "json"])
def test_whatever_the_engine_s_framing_the_opened_stream_keeps_its_own(
    tmp_path: Path, kind: str, version: str
) -> None:
    async def story() -> None:
        async with memory_yard(tmp_path) as yard:
            await yard.model()
            gateway = await yard.gateway()
            body = json.dumps(chat(stream=True)).encode()
            request = post(body, PATH, b"x-yard-loading: stream\r\n")
            request = request.replace(b"HTTP/1.1", b"HTTP/" + version.encode())
            async with connected(gateway.port) as client:
                await client.send(request)
                head = await client.until(b"\r\n\r\n")
                await yard.replica(await yard.engine(raw=RAW[kind]))
                if version == "1.1":
                    assert b"transfer-encoding: chunked" in head
                    whole = await client.chunks()
                    # The connection serves on.
                    await client.send(b"GET /healthz HTTP/1.1\r\nhost: yard\r\n\r\n")
                    assert (await client.until(b"\r\n")).startswith(b"HTTP/1.1 200")
                else:
                    assert b"transfer-encoding" not in head
                    whole = await client.rest()
            told = events(whole.decode())
            if kind == "length":
                assert told == ["1"]
            else:
                assert json.loads(told[0])["error"]["code"] == "engine_error"
                assert len(told) == 1

    run(story())


def test_scn_b8_a_client_that_leaves_a_stream_that_is_told_of_the_load_leaves_nothing(
    tmp_path: Path,
) -> None:
    async def story() -> None:
        async with memory_yard(tmp_path) as yard:
            await yard.model()
            gateway = await yard.gateway()
            async with (
                yard.client(gateway) as client,
                client.stream("POST", PATH, json=chat(stream=True), headers=HEADER) as answer,
            ):
                await until_line(answer.aiter_lines(), ": loading")
            await until(lambda: gateway.gateway.open_tickets == 0, "the place to be given back")
            await until(lambda: gateway.server.active == 0, "the handler to end")

    run(story())


def test_a_gateway_that_ends_says_so_inside_the_stream(tmp_path: Path) -> None:
    async def story() -> None:
        async with memory_yard(tmp_path) as yard:
            await yard.model()
            async with yard.own_gateway(drain_s=0.8) as gateway:
                client = yard.client(gateway)
                asked = asyncio.create_task(
                    client.post(PATH, json=chat(stream=True), headers=HEADER)
                )
                await is_waiting(gateway)
                await asyncio.sleep(0.3)
            answer = await asked
            await client.aclose()
            (event,) = events(answer.text)
            assert json.loads(event)["error"]["code"] == "draining"

    run(story())


def test_the_openai_client_reads_such_a_stream_and_its_error(tmp_path: Path) -> None:
    async def story() -> None:
        async with memory_yard(tmp_path) as yard:
            await yard.model()
            gateway = await yard.gateway()
            async with openai.AsyncOpenAI(
                base_url=f"http://127.0.0.1:{gateway.port}/v1",
                api_key="none",
                max_retries=0,
                default_headers=HEADER,
                timeout=20.0,
            ) as client:

                async def ask() -> str:
                    stream = await client.chat.completions.create(
                        model="m", messages=[{"role": "user", "content": "hello"}], stream=True
                    )
                    return "".join([c.choices[0].delta.content or "" async for c in stream])

                asked = asyncio.create_task(ask())
                await is_waiting(gateway)
                await asyncio.sleep(0.3)
                engine = await yard.engine(tokens=3)
                await yard.replica(engine)
                assert await asked == "w0 w1 w2 "
                await yard.replica(engine, phase="stopped")
                await until(
                    lambda: not gateway.gateway.table.routable("m"),  # pyright: ignore[reportOptionalMemberAccess]
                    "the engine to be gone",
                )
                gateway.gateway.wait_s = 0.6
                with pytest.raises(openai.APIError, match=r"(?i)model|yard|control"):
                    await ask()

    run(story())
