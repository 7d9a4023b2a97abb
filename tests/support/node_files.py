"""The files of one node in a test, without an agent around them."""

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from nodeagent.files.fetches import FetchFailed, Files
from schemas.beacons import MirrorBeacon
from schemas.mirror import Manifest
from schemas.progress import FileProgress
from schemas.settings import NodeagentSettings
from tests.support.aio import run
from tests.support.scripted_mirror import TOKEN, Mirror


@dataclass
class Told:
    """A wire that only remembers what was told over it, and when."""

    progress_told: list[tuple[float, FileProgress]] = field(default_factory=list)

    async def progress(self, writer: str, kind: str, name: str, body: FileProgress) -> None:
        assert (writer, kind, name) == ("n1", "fetch", body.replica)
        self.progress_told.append((time.monotonic(), body))


@dataclass
class NodeFiles:
    """`files` on `folder`; `needed` are the keys replicas need."""

    folder: Path
    files: Files
    told: Told
    needed: set[str]
    also_needed: Callable[[], frozenset[str]] = frozenset[str]

    def hear(self, *mirrors: Mirror) -> None:
        for mirror in mirrors:
            self.files.hear(mirror.url, MirrorBeacon(mirror=mirror.url, url=mirror.url))

    async def obtain(self, manifest: Manifest, replica: str = "r-1") -> Path:
        return Path(await self.files.obtain(f"mirror:{manifest.key}", replica))

    def partial(self, manifest: Manifest, n: int = 0) -> Path:
        return self.folder / "partial" / manifest.files[n].sha256

    def blob(self, manifest: Manifest, n: int = 0) -> Path:
        return self.folder / "blobs" / manifest.files[n].sha256

    def contents(self) -> dict[str, bytes]:
        return {path.name: path.read_bytes() for path in (self.folder / "blobs").iterdir()}


def node_files(
    folder: Path,
    *mirrors: Mirror,
    monotonic: Callable[[], float] = time.monotonic,
    spares_adapters: Callable[[], bool] = lambda: False,
    **fields: Any,
) -> NodeFiles:
    """Files of node n1 that heard of these mirrors."""
    told: Any = Told()
    needed: set[str] = set()
    given = {"files_keep_free_bytes": 0, "fetch_no_progress_s": 20.0, **fields}
    files = Files(
        folder,
        node="n1",
        wire=told,
        token=TOKEN,
        needed=lambda: frozenset(needed) | made.also_needed(),
        settings=NodeagentSettings(**given),
        spares_adapters=spares_adapters,
        monotonic=monotonic,
    )
    made = NodeFiles(folder=folder, files=files, told=told, needed=needed)
    made.hear(*mirrors)
    return made


def failing(node: NodeFiles, manifest: Manifest) -> FetchFailed:
    """How a fetch that must fail does."""

    async def story() -> FetchFailed:
        with pytest.raises(FetchFailed) as caught:
            await node.obtain(manifest)
        return caught.value

    return run(story())
