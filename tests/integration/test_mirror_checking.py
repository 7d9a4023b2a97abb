"""A mirror reads its files again and removes them: what is wrong goes at once, what is read stays a while."""

import asyncio
import os
from pathlib import Path

import pytest

from controlplane.domain.reports import FileFault, FileGone, FileStored
from controlplane.domain.work import Remove, Verify
from controlplane.mirror.checking import remove, verify
from controlplane.mirror.store import Store
from schemas import codes
from schemas.progress import FileProgress
from tests.support.aio import run
from tests.support.fileserver import file_server, whole_or_rest
from tests.support.mirrors import (
    fetched,
    key_of,
    model_bytes,
    open_store,
    registry_sources,
    sha256,
    task_for,
)

CONTENT = model_bytes(3_000_000)
KEY = key_of("model.gguf")
VERIFY = Verify(key=KEY, sha256=sha256(CONTENT), bytes=len(CONTENT))


@pytest.fixture
def store(tmp_path: Path) -> Store:
    store, task = open_store(tmp_path), task_for(CONTENT)
    with file_server(whole_or_rest(CONTENT)) as server:
        fetched(store, task, registry_sources(task, server))
    return store


def spoil(store: Store) -> None:
    entry = store.entry(KEY)
    assert entry is not None
    path = store.path_of(entry)
    path.chmod(0o600)
    with path.open("r+b") as file:
        file.seek(1_500_000)
        file.write(b"rotten")


def test_a_right_file_is_found_right(store: Store) -> None:
    said: list[FileProgress] = []
    result = run(verify(store, VERIFY, mirror="cp-1", on_progress=said.append))
    assert result == FileStored(
        key=KEY,
        mirror="cp-1",
        sha256=sha256(CONTENT),
        bytes=len(CONTENT),
        compared=True,
        origin="store",
    )
    assert said[0].what == "verifying"
    assert said[0].total_bytes == len(CONTENT)


def test_a_file_that_rotted_is_told_and_gone_and_fetched_again(store: Store) -> None:
    spoil(store)
    result = run(verify(store, VERIFY, mirror="cp-1"))
    assert isinstance(result, FileFault)
    assert result.code == codes.CHECKSUM_MISMATCH
    assert sha256(CONTENT)[:12] in result.sentence
    assert not store.has(KEY)
    task = task_for(CONTENT)
    with file_server(whole_or_rest(CONTENT)) as server:
        again = fetched(store, task, registry_sources(task, server))
        assert server.sent == len(CONTENT)
    assert isinstance(again, FileStored)
    assert run(verify(store, VERIFY, mirror="cp-1")) == FileStored(
        key=KEY,
        mirror="cp-1",
        sha256=sha256(CONTENT),
        bytes=len(CONTENT),
        compared=True,
        origin="store",
    )


def test_a_file_that_is_not_there_is_gone(tmp_path: Path) -> None:
    result = run(verify(open_store(tmp_path), VERIFY, mirror="cp-1"))
    assert result == FileGone(key=KEY, mirror="cp-1")


def test_a_verification_ends_when_it_is_cancelled(store: Store) -> None:
    async def go() -> None:
        running = asyncio.create_task(verify(store, VERIFY, mirror="cp-1"))
        await asyncio.sleep(0)
        running.cancel()
        with pytest.raises(asyncio.CancelledError):
            await running

    run(go())
    assert store.has(KEY)


def test_what_cannot_be_removed_is_told_as_a_removal(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object, **__: object) -> None:
        raise OSError(30, "Read-only file system")

    monkeypatch.setattr(store, "remove", full)
    fault = run(remove(store, Remove(key=KEY), mirror="cp-1"))
    assert isinstance(fault, FileFault)
    assert fault.removal
    assert fault.sentence == f"{store.folder} could not be changed: Read-only file system"


def test_removed_is_gone_with_its_bytes(store: Store) -> None:
    assert run(remove(store, Remove(key=KEY), mirror="cp-1")) == FileGone(key=KEY, mirror="cp-1")
    assert os.listdir(store.folder / "blobs") == []
    assert run(remove(store, Remove(key=KEY), mirror="cp-1")) == FileGone(key=KEY, mirror="cp-1")
