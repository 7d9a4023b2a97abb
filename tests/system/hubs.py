"""Serve jobs in system tests: the hub a yard reads from, the jobs as the log tells them, a toll on a node's way.

The hub runs in the test's own process, so that a test sees every byte that leaves it at once.
"""

import asyncio
import contextlib
import functools
import hashlib
import os
import re
import socket
import sys
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Final

import pytest

from events.log import Recorded
from schemas.job import JOB_OVER, Job
from tests.hub import ggufs
from tests.hub.contents import Content, Joined, MadeUp, OnDisk
from tests.hub.server import Hub
from tests.support.aio import until
from tests.system.yard import SMOLLM2, SystemYard

MIB: Final = 1024**2
REPO: Final = "yard/SmolLM2-135M-Instruct-GGUF"
FILE: Final = "SmolLM2-135M-Instruct.Q4_1.gguf"
SMALL: Final = ("--ctx-pool", "2048", "--context-length", "2048")
TINY: Final = ("--ctx-pool", "1024", "--context-length", "512")
"""Windows that the real model, and the tiny ones, were trained for."""


@contextlib.contextmanager
def hub_of(monkeypatch: pytest.MonkeyPatch, *, bytes_per_s: float = 0.0) -> Iterator[Hub]:
    """A hub that every yard started from here reads from."""
    with Hub(bytes_per_s=bytes_per_s) as hub:
        monkeypatch.setenv("HF_ENDPOINT", hub.url)
        monkeypatch.delenv("HF_TOKEN", raising=False)
        yield hub


def model_of(size: int, seed: int = 0) -> Content:
    """A model of `size` bytes that an engine loads: SmolLM2, and what follows from `seed` behind it."""
    real = OnDisk(SMOLLM2)
    return Joined(real, MadeUp(size - real.size, seed, head=b""))


def key_of(commit: str, path: str = FILE, repo: str = REPO) -> str:
    return hashlib.sha256(f"{repo}@{commit}/{path}".encode()).hexdigest()


