"""Decides what a person's wish about a serve job does: start one or join it, cancel it, go on with it.

What is wrong with a request is said here, before a job exists; what only the registry knows is not.
"""

import re
from typing import Any, Final

from msgspec.structs import replace

from controlplane.domain import entries, files, filesets, jobentry, jobtexts, needs
from controlplane.domain import jobwrites as writes
from controlplane.domain.decision import Accepted, Change, Rejected
from controlplane.domain.jobreports import keys_known
from controlplane.domain.jobs import doing
from controlplane.domain.jobwrites import CATALOG, CHECK, MIRROR, PLACEMENT, REGISTRY
from controlplane.domain.quantities import show_bytes
from controlplane.domain.scene import Scene
from schemas import codes
from schemas.commands import JobCancel, JobRetry, JobServe
from schemas.job import STEPS, Job, JobStarted, ServeRequest

CTX_POOL: Final = 16384
CONTEXT_LENGTH: Final = 4096
MOST_REPLICAS: Final = 1000
MOST_TOKENS: Final = 2**31 - 1
LONGEST_REPO: Final = 200

_REPO: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*/[A-Za-z0-9][A-Za-z0-9._-]*", re.ASCII)


def decide(scene: Scene, actor: str, body: JobServe | JobCancel | JobRetry) -> Accepted | Rejected:
    match body:
        case JobServe():
            return _serve(scene, actor, body)
        case JobCancel():
            return _cancel(scene, actor, body)
        case JobRetry():
            return _retry(scene, actor, body)


def request_of(body: JobServe) -> ServeRequest | Rejected:
    """The request as it will be carried out, or the first thing that is wrong with it.

    Also what a plan is made for: nothing of it is known to the registry yet.
    """
    repo = body.repo.strip().strip("/")
    if _REPO.fullmatch(repo) is None or len(repo) > LONGEST_REPO:
        typed = jobtexts.clipped(body.repo, 200)
        return _invalid(f'"{typed}" is not a repository; it looks like owner/name')
    if body.replicas < 0:
        return _invalid(f"replicas is a number of at least 0 (0 = on demand), got {body.replicas}")
    if body.replicas > MOST_REPLICAS:
        return _invalid(f"replicas is at most {MOST_REPLICAS}, got {body.replicas}")
    quant, file = _given(body.quant), _given(body.file)
    if quant is None and file is None:
        quant = filesets.DEFAULT_QUANT
    ctx_pool = body.ctx_pool if body.ctx_pool > 0 else CTX_POOL
    context_length = body.context_length if body.context_length > 0 else CONTEXT_LENGTH
    if max(ctx_pool, context_length) > MOST_TOKENS:
        return _invalid(f"a number of tokens is at most {MOST_TOKENS}")
    if context_length > ctx_pool and body.context_length > 0:
        return _invalid(
            f"a context_length of {context_length} tokens is more than the ctx_pool of {ctx_pool}, "
            f"which all requests of a replica share; give a --ctx-pool of at least {context_length}"
        )
    request = ServeRequest(
        repo=repo,
        quant=quant,
        file=file,
        name=body.name or None,
        aliases=tuple(body.aliases),
        description=body.description,
        replicas=body.replicas,
        ctx_pool=ctx_pool,
        context_length=min(context_length, ctx_pool),
        context_given=body.context_length > 0,
        revision=_given(body.revision),
    )
    return _checked(request)


def _given(text: str | None) -> str | None:
    return (text.strip() or None) if text is not None else None


def _invalid(sentence: str) -> Rejected:
    return Rejected(code=codes.INVALID, sentence=sentence)


