"""Spans of requests reach a collector where a setting names one, and cost nobody an answer."""

import asyncio
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from schemas.key import KeyCreated
from tests.support.aio import run, until
from tests.support.fake_engine import FakeEngine
from tests.support.gateway_keys import ID, a_key, text_of
from tests.support.gateway_yard import memory_yard
from tests.support.ports import free_port

PATH = "/v1/chat/completions"
CHAT = {"model": "m", "messages": [{"role": "user", "content": "a secret question"}]}
TRACE, PARENT = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"


def spans_at(collector: FakeEngine) -> list[dict[str, Any]]:
    return [
        span
        for seen in collector.seen
        for resource in seen.body["resourceSpans"]
        for scope in resource["scopeSpans"]
        for span in scope["spans"]
    ]


def told(span: dict[str, Any]) -> dict[str, Any]:
    return {a["key"]: next(iter(a["value"].values())) for a in span["attributes"]}


def test_a_request_is_a_span_below_its_clients_and_above_its_engines(tmp_path: Path) -> None:
    async def story() -> None:
        async with memory_yard(tmp_path) as yard:
            await yard.model()
            engine, collector = await yard.engine(), await yard.engine()
            await yard.replica(engine)
            gateway = await yard.gateway(otlp_endpoint=collector.endpoint + "/")
            key = a_key()
            await yard.put("key", (ID,), KeyCreated(by="test"), key)
            table = gateway.gateway.table
            await until(lambda: table is not None and table.keys.any, "the key")
            headers = {"traceparent": f"00-{TRACE}-{PARENT}-01", "x-api-key": text_of()}
            async with yard.client(gateway) as client:
                for more in (headers, {**headers, "traceparent": f"00-{TRACE}-{PARENT}-00"}):
                    assert (await client.post(PATH, json=CHAT, headers=more)).status_code == 200
                unknown = {**CHAT, "model": "unknown"}
                answer = await client.post(PATH, json=unknown, headers={"x-api-key": text_of()})
                assert answer.status_code == 404
            # The one whose client did not want it sampled is in none of them.
            await until(lambda: len(spans_at(collector)) == 2, "the spans")
            assert {seen.path for seen in collector.seen} == {"/v1/traces"}
            first, second = spans_at(collector)
            assert (first["traceId"], first["parentSpanId"]) == (TRACE, PARENT)
            assert engine.seen[0].headers["traceparent"] == f"00-{TRACE}-{first['spanId']}-01"
            assert (first["name"], first["kind"]) == (f"POST {PATH}", 2)
            assert int(first["startTimeUnixNano"]) <= int(first["endTimeUnixNano"])
            assert "first_byte" in [e["name"] for e in first["events"]]
            attributes = told(first)
            assert attributes["gen_ai.request.model"] == "m"
            assert attributes["http.response.status_code"] == "200"
            assert (attributes["yard.key"], attributes["yard.replica"]) == (ID, "r-1")
            assert "parentSpanId" not in second
            assert told(second)["yard.code"] == "model_not_found"
            assert "secret" not in str(collector.seen)
            assert text_of() not in str(collector.seen)

    run(story())


def test_a_collector_that_is_not_there_costs_spans_and_no_request(tmp_path: Path) -> None:
    async def story() -> None:
        async with memory_yard(tmp_path) as yard:
            await yard.model()
            await yard.replica(await yard.engine())
            gateway = await yard.gateway(otlp_endpoint=f"http://127.0.0.1:{free_port()}")
            async with yard.client(gateway) as client:
                for _ in range(3):
                    assert (await client.post(PATH, json=CHAT)).status_code == 200
            dropped = b"\nyard_gateway_spans_dropped_total 3.0\n"
            await until(lambda: dropped in gateway.metrics.render(), "the spans to be dropped")

    run(story())


def test_a_collector_that_refuses_is_told_of_and_asked_again(tmp_path: Path) -> None:
    async def story() -> None:
        async with memory_yard(tmp_path) as yard:
            await yard.model()
            await yard.replica(await yard.engine())
            collector = await yard.engine(status=503)
            gateway = await yard.gateway(otlp_endpoint=collector.endpoint)
            async with yard.client(gateway) as client:
                assert (await client.post(PATH, json=CHAT)).status_code == 200
                await until(lambda: len(collector.seen) == 1, "the refusal")
                collector.status = 200
                assert (await client.post(PATH, json=CHAT)).status_code == 200
                await until(lambda: len(collector.seen) == 2, "the next")

    run(story())


def test_a_collector_that_answers_without_an_end_is_left(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("gateway.spans.TIMEOUT_S", 0.3)

    async def drips(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            await reader.readuntil(b"\r\n\r\n")
            writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: 100000\r\n\r\n")
            while True:
                writer.write(b" ")
                await writer.drain()
                await asyncio.sleep(0.02)
        except OSError:
            pass
        finally:
            writer.close()

    async def story() -> None:
        server = await asyncio.start_server(drips, "127.0.0.1", 0)
        port = server.sockets[0].getsockname()[1]
        async with memory_yard(tmp_path) as yard:
            await yard.model()
            await yard.replica(await yard.engine())
            gateway = await yard.gateway(otlp_endpoint=f"http://127.0.0.1:{port}")
            async with yard.client(gateway) as client:
                assert (await client.post(PATH, json=CHAT)).status_code == 200
            dropped = b"\nyard_gateway_spans_dropped_total 1.0\n"
            await until(lambda: dropped in gateway.metrics.render(), "it to be given up")
        server.close()

    run(story())


def test_the_library_is_there_before_the_port_opens_and_only_for_who_has_a_collector() -> None:
    """Loaded later it would hold up the first requests of a new process for as long as its import takes."""
    program = (
        "import sys\n"
        "from gateway.app import run_gateway\n"
        "from gateway.spans import Spans\n"
        "assert 'httpx' not in sys.modules\n"
        "Spans('http://127.0.0.1:4318', 'gw', None, None)\n"
        "assert 'httpx' in sys.modules\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stderr
