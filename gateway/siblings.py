"""Lets any worker of a gateway show the numbers of all: each serves its own page to the others on a local socket.

Nothing but a page for Prometheus is said there, and nothing is decided by it.
"""

import asyncio
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Final

from gateway.domain.workermetrics import merge

log = logging.getLogger("gateway.siblings")

PATIENCE_S: Final = 1.0
"""One that does not answer within this is left out of the page; one that asks and does not read is left."""

MOST_BYTES: Final = 8 * 1024 * 1024


def folder_of(data: Path, gateway_id: str) -> Path:
    """Where the sockets of the workers of a gateway lie."""
    return data / "gateway" / gateway_id / "workers"


class Siblings:
    """The socket of worker `number` in `folder`, and what it knows of the others there."""

    def __init__(self, folder: Path, number: int, render: Callable[[], bytes]) -> None:
        self._folder = folder
        self._number = number
        self._render = render
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
        told = {n: page for n, page in zip(others, pages, strict=True) if page}
        return merge({**told, self._number: self._render()})

    def _path(self, number: int) -> Path:
        return self._folder / f"{number}.sock"

    async def _asked(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            async with asyncio.timeout(PATIENCE_S):
                writer.write(self._render())
                await writer.drain()
        except (OSError, TimeoutError):
            # It is gone, or does not read.
            writer.transport.abort()
        finally:
            writer.close()

    async def _ask(self, number: int) -> bytes:
        """The page of another, or nothing when it does not answer."""
        try:
            async with asyncio.timeout(PATIENCE_S):
                reader, writer = await asyncio.open_unix_connection(self._path(number))
                try:
                    return await _whole(reader)
                finally:
                    writer.close()
        except (OSError, TimeoutError):
            return b""


async def _whole(reader: asyncio.StreamReader) -> bytes:
    pieces: list[bytes] = []
    size = 0
    while size < MOST_BYTES and (piece := await reader.read(65536)):
        pieces.append(piece)
        size += len(piece)
    return b"".join(pieces)
