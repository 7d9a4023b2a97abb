"""Sends requests to engines over pooled connections, one small HTTP/1.1 client for the data path.

It retries in exactly one case, which no engine can notice: a kept connection turned out to be closed
already. Everything else is raised; where a request goes next is the routing's decision.
"""

import asyncio
import re
import ssl
from collections import deque
from typing import Final
from urllib.parse import urlsplit

from gateway.domain.http_rules import HeaderList
from gateway.http.bodies import BodySource
from gateway.http.engine_connection import EngineConnection
from gateway.http.engine_response import EngineResponse
from gateway.http.errors import ConnectFailed, EngineGone
from gateway.http.exchange import Exchange
from gateway.http.limits import ClientLimits

_TARGET: Final = re.compile(r"/[!-~]*")

INLINE_BODY: Final = 256 * 1024
"""A body up to this goes out with its head in one write."""


class EngineClient:
    """Connections to engines, pooled by endpoint.

    Used by one event loop only. `ssl_context` serves endpoints that begin with https://.
    """

    def __init__(
        self, limits: ClientLimits | None = None, *, ssl_context: ssl.SSLContext | None = None
    ) -> None:
        self._limits = limits or ClientLimits()
        self._ssl = ssl_context
        self._pools: dict[str, _Pool] = {}
        self._closed = False

    async def request(
        self,
        endpoint: str,
        method: str,
        target: str,
        headers: HeaderList,
        body: bytes | BodySource | None = None,
        *,
        exchange: Exchange | None = None,
    ) -> EngineResponse:
        """The engine's answer once its head is complete; the body is the caller's to consume.

        `endpoint` is a base URL, `target` path and query, `headers` those to send besides Host and
        framing. Cancelling it closes the connection. Raises ConnectFailed; EngineGone with
        before_first_byte; BadEngineAnswer; RequestError when the client's own body breaks while it
        is passed on.
        """
        exchange = exchange or Exchange()
        pool = self._pool(endpoint)
        head, inline, source = _render(pool.host_header, method, target, headers, body)
        connection = pool.take()
        if connection is not None:
            try:
                return await self._exchange(connection, exchange, method, head, inline, source)
            except EngineGone as gone:
                written = exchange.written_at
                if (
                    gone.aborted
                    or not connection.saw_nothing
                    or written is None
                    or pool.loop.time() - written > self._limits.stale_s
                ):
                    raise
            # It was closed before it saw the request; its pool mates are as old.
            pool.drop_older_than(connection.free_since)
        connection = await pool.connect(exchange)
        return await self._exchange(connection, exchange, method, head, inline, source)

    def forget(self, endpoint: str) -> None:
        """Closes the idle connections of an endpoint that is gone."""
        pool = self._pools.pop(endpoint, None)
        if pool is not None:
            pool.close()

    async def close(self) -> None:
        """Closes all connections, running exchanges too, and waits until they are closed."""
        self._closed = True
        pools = list(self._pools.values())
        self._pools.clear()
        for pool in pools:
            pool.close()
        for pool in pools:
            await pool.wait_closed()

    @property
    def open_connections(self) -> int:
        """Connections to engines, idle ones included."""
        return sum(len(pool.connections) for pool in self._pools.values())

    # -- inside --------------------------------------------------------------------------------

    def _pool(self, endpoint: str) -> "_Pool":
        pool = self._pools.get(endpoint)
        if pool is None:
            if self._closed:
                raise ConnectFailed("this gateway is closing")
            pool = self._pools[endpoint] = _Pool(endpoint, self._limits, self._ssl)
        return pool

    async def _exchange(
        self,
        connection: EngineConnection,
        exchange: Exchange,
        method: str,
        head: bytes,
        inline: bytes,
        source: BodySource | None,
    ) -> EngineResponse:
        try:
            answer = connection.start(exchange, method, head + inline, whole=source is None)
            if source is not None:
                await _send_body(connection, source)
            return await answer
        except BaseException:
            # Also on cancellation: an engine that goes on computing for nobody is what we prevent.
            exchange.bind(None)
            connection.close()
            raise


async def _send_body(connection: EngineConnection, source: BodySource) -> None:
    """Writes a large or still arriving body; stops when the engine answers before its end."""
    length = source.length
    blocks = source.replay()
    try:
        async for block in blocks:
            piece = block if length is not None else b"%x\r\n%b\r\n" % (len(block), block)
            if not await connection.send(piece):
                return
        if length is None and not await connection.send(b"0\r\n\r\n"):
            return
        connection.sent()
    finally:
        await blocks.aclose()  # pyright: ignore[reportAttributeAccessIssue]


