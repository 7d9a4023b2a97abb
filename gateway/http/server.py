"""Listens for clients and ends connections that outlive their bounds; it knows no request.

One sweep looks at all connections instead of a timer for each: a timer per request would cost more
than the request's parsing.
"""

import asyncio
import contextlib
import logging
import os
import resource
import socket
from email.utils import formatdate
from typing import Final

from gateway.http.bodies import BodyBudget
from gateway.http.due import DueBodies
from gateway.http.errands import Take, take_none
from gateway.http.limits import ServerLimits
from gateway.http.messages import Handler
from gateway.http.server_protocol import ServerProtocol
from schemas.settings import MIB

log = logging.getLogger(__name__)

DEFAULT_BUDGET: Final = 1024 * MIB
BACKLOG: Final = 1024


class Server:
    """A listening socket and its connections; made by `serve`.

    `active`: requests whose handler is running. `port`: the one bound.
    """

    def __init__(
        self, handler: Handler, take: Take, limits: ServerLimits, budget: BodyBudget
    ) -> None:
        self.handler = handler
        self.take = take
        self.limits = limits
        self.budget = budget
        self.draining = False
        self.date = formatdate(usegmt=True).encode()
        self.active = 0
        self.port = 0
        self.connections: set[ServerProtocol] = set()
        self._most = limits.connections or client_connections()
        self._crowded_out = 0
        self._server: asyncio.Server | None = None
        self._sweeper: asyncio.TimerHandle | None = None
        self._quiet: asyncio.Future[None] | None = None
        self._empty: asyncio.Future[None] | None = None
        self._moved: asyncio.Event | None = None
        self._loop = asyncio.get_running_loop()
        self.due = None if take is take_none else DueBodies(self._loop)

    async def start(self, host: str, port: int, sock: socket.socket | None) -> None:
        """Opens the port; OSError when it is taken."""

        def connection() -> ServerProtocol:
            return ServerProtocol(self, self._loop)

        if sock is not None:
            self._server = await self._loop.create_server(connection, sock=sock, backlog=BACKLOG)
        else:
            self._server = await self._loop.create_server(connection, host, port, backlog=BACKLOG)
        self.port = self._server.sockets[0].getsockname()[1]
        for listener in self._server.sockets:
            _keep_asking(listener.fileno())
        self._sweep()

    async def hand_over(self, timeout_s: float) -> None:
        """Leaves the port to others who listen on it already, so that no client is turned away.

        Every answer from now on is the last on its connection. Idle connections stay open meanwhile: a request may
        be on its way on them. Returns once none is idle, or after `timeout_s`; `drain` comes behind it.
        """
        self.draining = True
        self._stop_listening()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                self._moved = moved = asyncio.Event()
                while not all(connection.busy for connection in self.connections):
                    await moved.wait()
                    moved.clear()
        self._moved = None

    async def drain(self, timeout_s: float) -> int:
        """Stops listening, ends idle connections and waits for running requests, and until clients have taken what was
        answered.

        Those that outlive `timeout_s` are cut: not yet answered ones get 503 `draining`, streams
        break. Returns how many were cut. Afterwards everything is closed.
        """
        deadline = self._loop.time() + timeout_s
        self.draining = True
        self._stop_listening()
        for connection in list(self.connections):
            connection.close_when_idle()
        cut = 0
        if self.active:
            self._quiet = self._loop.create_future()
            try:
                await asyncio.wait_for(self._quiet, timeout_s)
            except TimeoutError:
                cut = sum(connection.cut() for connection in list(self.connections))
                if self.active:
                    self._quiet = self._loop.create_future()
                    await self._quiet
            finally:
                self._quiet = None
        # What is cut is told so as well, which is read no later than any other answer behind which a connection ends.
        await self._emptied(max(deadline - self._loop.time(), self.limits.linger_s))
        await self.close()
        return cut

    async def close(self) -> None:
        """Closes the port and every connection at once."""
        self.draining = True
        self._stop_listening()
        for connection in list(self.connections):
            connection.cut()
        if self.connections:
            self._empty = self._loop.create_future()
            self._reap_at = self._loop.call_later(self.limits.linger_s + 1, self._abort_all)
            try:
                await self._empty
            finally:
                self._reap_at.cancel()
        if self._sweeper is not None:
            self._sweeper.cancel()
            self._sweeper = None
        if self.due is not None:
            self.due.close()
        if self._server is not None:
            await self._server.wait_closed()

    # -- for connections -----------------------------------------------------------------------

    def opened(self, connection: ServerProtocol) -> None:
        """A client connected."""
        self.connections.add(connection)
        if self._empty is not None:
            # Accepted in the moment the port was closed.
            connection.close_when_idle()
        if 0 < self._most < len(self.connections):
            self._make_room(connection)

    def closed(self, connection: ServerProtocol) -> None:
        """Its connection is gone."""
        self.connections.discard(connection)
        if self._moved is not None:
            self._moved.set()
        if not self.connections and self._empty is not None and not self._empty.done():
            self._empty.set_result(None)

    def begun(self) -> None:
        """A handler starts."""
        self.active += 1
        if self._moved is not None:
            self._moved.set()

    def done(self) -> None:
        """A handler ended."""
        self.active -= 1
        if not self.active and self._quiet is not None and not self._quiet.done():
            self._quiet.set_result(None)

    # -- inside --------------------------------------------------------------------------------

    def _stop_listening(self) -> None:
        if self._server is not None:
            self._server.close()

    async def _emptied(self, timeout_s: float) -> None:
        """Waits until every connection has ended by itself, at most so long; idle ones do at once."""
        for connection in list(self.connections):
            connection.close_when_idle()
        if self.connections:
            self._empty = self._loop.create_future()
            await asyncio.wait((self._empty,), timeout=timeout_s)
            self._empty = None

    def _make_room(self, newest: ServerProtocol) -> None:
        """Ends a twentieth of the idle connections, those that would end first; without any, the newest."""
        spare = [c for c in self.connections if c.spare and c is not newest]
        spare.sort(key=lambda connection: connection.deadline)
        ended = spare[: len(spare) // 20 + 1] or [newest]
        for connection in ended:
            connection.abort()
            # Its end is reported later; those that come until then must not end others for it.
            self.connections.discard(connection)
        self._crowded_out += len(ended)

    def _abort_all(self) -> None:
        for connection in list(self.connections):
            connection.abort()

    def _sweep(self) -> None:
        limits = self.limits
        shortest = min(
            bound
            for bound in (
                4.0,
                limits.head_timeout_s,
                limits.idle_timeout_s,
                limits.body_idle_timeout_s,
                limits.write_stall_timeout_s,
                limits.linger_s,
            )
            if bound > 0
        )
        # First of all: whatever goes wrong with one connection, the others keep their bounds.
        self._sweeper = self._loop.call_later(shortest / 4, self._sweep)
        self.date = formatdate(usegmt=True).encode()
        now = self._loop.time()
        if self._crowded_out:
            log.warning("too many connections", extra={"ended": self._crowded_out})
            self._crowded_out = 0
        for connection in list(self.connections):
            if connection.deadline and connection.deadline <= now:
                connection.expire(now)


def client_connections() -> int:
    """How many connections of clients this process has descriptors for; it takes all it may have of them first.

    Two thirds are for clients: a third stays for engines and everything else.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        with contextlib.suppress(ValueError, OSError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
        soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return 0 if soft == resource.RLIM_INFINITY else max(soft * 2 // 3, 1)


def _keep_asking(descriptor: int) -> None:
    """Connections accepted on this listener ask after clients that vanished without a word, every minute."""
    with socket.socket(fileno=os.dup(descriptor)) as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, 60)
        listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, 20)
        listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 3)


async def serve(
    handler: Handler,
    host: str,
    port: int,
    limits: ServerLimits | None = None,
    *,
    sock: socket.socket | None = None,
    budget: BodyBudget | None = None,
    take: Take = take_none,
) -> Server:
    """Serves `handler` on host and port (0 picks one), or on a listening `sock`; what `take` takes needs no handler.

    `budget` bounds all bodies together, 1 GiB by default. Raises OSError when the port is taken.
    """
    server = Server(handler, take, limits or ServerLimits(), budget or BodyBudget(DEFAULT_BUDGET))
    await server.start(host, port, sock)
    return server
