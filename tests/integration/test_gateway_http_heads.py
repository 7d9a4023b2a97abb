"""Heads that come again on one connection, in any order, are each read as themselves: at the clients' and at the engines' side."""

import random

import pytest

from gateway.http.messages import Request, Responder
from tests.support.http_wire import (
    LOOPS,
    Peer,
    Yard,
    connected,
    engine,
    gateway,
    listening,
    post,
    run_on,
)

pytestmark = pytest.mark.parametrize("loop", LOOPS)

ROUNDS = 400


def order(seed: int) -> list[tuple[int, int]]:
    """Which head comes next, and how long its body is; runs of the same ones among them."""
    chance = random.Random(seed)
    found: list[tuple[int, int]] = []
    while len(found) < ROUNDS:
        one = (chance.randrange(4), chance.choice((1, 7, 7, 12)))
        found += [one] * chance.choice((1, 1, 2, 3))
    return found


def test_a_clients_head_that_comes_again_after_another_is_read_as_itself(loop: str) -> None:
    async def told(request: Request, responder: Responder) -> None:
        body = await request.body.read_all()
        key = request.headers.get(b"authorization") or b""
        await responder.send(200, [], b"%b %b" % (key, body))

    async def story() -> None:
        async with listening(told) as server, connected(server.port) as peer:
            for head, size in order(1):
                body = b"x" * size
                # Two of the four differ in nothing but a digit.
                await peer.send(post(body, extra=b"authorization: key-%d\r\n" % head))
                _, answer = await peer.message()
                assert answer == b"key-%d %b" % (head, body)

    run_on(loop, story())


def test_an_engines_head_that_comes_again_after_another_is_read_as_itself(loop: str) -> None:
    async def script(peer: Peer) -> None:
        for head, size in order(2):
            await peer.message()
            status = (200, 200, 201, 429)[head]
            body = b'{"model":"%b"}' % (b"x" * size)
            await peer.send(
                b"HTTP/1.1 %d Said\r\nx-head: %d\r\ncontent-length: %d\r\n\r\n%b"
                % (status, head, len(body), body)
            )

    async def story() -> None:
        async with (
            engine(script) as raw,
            gateway(Yard(raw.url)) as yard,
            connected(yard.server.port if yard.server else 0) as peer,
        ):
            for head, size in order(2):
                await peer.send(post(b"{}"))
                told, body = await peer.message()
                assert b"HTTP/1.1 %d " % (200, 200, 201, 429)[head] in told
                assert b"x-head: %d\r\n" % head in told
                assert status_is_error(head) or body == b'{"model":"%b"}' % (b"x" * size)
            assert raw.accepted == 1

    run_on(loop, story())


def status_is_error(head: int) -> bool:
    """Whether that answer's body is put into our envelope."""
    return head == 3
