"""What the hub's files are made of: bytes at hand, a file on disk, bytes made up as they are asked for, or these
one behind the other.

A made-up file needs no disk and no memory, whatever its size; the same seed gives the same bytes.
"""

import hashlib
import random
import threading
from pathlib import Path

MAGIC = b"GGUF\x03\x00\x00\x00"
PIECE = 1024 * 1024
_TURN = 611_953
"""Odd, so that the base block is turned differently in each of the first 2^20 blocks."""


class Content:
    """The bytes of one file. `read` never gives more than `length`, and less only at the end."""

    def __init__(self, size: int) -> None:
        self.size = size
        self._hashing = threading.Lock()
        self._sha256 = ""

    def read(self, offset: int, length: int) -> bytes:
        raise NotImplementedError

    @property
    def sha256(self) -> str:
        """Computed once, when it is first asked for."""
        with self._hashing:
            if not self._sha256:
                digest = hashlib.sha256()
                for offset in range(0, self.size, PIECE):
                    digest.update(self.read(offset, PIECE))
                self._sha256 = digest.hexdigest()
            return self._sha256


class Held(Content):
    """Bytes at hand."""

    def __init__(self, held: bytes) -> None:
        super().__init__(len(held))
        self._held = held

    def read(self, offset: int, length: int) -> bytes:
        return self._held[offset : offset + length]


class OnDisk(Content):
    """A file on disk, which must not change."""

    def __init__(self, path: Path) -> None:
        super().__init__(path.stat().st_size)
        self._path = path

    def read(self, offset: int, length: int) -> bytes:
        with self._path.open("rb") as file:
            file.seek(offset)
            return file.read(length)


class MadeUp(Content):
    """`size` bytes that begin with `head` (a GGUF header, or its magic alone) and follow from `seed`.

    Block i (1 MiB) is one random block turned by i * _TURN with i stamped on its start: making it costs two
    copies, and no two places of the file hold the same bytes for long, so a misplaced range never passes.
    """

    def __init__(self, size: int, seed: int = 0, head: bytes = MAGIC) -> None:
        super().__init__(size)
        self._head = head[:size]
        self._base = random.Random(seed).randbytes(PIECE)

    def read(self, offset: int, length: int) -> bytes:
        end = min(self.size, offset + length)
        pieces: list[bytes] = []
        while offset < end:
            if offset < len(self._head):
                piece = self._head[offset:end]
            else:
                index, within = divmod(offset, PIECE)
                piece = self._block(index)[within : within + end - offset]
            pieces.append(piece)
            offset += len(piece)
        return b"".join(pieces)

    def _block(self, index: int) -> bytes:
        turn = index * _TURN % PIECE
        return b"".join(
            (index.to_bytes(8, "big"), self._base[turn + 8 :], self._base[:turn])
            if turn + 8 <= PIECE
            else (index.to_bytes(8, "big"), self._base[turn + 8 - PIECE : turn])
        )


class Joined(Content):
    """Contents one behind the other: a real model with a made-up tail is one file of any size that loads.

    An engine reads what the header names and never looks behind it.
    """

    def __init__(self, *parts: Content) -> None:
        super().__init__(sum(part.size for part in parts))
        self._parts = parts

    def read(self, offset: int, length: int) -> bytes:
        pieces: list[bytes] = []
        for part in self._parts:
            if offset < part.size and length > 0:
                pieces.append(part.read(offset, length))
                length -= len(pieces[-1])
                offset = part.size
            offset -= part.size
        return b"".join(pieces)
