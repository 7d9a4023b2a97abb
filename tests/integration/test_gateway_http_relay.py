"""The whole data path over real sockets: a raw client, our server and client, a raw engine."""

import asyncio
from collections.abc import Callable
from unittest.mock import patch

import pytest

from gateway.http.client import EngineClient
from gateway.http.errors import EngineGone
from gateway.http.exchange import Exchange
from tests.support.aio import until
from tests.support.http_wire import (
    ASK,
    LOOPS,
    SSE_HEAD,
    Peer,
    Yard,
    answer,
    chunk,
    connected,
    echo,
    engine,
    gateway,
    post,
    run_on,
)

pytestmark = pytest.mark.parametrize("loop", LOOPS)


def test_scn_b1_a_chunked_request_reaches_the_engine_as_one_clean_body(loop: str) -> None:
    heads: list[bytes] = []

    async def script(peer: Peer) -> None:
        head, body = await peer.message()
        heads.append(head)
        await peer.send(answer(body))

    async def story() -> None:
        async with engine(script) as raw, gateway(Yard(raw.url)) as yard:
            assert yard.server is not None
            async with connected(yard.server.port) as client:
                await client.send(
                    b"POST /x HTTP/1.1\r\nhost: a\r\ntransfer-encoding: chunked\r\n\r\n5\r\nhel"
                )
                await client.send(b"lo\r\n1;ext=1\r\n!\r\n0\r\ntrailer: x\r\n\r\n")
                head, body = await client.message()
            assert head.startswith(b"HTTP/1.1 200 OK\r\n")
            assert body == b"hello!"

    run_on(loop, story())
    assert b"content-length: 6\r\n" in heads[0]
    assert b"transfer-encoding" not in heads[0]
    assert b"trailer" not in heads[0]


def test_scn_b4_a_body_of_20_mib_arrives_whole(loop: str) -> None:
    image = b"A" * (20 << 20)

    async def script(peer: Peer) -> None:
        _, body = await peer.message()
        await peer.send(answer(b"%d %d" % (len(body), body.count(b"A"))))

    async def story() -> bytes:
        async with engine(script) as raw, gateway(Yard(raw.url)) as yard:
            assert yard.server is not None
            async with connected(yard.server.port) as client:
                await client.send(post(image))
                return (await client.message())[1]

    assert run_on(loop, story()) == b"%d %d" % (20 << 20, 20 << 20)


def test_scn_b5_a_stream_arrives_event_by_event_with_the_headers_against_buffering(
    loop: str,
) -> None:
    async def story() -> None:
        asked = asyncio.Event()

        async def script(peer: Peer) -> None:
            await peer.message()
            await peer.send(SSE_HEAD)
            for number in range(3):
                await asked.wait()
                asked.clear()
                await peer.send(chunk(b"data: %d\n\n" % number))
            await peer.send(b"0\r\n\r\n")
            await peer.gone()

        async with engine(script) as raw, gateway(Yard(raw.url)) as yard:
            assert yard.server is not None
            async with connected(yard.server.port) as client:
                await client.send(ASK)
                asked.set()
                head = await client.until(b"\r\n\r\n")
                assert b"x-accel-buffering: no\r\n" in head
                assert b"cache-control: no-cache\r\n" in head
                assert b"access-control-allow-origin: *\r\n" in head
                assert b"content-length" not in head
                # The next event is only sent once this one was seen: nothing is held back.
                for number in range(3):
                    event = b"data: %d\n\n" % number
                    assert await client.exactly(len(chunk(event))) == chunk(event)
                    asked.set()
                assert await client.until(b"0\r\n\r\n") == b"0\r\n\r\n"
            assert yard.relayed[0].complete

    run_on(loop, story())


def test_the_engines_bytes_reach_the_client_verbatim(loop: str) -> None:
    body = b"".join(chunk(b"data: %d\n\n" % number) for number in range(100)) + b"0\r\n\r\n"

    async def script(peer: Peer) -> None:
        while True:
            await peer.message()
            # Cut anywhere: sizes and events are split over packets.
            whole = SSE_HEAD + body
            for start in range(0, len(whole), 37):
                await peer.send(whole[start : start + 37])

    async def story() -> None:
        async with engine(script) as raw, gateway(Yard(raw.url)) as yard:
            assert yard.server is not None
            async with connected(yard.server.port) as client:
                for _ in range(3):
                    await client.send(ASK)
                    await client.until(b"\r\n\r\n")
                    assert await client.exactly(len(body)) == body
            assert raw.accepted == 1

    run_on(loop, story())


