"""Small parts for tests of a mirror: model files, tasks to fetch them, stores, a fetch run to its end."""

import hashlib
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from controlplane.domain.reports import FileFault, FileStored
from controlplane.domain.work import Fetch
from controlplane.mirror.domain.sources import Source, sources_of
from controlplane.mirror.fetching import Fetcher
from controlplane.mirror.store import Store
from schemas.settings import ControlplaneSettings
from tests.support.aio import run
from tests.support.fileserver import FileServer

REPO = "owner/repo"
COMMIT = "c" * 40


def model_bytes(count: int, seed: int = 1) -> bytes:
    """What looks like a model from outside: the magic, then noise."""
    return b"GGUF" + random.Random(seed).randbytes(count - 4)


def key_of(path: str, repo: str = REPO, commit: str = COMMIT) -> str:
    return hashlib.sha256(f"{repo}@{commit}/{path}".encode()).hexdigest()


def sha256(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


def task_for(content: bytes, path: str = "model.gguf", **changes: Any) -> Fetch:
    fields: dict[str, Any] = {
        "key": key_of(path),
        "repo": REPO,
        "commit": COMMIT,
        "path": path,
        "bytes": len(content),
        "sha256": sha256(content),
    }
    return Fetch(**(fields | changes))


def open_store(folder: Path, keep_free_bytes: int = 0) -> Store:
    store = Store(folder / "mirror", keep_free_bytes=keep_free_bytes)
    assert store.open() == ()
    return store


def registry_sources(task: Fetch, server: FileServer, token: str | None = None) -> Sequence[Source]:
    return sources_of(task, mirrors={}, mirror_token="", endpoint=server.url, registry_token=token)


def fetched(
    store: Store,
    task: Fetch,
    sources: Sequence[Source],
    *,
    no_progress_s: float = 5.0,
    timeout_s: float = 20.0,
    **settings: Any,
) -> FileStored | FileFault:
    """Runs one fetch to its end, settled."""

    async def go() -> FileStored | FileFault:
        fetcher = Fetcher(
            store,
            mirror="cp-1",
            settings=ControlplaneSettings(mirror_no_progress_s=no_progress_s, **settings),
        )
        result = await fetcher.fetch(task, sources=sources)
        await fetcher.settled()
        return result

    return run(go(), timeout_s)
