"""Says who needs which file of the mirrors: models by their source, adapters and jobs by their files.

It derives from the log alone and decides nothing; files.py fetches and removes by it.
"""

from collections.abc import Mapping
from typing import Final, Literal, TypeVar

from controlplane.domain import filesets
from controlplane.domain.world import World
from schemas.adapter import Adapter
from schemas.file import File
from schemas.job import Job

MIRROR: Final = "mirror:"
"""A source that names content: the key of the set's first file follows."""

MIRROR_STEP: Final = 2
"""Place of the step `mirror` in a job's steps: from it on the job needs its files."""

Kind = Literal["model", "adapter", "job", "early", "ended"]
"""Who needs a file: a model, an adapter or a running job that wants it fetched; a running job that has not
come to that; a job that failed or was cancelled and may be retried. The last two let nothing be fetched,
and only the last lets it be removed."""

Holder = tuple[Kind, str]

FETCHING_KINDS: Final[frozenset[str]] = frozenset({"model", "adapter", "job"})
KEEPING_KINDS: Final[frozenset[str]] = frozenset({"model", "adapter", "job", "early"})


def key_of_source(source: str) -> str | None:
    """The key of the first file that a source names, None for a source of another kind."""
    return source.removeprefix(MIRROR) if source.startswith(MIRROR) else None


def repo_of(files: Mapping[str, File], source: str) -> str:
    """The repository the weights of `source` came from, as far as the mirrors know it; else empty."""
    file = files.get(key_of_source(source) or "")
    return file.repo if file is not None else ""


def source_of(key: str) -> str:
    return f"{MIRROR}{key}"


def keys_of_job(job: Job) -> tuple[str, ...]:
    """The keys of the job's files in order of shards; none before its repository was read."""
    if job.file_set is None or not job.commit:
        return ()
    return tuple(
        filesets.file_key(job.repo, job.commit, path) for path in filesets.paths_of(job.file_set)
    )


def keys_of_set(world: World, first: str) -> tuple[str, ...]:
    """The keys of the set whose first file is `first`: its shards follow from that file's path."""
    file = world.files.get(first)
    if file is None:
        return (first,)
    paths = filesets.paths_from(file.path)
    return tuple(filesets.file_key(file.repo, file.commit, path) for path in paths)


def keys_of_adapter(adapter: Adapter) -> tuple[str, ...]:
    """The keys of its files: none before it was found to fit its base, and none of one that is refused."""
    if adapter.phase not in ("fetching", "ready"):
        return ()
    return tuple(file.key for file in adapter.files)


def kind_of(job: Job) -> Kind | None:
    """How a job needs its files, None when it does not (its entry may)."""
    match job.state:
        case "running":
            return "job" if len(job.steps) > MIRROR_STEP else "early"
        case "failed" | "cancelled":
            return "ended"
        case "done" | "joined":
            return None


K = TypeVar("K")


class Needs:
    """Who needs each file. Kept by an index from step to step; each call names the files it concerned."""

    def __init__(self) -> None:
        self.by_key: dict[str, set[Holder]] = {}
        self.of_job: dict[str, tuple[str, ...]] = {}
        self.of_model: dict[str, tuple[str, ...]] = {}
        self._held: dict[Holder, tuple[str, ...]] = {}
        self._job_kind: dict[str, Kind] = {}
        self._from: dict[str, set[str]] = {}

    def model(self, world: World, name: str) -> set[str]:
        """The entry `name` changed, came or went."""
        holder: Holder = ("model", name)
        model = world.models.get(name)
        first = key_of_source(model.source) if model is not None else None
        before = self._held.get(holder, ())
        if first is None and not before:
            return set()
        if before:
            self._from.get(before[0], set()).discard(name)
        keys = keys_of_set(world, first) if first is not None else ()
        if first is not None:
            self._from.setdefault(first, set()).add(name)
        _put(self.of_model, name, keys)
        return self._hold(holder, keys)

    def adapter(self, world: World, name: str) -> set[str]:
        """The adapter `name` changed, came or went."""
        adapter = world.adapters.get(name)
        keys = keys_of_adapter(adapter) if adapter is not None else ()
        return self._hold(("adapter", name), keys)

    def job(self, world: World, id_: str) -> set[str]:
        """The job `id_` changed, came or went."""
        job = world.jobs.get(id_)
        kind = kind_of(job) if job is not None else None
        keys = keys_of_job(job) if job is not None and kind is not None else ()
        touched: set[str] = set()
        before = self._job_kind.pop(id_, None)
        if before is not None and before != kind:
            touched |= self._hold((before, id_), ())
        if kind is not None:
            self._job_kind[id_] = kind
            touched |= self._hold((kind, id_), keys)
        _put(self.of_job, id_, keys)
        return touched

    def file(self, world: World, key: str) -> set[str]:
        """The file changed, came or went: what its set is made of may be known only now."""
        touched = {key}
        for name in tuple(self._from.get(key, ())):
            touched |= self.model(world, name)
        return touched

    def kinds(self, key: str) -> frozenset[str]:
        return frozenset(kind for kind, _ in self.by_key.get(key, ()))

    def is_wanted(self, key: str) -> bool:
        """Whether the leader's mirror is to have it."""
        return bool(self.kinds(key) & FETCHING_KINDS)

    def is_kept(self, key: str) -> bool:
        """Whether it must not be removed."""
        return bool(self.kinds(key) & KEEPING_KINDS)

    def who(self, key: str) -> tuple[str, ...]:
        """Who keeps it, for a person, in order: models, adapters, then jobs."""
        found = sorted(h for h in self.by_key.get(key, ()) if h[0] in KEEPING_KINDS)
        models = [f"model {name!r}" for kind, name in found if kind == "model"]
        adapters = [f"adapter {name!r}" for kind, name in found if kind == "adapter"]
        jobs = sorted(f"job {name}" for kind, name in found if kind in ("job", "early"))
        return (*models, *adapters, *jobs)

    def _hold(self, holder: Holder, keys: tuple[str, ...]) -> set[str]:
        before = self._held.get(holder, ())
        if before == keys:
            return set()
        for key in before:
            holders = self.by_key.get(key)
            if holders is not None:
                holders.discard(holder)
                if not holders:
                    del self.by_key[key]
        for key in keys:
            self.by_key.setdefault(key, set()).add(holder)
        _put(self._held, holder, keys)
        return {*before, *keys}


def _put(table: dict[K, tuple[str, ...]], key: K, keys: tuple[str, ...]) -> None:
    if keys:
        table[key] = keys
    else:
        table.pop(key, None)


def needs_of(world: World) -> Needs:
    """All needs of a world, from scratch."""
    needs = Needs()
    for name in world.models:
        needs.model(world, name)
    for name in world.adapters:
        needs.adapter(world, name)
    for id_ in world.jobs:
        needs.job(world, id_)
    return needs


def needed_files(world: World) -> dict[str, tuple[str, ...]]:
    """Every file that must not be removed, with who needs it (`model 'x'`, `job j-1`)."""
    needs = needs_of(world)
    return {key: needs.who(key) for key in sorted(needs.by_key) if needs.is_kept(key)}
