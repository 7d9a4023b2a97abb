"""Folds what the workers found out into the jobs they found it for.

A report of another attempt, or of a step that is over, changes nothing.
"""

from msgspec.structs import replace

from controlplane.domain import (
    adapters,
    files,
    filesets,
    jobchecks,
    jobentry,
    jobtexts,
    jobwrites,
    needs,
)
from controlplane.domain.decision import Decision
from controlplane.domain.jobwrites import REGISTRY, SMOKE
from controlplane.domain.quantities import show_bytes
from controlplane.domain.repo import Repo
from controlplane.domain.reports import (
    AdapterRead,
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
from controlplane.domain.scene import Scene
from schemas import codes
from schemas.file import FileAbsent
from schemas.job import FileSet, Job, ServeRequest

LONGEST_PATH = 300
"""Bytes of a file's path as an event holds it: a job carries its first file's path in every event."""

COMMIT_SHOWN = 7


def fold(scene: Scene, report: Report) -> Decision | None:
    """What the report changes; None when it is late, or tells nothing new."""
    match report:
        case FileStored() | FileFault() | FileGone():
            return files.fold(scene, report)
        case AdapterRead() | AdapterUnreadable():
            return adapters.fold(scene, report)
        case RepoRead():
            job = _current(scene, report.job, report.attempt, REGISTRY)
            return _repository(scene, job, report.repo) if job is not None else None
        case HeaderRead():
            job = _current(scene, report.job, report.attempt, report.index)
            return _header(scene, job, report) if job is not None else None
        case SmokeAnswered():
            job = _current(scene, report.job, report.attempt, SMOKE)
            return _answered(scene, job, report) if job is not None else None
        case StepFailed():
            job = _current(scene, report.job, report.attempt, report.index)
            return _failed(scene, job, report) if job is not None else None


def _current(scene: Scene, id_: str, attempt: int, index: int) -> Job | None:
    """The job while it does in this very attempt what the report is of."""
    job = scene.world.jobs.get(id_)
    if job is None or job.attempt != attempt:
        return None
    return job if jobwrites.running_step(job, index) is not None else None


def _repository(scene: Scene, job: Job, repo: Repo) -> Decision:
    """The step `registry`, from here on with the commit, the files and the name it has to the end:

    1. no file set, or not one: failed; so is one too large to be told in one event;
    2. another running job does the same: this one joins it;
    3. name or alias is taken: failed, now and not after the download;
    4. else its files are known from here on, and the step is done.
    """
    request = job.request
    file_set = filesets.pick(repo, quant=request.quant, file=request.file)
    if not isinstance(file_set, FileSet):  # 1
        return jobwrites.failed(scene, job, file_set.code, file_set.sentence)
    if file_set.shards > files.AT_ONCE or jobtexts.size_of(file_set.first) > LONGEST_PATH:
        sentence = f"{jobtexts.clipped(file_set.first, 100)}: its files or their path are too long"
        return jobwrites.failed(scene, job, codes.INVALID, sentence)
    model = jobentry.name_of(request, repo.suggested_name, repo.id)
    key = jobentry.key_of(repo.id, repo.commit, file_set, model)
    pinned = {
        "repo": repo.id,
        "commit": repo.commit,
        "file_set": file_set,
        "model": model,
        "key": key,
    }
    detail = (
        f"{file_set.name}, {show_bytes(file_set.bytes)}, {jobtexts.files(file_set.shards)}, "
        f"{repo.commit[:COMMIT_SHOWN]}"
    )
    for id_ in sorted(scene.world.running_jobs):
        other = scene.world.jobs[id_]
        if id_ != job.id and other.key == key and _alike(other.request, request):  # 2
            change = jobwrites.joined(scene, job, other, detail, **pinned)
            return jobwrites.decided(scene, job, (change,))
    after = jobwrites.with_step(job, REGISTRY, "done", detail, scene.now, **pinned)
    wanted = jobentry.wanted_of(scene.world, after)
    taken = jobentry.taken(scene.world, job.id, wanted)
    if taken:  # 3
        return jobwrites.failed(scene, job, codes.EXISTS, taken)
    why = f"job {job.id} asks for it"  # 4
    unknown = [f for f in files.of_set(repo, file_set) if f.key not in scene.world.files]
    changes = [files.written(file, FileAbsent(), why) for file in unknown]
    changes.append(jobwrites.stepped(scene, job, REGISTRY, "done", detail, **pinned))
    return jobwrites.decided(scene, job, tuple(changes))


def _alike(a: ServeRequest, b: ServeRequest) -> bool:
    """Whether both end in the same entry: how the file set was named does not matter, all else does."""
    return replace(a, repo="", quant=None, file=None, name=None, revision=None) == replace(
        b, repo="", quant=None, file=None, name=None, revision=None
    )


def _header(scene: Scene, job: Job, report: HeaderRead) -> Decision:
    found = jobchecks.check(scene, job, report)
    if isinstance(found, jobchecks.Failed):
        return jobwrites.failed(scene, job, found.code, found.sentence)
    change = jobwrites.stepped(
        scene,
        job,
        report.index,
        "done",
        found.detail,
        architecture=jobtexts.clipped(found.architecture, 100),
        generates=found.generates,
        unmapped=found.unmapped,
        context_length=found.context_length,
        estimate=found.estimate,
    )
    return jobwrites.decided(scene, job, (change,))


def _answered(scene: Scene, job: Job, report: SmokeAnswered) -> Decision | None:
    if report.replica != job.replica:
        return None
    rate: float | None = None
    if report.completion_tokens > 0 and report.generation_s > 0:
        rate = round(report.completion_tokens / report.generation_s, 2)
    reply = jobtexts.clipped(report.reply.strip(), jobtexts.REPLY_BYTES)
    speed = f"{rate:.1f} tokens/s" if rate is not None else "tokens/s not known"
    quoted = " ".join(reply.split())
    change = jobwrites.done(
        scene,
        job,
        SMOKE,
        f'{speed}, "{quoted}"',
        reply=reply,
        tokens_per_second=rate,
        prompt_s=round(report.prompt_s, 3) if report.prompt_s > 0 else None,
    )
    return jobwrites.decided(scene, job, (change,))


def _failed(scene: Scene, job: Job, report: StepFailed) -> Decision | None:
    """A smoke test whose replica went away, or is just going, is no failure: the job waits for another."""
    if report.index == SMOKE:
        if report.unanswered:
            return None
        asked = scene.world.replicas.get(job.replica or "")
        if asked is None or asked.phase != "ready":
            return None
    return jobwrites.failed(scene, job, report.code, report.sentence)


def keys_known(scene: Scene, job: Job) -> bool:
    """Whether the log still knows every file of the job."""
    keys = needs.keys_of_job(job)
    return bool(keys) and all(key in scene.world.files for key in keys)
