"""Makes the files of a set be on this node before a replica starts, and tells how far they are.

One fetch per content however many replicas want it. What somebody waits for comes first: a fetch ahead of time
gives way to it. It decides nothing of its own: what goes to make room, when a fetch failed and how soon the
next attempt comes is decided in `domain/files.py`.
"""

import asyncio
import contextlib
import logging
import time
from collections import deque
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Final, TypeVar

import msgspec
from msgspec import Struct
from msgspec.structs import replace

from events.log import Wire
from nodeagent.domain import files
from nodeagent.domain.files import FETCH_FAILED, NOTHING_KNOWN, Fault, GiveUp, Limits, Stays, Tried
from nodeagent.files.flights import Flights
from nodeagent.files.mirrors import Mirrors
from nodeagent.files.moving import Moving, Part, in_thread
from nodeagent.files.source import Failed, FolderSource, HttpSource, Source, ask_manifest
from nodeagent.files.store import Store, is_full
from schemas import codes
from schemas.beacons import MirrorBeacon
from schemas.mirror import Manifest, ManifestFile
from schemas.progress import FileProgress
from schemas.settings import NodeagentSettings

log = logging.getLogger(__name__)

T = TypeVar("T")

TELL_EVERY_S: Final = 1.0
RATE_OVER: Final = 6
"""The rate is over so many of the moments at which progress is told."""

AHEAD_S: Final = 20.0
"""So long a fetch that nobody waits for does without a new byte before the next one has its turn."""

STALL_S: Final = 30.0
"""A mirror that sends nothing for so long is left for the next one; always well before giving up."""


class FetchFailed(Exception):
    """The files could not be had: a code and a sentence for whoever wanted them."""

    def __init__(self, code: str, sentence: str) -> None:
        super().__init__(sentence)
        self.code = code
        self.sentence = sentence


class _Care(Struct, frozen=True, kw_only=True):
    """How a set is brought: `known` are the sha256 by name it must have, `spare` keys of sets that must not go
    for it besides those needed, `silent_s` how long without a new byte it is not given up."""

    known: Mapping[str, str]
    silent_s: float
    spare: frozenset[str] = frozenset()


class Survey(Struct, frozen=True, kw_only=True):
    """What lies on the disk, which of the sets asked about are whole there, and which contents a mirror's folder
    has, a link away."""

    disk: files.Disk
    here: frozenset[str]
    beside: frozenset[str]