def test_headers_of_this_hop_stay_here_and_ours_are_added(loop: str) -> None:
    seen: list[bytes] = []

    async def script(peer: Peer) -> None:
        head, _ = await peer.message()
        seen.append(head.lower())
        await peer.send(
            answer(
                b"{}",
                b"connection: keep-alive, x-mine\r\nx-mine: 1\r\nkeep-alive: timeout=5\r\n"
                b"access-control-allow-origin: http://engine\r\nx-other: 2\r\n"
                b"content-type: application/json\r\nset-cookie: a=b\r\n",
            )
        )

    async def story() -> bytes:
        async with engine(script) as raw, gateway(Yard(raw.url)) as yard:
            assert yard.server is not None
            async with connected(yard.server.port) as client:
                await client.send(
                    post(
                        b"{}",
                        extra=b"authorization: Bearer mine\r\nx-yard-actor: admin\r\n"
                        b"te: trailers\r\nconnection: keep-alive, x-hop\r\nx-hop: 1\r\n"
                        b"x-kept: 1\r\naccept-encoding: gzip\r\n",
                    )
                )
                return (await client.message())[0].lower()

    head = run_on(loop, story())
    for name in (b"x-mine", b"keep-alive:", b"http://engine", b"set-cookie", b"\r\nconnection"):
        assert name not in head
    assert b"x-other: 2" in head
    assert head.count(b"access-control-allow-origin") == 1
    for name in (b"bearer mine", b"x-yard", b"\r\nte:", b"x-hop", b"accept-encoding"):
        assert name not in seen[0]
    assert b"authorization: bearer k\r\n" in seen[0]
    assert b"x-kept: 1\r\n" in seen[0]


def test_a_close_delimited_stream_of_http_1_0_is_reframed(loop: str) -> None:
    async def script(peer: Peer) -> None:
        await peer.message()
        await peer.send(b"HTTP/1.0 200 OK\r\ncontent-type: text/event-stream\r\n\r\n")
        await peer.send(b"data: 1\n\n")
        await peer.send(b"data: [DONE]\n\n")

    async def story() -> None:
        async with engine(script) as raw, gateway(Yard(raw.url)) as yard:
            assert yard.server is not None
            async with connected(yard.server.port) as client:
                for _ in range(2):
                    await client.send(ASK)
                    head, body = await client.message()
                    assert b"transfer-encoding: chunked" in head
                    assert body == b"data: 1\n\ndata: [DONE]\n\n"
            assert raw.accepted == 2

    run_on(loop, story())


def test_a_client_of_http_1_0_gets_a_stream_without_chunks(loop: str) -> None:
    async def script(peer: Peer) -> None:
        await peer.message()
        await peer.send(SSE_HEAD + chunk(b"data: 1\n\n") + chunk(b"data: 2\n\n") + b"0\r\n\r\n")
        await peer.gone()

    async def story() -> bytes:
        async with engine(script) as raw, gateway(Yard(raw.url)) as yard:
            assert yard.server is not None
            async with connected(yard.server.port) as client:
                await client.send(b"GET /x HTTP/1.0\r\n\r\n")
                return await client.rest()

    whole = run_on(loop, story())
    head, _, body = whole.partition(b"\r\n\r\n")
    assert b"transfer-encoding" not in head.lower()
    assert body == b"data: 1\n\ndata: 2\n\n"


