"""Sends requests to engines over pooled connections, one small HTTP/1.1 client for the data path.

It retries in exactly one case, which no engine can notice: a kept connection turned out to be closed
already. Everything else is raised; where a request goes next is the routing's decision.
"""

import asyncio
import ssl

from gateway.domain.http_rules import HeaderList
from gateway.http.bodies import BodySource
from gateway.http.engine_connection import EngineConnection
from gateway.http.engine_response import EngineResponse
from gateway.http.errors import ConnectFailed, EngineGone
from gateway.http.exchange import Exchange
from gateway.http.limits import ClientLimits
from gateway.http.outgoing import Outgoing
from gateway.http.pool import Pool

Asking = tuple[EngineConnection, "asyncio.Future[EngineResponse]"]


class EngineClient:
    """Connections to engines, pooled by endpoint.

    Used by one event loop only. `ssl_context` serves endpoints that begin with https://.
    """

    def __init__(
        self, limits: ClientLimits | None = None, *, ssl_context: ssl.SSLContext | None = None
    ) -> None:
        self._limits = limits or ClientLimits()
        self._ssl = ssl_context
        self._pools: dict[str, Pool] = {}
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
        """Like `send`; `headers` are those to send besides Host and framing."""
        return await self.send(endpoint, Outgoing(method, target, headers, body), exchange=exchange)

    async def send(
        self,
        endpoint: str,
        outgoing: Outgoing,
        *,
        key: bytes | None = None,
        exchange: Exchange | None = None,
        asked: Asking | None = None,
    ) -> EngineResponse:
        """The engine's answer once its head is complete; the body is the caller's to consume.

        `endpoint` is a base URL, `key` the bearer token its engine asks for. `asked`: it was written to a kept
        connection already, whole, and this comes of it. Cancelling it closes the connection. Raises ConnectFailed;
        EngineGone with before_first_byte; BadEngineAnswer; RequestError when the client's own body breaks while it is
        passed on.
        """
        exchange = exchange or Exchange()
        pool = self._pools.get(endpoint) or self._pool(endpoint)
        connection = self._kept(pool, exchange) if asked is None else asked[0]
        if connection is not None:
            try:
                if asked is not None:
                    return await _answer(connection, exchange, asked[1])
                return await self._exchange(connection, exchange, outgoing, pool.host, key)
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
        return await self._exchange(connection, exchange, outgoing, pool.host, key)

    def take(self, endpoint: str) -> tuple[EngineConnection, bytes] | None:
        """A kept connection to `endpoint`, reserved for the caller, and the Host to name; None: one must be made."""
        pool = self._pools.get(endpoint)
        connection = None if pool is None else pool.take()
        return None if pool is None or connection is None else (connection, pool.host)

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

    def _pool(self, endpoint: str) -> Pool:
        if self._closed:
            raise ConnectFailed("this gateway is closing")
        pool = self._pools[endpoint] = Pool(endpoint, self._limits, self._ssl)
        return pool

    def _kept(self, pool: Pool, exchange: Exchange) -> EngineConnection | None:
        connection = pool.take()
        if connection is not None and exchange.aborted is not None:
            connection.close()
            raise EngineGone(exchange.aborted, before_first_byte=True, aborted=True)
        return connection

    async def _exchange(
        self,
        connection: EngineConnection,
        exchange: Exchange,
        outgoing: Outgoing,
        host: bytes,
        key: bytes | None,
    ) -> EngineResponse:
        source = outgoing.source
        try:
            answer = connection.start(
                exchange, outgoing.method, outgoing.block(host, key), whole=source is None
            )
            if source is not None:
                await _send_body(connection, source)
            return await answer
        except BaseException:
            _give_up(connection, exchange)
            raise


async def _answer(
    connection: EngineConnection, exchange: Exchange, answer: "asyncio.Future[EngineResponse]"
) -> EngineResponse:
    """What comes of a request that is out already."""
    try:
        return await answer
    except BaseException:
        _give_up(connection, exchange)
        raise


def _give_up(connection: EngineConnection, exchange: Exchange) -> None:
    """Also on cancellation: an engine that goes on computing for nobody is what we prevent."""
    exchange.bind(None)
    connection.close()


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