def _checked(request: ServeRequest) -> ServeRequest | Rejected:
    """Names by the catalog's rules, and no text that no terminal or event could take."""
    if not jobentry.fits_event(request, jobtexts.REQUEST_BYTES):
        limit = show_bytes(jobtexts.REQUEST_BYTES)
        return _invalid(
            f"the request is too long: every event of the job carries it, at most {limit}"
        )
    spellings = [("name", request.name)] if request.name is not None else []
    spellings += [(f"aliases[{at}]", alias) for at, alias in enumerate(request.aliases)]
    for where, name in spellings:
        wrong = entries.name_problem(name or "")
        if wrong:
            return _invalid(f"{where}: {wrong}")
    for at, alias in enumerate(request.aliases):
        if alias == request.name:
            return _invalid(f"aliases[{at}]: an alias must differ from the name")
        if alias in request.aliases[:at]:
            return _invalid(f"aliases[{at}]: the alias {alias!r} is given twice")
    for where in ("quant", "file", "revision"):
        text: str | None = getattr(request, where)
        if text is not None and not text.isprintable():
            return _invalid(f"{where}: expected a text without control characters")
    if jobtexts.clipped(request.description, 10**6) != request.description.strip():
        return _invalid("description: expected a text without control characters")
    return request


def _same(a: ServeRequest) -> Any:
    quant = a.quant.casefold() if a.quant is not None else None
    return replace(a, repo=a.repo.casefold(), quant=quant)


def _serve(scene: Scene, actor: str, body: JobServe) -> Accepted | Rejected:
    """Cases: 1 the request is wrong; 2 a running job has the same: joined; 3 a new job begins."""
    request = request_of(body)
    if isinstance(request, Rejected):  # 1
        return request
    for id_ in sorted(scene.world.running_jobs):
        job = scene.world.jobs[id_]
        if _same(job.request) == _same(request):  # 2
            return Accepted(
                sentence=f"joined: job {id_} serves {job.request.repo} already",
                refs=(scene.world.subject("job", id_),),
            )
    job = Job(  # 3
        id=scene.ids.job(), request=request, by=actor, state="running", started=scene.now
    )
    job = writes.with_step(job, REGISTRY, "running", doing(scene, job, REGISTRY), scene.now)
    change = writes.change(job, JobStarted(attempt=1), f"asked for by {actor}")
    return Accepted(changes=(change,), sentence=f"job {job.id} started: {request.repo}")


def _known(scene: Scene, id_: str) -> Job | Rejected:
    job = scene.world.jobs.get(id_)
    if job is None:
        shown = jobtexts.clipped(id_, 100)
        return Rejected(
            code=codes.NOT_FOUND,
            sentence=f"there is no job {shown!r}; `yardctl job list` shows those there are",
        )
    return job


def _cancel(scene: Scene, actor: str, body: JobCancel) -> Accepted | Rejected:
    job = _known(scene, body.job)
    if isinstance(job, Rejected):
        return job
    if job.state != "running":
        return Rejected(code=codes.CONFLICT, sentence=_over(job))
    left = _left(scene, job)
    return Accepted(
        changes=(writes.cancelled(scene, job, actor),),
        sentence=f"job {job.id} cancelled; left: {'; '.join(left)}",
        lines=left,
    )


def _over(job: Job) -> str:
    if job.state == "joined":
        return f"job {job.id} is over: it joined job {job.joined}"
    return f"job {job.id} is {job.state} already"


def _left(scene: Scene, job: Job) -> tuple[str, ...]:
    """What a cancelled job leaves behind: files, bytes, its entry."""
    known = [scene.world.files[key] for key in needs.keys_of_job(job) if key in scene.world.files]
    here = [file for file in known if files.is_here(file, scene.live.mirror)]
    begun = [
        file
        for file in known
        if (mine := files.copy_on(file, scene.live.mirror)) and mine.phase == "fetching"
    ]
    found: list[str] = []
    if here:
        size = show_bytes(sum(file.bytes or file.published_bytes for file in here))
        found.append(f"{len(here)} of {jobtexts.files(len(known))} ({size}) on the mirror")
    if begun:
        total = show_bytes(sum(file.published_bytes for file in begun))
        found.append(
            f"what came so far of {jobtexts.files(len(begun))} ({total}), kept for a retry"
        )
    if not found:
        found.append("no files")
    model = writes.entry_of_job(scene, job)
    if model is None:
        found.append("no catalog entry")
    else:
        count = jobtexts.replicas(model.scaling.min)
        found.append(f"the catalog entry {model.name!r} with {count} kept running")
    return tuple(found)


