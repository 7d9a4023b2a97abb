"""What a client may make a gateway hold or wait for: slow ones, silent ones, floods, and very many of them."""

import asyncio
import resource
import socket
from typing import cast

import pytest

from gateway.http.limits import ServerLimits
from gateway.http.messages import Request, Responder
from gateway.http.server import Server, client_connections
from tests.support.aio import until
from tests.support.http_wire import LOOPS, Peer, connected, listening, post, run_on

pytestmark = pytest.mark.parametrize("loop", LOOPS)

GET = b"GET / HTTP/1.1\r\nhost: a\r\n\r\n"
HUGE = b"x" * (16 << 20)
"""More than the buffers between two sockets take."""


async def echo(request: Request, responder: Responder) -> None:
    await responder.send(200, [], await request.body.read_all())


async def deaf(_: Request, responder: Responder) -> None:
    """Answers without looking at the body."""
    await responder.send(401, [], b"no")


async def huge(request: Request, responder: Responder) -> None:
    """Answers at once, and does not wait until the client has taken it; `/small` with little."""
    responder.send_now(200, [], b"small" if request.path == "/small" else HUGE)


def take_nothing(client: Peer) -> None:
    """From now on `client` reads nothing of what is sent to it."""
    # uvloop's transports are no asyncio.Transport to isinstance(), only in behaviour.
    cast(asyncio.Transport, client.writer.transport).pause_reading()


async def nobody_left(server: Server) -> None:
    await until(lambda: not server.connections, "every connection to end")


def test_a_body_nobody_reads_may_not_stop_in_the_middle(loop: str) -> None:
    async def story() -> None:
        limits = ServerLimits(body_idle_timeout_s=0.3, idle_timeout_s=60)
        async with listening(deaf, limits) as server, connected(server.port) as client:
            await client.send(post(b"x" * 1000)[:-500])
            head, _ = await client.message()
            assert head.startswith(b"HTTP/1.1 401")
            await client.send(b"x")  # in the middle of what is thrown away
            assert await client.rest() == b""
            await nobody_left(server)

    run_on(loop, story())


async def _drip(client: Peer, every_s: float) -> None:
    """A byte now and then, until the other side has enough."""
    try:
        while True:
            await client.send(b"x")
            await asyncio.sleep(every_s)
    except ConnectionError:
        pass


@pytest.mark.parametrize("handler", [echo, deaf])
def test_a_body_that_drips_is_given_up(loop: str, handler: object) -> None:
    async def story() -> None:
        # A byte comes every 50 ms, so no silence is ever long enough.
        limits = ServerLimits(body_idle_timeout_s=0.4, linger_s=0.1, discard_bytes=1 << 20)
        async with listening(handler, limits) as server, connected(server.port) as client:  # type: ignore[arg-type]
            await client.send(post(b"x" * 100_000)[:-100_000])
            dripping = asyncio.create_task(_drip(client, 0.05))
            head, _ = await client.message()
            status = b"408" if handler is echo else b"401"
            assert head.startswith(b"HTTP/1.1 " + status)
            await client.gone()
            await nobody_left(server)
            dripping.cancel()

    run_on(loop, story())


def test_a_body_as_fast_as_it_must_be_is_taken(loop: str) -> None:
    async def story() -> None:
        limits = ServerLimits(body_idle_timeout_s=0.5, body_bytes_per_s=1000)
        async with listening(echo, limits) as server, connected(server.port) as client:
            await client.send(post(b"x" * 4000)[:-4000])
            for _ in range(10):  # twice as long as a silence may be, at 4000 bytes a second
                await client.send(b"x" * 400)
                await asyncio.sleep(0.1)
            head, body = await client.message()
            assert head.startswith(b"HTTP/1.1 200")
            assert len(body) == 4000

    run_on(loop, story())


