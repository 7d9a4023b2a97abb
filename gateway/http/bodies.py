"""Keeps a request's body so that it can be sent again: small in memory, large in an unlinked file.

All bodies of a gateway share one budget. A body is filled by the server's protocol at the network's
pace and read any number of times; it never decides what to answer when it is too large, it raises.
"""

import asyncio
import os
import tempfile
from collections.abc import AsyncIterator, Callable, Sequence
from io import FileIO
from typing import Final, Protocol

from gateway.http.errors import BodyTooLarge, BudgetFull, RequestError

BLOCK: Final = 256 * 1024
"""Bytes read from a spooled body at once."""

SMALL: Final = 4096
"""Blocks are put together up to this: a body in crumbs would cost fifty times its size in memory."""


class BodyBudget:
    """Bytes that all bodies of one gateway may keep together, in memory and in files."""

    __slots__ = ("limit_bytes", "used_bytes")

    def __init__(self, limit_bytes: int) -> None:
        self.limit_bytes = limit_bytes
        self.used_bytes = 0

    def take(self, count: int) -> bool:
        """Reserves `count` bytes; False, and nothing reserved, when they do not fit."""
        if self.used_bytes + count > self.limit_bytes:
            return False
        self.used_bytes += count
        return True

    def give(self, count: int) -> None:
        """Returns what was taken."""
        self.used_bytes -= count
        assert self.used_bytes >= 0, "a body gave back more than it took"


class BodySource(Protocol):
    """What can be sent to an engine, once or again."""

    @property
    def length(self) -> int | None:
        """Total bytes when known already; None sends it chunked."""
        ...

    @property
    def is_held(self) -> bool:
        """Whether `in_memory` gives the whole body."""
        ...

    def in_memory(self) -> bytes | None:
        """The whole body when it is complete and small."""
        ...

    def replay(self) -> AsyncIterator[bytes]:
        """The body from its first byte, in blocks."""
        ...


