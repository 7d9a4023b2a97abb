"""Engines that die, err, hang or keep their connections, behind our server and client: what a raw client gets."""

import asyncio
import json

import pytest

from gateway.http.errors import ConnectFailed, EngineGone
from gateway.http.limits import ClientLimits
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


@pytest.mark.parametrize("ending", ["reset", "close", "inside a chunk", "inside an event"])
def test_scn_b9_an_engine_that_dies_after_three_chunks_leaves_an_error_frame(
    loop: str, ending: str
) -> None:
    async def script(peer: Peer) -> None:
        await peer.message()
        await peer.send(SSE_HEAD + b"".join(chunk(b"data: %d\n\n" % n) for n in range(3)))
        if ending == "inside a chunk":
            await peer.send(b"ff\r\ndata: half")
        if ending == "inside an event":
            await peer.send(chunk(b'data: {"half'))
        if ending == "reset":
            peer.break_off()

    async def story() -> bytes:
        async with engine(script) as raw, gateway(Yard(raw.url)) as yard:
            assert yard.server is not None
            async with connected(yard.server.port) as client:
                await client.send(ASK)
                await client.until(b"\r\n\r\n")
                body = await client.chunks()
                # The framing ended properly: the same connection serves the next request.
                await client.send(ASK)
                await client.until(b"\r\n\r\n")
            assert not yard.relayed[0].complete
            assert yard.relayed[0].reason
            return body

    body = run_on(loop, story())
    events = body.split(b"\n\n")
    assert events[:3] == [b"data: 0", b"data: 1", b"data: 2"]
    assert len(events) == 5
    assert events[4] == b""
    error = json.loads(events[3].removeprefix(b"data: "))["error"]
    assert error["code"] == "engine_error"
    assert b"[DONE]" not in body


def test_what_is_known_of_a_broken_stream_is_told_instead_of_what_its_socket_did(loop: str) -> None:
    told = asyncio.Event()

    async def script(peer: Peer) -> None:
        await peer.message()
        await peer.send(SSE_HEAD)
        await peer.send(chunk(b"data: 0\n\n"))
        await told.wait()

    async def story() -> bytes:
        async with engine(script) as raw, gateway(Yard(raw.url)) as yard:
            assert yard.server is not None
            async with connected(yard.server.port) as client:
                await client.send(ASK)
                await client.until(b"\r\n\r\n")
                yard.exchanges[0].explain = lambda: "a game has its card"
                told.set()
                body = await client.chunks()
            assert yard.relayed[0].reason == "a game has its card"
            return body

    assert b'"message":"a game has its card"' in run_on(loop, story()).replace(b'": "', b'":"')


def test_scn_b9_an_engine_that_dies_before_the_first_byte_is_replaced(loop: str) -> None:
    async def dying(peer: Peer) -> None:
        await peer.message()
        await peer.send(SSE_HEAD)  # a head alone is no answer yet

    async def story() -> None:
        async with (
            engine(dying) as first,
            engine(echo) as second,
            gateway(Yard(first.url, second.url)) as yard,
        ):
            assert yard.server is not None
            async with connected(yard.server.port) as client:
                await client.send(post(b"hello"))
                head, body = await client.message()
            assert head.startswith(b"HTTP/1.1 200")
            assert body == b"hello"
            (problem,) = yard.problems
            assert isinstance(problem, EngineGone)
            assert problem.before_first_byte
            assert not problem.aborted

    run_on(loop, story())


def test_an_answer_of_known_length_that_breaks_off_breaks_the_clients_connection(
    loop: str,
) -> None:
    async def script(peer: Peer) -> None:
        await peer.message()
        await peer.send(b"HTTP/1.1 200 OK\r\ncontent-length: 100\r\n\r\nhalf")

    async def story() -> bytes:
        async with engine(script) as raw, gateway(Yard(raw.url)) as yard:
            assert yard.server is not None
            async with connected(yard.server.port) as client:
                await client.send(ASK)
                return await client.rest()

    whole = run_on(loop, story())
    assert b"content-length: 100" in whole
    assert whole.endswith(b"half")


