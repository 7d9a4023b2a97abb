"""A yard that serves from a hub in memory: workers beside the leader, played on the yard's clock.

`ServeYard.run_workers` does what `work.due` lists, once, and hands the reports to the next decisions. It decides
nothing: faults are what a test puts into `fails`.
"""

import hashlib
from dataclasses import dataclass, field

from msgspec.structs import replace

from controlplane.domain import jobwrites, step, work
from controlplane.domain.decision import Change, Decision, Live, Step
from controlplane.domain.files import TRANSITIONS, copy_on
from controlplane.domain.index import StepIndex
from controlplane.domain.needs import needs_of
from controlplane.domain.repo import Repo, RepoFile
from controlplane.domain.reports import (
    AdapterUnreadable,
    FileFault,
    FileGone,
    FileStored,
    HeaderRead,
    RepoRead,
    Report,
    SmokeAnswered,
    StepFailed,
)
from controlplane.domain.shape import ModelShape
from schemas import codes
from schemas.commands import JobServe, Outcome
from schemas.file import File, FileRemoving
from schemas.job import STEPS, Job
from schemas.messages import tag_of
from schemas.node import CardInfo, EngineInfo, Node, NodeStarted
from tests.support.worlds import GIB, Yard, counting_ids

COMMIT = "0123456789abcdef0123456789abcdef01234567"
SHARDS = tuple(f"big/m-Q8_0-0000{n}-of-00003.gguf" for n in (1, 2, 3))


def sha_of(path: str) -> str:
    return hashlib.sha256(path.encode()).hexdigest()


def repo(
    id_: str = "Owner/Model-GGUF",
    *paths: str,
    size: int = GIB,
    commit: str = COMMIT,
    published: bool = True,
    name: str = "model",
) -> Repo:
    """A repository of so many files, each of `size` bytes."""
    names = paths or ("model-Q4_K_M.gguf",)
    return Repo(
        id=id_,
        commit=commit,
        files=tuple(
            RepoFile(path=path, bytes=size, sha256=sha_of(path) if published else None)
            for path in names
        ),
        suggested_name=name,
    )


def shape(**fields: object) -> ModelShape:
    known: dict[str, object] = {
        "architecture": "llama",
        "layers": 2,
        "embedding": 64,
        "vocabulary": 1000,
        "trained_context": 8192,
        "feed_forward": (128, 128),
        "heads": (4, 4),
        "heads_kv": (2, 2),
        "key_length": 16,
        "value_length": 16,
    }
    return ModelShape(**{**known, **fields})  # type: ignore[arg-type]


