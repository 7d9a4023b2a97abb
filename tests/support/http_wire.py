"""Raw HTTP for tests: an engine that says exactly what a script tells it, and a client that does too.

Nothing here parses more than it must: what is under test shall not be tested with itself.
"""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from contextlib import asynccontextmanager, suppress
from typing import Any, TypeVar

import uvloop

from gateway.domain.http_rules import engine_request_headers
from gateway.http.bodies import BodyBudget
from gateway.http.client import EngineClient
from gateway.http.errors import BadEngineAnswer, ConnectFailed, EngineGone
from gateway.http.exchange import Exchange
from gateway.http.limits import ClientLimits, ServerLimits
from gateway.http.messages import Relayed, Request, Responder
from gateway.http.server import Server, serve

T = TypeVar("T")

LOOPS = ("asyncio", "uvloop")
DEADLINE_S = 10.0


def run_on(loop: str, coroutine: Coroutine[Any, Any, T], timeout_s: float = 30.0) -> T:
    """The coroutine's result on the named loop; TimeoutError after `timeout_s`."""

    async def bounded() -> T:
        return await asyncio.wait_for(coroutine, timeout_s)

    factory = uvloop.new_event_loop if loop == "uvloop" else asyncio.new_event_loop
    with asyncio.Runner(loop_factory=factory) as runner:
        return runner.run(bounded())