class Body:
    """One request's body. Made and filled by the server; a handler only reads and releases.

    `size`: bytes received so far. `declared`: Content-Length, None for a chunked body.
    `complete`: the end was received. Readers raise RequestError when the body broke.
    """

    __slots__ = (
        "_blocks",
        "_budget",
        "_closing",
        "_error",
        "_file",
        "_held",
        "_io",
        "_limit",
        "_loop",
        "_memory_limit",
        "_on_room",
        "_on_wanted",
        "_spool_dir",
        "_spooled",
        "_waiters",
        "_writing",
        "complete",
        "declared",
        "released",
        "size",
    )

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        *,
        declared: int | None,
        limit_bytes: int,
        memory_bytes: int,
        budget: BodyBudget,
        spool_dir: str | None = None,
        on_wanted: Callable[[], None] | None = None,
        on_room: Callable[[], None] | None = None,
    ) -> None:
        self._loop = loop
        self._limit = limit_bytes
        self._memory_limit = memory_bytes
        self._budget = budget
        self._spool_dir = spool_dir
        self._on_wanted = on_wanted
        self._on_room = on_room
        self._blocks: list[bytes] = []
        self._held = 0  # bytes in _blocks
        self._spooled = 0  # bytes in the file; _blocks go on from there
        self._file: FileIO | None = None
        self._io = 0  # operations on the file in threads: it must not be closed under them
        self._writing = False
        self._closing = False
        self._error: RequestError | None = None
        self._waiters: list[asyncio.Future[None]] = []
        self.declared = declared
        self.size = 0
        self.complete = False
        self.released = False
        if declared is not None and declared > limit_bytes:
            self._error = BodyTooLarge(limit_bytes)

    # -- filled by the server ------------------------------------------------------------------

    @property
    def failed(self) -> bool:
        """Whether it broke; nothing is kept of what follows."""
        return self._error is not None

    @property
    def crowded(self) -> bool:
        """Whether the disk is behind the network, so that reading should pause until `on_room`."""
        return self._held > 4 * self._memory_limit

    def feed(self, block: bytes) -> None:
        """The next bytes; a body over the cap or the budget fails and keeps nothing more."""
        if self._error is not None or self.released:
            return
        size = self.size + len(block)
        if size > self._limit:
            self.fail(BodyTooLarge(self._limit))
            return
        if not self._budget.take(len(block)):
            self.fail(BudgetFull())
            return
        self.size = size
        blocks = self._blocks
        if blocks and len(blocks[-1]) + len(block) <= SMALL and not self._writing:
            blocks[-1] += block
        else:
            blocks.append(block)
        self._held += len(block)
        if self._held > self._memory_limit:
            self._spool()
        if self._waiters:
            self._wake()

    def fill(self, whole: bytes) -> None:
        """All of it at once, before anybody looks at it."""
        if self._error is None and len(whole) <= min(self._limit, self._memory_limit):
            if self._budget.take(len(whole)):
                self.size = self._held = len(whole)
                self._blocks.append(whole)
                self.complete = True
            else:
                self.fail(BudgetFull())
        else:
            self.feed(whole)
            self.end()

    def end(self) -> None:
        """All bytes were fed."""
        if self._error is None:
            self.complete = True
        if self._waiters:
            self._wake()

    def fail(self, error: RequestError) -> None:
        """Readers get `error` from now on; what was kept is given back."""
        if self._error is None and not self.complete:
            self._error = error
            self._drop()
            self._wake()

    def another(self, *, on_room: Callable[[], None]) -> "Body":
        """An empty one under the same bounds and budget, for who makes another body of this one."""
        return Body(
            self._loop,
            declared=None,
            limit_bytes=self._limit,
            memory_bytes=self._memory_limit,
            budget=self._budget,
            spool_dir=self._spool_dir,
            on_room=on_room,
        )

    # -- read by the handler -------------------------------------------------------------------

    @property
    def length(self) -> int | None:
        """Total bytes when known already."""
        return self.size if self.complete else self.declared

    @property
    def is_held(self) -> bool:
        """Whether it is complete and was never spooled."""
        return self.complete and not (self._spooled or self._writing or self.released)

    def in_memory(self) -> bytes | None:
        """The whole body when it is complete and was never spooled, else None."""
        if not self.is_held:
            return None
        if len(self._blocks) > 1:
            self._blocks = [b"".join(self._blocks)]
        return self._blocks[0] if self._blocks else b""

    async def prefix(self, n: int) -> bytes:
        """The first `n` bytes, or all of a shorter body, as soon as they are there."""
        while self.size < n and not self.complete:
            await self._progress()
        self._check()
        return await self._read(0, min(n, self.size))

    async def read_all(self) -> bytes:
        """The whole body as one bytes object, once it is complete."""
        while not self.complete:
            await self._progress()
        blocks = self._blocks
        if len(blocks) == 1 and self._held == self.size and not self.released:
            return blocks[0]
        whole = self.in_memory()
        if whole is not None:
            return whole
        self._check()
        return await self._read(0, self.size)

    async def replay(self) -> AsyncIterator[bytes]:
        """The body from its first byte in blocks, as it comes; any number of times."""
        offset = 0
        while True:
            self._check()
            if offset < self.size:
                block = await self._read(offset, min(offset + BLOCK, self.size))
                offset += len(block)
                yield block
            elif self.complete:
                return
            else:
                await self._progress()

    def release(self) -> None:
        """Gives memory, file and budget back; readers fail from now on. Safe to call twice."""
        if not self.released:
            self.released = True
            self._drop()
            if self._waiters:
                self._wake()

    # -- inside --------------------------------------------------------------------------------

    def _check(self) -> None:
        if self._error is not None:
            raise self._error
        if self.released:
            raise RuntimeError("the body was released")

    async def _progress(self) -> None:
        """Waits until more was received, or it ended; raises when it broke."""
        self._check()
        if self._on_wanted is not None:
            wanted, self._on_wanted = self._on_wanted, None
            wanted()
        waiter: asyncio.Future[None] = self._loop.create_future()
        self._waiters.append(waiter)
        try:
            await waiter
        finally:
            if waiter in self._waiters:
                self._waiters.remove(waiter)
        self._check()

    def _wake(self) -> None:
        waiters, self._waiters = self._waiters, []
        for waiter in waiters:
            if not waiter.done():
                waiter.set_result(None)

    async def _read(self, start: int, stop: int) -> bytes:
        """Bytes [start, stop), all of them received already."""
        pieces: list[bytes] = []
        while start < stop:
            if start < self._spooled:
                count = min(stop, self._spooled) - start
                piece = await self._pread(count, start)
                self._check()
            else:
                piece = self._from_memory(start, stop)
            pieces.append(piece)
            start += len(piece)
        return pieces[0] if len(pieces) == 1 else b"".join(pieces)

    def _from_memory(self, start: int, stop: int) -> bytes:
        position = self._spooled
        pieces: list[bytes] = []
        for block in self._blocks:
            end = position + len(block)
            if end > start:
                if position >= start and end <= stop:
                    pieces.append(block)
                else:
                    pieces.append(block[max(0, start - position) : stop - position])
                if end >= stop:
                    break
            position = end
        return pieces[0] if len(pieces) == 1 else b"".join(pieces)

    async def _pread(self, count: int, offset: int) -> bytes:
        assert self._file is not None
        self._io += 1
        try:
            piece = await self._loop.run_in_executor(
                None, os.pread, self._file.fileno(), count, offset
            )
        finally:
            self._io -= 1
            self._close_when_unused()
        if not piece:
            raise RequestError(500, "internal_error", "The kept request body is gone.", close=True)
        return piece

    def _spool(self) -> None:
        """Moves what is in memory to the file, in a thread, one write at a time."""
        if self._writing:
            return
        self._writing = True
        self._io += 1
        blocks = self._blocks.copy()
        future = self._loop.run_in_executor(None, self._write, blocks)
        future.add_done_callback(lambda done: self._spool_written(len(blocks), done))

    def _write(self, blocks: Sequence[bytes]) -> int:
        if self._file is None:
            # No name in the file system: nothing of a body outlives the process.
            self._file = tempfile.TemporaryFile(buffering=0, dir=self._spool_dir)  # noqa: SIM115
        view = memoryview(b"".join(blocks))
        total = len(view)
        offset = self._spooled
        while view:
            written = os.pwrite(self._file.fileno(), view, offset)
            offset += written
            view = view[written:]
        return total

    def _spool_written(self, count: int, done: "asyncio.Future[int]") -> None:
        self._writing = False
        self._io -= 1
        problem = done.exception()
        if problem is not None:
            self.fail(
                RequestError(
                    503,
                    "queue_full",
                    "The gateway could not keep the request body.",
                    close=True,
                    retry_after_s=1,
                )
            )
        elif not self._closing:
            del self._blocks[:count]
            self._spooled += done.result()
            self._held -= done.result()
            if self._held > self._memory_limit:
                self._spool()
        self._close_when_unused()
        if self._on_room is not None and not self.crowded:
            self._on_room()

    def _drop(self) -> None:
        self._blocks = []
        self._held = 0
        self._closing = True
        self._budget.give(self.size)
        self.size = 0
        if self._file is not None:
            self._close_when_unused()

    def _close_when_unused(self) -> None:
        if self._closing and self._io == 0 and self._file is not None:
            self._file.close()
            self._file = None


