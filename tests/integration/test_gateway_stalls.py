"""Engines that fall silent: what a client hears, who is told, and that no bound hides where none was set."""

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest

from gateway.http.limits import ClientLimits
from schemas.replica import Replica
from tests.support.aio import run, until
from tests.support.gateway_yard import Yard, chat, memory_yard
from tests.support.http_wire import (
    ASK,
    LOOPS,
    SSE_HEAD,
    Peer,
    answer,
    chunk,
    connected,
    engine,
    gateway,
    run_on,
)
from tests.support.http_wire import Yard as Wire

PATH = "/v1/chat/completions"
VERY_LONG = 1e12


@pytest.fixture(params=LOOPS)
def loop(request: pytest.FixtureRequest) -> str:
    return request.param


def test_a_stream_that_stalls_ends_with_an_error_frame_that_says_so(loop: str) -> None:
    async def story() -> None:
        async def script(peer: Peer) -> None:
            await peer.message()
            await peer.send(SSE_HEAD)
            for number in range(3):
                await asyncio.sleep(0.1)
                await peer.send(chunk(b"data: %d\n\n" % number))
            await peer.gone()

        limits = ClientLimits(stall_s=0.3)
        async with engine(script) as raw, gateway(Wire(raw.url), client_limits=limits) as yard:
            assert yard.server is not None
            async with connected(yard.server.port) as client:
                await client.send(ASK)
                _, body = await client.message()
            events = body.split(b"\n\n")
            # Three events 0.1 s apart are no stall; what follows them is one, and no end is invented.
            assert events[:3] == [b"data: 0", b"data: 1", b"data: 2"]
            assert events[4:] == [b""]
            told = json.loads(events[3].removeprefix(b"data: "))["error"]
            assert told["code"] == "engine_error"
            assert "nothing more for 0.3 s" in told["message"]
            assert b"[DONE]" not in body
            assert not yard.relayed[0].complete
            assert yard.exchanges[0].stalled

    run_on(loop, story())


def test_the_time_before_the_first_byte_is_no_stall_even_behind_the_head(loop: str) -> None:
    """Some engines send their head before the prefill."""

    async def story() -> None:
        async def script(peer: Peer) -> None:
            await peer.message()
            await peer.send(SSE_HEAD)
            await asyncio.sleep(0.4)
            await peer.send(chunk(b"data: 1\n\n") + b"0\r\n\r\n")
            await peer.gone()

        limits = ClientLimits(stall_s=0.1)
        async with engine(script) as raw, gateway(Wire(raw.url), client_limits=limits) as yard:
            assert yard.server is not None
            async with connected(yard.server.port) as client:
                await client.send(ASK)
                assert (await client.message())[1] == b"data: 1\n\n"
            assert yard.relayed[0].complete
            assert not yard.exchanges[0].stalled

    run_on(loop, story())