def test_a_request_more_does_not_lift_the_bound_of_a_client_that_takes_nothing(loop: str) -> None:
    async def story() -> None:
        limits = ServerLimits(write_stall_timeout_s=0.4)
        async with listening(huge, limits) as server, connected(server.port) as client:
            take_nothing(client)
            await client.send(GET * 3)
            await nobody_left(server)

    run_on(loop, story())


def test_a_client_that_takes_nothing_is_answered_no_further(loop: str) -> None:
    async def story() -> None:
        served = 0

        async def counted(_: Request, responder: Responder) -> None:
            nonlocal served
            served += 1
            responder.send_now(200, [], HUGE)

        async with listening(counted) as server, connected(server.port) as client:
            take_nothing(client)
            await client.send(GET)
            await until(lambda: served == 1, "the first answer")
            await client.send(GET * 2)
            # It has read what came behind it as soon as another connection is served.
            for others in range(1, 4):
                async with connected(server.port) as other:
                    await other.send(GET)
                    await other.message()
                assert served == 1 + others
            cast(asyncio.Transport, client.writer.transport).resume_reading()
            for _ in range(3):
                assert (await client.message())[1] == HUGE

    run_on(loop, story())


def test_a_client_that_ends_its_side_and_takes_nothing_is_dropped_in_the_end(loop: str) -> None:
    async def story() -> None:
        going = asyncio.Event()

        async def drips(_: Request, responder: Responder) -> None:
            """Until a little is left that the client's side does not take: less than what pauses the answer."""
            await responder.send_head(200, [])
            (connection,) = server.connections
            transport = connection._transport  # pyright: ignore[reportPrivateUsage]
            assert transport is not None
            while not transport.get_write_buffer_size():
                await responder.write(b"x" * 4096)
                await asyncio.sleep(0)
            going.set()
            await asyncio.Event().wait()

        limits = ServerLimits(write_stall_timeout_s=0.4)
        async with listening(drips, limits) as server, connected(server.port) as client:
            take_nothing(client)
            await client.send(GET)
            await asyncio.wait_for(going.wait(), 10)
            await client.send_end()
            await nobody_left(server)

    run_on(loop, story())


def test_a_refused_client_that_ends_its_side_is_waited_for_no_longer(loop: str) -> None:
    async def story() -> None:
        limits = ServerLimits(linger_s=0.3, write_stall_timeout_s=60)
        async with listening(huge, limits) as server, connected(server.port) as client:
            take_nothing(client)
            # What cannot be read stands behind an answer of which the client takes nothing.
            await client.send(GET)
            await until(lambda: len(server.connections) == 1, "the connection")
            (connection,) = server.connections
            await until(
                lambda: connection._write_paused and not connection.busy,  # pyright: ignore[reportPrivateUsage]
                "the answer",
            )
            connection._refuse(400, "invalid_request", "no")  # pyright: ignore[reportPrivateUsage]
            await client.send_end()
            await nobody_left(server)

    run_on(loop, story())


def test_a_client_that_took_its_answer_late_is_idle_like_any_other(loop: str) -> None:
    async def story() -> None:
        limits = ServerLimits(write_stall_timeout_s=30, idle_timeout_s=0.4)
        async with listening(huge, limits) as server, connected(server.port) as client:
            await client.send(GET)
            _, body = await client.message()
            assert len(body) == len(HUGE)
            assert await client.rest() == b""
            await nobody_left(server)

    run_on(loop, story())


def test_a_head_begun_behind_an_answer_taken_late_is_bounded(loop: str) -> None:
    async def story() -> None:
        limits = ServerLimits(write_stall_timeout_s=30, head_timeout_s=0.4, linger_s=0.1)
        async with listening(huge, limits) as server, connected(server.port) as client:
            await client.send(GET + b"GET / HT")
            _, body = await client.message()
            assert len(body) == len(HUGE)
            head, _ = await client.message()
            assert head.startswith(b"HTTP/1.1 408")
            assert await client.rest() == b""

    run_on(loop, story())


