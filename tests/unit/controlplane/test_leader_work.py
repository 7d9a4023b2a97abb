"""A leader with work beside it: reports become decisions, poisonous ones fail their task, an end says goodbye first."""

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Callable, Sequence
from datetime import UTC, datetime
from typing import Any, cast

import pytest
from msgspec.structs import replace

from controlplane.candidate import Me
from controlplane.domain.decision import Change, Decision, Ids, Live, Step
from controlplane.domain.repo import Repo
from controlplane.domain.reports import RepoRead, Report, StepFailed
from controlplane.domain.work import ReadRepo, Task
from controlplane.domain.world import World
from controlplane.identifiers import new_ids
from controlplane.leader import LeaderLoop
from controlplane.metrics import Metrics
from controlplane.mirroring import Mirroring
from events.ids import utc_now
from events.log import Draft, StoredCommand
from events.memory import MemoryLog, MemoryWire
from events.memory_broker import MemoryBroker
from schemas.beacons import LeaderBeacon
from schemas.job import Job, JobFailed, JobStarted, JobStep, ServeRequest
from schemas.settings import ControlplaneSettings
from tests.support.aio import run, until

NOW = datetime(2026, 1, 1, tzinfo=UTC)
READ = RepoRead(
    job="j-1",
    attempt=1,
    repo=Repo(id="a/b", commit="c", files=(), gated=None, private=False, suggested_name="b"),
)
JOB = Job(
    id="j-1",
    request=ServeRequest(repo="a/b"),
    by="anna",
    state="running",
    started=NOW,
    steps=(JobStep(name="registry", state="running", detail="reading a/b", at=NOW),),
)


class Mirror:
    """What a leader sees of its mirror; each task is answered by `do`."""

    name = "cp-1"

    def __init__(self, do: Callable[[Task], Any]) -> None:
        self.hands = self
        self.do = do

    def others(self) -> tuple[str, ...]:
        return ()

    async def missing(self, world: World) -> Sequence[Report]:
        del world
        return ()


class Yard:
    """One leader whose decisions about reports are `fold`'s."""

    def __init__(
        self, fold: Callable[[World, Report], Decision | None], do: Callable[[Task], Any]
    ) -> None:
        self.seen: list[Report] = []
        self.fold = fold
        broker = MemoryBroker()
        log = MemoryLog(broker)
        self.admin = MemoryLog(broker, source="/ctl/anna")
        self.others = MemoryWire(self.admin.connection)
        self.loop = LeaderLoop(
            events=log,
            wire=MemoryWire(log.connection),
            me=Me(instance="cp-1", host="here", pid=1),
            settings=ControlplaneSettings(leader_silence_s=0.3),
            make_decider=lambda: self.decide,
            ids=new_ids(),
            now=utc_now,
            monotonic=time.monotonic,
            metrics=Metrics(),
            mirroring=cast(Mirroring, Mirror(do)),
        )

    def decide(
        self,
        world: World,
        live: Live,
        commands: Sequence[StoredCommand],
        now: datetime,
        ids: Ids,
        settings: ControlplaneSettings,
        *,
        reports: Sequence[Report] = (),
    ) -> Step:
        del live, commands, now, ids, settings
        if not reports:
            return Step()
        if not self.seen or self.seen[-1] != reports[0]:
            self.seen.append(reports[0])
        return Step(decision=self.fold(world, reports[0]), settled=reports[0])

    async def start_job(self) -> None:
        draft = Draft(
            subject="yard.evt.job.j-1", event=JobStarted(), state=JOB, expected_seq=0, rev=1
        )
        await self.admin.append(draft, epoch=1000)

    @contextlib.asynccontextmanager
    async def leading(self) -> AsyncIterator["asyncio.Task[None]"]:
        task = asyncio.create_task(self.loop.run())
        try:
            await until(lambda: self.loop.term is not None or task.done(), "a term")
            yield task
        finally:
            task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await task


def failed(report: StepFailed, *, state: Job | None = None) -> Decision:
    over = replace(JOB, state="failed", code=report.code, error=report.sentence)
    change = Change(
        noun="job",
        key=("j-1",),
        event=JobFailed(step="registry", code=report.code),
        state=state or over,
    )
    return Decision(changes=(change,), what="job failed")


async def read(task: Task) -> Report:
    assert isinstance(task, ReadRepo)
    return READ


@pytest.mark.parametrize("poison", ["raises", "cannot be stored"])
def test_a_report_nobody_can_decide_about_fails_its_job_once(poison: str) -> None:
    def fold(world: World, report: Report) -> Decision:
        del world
        if isinstance(report, StepFailed):
            return failed(report)
        if poison == "raises":
            raise ZeroDivisionError("bug")
        told = StepFailed(job="j-1", attempt=1, index=0, code="x", sentence="y")
        return failed(told, state=replace(JOB, error="x" * 300_000))

    async def story() -> None:
        yard = Yard(fold, read)
        await yard.start_job()
        async with yard.leading():
            jobs = yard.loop.world.jobs
            await until(lambda: jobs["j-1"].state == "failed", "the end of the job", 20)
            assert jobs["j-1"].code == "internal"
            assert "failed to decide" in jobs["j-1"].error
            assert [type(report) for report in yard.seen] == [RepoRead, StepFailed]
            assert yard.loop.facts().alarms == {}

    run(story())


def test_goodbye_does_not_wait_for_work_that_is_slow_to_let_go() -> None:
    gone = asyncio.Event()

    async def slow(task: Task) -> Report:
        del task
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            await gone.wait()
            raise
        raise AssertionError

    async def story() -> None:
        yard = Yard(lambda world, report: None, slow)
        said: list[LeaderBeacon] = []
        await yard.others.on_beacon("leader", LeaderBeacon, lambda _, beacon: said.append(beacon))
        await yard.start_job()
        async with yard.leading() as task:
            workers = yard.loop._workers
            assert workers is not None
            await until(lambda: not workers.begins, "the work to begin")
            task.cancel()
            await until(lambda: any(beacon.leaving for beacon in said), "the goodbye")
            assert not task.done()
            gone.set()

    run(story())
