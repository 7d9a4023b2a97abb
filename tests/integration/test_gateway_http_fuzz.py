"""Random splits of valid and mutated messages against both sides: no hang, no traceback, no mix-up.

A mutated message may be answered or refused; what may not happen is a handler that failed, a
connection that neither answers nor closes, or bytes of one message in another.
"""

import asyncio
import logging

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from gateway.http.client import EngineClient
from gateway.http.errors import BadEngineAnswer, ConnectFailed, EngineGone
from gateway.http.limits import ServerLimits
from gateway.http.messages import Request, Responder
from tests.support.http_wire import Peer, chunk, connected, engine, listening, run_on

cuts_of = st.lists(st.integers(0, 2000), max_size=8)
mutations_of = st.lists(
    st.tuples(
        st.integers(0, 2000),
        st.sampled_from(
            [b"", b"\r", b"\n", b"\r\n", b"\0", b" ", b":", b"0", b"f", b"\xff", b"chunked", b";"]
        ),
    ),
    min_size=0,
    max_size=3,
)
fuzz = settings(
    max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)


def pieces_of(data: bytes, cuts: list[int]) -> list[bytes]:
    """`data` cut at some places."""
    marks = sorted({0, len(data), *(cut % (len(data) + 1) for cut in cuts)})
    return [data[a:b] for a, b in zip(marks, marks[1:], strict=False)]  # noqa: RUF007


def mutated(data: bytes, mutations: list[tuple[int, bytes]]) -> bytes:
    """`data` with single bytes replaced."""
    for position, replacement in mutations:
        position %= len(data)
        data = data[:position] + replacement + data[position + 1 :]
    return data


def request_of(number: int, chunked: bool) -> bytes:
    """A request whose path and body carry the same number."""
    body = b"<%d>" % number
    if chunked:
        return (
            b"POST /%d HTTP/1.1\r\nhost: a\r\ntransfer-encoding: chunked\r\n\r\n" % number
            + chunk(body[:1])
            + chunk(body[1:])
            + b"0\r\n\r\n"
        )
    return b"POST /%d HTTP/1.1\r\nhost: a\r\ncontent-length: %d\r\n\r\n%b" % (
        number,
        len(body),
        body,
    )


@given(st.lists(st.booleans(), min_size=1, max_size=5), cuts_of)
@fuzz
def test_valid_requests_in_any_pieces_are_answered_each_with_its_own(
    framings: list[bool], cuts: list[int]
) -> None:
    async def handler(request: Request, responder: Responder) -> None:
        assert (await request.body.read_all()).decode() == f"<{request.path[1:]}>"
        await responder.send(200, [], request.path.encode())

    async def story() -> None:
        async with listening(handler) as server, connected(server.port) as client:
            whole = b"".join(request_of(n, chunked) for n, chunked in enumerate(framings))
            for piece in pieces_of(whole, cuts):
                await client.send(piece)
                await asyncio.sleep(0)
            for number in range(len(framings)):
                head, body = await client.message()
                assert head.startswith(b"HTTP/1.1 200")
                assert body == b"/%d" % number

    run_on("asyncio", story())


@given(st.lists(st.booleans(), min_size=1, max_size=4), mutations_of, cuts_of)
@fuzz
def test_mutated_requests_are_answered_or_refused_and_never_crash_a_handler(
    caplog: pytest.LogCaptureFixture,
    framings: list[bool],
    mutations: list[tuple[int, bytes]],
    cuts: list[int],
) -> None:
    async def handler(request: Request, responder: Responder) -> None:
        body = await request.body.read_all()
        await responder.send(200, [], body)

    async def story() -> bytes:
        limits = ServerLimits(linger_s=0.05, head_timeout_s=0.2, body_idle_timeout_s=0.2)
        async with listening(handler, limits) as server, connected(server.port) as client:
            whole = b"".join(request_of(n, chunked) for n, chunked in enumerate(framings))
            whole = mutated(whole, mutations)
            if not whole:
                return b""
            # The end of our side is the end: whatever is unfinished must not be waited for.
            for piece in pieces_of(whole, cuts):
                try:
                    await client.send(piece)
                except ConnectionError:
                    break
                await asyncio.sleep(0)
            await client.send_end()
            return await client.rest()

    with caplog.at_level(logging.ERROR):
        caplog.clear()
        said = run_on("asyncio", story())
    assert not caplog.records, caplog.text
    assert said == b"" or said.startswith(b"HTTP/1.1 ")


ANSWERS = [
    b"HTTP/1.1 200 OK\r\ncontent-length: 5\r\n\r\nhello",
    b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n3\r\nhel\r\n2\r\nlo\r\n0\r\n\r\n",
    b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 200 OK\r\nconnection: close\r\n\r\nhello",
    b"HTTP/1.0 200 OK\r\n\r\nhello",
]


@given(st.sampled_from(ANSWERS), cuts_of)
@fuzz
def test_a_valid_answer_in_any_pieces_is_the_same(data: bytes, cuts: list[int]) -> None:
    async def script(peer: Peer) -> None:
        await peer.until(b"\r\n\r\n")
        for piece in pieces_of(data, cuts):
            await peer.send(piece)
            await asyncio.sleep(0)

    async def story() -> bytes:
        client = EngineClient()
        try:
            async with engine(script) as raw:
                response = await client.request(raw.url, "GET", "/", [])
                return await response.read(1000)
        finally:
            await client.close()

    assert run_on("asyncio", story()) == b"hello"


@given(st.sampled_from(ANSWERS), mutations_of, cuts_of)
@fuzz
def test_a_mutated_answer_is_an_answer_or_a_typed_error(
    data: bytes, mutations: list[tuple[int, bytes]], cuts: list[int]
) -> None:
    async def script(peer: Peer) -> None:
        await peer.until(b"\r\n\r\n")
        for piece in pieces_of(mutated(data, mutations), cuts):
            await peer.send(piece)
            await asyncio.sleep(0)

    async def story() -> None:
        client = EngineClient()
        try:
            async with engine(script) as raw:
                response = await client.request(raw.url, "GET", "/", [])
                assert len(await response.read(100_000)) <= len(data) + 30
        except (EngineGone, BadEngineAnswer, ConnectFailed):
            pass
        finally:
            await client.close()
        assert client.open_connections == 0

    run_on("asyncio", story())
