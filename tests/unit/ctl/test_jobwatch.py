"""Watching a job: every step once, progress below it, an outage told, an end that says what to do."""

import asyncio
from collections.abc import Awaitable, Callable
from datetime import UTC, datetime
from io import StringIO

import pytest
from msgspec.structs import replace
from rich.console import Console

from controlplane.ctl import jobwatch
from controlplane.ctl.bars import Bar
from controlplane.ctl.failures import CtlError
from controlplane.ctl.jobwatch import JobFailed, watch_on
from events.log import Draft
from events.memory import MemoryLog, MemoryWire
from events.memory_broker import MemoryBroker
from schemas.file import Copy, File, FileFetching
from schemas.job import FileSet, Job, JobStarted, JobStep, ServeRequest, StepName, StepState
from schemas.progress import FileProgress
from tests.support.aio import run, until

NOW = datetime(2026, 1, 1, tzinfo=UTC)
SET = FileSet(name="smol-Q4_1", first="smol-Q4_1.gguf", bytes=1000)
JOB = Job(
    id="j-1",
    request=ServeRequest(repo="acme/smol"),
    by="admin",
    state="running",
    started=NOW,
    repo="acme/smol",
    commit="c0ffee",
    model="smol",
    file_set=SET,
)
FILE = File(
    key="k" * 64,
    repo="acme/smol",
    commit="c0ffee",
    path="smol-Q4_1.gguf",
    published_bytes=1000,
    copies=(Copy(mirror="cp-1", phase="fetching", since=NOW),),
)


def steps(*told: tuple[StepName, StepState, str]) -> tuple[JobStep, ...]:
    return tuple(JobStep(name=n, state=s, detail=d, at=NOW) for n, s, d in told)


FETCHING = replace(
    JOB, steps=steps(("registry", "done", "smol"), ("mirror", "running", "fetching"))
)
FETCHED = replace(
    JOB,
    steps=steps(
        ("registry", "done", "smol"), ("mirror", "done", "fetched"), ("check", "running", "reading")
    ),
)


class Terminal:
    """A log with one job on it, and what a terminal or a pipe shows of watching it."""

    def __init__(self, *, is_terminal: bool = False) -> None:
        broker = MemoryBroker()
        self.writer = MemoryLog(broker, source="/cp/cp-1")
        self.wire = MemoryWire(self.writer.connection)
        self.log = MemoryLog(broker, source="/ctl")
        self.told = StringIO()
        self.out = Console(
            file=self.told, force_terminal=is_terminal, width=200, highlight=False, markup=False
        )
        self._last: dict[str, tuple[int, int]] = {}

    async def write(self, noun: str, key: str, state: Job | File) -> None:
        seq, rev = self._last.get(key, (0, 0))
        event = JobStarted() if isinstance(state, Job) else FileFetching(mirror="cp-1")
        draft = Draft(
            subject=f"yard.evt.{noun}.{key}",
            event=event,
            state=state,
            expected_seq=seq,
            rev=rev + 1,
        )
        appended = await self.writer.append(draft, epoch=1000)
        self._last[key] = (appended.seqs[-1], rev + 1)

    def watching(self) -> "asyncio.Task[Job]":
        wire = MemoryWire(self.log.connection)
        return asyncio.create_task(watch_on(self.log, wire, "j-1", "yard", self.out))

    async def shows(self, text: str) -> None:
        await until(lambda: text in self.told.getvalue(), f"{text!r} in {self.told.getvalue()!r}")


def with_terminal(
    story: Callable[[Terminal], Awaitable[None]], *, is_terminal: bool = False
) -> None:
    async def whole() -> None:
        await story(Terminal(is_terminal=is_terminal))

    run(whole())


def test_a_pipe_gets_each_step_once_and_progress_as_lines() -> None:
    async def story(t: Terminal) -> None:
        await t.write("job", "j-1", FETCHING)
        await t.write("file", FILE.key, FILE)
        watching = t.watching()
        await t.shows("mirror      running  fetching")
        told = FileProgress(key=FILE.key, bytes=420, total_bytes=1000, rate_bytes_s=100.0)
        await t.wire.progress("control", "file", FILE.key, told)
        await t.shows("fetching 420 B of 1000 B (42 %), 100 B/s, 5s left")
        await t.write("job", "j-1", replace(FETCHED, state="done", reply="Hi!"))
        assert (await watching).reply == "Hi!"
        lines = t.told.getvalue().splitlines()
        assert [line.split()[:2] for line in lines if not line.startswith(" ")] == [
            ["registry", "done"],
            ["mirror", "running"],
            ["mirror", "done"],
            ["check", "running"],
            ["smol", "answers:"],
        ]
        assert "\x1b" not in t.told.getvalue()

    with_terminal(story)


def test_a_bar_goes_with_its_step_even_when_the_next_one_runs_already() -> None:
    async def story(t: Terminal) -> None:
        watch = jobwatch._Watch(t.log, MemoryWire(t.log.connection), "j-1", "yard", t.out)
        assert isinstance(watch._bar, Bar)
        watch._take(FETCHING)
        watch._amounts.files[FILE.key] = FILE
        watch._on_file("control", FILE.key, FileProgress(key=FILE.key, bytes=1, total_bytes=1000))
        assert watch._bar._progress is not None
        watch._take(replace(FETCHING, context_length=7))  # nothing about the step
        assert watch._bar._progress is not None
        watch._take(FETCHED)
        assert watch._bar._progress is None
        watch._bar.close()

    with_terminal(story, is_terminal=True)


def test_an_outage_is_told_once_and_watching_goes_on() -> None:
    async def story(t: Terminal) -> None:
        await t.write("job", "j-1", FETCHING)
        watching = t.watching()
        await t.shows("running")
        t.log.connection.disconnect()
        await t.shows("NATS is away; the job goes on when it is back")
        await t.write("job", "j-1", replace(FETCHED, state="failed", error="no room"))
        t.log.connection.reconnect()
        with pytest.raises(JobFailed) as failed:
            await watching
        assert failed.value.lines == (
            "job j-1 failed: no room",
            "once that is mended: yardctl job retry j-1",
        )
        assert t.told.getvalue().count("NATS is away") == 1

    with_terminal(story)


def test_a_joined_job_is_followed_into_the_one_it_became() -> None:
    async def story(t: Terminal) -> None:
        await t.write("job", "j-1", replace(JOB, state="joined", joined="j-0"))
        await t.write("job", "j-0", replace(JOB, id="j-0", state="done", replica="r-1"))
        assert (await t.watching()).id == "j-0"
        await t.shows("smol is served and ready")

    with_terminal(story)


def test_a_job_there_is_not_is_said_at_once() -> None:
    async def story(t: Terminal) -> None:
        with pytest.raises(CtlError, match="there is no job 'j-1'"):
            await t.watching()

    with_terminal(story)


def test_leaving_takes_the_bar_away_and_listens_no_more() -> None:
    async def story(t: Terminal) -> None:
        await t.write("job", "j-1", FETCHING)
        await t.write("file", FILE.key, FILE)
        watching = t.watching()
        await t.shows("running")
        watching.cancel()
        with pytest.raises(asyncio.CancelledError):
            await watching
        before = t.told.getvalue()
        told = FileProgress(key=FILE.key, bytes=1, total_bytes=1000)
        await t.wire.progress("control", "file", FILE.key, told)
        await asyncio.sleep(0)
        assert t.told.getvalue() == before

    with_terminal(story, is_terminal=True)
