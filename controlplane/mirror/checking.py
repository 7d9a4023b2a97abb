"""Carries out the other two tasks of a mirror: to read a file again against its sha256, and to remove one."""

import asyncio
import hashlib
import threading
from collections.abc import Callable
from typing import Final

from controlplane.domain.reports import FileFault, FileGone, FileStored
from controlplane.domain.work import Remove, Verify
from controlplane.mirror.domain import contents
from controlplane.mirror.store import READERS_WAIT_S, Reading, Store
from controlplane.mirror.telling import Teller, in_loop
from schemas import codes
from schemas.progress import FileProgress

CHUNK: Final = 1024 * 1024


def _hashed(reading: Reading, teller: Teller, stop: threading.Event) -> str | None:
    """The sha256 of the file as it is on the disk; None when told to stop. Raises OSError."""
    digest = hashlib.sha256()
    buffer = bytearray(CHUNK)
    view = memoryview(buffer)
    count = 0
    with open(reading.handle, "rb", buffering=0, closefd=False) as file:
        while read := file.readinto(buffer):
            digest.update(view[:read])
            count += read
            teller.tell("verifying", count)
            if stop.is_set():
                return None
    return digest.hexdigest()


async def verify(
    store: Store,
    task: Verify,
    *,
    mirror: str,
    on_progress: Callable[[FileProgress], None] = lambda _: None,
) -> FileStored | FileFault | FileGone:
    """Reads the whole file again. One whose bytes are not the right ones is removed at once, with every
    other key of the same content: it must not be loaded once more, and it can be fetched again."""
    loop = asyncio.get_running_loop()
    stop = threading.Event()
    teller = Teller(task.key, task.bytes, in_loop(loop, on_progress))

    def work() -> FileStored | FileFault | FileGone | None:
        reading = store.read(task.key)
        if reading is None:
            return FileGone(key=task.key, mirror=mirror)
        with reading:
            entry = reading.entry
            try:
                actual = _hashed(reading, teller, stop)
            except OSError as error:
                return FileFault(
                    key=task.key,
                    mirror=mirror,
                    code=codes.DISK_FAILED,
                    sentence=f"{entry.path} cannot be read on {mirror}: {error.strerror}",
                )
            if actual is None:
                return None
            if actual == entry.sha256 == task.sha256.strip().lower():
                return FileStored(
                    key=task.key,
                    mirror=mirror,
                    sha256=actual,
                    bytes=entry.bytes,
                    compared=True,
                    origin="store",
                )
            if actual != entry.sha256:
                store.condemn(entry.sha256)
        return FileFault(
            key=task.key,
            mirror=mirror,
            code=codes.CHECKSUM_MISMATCH,
            sentence=contents.mismatch(entry.path, actual, task.sha256, "the log says"),
        )

    try:
        result = await asyncio.to_thread(work)
    except asyncio.CancelledError:
        stop.set()
        raise
    assert result is not None, "only a cancelled verification is stopped"
    return result


async def remove(
    store: Store, task: Remove, *, mirror: str, readers_wait_s: float = READERS_WAIT_S
) -> FileGone | FileFault:
    """Ends the copy; its blob goes when nobody reads it any more, at the latest after `readers_wait_s`."""
    try:
        await asyncio.to_thread(store.remove, task.key, readers_wait_s=readers_wait_s)
    except OSError as error:
        return FileFault(
            key=task.key,
            mirror=mirror,
            code=codes.DISK_FAILED,
            sentence=f"{store.folder} could not be changed: {error.strerror}",
            removal=True,
        )
    return FileGone(key=task.key, mirror=mirror)
