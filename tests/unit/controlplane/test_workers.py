"""Workers run what is due, once each, keep reports until they are dealt with, and end with the term."""

import asyncio
from collections.abc import Awaitable, Callable

import pytest
from msgspec.structs import replace

from controlplane import workers
from controlplane.domain.reports import AdapterUnreadable, FileFault, FileGone, Report, StepFailed
from controlplane.domain.work import Fetch, ReadAdapter, ReadRepo, Remove, Task
from controlplane.domain.world import World
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
        if isinstance(task, ReadRepo | ReadAdapter):
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


def test_a_task_still_due_after_its_report_begins_again_later_each_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    pauses: list[float] = []
    sleep = asyncio.sleep

    async def paused(delay_s: float) -> None:
        pauses.append(delay_s)
        await sleep(0)

    async def story(b: Bench) -> None:
        b.gate.set()
        b.workers.sync([REMOVE])
        for count in range(1, 10):
            await until(lambda count=count: b.woken == count, "a report")
            b.workers.settle(b.workers.offered()[0])
            b.workers.sync([REMOVE])
        await until(lambda: b.woken == 10, "the last report")

    monkeypatch.setattr(workers.asyncio, "sleep", paused)
    with_bench(story)
    begun = [
        pause_s for pause_s in pauses if pause_s in (0.0, 1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 60.0)
    ]
    assert begun == [0.0, 1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 60.0, 60.0, 60.0]


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


def test_the_next_try_of_a_fetch_knows_which_mirrors_have_the_file_by_then() -> None:
    async def story(b: Bench) -> None:
        b.gate.set()
        b.workers.sync([FETCH])
        await until(lambda: b.woken == 1, "the first report")
        b.workers.sync([replace(FETCH, others=("cp-2",))])
        b.workers.settle(b.workers.offered()[0])
        await until(lambda: b.woken == 2, "the second report")
        assert b.begun == [FETCH, replace(FETCH, others=("cp-2",))]

    with_bench(story)


def test_of_a_report_nobody_can_decide_about_the_task_failed() -> None:
    async def story(b: Bench) -> None:
        b.gate.set()
        b.workers.sync([FETCH])
        await until(lambda: b.woken == 1, "the report")
        b.workers.spoil(b.workers.offered()[0])
        (fault,) = b.workers.offered()
        assert isinstance(fault, FileFault)
        assert (fault.key, fault.code) == ("k2", "internal")
        assert b.woken == 2
        # If not even that can be decided it is dropped, and the task begins again.
        b.workers.spoil(fault)
        assert b.workers.offered() == ()
        await until(lambda: b.begun == [FETCH, FETCH], "the second try")

    with_bench(story)


def test_what_was_found_besides_is_offered_once_and_a_search_that_fails_stops_nothing() -> None:
    gone = FileGone(key="k9", mirror="cp-1")

    async def story(b: Bench) -> None:
        async def broken() -> list[Report]:
            raise OSError("disk on fire")

        async def found() -> list[Report]:
            return [gone]

        b.workers.look(broken)
        b.workers.stop()  # before it has even begun
        b.workers.look(broken)
        await until(lambda: all(t.get_name() != "look" for t in asyncio.all_tasks()), "its end")
        assert b.workers.offered() == ()
        b.workers.look(found)
        await until(lambda: b.woken == 1, "the report")
        assert b.workers.offered() == (gone,)
        b.workers.spoil(gone)
        assert b.workers.offered() == ()

    with_bench(story)


def test_the_log_is_looked_at_again_only_for_news_of_what_tasks_follow_from() -> None:
    async def story(b: Bench) -> None:
        world = World()
        synced: list[int] = []
        sync = b.workers.sync
        b.workers.sync = lambda tasks: (synced.append(len(tasks)), sync(tasks))[1]  # type: ignore[method-assign]
        assert b.workers.begins
        for news, looks in ((None, 1), (None, 1), ("card", 1), ("job", 2), ("job", 3)):
            if news is not None:
                world.touched.append((news, ("x",)))
            b.workers.keep_up(world, 0)
            assert len(synced) == looks
        b.workers.keep_up(world, 1)  # another history
        assert len(synced) == 4
        b.workers.stop()
        assert b.workers.begins
        b.workers.keep_up(world, 1)
        assert len(synced) == 5

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


def test_a_fault_of_ours_while_an_adapter_is_read_refuses_that_adapter() -> None:
    async def story(b: Bench) -> None:
        b.gate.set()
        b.workers.sync([ReadAdapter(adapter="polite", incarnation="i1", source="o/polite")])
        await until(lambda: b.woken == 1, "the report")
        (report,) = b.workers.offered()
        assert isinstance(report, AdapterUnreadable)
        assert (report.adapter, report.incarnation, report.code) == ("polite", "i1", "internal")
        assert "its log has the reason" in report.sentence

    with_bench(story)


def test_an_adapter_added_anew_is_read_anew() -> None:
    async def story(b: Bench) -> None:
        first = ReadAdapter(adapter="polite", incarnation="i1", source="o/polite")
        second = replace(first, incarnation="i2")
        b.workers.sync([first])
        await until(lambda: b.begun == [first], "the first reading")
        b.workers.sync([second])
        await until(lambda: b.begun == [first, second], "the second reading")
        assert b.cancelled == [first]

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
