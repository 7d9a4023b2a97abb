"""Moves the bytes of one content to this node's disk, hashing them in the same pass.

Blocking, for a thread of its own. Every piece is on its way to the disk before the next is read, so a killed
agent goes on where the file ends; what lies there already is hashed first. Nothing is believed before
size and sha256 of the whole were compared.
"""

import asyncio
import hashlib
import os
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, TypeVar

from nodeagent.domain.files import Fault
from nodeagent.files.source import PIECE_BYTES, Failed, Source, Stopper
from nodeagent.files.store import is_full
from schemas.mirror import ManifestFile

T = TypeVar("T")

END_S: Final = 2.0
"""How long a stopped attempt may take to end; only looking up a host's name takes so long."""


@dataclass(slots=True)
class Moving:
    """How far one content came. Written by the thread that moves it, read by the event loop.

    `moved_at` is when the last byte came, by the monotonic clock.
    """

    total_bytes: int
    bytes: int = 0
    what: str = "fetching"
    moved_at: float = field(default_factory=time.monotonic)

    def at(self, count: int) -> None:
        self.bytes = count
        self.moved_at = time.monotonic()


class Part:
    """One content on its way, over any number of attempts; the hash is kept between them."""

    def __init__(self, path: Path, file: ManifestFile, moving: Moving) -> None:
        self._path = path
        self._file = file
        self._moving = moving
        self._hash = hashlib.sha256()
        self._hashed = 0

    def attempt(self, source: Source | None, what: str, stopper: Stopper) -> None:
        """Completes the file from `source`; returns when all of it is there, right, and on the disk.

        Without a source it only looks whether all of it is there already.

        Raises Failed (after wrong bytes nothing is left of it), Stopped.
        """
        try:
            handle = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        except OSError as error:
            raise Failed(self._disk_fault(error)) from error
        try:
            self._resume(handle, stopper)
            if self._hashed < self._file.bytes:
                if source is None:
                    raise Failed(Fault(kind="away", sentence=""))
                self._moving.what = what
                self._append(handle, source, stopper)
            self._compare(source.name if source is not None else "this node's disk")
            os.fsync(handle)
        except Failed as failed:
            if failed.fault.kind == "wrong":
                self._begin_anew(handle)
            raise
        except OSError as error:
            raise Failed(self._disk_fault(error)) from error
        finally:
            os.close(handle)

    def _resume(self, handle: int, stopper: Stopper) -> None:
        """Hashes what lies there and was not hashed by this life of the agent."""
        size = os.fstat(handle).st_size
        if size > self._file.bytes or size < self._hashed:
            self._begin_anew(handle)
            return
        if size > self._hashed:
            self._moving.what = "hashing"
        while self._hashed < size:
            stopper.check()
            piece = os.pread(handle, min(PIECE_BYTES, size - self._hashed), self._hashed)
            if not piece:  # somebody else cut it short
                self._begin_anew(handle)
                return
            self._count(piece)

    def _append(self, handle: int, source: Source, stopper: Stopper) -> None:
        opened = source.open(self._hashed, stopper)
        try:
            if opened.offset != self._hashed:
                self._begin_anew(handle)
            while self._hashed < self._file.bytes:
                piece = opened.read()
                if not piece:
                    missing = self._file.bytes - self._hashed
                    sentence = f"{source.name} ended {missing} bytes before the end"
                    raise Failed(Fault(kind="away", source=source.name, sentence=sentence))
                if len(piece) > self._file.bytes - self._hashed:
                    raise Failed(self._wrong(source.name, f"more than {self._file.bytes} bytes"))
                self._write(handle, piece)
        finally:
            opened.close()

    def _write(self, handle: int, piece: bytes) -> None:
        left = memoryview(piece)
        at = self._hashed
        while left:
            written = os.pwrite(handle, left, at)
            left, at = left[written:], at + written
        self._count(piece)

    def _count(self, piece: bytes) -> None:
        self._hash.update(piece)
        self._hashed += len(piece)
        self._moving.at(self._hashed)

    def _compare(self, source: str) -> None:
        found = self._hash.hexdigest()
        if self._hashed != self._file.bytes or found != self._file.sha256:
            raise Failed(
                self._wrong(source, f"sha256 {found[:12]} instead of {self._file.sha256[:12]}")
            )

    def _begin_anew(self, handle: int) -> None:
        os.ftruncate(handle, 0)
        self._hash = hashlib.sha256()
        self._hashed = 0
        self._moving.at(0)

    def _wrong(self, source: str, what: str) -> Fault:
        sentence = f"{self._file.name} came from {source} with other bytes than announced: {what}"
        return Fault(kind="wrong", source=source, sentence=sentence)

    def _disk_fault(self, error: OSError) -> Fault:
        full = is_full(error)
        what = "the disk is full" if full else error.strerror
        sentence = f"{self._file.name} cannot be written to {self._path.parent}: {what}"
        return Fault(kind="disk", sentence=sentence, full=full)


async def in_thread(work: Callable[[Stopper], T]) -> T:
    """What `work` returns or raises, done in a thread of its own that a cancelled wait stops.

    Not one of the loop's own threads: a process that leaves would wait for those.
    """
    loop = asyncio.get_running_loop()
    done: asyncio.Future[T] = loop.create_future()
    stopper = Stopper()

    def tell(settle: Callable[[Any], None], outcome: object) -> None:
        if not done.done():
            settle(outcome)

    def run() -> None:
        try:
            result = work(stopper)
        except BaseException as error:  # noqa: BLE001 - raised again where it is waited for
            outcome = (done.set_exception, error)
        else:
            outcome = (done.set_result, result)
        try:
            loop.call_soon_threadsafe(tell, *outcome)
        except RuntimeError:  # the loop is gone and so is who waited
            return

    threading.Thread(target=run, name="fetch", daemon=True).start()
    try:
        return await asyncio.shield(done)
    except asyncio.CancelledError:
        stopper.stop()
        await asyncio.wait({done}, timeout=END_S)
        if done.done():
            done.exception()
        else:
            done.cancel()
        raise
