"""Carries a running serve job on: its next step, or what the step under way came to.

Level-triggered: each call looks at the world alone and returns the first thing to do, or nothing. What only
a worker can find out comes as a report (jobreports.py); what a person wants, as a command (jobcommands.py).
"""

from datetime import datetime, timedelta

from controlplane.domain import catalog, files, jobentry, jobplacement, jobtexts, needs
from controlplane.domain import jobwrites as writes
from controlplane.domain.decision import Change, Decision, Rejected
from controlplane.domain.jobwrites import (
    CATALOG,
    MIRROR,
    PLACEMENT,
    SMOKE,
)
from controlplane.domain.quantities import show_bytes
from controlplane.domain.scene import Scene, is_off
from schemas import codes
from schemas.commands import ModelAdd
from schemas.file import File
from schemas.job import Job
from schemas.model import Model, ModelAdded

NOT_FETCHED = "the mirror could not fetch it: "


def look_after(scene: Scene, id_: str) -> Decision | None:
    """What the job needs now:

    1. one that has been over for `job_kept_s` ends, when the audit has its past;
    2. its entry was removed or switched off by somebody: it fails, saying so;
    3. no step is under way: the next begins, and says what it is going to do;
    4. the step under way is carried on: mirror, check (only for a file that was lost), catalog, placement,
       smoke test. The others wait for their report.
    """
    job = scene.world.jobs.get(id_)
    if job is None:
        return None
    if job.state != "running":  # 1
        at = _ends_at(scene, job)
        is_due = at is not None and at <= scene.now and not scene.live.audit_behind
        return writes.decided(scene, job, (writes.ended(job),)) if is_due else None
    index = writes.place_of(job)
    if index > CATALOG:
        gone = jobplacement.entry_lost(scene, job)  # 2
        if gone is not None:
            return writes.failed(scene, job, codes.CONFLICT, gone)
    if writes.running_step(job, index) is None:  # 3
        return _begin(scene, job, index)
    match index:  # 4
        case 2:
            return _mirror(scene, job)
        case 3:
            return _lost_copy(scene, job)
        case 4:
            return _catalog(scene, job)
        case 5:
            return jobplacement.placement(scene, job)
        case 6:
            return jobplacement.smoke(scene, job)
        case _:
            return None


def due_at(scene: Scene, id_: str) -> datetime | None:
    """When time alone may give `look_after` something to do."""
    job = scene.world.jobs.get(id_)
    if job is None:
        return None
    if job.state != "running":
        return _ends_at(scene, job)
    index = writes.place_of(job)
    if index == MIRROR:
        return jobplacement.may_say_at(scene, job)
    return jobplacement.due_at(scene, job) if index in (PLACEMENT, SMOKE) else None


def _ends_at(scene: Scene, job: Job) -> datetime | None:
    if job.ended_at is None:
        return None
    return job.ended_at + timedelta(seconds=scene.settings.job_kept_s)


def doing(scene: Scene, job: Job, index: int) -> str:
    """What a step says before it does it."""
    match index:
        case 0:
            return f"reading {job.request.repo}"
        case 1:
            return "reading its header from the registry"
        case 2:
            name = job.file_set.name if job.file_set is not None else job.request.repo
            return f"asking the mirror for {name}"
        case 3:
            return "reading its header from the mirror"
        case 4:
            return f"adding {job.model}"
        case 5:
            return "waiting for the control plane to place it"
        case _:
            return f"asking {job.replica or 'a replica'} to say hello"


def _begin(scene: Scene, job: Job, index: int) -> Decision:
    if index == SMOKE and not job.generates:
        text = "an embedding model says nothing: it is ready, and was not asked"
        after = writes.with_step(job, SMOKE, "skipped", text, scene.now)
        return writes.decided(scene, job, (writes.over(scene, after),))
    changes: list[Change] = []
    if index == MIRROR:
        # What failed before is no failure of this step.
        changes = files.fetched_again(scene, needs.keys_of_job(job), f"job {job.id} needs it")
    changes.append(writes.stepped(scene, job, index, "running", doing(scene, job, index)))
    return writes.decided(scene, job, tuple(changes))


