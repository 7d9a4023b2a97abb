"""Holds the beginning of one file on its way: bytes at the end of it, what they came from, nobody else writing.

It is locked while open. How long the file is says how much is there, at any byte a process may be killed:
the space for the rest is reserved without making it longer.
"""

import contextlib
import ctypes
import errno
import fcntl
import os
import stat
from pathlib import Path
from typing import Final

import msgspec
from msgspec import Struct

_KEEP_SIZE: Final = 1  # FALLOC_FL_KEEP_SIZE of fallocate(2)
_OPENING: Final = os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC | os.O_NOFOLLOW
_BLOB_MODE: Final = stat.S_IRUSR | stat.S_IRGRP | stat.S_IROTH
_START_WRITING: Final = 2  # SYNC_FILE_RANGE_WRITE of sync_file_range(2)
_WRITE_BACK_BYTES: Final = 16 * 1024 * 1024
"""So much may wait in memory before the disk is told to begin. Gigabytes that wait would hold up every
other program that writes through to this disk, the log's server first of all."""


class PartialBusy(Exception):
    """Another fetch, perhaps of another process, is writing this file."""


class Note(Struct, frozen=True, kw_only=True):
    """What the bytes came from: the server's version of the file, to go on only with the same."""

    origin: str = ""
    etag: str = ""


class Partial:
    """An open, locked partial. Writes go to its end."""

    def __init__(self, path: Path, handle: int) -> None:
        self.path = path
        self._handle = handle
        self._note_path = path.with_name(f"{path.name}.json")
        self._libc = ctypes.CDLL(None, use_errno=True)
        self._waiting = 0

    def __enter__(self) -> "Partial":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def size(self) -> int:
        return os.fstat(self._handle).st_size

    @property
    def allocated(self) -> int:
        """Bytes of the disk it holds, reserved ones included."""
        return os.fstat(self._handle).st_blocks * 512

    def note(self) -> Note:
        try:
            return msgspec.json.decode(self._note_path.read_bytes(), type=Note)
        except (FileNotFoundError, msgspec.DecodeError, UnicodeDecodeError):
            return Note()

    def write_note(self, note: Note) -> None:
        """A note torn by a power cut reads as none, which only costs what unchecked bytes cost."""
        draft = self._note_path.with_name(f".{self._note_path.name}")
        draft.write_bytes(msgspec.json.encode(note))
        draft.replace(self._note_path)

    def reserve(self, total: int) -> None:
        """Asks the file system for the space of `total` bytes. Raises OSError (ENOSPC); where a file system
        cannot reserve, nothing happens: then only the check before speaks."""
        if total <= self.size:
            return
        fallocate = self._libc.fallocate
        fallocate.argtypes = (ctypes.c_int, ctypes.c_int, ctypes.c_int64, ctypes.c_int64)
        if fallocate(self._handle, _KEEP_SIZE, 0, total) == 0:
            return
        number = ctypes.get_errno()
        if number not in (errno.EOPNOTSUPP, errno.ENOSYS, errno.EINTR):
            raise OSError(number, os.strerror(number))

    def release_space(self) -> None:
        """Gives back what was reserved behind the last byte."""
        os.ftruncate(self._handle, self.size)

    def append(self, view: memoryview) -> None:
        """Raises OSError; a part of `view` may have been written then."""
        self._waiting += len(view)
        while view:
            view = view[os.write(self._handle, view) :]
        if self._waiting >= _WRITE_BACK_BYTES:
            self._start_writing()

    def _start_writing(self) -> None:
        """Lets the disk begin with what was appended of late, without waiting for it."""
        start = self._libc.sync_file_range
        start.argtypes = (ctypes.c_int, ctypes.c_int64, ctypes.c_int64, ctypes.c_uint)
        # What it answers does not matter: the file is written through when it is whole.
        start(self._handle, self.size - self._waiting, self._waiting, _START_WRITING)
        self._waiting = 0

    def read_at(self, buffer: bytearray | memoryview, offset: int) -> int:
        return os.preadv(self._handle, [buffer], offset)

    def begin_anew(self) -> None:
        """Throws away what is there. A file that has another name is left to it: it was a blob, and an
        engine of this machine may have it in its memory, which cutting it short would end."""
        if os.fstat(self._handle).st_nlink > 1:
            self._replace()
        else:
            os.ftruncate(self._handle, 0)
        self._note_path.unlink(missing_ok=True)

    def _replace(self) -> None:
        """Another file takes the name, locked before it has it; this one looks like a blob again."""
        os.fchmod(self._handle, _BLOB_MODE)
        draft = self.path.with_name(f".{self.path.name}.new")
        draft.unlink(missing_ok=True)
        handle = os.open(draft, _OPENING | os.O_EXCL, 0o600)
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            draft.replace(self.path)
            os.dup2(handle, self._handle, inheritable=False)
        finally:
            os.close(handle)
        self._waiting = 0

    def move_to(self, blob: Path) -> None:
        """The whole file becomes `blob`, read-only. The lock stays with it until `close`."""
        os.fchmod(self._handle, _BLOB_MODE)
        self.path.replace(blob)
        self._note_path.unlink(missing_ok=True)

    def discard(self) -> None:
        self.path.unlink(missing_ok=True)
        self._note_path.unlink(missing_ok=True)

    def close(self) -> None:
        handle, self._handle = self._handle, -1
        if handle >= 0:
            os.close(handle)


def open_partial(path: Path) -> Partial:
    """Opens or makes it, locked. Raises PartialBusy, OSError."""
    while True:
        handle = os.open(path, _OPENING, 0o600)
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(handle)
            raise PartialBusy(path.name) from None
        with contextlib.suppress(FileNotFoundError):
            if os.path.samestat(path.stat(), os.fstat(handle)):
                return Partial(path, handle)
        # It was finished or discarded between the two calls: this is another file of the same name.
        os.close(handle)
