"""Keeps fetched files on this node's disk: each content once, and sets of names that lead to them.

    blobs/<sha256>       whole contents, put in place by rename after their sha256 was compared
    partial/<sha256>     contents on their way, as far as they came
    sets/<key>.json      the manifest of a set; its time is when a replica used the set last
    sets/<key>/<name>    hard links, so that shards lie beside each other under their own names

Every function blocks and belongs in a thread, except where it says that it is quick. What goes and what
stays is decided in `domain/files.py`.
"""

import contextlib
import errno
import logging
import os
import secrets
import shutil
from collections.abc import Collection, Iterator, Mapping
from datetime import UTC, datetime
from pathlib import Path

import msgspec
from msgspec import Struct
from msgspec.structs import replace

from nodeagent.domain.files import NOTHING_KNOWN, WEIGHTS, Disk, StoredSet, flaw, is_sha256
from schemas.mirror import Manifest, ManifestFile

log = logging.getLogger(__name__)


class _Read(Struct, frozen=True, kw_only=True):
    """A manifest as it was read, and what the file looked like then: hundreds of them are looked at again and
    again, and a set's hardly ever changes."""

    stamp: tuple[int, int, int]
    manifest: Manifest


class _Names(Struct, frozen=True, kw_only=True):
    """The inodes in a set's folder, and what the folder looked like then."""

    stamp: tuple[int, int, int]
    inodes: tuple[int, ...]


