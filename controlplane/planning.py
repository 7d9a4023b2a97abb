"""Answers what serving a repository would do, and what a repository holds, without changing anything.

It asks the registry as a job would and judges with the same functions on the world as it is; any instance
can, whether it leads or not.
"""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from datetime import datetime
from typing import Final

from msgspec import Struct
from msgspec.structs import replace

from controlplane import headers
from controlplane.domain import (
    estimate,
    filesets,
    jobchecks,
    jobcommands,
    jobentry,
    jobwrites,
)
from controlplane.domain.decision import Ids, Live, Rejected
from controlplane.domain.files import of_set
from controlplane.domain.filesets import Refusal
from controlplane.domain.ggufheader import NotGguf
from controlplane.domain.index import StepIndex
from controlplane.domain.quantities import show_bytes
from controlplane.domain.rehearsal import rehearse
from controlplane.domain.repo import Repo
from controlplane.domain.reports import HeaderRead
from controlplane.domain.scene import Scene
from controlplane.domain.world import World
from controlplane.mirror.store import Store
from controlplane.registry.client import Registry
from controlplane.registry.faults import RegistryFault
from controlplane.registry.rangedfile import KEPT_BYTES
from schemas import codes
from schemas.api import ErrorDetail, PlanView, RegistrySet, RegistryView
from schemas.commands import JobServe
from schemas.job import FileSet, Job, ServeRequest
from schemas.model import Model
from schemas.placement import Candidate
from schemas.settings import ControlplaneSettings

PLAN_ID: Final = ""
"""The id of a job that is only thought of; no real one has it."""

ANSWER_S: Final = 100.0
"""All an answer may take. yardctl waits a little longer, so a person is told what was slow; and whatever a
client that left had asked for ends."""


