"""Says which work the leader's instance should be doing now, from the log alone: the tasks of its workers.

Level-triggered: a task is due as long as the log says so and no report of it was decided on. The shell
(controlplane/workers.py) starts what is due and not running, and cancels what is no longer due.
"""

from msgspec import Struct

from controlplane.domain import needs
from controlplane.domain.files import copy_on, is_here
from controlplane.domain.world import World
from schemas.file import File
from schemas.job import STEPS, Job


class ReadRepo(Struct, frozen=True, kw_only=True):
    job: str
    attempt: int
    index: int
    repo: str
    revision: str | None


class ReadHeader(Struct, frozen=True, kw_only=True):
    """`key` is the file's; `mirrored`: read the mirror's copy, else the registry's by ranges."""

    job: str
    attempt: int
    index: int
    key: str
    repo: str
    commit: str
    path: str
    mirrored: bool


class Smoke(Struct, frozen=True, kw_only=True):
    """One short request straight to the replica."""

    job: str
    attempt: int
    index: int
    model: str
    node: str
    replica: str
    endpoint: str
    has_key: bool


class ReadAdapter(Struct, frozen=True, kw_only=True):
    """The configuration and the file list of an adapter are to be read where it comes from."""

    adapter: str
    incarnation: str
    source: str


class Fetch(Struct, frozen=True, kw_only=True):
    """Bring `key` into this mirror. `others` are mirrors whose copy is present, by name: asked first.

    `repo` is a repository of the registry, or the URL or absolute path of an adapter's folder.
    """

    key: str
    repo: str
    commit: str
    path: str
    bytes: int
    sha256: str | None
    others: tuple[str, ...] = ()


class Verify(Struct, frozen=True, kw_only=True):
    key: str
    sha256: str
    bytes: int


class Remove(Struct, frozen=True, kw_only=True):
    key: str


Task = ReadRepo | ReadHeader | Smoke | ReadAdapter | Fetch | Verify | Remove


def due(world: World, mirror: str) -> tuple[Task, ...]:
    """Every task of the instance `mirror` while it leads: jobs in order of id, adapters by name, then files in order of key.

    Only what is running or busy is looked at, so that asking often costs nothing. Nothing is due for what no
    decision could be written of: its reports would be made again and again.
    """
    found: list[Task] = []
    for id_ in sorted(world.running_jobs):
        task = _of_job(world, mirror, world.jobs[id_])
        if task is not None and world.head("job", id_).writable:
            found.append(task)
    for name in sorted(world.unread_adapters):
        adapter = world.adapters[name]
        if adapter.phase == "reading" and world.head("adapter", name).writable:
            found.append(
                ReadAdapter(adapter=name, incarnation=adapter.incarnation, source=adapter.source)
            )
    if mirror:
        for key in sorted(world.busy_files):
            task = _of_file(world.files[key], mirror)
            if task is not None and world.head("file", key).writable:
                found.append(task)
    return tuple(found)


def _of_job(world: World, mirror: str, job: Job) -> Task | None:
    """The task of the step under way, None when it waits for something else."""
    index = len(job.steps) - 1
    if index < 0 or job.steps[index].state != "running":
        return None
    match STEPS[index]:
        case "registry":
            return ReadRepo(
                job=job.id,
                attempt=job.attempt,
                index=index,
                repo=job.repo or job.request.repo,
                # What was pinned once is read again as it was, wherever the branch is by now.
                revision=job.commit or job.request.revision,
            )
        case "check":
            return _header(world, mirror, job, index)
        case "smoke test":
            return _smoke(world, job, index)
        case "mirror" | "catalog" | "placement":
            return None


def _header(world: World, mirror: str, job: Job, index: int) -> Task | None:
    keys = needs.keys_of_job(job)
    file = world.files.get(keys[0]) if keys else None
    if file is None:
        return None
    is_mirrored = index > needs.MIRROR_STEP
    if is_mirrored and not is_here(file, mirror):
        # Another control plane leads by now: its mirror gets the file first.
        return None
    return ReadHeader(
        job=job.id,
        attempt=job.attempt,
        index=index,
        key=file.key,
        repo=file.repo,
        commit=file.commit,
        path=file.path,
        mirrored=is_mirrored,
    )


def _smoke(world: World, job: Job, index: int) -> Task | None:
    replica = world.replicas.get(job.replica or "")
    if replica is None or replica.phase != "ready" or replica.endpoint is None:
        return None
    return Smoke(
        job=job.id,
        attempt=job.attempt,
        index=index,
        model=job.model,
        node=replica.node,
        replica=replica.id,
        endpoint=replica.endpoint,
        has_key=replica.has_key,
    )


def _of_file(file: File, mirror: str) -> Task | None:
    mine = copy_on(file, mirror)
    match mine.phase if mine is not None else "present":
        case "fetching":
            others = tuple(
                c.mirror for c in file.copies if c.mirror != mirror and c.phase == "present"
            )
            return Fetch(
                key=file.key,
                repo=file.repo,
                commit=file.commit,
                path=file.path,
                bytes=file.published_bytes,
                sha256=file.published_sha256 or file.sha256,
                others=others,
            )
        case "verifying":
            sha256 = file.sha256 or file.published_sha256 or ""
            size = file.bytes if file.bytes is not None else file.published_bytes
            return Verify(key=file.key, sha256=sha256, bytes=size)
        case "removing":
            return Remove(key=file.key)
        case "present" | "failed":
            return None
