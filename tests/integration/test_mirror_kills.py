"""A process that fetches is killed at byte marks, while it finishes and while it settles: the next goes on."""

import random
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from controlplane.domain.reports import FileStored
from controlplane.mirror.store import Store
from tests.support.fileserver import Asked, FileServer, file_server, whole_or_rest
from tests.support.mirrors import (
    fetched,
    key_of,
    model_bytes,
    registry_sources,
    sha256,
    task_for,
)

MIB = 1024 * 1024
LOST_BY_A_KILL = 8 * MIB
ROOT = Path(__file__).resolve().parents[2]
CONTENT = model_bytes(24 * MIB + 5)
KEY = key_of("model.gguf")


def start(folder: Path, server: FileServer) -> "subprocess.Popen[str]":
    return subprocess.Popen(
        [
            sys.executable,
            "-m",
            "tests.support.mirror_fetcher",
            str(folder),
            server.url,
            str(len(CONTENT)),
            sha256(CONTENT),
        ],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        text=True,
    )


def kill_when(process: "subprocess.Popen[str]", condition: Callable[[], bool], what: str) -> None:
    deadline = time.monotonic() + 20
    while not condition():
        assert process.poll() is None, f"the fetch was over before {what}"
        assert time.monotonic() < deadline, f"waited 20 s for {what}"
    process.kill()
    process.wait(10)
    assert process.stdout is not None
    process.stdout.close()


def finish(folder: Path, server: FileServer) -> str:
    process = start(folder, server)
    said, _ = process.communicate(timeout=30)
    return said.strip()


def content_of(folder: Path) -> bytes:
    store = Store(folder, keep_free_bytes=0)
    assert store.open() == ()
    entry = store.entry(KEY)
    assert entry is not None
    assert entry.settled
    return store.path_of(entry).read_bytes()


class Marks:
    """Serves the file and says when a byte mark was passed; it stops there until the client is gone."""

    def __init__(self, marks: list[int]) -> None:
        self.marks = marks
        self.passed = threading.Event()

    def script(self, asked: Asked) -> None:
        offset = asked.offset or 0
        mark = self.marks[0] if self.marks else len(CONTENT)
        if offset >= mark or not self.marks:
            if offset >= mark:
                self.passed.set()
            whole_or_rest(CONTENT)(asked)
            return
        whole_or_rest(CONTENT, cut_after=mark - offset)(asked)
        self.passed.set()
        asked.stall()


def test_scn_c6_kill_9_at_byte_marks_loses_little_and_no_lock_is_left(tmp_path: Path) -> None:
    seed = random.randrange(1 << 30)
    sys.stdout.write(f"seed {seed}\n")
    chance = random.Random(seed)
    marks = sorted([3, MIB, *(chance.randrange(len(CONTENT)) for _ in range(3))])
    kills = len(marks)
    server_side = Marks(marks)
    folder = tmp_path / "mirror"
    with file_server(server_side.script) as server:
        while server_side.marks:
            server_side.passed.clear()
            process = start(folder, server)
            kill_when(process, server_side.passed.is_set, f"byte {server_side.marks[0]}")
            server_side.marks.pop(0)
        assert finish(folder, server) == "stored registry"
        assert server.sent <= len(CONTENT) + kills * LOST_BY_A_KILL
        offsets = [asked.offset or 0 for asked in server.requests]
    assert offsets[-1] > 0
    assert offsets == sorted(offsets)
    assert content_of(folder) == CONTENT


@pytest.mark.parametrize("moment", ["last byte", "entry", "blob", "settled"])
def test_scn_c6_kill_9_around_the_end_costs_a_hash_and_no_byte(tmp_path: Path, moment: str) -> None:
    folder = tmp_path / "mirror"
    entry, blob = folder / "files" / f"{KEY}.json", folder / "blobs" / sha256(CONTENT)

    def is_settled() -> bool:
        return entry.exists() and b'"settled":true' in entry.read_bytes()

    with file_server(whole_or_rest(CONTENT)) as server:
        conditions: dict[str, Callable[[], bool]] = {
            "last byte": lambda: server.sent == len(CONTENT),
            "entry": entry.exists,
            "blob": blob.exists,
            "settled": is_settled,
        }
        kill_when(start(folder, server), conditions[moment], moment)
        said = finish(folder, server)
        assert said in ("stored registry", "stored store")
        assert server.sent <= len(CONTENT) + (LOST_BY_A_KILL if moment == "last byte" else 0)
    assert content_of(folder) == CONTENT
    assert list((folder / "partial").iterdir()) == []


def test_scn_c6_a_machine_that_lost_power_is_found_out_by_the_hash(tmp_path: Path) -> None:
    """Bytes that never reached the disk read as zeros: the beginning looks right and is not."""
    folder = tmp_path / "mirror"
    store = Store(folder, keep_free_bytes=0)
    store.open()
    with store.partial(KEY) as partial:
        partial.append(memoryview(CONTENT[:MIB] + bytes(MIB) + CONTENT[2 * MIB :]))
    task = task_for(CONTENT)
    with file_server(whole_or_rest(CONTENT)) as server:
        result = fetched(store, task, registry_sources(task, server))
        assert isinstance(result, FileStored)
    assert content_of(folder) == CONTENT
