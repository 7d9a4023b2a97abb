"""Lets any worker of a gateway show the numbers of all: each serves its own page to the others on a local socket.

Nothing but a page for Prometheus is said there, and nothing is decided by it.
"""

import asyncio
import logging
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Final

from gateway.domain.workermetrics import merge

log = logging.getLogger("gateway.siblings")

PATIENCE_S: Final = 1.0
"""One that is silent for so long is left out of the page, and one that takes nothing for so long is left."""

MOST_BYTES: Final = 64 * 1024 * 1024
"""Above this a page is left out: half of one would spoil all of it."""

END: Final = b"# EOF\n"
"""What a page ends with, so that one that broke off can be told from a whole one."""


def folder_of(data: Path, gateway_id: str) -> Path:
    """Where the sockets of the workers of a gateway lie."""
    return data / "gateway" / gateway_id / "workers"


class Siblings:
    """The socket of worker `number` in `folder`, and what it knows of the others there. `pieces` are its own page."""

    def __init__(
        self, folder: Path, number: int, pieces: Callable[[], AsyncIterator[bytes]]
    ) -> None:
        self._folder = folder
        self._number = number
        self._pieces = pieces
        self._server: asyncio.Server | None = None

    async def open(self) -> None:
        """Serves from now on; where that cannot be, the others do not see these numbers, and that is all."""
        path = self._path(self._number)
        try:
            self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            path.unlink(missing_ok=True)  # Of a worker of this number that was killed.
            self._server = await asyncio.start_unix_server(self._asked, path)
            path.chmod(0o600)
        except OSError as problem:
            log.warning("other workers do not see this one's numbers", extra={"why": str(problem)})

    async def close(self) -> None:
        """Serves no more."""
        if self._server is not None:
            self._server.close()
            await self._server.wait_closed()
            self._path(self._number).unlink(missing_ok=True)

    async def page(self) -> bytes:
        """The numbers of all workers that answer, each under its label."""
        found = [int(p.stem) for p in self._folder.glob("*.sock") if p.stem.isdigit()]
        others = [n for n in sorted(found) if n != self._number]
        pages = await asyncio.gather(*(self._ask(n) for n in others))
        told = {n: page for n, page in zip(others, pages, strict=True) if page is not None}
        told[self._number] = b"".join([piece async for piece in self._pieces()])
        # Beside the loop: a page of thousands of models takes a second to put together.
        return await asyncio.to_thread(merge, told)

    def _path(self, number: int) -> Path:
        return self._folder / f"{number}.sock"

    async def _asked(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            async for piece in self._pieces():
                writer.write(piece)
                async with asyncio.timeout(PATIENCE_S):
                    await writer.drain()
            writer.write(END)
            async with asyncio.timeout(PATIENCE_S):
                await writer.drain()
        except (OSError, TimeoutError, asyncio.CancelledError):
            # It is gone, or does not read, or this process ends: of its task nobody hears, and one that is cancelled
            # would be told of as a fault of the library's.
            writer.transport.abort()
        finally:
            writer.close()

    async def _ask(self, number: int) -> bytes | None:
        """The whole page of another; None when it does not come."""
        try:
            async with asyncio.timeout(PATIENCE_S):
                reader, writer = await asyncio.open_unix_connection(self._path(number))
            try:
                return await _whole(reader)
            finally:
                writer.close()
        except (OSError, TimeoutError):
            return None


async def _whole(reader: asyncio.StreamReader) -> bytes | None:
    """All that comes, None when it does not end as a page does. Raises TimeoutError, OSError."""
    pieces: list[bytes] = []
    size = 0
    while size < MOST_BYTES:
        async with asyncio.timeout(PATIENCE_S):
            piece = await reader.read(65536)
        if not piece:
            page = b"".join(pieces)
            return page.removesuffix(END) if page.endswith(END) else None
        pieces.append(piece)
        size += len(piece)
    return None
