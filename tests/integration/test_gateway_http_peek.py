"""Looking at an engine's answer before anybody consumes it, and short answers that are rewritten whole."""

import asyncio

import pytest

from gateway.http.client import EngineClient
from gateway.http.engine_response import HIGH_WATER
from gateway.http.errors import BadEngineAnswer, EngineGone
from tests.support.aio import run
from tests.support.http_wire import Peer, Yard, chunk, connected, engine, gateway, post

HEAD = b"HTTP/1.1 404 X\r\ncontent-type: application/json\r\n"
TOLD = b'{"error":{"message":"The model `a` does not exist."}}'
ASK = post(b'{"model":"new"}')


async def peeked(*pieces: bytes, limit: int = 65536, closes: bool = False) -> tuple[bytes, bytes]:
    """What was seen of an answer sent in these pieces, and what is read of it afterwards."""
    go_on = [asyncio.Event() for _ in pieces]

    async def script(peer: Peer) -> None:
        await peer.message()
        for piece, event in zip(pieces, go_on, strict=True):
            await event.wait()
            await peer.send(piece)
        if not closes:
            await peer.gone()

    async with engine(script) as raw:
        client = EngineClient()
        try:
            go_on[0].set()
            response = await client.request(raw.url, "POST", "/", [], b"{}")
            seeing = asyncio.ensure_future(response.peek(limit))
            for event in go_on[1:]:
                await asyncio.sleep(0)
                event.set()
            seen = await seeing
            return seen, await response.read(1 << 20)
        finally:
            await client.close()


@pytest.mark.parametrize("cut", [0, 1, 20, len(TOLD)])
def test_an_answer_of_known_length_is_seen_whole_and_still_read_whole(cut: int) -> None:
    head = HEAD + b"content-length: %d\r\n\r\n" % len(TOLD)
    seen, read = run(peeked(head + TOLD[:cut], TOLD[cut:]))
    assert seen == read == TOLD


def test_a_chunked_one_is_seen_with_its_framing_and_read_without() -> None:
    head = HEAD + b"transfer-encoding: chunked\r\n\r\n"
    body = chunk(TOLD[:9]) + chunk(TOLD[9:]) + b"0\r\n\r\n"
    seen, read = run(peeked(head, body[:7], body[7:40], body[40:]))
    assert seen == body
    assert read == TOLD


def test_one_that_ends_with_its_connection_is_seen_whole() -> None:
    seen, read = run(peeked(HEAD + b"\r\n", TOLD[:5], TOLD[5:], closes=True))
    assert seen == read == TOLD


def test_a_long_one_is_seen_as_far_as_asked_and_read_whole() -> None:
    body = b"x" * (3 * HIGH_WATER)
    head = HEAD + b"content-length: %d\r\n\r\n" % len(body)
    seen, read = run(peeked(head, body, limit=1000))
    assert 1000 <= len(seen) < len(body)
    assert read == body


def test_one_without_a_body_is_nothing() -> None:
    seen, read = run(peeked(HEAD + b"content-length: 0\r\n\r\n"))
    assert seen == read == b""


def test_one_that_breaks_off_says_so() -> None:
    with pytest.raises(EngineGone):
        run(peeked(HEAD + b"content-length: 99\r\n\r\n", TOLD[:5], closes=True))


def test_one_that_breaks_its_framing_is_met_by_who_reads_it() -> None:
    with pytest.raises(BadEngineAnswer):
        run(peeked(HEAD + b"transfer-encoding: chunked\r\n\r\n", b"zz\r\nbroken"))


def test_a_short_answer_in_two_pieces_is_renamed_and_keeps_a_length() -> None:
    body = b'{"id":"1","model":"real"}'

    async def script(peer: Peer) -> None:
        await peer.message()
        await peer.send(b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n" % len(body) + body[:15])
        await peer.send(body[15:])
        await peer.gone()

    async def story() -> tuple[bytes, bytes]:
        async with engine(script) as raw, gateway(Yard(raw.url, model="asked for")) as yard:
            assert yard.server is not None
            async with connected(yard.server.port) as client:
                await client.send(ASK)
                return await client.message()

    head, whole = run(story())
    assert whole == b'{"id":"1","model":"asked for"}'
    assert b"content-length: %d\r\n" % len(whole) in head
    assert b"transfer-encoding" not in head


def test_a_short_answer_that_breaks_off_before_it_was_renamed_goes_to_another_engine() -> None:
    async def dying(peer: Peer) -> None:
        await peer.message()
        await peer.send(b'HTTP/1.1 200 OK\r\ncontent-length: 100\r\n\r\n{"model":"re')

    async def sound(peer: Peer) -> None:
        await peer.message()
        await peer.send(b'HTTP/1.1 200 OK\r\ncontent-length: 16\r\n\r\n{"model":"real"}')
        await peer.gone()

    async def story() -> bytes:
        async with (
            engine(dying) as first,
            engine(sound) as second,
            gateway(Yard(first.url, second.url, model="new")) as yard,
        ):
            assert yard.server is not None
            async with connected(yard.server.port) as client:
                await client.send(ASK)
                _, whole = await client.message()
            (problem,) = yard.problems
            assert isinstance(problem, EngineGone)
            assert problem.before_first_byte
            return whole

    assert run(story()) == b'{"model":"new"}'


def test_a_long_answer_is_renamed_as_it_comes() -> None:
    text = b"x" * 200_000
    body = b'{"model":"real","text":"%b"}' % text

    async def script(peer: Peer) -> None:
        await peer.message()
        await peer.send(b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n" % len(body) + body)
        await peer.gone()

    async def story() -> tuple[bytes, bytes]:
        async with engine(script) as raw, gateway(Yard(raw.url, model="new")) as yard:
            assert yard.server is not None
            async with connected(yard.server.port) as client:
                await client.send(ASK)
                return await client.message()

    head, whole = run(story())
    assert b"transfer-encoding: chunked" in head
    assert whole == b'{"model":"new","text":"%b"}' % text
