"""Answers what the leader does next: the first decision that the log, the beacons and the clock call for.

Pure, total and level-triggered: it needs no memory of what it saw, so a new leader simply goes on. It
appends nothing and knows nothing of NATS; controlplane/leader.py carries its decisions out.
"""

from collections.abc import Sequence
from datetime import datetime, timedelta

from controlplane.domain import (
    adapters,
    files,
    idle,
    jobreports,
    jobs,
    keys,
    reconcile,
    resting,
    shortage,
    standing,
    upkeep,
)
from controlplane.domain import commands as wishes
from controlplane.domain.decision import Decision, Ids, Live, Step
from controlplane.domain.index import StepIndex
from controlplane.domain.reports import Report
from controlplane.domain.scene import Scene, is_demanded
from controlplane.domain.world import World
from events.log import StoredCommand
from schemas.activation import PENDING_PHASES
from schemas.settings import ControlplaneSettings


def next_decision(
    world: World,
    live: Live,
    commands: Sequence[StoredCommand],
    now: datetime,
    ids: Ids,
    settings: ControlplaneSettings,
    index: StepIndex | None = None,
    *,
    reports: Sequence[Report] = (),
) -> Step:
    """The first of these that yields a decision:

    1. the oldest command (one that needs no event is only consumed);
    2. the oldest report of a worker (one that tells nothing new is only settled);
    3. a node's standing;
    4. upkeep of a model something happened to, in order of names;
    5. a serve job's next step, in order of ids; 6. what is to be done with a file, in order of keys;
    7. what an adapter's files or its base make of it, in order of names;
    8. the end of a key that is over, in order of ids;
    9. the queue for room, in order of arrival;
    10. an idle stop.

    `commands` are in stream order, `reports` in the order they came in. With an `index`, kept by the caller from call to call, only what
    changed is looked at again; without one the answer is the same and takes longer.
    """
    index = index if index is not None else StepIndex()
    index.sync(world)
    scene = Scene(
        world=world,
        live=live,
        now=now,
        ids=ids,
        settings=settings,
        index=index,
    )
    scene.frozen = standing.suspicion(scene)
    if (index.mirror, index.audit_behind) != (live.mirror, live.audit_behind):
        index.mirror, index.audit_behind = live.mirror, live.audit_behind
        index.look_at_all(world)
    if commands:  # 1
        decision = wishes.decide(scene, commands[0])
        return Step(decision=decision, consumed=commands[0], stuck=_stuck(scene))
    if reports:  # 2
        decision = scene.checked(jobreports.fold(scene, reports[0]))
        return Step(decision=decision, settled=reports[0], stuck=_stuck(scene))
    decision, standing_due = standing.judge(scene)  # 3
    if decision is not None:
        return Step(decision=decision, stuck=_stuck(scene))
    decision = _upkeep(scene)  # 4
    if decision is None:
        decision = _jobs(scene)  # 5
    if decision is None:
        decision = _files(scene)  # 6
    if decision is None:
        decision = _adapters(scene)  # 7
    if decision is None:
        decision = _keys(scene)  # 8
    if decision is None:
        decision = _queue(scene)  # 9
    if decision is None:
        decision = _idle(scene)  # 10
    if decision is not None:
        return Step(decision=decision, stuck=_stuck(scene))
    return Step(wake_at=_wake_at(scene, standing_due), stuck=_stuck(scene))


def _upkeep(scene: Scene) -> Decision | None:
    """Looks after models that changed, or whose time has come; a model found in order is left alone."""
    index = scene.index
    woken = index.wake.take(scene.now)
    index.dirty.update(woken)
    for name in woken:
        index.wake_jobs(name)
    # Whether a first waiter was answered is told by beacons, which leave no trace in the log.
    index.dirty |= index.unanswered
    for name in sorted(index.dirty):
        rest = resting.at_rest(scene, name)
        if rest is not None:
            index.settle(name, rest.idle_at)
            continue
        blocked = len(scene.blocked)
        decision = upkeep.look_after(scene, name)
        if decision is not None:
            return decision
        index.dirty.discard(name)
        index.unserved.discard(name)
        if len(scene.blocked) > blocked:
            index.blocked.add(name)
        else:
            index.blocked.discard(name)
        index.idle.set(name, idle.not_before(scene, name))
        if shortage.demand_of(scene, name) is not None:
            index.short.add(name)
            # Time alone may have brought it here, with nothing new in the log for the queue to notice.
            index.queue_seen = None
        else:
            index.short.discard(name)
        index.wake.set(name, upkeep.due_at(scene, name))
    return None