@pytest.mark.parametrize(
    ("content_type", "body", "message"),
    [
        (b"text/html", b"<html>Bad Gateway</html>", "status 502"),
        (b"application/json", b'{"detail":"no such thing"}', "no such thing"),
        (b"application/json", b'{"object":"error","message":"flat","code":40}', "flat"),
        (b"text/plain", b"plain words", "plain words"),
    ],
)
def test_scn_b11_an_engines_own_errors_are_put_into_the_envelope(
    loop: str, content_type: bytes, body: bytes, message: str
) -> None:
    async def script(peer: Peer) -> None:
        while True:
            await peer.message()
            await peer.send(
                answer(body, b"content-type: %b\r\n" % content_type, b"502 Bad Gateway")
            )

    async def story() -> tuple[bytes, bytes]:
        async with engine(script) as raw, gateway(Yard(raw.url)) as yard:
            assert yard.server is not None
            async with connected(yard.server.port) as client:
                await client.send(ASK)
                await client.message()
                await client.send(ASK)
                return await client.message()

    head, text = run_on(loop, story())
    assert head.startswith(b"HTTP/1.1 502")
    assert b"content-type: application/json" in head
    error = json.loads(text)["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert message in error["message"]


def test_a_kept_connection_the_engine_closed_is_replaced_unnoticed(loop: str) -> None:
    async def story() -> None:
        closing = asyncio.Event()

        async def script(peer: Peer) -> None:
            _, body = await peer.message()
            await peer.send(answer(body))
            # The engine takes the next request and drops the connection without a word.
            await peer.until(b"\r\n\r\n")
            closing.set()

        async with engine(script) as raw, gateway(Yard(raw.url)) as yard:
            assert yard.server is not None
            async with connected(yard.server.port) as client:
                for number in range(3):
                    await client.send(post(b"%d" % number))
                    head, body = await client.message()
                    assert head.startswith(b"HTTP/1.1 200")
                    assert body == b"%d" % number
            assert raw.accepted == 3
            assert not yard.problems
            assert closing.is_set()

    run_on(loop, story())


def test_a_fresh_connection_that_closes_without_an_answer_is_not_retried(loop: str) -> None:
    async def script(peer: Peer) -> None:
        await peer.message()

    async def story() -> None:
        async with engine(script) as raw, gateway(Yard(raw.url)) as yard:
            assert yard.server is not None
            async with connected(yard.server.port) as client:
                await client.send(ASK)
                head, _ = await client.message()
            assert head.startswith(b"HTTP/1.1 502")
            assert raw.accepted == 1

    run_on(loop, story())


@pytest.mark.parametrize("began", [b"HTTP/1.1 2", b"HTTP/1.1 102 Processing\r\n\r\n"])
def test_an_answer_that_began_is_never_asked_for_twice(loop: str, began: bytes) -> None:
    async def script(peer: Peer) -> None:
        _, body = await peer.message()
        await peer.send(answer(body))
        await peer.message()
        await peer.send(began)

    async def story() -> None:
        async with engine(script) as raw, gateway(Yard(raw.url)) as yard:
            assert yard.server is not None
            async with connected(yard.server.port) as client:
                await client.send(ASK)
                await client.message()
                await client.send(ASK)
                assert (await client.message())[0].startswith(b"HTTP/1.1 502")
            assert raw.accepted == 1

    run_on(loop, story())


@pytest.mark.parametrize(
    "junk",
    [
        b"HTTP/1.1 200 OK\r\ncontent-length: 1\r\ntransfer-encoding: chunked\r\n\r\n0\r\n\r\n",
        b"HTTP/1.1 200 OK\r\ncontent-length: 1\r\ncontent-length: 1\r\n\r\nx",
        b"SSH-2.0-OpenSSH_9.2\r\n\r\n",
        b"HTTP/1.1 abc\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nx: \0\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nx: " + b"y" * 70000 + b"\r\n\r\n",
        b"HTTP/1.1 101 Switching\r\n\r\n",
    ],
)
def test_an_engine_that_breaks_http_is_an_engine_error(loop: str, junk: bytes) -> None:
    async def script(peer: Peer) -> None:
        await peer.message()
        await peer.send(junk)
        await peer.gone()

    async def story() -> bytes:
        async with engine(script) as raw, gateway(Yard(raw.url)) as yard:
            assert yard.server is not None
            async with connected(yard.server.port) as client:
                await client.send(ASK)
                head, _ = await client.message()
            assert len(yard.problems) == 1
            return head

    assert run_on(loop, story()).startswith(b"HTTP/1.1 502")


def test_bytes_behind_an_answer_never_become_the_next_one(loop: str) -> None:
    async def script(peer: Peer) -> None:
        _, body = await peer.message()
        await peer.send(answer(body) + answer(b"stolen"))
        await peer.gone()

    async def story() -> None:
        async with engine(script) as raw, gateway(Yard(raw.url)) as yard:
            assert yard.server is not None
            async with connected(yard.server.port) as client:
                for number in range(3):
                    await client.send(post(b"%d" % number))
                    assert (await client.message())[1] == b"%d" % number
            assert raw.accepted == 3

    run_on(loop, story())


def test_no_engine_at_the_endpoint_is_a_failed_connection(loop: str) -> None:
    async def story() -> None:
        async with engine(echo) as raw:
            url = raw.url
        async with gateway(Yard(url)) as yard:
            assert yard.server is not None
            async with connected(yard.server.port) as client:
                await client.send(ASK)
                head, body = await client.message()
            assert head.startswith(b"HTTP/1.1 502")
            assert json.loads(body)["error"]["code"] == "engine_error"
            (problem,) = yard.problems
            assert isinstance(problem, ConnectFailed)

    run_on(loop, story())


def test_scn_b12_a_silent_engine_is_waited_for_unless_a_timeout_is_set(loop: str) -> None:
    async def story() -> None:
        async def script(peer: Peer) -> None:
            await peer.message()
            await asyncio.sleep(0.5)
            await peer.send(answer(b"late"))
            await peer.gone()

        async with engine(script) as raw:
            async with gateway(Yard(raw.url)) as yard:
                assert yard.server is not None
                async with connected(yard.server.port) as client:
                    await client.send(ASK)
                    assert (await client.message())[1] == b"late"
            limits = ClientLimits(first_byte_s=0.1)
            async with gateway(Yard(raw.url), client_limits=limits) as yard:
                assert yard.server is not None
                async with connected(yard.server.port) as client:
                    await client.send(ASK)
                    assert (await client.message())[0].startswith(b"HTTP/1.1 502")
                assert "0.1 s" in str(yard.problems[0])

    run_on(loop, story())


def test_connections_to_an_engine_are_reused_and_forgotten(loop: str) -> None:
    async def story() -> None:
        async with engine(echo) as raw, gateway(Yard(raw.url)) as yard:
            assert yard.server is not None
            async with connected(yard.server.port) as client:
                for number in range(20):
                    await client.send(post(b"%d" % number))
                    assert (await client.message())[1] == b"%d" % number
            assert raw.accepted == 1
            assert [exchange.reused for exchange in yard.exchanges] == [False] + [True] * 19
            assert all(exchange.written_at is not None for exchange in yard.exchanges)
            yard.client.forget(raw.url)
            await until(lambda: not raw.peers, "the idle connection closed")

    run_on(loop, story())