class PatchedBody:
    """A complete body with some byte ranges replaced (an alias's name), without copying the rest."""

    __slots__ = ("_body", "_patches", "length")

    def __init__(self, body: Body, spans: Sequence[tuple[int, int]], value: bytes) -> None:
        assert body.complete, "spans were found in the whole body"
        self._body = body
        self._patches = [(start, stop, value) for start, stop in spans]
        self.length: int | None = body.size + sum(
            len(value) - (stop - start) for start, stop in spans
        )

    @property
    def is_held(self) -> bool:
        """Whether the original is in memory."""
        return self._body.is_held

    def in_memory(self) -> bytes | None:
        """The patched body when the original is in memory."""
        whole = self._body.in_memory()
        if whole is None:
            return None
        pieces: list[bytes] = []
        position = 0
        for start, stop, value in self._patches:
            pieces += (whole[position:start], value)
            position = stop
        pieces.append(whole[position:])
        return b"".join(pieces)

    async def replay(self) -> AsyncIterator[bytes]:
        """The patched bytes in blocks."""
        patches = list(self._patches)
        offset = 0  # of the original
        async for block in self._body.replay():
            end = offset + len(block)
            position = offset
            pieces: list[bytes] = []
            while patches and patches[0][0] < end:
                start, stop, value = patches[0]
                if start >= position:
                    pieces += (block[position - offset : start - offset], value)
                position = min(max(stop, position), end)
                if stop > end:
                    # The span goes on in the next block; what follows there is only skipped.
                    patches[0] = (offset - 1, stop, b"")
                    break
                del patches[0]
            pieces.append(block[position - offset :])
            offset = end
            out = b"".join(pieces)
            if out:
                yield out