class ServeAsked(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The body of `POST /v1/plan`: the fields of the command `job.serve`."""

    repo: str
    quant: str | None = None
    file: str | None = None
    name: str | None = None
    aliases: list[str] = []
    description: str = ""
    replicas: int = 1
    ctx_pool: int = 0
    context_length: int = 0
    revision: str | None = None


class BadRequest(Exception):
    """The request itself is wrong; the text says how."""


class NotAnswered(Exception):
    """The registry gave no answer: `code` of schemas/codes.py, and the sentence as the text."""

    def __init__(self, code: str, sentence: str) -> None:
        super().__init__(sentence)
        self.code = code


class Planner:
    """Plans of one instance. `world` and `live` are what it knows at the moment of asking; `far` are the
    turns of all who read headers at the registry."""

    def __init__(
        self,
        *,
        registry: Registry,
        store: Store,
        far: headers.Headers,
        world: Callable[[], World],
        live: Callable[[], Live],
        ids: Ids,
        settings: ControlplaneSettings,
        now: Callable[[], datetime],
        answer_s: float = ANSWER_S,
    ) -> None:
        self._registry = registry
        self._store = store
        self._world = world
        self._live = live
        self._ids = ids
        self._settings = settings
        self._now = now
        self._answer_s = answer_s
        self._far = far

    @property
    def position(self) -> int:
        """The sequence up to which plans are true."""
        return self._world().position

    async def registry(
        self, repo_id: str, *, quant: str | None, file: str | None, revision: str | None
    ) -> RegistryView:
        """What a repository holds and what would be picked. Raises BadRequest, NotAnswered."""
        asked = jobcommands.request_of(
            JobServe(repo=repo_id, quant=quant, file=file, revision=revision)
        )
        if isinstance(asked, Rejected):
            raise BadRequest(asked.sentence)
        async with self._in_time(asked):
            repo = await self._repo(asked)
        picked = filesets.pick(repo, quant=asked.quant, file=asked.file)
        sets = filesets.group(repo)
        held = {path for one in sets for path in filesets.paths_of(one)}
        left_out = tuple(
            sorted(
                f.path
                for f in repo.files
                if f.path.lower().endswith(".gguf") and f.path not in held
            )
        )
        return RegistryView(
            repo=repo.id,
            commit=repo.commit,
            gated=repo.gated,
            private=repo.private,
            suggested_name=jobentry.name_of(asked, repo.suggested_name, repo.id),
            sets=tuple(
                RegistrySet(
                    name=one.name,
                    quant=one.quant,
                    shards=one.shards,
                    bytes=one.bytes,
                    picked=one == picked,
                )
                for one in sets
            ),
            left_out=left_out,
            sentence=_why(asked, picked),
        )

    async def plan(self, body: ServeAsked) -> PlanView:
        """What `job.serve` would come to. Raises BadRequest, NotAnswered."""
        request = jobcommands.request_of(
            JobServe(**{name: getattr(body, name) for name in body.__struct_fields__})
        )
        if isinstance(request, Rejected):
            raise BadRequest(request.sentence)
        async with self._in_time(request):
            return await self._plan(request)

    async def _plan(self, request: ServeRequest) -> PlanView:
        repo = await self._repo(request)
        found = PlanView(
            repo=repo.id,
            commit=repo.commit,
            model=jobentry.name_of(request, repo.suggested_name, repo.id),
        )
        picked = filesets.pick(repo, quant=request.quant, file=request.file)
        if isinstance(picked, Refusal):
            return _wrong(found, picked.code, picked.sentence)
        found = replace(found, file_set=picked, fetched_bytes=self._fetched(repo, picked))
        file = self._registry.open(repo.id, repo.commit, picked.first, KEPT_BYTES)
        try:
            header = await self._far.shape(file.prefix)
        except RegistryFault as fault:
            return _wrong(found, fault.code, fault.sentence)
        except headers.TooSlow as slow:
            return _wrong(found, codes.REGISTRY_UNREACHABLE, f"the header of {picked.first} {slow}")
        if isinstance(header, NotGguf):
            return _wrong(
                found, codes.NOT_GGUF, f"{picked.first} is not a GGUF file: {header.sentence}"
            )
        return self._judged(found, self._job(request, found, picked), repo, header)

    def _judged(self, found: PlanView, job: Job, repo: Repo, header: headers.Found) -> PlanView:
        scene = self._scene()
        report = HeaderRead(
            job=job.id,
            attempt=1,
            index=jobwrites.CHECK_AHEAD,
            shape=header.shape,
            architecture=header.architecture,
            why=header.why,
        )
        wanted = jobentry.wanted_of(scene.world, job)
        taken = jobentry.taken(scene.world, job.id, wanted)
        if taken:
            found = _wrong(found, codes.EXISTS, taken)
        assert job.file_set is not None
        # The log may not know the files yet: the disk is judged by what the registry says of them.
        files = [scene.world.files.get(f.key, f) for f in of_set(repo, job.file_set)]
        left = jobchecks.missing_bytes(
            scene.world, scene.live.mirror, files, self._store.reserved()
        )
        no_disk = jobchecks.no_disk(self._store.free_bytes(), left, job.file_set.bytes)
        if no_disk is not None:
            found = _wrong(found, no_disk.code, no_disk.sentence)
        verdict = jobchecks.check(scene, job, report)
        if isinstance(verdict, jobchecks.Failed):
            found = _wrong(found, verdict.code, verdict.sentence)
            context = wanted.context_length
        else:
            context = verdict.context_length
            wanted = replace(
                wanted,
                context_length=context,
                generates=verdict.generates,
                unmapped=verdict.unmapped,
            )
        made = jobchecks.estimate_of(wanted, header.shape, job.file_set.bytes)
        model = jobentry.model_of(wanted, made.total_bytes)
        places = () if isinstance(model, tuple) else _places(scene, model)
        return replace(
            found,
            architecture=header.architecture,
            context_length=context,
            estimate=made,
            explained=estimate.explain(made),
            entry=jobentry.entry_of(wanted, made.total_bytes),
            places=places,
        )

    def _scene(self) -> Scene:
        world, live = self._world(), self._live()
        index = StepIndex()
        index.sync(world)
        return Scene(
            world=world,
            live=live,
            now=self._now(),
            ids=self._ids,
            settings=self._settings,
            index=index,
        )

    def _job(self, request: ServeRequest, found: PlanView, picked: FileSet) -> Job:
        return Job(
            id=PLAN_ID,
            request=request,
            by="",
            state="running",
            started=self._now(),
            model=found.model,
            repo=found.repo,
            commit=found.commit,
            file_set=picked,
            key=jobentry.key_of(found.repo, found.commit, picked, found.model),
        )

    def _fetched(self, repo: Repo, picked: FileSet) -> int:
        return sum(
            file.bytes
            for file in filesets.files_of(repo, picked)
            if self._store.has(filesets.file_key(repo.id, repo.commit, file.path))
        )

    @asynccontextmanager
    async def _in_time(self, request: ServeRequest) -> AsyncIterator[None]:
        try:
            async with asyncio.timeout(self._answer_s):
                yield
        except TimeoutError:
            raise NotAnswered(
                codes.REGISTRY_UNREACHABLE,
                f"the registry did not tell all that is needed of {request.repo} within "
                f"{self._answer_s:g} s; ask again later, or start the job, which waits longer",
            ) from None

    async def _repo(self, request: ServeRequest) -> Repo:
        try:
            return await self._registry.repo(request.repo, request.revision)
        except RegistryFault as fault:
            raise NotAnswered(fault.code, fault.sentence) from fault


def _places(scene: Scene, model: Model) -> tuple[Candidate, ...]:
    found = rehearse(scene, model)
    return (*found.fits, *found.misses)


def _why(asked: ServeRequest, picked: FileSet | Refusal) -> str:
    """What would be picked and by what, or why nothing would."""
    if isinstance(picked, Refusal):
        return picked.sentence
    by = f"--file {asked.file}" if asked.file is not None else f"--quant {asked.quant}"
    count = f"{picked.shards} files" if picked.shards > 1 else "1 file"
    told = f"{by} picks {picked.name}: {show_bytes(picked.bytes)} in {count}"
    if picked.published < picked.shards:
        told += f", {picked.shards - picked.published} of them without a published checksum"
    return told


def _wrong(found: PlanView, code: str, sentence: str) -> PlanView:
    problem = ErrorDetail(code=code, sentence=sentence)
    return replace(found, problems=(*found.problems, problem))
