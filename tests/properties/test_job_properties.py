"""Whole stories of serve jobs: whatever is lost, late, told twice, cancelled or retried, each job comes to an end."""

from datetime import timedelta

import msgspec
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from controlplane.domain.index import StepIndex
from controlplane.domain.needs import needs_of
from controlplane.domain.reports import FileGone, Report
from schemas import codes
from schemas.commands import (
    JobCancel,
    JobRetry,
    MirrorGc,
    MirrorRemove,
    MirrorVerify,
    ModelRemove,
    ModelScale,
)
from schemas.job import JOB_OVER, Job
from tests.support.serving import ServeYard, join, repo, serve_yard

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


class Stories(RuleBasedStateMachine):
    """People, workers, nodes and leaders in any order, then peace."""

    @initialize(nodes=st.sampled_from([1, 2]), gib=st.sampled_from([3, 16]))
    def begin(self, nodes: int, gib: int) -> None:
        self.yard: ServeYard = serve_yard(repo("o/m", *PATHS), gib=gib, compares=True)
        if nodes > 1:
            join(self.yard, "n2", gib=gib)
        self.on_their_way: list[Report] = []
        self.yard.settle()

    def _job(self, place: int) -> str:
        jobs = sorted(self.yard.world.jobs)
        return jobs[place % len(jobs)] if jobs else "j-none"

    # -- people

    @rule(
        quant=st.sampled_from([None, "Q8_0"]),
        name=st.sampled_from([None, "x", "y"]),
        replicas=st.sampled_from([0, 1, 1]),
        file=st.sampled_from([None, None, PATHS[0]]),
        count=st.integers(0, 6),
    )
    def serve(
        self, quant: str | None, name: str | None, replicas: int, file: str | None, count: int
    ) -> None:
        outcome = self.yard.serve("o/m", quant=quant, name=name, replicas=replicas, file=file)
        assert outcome.status == "accepted"
        [subject] = outcome.refs
        job = self.yard.world.jobs[subject.rpartition(".")[2]]
        assert job.state == "running"
        self.everything_goes_on(count)

    @rule(place=st.integers(0, 5))
    def cancel(self, place: int) -> None:
        id_ = self._job(place)
        before = self.yard.world.jobs.get(id_)
        outcome = self.yard.do(JobCancel(job=id_))
        was_running = before is not None and before.state == "running"
        assert (outcome.status == "accepted") == was_running

    @rule(place=st.integers(0, 5))
    def retry(self, place: int) -> None:
        id_ = self._job(place)
        outcome = self.yard.do(JobRetry(job=id_))
        if outcome.status == "accepted":
            assert f"job {id_} goes on at" in outcome.sentence

    @rule(what=st.sampled_from(["gc", "verify", "o/m", "o/m/" + PATHS[0]]))
    def files(self, what: str) -> None:
        if what == "gc":
            self.yard.do(MirrorGc())
        elif what == "verify":
            self.yard.do(MirrorVerify())
        else:
            self.yard.do(MirrorRemove(what=what))

    @rule(name=st.sampled_from(["x", "y", "model"]), off=st.booleans())
    def an_entry_goes(self, name: str, off: bool) -> None:
        if name in self.yard.world.models:
            self.yard.do(ModelScale(model=name, min=0, max=0) if off else ModelRemove(model=name))

    # -- workers

    @rule(place=st.integers(0, 5), fails=st.booleans())
    def a_task_is_done(self, place: int, fails: bool) -> None:
        due = self.yard.tasks()
        if not due:
            return
        self.yard.fails = dict(FAULTS) if fails else {}
        self.on_their_way.append(self.yard.perform(due[place % len(due)]))
        self.yard.fails = {}

    @rule(place=st.integers(0, 5), twice=st.booleans())
    def a_report_arrives(self, place: int, twice: bool) -> None:
        if not self.on_their_way:
            return
        at = place % len(self.on_their_way)
        self.yard.reports.append(self.on_their_way[at])
        if not twice:
            del self.on_their_way[at]
        self.yard.settle()

    @rule(count=st.integers(1, 12))
    def all_goes_on(self, count: int) -> None:
        self.everything_goes_on(count)

    def everything_goes_on(self, count: int) -> None:
        """So many turns of two workers."""
        for _ in range(count):
            self.yard.reports.extend(self.yard.perform(task) for task in self.yard.tasks()[:2])
            self.yard.settle()

    # -- nodes and time

    @rule(seconds=st.sampled_from([1, 20]))
    def engines_work_while_the_workers_rest(self, seconds: int) -> None:
        for _ in range(seconds):
            self.yard.now += timedelta(seconds=1)
            self.yard.settle()
            self.yard.act()
            self.yard.settle()

    @rule(seconds=st.sampled_from([70, 2000]))
    def much_time_passes(self, seconds: int) -> None:
        self.yard.now += timedelta(seconds=seconds)
        self.yard.settle()

    @rule(name=st.sampled_from(["x", "y", "model"]), count=st.integers(0, 6), now=st.booleans())
    def engines_fail(self, name: str, count: int, now: bool) -> None:
        """The next so many starts fail; what is ready crashes."""
        self.yard.engine(name).fails = count
        for id_ in self.yard.ready(name)[:1] if now else ():
            self.yard.fail(id_)
        self.yard.settle()

    # -- leaders

    @rule(mirror=st.sampled_from(MIRRORS), lost=st.booleans())
    def another_leader(self, mirror: str, lost: bool) -> None:
        """What the former one's workers found out is lost, or comes late as what it is."""
        self.yard.mirror = mirror
        self.yard.index = StepIndex()
        if lost:
            self.on_their_way.clear()
        self.yard.settle()

    @rule(mirror=st.sampled_from(MIRRORS))
    def a_disk_is_lost(self, mirror: str) -> None:
        """Somebody empties a mirror's folder; its next start finds out."""
        gone = [key for name, key in self.yard.stores if name == mirror]
        self.yard.stores = {pair for pair in self.yard.stores if pair[0] != mirror}
        self.yard.mirror = mirror
        self.yard.index = StepIndex()
        self.on_their_way.clear()
        self.yard.reports.extend(FileGone(key=key, mirror=mirror) for key in sorted(gone))
        self.yard.settle()

    # -- what always holds

    @invariant()
    def two_running_jobs_have_never_one_key(self) -> None:
        if not hasattr(self, "yard"):
            return
        running = [j for j in self.yard.world.jobs.values() if j.state == "running" and j.key]
        assert len({job.key for job in running}) == len(running)
        names = [job.model for job in running]
        assert len(set(names)) == len(names)

    @invariant()
    def a_file_is_fetched_by_one_mirror_at_a_time(self) -> None:
        if not hasattr(self, "yard"):
            return
        for file in self.yard.world.files.values():
            assert sum(copy.phase == "fetching" for copy in file.copies) <= 1

    @invariant()
    def what_is_kept_in_mind_is_what_the_log_says(self) -> None:
        if not hasattr(self, "yard"):
            return
        y = self.yard
        assert y.index is not None
        y.index.sync(y.world)
        assert y.index.needs.by_key == needs_of(y.world).by_key
        assert y.world.running_jobs == {
            job.id for job in y.world.jobs.values() if job.state == "running"
        }

    @invariant()
    def every_event_of_a_job_is_small(self) -> None:
        if not hasattr(self, "yard"):
            return
        for job in self.yard.world.jobs.values():
            assert len(msgspec.json.encode(job)) < 8192

    @invariant()
    def who_needs_a_file_has_its_aggregate(self) -> None:
        if not hasattr(self, "yard"):
            return
        y = self.yard
        assert y.index is not None
        for key in y.index.needs.by_key:
            assert key in y.world.files

    def teardown(self) -> None:
        """Peace: everything works, nobody interferes. Every job ends, and then nothing more happens."""
        if not hasattr(self, "yard"):
            return
        y = self.yard
        y.reports.extend(self.on_their_way)
        for engine in y.engines.values():
            engine.fails = 0
        y.settle()
        y.advance(120, by=3)
        y.advance(3000, by=100)
        for job in y.world.jobs.values():
            assert job.state in JOB_OVER, (job, y.tail(12))
            self._is_told(job)
        y.advance(8000, by=400)
        before = len(y.log)
        y.now += timedelta(seconds=1)
        assert y.settle() == [], "a satisfied yard calls for nothing"
        assert len(y.log) == before

    def _is_told(self, job: Job) -> None:
        match job.state:
            case "failed":
                assert job.error
                assert job.code
                assert job.steps[-1].detail == job.error
            case "joined":
                assert job.joined
            case "done":
                assert job.model
                assert [s.state for s in job.steps].count("done") >= 5
            case _:
                assert job.state == "cancelled"


TestStories = Stories.TestCase
TestStories.settings = hypothesis_settings(max_examples=30, stateful_step_count=40)