def _retry(scene: Scene, actor: str, body: JobRetry) -> Accepted | Rejected:
    """Goes on from the first step that is not done, or whose result is gone:

    1. no such job, or one that is running, done or joined;
    2. another running job does the same by now, or has the name; so has another model;
    3. the entry is there: it gets its scaling back, and its failed starts are forgotten;
    4. the entry was removed: it is added again; 5. files are gone: they are fetched again.
    """
    job = _known(scene, body.job)
    if isinstance(job, Rejected):
        return job
    if job.state not in ("failed", "cancelled"):  # 1
        return Rejected(code=codes.CONFLICT, sentence=_over(job))
    rival = _rival(scene, job)
    if rival is not None:  # 2
        sentence = f"job {rival} serves the same already; `yardctl job watch {rival}` follows it"
        return Rejected(code=codes.CONFLICT, sentence=sentence)
    index, notes = _first_not_done(scene, job)
    if index > REGISTRY:
        wanted = jobentry.wanted_of(scene.world, job)
        taken = jobentry.taken(scene.world, job.id, wanted, job.incarnation)
        if taken:
            return Rejected(code=codes.EXISTS, sentence=taken)
    changes: list[Change] = []
    model = writes.entry_of_job(scene, job)
    if model is not None and index >= PLACEMENT:  # 3
        changes.extend(writes.switched_on(scene, model, job))
    if index in (MIRROR, CHECK):
        keys = needs.keys_of_job(job)
        changes.extend(files.fetched_again(scene, keys, f"job {job.id} goes on"))
    again = replace(
        job,
        state="running",
        attempt=job.attempt + 1,
        steps=job.steps[:index],
        error="",
        code="",
        joined=None,
        replica=None,
        ended_at=None,
    )
    again = writes.with_step(again, index, "running", doing(scene, again, index), scene.now)
    reason = f"retried by {actor}, it goes on at {STEPS[index]}"
    changes.append(writes.change(again, JobStarted(attempt=again.attempt), reason))
    said = f"job {job.id} goes on at {STEPS[index]}"
    return Accepted(
        changes=tuple(changes),
        sentence="; ".join((said, *notes)),
        refs=(scene.world.subject("job", job.id),),
    )


def _rival(scene: Scene, job: Job) -> str | None:
    for id_ in sorted(scene.world.running_jobs):
        other = scene.world.jobs[id_]
        if (job.key and other.key == job.key) or _same(other.request) == _same(job.request):
            return id_
    return None


def _first_not_done(scene: Scene, job: Job) -> tuple[int, tuple[str, ...]]:
    """Where to go on, and what a person should know about it."""
    done = 0
    for step in job.steps:
        if step.state != "done":
            break
        done += 1
    # A switched-off entry has no replica to ask: the smoke test begins with waiting for one again.
    done = min(done, PLACEMENT)
    if done == REGISTRY or not keys_known(scene, job):
        return REGISTRY, ()
    notes: list[str] = []
    here = all(
        files.is_here(scene.world.files[key], scene.live.mirror) for key in needs.keys_of_job(job)
    )
    if done > MIRROR and not here:  # 5
        done = MIRROR
        notes.append("its files are not on this mirror any more and are fetched again")
    if job.incarnation and writes.entry_of_job(scene, job) is None:  # 4
        done = min(done, CATALOG)
        notes.append(f"its entry {job.model!r} was removed meanwhile and is added again")
    return done, tuple(notes)
