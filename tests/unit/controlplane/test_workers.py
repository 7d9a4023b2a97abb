"""Workers run what is due, once each, keep reports until they are dealt with, and end with the term."""

import asyncio
from collections.abc import Awaitable, Callable

from msgspec.structs import replace

from controlplane import workers
from controlplane.domain.reports import FileFault, FileGone, Report, StepFailed
from controlplane.domain.work import Fetch, ReadRepo, Remove, Task
from controlplane.workers import Workers
from tests.support.aio import run, until

REMOVE = Remove(key="k1")
READ = ReadRepo(job="j-1", attempt=2, index=3, repo="a/b", revision=None)
FETCH = Fetch(key="k2", repo="a/b", commit="c", path="p.gguf", bytes=5, sha256=None)


class Bench:
    """Work that a test lets end: `begun` counts, `gates` hold back."""

    def __init__(self) -> None:
        self.begun: list[Task] = []
        self.cancelled: list[Task] = []
        self.woken = 0
        self.gate = asyncio.Event()
        self.workers = Workers("cp-1", self.do, wake=self.wake)

    def wake(self) -> None:
        self.woken += 1

    async def do(self, task: Task) -> Report:
        self.begun.append(task)
        try:
            await self.gate.wait()
        except asyncio.CancelledError:
            self.cancelled.append(task)
            raise
        if isinstance(task, ReadRepo):
            raise ZeroDivisionError("bug")
        assert isinstance(task, Remove | Fetch)
        return FileGone(key=task.key, mirror="cp-1")


def with_bench(story: Callable[[Bench], Awaitable[None]]) -> None:
    async def whole() -> None:
        bench = Bench()
        try:
            await story(bench)
        finally:
            await bench.workers.close()

    run(whole())


def test_what_is_due_begins_once_and_its_report_stays_until_settled() -> None:
    async def story(b: Bench) -> None:
        b.workers.sync([REMOVE])
        b.workers.sync([REMOVE])
        b.gate.set()
        await until(lambda: b.woken == 1, "the report")
        assert b.begun == [REMOVE]
        assert b.workers.offered() == (FileGone(key="k1", mirror="cp-1"),)
        b.workers.sync([REMOVE])
        assert b.workers.offered() == (FileGone(key="k1", mirror="cp-1"),)
        b.workers.settle(b.workers.offered()[0])
        assert b.workers.offered() == ()
        b.workers.sync([])

    with_bench(story)


def test_a_task_still_due_after_its_report_begins_again() -> None:
    async def story(b: Bench) -> None:
        b.gate.set()
        b.workers.sync([REMOVE])
        await until(lambda: b.woken == 1, "the first report")
        b.workers.settle(b.workers.offered()[0])
        b.workers.sync([REMOVE])
        await until(lambda: b.woken == 2, "the second report")
        assert b.begun == [REMOVE, REMOVE]

    old, workers.AGAIN_AFTER_S = workers.AGAIN_AFTER_S, 0.01  # type: ignore[misc]
    try:
        with_bench(story)
    finally:
        workers.AGAIN_AFTER_S = old  # type: ignore[misc]


def test_what_is_no_longer_due_is_cancelled() -> None:
    async def story(b: Bench) -> None:
        b.workers.sync([REMOVE, FETCH])
        await until(lambda: len(b.begun) == 2, "both to begin")
        b.workers.sync([FETCH])
        await until(lambda: b.cancelled == [REMOVE], "the cancellation")

    with_bench(story)


def test_a_fetch_goes_on_when_another_mirror_gets_a_copy() -> None:
    async def story(b: Bench) -> None:
        b.workers.sync([FETCH])
        await until(lambda: len(b.begun) == 1, "it to begin")
        b.workers.sync([replace(FETCH, others=("cp-2",))])
        b.gate.set()
        await until(lambda: b.woken == 1, "the report")
        assert b.begun == [FETCH]
        assert b.cancelled == []

    with_bench(story)


def test_a_fault_of_ours_is_a_report_too() -> None:
    async def story(b: Bench) -> None:
        b.gate.set()
        b.workers.sync([READ])
        await until(lambda: b.woken == 1, "the report")
        (report,) = b.workers.offered()
        assert isinstance(report, StepFailed)
        assert (report.job, report.attempt, report.index, report.code) == ("j-1", 2, 3, "internal")
        assert "ZeroDivisionError" in report.sentence

    with_bench(story)


def test_the_end_of_the_term_drops_work_and_reports() -> None:
    async def story(b: Bench) -> None:
        b.workers.sync([REMOVE, FETCH])
        await until(lambda: len(b.begun) == 2, "both to begin")
        b.workers.stop()
        assert b.workers.offered() == ()
        await b.workers.close()
        assert b.cancelled == [REMOVE, FETCH]
        b.workers.sync([REMOVE])  # the next term begins afresh
        await until(lambda: len(b.begun) == 3, "it to begin again")

    with_bench(story)


def test_a_fault_in_a_fetch_names_the_file() -> None:
    async def broken(task: Task) -> Report:
        raise OSError("disk on fire")

    async def story() -> None:
        woken = asyncio.Event()
        working = Workers("cp-1", broken, wake=woken.set)
        working.sync([FETCH])
        await woken.wait()
        (report,) = working.offered()
        assert isinstance(report, FileFault)
        assert (report.key, report.mirror, report.code) == ("k2", "cp-1", "internal")
        await working.close()

    run(story())
