"""Writes what a serve job came to: a step, its end, and what its entry becomes with it.

Each function answers the changes of one decision; when they are due is decided elsewhere.
"""

from datetime import datetime
from typing import Any, Final

from msgspec.structs import replace

from controlplane.domain import jobtexts, record
from controlplane.domain.catalog import TOMBSTONE_TTL_S
from controlplane.domain.decision import Change, Decision
from controlplane.domain.jobentry import raised
from controlplane.domain.scene import Scene, is_off
from schemas.job import (
    STEPS,
    Job,
    JobCancelled,
    JobDeleted,
    JobDone,
    JobEvent,
    JobFailed,
    JobJoined,
    JobState,
    JobStep,
    JobStepped,
    StepState,
)
from schemas.model import Model, ModelChanged, Scaling

REGISTRY: Final = 0
CHECK_AHEAD: Final = 1
MIRROR: Final = 2
CHECK: Final = 3
CATALOG: Final = 4
PLACEMENT: Final = 5
SMOKE: Final = 6
"""Places in Job.steps and STEPS."""


TRANSITIONS: Final[dict[tuple[JobState | None, str], JobState]] = {
    (None, "job.started"): "running",
    ("running", "job.step"): "running",
    ("running", "job.done"): "done",
    ("running", "job.joined"): "joined",
    ("running", "job.failed"): "failed",
    ("running", "job.cancelled"): "cancelled",
    # A retry goes on from the first step that is not done.
    ("failed", "job.started"): "running",
    ("cancelled", "job.started"): "running",
}
"""(state before, event) -> state after. What is not here cannot happen; a tombstone ends a job that is over."""


def place_of(job: Job) -> int:
    """The step that is running, else the one that comes next."""
    if job.steps and job.steps[-1].state == "running":
        return len(job.steps) - 1
    return len(job.steps)


def running_step(job: Job, index: int) -> JobStep | None:
    """The step at `index` when it is the one under way."""
    if job.state != "running" or index != len(job.steps) - 1:
        return None
    step = job.steps[index]
    return step if step.state == "running" else None


def with_step(
    job: Job, index: int, state: StepState, detail: str, now: datetime, **fields: Any
) -> Job:
    """The job with its step at `index` so; the steps behind it are forgotten (there are none, but at a retry)."""
    before = running_step(job, index)
    since = before.since if before is not None and before.since is not None else now
    step = JobStep(
        name=STEPS[index],
        state=state,
        detail=jobtexts.clipped(detail, jobtexts.DETAIL_BYTES),
        at=now,
        since=since,
    )
    return replace(job, steps=(*job.steps[:index], step), **fields)


def change(job: Job, event: JobEvent, reason: str) -> Change:
    return Change(noun="job", key=(job.id,), event=event, state=job, reason=reason)


def stepped(
    scene: Scene, job: Job, index: int, state: StepState, detail: str, **fields: Any
) -> Change:
    """`job.step`: what the step is doing now, or what came of it."""
    after = with_step(job, index, state, detail, scene.now, **fields)
    event = JobStepped(index=index, step=STEPS[index], state=state)
    return change(after, event, after.steps[-1].detail)


def decided(scene: Scene, job: Job, changes: tuple[Change, ...], what: str = "") -> Decision:
    said = what or changes[-1].reason
    return Decision(
        changes=changes, what=f"job {job.id}: {said}", cause=scene.world.head("job", job.id).id
    )


def done(scene: Scene, job: Job, index: int, detail: str, **fields: Any) -> Change:
    """`job.done`: `index` was its last step; those it leaves out are skipped."""
    after = with_step(job, index, "done", detail, scene.now)
    for skipped in range(index + 1, len(STEPS)):
        why = "not done: it loads when first asked for"
        after = with_step(after, skipped, "skipped", why, scene.now)
    after = replace(after, state="done", error="", code="", ended_at=scene.now, **fields)
    return change(after, JobDone(tokens_per_second=after.tokens_per_second), detail)


def joined(scene: Scene, job: Job, other: Job, detail: str, **fields: Any) -> Change:
    """`job.joined`: what it is for is done by another running job."""
    after = with_step(job, REGISTRY, "done", f"{detail}; job {other.id} serves it", scene.now)
    after = replace(after, state="joined", joined=other.id, ended_at=scene.now, **fields)
    return change(after, JobJoined(job=other.id), f"it joins job {other.id}")


