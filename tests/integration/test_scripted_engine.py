"""The scripted engine does what its script says, or every test that uses it would prove nothing."""

import asyncio
import contextlib
import json
import subprocess

import httpx
import pytest

from gateway.domain.places import ENGINE_PATHS
from nodeagent.drivers import asking
from nodeagent.drivers.command import CommandDriver
from tests.support.aio import run, until
from tests.support.scripted import argv, ask, free_port, scripted

NOT_ITS_OWN = (
    "/completion",
    "/embedding",
    "/infill",
    "/apply-template",
    "/v1/chat/completions/input_tokens",
    "/pooling",
)

CHAT = {"model": "scripted", "messages": [{"role": "user", "content": "a b c"}]}


def test_it_answers_whole_and_as_a_stream_with_usage() -> None:
    with scripted() as endpoint:
        whole = httpx.post(f"{endpoint}/v1/chat/completions", json={**CHAT, "max_tokens": 3}).json()
        assert whole["choices"][0]["message"]["content"] == "w0 w1 w2 "
        assert whole["choices"][0]["finish_reason"] == "length"
        assert whole["usage"]["completion_tokens"] == 3
        asked = {**CHAT, "stream": True, "stream_options": {"include_usage": True}}
        with httpx.stream("POST", f"{endpoint}/v1/chat/completions", json=asked) as answer:
            frames = [line.removeprefix("data: ") for line in answer.iter_lines() if line]
        assert frames[-1] == "[DONE]"
        chunks = [json.loads(frame) for frame in frames[:-1]]
        words = [c["choices"][0]["delta"].get("content", "") for c in chunks if c["choices"]]
        assert "".join(words) == "w0 w1 w2 w3 w4 "
        assert chunks[-1]["usage"]["completion_tokens"] == 5
        text = httpx.post(f"{endpoint}/v1/completions", json={"prompt": "x"}).json()
        assert text["choices"][0]["text"] == "w0 w1 w2 w3 w4 "
        vectors = httpx.post(f"{endpoint}/v1/embeddings", json={"input": ["a", "bb"]}).json()
        assert len(vectors["data"]) == 2
        assert ask(endpoint, "/script/counters")["finished"] == 4


def test_it_asks_for_its_key_on_everything_but_health() -> None:
    with scripted(key="k1") as endpoint:
        assert httpx.get(f"{endpoint}/health").status_code == 200
        wrong = httpx.post(f"{endpoint}/v1/chat/completions", json=CHAT)
        assert wrong.status_code == 401
        assert wrong.json()["error"]["type"] == "authentication_error"
        right = {"Authorization": "Bearer k1"}
        assert httpx.get(f"{endpoint}/v1/models", headers=right).status_code == 200
        assert httpx.get(f"{endpoint}/metrics").status_code == 401


def test_it_counts_a_client_that_leaves_as_aborted() -> None:
    async def story() -> None:
        with scripted(tokens=1000, pace_s=0.01) as endpoint:
            async with httpx.AsyncClient() as client:
                asked = {**CHAT, "stream": True}
                url = f"{endpoint}/v1/chat/completions"
                async with client.stream("POST", url, json=asked) as answer:
                    async for _ in answer.aiter_lines():
                        break
                await until(
                    lambda: ask(endpoint, "/script/counters")["aborted"] == 1, "the abort", 2.0
                )
            counters = ask(endpoint, "/script/counters")
            assert (counters["processing"], counters["finished"]) == (0, 0)

    run(story())


def test_it_fails_as_told_for_one_request_or_from_now_on() -> None:
    with scripted() as endpoint:
        url = f"{endpoint}/v1/chat/completions"
        page = httpx.post(url, json={**CHAT, "script": {"html_502": 1}})
        assert (page.status_code, page.headers["content-type"]) == (502, "text/html")
        assert httpx.post(url, json=CHAT).status_code == 200
        ask(endpoint, "/script", {"wrong_key": 1})
        assert httpx.post(url, json=CHAT).status_code == 401
        ask(endpoint, "/script", {"wrong_key": 0, "status": 500})
        assert httpx.post(url, json=CHAT).status_code == 500
        assert "error" in ask(endpoint, "/script", {"no_such_field": 1})
        with pytest.raises(httpx.RemoteProtocolError):
            httpx.post(
                url, json={**CHAT, "stream": True, "script": {"status": 0, "cut_after_tokens": 2}}
            )
        seen = ask(endpoint, "/script/requests")
        assert [request["path"] for request in seen] == ["/v1/chat/completions"] * 4


def test_it_defers_requests_above_its_slots_and_the_driver_sees_both() -> None:
    async def story() -> None:
        with scripted(slots=1, tokens=1000, pace_s=0.01) as endpoint:
            async with httpx.AsyncClient(timeout=None) as client:
                url = f"{endpoint}/v1/chat/completions"
                both = [asyncio.create_task(client.post(url, json=CHAT)) for _ in range(2)]

                async def two() -> bool:
                    return (await CommandDriver().counters(endpoint, "")).inflight == 2

                await until(two, "one processing and one deferred")
                counters = ask(endpoint, "/script/counters")
                assert (counters["processing"], counters["deferred"]) == (1, 1)
                for task in both:
                    task.cancel()
                    with contextlib.suppress(asyncio.CancelledError):
                        await task

    run(story())


@pytest.mark.parametrize("listen_early", [0, 1])
def test_it_is_not_healthy_before_it_loaded(listen_early: int) -> None:
    async def story() -> None:
        with scripted(hang_in_load=1, listen_early=listen_early) as endpoint:
            driver = CommandDriver()
            assert not await driver.probe(endpoint, "")
            answer = await asking.get(endpoint, "/health")
            assert (answer.status if answer else None) == (503 if listen_early else None)

    run(story())


def test_it_crashes_as_told() -> None:
    start = subprocess.run(
        argv(free_port(), crash_at_start="no such tensor"), capture_output=True, check=False
    )
    assert (start.returncode, start.stderr) == (3, b"no such tensor\n")
    with scripted(crash_after_tokens=2) as endpoint:
        frames = []
        with (
            pytest.raises(httpx.RemoteProtocolError),
            httpx.stream(
                "POST", f"{endpoint}/v1/chat/completions", json={**CHAT, "stream": True}
            ) as answer,
        ):
            frames += [line for line in answer.iter_lines() if "content" in line]
    with pytest.raises(OSError, match="refused"):
        ask(endpoint, "/script/counters")


def test_it_has_every_endpoint_a_gateway_passes_on() -> None:
    with scripted(without="/v1/images/edits,by_id") as endpoint:
        for path in ENGINE_PATHS:
            there = httpx.post(f"{endpoint}{path}").status_code
            missing = path == "/v1/images/edits" or path in NOT_ITS_OWN
            assert there == (404 if missing else 400), path
            if not missing:
                assert httpx.get(f"{endpoint}{path}").status_code == 405
                assert httpx.post(f"{endpoint}{path}", json={}).status_code == 200, path
        assert httpx.get(f"{endpoint}/v1/responses/resp_00000001").status_code == 404
    with scripted() as endpoint:
        made = httpx.post(f"{endpoint}/v1/responses", json={"input": "x"}).json()
        url = f"{endpoint}/v1/responses/{made['id']}"
        assert httpx.get(url).json()["output"] == made["output"]
        assert httpx.post(url).status_code == 405
        assert httpx.post(f"{url}/cancel").json()["status"] == "cancelled"
        assert httpx.delete(url).json()["deleted"]
        assert httpx.get(url).status_code == 404