@dataclass
class ServeYard(Yard):
    """`hub` is by repository id in lower case, `fails` by task name: what it comes to instead. It has no adapters."""

    mirror: str = "cp1"
    audit_behind: bool = False
    hub: dict[str, Repo] = field(default_factory=dict)
    header: ModelShape | None = field(default_factory=shape)
    header_why: str = ""
    free_bytes: int | None = None
    reserved: dict[str, int] = field(default_factory=dict)
    fails: dict[str, tuple[str, str]] = field(default_factory=dict)
    reply: str = "Hello there."
    stores: set[tuple[str, str]] = field(default_factory=set)
    """(mirror, key) of what is on the mirrors' disks."""
    reports: list[Report] = field(default_factory=list)
    settled: int = 0
    fetched: list[str] = field(default_factory=list)
    """Keys in the order in which their bytes were fetched from the registry."""

    def live(self) -> Live:
        return replace(super().live(), mirror=self.mirror, audit_behind=self.audit_behind)

    def check(self, decision: Decision) -> None:
        super().check(decision)
        for change in decision.changes:
            if isinstance(change.state, Job):
                known = self.world.jobs.get(change.state.id)
                before = known.state if known is not None else None
                after = jobwrites.TRANSITIONS[(before, tag_of(change.event))]
                assert after == change.state.state
                if known is not None and tag_of(change.event) != "job.started":
                    assert len(change.state.steps) >= len(known.steps), "only a retry goes back"
                    assert change.state.attempt == known.attempt
                self.check_job(change.state)
            elif isinstance(change.state, File):
                self.check_file(change)

    def check_file(self, change: Change) -> None:
        """The event's own mirror moved along the table."""
        assert isinstance(change.state, File)
        if isinstance(change.event, FileRemoving):
            assert not needs_of(self.world).is_kept(change.state.key), "somebody needs it"
        mirrors: str = getattr(change.event, "mirror", "")
        known = self.world.files.get(change.state.key)
        for mirror in mirrors.split(", ") if mirrors else ():
            old = copy_on(known, mirror) if known is not None else None
            new = copy_on(change.state, mirror)
            phase = new.phase if new is not None else None
            if old is not None and old.phase == phase == "removing":
                continue
            before = old.phase if old is not None else None
            assert TRANSITIONS[(before, tag_of(change.event))] == phase

    def check_job(self, job: Job) -> None:
        """Steps are in order, the last alone is not done, and a job that is over has nothing under way."""
        assert [s.name for s in job.steps] == list(STEPS[: len(job.steps)])
        assert all(s.state in ("done", "skipped") for s in job.steps[:-1])
        if job.state != "running":
            assert job.ended_at is not None
            assert all(s.state != "running" for s in job.steps)

    def _check_progress(self, change: Change, decision: Decision) -> None:
        if change.noun == "job":
            assert self.world.jobs.get(change.key[0]) != change.state, decision.what
        elif change.noun == "file":
            assert self.world.files.get(change.key[0]) != change.state, decision.what
        else:
            super()._check_progress(change, decision)

    def _ask(self, index: StepIndex | None, counts: dict[str, int]) -> Step:
        return step.next_decision(
            self.world,
            self.live(),
            tuple(self.pending),
            self.now,
            counting_ids(counts),
            self.settings,
            index,
            reports=tuple(self.reports),
        )

    def step(self) -> Step:
        answer = self._ask(self.index, self.counts)
        if answer.settled is not None:
            self.reports.remove(answer.settled)
            self.settled += 1
        return answer

    def step_afresh(self) -> Step:
        return self._ask(None, dict(self.counts))

    def settle(self, bound: int = 100) -> list[Decision]:
        made = super().settle(bound)
        while self.settled:
            # A report that told nothing new ends a run of decisions, and not what is to be decided.
            self.settled = 0
            made += super().settle(bound)
        return made

    # -- the workers

    def tasks(self) -> tuple[work.Task, ...]:
        return work.due(self.world, self.mirror)

    def run_workers(self, bound: int = 50) -> None:
        """The leader and its workers until neither has anything to do; agents and time stand still."""
        for _ in range(bound):
            self.settle()
            due = self.tasks()
            if not due:
                return
            self.reports.extend(self.perform(task) for task in due)
        raise AssertionError(f"the workers do not come to rest: {self.tail()}")

    def turn(self) -> None:
        """Everybody acts, the workers too, until nothing more is to be done at this instant."""
        for _ in range(40):
            self.traffic()
            made = self.settle()
            due = self.tasks()
            self.reports.extend(self.perform(task) for task in due)
            if not self.act() and not made and not due:
                return
        raise AssertionError(f"the yard does not come to rest: {self.tail()}")

    def perform(self, task: work.Task) -> Report:
        failure = self.fails.get(type(task).__name__)
        match task:
            case work.ReadRepo():
                found = self.hub.get(task.repo.lower())
                if failure is None and found is None:
                    failure = (codes.REPO_NOT_FOUND, f"there is no repository {task.repo}")
                if failure is not None or found is None:
                    return self._failed(task, failure)
                return RepoRead(job=task.job, attempt=task.attempt, repo=found)
            case work.ReadHeader():
                if failure is not None:
                    return self._failed(task, failure)
                assert not task.mirrored or (self.mirror, task.key) in self.stores
                return HeaderRead(
                    job=task.job,
                    attempt=task.attempt,
                    index=task.index,
                    shape=self.header,
                    why=self.header_why,
                    free_bytes=self.free_bytes,
                    reserved=self.reserved,
                )
            case work.Smoke():
                if failure is not None:
                    return self._failed(task, failure)
                return SmokeAnswered(
                    job=task.job,
                    attempt=task.attempt,
                    replica=task.replica,
                    reply=self.reply,
                    completion_tokens=20,
                    generation_s=0.5,
                    prompt_s=0.1,
                )
            case work.ReadAdapter():
                return AdapterUnreadable(
                    adapter=task.adapter,
                    incarnation=task.incarnation,
                    code=codes.NOT_AN_ADAPTER,
                    sentence="there is nothing",
                )
            case work.Fetch():
                if failure is not None:
                    return self._fault(task.key, failure)
                at_hand = (self.mirror, task.key) in self.stores
                other = any((name, task.key) in self.stores for name in task.others)
                if not at_hand and not other:
                    self.fetched.append(task.key)
                self.stores.add((self.mirror, task.key))
                return FileStored(
                    key=task.key,
                    mirror=self.mirror,
                    sha256=task.sha256 or sha_of(task.path),
                    bytes=task.bytes,
                    compared=task.sha256 is not None,
                    origin="store" if at_hand else "mirror" if other else "registry",
                )
            case work.Verify():
                if failure is not None:
                    return self._fault(task.key, failure)
                if (self.mirror, task.key) not in self.stores:
                    return FileGone(key=task.key, mirror=self.mirror)
                return FileStored(
                    key=task.key,
                    mirror=self.mirror,
                    sha256=task.sha256,
                    bytes=task.bytes,
                    compared=False,
                    origin="store",
                )
            case work.Remove():
                if failure is not None:
                    return replace(self._fault(task.key, failure), removal=True)
                self.stores.discard((self.mirror, task.key))
                return FileGone(key=task.key, mirror=self.mirror)

    def _failed(
        self, task: work.ReadRepo | work.ReadHeader | work.Smoke, why: tuple[str, str] | None
    ) -> StepFailed:
        assert why is not None
        return StepFailed(
            job=task.job, attempt=task.attempt, index=task.index, code=why[0], sentence=why[1]
        )

    def _fault(self, key: str, why: tuple[str, str]) -> FileFault:
        return FileFault(key=key, mirror=self.mirror, code=why[0], sentence=why[1])

    # -- what is there

    def serve(self, repo: str = "owner/model-gguf", **fields: object) -> Outcome:
        return self.do(JobServe(repo=repo, **fields))  # type: ignore[arg-type]

    def job(self, id_: str = "j-0001") -> Job:
        return self.world.jobs[id_]

    def steps(self, id_: str = "j-0001") -> list[tuple[str, str]]:
        return [(s.name, s.state) for s in self.job(id_).steps]

    def details(self, id_: str = "j-0001") -> list[str]:
        """Everything the job said, in order."""
        said: list[str] = []
        for item in self.log:
            steps = item.state.steps if isinstance(item.state, Job) else ()
            if item.key == (id_,) and steps and steps[-1].detail not in said[-1:]:
                said.append(steps[-1].detail)
        return said

    def copies(self, mirror: str | None = None) -> list[str]:
        """Phases of the mirror's copies, files in order of their path."""
        found = sorted(self.world.files.values(), key=lambda f: f.path)
        copies = [copy_on(file, mirror or self.mirror) for file in found]
        return [copy.phase if copy is not None else "absent" for copy in copies]