class Store:
    """The files below `folder`, which one agent owns. Nothing is made before the first fetch."""

    def __init__(self, folder: Path, beside: Path | None = None) -> None:
        """`beside` is the folder of a mirror on this machine, whose files are linked where that can be."""
        self._beside = beside / "blobs" if beside is not None else None
        self._folder = folder.absolute()
        self._blobs = self._folder / "blobs"
        self._blobs_at = f"{self._blobs}/"
        self._beside_at = f"{self._beside}/" if self._beside is not None else ""
        self._partial = self._folder / "partial"
        self._sets = self._folder / "sets"
        self._prepared = False
        self._read: dict[str, _Read] = {}
        self._names: dict[str, _Names] = {}

    # What is there.

    @property
    def sets(self) -> Path:
        """The folder that holds nothing but sets."""
        return self._sets

    def manifest(self, key: str, known: Mapping[str, str] = NOTHING_KNOWN) -> Manifest | None:
        """The remembered manifest of a set; None when there is none that can be believed. Quick.

        `known` are the sha256 by name that the set must have; see `domain.files.flaw`.
        """
        if not is_sha256(key):
            return None
        try:
            found = self._manifest(key, self._manifest_path(key).stat())
        except OSError:
            return None
        return found if found is not None and (not known or not flaw(found, key, known)) else None

    def _manifest(self, key: str, status: os.stat_result) -> Manifest | None:
        """The manifest of a set, read again only when the file is another one by its `status`."""
        stamp = _stamp(status)
        read = self._read.get(key)
        if read is None or read.stamp != stamp:
            try:
                found = msgspec.json.decode(self._manifest_path(key).read_bytes(), type=Manifest)
            except (OSError, msgspec.MsgspecError, UnicodeDecodeError):
                return None
            if flaw(found, key) is not None:
                return None
            read = self._read[key] = _Read(stamp=stamp, manifest=found)
        return read.manifest

    def missing(self, manifest: Manifest) -> tuple[ManifestFile, ...]:
        """The files of a set whose contents are not here whole, each content once. Quick."""
        seen: set[str] = set()
        absent: list[ManifestFile] = []
        for file in manifest.files:
            if file.sha256 not in seen and not self._has(file):
                absent.append(file)
            seen.add(file.sha256)
        return tuple(absent)

    def _has(self, file: ManifestFile) -> bool:
        """Whether a content is here whole, and is what it was checked to be."""
        # No Path: this is looked at while a client waits for an adapter.
        try:
            ours = os.stat(f"{self._blobs_at}{file.sha256}")
        except OSError:
            return False
        return ours.st_size == file.bytes and not self._is_left(file, ours)

    def _is_left(self, file: ManifestFile, ours: os.stat_result) -> bool:
        """Whether the mirror beside has another file of that content by now: it found its old one spoilt, and
        ours may be a link to that one."""
        if not self._beside_at:
            return False
        try:
            theirs = os.stat(f"{self._beside_at}{file.sha256}")
        except OSError:
            return False
        # What was fetched or copied here was checked by itself, and has a mode of its own (see keep).
        return (
            ours.st_dev == theirs.st_dev
            and ours.st_mode == theirs.st_mode
            and ours.st_ino != theirs.st_ino
            and theirs.st_size == file.bytes
        )

    def whole(self, key: str, known: Mapping[str, str] = NOTHING_KNOWN) -> Path | None:
        """Where the first file of a set lies when all of the set is here and named. Quick."""
        manifest = self.manifest(key, known)
        if manifest is None or self.missing(manifest):
            return None
        folder = f"{self._sets}/{key}"
        if any(_size(f"{folder}/{file.name}") != file.bytes for file in manifest.files):
            return None
        return Path(folder, manifest.files[0].name)

    def partial(self, content: str) -> Path:
        """Where the bytes of a content on its way lie."""
        return self._partial / content

    def here_bytes(self, content: str) -> int:
        """How much of a content is here, whole or begun. Quick."""
        return _size(self._blobs / content) or _size(self._partial / content) or 0

    def look(self, promised_bytes: Mapping[str, int]) -> Disk:
        """Everything that lies here. `promised_bytes` are whole sizes of contents being fetched.

        Contents may become whole meanwhile; each then counts as what it was before.
        """
        self.prepare()
        sets: list[StoredSet] = []
        links: dict[int, int] = {}
        with os.scandir(self._sets) as found:
            entries = sorted(found, key=lambda entry: entry.name)
        for entry in entries:
            key, _, suffix = entry.name.rpartition(".")
            if entry.is_dir():
                for inode in self._names_in(entry):
                    links[inode] = links.get(inode, 0) + 1
            elif suffix == "json" and key:
                status = entry.stat()
                manifest = self._manifest(key, status) if is_sha256(key) else None
                named = manifest.files if manifest is not None else ()
                contents = tuple(dict.fromkeys(file.sha256 for file in named))
                used_at = datetime.fromtimestamp(status.st_mtime, UTC)
                sets.append(
                    StoredSet(
                        key=key,
                        used_at=used_at,
                        contents=contents,
                        adapter=bool(named) and named[0].name == WEIGHTS,
                    )
                )
        held: dict[str, int] = {}
        for content, status in _contents(self._blobs):
            # Links that are not ours are a mirror's: its bytes are there anyway.
            shared = status.st_nlink > 1 + links.get(status.st_ino, 0)
            held[content] = 0 if shared else status.st_size
        for content, status in _contents(self._partial):
            held[content] = held.get(content, 0) + status.st_size
        disk = os.statvfs(self._folder)
        return Disk(
            sets=tuple(sets),
            held_bytes=held,
            promised_bytes={
                content: max(size - self.here_bytes(content), 0)
                for content, size in promised_bytes.items()
            },
            free_bytes=disk.f_bavail * disk.f_frsize,
        )

    def _names_in(self, folder: "os.DirEntry[str]") -> tuple[int, ...]:
        """The inodes that the names in a set's folder lead to, read again when the folder changed."""
        status = folder.stat()
        stamp = (status.st_ino, status.st_mtime_ns, status.st_nlink)
        names = self._names.get(folder.name)
        if names is None or names.stamp != stamp:
            with os.scandir(folder.path) as found:
                names = _Names(stamp=stamp, inodes=tuple(entry.inode() for entry in found))
            self._names[folder.name] = names
        return names.inodes

    # What changes.

    def prepare(self) -> None:
        """Makes the folders, and takes away what a killed agent left half named. Raises OSError."""
        for folder in (self._blobs, self._partial, self._sets):
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        if not self._prepared:
            for folder in (self._blobs, self._sets):
                for draft in folder.glob(".*"):
                    draft.unlink(missing_ok=True)
        self._prepared = True

    def remember(self, manifest: Manifest) -> None:
        """Keeps the manifest, so that the set is known without a mirror. Raises OSError."""
        self.prepare()
        draft = self._sets / f".{manifest.key}.{secrets.token_hex(4)}"
        try:
            draft.write_bytes(msgspec.json.encode(manifest))
            draft.replace(self._manifest_path(manifest.key))
        finally:
            draft.unlink(missing_ok=True)

    def is_beside(self, content: str, size: int) -> bool:
        """Whether the folder of a mirror on this machine holds a content whole. Quick."""
        return self._beside is not None and _size(self._beside / content) == size

    def is_in(self, folder: Path, file: ManifestFile) -> bool:
        """Whether a mirror's folder holds this content whole. Quick."""
        return _size(folder / "blobs" / file.sha256) == file.bytes

    def written_through(self, folder: Path, file: ManifestFile) -> None:
        """Returns once a content of a mirror's folder is surely on the disk. Takes long for a new one.

        What is linked before that may have the right size and no bytes after a power cut.
        """
        with contextlib.suppress(OSError):
            handle = os.open(folder / "blobs" / file.sha256, os.O_RDONLY | os.O_CLOEXEC)
            try:
                os.fsync(handle)
            finally:
                os.close(handle)

    def link_from(self, folder: Path, file: ManifestFile) -> bool:
        """Takes a content of a mirror's folder on this disk by a link; False when that cannot be."""
        if not self.is_in(folder, file):
            return False
        theirs = folder / "blobs" / file.sha256
        try:
            self._put_link(theirs, self._blobs / file.sha256)
        except OSError as error:
            log.info("not linked", extra={"file": str(theirs), "problem": str(error)})
            return False
        (self._partial / file.sha256).unlink(missing_ok=True)
        return True

    def keep(self, content: str) -> None:
        """Makes a content that came whole one of the blobs, never changed again. Raises OSError."""
        (self._partial / content).chmod(0o400)
        (self._partial / content).replace(self._blobs / content)

    def discard(self, content: str) -> None:
        """Throws away what came of a content. Raises OSError."""
        (self._partial / content).unlink(missing_ok=True)

    def name(self, manifest: Manifest) -> Path:
        """Gives every file of a set, all of whose contents are here, its name; where the first lies.

        Raises OSError.
        """
        folder = self._sets / manifest.key
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        for stray in {path.name for path in folder.iterdir()} - {f.name for f in manifest.files}:
            (folder / stray).unlink()
        for file in manifest.files:
            blob, path = self._blobs / file.sha256, folder / file.name
            if not _same(path, blob):
                self._put_link(blob, path)
        self.use(manifest.key)
        return folder / manifest.files[0].name

    def use(self, key: str) -> None:
        """Remembers that a replica uses the set now. Quick."""
        path = self._manifest_path(key)
        read = self._read.get(key)
        with contextlib.suppress(OSError):
            before = path.stat()
            os.utime(path)
            after = _stamp(path.stat())
            if read is not None and read.stamp == _stamp(before) and after[::2] == read.stamp[::2]:
                # Its time is all that changed, and by us: that is no reason to read it again.
                self._read[key] = replace(read, stamp=after)

    def evict(self, sets: Collection[str], contents: Collection[str]) -> None:
        """Removes sets, those of their contents no other set names, and stray `contents`.

        Names go before contents: a kill in between leaves strays, never a name that leads nowhere.
        """
        going = set(contents)
        for key in sets:
            manifest = self.manifest(key)
            if manifest is not None:
                going.update(file.sha256 for file in manifest.files)
            shutil.rmtree(self._sets / key, ignore_errors=True)
            self._manifest_path(key).unlink(missing_ok=True)
            self._read.pop(key, None)
            self._names.pop(key, None)
        for path in self._sets.glob("*.json"):
            manifest = self.manifest(path.stem)
            if manifest is not None:
                going.difference_update(file.sha256 for file in manifest.files)
        for content in sorted(going):
            (self._blobs / content).unlink(missing_ok=True)
            (self._partial / content).unlink(missing_ok=True)

    def _manifest_path(self, key: str) -> Path:
        return self._sets / f"{key}.json"

    @staticmethod
    def _put_link(target: Path, path: Path) -> None:
        """A second name for a file, whole or not at all, whatever had that name before."""
        draft = path.with_name(f".{secrets.token_hex(8)}")
        try:
            os.link(target, draft)
            draft.replace(path)
        finally:
            # rename() of two links of one file does nothing and leaves both.
            draft.unlink(missing_ok=True)


def is_full(error: OSError) -> bool:
    """Whether the disk, or this user's share of it, has no room left."""
    return error.errno in (errno.ENOSPC, errno.EDQUOT)


def _contents(folder: Path) -> Iterator[tuple[str, os.stat_result]]:
    with os.scandir(folder) as found:
        for entry in found:
            if is_sha256(entry.name):
                with contextlib.suppress(FileNotFoundError):  # it just became whole
                    yield entry.name, entry.stat()


def _stamp(status: os.stat_result) -> tuple[int, int, int]:
    """What a file looks like: another one, or one that was written, looks different."""
    return status.st_ino, status.st_mtime_ns, status.st_size


def _size(path: Path | str) -> int | None:
    try:
        return os.stat(path).st_size
    except OSError:
        return None


def _same(path: Path, blob: Path) -> bool:
    try:
        return path.samefile(blob)
    except OSError:
        return False
