"""The server side alone over real sockets: what clients send, well-formed and not, and how it ends."""

import asyncio
import json
import socket
from typing import cast

import httpx
import pytest

from gateway.http.bodies import BodyBudget
from gateway.http.errors import RequestError
from gateway.http.limits import ServerLimits
from gateway.http.messages import Request, Responder
from gateway.http.server import Server
from gateway.http.server_protocol import ServerProtocol
from tests.support.aio import until
from tests.support.http_wire import LOOPS, connected, listening, post, run_on

pytestmark = pytest.mark.parametrize("loop", LOOPS)


async def echo(request: Request, responder: Responder) -> None:
    """Answers method, path and body."""
    body = await request.body.read_all()
    text = f"{request.method} {request.path} ".encode() + body
    await responder.send(200, [(b"content-type", b"text/plain")], text)


async def until_one(server: Server) -> list[ServerProtocol]:
    """The one connection that `server` has in a moment."""
    await until(lambda: len(server.connections) == 1, "a connection")
    return list(server.connections)


async def deaf(_: Request, responder: Responder) -> None:
    """Answers without looking at the body."""
    await responder.send(401, [], b"no")


def error_of(body: bytes) -> dict[str, object]:
    error = json.loads(body)["error"]
    assert set(error) == {"message", "type", "param", "code"}
    return error


GET = b"GET / HTTP/1.1\r\nhost: a\r\n"

