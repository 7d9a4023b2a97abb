"""Watches a serve job's entry come up: a ready replica, or the reason why there will be none; then its hello.

It places nothing: the queue (reconcile.py) does. What it says of the wait changes at most every few seconds,
because the log keeps a bounded number of events of a job.
"""

from datetime import datetime, timedelta
from typing import Final

from controlplane.domain import jobwrites as writes
from controlplane.domain import memory, record
from controlplane.domain.decision import Decision
from controlplane.domain.jobtexts import DETAIL_BYTES, clipped
from controlplane.domain.jobwrites import PLACEMENT, SMOKE
from controlplane.domain.quantities import show_seconds
from controlplane.domain.rehearsal import rehearse
from controlplane.domain.scene import Scene, is_off, target_of
from schemas import codes
from schemas.job import Job
from schemas.model import Model
from schemas.record import Record
from schemas.replica import Replica

CARDS_SAID: Final = 3
"""Cards a wait for room names."""

LEFT_ON_DEMAND: Final = "its entry was scaled to min 0 meanwhile: it loads when first asked for"

SAID_EVERY_S: Final = 5.0
"""A step under way says something new at most this often."""


def entry_lost(scene: Scene, job: Job) -> str | None:
    """Why the job's entry will not come up any more: somebody took it away; None when it is there."""
    model = writes.entry_of_job(scene, job)
    if model is None:
        return f"its catalog entry {job.model!r} was removed while the job ran"
    if is_off(model):
        return f"its catalog entry {job.model!r} was switched off (max 0) while the job ran"
    return None


def say(scene: Scene, job: Job, index: int, text: str, **fields: object) -> Decision | None:
    """The step's detail, when it is a new one and the last was said a while ago."""
    step = job.steps[index]
    if clipped(text, DETAIL_BYTES) == step.detail or scene.now < _may_say(job):
        return None
    return writes.decided(
        scene, job, (writes.stepped(scene, job, index, "running", text, **fields),)
    )


def _may_say(job: Job) -> datetime:
    return job.steps[-1].at + timedelta(seconds=SAID_EVERY_S)


def may_say_at(scene: Scene, job: Job) -> datetime | None:
    """When the step under way may say something again, None when it may now."""
    at = _may_say(job)
    return at if at > scene.now else None


def due_at(scene: Scene, job: Job) -> datetime | None:
    """When the wait is over, or when there may be something new to say of it."""
    bound = _bound(scene, job)
    said = may_say_at(scene, job)
    return min(bound, said) if said is not None else bound


def _bound(scene: Scene, job: Job) -> datetime:
    step = job.steps[-1]
    return (step.since or step.at) + timedelta(seconds=scene.settings.job_ready_s)


def placement(scene: Scene, job: Job) -> Decision | None:
    """The first of these:

    1. a replica is ready: done;
    2. somebody scaled the entry to min 0 meanwhile and nobody asks for it: there will be none; done;
    3. given up after failed starts: fails at once;
    4. a pass over every card, with the entry as it is now, finds no place on any reachable node, were its
       cards empty: fails with the reasons;
    5. the wait has lasted `job_ready_s`: fails;
    6. it says how far it is.
    """
    ready = ready_replica(scene, job)
    if ready is not None:  # 1
        detail = f"{ready.id} ready on {ready.node} at {ready.endpoint}"
        change = writes.stepped(scene, job, PLACEMENT, "done", detail, replica=ready.id)
        return writes.decided(scene, job, (change,))
    return _waited(scene, job, PLACEMENT)


def smoke(scene: Scene, job: Job) -> Decision | None:
    """The replica that is asked may go before it answered: another is asked, or waited for as at placement."""
    asked = scene.world.replicas.get(job.replica or "")
    if asked is not None and asked.phase == "ready":
        if _bound(scene, job) > scene.now:
            return None
        waited = show_seconds(scene.settings.job_ready_s)
        sentence = f"{asked.id} gave no answer within {waited}"
        return writes.failed(scene, job, codes.SMOKE_FAILED, sentence)
    ready = ready_replica(scene, job)
    if ready is not None:
        text = f"asking {ready.id} to say hello"
        change = writes.stepped(scene, job, SMOKE, "running", text, replica=ready.id)
        return writes.decided(scene, job, (change,))
    if job.replica is not None:
        phase = asked.phase if asked is not None else "gone"
        text = f"{job.replica} is {phase}: waiting for a ready replica"
        change = writes.stepped(scene, job, SMOKE, "running", text, replica=None)
        return writes.decided(scene, job, (change,))
    return _waited(scene, job, SMOKE)


