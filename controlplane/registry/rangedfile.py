"""Reads the beginning of a file far away as its reader comes to need it, in chunks that grow.

Most headers fit the first chunk; a vocabulary of 20 MiB takes four requests instead of twenty. It keeps
what it read, so asking for the same bytes again costs nothing.
"""

from collections.abc import Awaitable, Callable
from typing import Final

CHUNK_BYTES: Final = 1024**2
LARGEST_CHUNK_BYTES: Final = 16 * 1024**2
KEPT_BYTES: Final = 320 * 1024**2
"""So much of the beginning is kept at most; no header that is accepted is longer."""

Reader = Callable[[int, int], Awaitable[bytes]]
"""Reads (offset, length) of the file; gives fewer bytes at its end alone."""


class RangedFile:
    """One file of `size` bytes behind `read_range`. Not for several tasks at once."""

    def __init__(self, read_range: Reader, size: int) -> None:
        self.size = size
        self._read_range = read_range
        self._held = bytearray()
        self._given = memoryview(self._held)
        self._chunk = CHUNK_BYTES

    async def prefix(self, at_least: int) -> memoryview:
        """The first bytes: `at_least` as many, or the whole file when it is shorter. May be more.

        The view is good until the next call. Raises what the reader raises; ValueError beyond KEPT_BYTES.
        """
        if at_least > KEPT_BYTES:
            raise ValueError(f"{at_least} bytes are more than any header has")
        while len(self._held) < min(at_least, self.size):
            length = max(self._chunk, at_least - len(self._held))
            length = min(length, LARGEST_CHUNK_BYTES, self.size - len(self._held))
            read = await self._read_range(len(self._held), length)
            if not read:
                # The file is shorter than the registry published; what checks its size says so.
                self.size = len(self._held)
                break
            self._grow(read)
            self._chunk = min(LARGEST_CHUNK_BYTES, self._chunk * 4)
        self._given.release()
        self._given = memoryview(self._held)
        return self._given

    def _grow(self, read: bytes) -> None:
        """Appends where it lies: a copy for each chunk would need the memory twice."""
        self._given.release()
        try:
            self._held += read
        except BufferError:  # somebody still holds a part of the view
            self._held = self._held + read

    async def read(self, offset: int, length: int) -> bytes:
        """`length` bytes from `offset` on; fewer at the end of the file alone."""
        if length <= 0 or offset >= self.size:
            return b""
        if offset + length <= KEPT_BYTES:
            return bytes((await self.prefix(offset + length))[offset : offset + length])
        return await self._read_range(offset, min(length, self.size - offset))
