"""Keeps whole files by their content in one folder: blobs named by sha256, entries that name them by key.

    blobs/<sha256>      the bytes, read-only, never changed        files/<key>.json    what a key stands for
    partial/<key>       a file on its way (partials.py)            lock                held for each change

An entry exists only beside its whole blob, at any moment a process or a machine may stop: an entry is *settled*
once its bytes are surely on the disk, and one that never was is made a partial again at the next opening,
where it is hashed once more before it counts. Several processes may share a folder: what was read of an entry holds
only while its file is the very same.
"""

import contextlib
import fcntl
import os
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import msgspec
from msgspec import Struct

from controlplane.mirror.domain.contents import is_sha256
from controlplane.mirror.partials import Partial, PartialBusy, open_partial

READERS_WAIT_S: Final = 60.0
"""How long a removal waits for readers. They keep the bytes they have open even after it."""


class StoreError(Exception):
    """The folder cannot be used; says which and why."""


class Entry(Struct, frozen=True, kw_only=True):
    """What a key stands for. `settled`: its bytes were written through to the disk."""

    key: str
    sha256: str
    bytes: int
    repo: str
    commit: str
    path: str
    settled: bool = False


class Reading:
    """A blob opened for reading. `handle` is a file descriptor; close it by `close`, once or often."""

    def __init__(self, store: "Store", entry: Entry, handle: int) -> None:
        self.entry = entry
        self.handle = handle
        self._store = store

    def part(self, first: int, end: int) -> bytes:
        """The bytes from `first` up to, not including, `end`; fewer where the file ends. Raises OSError."""
        return os.pread(self.handle, max(0, min(end, self.entry.bytes) - first), first)

    def close(self) -> None:
        handle, self.handle = self.handle, -1
        if handle >= 0:
            os.close(handle)
            self._store.left(self.entry.sha256)

    def __enter__(self) -> "Reading":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def write_draft(path: Path, text: bytes, *, through: bool) -> Path:
    """What is to take the place of `path` by rename, so that a reader sees the old or the new; `through` to the
    disk already. Whoever makes it renames or removes it."""
    draft = path.with_name(f".{path.name}.{os.getpid()}.{threading.get_ident()}")
    handle = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    with os.fdopen(handle, "wb") as file:
        file.write(text)
        if through:
            file.flush()
            os.fsync(handle)
    return draft


