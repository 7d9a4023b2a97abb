"""Reads one adapter: its configuration and its files' names, sizes and sums, wherever it comes from.

It ends in one report. Whether the adapter fits its base is decided from that; no weights are kept here.
"""

import asyncio
import hashlib
from typing import Final

from controlplane.adapterplaces import folder, repository, web
from controlplane.adapterplaces.found import Found, Unreadable
from controlplane.domain import filesets
from controlplane.domain.adapterconfig import read_config
from controlplane.domain.adaptersources import FolderSource, RepoSource, WebSource, read_source
from controlplane.domain.filesets import ADAPTER_CONFIG, ADAPTER_WEIGHTS, Refusal
from controlplane.domain.reports import AdapterRead, AdapterUnreadable
from controlplane.domain.work import ReadAdapter
from controlplane.registry.client import Registry
from controlplane.registry.faults import RegistryFault
from schemas.adapter import AdapterFile
from schemas.codes import SOURCE_UNREACHABLE

AT_ONCE: Final = 4
"""Hundreds may be added together; a registry and a disk are asked by a few at a time."""

WHOLE_S: Final = 600.0
"""All the time one adapter gets from its turn on: a file system that answers no more keeps no turn for ever.
Weights of many GiB in a folder, which are hashed here, come within it."""


class AdapterReader:
    """The reader of one instance. `here` is what a person calls the machine it runs on; `retry_for_s` bounds all
    tries to read a URL, as the registry's own setting those to read a repository, `whole_s` everything."""

    def __init__(
        self,
        registry: Registry,
        *,
        here: str,
        retry_for_s: float = web.RETRY_FOR_S,
        whole_s: float = WHOLE_S,
    ) -> None:
        self._registry = registry
        self._here = here
        self._retry_for_s = retry_for_s
        self._whole_s = whole_s
        self._turns = asyncio.Semaphore(AT_ONCE)

    async def read(self, task: ReadAdapter) -> AdapterRead | AdapterUnreadable:
        """What `task.source` is. A fault of any kind is a report with its sentence."""
        try:
            async with self._turns:
                found = await self._bounded(task.source)
        except (Unreadable, RegistryFault) as fault:
            return _unreadable(task, fault.code, fault.sentence)
        config = read_config(found.config)
        if isinstance(config, Refusal):
            return _unreadable(task, config.code, f"{task.source}: {config.sentence}")
        return AdapterRead(
            adapter=task.adapter,
            incarnation=task.incarnation,
            repo=found.repo,
            commit=found.commit,
            config=config,
            files=_files(found),
        )

    async def _bounded(self, source: str) -> Found:
        bound = asyncio.timeout(self._whole_s)
        try:
            async with bound:
                return await self._find(source)
        except TimeoutError:
            if not bound.expired():
                raise
            raise Unreadable(
                SOURCE_UNREACHABLE, f"{source} could not be read within {self._whole_s:g} s"
            ) from None

    async def _find(self, source: str) -> Found:
        match read_source(source):
            case RepoSource() as named:
                return await repository.find(self._registry, named)
            case WebSource() as named:
                return await web.find(named, retry_for_s=self._retry_for_s)
            case FolderSource() as named:
                return await folder.find(named, here=self._here)
            case Refusal() as refusal:
                raise Unreadable(refusal.code, refusal.sentence)


def _files(found: Found) -> tuple[AdapterFile, ...]:
    """The weights first: their key names the set."""

    def named(name: str, size: int, sha256: str) -> AdapterFile:
        key = filesets.file_key(found.repo, found.commit, name)
        return AdapterFile(key=key, name=name, bytes=size, sha256=sha256)

    return (
        named(ADAPTER_WEIGHTS, found.weights_bytes, found.weights_sha256),
        named(ADAPTER_CONFIG, len(found.config), hashlib.sha256(found.config).hexdigest()),
    )


def _unreadable(task: ReadAdapter, code: str, sentence: str) -> AdapterUnreadable:
    return AdapterUnreadable(
        adapter=task.adapter, incarnation=task.incarnation, code=code, sentence=sentence
    )
