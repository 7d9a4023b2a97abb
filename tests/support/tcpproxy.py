"""Stands between a client and a server on TCP and breaks the line in chosen ways, on the test's event loop."""

import asyncio
import contextlib
from collections.abc import Callable
from types import TracebackType
from typing import Literal, Self

Direction = Literal["up", "down"]
"""`up` is towards the server."""


class TcpProxy:
    """`cut` and `restore` whole connections, `blackhole` a half-open line, `drop_next` single chunks.

    A chunk is what one read brought: on an idle line one message of the server.
    """

    def __init__(self, host: str, port: int) -> None:
        self._target = (host, port)
        self._server: asyncio.Server | None = None
        self._writers: set[asyncio.StreamWriter] = set()
        self._clients: set[asyncio.StreamWriter] = set()
        self._tasks: set[asyncio.Task[None]] = set()
        self._open = asyncio.Event()
        self._flowing: dict[Direction, asyncio.Event] = {
            "up": asyncio.Event(),
            "down": asyncio.Event(),
        }
        self._drops: dict[Direction, list[Callable[[bytes], bool]]] = {"up": [], "down": []}
        self.dropped: list[bytes] = []
        self.delay_s = 0.0
        self._cuts = 0
        self.accepted = 0
        self.port = 0
        self._open.set()
        for flowing in self._flowing.values():
            flowing.set()

    @property
    def url(self) -> str:
        return f"nats://127.0.0.1:{self.port}"

    async def start(self) -> None:
        self._server = await asyncio.start_server(self._accept, "127.0.0.1", 0)
        self.port = self._server.sockets[0].getsockname()[1]

    async def close(self) -> None:
        assert self._server is not None
        self._server.close()
        self.restore()
        await self._hang_up()
        await self._server.wait_closed()

    def cut(self) -> None:
        """Aborts every connection and hangs up on new ones until `restore`."""
        self._open.clear()
        self.cut_once()

    def cut_once(self) -> None:
        """Aborts every connection, one in the making too; new ones are let through."""
        self._cuts += 1
        for writer in list(self._writers):
            writer.transport.abort()

    def restore(self) -> None:
        """Lets everything through again."""
        self._open.set()
        for flowing in self._flowing.values():
            flowing.set()

    def blackhole(self, *directions: Direction) -> None:
        """Connections stay, bytes of that direction do not move until `restore`."""
        for direction in directions or ("up", "down"):
            self._flowing[direction].clear()

    def drop_next(
        self, direction: Direction, when: Callable[[bytes], bool] = lambda _: True
    ) -> None:
        """Swallows the next chunk for which `when` holds."""
        self._drops[direction].append(when)

    def inject_down(self, payload: bytes) -> None:
        """Writes bytes to the clients as if the server had."""
        for writer in self._clients:
            writer.write(payload)

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await self.close()

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if not self._open.is_set():
            writer.transport.abort()
            return
        cuts = self._cuts
        try:
            far_reader, far_writer = await asyncio.open_connection(*self._target)
        except OSError:
            writer.transport.abort()
            return
        if cuts != self._cuts:
            for end in (writer, far_writer):
                end.transport.abort()
            return
        self.accepted += 1
        self._writers |= {writer, far_writer}
        self._clients.add(writer)
        pumps = [
            asyncio.create_task(self._pump("up", reader, far_writer)),
            asyncio.create_task(self._pump("down", far_reader, writer)),
        ]
        self._tasks |= set(pumps)
        await asyncio.wait(pumps, return_when=asyncio.FIRST_COMPLETED)
        self._clients.discard(writer)
        for end in (writer, far_writer):
            self._writers.discard(end)
            end.transport.abort()
        for pump in pumps:
            pump.cancel()
        await asyncio.gather(*pumps, return_exceptions=True)
        self._tasks -= set(pumps)

    async def _pump(
        self, direction: Direction, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        with contextlib.suppress(OSError, asyncio.IncompleteReadError):
            while chunk := await reader.read(65536):
                await self._flowing[direction].wait()
                if self.delay_s:
                    await asyncio.sleep(self.delay_s)
                if self._dropped(direction, chunk):
                    continue
                writer.write(chunk)
                await writer.drain()

    def _dropped(self, direction: Direction, chunk: bytes) -> bool:
        for when in self._drops[direction]:
            if when(chunk):
                self._drops[direction].remove(when)
                self.dropped.append(chunk)
                return True
        return False

    async def _hang_up(self) -> None:
        for writer in list(self._writers):
            writer.transport.abort()
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