@pytest.mark.parametrize("moment", ["during prefill", "during decode"])
def test_scn_b8_a_client_that_leaves_closes_the_engines_request(loop: str, moment: str) -> None:
    rounds = 200

    async def story() -> None:
        closed = 0
        reached = asyncio.Semaphore(0)

        async def script(peer: Peer) -> None:
            nonlocal closed
            await peer.message()
            if moment == "during decode":
                await peer.send(SSE_HEAD + chunk(b"data: 1\n\n"))
            reached.release()
            # A second is the bound; the engine goes on sending nothing and sees the end at once.
            await asyncio.wait_for(peer.gone(), 1.0)
            closed += 1

        async with engine(script) as raw, gateway(Yard(raw.url)) as yard:
            assert yard.server is not None
            for number in range(rounds):
                async with connected(yard.server.port) as client:
                    await client.send(ASK)
                    await asyncio.wait_for(reached.acquire(), 5)
                    if moment == "during decode":
                        await client.until(b"data: 1\n\n\r\n")
                    if number % 2:
                        client.break_off()
                await until(lambda n=number: closed == n + 1, "the engine's request closed", 1.5)
            await until(lambda: not yard.server.connections, "no client connection")
            assert yard.client.open_connections == 0
            assert yard.server.active == 0
            assert yard.server.budget.used_bytes == 0
            assert yard.ended == rounds
            assert len(asyncio.all_tasks()) <= 3

    run_on(loop, story(), 60)


def test_scn_b8_a_client_that_leaves_while_its_request_waits_is_noticed_at_once(
    loop: str,
) -> None:
    async def story() -> None:
        yard = Yard()
        waiting = asyncio.Event()
        left = asyncio.Event()

        async def handle(request, responder) -> None:
            waiting.set()
            try:
                await asyncio.Event().wait()
            finally:
                assert request.client_gone.done()
                left.set()

        yard.handle = handle  # pyright: ignore[reportAttributeAccessIssue]
        async with gateway(yard):
            assert yard.server is not None
            async with connected(yard.server.port) as client:
                await client.send(ASK)
                await waiting.wait()
            await asyncio.wait_for(left.wait(), 1)

    run_on(loop, story())