def llamacpp(
    *architectures: str, version: str = "b1234", kinds: tuple[str, ...] = ("cpu",)
) -> EngineInfo:
    return EngineInfo(
        name="llamacpp",
        version=version,
        architectures=architectures,
        card_kinds=kinds,  # type: ignore[arg-type]
    )


def serve_yard(
    *repos: Repo,
    gib: float = 16,
    engines: tuple[EngineInfo, ...] = (),
    gpu_gib: float = 0,
    **fields: object,
) -> ServeYard:
    """One node n1 with a cpu card (and a gpu), joined, and a hub of these repositories."""
    made = ServeYard(**fields)  # type: ignore[arg-type]
    for one in repos or (repo(),):
        made.hub[one.id.lower()] = one
    if gib > 0:
        join(made, "n1", gib=gib, gpu_gib=gpu_gib, engines=engines)
    made.settle()
    return made


def join(
    made: ServeYard,
    id_: str,
    *,
    gib: float = 16,
    gpu_gib: float = 0,
    engines: tuple[EngineInfo, ...] = (),
) -> None:
    """A node with a cpu card and, with `gpu_gib`, a gpu."""
    made.node(id_, {"cpu": gib}, kind="cpu")
    cards = made.world.nodes[id_].cards
    if gpu_gib:
        made.node(id_, {"gpu0": gpu_gib}, kind="gpu")
        cards = (*cards, CardInfo(id="gpu0", kind="gpu", memory_bytes=int(gpu_gib * GIB)))
    state = made.world.nodes[id_]
    made.append(
        "node",
        (id_,),
        NodeStarted(),
        Node(
            id=state.id,
            running=True,
            started_at=state.started_at,
            cards=cards,
            engines=engines,
            allow_commands=True,
            epoch=1,
        ),
    )