def _mirror(scene: Scene, job: Job) -> Decision | None:
    """Complete when every file of this very set is here, each told by its own key."""
    lost = _lost_copy(scene, job)
    if lost is not None:
        return lost
    keys = _keys(scene, job)
    known = [scene.world.files[key] for key in keys if key in scene.world.files]
    here = [file for file in known if files.is_here(file, scene.live.mirror)]
    size = sum(file.bytes or file.published_bytes for file in here)
    if len(here) == len(keys):
        detail = f"{show_bytes(size)}, {compared(here)}"
        return writes.decided(scene, job, (writes.stepped(scene, job, MIRROR, "done", detail),))
    assert job.file_set is not None
    if not scene.live.mirror:
        return jobplacement.say(
            scene, job, MIRROR, "waiting: this control plane has no mirror to fetch it with"
        )
    if len(keys) == 1:
        return None
    text = (
        f"fetching {job.file_set.name}: {len(here)} of {job.file_set.shards} files are there, "
        f"{show_bytes(size)} of {show_bytes(job.file_set.bytes)}"
    )
    return jobplacement.say(scene, job, MIRROR, text)


def _keys(scene: Scene, job: Job) -> tuple[str, ...]:
    """The job's files, as the index has them: a set of many shards is looked at with each of its files."""
    return scene.index.needs.of_job.get(job.id) or needs.keys_of_job(job)


def compared(here: list[File]) -> str:
    """What can truly be said of the checksums: nothing is claimed of a file without a published one."""
    published = [file for file in here if file.published_sha256 is not None]
    if len(published) == len(here):
        return "checksums match the registry"
    if not published:
        return "nothing to compare with: the registry publishes no checksum of it"
    return (
        f"checksums match the registry for {len(published)} of {len(here)} files, "
        "it publishes none of the others"
    )


def _lost_copy(scene: Scene, job: Job) -> Decision | None:
    """A file of the set that could not be fetched since this step began, that nobody knows any more, or about
    which nothing can be written."""
    step = job.steps[min(MIRROR, len(job.steps) - 1)]
    for key in _keys(scene, job):
        file = scene.world.files.get(key)
        if file is None:
            sentence = f"{NOT_FETCHED}the log knows no file {key[:12]} of it any more"
            return writes.failed(scene, job, codes.NOT_FOUND, sentence)
        head = scene.world.head("file", key)
        if not head.writable and not files.is_here(file, scene.live.mirror):
            # Nothing can be decided about it: it would be waited for without end.
            code = codes.UPGRADE_REQUIRED if head.type else codes.BROKEN
            sentence = f"{NOT_FETCHED}{scene.world.subject('file', key)} cannot be written: "
            return writes.failed(scene, job, code, sentence + head.problem)
        mine = files.copy_on(file, scene.live.mirror)
        if mine is None or mine.phase != "failed" or mine.since < (step.since or step.at):
            continue
        why = mine.reason or mine.code or "no reason was given"
        return writes.failed(scene, job, mine.code or "internal", NOT_FETCHED + why)
    return None


def _catalog(scene: Scene, job: Job) -> Decision:
    """The entry is added with the step, or is there already, this very one; then it gets its scaling back."""
    assert job.estimate is not None
    wanted = jobentry.wanted_of(scene.world, job)
    taken = jobentry.taken(scene.world, job.id, wanted, job.incarnation)
    if taken:
        return writes.failed(scene, job, codes.EXISTS, taken)
    known = scene.world.models.get(job.model)
    changes: list[Change] = []
    replicas = job.request.replicas
    if known is None:
        answer = catalog.decide(
            scene.world.models,
            ModelAdd(entry=jobentry.entry_of(wanted, job.estimate.total_bytes)),
            actor=job.by,
            ids=scene.ids,
            files=scene.world.files,
            adapters=scene.world.adapters,
        )
        if isinstance(answer, Rejected):
            return writes.failed(scene, job, answer.code, answer.sentence)
        changes.extend(answer)
        added = answer[0].state
        assert isinstance(added, Model)
        known = added
        said = f"{job.model} added, {jobtexts.replicas(replicas)}"
        is_found = False
    else:
        # The job's own entry, left by a former attempt, does not become one that served before it came.
        is_own = known.incarnation == job.incarnation
        is_found = job.entry_found if is_own else not is_off(known)
        changes.extend(writes.switched_on(scene, known, job))
        kept = max(known.scaling.min, replicas)
        said = f"{job.model} is in the catalog already, {jobtexts.replicas(kept)} kept running"
        if kept == 0:
            said = f"{job.model} is in the catalog already, on demand"
    pinned = {
        "incarnation": known.incarnation,
        "entry_found": is_found,
        "catalog_at": scene.now,
        "replica": None,
    }
    if replicas == 0:
        if changes and isinstance(changes[0].event, ModelAdded):
            said = "added on demand: it loads when first asked for"
        changes.append(writes.done(scene, job, CATALOG, said, **pinned))
    else:
        changes.append(writes.stepped(scene, job, CATALOG, "done", said, **pinned))
    return writes.decided(scene, job, tuple(changes))