def failed(scene: Scene, job: Job, code: str, sentence: str, **fields: Any) -> Decision:
    """The step and the job failed with the same text. From placement on the entry is switched off with it,
    unless it served before this job came to it.

    What is on the mirror stays: `job.retry` goes on from there.
    """
    index = min(place_of(job), SMOKE)
    text = jobtexts.clipped(sentence, jobtexts.ERROR_BYTES)
    step = JobStep(name=STEPS[index], state="failed", detail=text, at=scene.now, since=scene.now)
    before = running_step(job, index)
    if before is not None:
        step = replace(step, since=before.since)
    after = replace(
        job,
        steps=(*job.steps[:index], step),
        state="failed",
        error=text,
        code=code,
        ended_at=scene.now,
        **fields,
    )
    changes: list[Change] = []
    if index >= PLACEMENT:
        changes.extend(_switched_off(scene, after, text))
    changes.append(change(after, JobFailed(step=STEPS[index], code=code), text))
    return decided(
        scene, job, tuple(changes), f"{job.request.repo} failed at {STEPS[index]}, {code}: {text}"
    )


def _switched_off(scene: Scene, job: Job, why: str) -> list[Change]:
    model = entry_of_job(scene, job)
    if model is None or is_off(model) or job.entry_found:
        return []
    off = replace(
        model,
        scaling=Scaling(min=0, max=0, idle_timeout_s=model.scaling.idle_timeout_s),
        off_reason=jobtexts.clipped(f"serve job {job.id} failed: {why}", jobtexts.ERROR_BYTES),
    )
    return [
        Change(
            noun="model",
            key=(model.name,),
            event=ModelChanged(by=f"job {job.id}", fields=("scaling", "off_reason")),
            state=off,
            reason=off.off_reason,
        )
    ]


def entry_of_job(scene: Scene, job: Job) -> Model | None:
    """The entry this job added or found, None when it is gone or another has its name."""
    model = scene.world.models.get(job.model)
    if model is None or model.incarnation != job.incarnation:
        return None
    return model


def switched_on(scene: Scene, model: Model, job: Job) -> list[Change]:
    """The entry gets the scaling asked for when it keeps less, and what its starts failed with is forgotten."""
    changes: list[Change] = []
    again = raised(model, job.request)
    if again is not None:
        changes.append(
            Change(
                noun="model",
                key=(model.name,),
                event=ModelChanged(by=job.by, fields=("scaling", "off_reason")),
                state=again,
                reason=f"job {job.id} serves it",
            )
        )
    known = scene.world.records.get(model.name)
    if known is not None and (known.failures or known.quarantined is not None):
        changes.append(record.cleared(known, f"job {job.id} goes on"))
    return changes


def left_on_demand(scene: Scene, job: Job, index: int, detail: str) -> Change:
    """`job.done` of a job whose entry keeps no replica by now: from the step at `index` on all is skipped."""
    after = job
    for skipped in range(index, len(STEPS)):
        after = with_step(after, skipped, "skipped", detail, scene.now)
    return over(scene, after)


def cancelled(scene: Scene, job: Job, actor: str) -> Change:
    """`job.cancelled`; the step under way is left where it is."""
    index = min(place_of(job), SMOKE)
    after = job
    if running_step(job, index) is not None:
        after = with_step(job, index, "skipped", f"cancelled by {actor}", scene.now)
    after = replace(after, state="cancelled", ended_at=scene.now)
    event = JobCancelled(by=actor, step=STEPS[index])
    return change(after, event, f"cancelled by {actor} at {STEPS[index]}")


def ended(job: Job) -> Change:
    """The tombstone of a job that has been over for long enough."""
    return Change(
        noun="job",
        key=(job.id,),
        event=JobDeleted(),
        state=None,
        reason="it was over for long enough",
        ttl_s=TOMBSTONE_TTL_S,
    )


def over(scene: Scene, job: Job) -> Change:
    """`job.done` of a job whose steps are as they shall be."""
    after = replace(job, state="done", error="", code="", ended_at=scene.now)
    return change(after, JobDone(), after.steps[-1].detail)