def test_a_slow_client_pauses_the_engine_instead_of_growing_memory(loop: str) -> None:
    block = b"x" * 65536

    async def story() -> None:
        sent = 0
        finished = asyncio.Event()

        async def script(peer: Peer) -> None:
            nonlocal sent
            await peer.message()
            await peer.send(b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n")
            for _ in range(1024):
                await peer.send(chunk(block))
                sent += 1
            await peer.send(b"0\r\n\r\n")
            finished.set()

        async with engine(script) as raw, gateway(Yard(raw.url)) as yard:
            assert yard.server is not None
            async with connected(yard.server.port) as client:
                await client.send(ASK)
                await client.until(b"\r\n\r\n")
                # 64 MiB do not fit into the sockets' buffers: the engine comes to a standstill.
                before = -1
                while before != sent:
                    before = sent
                    await asyncio.sleep(0.2)
                assert not finished.is_set()
                (connection,) = yard.server.connections
                transport = connection._transport
                assert transport is not None
                assert transport.get_write_buffer_size() < 1 << 20
                total = 0
                while total < 1024 * len(chunk(block)) + 5:
                    block_read = await client.reader.read(1 << 20)
                    assert block_read, "the answer was cut"
                    total += len(block_read)
                assert finished.is_set()
            assert yard.relayed[0].complete

    run_on(loop, story(), 60)


def test_a_slow_engine_pauses_a_large_upload(loop: str) -> None:
    async def story() -> bytes:
        async def script(peer: Peer) -> None:
            head = await peer.until(b"\r\n\r\n")
            assert b"content-length: 8388608" in head
            await asyncio.sleep(0.1)
            body = await peer.exactly(8 << 20)
            await peer.send(answer(b"%d" % len(body)))

        async with engine(script) as raw, gateway(Yard(raw.url)) as yard:
            assert yard.server is not None
            async with connected(yard.server.port) as client:
                await client.send(post(b"y" * (8 << 20)))
                return (await client.message())[1]

    assert run_on(loop, story()) == b"8388608"


def test_an_engine_that_answers_before_the_body_ends_is_heard(loop: str) -> None:
    async def script(peer: Peer) -> None:
        await peer.until(b"\r\n\r\n")
        await peer.send(answer(b'{"error":{"message":"too long"}}', status=b"400 Bad Request"))
        await peer.gone()

    async def story() -> tuple[bytes, bytes]:
        async with engine(script) as raw, gateway(Yard(raw.url)) as yard:
            assert yard.server is not None
            async with connected(yard.server.port) as client:
                await client.send(post(b"y" * (4 << 20)))
                return await client.message()

    head, body = run_on(loop, story())
    assert head.startswith(b"HTTP/1.1 400")
    assert b"too long" in body


def test_scn_b2_an_aliass_name_is_in_the_answer_json_and_stream(loop: str) -> None:
    async def script(peer: Peer) -> None:
        await peer.message()
        await peer.send(answer(b'{"id":"1","model":"real","choices":[{"model":"inner"}]}'))
        await peer.message()
        await peer.send(SSE_HEAD)
        await peer.send(chunk(b'data: {"model":"real","x":1}\n\ndata: {"mod'))
        await peer.send(chunk(b'el" : "real"}\n\n') + chunk(b"data: [DONE]\n\n") + b"0\r\n\r\n")
        await peer.gone()

    async def story() -> tuple[bytes, bytes]:
        async with engine(script) as raw, gateway(Yard(raw.url, model="älias")) as yard:
            assert yard.server is not None
            async with connected(yard.server.port) as client:
                await client.send(ASK)
                _, whole = await client.message()
                await client.send(ASK)
                _, stream = await client.message()
                return whole, stream

    whole, stream = run_on(loop, story())
    assert whole == '{"id":"1","model":"älias","choices":[{"model":"inner"}]}'.encode()
    assert stream.decode() == (
        'data: {"model":"älias","x":1}\n\ndata: {"model" : "älias"}\n\ndata: [DONE]\n\n'
    )


def test_interim_answers_are_let_pass(loop: str) -> None:
    async def script(peer: Peer) -> None:
        await peer.message()
        await peer.send(b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 103 Early")
        await peer.send(b" Hints\r\nlink: x\r\n\r\n" + answer(b"{}"))
        await peer.gone()

    async def story() -> tuple[bytes, bytes]:
        async with engine(script) as raw, gateway(Yard(raw.url)) as yard:
            assert yard.server is not None
            async with connected(yard.server.port) as client:
                await client.send(ASK)
                return await client.message()

    head, body = run_on(loop, story())
    assert head.startswith(b"HTTP/1.1 200")
    assert body == b"{}"


@pytest.mark.parametrize("moment", ["before the head", "before the first byte", "in the stream"])
def test_an_exchange_is_ended_from_outside_at_any_moment(loop: str, moment: str) -> None:
    async def story() -> None:
        reached = asyncio.Event()

        async def silent(peer: Peer) -> None:
            await peer.message()
            if moment != "before the head":
                await peer.send(SSE_HEAD)
            if moment == "in the stream":
                await peer.send(chunk(b"data: 1\n\n"))
            reached.set()
            await peer.gone()

        async with (
            engine(silent) as first,
            engine(echo) as second,
            gateway(Yard(first.url, second.url)) as yard,
        ):
            assert yard.server is not None
            async with connected(yard.server.port) as client:
                await client.send(post(b"hello"))
                await reached.wait()
                if moment == "in the stream":
                    await client.until(b"data: 1\n\n\r\n")
                if moment == "before the first byte":
                    await until(lambda: yard.exchanges[0].head_at is not None, "the head")
                yard.exchanges[0].abort("the replica was stopped")
                if moment == "in the stream":
                    body = await client.chunks()
                    assert b"the replica was stopped" in body
                    assert b"[DONE]" not in body
                else:
                    assert (await client.message())[1] == b"hello"
                    (problem,) = yard.problems
                    assert isinstance(problem, EngineGone)
                    assert problem.aborted
                    assert problem.before_first_byte

    run_on(loop, story())


def test_an_exchange_ended_in_the_moment_its_connection_stands_writes_nothing(loop: str) -> None:
    async def story() -> None:
        async def listening(peer: Peer) -> None:
            await peer.gone()

        async with engine(listening) as there:
            client = EngineClient()
            exchange = Exchange()
            # The abort comes between the connection and the step of the request that would use it.
            bind = exchange.bind

            def bound(abort: Callable[[str], None] | None) -> None:
                if abort is None and exchange.aborted is None:
                    exchange.abort("the replica was stopped")
                bind(abort)

            with (
                patch.object(Exchange, "bind", lambda _, abort: bound(abort)),
                pytest.raises(EngineGone) as caught,
            ):
                await client.request(there.url, "GET", "/", [], exchange=exchange)
            assert caught.value.aborted
            assert exchange.written_at is None
            await client.close()

    run_on(loop, story())