def ready_replica(scene: Scene, job: Job) -> Replica | None:
    """The replica of this entry that has been ready for longest and is not being stopped."""
    found: list[tuple[datetime, str, Replica]] = []
    for planned, hold in scene.holds_of(job.model):
        replica = scene.world.replicas.get(planned.item.replica)
        if hold != "ready" or replica is None or replica.endpoint is None:
            continue
        if scene.profile_of(planned) is not None and replica.incarnation == job.incarnation:
            found.append((replica.ready_at or replica.since, replica.id, replica))
    return min(found, key=lambda f: f[:2])[2] if found else None


def _waited(scene: Scene, job: Job, index: int) -> Decision | None:
    """Cases 2 to 6 of `placement`."""
    model = scene.world.models[job.model]
    if _is_left_on_demand(scene, model):  # 2
        change = writes.left_on_demand(scene, job, index, LEFT_ON_DEMAND)
        return writes.decided(scene, job, (change,))
    known = scene.world.records.get(job.model)
    if known is not None and known.incarnation != model.incarnation:
        known = None
    given_up = _given_up(scene, known)
    if given_up is not None:  # 3
        return writes.failed(scene, job, codes.QUARANTINED, given_up)
    progress, nowhere = _progress(scene, model, known)
    if nowhere:  # 4
        return writes.failed(scene, job, codes.NO_CAPACITY, f"no node can host it: {nowhere}")
    if _bound(scene, job) <= scene.now:  # 5
        waited = show_seconds(scene.settings.job_ready_s)
        sentence = f"no replica was ready after {waited}: {progress}"
        return writes.failed(scene, job, codes.NOT_READY, sentence)
    return say(scene, job, index, progress)  # 6


def _is_left_on_demand(scene: Scene, model: Model) -> bool:
    """Whether the entry keeps no replica, none is on its way and nobody asks for one."""
    if target_of(model, scene.activations_of(model.name)) > 0:
        return False
    return not any(
        hold == "pending" and scene.profile_of(planned) is not None
        for planned, hold in scene.holds_of(model.name)
    )


def _given_up(scene: Scene, known: Record | None) -> str | None:
    if known is None or known.quarantined is None or known.quarantined.until <= scene.now:
        return None
    count = sum(f.count for f in known.failures)
    last = max(known.failures, key=lambda f: (f.last_at, f.profile, f.node, f.card), default=None)
    reason = last.reason if last is not None else known.quarantined.reason
    return f"it failed to start {count} times and is quarantined: {reason}"


def _progress(scene: Scene, model: Model, known: Record | None) -> tuple[str, str]:
    """How far it is, and, when placement finds no place anywhere, the reasons."""
    underway = [
        (planned, scene.world.replicas.get(planned.item.replica))
        for planned, hold in scene.holds_of(model.name)
        if hold == "pending" and scene.profile_of(planned) is not None
    ]
    failed = _failed_starts(known)
    if underway:
        planned, replica = underway[0]
        phase = replica.phase if replica is not None else "planned"
        said = f"{planned.item.replica} is {phase} on {planned.node}"
        return f"{said} ({failed})" if failed else said, ""
    held = record.hold_back(known, scene.now)
    if held is not None:
        return failed or held.reason, ""
    # By what there is and not by what is free: that changes with every event of every card, and this is said
    # to a person. The queue judges the rest, and a job only fails where no card could ever do.
    found = rehearse(scene, model)
    if found.no_node or found.unknown:
        return f"waiting: {found.sentence}", ""
    if not found.fits:
        return "it fits nowhere", found.sentence
    if failed:
        return failed, ""
    cards = sorted({f"{c.node}/{'+'.join(c.cards)}" for c in found.fits})
    more = f" and {len(cards) - CARDS_SAID} more" if len(cards) > CARDS_SAID else ""
    needed = memory.amount(min(p.memory_bytes for p in model.profiles))
    return f"waiting for room on {', '.join(cards[:CARDS_SAID])}{more}: it needs {needed}", ""


def _failed_starts(known: Record | None) -> str:
    """What its starts failed with so far, without a time: that would be new with every look."""
    failures = known.failures if known is not None else ()
    count = sum(f.count for f in failures)
    if count == 0:
        return ""
    last = max(failures, key=lambda f: (f.last_at, f.profile, f.node, f.card))
    starts = "1 start failed" if count == 1 else f"{count} starts failed"
    return f"{starts}, the last with: {last.reason}"