def sha256_of(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


async def begin(yard: SystemYard, *arguments: str) -> str:
    """`yardctl model serve … --detach`; the job's id."""
    told = await yard.ctl("model", "serve", *arguments, "--detach")
    found = re.search(r"job watch (\S+)", told)
    assert found is not None, told
    return found[1]


def latest(yard: SystemYard, job: str) -> Job | None:
    for event in reversed(yard.events):
        if event.noun == "job" and event.key == (job,):
            return event.state if isinstance(event.state, Job) else None
    return None


async def step_of(
    yard: SystemYard,
    job: str,
    name: str,
    state: str,
    *,
    index: int | None = None,
    after: int = 0,
    timeout_s: float = 60.0,
) -> Recorded:
    """Waits until that step (the last there is) of the job is in that state."""

    def true_of(event: Recorded) -> bool:
        if event.noun != "job" or event.key != (job,) or not isinstance(event.state, Job):
            return False
        steps = event.state.steps
        return (
            bool(steps)
            and (steps[-1].name, steps[-1].state) == (name, state)
            and index in (None, len(steps) - 1)
        )

    return await yard.when(
        true_of, f"step {name} {state} of {job}", after=after, timeout_s=timeout_s
    )


async def over(yard: SystemYard, job: str, *, after: int = 0, timeout_s: float = 60.0) -> Job:
    """Waits until the job is over; its last state."""

    def true_of(event: Recorded) -> bool:
        return (
            event.noun == "job"
            and event.key == (job,)
            and isinstance(event.state, Job)
            and event.state.state in JOB_OVER
        )

    event = await yard.when(true_of, f"the end of {job}", after=after, timeout_s=timeout_s)
    assert isinstance(event.state, Job)
    return event.state


async def sent(hub: Hub, path: str, count: int, timeout_s: float = 60.0) -> None:
    """Waits until the hub sent `count` bytes of `owner/name/path`."""
    reached = await asyncio.to_thread(hub.counters.wait_bytes, path, count, timeout_s)
    assert reached, f"{hub.counters.bytes_of(path)} of {count} bytes of {path} in {timeout_s} s"


async def kill(yard: SystemYard, part: str) -> None:
    """kill -9, and waits until its successor runs."""
    old = yard.kill(part)
    await until(
        lambda: yard.running.supervisor.pids.get(part, old) != old,
        f"{part} to be started again",
        20,
    )


class Toll:
    """Stands between the nodes and a mirror, counts the bytes that go through to the nodes, and slows them.

    What it counts is what the nodes' kernels took: its own buffer towards them is small.
    """

    def __init__(self, *, bytes_per_s: float = 0.0) -> None:
        self._rate = bytes_per_s
        self._free_at = 0.0
        self._target = 0
        self._changed = asyncio.Event()
        self._server: asyncio.Server | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        self.passed = 0

    @property
    def url(self) -> str:
        assert self._server is not None
        return f"http://127.0.0.1:{self._server.sockets[0].getsockname()[1]}"

    def lead_to(self, port: int) -> None:
        """Where the mirror is, known only once the yard runs."""
        self._target = port

    async def counted(self, count: int, timeout_s: float = 60.0) -> None:
        """Waits until `count` bytes went through."""
        deadline = time.monotonic() + timeout_s
        while self.passed < count:
            self._changed.clear()
            left = deadline - time.monotonic()
            try:
                await asyncio.wait_for(self._changed.wait(), max(left, 0.001))
            except TimeoutError:
                if time.monotonic() >= deadline:
                    raise AssertionError(
                        f"{self.passed} of {count} bytes went to the nodes in {timeout_s} s"
                    ) from None

    async def start(self) -> None:
        self._server = await asyncio.start_server(self._accept, "127.0.0.1", 0)

    async def close(self) -> None:
        assert self._server is not None
        self._server.close()
        for task in tuple(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self._server.wait_closed()

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 256 * 1024)
        writer.transport.set_write_buffer_limits(high=0)
        far: asyncio.StreamWriter | None = None
        try:
            far_reader, far = await asyncio.open_connection("127.0.0.1", self._target)
            ways = {
                asyncio.create_task(self._pass(reader, far, counted=False)),
                asyncio.create_task(self._pass(far_reader, writer, counted=True)),
            }
            try:
                await asyncio.wait(ways, return_when=asyncio.FIRST_COMPLETED)
            finally:
                for way in ways:
                    way.cancel()
                await asyncio.gather(*ways, return_exceptions=True)
        except (OSError, asyncio.CancelledError):
            pass
        finally:
            for end in (writer, far):
                if end is not None:
                    end.transport.abort()
            self._tasks.discard(task)

    async def _pass(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, *, counted: bool
    ) -> None:
        with contextlib.suppress(OSError):
            while piece := await reader.read(256 * 1024):
                if counted and self._rate:
                    now = time.monotonic()
                    begin = max(now, self._free_at)
                    self._free_at = begin + len(piece) / self._rate
                    await asyncio.sleep(begin - now)
                writer.write(piece)
                await writer.drain()
                if counted:
                    self.passed += len(piece)
                    self._changed.set()


@asynccontextmanager
async def toll(*, bytes_per_s: float = 0.0) -> AsyncIterator[Toll]:
    one = Toll(bytes_per_s=bytes_per_s)
    await one.start()
    try:
        yield one
    finally:
        await one.close()


@functools.cache
def seed() -> int:
    """Of what tests leave to chance: YARD_SEED, else one that CI has too, or a new one here. It is printed."""
    given = os.environ.get("YARD_SEED") or ("0" if os.environ.get("CI") else "")
    return int(given) if given else int.from_bytes(os.urandom(3))


def tell(line: str) -> None:
    """Shown with a test that fails."""
    sys.stdout.write(line + "\n")


def tiny(folder: Path, seed: int = 0, size: int = 0) -> Content:
    """A model of little more than a megabyte, or of `size` bytes, that an engine loads and that talks nonsense."""
    folder.mkdir(parents=True, exist_ok=True)
    real = OnDisk(ggufs.write(folder / f"tiny-{seed}.gguf", "llama", seed=seed))
    return Joined(real, MadeUp(size - real.size, seed, head=b"")) if size else real