class Peer:
    """One connection, read and written as bytes; every read has a deadline."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader = reader
        self.writer = writer

    async def send(self, data: bytes) -> None:
        self.writer.write(data)
        await self.writer.drain()

    async def send_end(self) -> None:
        """Ends our side of the connection."""
        with suppress(OSError):
            self.writer.write_eof()

    async def until(self, mark: bytes) -> bytes:
        return await asyncio.wait_for(self.reader.readuntil(mark), DEADLINE_S)

    async def exactly(self, count: int) -> bytes:
        return await asyncio.wait_for(self.reader.readexactly(count), DEADLINE_S)

    async def rest(self) -> bytes:
        """Everything up to the end of the connection; a reset counts as one."""
        pieces: list[bytes] = []
        try:
            while piece := await asyncio.wait_for(self.reader.read(65536), DEADLINE_S):
                pieces.append(piece)
        except ConnectionError:
            pass
        return b"".join(pieces)

    async def gone(self) -> None:
        """Returns when the other side ended the connection."""
        await self.rest()

    async def message(self) -> tuple[bytes, bytes]:
        """Head and decoded body of one message with a length or chunks, else up to the end."""
        head = await self.until(b"\r\n\r\n")
        lower = head.lower()
        if b"transfer-encoding: chunked" in lower:
            return head, await self.chunks()
        if b"content-length:" in lower:
            length = int(lower.partition(b"content-length:")[2].split(b"\r\n", 1)[0])
            return head, await self.exactly(length)
        return head, b""

    async def chunks(self) -> bytes:
        pieces: list[bytes] = []
        while size := int((await self.until(b"\r\n")).split(b";")[0], 16):
            pieces.append(await self.exactly(size))
            assert await self.exactly(2) == b"\r\n"
        assert await self.until(b"\r\n") == b"\r\n"
        return b"".join(pieces)

    def break_off(self) -> None:
        """Resets the connection: the other side sees an error, not an end."""
        self.writer.transport.abort()

    async def close(self) -> None:
        self.writer.close()
        with suppress(ConnectionError):
            await self.writer.wait_closed()


Script = Callable[[Peer], Awaitable[None]]


class RawEngine:
    """A listening socket whose connections each run `script`; `peers` are the open ones."""

    def __init__(self, script: Script) -> None:
        self.script = script
        self.peers: set[Peer] = set()
        self.accepted = 0
        self.failures: list[BaseException] = []
        self.url = ""
        self._server: asyncio.Server | None = None
        self._tasks: set[asyncio.Task[None]] = set()

    async def start(self) -> None:
        self._server = await asyncio.start_server(self._connected, "127.0.0.1", 0)
        self.url = f"http://127.0.0.1:{self._server.sockets[0].getsockname()[1]}"

    async def stop(self) -> None:
        assert self._server is not None
        self._server.close()
        for task in list(self._tasks):
            task.cancel()
        if self._tasks:
            await asyncio.wait(self._tasks)
        await self._server.wait_closed()

    async def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        self.accepted += 1
        peer = Peer(reader, writer)
        self.peers.add(peer)
        try:
            await self.script(peer)
            await peer.close()
        except (asyncio.IncompleteReadError, ConnectionError, asyncio.CancelledError):
            pass
        except AssertionError as failure:
            self.failures.append(failure)
        finally:
            self.peers.discard(peer)
            self._tasks.discard(task)
            writer.transport.abort()


@asynccontextmanager
async def engine(script: Script) -> AsyncIterator[RawEngine]:
    """An engine for the length of a test."""
    raw = RawEngine(script)
    await raw.start()
    try:
        yield raw
    finally:
        await raw.stop()
        assert not raw.failures, raw.failures


class Yard:
    """A gateway without a yard: every request goes to `endpoints` in turn until one answers."""

    def __init__(self, *endpoints: str, model: str | None = None) -> None:
        self.endpoints = list(endpoints)
        self.model = model
        self.client = EngineClient()
        self.server: Server | None = None
        self.relayed: list[Relayed] = []
        self.exchanges: list[Exchange] = []
        self.ended = 0
        self.problems: list[BaseException] = []

    async def handle(self, request: Request, responder: Responder) -> None:
        responder.add_header(b"access-control-allow-origin", b"*")
        try:
            await request.body.read_all()
            for endpoint in self.endpoints:
                exchange = Exchange()
                self.exchanges.append(exchange)
                try:
                    response = await self.client.request(
                        endpoint,
                        request.method,
                        request.target.decode(),
                        engine_request_headers(request.headers.items, engine_key="k"),
                        request.body,
                        exchange=exchange,
                    )
                    self.relayed.append(await responder.relay(response, model=self.model))
                    return
                except (ConnectFailed, EngineGone, BadEngineAnswer) as problem:
                    self.problems.append(problem)
            await responder.send_error(502, "engine_error", "No engine answered.")
        finally:
            self.ended += 1


@asynccontextmanager
async def gateway(
    yard: Yard,
    *,
    limits: ServerLimits | None = None,
    client_limits: ClientLimits | None = None,
    budget: BodyBudget | None = None,
) -> AsyncIterator[Yard]:
    """`yard` listening; afterwards nothing of it is left, which is checked."""
    if client_limits is not None:
        yard.client = EngineClient(client_limits)
    budget = budget or BodyBudget(1 << 30)
    yard.server = await serve(yard.handle, "127.0.0.1", 0, limits, budget=budget)
    try:
        yield yard
    finally:
        await yard.server.close()
        await yard.client.close()
    assert budget.used_bytes == 0, "a body was not given back"
    assert yard.server.active == 0
    assert not yard.server.connections
    assert yard.client.open_connections == 0


@asynccontextmanager
async def listening(
    handler: Callable[[Request, Responder], Awaitable[None]],
    limits: ServerLimits | None = None,
    budget: BodyBudget | None = None,
) -> AsyncIterator[Server]:
    """A server with any handler; afterwards nothing of it is left, which is checked."""
    budget = budget or BodyBudget(1 << 30)
    server = await serve(handler, "127.0.0.1", 0, limits, budget=budget)
    try:
        yield server
    finally:
        await server.close()
    assert budget.used_bytes == 0, "a body was not given back"
    assert server.active == 0
    assert not server.connections


@asynccontextmanager
async def connected(port: int, limit: int = 1 << 16) -> AsyncIterator[Peer]:
    """A raw client connection to a local port."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port, limit=limit)
    peer = Peer(reader, writer)
    try:
        yield peer
    finally:
        await peer.close()


def post(body: bytes, path: str = "/v1/chat/completions", extra: bytes = b"") -> bytes:
    """A request with a Content-Length."""
    return b"POST %b HTTP/1.1\r\nhost: yard\r\n%bcontent-length: %d\r\n\r\n%b" % (
        path.encode(),
        extra,
        len(body),
        body,
    )


def answer(body: bytes, extra: bytes = b"", status: bytes = b"200 OK") -> bytes:
    """An engine's answer with a Content-Length."""
    return b"HTTP/1.1 %b\r\n%bcontent-length: %d\r\n\r\n%b" % (status, extra, len(body), body)


SSE_HEAD = (
    b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
)


def chunk(payload: bytes) -> bytes:
    """A chunk."""
    return b"%x\r\n%b\r\n" % (len(payload), payload)


ASK = post(b'{"model":"m"}')


async def echo(peer: Peer) -> None:
    """Answers every request with its own body."""
    while True:
        _, body = await peer.message()
        await peer.send(answer(body, b"content-type: application/json\r\n"))