def _render(
    host: bytes,
    method: str,
    target: str,
    headers: HeaderList,
    body: bytes | BodySource | None,
) -> tuple[bytes, bytes, BodySource | None]:
    """The head, a body small enough to go with it, and the source of any other body.

    Raises ValueError for a target or header that would split the head.
    """
    if _TARGET.fullmatch(target) is None:
        raise ValueError(f"not a request target: {target!r}")
    lines = [b"%b %b HTTP/1.1" % (method.encode("ascii"), target.encode("ascii")), host]
    lines.extend([b"%b: %b" % header for header in headers])
    inline = b""
    source: BodySource | None = None
    if isinstance(body, bytes):
        inline = body
    elif body is not None:
        whole = body.in_memory()
        if whole is not None and len(whole) <= INLINE_BODY:
            inline = whole
        else:
            source = body
    if source is not None and source.length is None:
        lines.append(b"transfer-encoding: chunked")
    elif source is not None:
        lines.append(b"content-length: %d" % (source.length or 0))
    elif inline or method not in ("GET", "HEAD", "DELETE", "OPTIONS"):
        lines.append(b"content-length: %d" % len(inline))
    head = b"\r\n".join(lines)
    # One look over the whole: a value with a line end in it would begin a second request.
    joints = len(lines) - 1
    if head.count(b"\n") != joints or head.count(b"\r") != joints:
        raise ValueError("a header of the request holds a line end")
    return head + b"\r\n\r\n", inline, source


class _Pool:
    """The connections to one endpoint; the most recently used is taken first."""

    def __init__(
        self, endpoint: str, limits: ClientLimits, ssl_context: ssl.SSLContext | None
    ) -> None:
        parts = urlsplit(endpoint)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ConnectFailed(f"not the base URL of an engine: {endpoint!r}")
        if parts.scheme == "https" and ssl_context is None:
            raise ConnectFailed("this gateway has no TLS settings for engines")
        self._host = parts.hostname
        self._port = parts.port or (443 if parts.scheme == "https" else 80)
        self._ssl = ssl_context if parts.scheme == "https" else None
        self._limits = limits
        self._idle: deque[EngineConnection] = deque()
        self._closing = False
        self._all_closed: asyncio.Future[None] | None = None
        self.loop = asyncio.get_running_loop()
        self.host_header = b"host: " + parts.netloc.rpartition("@")[2].encode("ascii")
        self.connections: set[EngineConnection] = set()

    def take(self) -> EngineConnection | None:
        """A connection that is open as far as we know, reserved for the caller."""
        oldest = self.loop.time() - self._limits.idle_s
        while self._idle:
            connection = self._idle.pop()
            if connection.usable and connection.free_since >= oldest:
                return connection
            connection.close()
        return None

    async def connect(self, exchange: Exchange) -> EngineConnection:
        """A new connection; raises ConnectFailed, or EngineGone when the exchange was aborted."""
        if exchange.aborted is not None:
            raise EngineGone(exchange.aborted, before_first_byte=True, aborted=True)
        attempt = self.loop.create_task(
            self.loop.create_connection(
                lambda: EngineConnection(self.loop, self._limits, self._free, self._lost),
                self._host,
                self._port,
                ssl=self._ssl,
            )
        )
        exchange.bind(lambda _reason: _cancel(attempt))
        try:
            async with asyncio.timeout(self._limits.connect_timeout_s or None):
                _, connection = await attempt
        except TimeoutError:
            raise ConnectFailed(
                f"no connection to the engine within {self._limits.connect_timeout_s:g} s"
            ) from None
        except asyncio.CancelledError:
            if not attempt.cancel() and not attempt.cancelled() and not attempt.exception():
                attempt.result()[1].close()  # it succeeded in the same moment
            if exchange.aborted is not None and not _being_cancelled():
                raise EngineGone(exchange.aborted, before_first_byte=True, aborted=True) from None
            raise
        except OSError as problem:
            raise ConnectFailed(f"no connection to the engine: {problem}") from None
        finally:
            exchange.bind(None)
        self.connections.add(connection)
        if exchange.aborted is not None:  # in the very moment the connection stood
            connection.close()
            raise EngineGone(exchange.aborted, before_first_byte=True, aborted=True)
        if self._closing or connection.closed:
            connection.close()
            raise ConnectFailed("the connection to the engine closed at once")
        return connection

    def drop_older_than(self, moment: float) -> None:
        """Closes idle connections that were last used before `moment`."""
        for connection in list(self._idle):
            if connection.free_since <= moment:
                self._idle.remove(connection)
                connection.close()

    def close(self) -> None:
        """Closes every connection."""
        self._closing = True
        self._idle.clear()
        for connection in list(self.connections):
            connection.close()

    async def wait_closed(self) -> None:
        """Returns when the last connection's transport is gone."""
        if self.connections:
            self._all_closed = self.loop.create_future()
            await self._all_closed

    def _free(self, connection: EngineConnection) -> None:
        if self._closing:
            connection.close()
            return
        self._idle.append(connection)
        if len(self._idle) > self._limits.idle_per_endpoint:
            self._idle.popleft().close()

    def _lost(self, connection: EngineConnection) -> None:
        self.connections.discard(connection)
        if connection in self._idle:
            self._idle.remove(connection)
        waiter = self._all_closed
        if waiter is not None and not self.connections and not waiter.done():
            waiter.set_result(None)


def _cancel(task: "asyncio.Task[object]") -> None:
    task.cancel()


def _being_cancelled() -> bool:
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0
