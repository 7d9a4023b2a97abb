"""Whole stories of serve jobs: whatever is lost, late, told twice, cancelled or retried, each job comes to an end."""

from collections import Counter
from collections.abc import Callable
from datetime import timedelta

import msgspec
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

from controlplane.domain.index import StepIndex
from controlplane.domain.needs import needs_of
from controlplane.domain.reports import FileGone, Report
from schemas import codes
from schemas.commands import (
    JobCancel,
    JobRetry,
    JobServe,
    MirrorGc,
    MirrorRemove,
    MirrorVerify,
    ModelRemove,
    ModelScale,
)
from schemas.job import JOB_OVER, Job
from tests.support.serving import join, repo, serve_yard

MIRRORS = ("cp1", "cp2")
PATHS = (
    "m-Q4_K_M.gguf",
    "m-Q8_0-00001-of-00002.gguf",
    "m-Q8_0-00002-of-00002.gguf",
)
FAULTS: dict[str, tuple[str, str]] = {
    "ReadRepo": (codes.RATE_LIMITED, "too many requests"),
    "ReadHeader": (codes.NOT_GGUF, "it is no GGUF file"),
    "Fetch": (codes.NO_PROGRESS, "no byte came"),
    "Verify": (codes.CHECKSUM_MISMATCH, "other bytes"),
    "Smoke": (codes.SMOKE_FAILED, "the replica answered 500: no"),
}
REQUESTS = (
    JobServe(repo="o/m"),
    JobServe(repo="o/m", file=PATHS[0]),
    JobServe(repo="o/m", quant="Q8_0", name="eight"),
    JobServe(repo="o/m", quant="Q8_0", name="eight", replicas=2),
    JobServe(repo="o/m", name="eight", replicas=0),
    JobServe(repo="O/M", name="lazy", replicas=0),
)
NAMES = ("model", "eight", "lazy")


class Story:
    """A yard, and the reports that are on their way to its leader."""

    def __init__(self, nodes: int, gib: float) -> None:
        self.yard = serve_yard(repo("o/m", *PATHS), gib=gib, compares=True)
        if nodes > 1:
            join(self.yard, "n2", gib=gib)
        self.under_way: list[Report] = []
        self.late = 0
        self.yard.settle()

    # -- people

    def serve(self, place: int, flag: bool) -> None:
        outcome = self.yard.do(REQUESTS[place])
        assert outcome.status == "accepted"
        [subject] = outcome.refs
        assert self.yard.world.jobs[subject.rpartition(".")[2]].state == "running"
        self.workers(place if flag else 0, flag)

    def _job(self, place: int) -> Job | None:
        """One of the latest jobs."""
        jobs = sorted(self.yard.world.jobs, reverse=True)[:3]
        return self.yard.world.jobs[jobs[place % len(jobs)]] if jobs else None

    def cancel(self, place: int, flag: bool) -> None:
        job = self._job(place)
        if job is None:
            return
        outcome = self.yard.do(JobCancel(job=job.id))
        assert (outcome.status == "accepted") == (job.state == "running")
        del flag

    def retry(self, place: int, flag: bool) -> None:
        job = self._job(place)
        if job is None:
            return
        outcome = self.yard.do(JobRetry(job=job.id))
        if outcome.status == "accepted":
            assert job.state in ("failed", "cancelled")
            assert f"job {job.id} goes on at" in outcome.sentence
        self.workers(2 if flag else 0, flag)

    def files(self, place: int, flag: bool) -> None:
        wish = (MirrorGc(), MirrorVerify(), MirrorRemove(what="o/m"))[place % 3]
        self.yard.do(wish)
        del flag

    def entry_goes(self, place: int, flag: bool) -> None:
        name = NAMES[place % 3]
        if name in self.yard.world.models:
            self.yard.do(ModelScale(model=name, min=0, max=0) if flag else ModelRemove(model=name))

    # -- workers

    def task(self, place: int, flag: bool) -> None:
        """One piece of work is done, well or not; its report is on its way."""
        due = self.yard.tasks()
        if not due:
            return
        self.yard.fails = {} if flag else dict(FAULTS)
        self.under_way.append(self.yard.perform(due[place % len(due)]))
        self.yard.fails = {}

    def report(self, place: int, flag: bool) -> None:
        """A report arrives, in any order; it may come again."""
        if not self.under_way:
            return
        at = place % len(self.under_way)
        self.yard.reports.append(self.under_way[at])
        if not flag:
            del self.under_way[at]
        before = self.yard.world.position
        self.yard.settle()
        self.late += self.yard.world.position == before

    def workers(self, place: int, flag: bool) -> None:
        """So many turns of two workers."""
        for _ in range(place):
            self.yard.reports.extend(self.yard.perform(task) for task in self.yard.tasks()[:2])
            self.yard.settle()
        del flag

    # -- nodes and time

    def engines(self, place: int, flag: bool) -> None:
        """Agents and engines go on while the workers rest."""
        for _ in range(20 if flag else place):
            self.yard.now += timedelta(seconds=1)
            self.yard.settle()
            self.yard.act()
            self.yard.settle()

    def time(self, place: int, flag: bool) -> None:
        self.yard.now += timedelta(seconds=2000 if flag else 20 * place)
        self.yard.settle()

    def faults(self, place: int, flag: bool) -> None:
        """The next so many starts of a model fail; what is ready crashes."""
        name = NAMES[place % 3]
        self.yard.engine(name).fails = place
        for id_ in self.yard.ready(name)[:1] if flag else ():
            self.yard.fail(id_)
        self.yard.settle()

    # -- leaders

    def leader(self, place: int, flag: bool) -> None:
        """Another leads; what the former one's workers found out is lost, or comes late as what it is."""
        self.yard.mirror = MIRRORS[place % 2]
        self.yard.index = StepIndex()
        if flag:
            self.under_way.clear()
        self.yard.settle()

    def disk(self, place: int, flag: bool) -> None:
        """Somebody empties a mirror's folder; its next start finds out."""
        mirror = MIRRORS[place % 2]
        gone = sorted(key for name, key in self.yard.stores if name == mirror)
        self.yard.stores = {pair for pair in self.yard.stores if pair[0] != mirror}
        self.yard.reports.extend(FileGone(key=key, mirror=mirror) for key in gone)
        self.leader(place, flag=True)

    # -- what always holds

    def check(self) -> None:
        """No two jobs do the same, one mirror fetches a file, what is kept in mind is what the log says."""
        y = self.yard
        running = [j for j in y.world.jobs.values() if j.state == "running"]
        assert y.world.running_jobs == {job.id for job in running}
        for common in ("key", "model"):
            known = [getattr(job, common) for job in running if getattr(job, common)]
            assert len(set(known)) == len(known), f"two running jobs have one {common}"
        for file in y.world.files.values():
            assert sum(copy.phase == "fetching" for copy in file.copies) <= 1
        assert y.index is not None
        y.index.sync(y.world)
        assert y.index.needs.by_key == needs_of(y.world).by_key
        assert all(key in y.world.files for key in y.index.needs.by_key)
        for job in y.world.jobs.values():
            assert len(msgspec.json.encode(job)) < 8192

    def peace(self) -> None:
        """Everything works, nobody interferes. Every job ends, and then nothing more happens."""
        y = self.yard
        y.reports.extend(self.under_way)
        for engine in y.engines.values():
            engine.fails = 0
        y.settle()
        y.advance(120, by=6)
        y.advance(3000, by=150)
        for job in y.world.jobs.values():
            assert job.state in JOB_OVER, (job, y.tail(12))
            is_told(job)
        y.advance(8000, by=800)
        before = len(y.log)
        y.now += timedelta(seconds=1)
        assert y.settle() == [], "a satisfied yard calls for nothing"
        assert len(y.log) == before