REFUSED = {
    "no http": b"hello there\r\n\r\n",
    "bad method": b"G@T / HTTP/1.1\r\nhost: a\r\n\r\n",
    "http/0.9": b"GET /\r\n\r\n",
    "http/2 preface": b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
    "http/1.2": b"GET / HTTP/1.2\r\nhost: a\r\n\r\n",
    "no host": b"GET / HTTP/1.1\r\n\r\n",
    "two hosts": GET + b"host: b\r\n\r\n",
    "two lengths": GET + b"content-length: 1\r\ncontent-length: 1\r\n\r\nx",
    "length list": GET + b"content-length: 1, 1\r\n\r\nx",
    "length sign": GET + b"content-length: +1\r\n\r\nx",
    "length hex": GET + b"content-length: 0x1\r\n\r\nx",
    "length huge": GET + b"content-length: 99999999999999999999\r\n\r\n",
    "length and chunked": GET + b"content-length: 5\r\ntransfer-encoding: chunked\r\n\r\n0\r\n\r\n",
    "chunked and length": GET + b"transfer-encoding: chunked\r\ncontent-length: 5\r\n\r\n0\r\n\r\n",
    "gzip": GET + b"transfer-encoding: gzip\r\n\r\n",
    "gzip, chunked": GET + b"transfer-encoding: gzip, chunked\r\n\r\n0\r\n\r\n",
    "chunked twice": GET + b"transfer-encoding: chunked\r\ntransfer-encoding: chunked\r\n\r\n",
    "xchunked": GET + b"transfer-encoding: xchunked\r\n\r\n",
    "chunked in 1.0": b"GET / HTTP/1.0\r\ntransfer-encoding: chunked\r\n\r\n0\r\n\r\n",
    "folded": GET + b"x: a\r\n b\r\n\r\n",
    "folded by tab": GET + b"x: a\r\n\tb\r\n\r\n",
    "nul": GET + b"x: a\0b\r\n\r\n",
    "space before colon": GET + b"x : a\r\n\r\n",
    "space before name": GET + b" x: a\r\n\r\n",
    "bare lf": b"GET / HTTP/1.1\nhost: a\n\nGET / HTTP/1.1\r\nhost: a\r\n\r\n",
    "bare lf in a header": GET + b"x: a\ny: b\r\n\r\n",
    "bare cr": GET + b"x: a\ry: b\r\n\r\n",
    "connect": b"CONNECT a:1 HTTP/1.1\r\nhost: a\r\n\r\n",
    "relative target": b"GET x HTTP/1.1\r\nhost: a\r\n\r\n",
    "expectation": GET + b"expect: miracles\r\ncontent-length: 1\r\n\r\nx",
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_could_be_read_in_two_ways_is_refused_and_the_connection_closed(
    loop: str, case: str
) -> None:
    called: list[str] = []

    async def handler(request: Request, responder: Responder) -> None:
        called.append(request.path)
        await echo(request, responder)

    async def story() -> tuple[bytes, bytes]:
        async with (
            listening(handler, ServerLimits(linger_s=0.1)) as server,
            connected(server.port) as client,
        ):
            await client.send(REFUSED[case])
            head, body = await client.message()
            assert await client.rest() == b""
            return head, body

    head, body = run_on(loop, story())
    status = int(head.split(b" ")[1])
    assert status in (400, 417, 505)
    assert b"connection: close" in head
    assert error_of(body)["code"] == "invalid_request"
    assert not called


def test_pipelined_requests_are_answered_in_order_one_at_a_time(loop: str) -> None:
    running = 0

    async def handler(request: Request, responder: Responder) -> None:
        nonlocal running
        running += 1
        assert running == 1
        await asyncio.sleep(0)
        await echo(request, responder)
        running -= 1

    async def story() -> None:
        async with listening(handler) as server, connected(server.port) as client:
            burst = b"".join(
                post(b"%d" % n, f"/{n}")
                + b"POST /c%d HTTP/1.1\r\nhost: a\r\ntransfer-encoding: chunked\r\n\r\n" % n
                + b"2\r\nok\r\n0\r\n\r\n\r\n"
                for n in range(50)
            )
            await client.send(burst)
            for n in range(50):
                assert (await client.message())[1] == b"POST /%d %d" % (n, n)
                assert (await client.message())[1] == b"POST /c%d ok" % n

    run_on(loop, story())


def test_a_flood_of_pipelined_requests_is_not_kept_in_memory(loop: str) -> None:
    async def story() -> None:
        release = asyncio.Event()

        async def handler(request: Request, responder: Responder) -> None:
            await release.wait()
            await echo(request, responder)

        async with listening(handler) as server, connected(server.port, 1 << 24) as client:
            count = 4000
            sending = asyncio.create_task(client.send(post(b"x" * 2000) * count))
            await until(lambda: server.active == 1, "the first request")
            await asyncio.sleep(0.2)
            (connection,) = server.connections
            assert len(connection._pending) < 1 << 20
            release.set()
            for _ in range(count):
                await client.message()
            await sending

    run_on(loop, story(), 60)


@pytest.mark.parametrize("split", [1, 2, 3, 7])
def test_a_request_in_crumbs_is_the_same_request(loop: str, split: int) -> None:
    async def story() -> None:
        async with listening(echo) as server, connected(server.port) as client:
            whole = (
                b"\r\n"
                + post(b"hello")
                + (b"POST /c HTTP/1.1\r\nhost: a\r\ntransfer-encoding: chunked\r\n\r\n")
                + b"3\r\nabc\r\n2;x=y\r\nde\r\n0\r\nt: 1\r\n\r\n"
            )
            for start in range(0, len(whole), split):
                await client.send(whole[start : start + split])
                await asyncio.sleep(0)
            assert (await client.message())[1] == b"POST /v1/chat/completions hello"
            assert (await client.message())[1] == b"POST /c abcde"

    run_on(loop, story())


def test_head_and_http_1_0_and_close(loop: str) -> None:
    async def story() -> None:
        async with listening(echo) as server:
            async with connected(server.port) as client:
                await client.send(b"HEAD /a HTTP/1.1\r\nhost: a\r\n\r\n")
                head = await client.until(b"\r\n\r\n")
                assert b"content-length: 8\r\n" in head
                await client.send(b"GET /b HTTP/1.1\r\nhost: a\r\nconnection: close\r\n\r\n")
                head, body = await client.message()
                assert body == b"GET /b "
                assert b"connection: close" in head
                assert await client.rest() == b""
            async with connected(server.port) as client:
                await client.send(b"GET /c HTTP/1.0\r\nconnection: keep-alive\r\n\r\n")
                head, body = await client.message()
                assert body == b"GET /c "
                assert b"connection: keep-alive" in head
                await client.send(b"GET /d HTTP/1.0\r\n\r\n")
                head, body = await client.message()
                assert body == b"GET /d "
                assert await client.rest() == b""

    run_on(loop, story())


def test_an_upgrade_that_is_offered_is_not_taken_up(loop: str) -> None:
    async def story() -> None:
        async with listening(echo) as server, connected(server.port) as client:
            await client.send(post(b"x", extra=b"connection: upgrade\r\nupgrade: h2c\r\n"))
            assert (await client.message())[1].endswith(b" x")
            await client.send(post(b"y"))
            assert (await client.message())[1].endswith(b" y")

    run_on(loop, story())


def test_100_continue_is_said_when_the_body_is_wanted_and_only_then(loop: str) -> None:
    expecting = b"POST /x HTTP/1.1\r\nhost: a\r\nexpect: 100-continue\r\ncontent-length: 2\r\n\r\n"

    async def story() -> None:
        async with listening(echo) as server, connected(server.port) as client:
            await client.send(expecting)
            assert await client.until(b"\r\n\r\n") == b"HTTP/1.1 100 Continue\r\n\r\n"
            await client.send(b"ok")
            assert (await client.message())[1] == b"POST /x ok"
        async with (
            listening(deaf, ServerLimits(linger_s=0.1)) as server,
            connected(server.port) as client,
        ):
            await client.send(expecting)
            head, _ = await client.message()
            assert head.startswith(b"HTTP/1.1 401")
            # Nobody knows whether the body comes: the connection ends.
            assert b"connection: close" in head
            assert await client.rest() == b""

    run_on(loop, story())


@pytest.mark.parametrize("framing", ["length", "chunked"])
def test_scn_b4_a_body_over_the_cap_is_413_in_the_envelope(loop: str, framing: str) -> None:
    async def story() -> tuple[bytes, bytes]:
        limits = ServerLimits(body_bytes=1000, linger_s=0.2)
        async with listening(echo, limits) as server, connected(server.port) as client:
            if framing == "length":
                await client.send(b"POST / HTTP/1.1\r\nhost: a\r\ncontent-length: 100000\r\n\r\n")
                await client.send(b"x" * 50_000)
            else:
                await client.send(
                    b"POST / HTTP/1.1\r\nhost: a\r\ntransfer-encoding: chunked\r\n\r\n"
                )
                await client.send(b"1000\r\n" + b"x" * 4096 + b"\r\n")
            head, body = await client.message()
            assert await client.rest() == b""
            return head, body

    head, body = run_on(loop, story())
    assert head.startswith(b"HTTP/1.1 413")
    assert b"connection: close" in head
    error = error_of(body)
    assert error["code"] == "request_too_large"
    assert "1000" in str(error["message"])


def test_an_answer_given_during_a_large_upload_is_still_read_by_an_ordinary_client(
    loop: str,
) -> None:
    async def story() -> tuple[int, str]:
        async with (
            listening(echo, ServerLimits(body_bytes=1 << 20)) as server,
            httpx.AsyncClient() as client,
        ):
            url = f"http://127.0.0.1:{server.port}/"
            answer = await client.post(url, content=b"x" * (8 << 20))
            return answer.status_code, answer.json()["error"]["code"]

    assert run_on(loop, story()) == (413, "request_too_large")


def test_bodies_over_the_shared_budget_are_refused_as_queue_full(loop: str) -> None:
    async def story() -> tuple[bytes, bytes]:
        budget = BodyBudget(1000)
        limits = ServerLimits(linger_s=0.1)
        async with (
            listening(echo, limits, budget) as server,
            connected(server.port) as first,
            connected(server.port) as second,
        ):
            await first.send(post(b"x" * 800)[:-1])
            await until(lambda: budget.used_bytes > 700, "the first body")
            await second.send(post(b"y" * 800))
            refused = await second.message()
            await first.send(b"x")
            assert (await first.message())[0].startswith(b"HTTP/1.1 200")
            return refused

    head, body = run_on(loop, story())
    assert head.startswith(b"HTTP/1.1 503")
    assert b"retry-after: 1\r\n" in head
    assert error_of(body)["code"] == "queue_full"


def test_a_broken_chunk_is_400_and_never_a_second_request(loop: str) -> None:
    async def story() -> tuple[bytes, bytes]:
        limits = ServerLimits(linger_s=0.1)
        async with listening(echo, limits) as server, connected(server.port) as client:
            await client.send(
                b"POST / HTTP/1.1\r\nhost: a\r\ntransfer-encoding: chunked\r\n\r\n"
                b"3\r\nabcGET /smuggled HTTP/1.1\r\nhost: a\r\n\r\n"
            )
            head, body = await client.message()
            assert await client.rest() == b""
            return head, body

    head, body = run_on(loop, story())
    assert head.startswith(b"HTTP/1.1 400")
    assert "chunked" in str(error_of(body)["message"])


def test_a_body_nobody_read_is_discarded_and_the_connection_stays(loop: str) -> None:
    async def story() -> None:
        async with listening(deaf) as server, connected(server.port) as client:
            for _ in range(3):
                await client.send(post(b"x" * 1000)[:-500])
                head, _ = await client.message()
                assert head.startswith(b"HTTP/1.1 401")
                assert b"connection: close" not in head
                await client.send(b"x" * 500)

    run_on(loop, story())


def test_a_large_body_nobody_read_ends_the_connection_behind_the_answer(loop: str) -> None:
    async def story() -> bytes:
        limits = ServerLimits(discard_bytes=1000, linger_s=0.1)
        async with listening(deaf, limits) as server, connected(server.port) as client:
            await client.send(b"POST / HTTP/1.1\r\nhost: a\r\ncontent-length: 5000\r\n\r\nx")
            head, _ = await client.message()
            assert await client.rest() == b""
            return head

    assert b"connection: close" in run_on(loop, story())


def test_heads_are_bounded_in_size_and_number(loop: str) -> None:
    async def story() -> None:
        limits = ServerLimits(head_bytes=2000, head_count=20, linger_s=0.1)
        async with listening(echo, limits) as server:
            for request in (
                GET + b"x: " + b"y" * 3000 + b"\r\n\r\n",
                GET + b"x: " + b"y" * 3000,  # never ends
                GET + b"x: y\r\n" * 30 + b"\r\n",
            ):
                async with connected(server.port) as client:
                    await client.send(request)
                    head, body = await client.message()
                    assert head.startswith(b"HTTP/1.1 431")
                    error_of(body)
                    assert await client.rest() == b""

    run_on(loop, story())


def test_slow_heads_bodies_and_idle_connections_are_bounded(loop: str) -> None:
    async def story() -> None:
        limits = ServerLimits(
            head_timeout_s=0.2, body_idle_timeout_s=0.2, idle_timeout_s=0.3, linger_s=0.1
        )
        async with listening(echo, limits) as server:
            async with connected(server.port) as client:
                await client.send(b"GET / HT")
                head, body = await client.message()
                assert head.startswith(b"HTTP/1.1 408")
                assert error_of(body)["code"] == "request_timeout"
                assert await client.rest() == b""
            async with connected(server.port) as client:
                await client.send(post(b"abc")[:-1])
                head, _ = await client.message()
                assert head.startswith(b"HTTP/1.1 408")
                assert await client.rest() == b""
            async with connected(server.port) as client:
                assert await client.rest() == b""

    run_on(loop, story())


def test_a_client_that_takes_nothing_is_dropped_in_the_end(loop: str) -> None:
    async def story() -> None:
        ended = asyncio.Event()

        async def endless(_: Request, responder: Responder) -> None:
            try:
                await responder.send_head(200, [])
                while True:
                    await responder.write(b"x" * 65536)
            finally:
                ended.set()

        limits = ServerLimits(write_stall_timeout_s=0.3)
        async with listening(endless, limits) as server, connected(server.port) as client:
            await client.send(GET + b"\r\n")
            await asyncio.wait_for(ended.wait(), 10)

    run_on(loop, story())


def test_answers_written_piecewise(loop: str) -> None:
    async def handler(request: Request, responder: Responder) -> None:
        length = 6 if request.path == "/length" else None
        await responder.send_head(200, [(b"x", b"y")], length=length)
        await responder.write(b"abc")
        await responder.write(b"def")
        await responder.finish()

    async def story() -> None:
        async with listening(handler) as server:
            async with connected(server.port) as client:
                for path in (b"/chunked", b"/length"):
                    await client.send(b"GET %b HTTP/1.1\r\nhost: a\r\n\r\n" % path)
                    assert (await client.message())[1] == b"abcdef"
            async with connected(server.port) as client:
                await client.send(b"GET /x HTTP/1.0\r\n\r\n")
                assert (await client.rest()).endswith(b"\r\n\r\nabcdef")

    run_on(loop, story())


def test_a_handlers_failure_is_500_without_a_traceback_and_keeps_the_server_going(
    loop: str,
) -> None:
    async def handler(request: Request, responder: Responder) -> None:
        if request.path == "/fails":
            raise ZeroDivisionError("a secret detail")
        if request.path == "/refuses":
            raise RequestError(415, "invalid_request", "Not that type.", param="content-type")
        if request.path == "/breaks":
            await responder.send_head(200, [], length=100)
            await responder.write(b"half")
            raise ZeroDivisionError
        if request.path != "/silent":
            await echo(request, responder)

    async def story() -> None:
        async with listening(handler) as server:
            for path, status in (("/fails", 500), ("/silent", 500), ("/refuses", 415)):
                async with connected(server.port) as client:
                    await client.send(post(b"", path))
                    head, body = await client.message()
                    assert head.startswith(b"HTTP/1.1 %d" % status)
                    assert b"secret" not in body
                    error_of(body)
            async with connected(server.port) as client:
                await client.send(post(b"", "/breaks"))
                assert (await client.rest()).endswith(b"half")
            async with connected(server.port) as client:
                # The refusal left the connection usable.
                await client.send(post(b"", "/refuses") + post(b"z", "/echo"))
                await client.message()
                assert (await client.message())[1] == b"POST /echo z"

    run_on(loop, story())


def test_a_header_cannot_split_an_answer(loop: str) -> None:
    async def handler(_: Request, responder: Responder) -> None:
        with pytest.raises(ValueError, match="line end"):
            responder.add_header(b"x", b"a\r\nset-cookie: b")
        with pytest.raises(ValueError, match="line end"):
            await responder.send(200, [(b"x", b"a\r\nset-cookie: b")], b"")
        await responder.send(200, [], b"fine")

    async def story() -> tuple[bytes, bytes]:
        async with listening(handler) as server, connected(server.port) as client:
            await client.send(GET + b"\r\n")
            return await client.message()

    head, body = run_on(loop, story())
    assert b"set-cookie" not in head
    assert body == b"fine"


def test_drain_lets_running_requests_finish_and_ends_idle_connections(loop: str) -> None:
    async def story() -> None:
        going_on = asyncio.Event()

        async def handler(request: Request, responder: Responder) -> None:
            await going_on.wait()
            await echo(request, responder)

        async with (
            listening(handler) as server,
            connected(server.port) as busy,
            connected(server.port) as idle,
        ):
            await busy.send(post(b"x"))
            await until(lambda: server.active == 1, "the request")
            await until(lambda: len(server.connections) == 2, "both connections")
            draining = asyncio.create_task(server.drain(5))
            assert await idle.rest() == b""
            with pytest.raises(ConnectionRefusedError):
                async with connected(server.port):
                    pass
            going_on.set()
            head, _ = await busy.message()
            assert head.startswith(b"HTTP/1.1 200")
            assert b"connection: close" in head
            assert await draining == 0
            assert await busy.rest() == b""

    run_on(loop, story())


def test_drain_lets_a_slow_client_take_the_rest_of_its_answer(loop: str) -> None:
    """More than the buffers between two sockets take: what is left is in the gateway when its handler has ended."""
    answer = b"x" * (16 << 20)

    async def huge(_: Request, responder: Responder) -> None:
        responder.send_now(200, [], answer)

    async def story() -> None:
        async with listening(huge) as server, connected(server.port) as client:
            cast(asyncio.Transport, client.writer.transport).pause_reading()
            await client.send(b"GET / HTTP/1.1\r\nhost: a\r\n\r\n")
            (wire,) = await until_one(server)
            await until(lambda: wire._write_paused and not server.active, "the answer")  # pyright: ignore[reportPrivateUsage]
            draining = asyncio.create_task(server.drain(5))
            await until(lambda: server.draining, "the drain")
            cast(asyncio.Transport, client.writer.transport).resume_reading()
            assert (await client.message())[1] == answer
            assert await draining == 0

    run_on(loop, story())


def test_drain_does_not_wait_for_a_client_that_came_in_the_last_moment(loop: str) -> None:
    """Accepted when the port was open, and told of later."""

    async def huge(_: Request, responder: Responder) -> None:
        responder.send_now(200, [], b"x" * (16 << 20))

    async def story() -> None:
        async with listening(huge) as server, connected(server.port) as client:
            cast(asyncio.Transport, client.writer.transport).pause_reading()
            await client.send(b"GET / HTTP/1.1\r\nhost: a\r\n\r\n")
            (wire,) = await until_one(server)
            await until(lambda: wire._write_paused, "the answer")  # pyright: ignore[reportPrivateUsage]
            draining = asyncio.create_task(server.drain(60))
            await until(lambda: server.draining, "the drain")
            running = asyncio.get_running_loop()
            ours, theirs = socket.socketpair()
            with theirs:
                late = ServerProtocol(server, running)
                await running.connect_accepted_socket(lambda: late, ours)
                cast(asyncio.Transport, client.writer.transport).resume_reading()
                await client.message()
                assert await asyncio.wait_for(draining, 10) == 0

    run_on(loop, story())


def test_drain_does_not_wait_longer_for_a_client_that_takes_nothing(loop: str) -> None:
    async def huge(_: Request, responder: Responder) -> None:
        responder.send_now(200, [], b"x" * (16 << 20))

    async def story() -> None:
        async with (
            listening(huge, ServerLimits(linger_s=0.1)) as server,
            connected(server.port) as client,
        ):
            cast(asyncio.Transport, client.writer.transport).pause_reading()
            await client.send(b"GET / HTTP/1.1\r\nhost: a\r\n\r\n")
            (wire,) = await until_one(server)
            await until(lambda: wire._write_paused, "the answer")  # pyright: ignore[reportPrivateUsage]
            assert await asyncio.wait_for(server.drain(0.2), 5) == 0
            assert not server.connections

    run_on(loop, story())


def test_drain_cuts_what_outlives_it_and_says_so(loop: str) -> None:
    async def waits(_: Request, __: Responder) -> None:
        await asyncio.Event().wait()

    async def story() -> tuple[int, bytes]:
        async with listening(waits) as server, connected(server.port) as client:
            await client.send(post(b"x"))
            await until(lambda: server.active == 1, "the request")
            cut = await server.drain(0.05)
            head, body = await client.message()
            assert error_of(body)["code"] == "draining"
            return cut, head

    cut, head = run_on(loop, story())
    assert cut == 1
    assert head.startswith(b"HTTP/1.1 503")


def test_scn_b7_a_path_keeps_its_escapes(loop: str) -> None:
    async def story() -> None:
        async with listening(echo) as server, connected(server.port) as client:
            for target, path in (
                (b"/v1/models/a%2Fb%20c:d?x=%2F", b"/v1/models/a%2Fb%20c:d"),
                (b"http://yard/v1/models/a/b", b"/v1/models/a/b"),
            ):
                await client.send(b"GET %b HTTP/1.1\r\nhost: a\r\n\r\n" % target)
                assert (await client.message())[1] == b"GET %b " % path

    run_on(loop, story())


def test_a_client_that_leaves_before_its_handler_began_leaves_nothing(loop: str) -> None:
    async def story() -> None:
        # Head, body and end arrive together: the handler's task is cancelled before its first step.
        async with listening(echo) as server:
            for _ in range(20):
                async with connected(server.port) as client:
                    client.writer.write(post(b"x" * 100) * 3)
                    await client.send_end()
                    await client.rest()
            await until(lambda: not server.connections, "no connection")
            assert server.active == 0

    run_on(loop, story())
