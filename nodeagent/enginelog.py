"""Writes an engine's output to a bounded log and reads it back by byte offset.

One file and its predecessor are kept, so the log takes at most twice the limit. It must never make
the writer wait or fail: an engine that cannot write its log stands still. Standard library only.
"""

import contextlib
import os
from collections.abc import Sequence
from typing import NamedTuple

LOG = "engine.log"
OLD = "engine.log.1"
BASE = "engine.log.offset"
"""Holds how many bytes were written before the first byte of the current file."""

HIDDEN = b"[hidden]"


class Redactor:
    """Replaces secret values in a stream of bytes, also where a value spans two pieces."""

    def __init__(self, secrets: list[bytes]) -> None:
        # The longest first, so that a value holding another is replaced as a whole. Very short
        # ones are left: replacing them would hide ordinary text and no secret worth the name.
        self._secrets = sorted((s for s in secrets if len(s) >= 6), key=len, reverse=True)
        self._held = b""

    def clean(self, piece: bytes) -> bytes:
        """What of the stream so far may be shown; an end that may begin a secret is held back."""
        if not self._secrets:
            return piece
        piece = self._held + piece
        for secret in self._secrets:
            piece = piece.replace(secret, HIDDEN)
        hold = max(self._overlap(piece, secret) for secret in self._secrets)
        self._held = piece[len(piece) - hold :]
        return piece[: len(piece) - hold]

    def rest(self) -> bytes:
        """What was held back, once no more will come."""
        held, self._held = self._held, b""
        return held

    @staticmethod
    def _overlap(piece: bytes, secret: bytes) -> int:
        """How many bytes at the end of `piece` are a proper beginning of `secret`."""
        for size in range(min(len(secret) - 1, len(piece)), 0, -1):
            if piece.endswith(secret[:size]):
                return size
        return 0


class LogWriter:
    """The writing side, owned by the launcher. A full or failing disk loses lines, nothing else."""

    def __init__(self, folder: str, limit_bytes: int) -> None:
        self._folder = folder
        self._limit = max(limit_bytes, 1024)
        self._base = 0
        self._size = 0
        self._file = -1
        self._tail = b""
        self._open()

    def write(self, piece: bytes) -> None:
        self._tail = (self._tail + piece)[-16384:]
        while piece:
            if self._size >= self._limit:
                self._turn_over()
            part = piece[: self._limit - self._size]
            try:
                written = os.write(self._file, part)
            except OSError:
                return
            self._size += written
            piece = piece[written:]

    def last_line(self, telling: Sequence[str] = ()) -> str:
        """The last line written; see `last_line` below."""
        return last_line(self._tail, telling)

    def _open(self) -> None:
        with contextlib.suppress(OSError):
            self._file = os.open(
                os.path.join(self._folder, LOG), os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600
            )

    def _turn_over(self) -> None:
        """The order lets a reader notice: in between there is no current file."""
        with contextlib.suppress(OSError):
            os.replace(os.path.join(self._folder, LOG), os.path.join(self._folder, OLD))
            write_whole(self._folder, BASE, str(self._base + self._size).encode())
        with contextlib.suppress(OSError):
            os.close(self._file)
        self._base += self._size
        self._size = 0
        self._open()


def last_line(tail: bytes, telling: Sequence[str] = ()) -> str:
    """The last non-empty line of `tail`, at most 500 characters.

    `telling` are pieces of text by which an engine's own reason is known, best first: the last line
    with the first of them that occurs is preferred to what the engine says while it cleans up.
    """
    lines = [line.strip() for line in tail.decode(errors="replace").splitlines()]
    for mark in (*telling, ""):
        found = [line for line in lines if line and mark in line]
        if found:
            return found[-1][:500]
    return ""


class Part(NamedTuple):
    """Bytes of a log from `offset`, and where the log ends now."""

    content: bytes
    offset: int
    end: int


def read_part(folder: str, offset: int | None, max_bytes: int) -> Part:
    """Up to `max_bytes` from `offset`, or the last `max_bytes` with None.

    An offset that was dropped already gives the oldest bytes there are; one beyond the end none.
    """
    with contextlib.ExitStack() as opened:
        while True:
            base = _base(folder)
            current, old = _open(folder, LOG, opened), _open(folder, OLD, opened)
            # The writer turned the log over while we opened: what we hold may not fit together.
            if _base(folder) == base:
                break
        old_size, size = _size(old), _size(current)
        first, end = base - old_size, base + size
        begin = end - max_bytes if offset is None else offset
        begin = min(max(begin, first), end)
        content = b""
        if begin < base:
            content = os.pread(old, min(max_bytes, base - begin), begin - first)
        if len(content) < max_bytes and begin + len(content) >= base and size:
            content += os.pread(current, max_bytes - len(content), begin + len(content) - base)
        return Part(content, begin, max(end, begin + len(content)))


def _open(folder: str, name: str, opened: contextlib.ExitStack) -> int:
    """The file for reading, -1 when it is not there; closed with `opened`."""
    try:
        file = os.open(os.path.join(folder, name), os.O_RDONLY)
    except OSError:
        return -1
    opened.callback(os.close, file)
    return file


def _size(file: int) -> int:
    return os.fstat(file).st_size if file >= 0 else 0


def write_whole(folder: str, name: str, content: bytes) -> None:
    """Puts a file in place by rename, so that a reader sees all of it or none. Raises OSError."""
    path = os.path.join(folder, name)
    temporary = path + ".new"
    file = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    try:
        os.write(file, content)
    finally:
        os.close(file)
    os.replace(temporary, path)


def _base(folder: str) -> int:
    try:
        with open(os.path.join(folder, BASE), "rb") as file:
            return int(file.read() or b"0")
    except (OSError, ValueError):
        return 0