class Files:
    """The fetched files of one node. One event loop owns it.

    `needed` names the keys of sets that replicas of this node need, whatever their phase. While
    `spares_adapters` says so no set of an adapter is evicted: any of them may be in use.
    """

    def __init__(
        self,
        folder: Path,
        *,
        node: str,
        wire: Wire,
        token: str,
        needed: Callable[[], frozenset[str]],
        settings: NodeagentSettings,
        spares_adapters: Callable[[], bool] = lambda: False,
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        self._mirror_folder = Path(settings.mirror_folder) if settings.mirror_folder else None
        self._store = Store(folder, self._mirror_folder)
        self._node = node
        self._wire = wire
        self._token = token
        self._needed = needed
        self._spares_adapters = spares_adapters
        self.limits = Limits(
            budget_bytes=settings.files_budget_bytes, keep_free_bytes=settings.files_keep_free_bytes
        )
        self._no_progress_s = settings.fetch_no_progress_s
        self._stall_s = min(STALL_S, max(settings.fetch_no_progress_s / 4, 0.1))
        self._monotonic = monotonic
        self._mirrors = Mirrors(monotonic)
        self._slots = asyncio.Semaphore(max(settings.fetches, 1))
        self._deciding = asyncio.Lock()
        self._evicting = False
        self._sets: Flights[Path] = Flights()
        self._contents: Flights[None] = Flights()
        self._promised: dict[str, dict[str, int]] = {}
        self._manifests: dict[str, Manifest] = {}
        self._moving: dict[str, Moving] = {}
        self._urgent = 0
        self._idle = asyncio.Event()
        self._idle.set()
        self._ahead: asyncio.Task[Path] | None = None

    @property
    def sets(self) -> Path:
        """The folder below which every set has a folder of its own."""
        return self._store.sets

    def hear(self, name: str, beacon: MirrorBeacon) -> None:
        """A mirror announced itself."""
        self._mirrors.hear(name, beacon)

    def local(self, source: str) -> str | None:
        """What a driver is given for this source, when that is on this node now. Quick.

        A path stays what it is; of a set it is the first file.
        """
        key = files.key_of(source)
        if key is None:
            return source
        path = self.whole(key)
        return str(path) if path is not None else None

    def whole(self, key: str, known: Mapping[str, str] = NOTHING_KNOWN) -> Path | None:
        """Where the first file of a set lies, when all of it is on this node now. Quick."""
        return self._store.whole(key, known)

    def used(self, source: str) -> None:
        """A replica is done with this source: it was in use until now."""
        key = files.key_of(source)
        if key is not None and files.is_sha256(key):
            self._store.use(key)

    async def obtain(self, source: str, replica: str, model: str = "") -> str:
        """Makes the files of `source` be here for a replica of `model`; the path a driver is given.

        Needs nobody when they are. Raises FetchFailed. Cancelled, it returns at once and leaves what came.
        """
        key = files.key_of(source)
        if key is None:
            return source
        if not files.is_sha256(key):
            raise FetchFailed(FETCH_FAILED, f"{source!r} names no file of a mirror")
        if (path := self.take(key)) is not None:
            return str(path)
        telling = asyncio.create_task(self._tell(key, replica, model))
        try:
            return str(await self._soon(key, NOTHING_KNOWN))
        finally:
            telling.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await telling

    async def obtain_set(self, key: str, known: Mapping[str, str] = NOTHING_KNOWN) -> Path:
        """As `obtain`, of a set by its key, for somebody who is no replica; where its first file lies."""
        if not files.is_sha256(key):
            raise FetchFailed(FETCH_FAILED, f"{key!r} names no file of a mirror")
        return self.take(key, known) or await self._soon(key, known)

    def take(self, key: str, known: Mapping[str, str] = NOTHING_KNOWN) -> Path | None:
        """Where the first file of a set lies that needs nothing done, used just now; None when it does. Quick."""
        path = self._store.whole(key, known)
        if path is None or self._evicting:
            return None
        # Behind what it is used for: somebody waits for that.
        asyncio.get_running_loop().call_soon(self._store.use, key)
        return path

    async def _soon(self, key: str, known: Mapping[str, str]) -> Path:
        """Brings a set that somebody waits for, once what nobody waits for has let go."""
        care = _Care(known=known, silent_s=self._no_progress_s)
        async with self._first():
            return await self._sets.join(key, lambda: self._bring(key, care))

    @asynccontextmanager
    async def _first(self) -> AsyncIterator[None]:
        """What is done within has the node to itself: nothing is fetched ahead of time meanwhile.

        The two never share work, so none of the one's limits become the other's.
        """
        self._urgent += 1
        self._idle.clear()
        try:
            if self._ahead is not None:
                self._ahead.cancel()
                await asyncio.wait({self._ahead})
            yield
        finally:
            self._urgent -= 1
            if not self._urgent:
                self._idle.set()

    # Ahead of time.

    async def idle(self) -> None:
        """Returns once nobody waits for files and a mirror is known to fetch from."""
        while self._urgent or not self._mirrors.urls():
            await self._idle.wait()
            if not self._mirrors.urls():
                await self._mirrors.new_one(AHEAD_S)

    async def survey(
        self, sets: Mapping[str, Mapping[str, str]], contents: Mapping[str, int]
    ) -> Survey:
        """Looks at the disk. `sets` are sha256 by name, by key; `contents` sizes by sha256. Raises OSError."""
        async with self._deciding:
            return await _to_the_end(partial(self._survey, sets, contents, self._all_promised()))

    def _survey(
        self,
        sets: Mapping[str, Mapping[str, str]],
        contents: Mapping[str, int],
        promised: dict[str, int],
    ) -> Survey:
        return Survey(
            disk=self._store.look(promised),
            here=frozenset(k for k, known in sets.items() if self._store.whole(k, known)),
            beside=frozenset(c for c, size in contents.items() if self._store.is_beside(c, size)),
        )

    async def fetch_ahead(
        self, key: str, known: Mapping[str, str], spare: frozenset[str]
    ) -> Path | None:
        """Brings a set that nobody waits for, one at a time; None when it gave way to somebody who does.

        Evicts none of `spare`. What came stays. Raises FetchFailed.
        """
        assert self._ahead is None, "one at a time"
        if self._urgent:
            return None
        care = _Care(known=known, silent_s=min(self._no_progress_s, AHEAD_S), spare=spare)
        self._ahead = asyncio.create_task(self._sets.join(key, lambda: self._bring(key, care)))
        try:
            await asyncio.wait({self._ahead})
            return None if self._ahead.cancelled() else self._ahead.result()
        finally:
            self._ahead.cancel()
            await asyncio.wait({self._ahead})
            if not self._ahead.cancelled():
                self._ahead.exception()  # whoever asked may have left just before it failed
            self._ahead = None

    # Room.

    def needed(self, disk: files.Disk) -> frozenset[str]:
        """The keys of sets that replicas need, that are being brought, or that may be in use."""
        return self._stays().among(disk)

    async def keep_within(self) -> None:
        """Evicts what is held beyond the budget, as far as nothing here needs it. Never fails."""
        if not self.limits.budget_bytes:
            return
        async with self._making_room():
            stays, promised = self._stays(), self._all_promised()
            try:
                await _to_the_end(partial(self._trim, stays, promised))
            except OSError as error:
                log.warning("files not looked through", extra={"problem": str(error)})

    @asynccontextmanager
    async def _making_room(self) -> AsyncIterator[None]:
        """Within, sets may go: what looks whole now may not be a moment later."""
        async with self._deciding:
            self._evicting = True
            try:
                yield
            finally:
                self._evicting = False

    def _stays(self) -> Stays:
        keys = self._needed() | self._sets.names()
        return Stays(keys=keys, every_adapter=self._spares_adapters())

    def _trim(self, stays: Stays, promised: dict[str, int]) -> None:
        disk = self._store.look(promised)
        self._evict(files.excess(disk, stays.among(disk), self.limits))

    def _evict(self, room: files.Room) -> None:
        if room.sets or room.contents:
            log.info("files evicted", extra={"sets": room.sets, "contents": room.contents})
            self._store.evict(room.sets, room.contents)

    def _all_promised(self) -> dict[str, int]:
        return {name: size for one in self._promised.values() for name, size in one.items()}

    # One set.

    async def _bring(self, key: str, care: _Care) -> Path:
        """1. all of it is here. 2. what it consists of. 3. what a mirror's folder has. 4. room for the
        rest. 5. the bytes. 6. their names."""
        try:
            async with self._deciding:
                manifest = self._store.manifest(key, care.known)
                if manifest is not None and not self._store.missing(manifest):  # 1
                    return await _to_the_end(partial(self._store.name, manifest))
            manifest = await self._manifest(key, care)  # 2
            self._manifests[key] = manifest
            if (folder := self._mirror_folder) is not None:
                for file in self._store.missing(manifest):
                    if self._store.is_in(folder, file):
                        await in_thread(
                            lambda _, file=file: self._store.written_through(folder, file)
                        )
            async with self._making_room():
                stays = self._stays().also(care.spare)
                reserve = partial(self._reserve, manifest, stays, self._all_promised())
                self._promised[key] = await _to_the_end(reserve)  # 3, 4
            await self._fetch_all(manifest, care)  # 5
            async with self._deciding:
                return await _to_the_end(partial(self._store.name, manifest))  # 6
        except OSError as error:
            code = codes.DISK_FULL if is_full(error) else FETCH_FAILED
            raise FetchFailed(
                code, f"the files cannot be kept on this node: {error.strerror} ({error.filename})"
            ) from error
        finally:
            self._promised.pop(key, None)
            self._manifests.pop(key, None)

    def _reserve(
        self, manifest: Manifest, stays: Stays, promised: dict[str, int]
    ) -> dict[str, int]:
        """What is still to be fetched, by content, once there is room for it. In a thread.

        Raises FetchFailed, OSError.
        """
        self._store.prepare()
        if self._mirror_folder is not None:
            for file in self._store.missing(manifest):
                if self._store.link_from(self._mirror_folder, file):
                    log.info("file linked", extra={"file": file.name, "sha256": file.sha256})
        wanted = {file.sha256: file.bytes for file in self._store.missing(manifest)}
        disk = self._store.look(promised)
        room = files.make_room(
            wanted,
            disk,
            stays.among(disk) | {manifest.key},
            self.limits,
            beside={file.sha256 for file in manifest.files},
        )
        if isinstance(room, files.NoRoom):
            raise FetchFailed(codes.DISK_FULL, room.sentence)
        # Remembered first: what it shares with a set that goes has a name of its own by then.
        self._store.remember(manifest)
        self._evict(room)
        return wanted

    async def _fetch_all(self, manifest: Manifest, care: _Care) -> None:
        missing = self._store.missing(manifest)
        try:
            async with asyncio.TaskGroup() as group:
                for file in missing:
                    fetch = partial(self._fetch, file, care.silent_s)
                    group.create_task(self._contents.join(file.sha256, fetch))
        except BaseExceptionGroup as failures:
            raise failures.exceptions[0] from None

    # One manifest, one content.

    async def _manifest(self, key: str, care: _Care) -> Manifest:
        """What a mirror says the set consists of. Raises FetchFailed when none says it in time."""
        tried, began = Tried(), self._monotonic()
        while True:
            urls = self._mirrors.urls()
            for url in urls:
                try:
                    body = await in_thread(
                        lambda stopper, url=url: ask_manifest(
                            url, key, self._token, self._stall_s, stopper
                        )
                    )
                    return _believed(body, key, url, care.known)
                except Failed as failed:
                    tried = _or_fail(files.after(tried, failed.fault))
            await self._rest(tried, urls, self._monotonic() - began, care.silent_s)
            tried = replace(tried, rounds=tried.rounds + 1)

    async def _fetch(self, file: ManifestFile, silent_s: float) -> None:
        """Fetches one content from whoever has it. Raises FetchFailed."""
        moving = Moving(total_bytes=file.bytes)
        part = Part(self._store.partial(file.sha256), file, moving)
        self._moving[file.sha256] = moving
        tried = Tried()
        try:
            while True:
                asked = time.monotonic()
                async with self._slots:
                    # Waiting for its turn is nobody's silence.
                    moving.moved_at += time.monotonic() - asked
                    before = moving.bytes
                    sources = self._sources(file)
                    for source in sources or (None,):
                        what = "copying" if isinstance(source, FolderSource) else "fetching"
                        try:
                            await in_thread(partial(part.attempt, source, what))
                        except Failed as failed:
                            log.info("fetch interrupted", extra={"problem": str(failed)})
                            tried = _or_fail(files.after(tried, failed.fault))
                            continue
                        await _to_the_end(partial(self._store.keep, file.sha256))
                        log.info("file fetched", extra={"file": file.name, "sha256": file.sha256})
                        return
                names = tuple(source.name for source in sources)
                rounds = tried.rounds + 1 if moving.bytes == before else 0
                await self._rest(tried, names, time.monotonic() - moving.moved_at, silent_s)
                tried = replace(tried, rounds=rounds)
        finally:
            del self._moving[file.sha256]

    def _sources(self, file: ManifestFile) -> tuple[Source, ...]:
        """Who may have the content, best first: this machine, then the mirrors."""
        here: tuple[Source, ...] = ()
        if self._mirror_folder is not None and self._store.is_in(self._mirror_folder, file):
            here = (FolderSource(self._mirror_folder, file.sha256),)
        mirrors = (
            HttpSource(url, file.key, file.sha256, self._token, self._stall_s)
            for url in self._mirrors.urls()
        )
        return (*here, *mirrors)

    async def _rest(
        self, tried: Tried, sources: tuple[str, ...], silent_s: float, most_s: float
    ) -> None:
        """Waits until the next round may begin. Raises FetchFailed when there is none."""
        pause_s = files.next_pause_s(tried, sources, silent_s, most_s)
        if isinstance(pause_s, GiveUp):
            raise FetchFailed(pause_s.code, pause_s.sentence)
        await self._mirrors.new_one(pause_s)

    # Progress.

    async def _tell(self, key: str, replica: str, model: str) -> None:
        """Tells how far the set is, at most once a second, until cancelled. Nobody needs to hear it."""
        samples: deque[tuple[float, int]] = deque(maxlen=RATE_OVER)
        while True:
            told = self._progress(key, replica, model)
            if told is not None:
                samples.append((self._monotonic(), told.bytes))
                rate = files.rate_bytes_s(samples)
                await self._wire.progress(
                    self._node, "fetch", replica, replace(told, rate_bytes_s=rate)
                )
            await asyncio.sleep(TELL_EVERY_S)

    def _progress(self, key: str, replica: str, model: str) -> FileProgress | None:
        """How far a set is now; None when it is here anyway or nobody knows yet what it consists of."""
        manifest, promised = self._manifests.get(key), self._promised.get(key)
        if manifest is None or not promised:
            return None
        total = sum(file.bytes for file in manifest.files)
        moving = [self._moving[content] for content in promised if content in self._moving]
        left = sum(
            size - (self._moving[c].bytes if c in self._moving else self._store.here_bytes(c))
            for c, size in promised.items()
        )
        what = next((m.what for m in moving if m.what != "hashing"), "hashing")
        return FileProgress(
            key=key,
            bytes=total - left,
            total_bytes=total,
            what=what if moving else "fetching",
            replica=replica,
            model=model,
        )


def _believed(body: bytes, key: str, url: str, known: Mapping[str, str]) -> Manifest:
    """The manifest in a mirror's answer. Raises Failed when it is none."""
    try:
        manifest = msgspec.json.decode(body, type=Manifest)
        problem = files.flaw(manifest, key, known)
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        problem, manifest = str(error), None
    if manifest is None or problem is not None:
        sentence = f"the mirror at {url} told of the set what cannot be believed: {problem}"
        raise Failed(Fault(kind="away", source=url, sentence=sentence))
    return manifest


def _or_fail(outcome: Tried | GiveUp) -> Tried:
    if isinstance(outcome, GiveUp):
        raise FetchFailed(outcome.code, outcome.sentence)
    return outcome


async def _to_the_end(work: Callable[[], T]) -> T:
    """What `work` returns, done in a thread. A cancelled wait still waits: files half evicted or half
    named must not meet the next decision."""
    task = asyncio.ensure_future(asyncio.to_thread(work))
    try:
        return await asyncio.shield(task)
    except asyncio.CancelledError:
        await asyncio.wait({task})
        raise
