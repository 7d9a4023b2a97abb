"""Does the tasks of the leader's workers: asks registries, reads headers and adapters, moves files, says hello.

Each task ends in one report. It decides nothing and writes nothing to the log.
"""

import asyncio
from collections.abc import Callable
from typing import Final

from controlplane import headers
from controlplane.adapterplaces.reader import AdapterReader
from controlplane.domain.adaptersources import place_of
from controlplane.domain.filesets import ADAPTER_CONFIG, ADAPTER_WEIGHTS
from controlplane.domain.ggufheader import NotGguf
from controlplane.domain.reports import (
    FileFault,
    FileGone,
    FileStored,
    HeaderRead,
    RepoRead,
    Report,
    StepFailed,
)
from controlplane.domain.work import (
    Fetch,
    ReadAdapter,
    ReadHeader,
    ReadRepo,
    Remove,
    Smoke,
    Task,
    Verify,
)
from controlplane.headers import Found, Headers, TooSlow
from controlplane.mirror import checking
from controlplane.mirror.domain.sources import sources_of
from controlplane.mirror.fetching import Fetcher
from controlplane.mirror.store import Store
from controlplane.registry.client import Registry
from controlplane.registry.faults import RegistryFault
from controlplane.registry.rangedfile import KEPT_BYTES
from controlplane.smoke import smoke
from events.secrets import engine_key, mirror_token, node_secret
from schemas import codes
from schemas.progress import FileProgress

CONTROL: Final = "\0control"
"""The name control planes read each other's mirrors by. It is no node's: an argument, a variable of the
environment and a file of settings cannot hold a NUL."""


class Hands:
    """The hands of one instance; `fetches` files are fetched at the same time, and as many of adapters beside
    them from the network and from folders. `others` are the URLs of the other live mirrors by name, `far` the
    turns of all who read headers at the registry."""

    def __init__(
        self,
        *,
        mirror: str,
        registry: Registry,
        far: Headers,
        store: Store,
        fetcher: Fetcher,
        others: Callable[[], dict[str, str]],
        yard_secret: str,
        smoke_timeout_s: float,
        on_progress: Callable[[FileProgress], None],
        fetches: int,
    ) -> None:
        self._mirror = mirror
        # A set may have hundreds of shards, and each fetch is a thread with its buffers.
        self._fetches = asyncio.Semaphore(max(fetches, 1))
        # An adapter of some MiB does not wait for the hours that a model takes.
        self._small_fetches = asyncio.Semaphore(max(fetches, 1))
        # Nor does a folder of this machine wait for a server that stands still.
        self._near_fetches = asyncio.Semaphore(max(fetches, 1))
        self._registry = registry
        self._far = far
        # A registry that drips does not hold up what is read from this disk.
        self._near = Headers(at_once=1)
        self._store = store
        self._fetcher = fetcher
        self._others = others
        self._yard_secret = yard_secret
        self._smoke_timeout_s = smoke_timeout_s
        self._on_progress = on_progress
        self._adapters = AdapterReader(registry, here=mirror)

    async def do(self, task: Task) -> Report:
        """What came of `task`."""
        match task:
            case ReadRepo():
                return await self._repo(task)
            case ReadHeader():
                return await self._header(task)
            case Smoke():
                key = None
                if task.has_key:
                    key = engine_key(node_secret(self._yard_secret, task.node), task.replica)
                return await smoke(task, key, timeout_s=self._smoke_timeout_s)
            case ReadAdapter():
                return await self._adapters.read(task)
            case Fetch():
                async with self._turns(task):
                    return await self._fetch(task)
            case Verify():
                return await checking.verify(
                    self._store, task, mirror=self._mirror, on_progress=self._on_progress
                )
            case Remove():
                return await checking.remove(self._store, task, mirror=self._mirror)

    def _turns(self, task: Fetch) -> asyncio.Semaphore:
        """Among which fetches it takes its turn."""
        if not _is_small(task):
            return self._fetches
        return self._near_fetches if place_of(task.repo) == "folder" else self._small_fetches

    async def _fetch(self, task: Fetch) -> FileStored | FileFault:
        try:
            # It is the registry's alone: what comes from elsewhere does not fail of a token that is none.
            token = self._registry.token() if place_of(task.repo) == "registry" else None
        except RegistryFault as fault:
            return FileFault(
                key=task.key, mirror=self._mirror, code=fault.code, sentence=fault.sentence
            )
        sources = sources_of(
            task,
            mirrors=self._others(),
            mirror_token=mirror_token(node_secret(self._yard_secret, CONTROL), CONTROL),
            endpoint=self._registry.endpoint,
            registry_token=token,
        )
        return await self._fetcher.fetch(task, sources=sources)

    async def _repo(self, task: ReadRepo) -> RepoRead | StepFailed:
        try:
            repo = await self._registry.repo(task.repo, task.revision)
        except RegistryFault as fault:
            return _failed(task, fault.code, fault.sentence)
        return RepoRead(job=task.job, attempt=task.attempt, repo=repo)

    async def _header(self, task: ReadHeader) -> HeaderRead | StepFailed | FileGone:
        try:
            if task.mirrored:
                reading = self._store.read(task.key)
                if reading is None:
                    return FileGone(key=task.key, mirror=self._mirror)
                with reading:
                    found = await self._near.shape(headers.of_mirror(reading))
            else:
                file = self._registry.open(task.repo, task.commit, task.path, KEPT_BYTES)
                found = await self._far.shape(file.prefix)
        except RegistryFault as fault:
            return _failed(task, fault.code, fault.sentence)
        except OSError as error:
            return _failed(task, codes.DISK_FAILED, f"{task.path} cannot be read: {error.strerror}")
        except TooSlow as slow:
            code = codes.DISK_FAILED if task.mirrored else codes.REGISTRY_UNREACHABLE
            return _failed(task, code, f"the header of {task.path} {slow}")
        match found:
            case NotGguf(sentence=why):
                return _failed(task, codes.NOT_GGUF, f"{task.path} is not a GGUF file: {why}")
            case Found(shape=shape, why=why):
                return HeaderRead(
                    job=task.job,
                    attempt=task.attempt,
                    index=task.index,
                    shape=shape,
                    architecture=found.architecture,
                    why=why,
                    free_bytes=self._store.free_bytes(),
                    reserved=self._store.reserved(),
                )


def _is_small(task: Fetch) -> bool:
    """Whether the file is an adapter's."""
    return task.path in (ADAPTER_WEIGHTS, ADAPTER_CONFIG)


def _failed(task: ReadRepo | ReadHeader, code: str, sentence: str) -> StepFailed:
    return StepFailed(
        job=task.job, attempt=task.attempt, index=task.index, code=code, sentence=sentence
    )