def _jobs(scene: Scene) -> Decision | None:
    """Looks after jobs that something happened to, or whose time has come."""
    index = scene.index
    index.jobs.update(index.job_wake.take(scene.now))
    if index.frozen != scene.frozen:
        index.frozen = scene.frozen
        index.jobs |= scene.world.running_jobs
    for id_ in sorted(index.jobs):
        decision = scene.checked(jobs.look_after(scene, id_))
        if decision is not None:
            return decision
        index.jobs.discard(id_)
        index.job_wake.set(id_, _ahead(scene, jobs.due_at(scene, id_)))
    return None


def _files(scene: Scene) -> Decision | None:
    """Looks after files that something happened to, or whose time has come. What is to happen to several for
    the same reason, as to the shards of a set, is one decision."""
    index = scene.index
    index.files.update(index.file_wake.take(scene.now))
    found: list[Decision] = []
    for key in sorted(index.files):
        decision = scene.checked(files.look_after(scene, key))
        if decision is None:
            index.files.discard(key)
            index.file_wake.set(key, _ahead(scene, files.due_at(scene, key)))
        elif not found or files.go_together(found[0], decision):
            found.append(decision)
            if len(found) == files.AT_ONCE:
                break
    return files.together(found) if found else None


def _adapters(scene: Scene) -> Decision | None:
    """Looks after adapters that something happened to, or to their files or base."""
    for name in sorted(scene.index.adapters):
        decision = scene.checked(adapters.look_after(scene, name))
        if decision is not None:
            return decision
        scene.index.adapters.discard(name)
    return None


def _keys(scene: Scene) -> Decision | None:
    """Looks after keys that something happened to, or whose time has come."""
    index = scene.index
    index.keys.update(index.key_wake.take(scene.now))
    for id_ in sorted(index.keys):
        decision = scene.checked(keys.look_after(scene, id_))
        if decision is not None:
            return decision
        index.keys.discard(id_)
        index.key_wake.set(id_, _ahead(scene, keys.due_at(scene, id_)))
        (index.last_keys.add if keys.is_last(scene, id_) else index.last_keys.discard)(id_)
    return None


def _ahead(scene: Scene, at: datetime | None) -> datetime | None:
    """A time that has come was used just now. What could not be written then is looked at again when the log
    says something new of it, and not a hundred times a second."""
    return at if at is not None and at > scene.now else None


def _queue(scene: Scene) -> Decision | None:
    index = scene.index
    if not index.short:
        index.queue_due = None
        return None
    seen = (index.version, scene.frozen)
    if index.queue_seen == seen and (index.queue_due is None or scene.now < index.queue_due):
        return None
    decision = reconcile.serve_queue(scene)
    index.queue_seen = seen if decision is None else None
    return decision


def _idle(scene: Scene) -> Decision | None:
    index = scene.index
    names = sorted(index.idle.take(scene.now))
    first: Decision | None = None
    for name in names:
        if first is not None:
            index.idle.set(name, scene.now)
            continue
        decision, due = idle.stop_idle(scene, name)
        first = scene.checked(decision)
        # Until the stop is in the world it is decided again and again: an append may fail.
        index.idle.set(name, scene.now if decision is not None else due)
    return first


def _wake_at(scene: Scene, standing_due: datetime | None) -> datetime | None:
    index = scene.index
    times = [standing_due, index.queue_due, index.wake.next(), index.idle.next()]
    times += [index.job_wake.next(), index.file_wake.next(), index.key_wake.next()]
    found = [at for at in times if at is not None]
    if not found:
        return None
    # Never in the past: whatever is due now was just looked at.
    return max(min(found), scene.now + timedelta(milliseconds=10))


def _stuck(scene: Scene) -> tuple[str, ...]:
    """Accepted demands nobody can work on, because what must be written for them cannot be."""
    stuck: list[str] = []
    for name in sorted(scene.index.blocked | scene.index.unserved):
        model = scene.world.models.get(name)
        if model is None:
            continue
        pending = [
            a
            for a in scene.activations_of(name)
            if a.phase in PENDING_PHASES and is_demanded(a, model)
        ]
        stuck.extend(f"{name} ({activation.scope})" for activation in pending)
        if not pending and name in scene.index.unserved:
            stuck.append(name)
    return tuple(stuck)