def test_the_silence_a_slow_client_causes_is_no_stall_of_the_engine(loop: str) -> None:
    block = b"x" * 65536

    async def story() -> None:
        sent = 0

        async def script(peer: Peer) -> None:
            nonlocal sent
            await peer.message()
            await peer.send(b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n")
            for _ in range(512):
                await peer.send(chunk(block))
                sent += 1
            await peer.send(b"0\r\n\r\n")
            await peer.gone()

        limits = ClientLimits(stall_s=0.2)
        async with engine(script) as raw, gateway(Wire(raw.url), client_limits=limits) as yard:
            assert yard.server is not None
            async with connected(yard.server.port) as client:
                await client.send(ASK)
                await client.until(b"\r\n\r\n")
                before = -1
                while before != sent:  # until nothing moves any more, and three times the bound
                    before = sent
                    await asyncio.sleep(0.6)
                assert sent < 512
                total = 0
                while total < 512 * len(chunk(block)) + 5:
                    piece = await client.reader.read(1 << 20)
                    assert piece, "the answer was cut"
                    total += len(piece)
            await until(lambda: bool(yard.relayed), "the answer to be complete")
            assert yard.relayed[0].complete

    run_on(loop, story())


def test_a_kept_connection_has_no_bound_between_two_requests(loop: str) -> None:
    async def story() -> None:
        async def script(peer: Peer) -> None:
            for _ in range(2):
                await peer.message()
                await peer.send(answer(b"whole", b"content-type: application/json\r\n"))
            await peer.gone()

        limits = ClientLimits(first_byte_s=0.1, stall_s=0.1)
        async with engine(script) as raw, gateway(Wire(raw.url), client_limits=limits) as yard:
            assert yard.server is not None
            async with connected(yard.server.port) as client:
                for _ in range(2):
                    await client.send(ASK)
                    assert (await client.message())[1] == b"whole"
                    await asyncio.sleep(0.25)
            assert raw.accepted == 1
            assert yard.exchanges[1].reused

    run_on(loop, story())


def test_who_routes_is_told_of_a_stall_and_its_client_hears_of_it(tmp_path: Path) -> None:
    async def story() -> None:
        async with memory_yard(tmp_path) as yard:
            await yard.model()
            silent = await yard.engine(pace_s=0.05, tokens=3)
            await yard.replica(silent)
            gateway = await yard.gateway(stream_stall_s=0.2)
            told: list[Replica] = []
            gateway.gateway.on_stall = told.append
            async with yard.client(gateway) as client:
                whole = await client.post(PATH, json=chat(stream=True))
                assert whole.text.endswith("data: [DONE]\n\n")
                assert not told
                silent.pace_s = 5.0
                silent.raw = None
                silent.tokens = 2
                # The first event comes with the head, then nothing for longer than is allowed.
                silent.raw = SSE_HEAD + chunk(b'data: {"choices": []}\n\n')
                stalled = await client.post(PATH, json=chat(stream=True))
                assert '"code":"engine_error"' in stalled.text.replace(" ", "")
                assert "0.2 s" in stalled.text
                metrics = (await client.get("/metrics")).text
            assert [r.id for r in told] == ["r-1"]
            assert 'yard_gateway_stalled_total{model="m"} 1.0' in metrics
            await until(lambda: not gateway.gateway.usage.by_replica, "the count to be given back")

    run(story())


def test_before_the_first_byte_a_silent_engine_is_left_for_another(tmp_path: Path) -> None:
    async def story() -> None:
        async with memory_yard(tmp_path) as yard:
            await yard.model()
            for n in (1, 2):
                await yard.replica(await yard.engine(), f"r-{n}")
            gateway = await yard.gateway(first_byte_s=0.3)
            async with yard.client(gateway) as client:
                first = (await client.post(PATH, json=chat())).headers["x-yard-replica"]
                yard.engines[int(first[-1]) - 1].gate.clear()
                second = await client.post(PATH, json=chat())
            assert second.status_code == 200
            assert second.headers["x-yard-replica"] != first
            assert second.headers["x-yard-why"] == "retried"

    run(story())


TIMEOUTS: dict[str, Any] = {
    "wait_s": 45.0,
    "no_decision_s": 5.0,
    "resend_s": 2.0,
    "connect_timeout_s": 5.0,
    "first_byte_s": 0.0,
    "stream_stall_s": 300.0,
    "drain_s": 2.0,
    "beacon_s": 0.1,
}


async def _answers_late(yard: Yard, **settings: Any) -> None:
    """A request whose engine takes its time before the first byte, and between two of a stream."""
    await yard.model()
    engine = await yard.engine(pace_s=0.15, tokens=2)
    await yard.replica(engine)
    gateway = await yard.gateway(**settings)
    async with yard.client(gateway) as client:
        engine.gate.clear()
        asked = asyncio.create_task(client.post(PATH, json=chat(stream=True)))
        await engine.until_seen(1)
        await asyncio.sleep(0.3)
        engine.gate.set()
        assert (await asked).text.endswith("data: [DONE]\n\n")


@pytest.mark.parametrize(
    ("name", "value"),
    [("all", "default"), *((n, v) for n in ("all", *TIMEOUTS) for v in (0.0, VERY_LONG))],
)
def test_scn_b12_no_timeout_at_any_value_hides_a_bound(
    tmp_path: Path, name: str, value: float | str
) -> None:
    names = TIMEOUTS if name == "all" else {name: TIMEOUTS[name]}
    settings = {n: d if value == "default" else float(value) for n, d in names.items()}
    # A drain waits for what runs; nothing does at the end of this test, whatever the bound.

    async def story() -> None:
        async with memory_yard(tmp_path) as yard:
            await _answers_late(yard, **settings)

    run(story())