def is_told(job: Job) -> None:
    """How a job ended is in it."""
    match job.state:
        case "failed":
            assert job.error
            assert job.code
            assert job.steps[-1].detail in (job.error, job.error[: len(job.steps[-1].detail)])
        case "joined":
            assert job.joined
        case "done":
            assert job.model
            assert [s.state for s in job.steps].count("done") >= 5
        case _:
            assert job.state == "cancelled"


Action = Callable[[Story, int, bool], None]

ACTIONS: tuple[Action, ...] = (
    *(Story.serve,) * 2,
    *(Story.workers,) * 3,
    *(Story.task,) * 4,
    *(Story.report,) * 4,
    *(Story.engines,) * 2,
    Story.cancel,
    *(Story.retry,) * 2,
    Story.files,
    Story.entry_goes,
    Story.time,
    Story.faults,
    Story.leader,
    Story.disk,
)
MOVES = st.tuples(st.sampled_from(ACTIONS), st.integers(0, 5), st.booleans())


def tell(moves: list[tuple[Action, int, bool]], nodes: int, gib: float) -> Story:
    story = Story(nodes, gib)
    story.serve(0, flag=False)
    for act, place, flag in moves:
        act(story, place, flag)
        story.check()
    story.peace()
    return story


@hypothesis_settings(max_examples=40)
@given(
    moves=st.lists(MOVES, min_size=10, max_size=50),
    nodes=st.sampled_from([1, 2]),
    gib=st.sampled_from([3, 16]),
)
def test_every_job_ends_whatever_happens(
    moves: list[tuple[Action, int, bool]], nodes: int, gib: float
) -> None:
    tell(moves, nodes, gib)


def test_the_stories_are_not_dull() -> None:
    """A property of stories in which nothing happens proves nothing."""
    ends: Counter[str] = Counter()
    late = 0
    # One long story of every action in turn, in an order that no two rounds repeat.
    moves = [
        (ACTIONS[(n * 7 + n // 22) % len(ACTIONS)], (n * 5 + n // 6) % 6, n % 3 == 0)
        for n in range(400)
    ]
    story = tell(moves, 2, 16)
    ends.update(item.type for item in story.yard.log if item.noun in ("job", "file"))
    late += story.late
    for one in (
        "job.done",
        "job.failed",
        "job.joined",
        "job.cancelled",
        "file.present",
        "file.failed",
        "file.verifying",
        "file.removing",
        "file.absent",
    ):
        assert ends[one] > 0, (one, ends)
    assert late > 0, "no report was late"
