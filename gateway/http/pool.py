"""The connections to one endpoint: kept ones, and those being made for requests that wait for one.

Whoever asks gets one connection or one error, and may give up at any moment; a connection nobody wants
any more is closed. It sends nothing and retries nothing.
"""

import asyncio
import errno
import ssl
from collections import deque
from urllib.parse import urlsplit

from gateway.http.engine_connection import EngineConnection
from gateway.http.errors import ConnectFailed, EngineGone, NoDescriptors
from gateway.http.exchange import Exchange
from gateway.http.limits import ClientLimits


class Opening:
    """A connection being made: `made` is its end, once; whoever asked may be gone by then."""

    __slots__ = ("began", "deadline", "made", "task")

    def __init__(self, made: "asyncio.Future[EngineConnection]") -> None:
        self.made = made
        self.deadline = 0.0
        self.began = False
        self.task: asyncio.Task[None] | None = None

    def fail(self, error: Exception) -> None:
        """Nobody gets a connection from it any more; it is closed if it comes to stand."""
        if self.made.done():
            return
        self.made.set_exception(error)
        # Whoever asked may have been cancelled and never look.
        self.made.exception()
        self._stop()

    def abort(self, reason: str) -> None:
        """The exchange was aborted."""
        self.fail(EngineGone(reason, before_first_byte=True, aborted=True))

    def give_up(self) -> None:
        """Whoever asked is gone."""
        made = self.made
        if made.done() and not made.cancelled() and made.exception() is None:
            made.result().close()  # it stood in the same moment
        made.cancel()
        self._stop()

    def _stop(self) -> None:
        # A task that has not begun sees for itself that nobody wants it, and clears up.
        if self.task is not None and self.began:
            self.task.cancel()


class Pool:
    """The connections to one endpoint; the most recently used is taken first.

    Raises ConnectFailed for what is no base URL of an engine.
    """

    def __init__(
        self, endpoint: str, limits: ClientLimits, ssl_context: ssl.SSLContext | None
    ) -> None:
        try:
            parts = urlsplit(endpoint)
            host, port = parts.hostname, parts.port
            self.host = parts.netloc.rpartition("@")[2].encode("ascii")
        except ValueError as problem:
            raise ConnectFailed(f"not the base URL of an engine: {endpoint!r}") from problem
        if parts.scheme not in ("http", "https") or not host:
            raise ConnectFailed(f"not the base URL of an engine: {endpoint!r}")
        if parts.scheme == "https" and ssl_context is None:
            raise ConnectFailed("this gateway has no TLS settings for engines")
        self._host = host
        self._port = port or (443 if parts.scheme == "https" else 80)
        self._ssl = ssl_context if parts.scheme == "https" else None
        self._limits = limits
        self._idle: deque[EngineConnection] = deque()
        self._asked: list[Opening] = []  # begun together in the loop's next round
        self._openings: dict[Opening, None] = {}  # begun, in order of their deadlines
        self._timer: asyncio.TimerHandle | None = None
        self._closing = False
        self._all_closed: asyncio.Future[None] | None = None
        self.loop = asyncio.get_running_loop()
        self.connections: set[EngineConnection] = set()

    def take(self) -> EngineConnection | None:
        """A connection that is open as far as we know, reserved for the caller."""
        if not self._idle:
            return None
        oldest = self.loop.time() - self._limits.idle_s
        while self._idle:
            connection = self._idle.pop()
            if connection.usable and connection.free_since >= oldest:
                return connection
            connection.close()
        return None

    async def connect(self, exchange: Exchange) -> EngineConnection:
        """A new connection; raises ConnectFailed, NoDescriptors, or EngineGone when the exchange was aborted.

        Requests that are woken together are first all woken; then their connections are begun.
        """
        exchange.check()
        if self._closing:
            raise ConnectFailed("this gateway is closing")
        opening = Opening(self.loop.create_future())
        if not self._asked:
            self.loop.call_soon(self._begin)
        self._asked.append(opening)
        exchange.bind(opening.abort)
        try:
            connection = await opening.made
        except asyncio.CancelledError:
            opening.give_up()
            raise
        finally:
            exchange.bind(None)
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
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        self._idle.clear()
        for opening in (*self._asked, *self._openings):
            opening.fail(ConnectFailed("the connection to the engine closed at once"))
        for connection in list(self.connections):
            connection.close()

    async def wait_closed(self) -> None:
        """Returns when the last connection's transport is gone."""
        tasks = [o.task for o in self._openings if o.task is not None]
        if tasks:
            await asyncio.wait(tasks)
        if self.connections:
            self._all_closed = self.loop.create_future()
            await self._all_closed

    # -- inside --------------------------------------------------------------------------------

    def _begin(self) -> None:
        """Begins all connections asked for since the last round."""
        asked, self._asked = self._asked, []
        deadline = self.loop.time() + self._limits.connect_timeout_s
        for opening in asked:
            opening.deadline = deadline
            self._openings[opening] = None
            opening.task = self.loop.create_task(self._open(opening))
        if self._limits.connect_timeout_s and self._timer is None and not self._closing:
            self._watch()

    async def _open(self, opening: Opening) -> None:
        opening.began = True
        if opening.made.done():
            del self._openings[opening]
            return

        def stands(connection: EngineConnection) -> None:
            # Told by the connection itself, which is two rounds of the loop before the line below ends.
            self.connections.add(connection)
            if opening.made.done():
                connection.close()
            else:
                opening.made.set_result(connection)

        connection = EngineConnection(self.loop, self._limits, self._free, self._lost, stands)
        try:
            await self.loop.create_connection(
                lambda: connection, self._host, self._port, ssl=self._ssl
            )
        except (OSError, UnicodeError) as problem:
            # The second: of a name that no resolver can be asked for.
            if isinstance(problem, OSError) and problem.errno in (errno.EMFILE, errno.ENFILE):
                self._end(opening, NoDescriptors())
            else:
                self._end(opening, ConnectFailed(f"no connection to the engine: {problem}"))
        except asyncio.CancelledError:
            # Cancelled by whoever failed it, or by the end of everything. uvloop closes one that stood by then and
            # tells it nothing: it would be among ours for ever, and the end of the gateway wait for it.
            self._lost(connection)
            self._end(opening, ConnectFailed("the attempt to connect was given up"))
            raise
        except Exception as problem:  # noqa: BLE001 - the request that asked raises it
            self._end(opening, problem)
        finally:
            del self._openings[opening]

    def _end(self, opening: Opening, error: Exception) -> None:
        opening.task = None
        opening.fail(error)

    def _watch(self) -> None:
        """One timer for all openings: they have the same time, so the first to begin is the first due."""
        self._timer = None
        now = self.loop.time()
        for opening in list(self._openings):
            if opening.deadline > now:
                self._timer = self.loop.call_at(opening.deadline, self._watch)
                return
            opening.fail(
                ConnectFailed(
                    f"no connection to the engine within {self._limits.connect_timeout_s:g} s"
                )
            )

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