def sync_folder(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


class Store:
    """One folder. Its methods block on the disk: call them in a thread, except `entry`, `has` and `read`,
    which look at one small file each."""

    def __init__(self, folder: Path, *, keep_free_bytes: int) -> None:
        self.folder = folder
        self.keep_free_bytes = keep_free_bytes
        self._blobs = folder / "blobs"
        self._files = folder / "files"
        self._partials = folder / "partial"
        self._readers: dict[str, int] = {}
        self._change = threading.Condition()
        self._decoded: dict[str, tuple[tuple[int, int, int], Entry | None]] = {}
        """By name of the entry's file, with what tells that file from any other of its name."""

    # -- opening ------------------------------------------------------------------------------------

    def open(self) -> tuple[str, ...]:
        """Makes the folder, repairs what an interrupted process left; returns sentences about what it lost.

        1 half-written notes are removed   2 an entry that cannot be read, or whose blob is gone or of another
        size, is dropped   3 what never settled becomes a partial again   4 a blob nobody names is removed,
        unless 2 dropped an unreadable entry that may have named it: then `reclaim` may still find it, until
        the next opening   5 partials give back reserved space
        Raises StoreError.
        """
        lost: list[str] = []
        try:
            with self._locked():
                for folder in (self._files, self._partials):
                    for draft in folder.glob(".*"):  # 1
                        draft.unlink(missing_ok=True)
                unreadable = self._drop_broken(lost)  # 2
                self._demote_unsettled()  # 3
                named = {entry.sha256 for entry in self.entries()}
                for blob in self._blobs.iterdir():
                    if blob.name not in named and is_sha256(blob.name) and not unreadable:
                        self._discard_blob(blob)  # 4
            for path in self._partials.iterdir():
                if is_sha256(path.name):
                    with contextlib.suppress(PartialBusy), open_partial(path) as partial:
                        partial.release_space()  # 5
        except OSError as error:
            raise StoreError(f"the mirror cannot use {self.folder}: {error.strerror}") from error
        return tuple(lost)

    def _drop_broken(self, lost: list[str]) -> bool:
        """Whether an entry could not be read at all."""
        unreadable = False
        for path in sorted(self._files.glob("*.json")):
            entry = self._decode(path)
            if entry is None:
                unreadable = True
                lost.append(f"the entry {path.name} could not be read and was dropped")
            elif (size := self._blob_size(entry.sha256)) == entry.bytes:
                continue
            elif size is None and not entry.settled:
                pass  # the entry is written before its blob moves in: the partial is still there
            else:
                lost.append(
                    f"{entry.repo}/{entry.path} is lost: its blob "
                    + ("is gone" if size is None else f"has {size} of {entry.bytes} bytes")
                )
                (self._blobs / entry.sha256).unlink(missing_ok=True)
            path.unlink()
        return unreadable

    def _demote_unsettled(self) -> None:
        entries = self.entries()
        settled = {entry.sha256 for entry in entries if entry.settled}
        for entry in entries:
            blob = self._blobs / entry.sha256
            if entry.sha256 in settled:
                if not entry.settled:
                    self._write_entry(msgspec.structs.replace(entry, settled=True))
                continue
            with contextlib.suppress(FileNotFoundError):
                if self._is_settling(blob):
                    continue
                blob.chmod(0o600)
                blob.replace(self._partials / entry.key)
            self._entry_path(entry.key).unlink()

    def _is_settling(self, blob: Path) -> bool:
        """Whether another process is writing it through right now; it says so by a lock on the file."""
        handle = os.open(blob, os.O_RDONLY)
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
        finally:
            os.close(handle)
        return False

    # -- reading ------------------------------------------------------------------------------------

    def entry(self, key: str) -> Entry | None:
        """What `key` stands for, while its whole blob is there."""
        if not is_sha256(key):
            return None
        entry = self._decode(self._entry_path(key))
        return entry if entry and self._blob_size(entry.sha256) == entry.bytes else None

    def has(self, key: str) -> bool:
        return self.entry(key) is not None

    def entries(self) -> tuple[Entry, ...]:
        """All of them, in order of their keys."""
        return tuple(entry for entry in self._all() if self._blob_size(entry.sha256) == entry.bytes)

    def partials(self) -> dict[str, int]:
        """The bytes that are here of files on their way, by key."""
        found: dict[str, int] = {}
        for path in self._partials.iterdir():
            if is_sha256(path.name):
                with contextlib.suppress(FileNotFoundError):
                    found[path.name] = path.stat().st_size
        return found

    def reserved(self) -> dict[str, int]:
        """The bytes of the disk that files on their way hold already, by key: not to be found free again."""
        found: dict[str, int] = {}
        for path in self._partials.iterdir():
            if is_sha256(path.name):
                with contextlib.suppress(FileNotFoundError):
                    found[path.name] = path.stat().st_blocks * 512
        return found

    def read(self, key: str) -> Reading | None:
        """Opens the file of `key`; None when it is not here. A removal waits for what is open."""
        entry = self.entry(key)
        if entry is None:
            return None
        with self._change:
            try:
                handle = os.open(self._blobs / entry.sha256, os.O_RDONLY | os.O_CLOEXEC)
            except FileNotFoundError:
                return None
            self._readers[entry.sha256] = self._readers.get(entry.sha256, 0) + 1
        return Reading(self, entry, handle)

    def left(self, sha256: str) -> None:
        """A reader of the blob is done; Reading.close says so."""
        with self._change:
            self._readers[sha256] -= 1
            if not self._readers[sha256]:
                del self._readers[sha256]
                self._change.notify_all()

    def readers(self, sha256: str) -> int:
        with self._change:
            return self._readers.get(sha256, 0)

    def path_of(self, entry: Entry) -> Path:
        """Where the bytes are, for a program that wants a path. They must never be written to."""
        return self._blobs / entry.sha256

    def free_bytes(self) -> int:
        """What may still be written here, less what is kept free; below zero when that is used already."""
        try:
            status = os.statvfs(self.folder)
        except FileNotFoundError:
            self._make_folders()
            status = os.statvfs(self.folder)
        return status.f_bavail * status.f_frsize - self.keep_free_bytes

    # -- changing -----------------------------------------------------------------------------------

    def adopt(self, wanted: Entry) -> Entry | None:
        """Makes `wanted.key` an entry when another one names the same bytes, without a download."""
        if self._blob_size(wanted.sha256) is None:
            return None  # mostly so: nobody's turn is waited for to find that out
        with self._locked():
            same = self._named(wanted.sha256)
            if not same or same[0].bytes != wanted.bytes:
                return None
            # `settle` writes it through; until then the others of its content vouch for the bytes.
            entry = msgspec.structs.replace(wanted, settled=False)
            self._write_entry(entry)
        return entry

    def reclaim(self, wanted: Entry) -> bool:
        """Makes a blob that no entry names the partial of `wanted`, to be hashed instead of fetched.

        There is one when an entry could not be read, or while a removal waits for readers.
        """
        blob, partial = self._blobs / wanted.sha256, self._partials / wanted.key
        if self._blob_size(wanted.sha256) is None:
            return False
        with self._locked():
            if (
                self._named(wanted.sha256)
                or self._blob_size(wanted.sha256) != wanted.bytes
                or partial.exists()
            ):
                return False
            blob.chmod(0o600)
            blob.replace(partial)
        return True

    def partial(self, key: str) -> Partial:
        """The beginning of a file on its way, made when there is none. Raises PartialBusy, OSError."""
        self._make_folders()
        return open_partial(self._partials / key)

    def finish(self, partial: Partial, entry: Entry) -> None:
        """The partial is whole and checked: it becomes the blob of `entry`.

        The entry comes first: stopped between the two, the next opening finds the partial still there.
        """
        blob = self._blobs / entry.sha256
        with self._locked():
            self._write_entry(msgspec.structs.replace(entry, settled=False))
            if self._blob_size(entry.sha256) == entry.bytes:
                partial.discard()
            else:
                partial.move_to(blob)

    def settle(self, sha256: str) -> None:
        """Writes a blob through to the disk, then its entries' word that it is there. Takes long."""
        try:
            handle = os.open(self._blobs / sha256, os.O_RDONLY)
        except FileNotFoundError:
            return  # removed meanwhile
        try:
            fcntl.flock(handle, fcntl.LOCK_SH)
            os.fsync(handle)
            sync_folder(self._blobs)
            for entry in self._named(sha256):
                if entry.settled:
                    continue
                # The disk is waited for outside the lock: all fetches would stand still for it.
                settled = msgspec.structs.replace(entry, settled=True)
                with self._drafted(settled) as draft, self._locked():
                    if self._decode(self._entry_path(entry.key)) == entry:
                        self._place(draft, settled)
            sync_folder(self._files)
        finally:
            os.close(handle)

    def remove(self, key: str, *, readers_wait_s: float = READERS_WAIT_S) -> bool:
        """Ends the entry at once; its blob goes when no other key names it and, within the bound, nobody
        reads it. Also removes a partial that nobody writes. Whether there was an entry."""
        if not is_sha256(key):
            return False
        with contextlib.suppress(PartialBusy, FileNotFoundError):
            if (self._partials / key).exists():
                with self.partial(key) as partial:
                    partial.discard()
        entry = self._decode(self._entry_path(key))
        if entry is None:
            return False
        with self._locked():
            self._entry_path(key).unlink(missing_ok=True)
            sync_folder(self._files)
        with self._change:
            self._change.wait_for(lambda: entry.sha256 not in self._readers, readers_wait_s)
        with self._locked():
            if not self._named(entry.sha256):
                (self._blobs / entry.sha256).unlink(missing_ok=True)
        return True

    def condemn(self, sha256: str) -> tuple[str, ...]:
        """The blob's bytes are not what its name says: it goes with every entry that names it, at once."""
        with self._locked():
            keys = tuple(entry.key for entry in self._named(sha256))
            for key in keys:
                self._entry_path(key).unlink(missing_ok=True)
            (self._blobs / sha256).unlink(missing_ok=True)
        return keys

    # -- inside -------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def _locked(self) -> Iterator[None]:
        """One change at a time over all threads and processes."""
        # Somebody may have emptied the place under a running mirror: it is made again, the rest is noticed.
        self._make_folders()
        handle = os.open(self.folder / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(handle, fcntl.LOCK_EX)
            yield
        finally:
            os.close(handle)

    def _make_folders(self) -> None:
        for folder in (self.folder, self._blobs, self._files, self._partials):
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)

    def _all(self) -> list[Entry]:
        """Every entry that can be read, with or without its blob. Of hundreds of adapters each fetch asks."""
        decoded: dict[str, tuple[tuple[int, int, int], Entry | None]] = {}
        with os.scandir(self._files) as files:
            for file in files:
                if not file.name.endswith(".json") or file.name.startswith("."):
                    continue
                try:
                    status = file.stat()
                except FileNotFoundError:
                    continue
                stamp = (status.st_ino, status.st_mtime_ns, status.st_size)
                known = self._decoded.get(file.name)
                if known is None or known[0] != stamp:
                    known = (stamp, self._decode(self._files / file.name))
                decoded[file.name] = known
        self._decoded = decoded
        return [entry for _, (_, entry) in sorted(decoded.items()) if entry is not None]

    def _named(self, sha256: str) -> list[Entry]:
        """The entries of a content whose blob is there, in order of their keys."""
        return [
            entry
            for entry in self._all()
            if entry.sha256 == sha256 and self._blob_size(sha256) == entry.bytes
        ]

    def _entry_path(self, key: str) -> Path:
        return self._files / f"{key}.json"

    @contextlib.contextmanager
    def _drafted(self, entry: Entry) -> Iterator[Path]:
        """The entry beside its place, to be renamed to it under the lock."""
        # One that is not settled would not be believed after a power cut anyway.
        text = msgspec.json.encode(entry)
        draft = write_draft(self._entry_path(entry.key), text, through=entry.settled)
        try:
            yield draft
        finally:
            draft.unlink(missing_ok=True)

    def _place(self, draft: Path, entry: Entry) -> None:
        """To be called under the lock."""
        try:
            draft.replace(self._entry_path(entry.key))
        except FileNotFoundError:
            # A process that just opened the folder took it for one that was left behind.
            self._write_entry(entry)

    def _write_entry(self, entry: Entry) -> None:
        """To be called under the lock."""
        with self._drafted(entry) as draft:
            draft.replace(self._entry_path(entry.key))

    def _decode(self, path: Path) -> Entry | None:
        try:
            entry = msgspec.json.decode(path.read_bytes(), type=Entry)
        except (FileNotFoundError, msgspec.DecodeError, UnicodeDecodeError):
            return None
        return entry if is_sha256(entry.sha256) and entry.key == path.stem else None

    def _blob_size(self, sha256: str) -> int | None:
        try:
            return (self._blobs / sha256).stat().st_size
        except FileNotFoundError:
            return None

    def _discard_blob(self, blob: Path) -> None:
        with contextlib.suppress(FileNotFoundError):
            if not self._is_settling(blob):
                blob.unlink()