def test_the_last_answer_of_a_connection_is_not_kept_for_ever_either(loop: str) -> None:
    async def story() -> None:
        limits = ServerLimits(write_stall_timeout_s=0.4)
        async with listening(huge, limits) as server, connected(server.port) as client:
            take_nothing(client)
            await client.send(GET.replace(b"\r\n\r\n", b"\r\nconnection: close\r\n\r\n"))
            await nobody_left(server)

    run_on(loop, story())


def test_chunk_extensions_are_no_way_to_keep_a_connection_busy(loop: str) -> None:
    async def story() -> None:
        limits = ServerLimits(linger_s=0.1)
        async with listening(echo, limits) as server, connected(server.port) as client:
            await client.send(
                b"POST / HTTP/1.1\r\nhost: a\r\ntransfer-encoding: chunked\r\n\r\n"
                + (b"1;" + b"e" * 200 + b"\r\nx\r\n") * 1000
            )
            head, body = await client.message()
            assert head.startswith(b"HTTP/1.1 400")
            assert b"framing" in body
            assert await client.rest() == b""

    run_on(loop, story())


def test_chunks_of_one_byte_are_a_body_like_any_other(loop: str) -> None:
    async def story() -> None:
        async with listening(echo) as server, connected(server.port, 1 << 20) as client:
            await client.send(
                b"POST / HTTP/1.1\r\nhost: a\r\ntransfer-encoding: chunked\r\n\r\n"
                + b"1\r\nx\r\n" * 100_000
                + b"0\r\n\r\n"
            )
            head, body = await client.message()
            assert head.startswith(b"HTTP/1.1 200")
            assert body == b"x" * 100_000

    run_on(loop, story())


def test_idle_connections_give_way_to_new_ones_and_busy_ones_do_not(loop: str) -> None:
    async def story() -> None:
        go = asyncio.Event()

        async def waiting(_: Request, responder: Responder) -> None:
            await go.wait()
            await responder.send(200, [], b"late")

        async with listening(waiting, ServerLimits(connections=30)) as server:
            busy = [await asyncio.open_connection("127.0.0.1", server.port) for _ in range(10)]
            for _, writer in busy:
                writer.write(GET)
            await until(lambda: server.active == 10, "ten requests")
            idle = [await asyncio.open_connection("127.0.0.1", server.port) for _ in range(100)]
            idle[-1][1].write(b"GET / HTTP/1.1\r\nhost: a\r\nconnection: close\r\n\r\n")
            await until(lambda: server.active == 11 and len(server.connections) <= 30, "room")
            go.set()
            for reader, _ in [*busy, idle[-1]]:
                assert b" 200 OK" in await asyncio.wait_for(reader.readuntil(b"late"), 10)
            for _, writer in [*busy, *idle]:
                writer.transport.abort()
            await nobody_left(server)

    run_on(loop, story())


def test_where_all_are_busy_the_newest_is_turned_away(loop: str) -> None:
    async def story() -> None:
        go = asyncio.Event()

        async def waiting(_: Request, responder: Responder) -> None:
            await go.wait()
            await responder.send(200, [], b"late")

        async with (
            listening(waiting, ServerLimits(connections=1)) as server,
            connected(server.port) as first,
        ):
            await first.send(GET)
            await until(lambda: server.active == 1, "the request")
            async with connected(server.port) as second:
                assert await second.rest() == b""
            go.set()
            _, body = await first.message()
            assert body == b"late"

    run_on(loop, story())


def test_clients_that_vanish_without_a_word_are_asked_after(loop: str) -> None:
    async def story() -> None:
        async with listening(echo) as server, connected(server.port) as client:
            await client.send(post(b"a"))
            await client.message()
            [connection] = server.connections
            assert connection._transport is not None
            taken = connection._transport.get_extra_info("socket")
            assert taken.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE) == 1
            assert taken.getsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE) == 60

    run_on(loop, story())


def test_a_share_of_the_descriptors_stays_for_engines(loop: str) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    assert 0 < client_connections() < hard or hard == resource.RLIM_INFINITY
    assert soft <= hard
