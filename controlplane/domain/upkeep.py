"""Carries one model's plan items and activations after what its replicas, its entry and its record say.

Level-triggered: each call looks at the state alone and returns the first thing to do, or nothing. It
starts nothing; what is short is left to the queue (reconcile.py).
"""

from collections.abc import Sequence
from datetime import datetime, timedelta
from typing import Final

from controlplane.domain import activation as moves
from controlplane.domain import departures, following, parting, placement, record, stops
from controlplane.domain.decision import Change, Decision
from controlplane.domain.index import Planned
from controlplane.domain.planedit import PlanEdit
from controlplane.domain.scene import (
    Hold,
    Scene,
    is_current,
    is_demanded,
    is_in_scope,
    is_off,
    target_of,
)
from schemas.activation import ActivationRefused
from schemas.model import Model
from schemas.record import Record
from schemas.replica import Replica

RESUMABLE: Final[frozenset[str]] = frozenset({"idle", "unload", "scaled_down"})
"""Stops that new demand takes back: nothing but the lack of demand was their reason."""

Held = Sequence[tuple[Planned, Hold]]


def look_after(scene: Scene, name: str) -> Decision | None:
    """The first of these that applies to the model:

    1. an item whose replica ended leaves the plan, its end goes into the record, demand goes on or is
       answered; what its own node parks or lets go has its demand placed elsewhere (parting.py);
    2. a stop its agent took back is cleared; 3. so is one that new demand makes needless;
    4. load time and memory of a ready replica, and what parks and resumes took, are recorded;
    5. failures of an older entry, and a quarantine that ran out, are lifted;
    6. the activation follows its replica;
    7. replicas of a removed, switched off or changed entry, and those above `max`, stop;
    8. the first waiter was answered.
    """
    held = scene.holds_of(name)
    model = scene.world.models.get(name)
    known = scene.world.records.get(name)
    for planned, hold in held:  # 1
        if hold == "ended":
            decision = scene.checked(_ended(scene, model, planned, held))
            if decision is not None:
                return decision
    for found in (
        parting.parted(scene, model, held),  # 1
        _taken_back(scene, model, held),  # 2
        _demanded_again(scene, model, held),  # 3
        _measured(scene, model, known, held),  # 4
        _lifted(scene, model, known),  # 5
        following.followed(scene, model, held),  # 6
        following.switched_off(scene, model, name),  # 6: nobody waits for a model that is off
        following.forgotten(scene, name),  # 6: nor for a card there never was
        stops.stopped(scene, model, name, held),  # 7
        following.answered(scene, model),  # 8
    ):
        decision = scene.checked(found)
        if decision is not None:
            return decision
    return None


def due_at(scene: Scene, name: str) -> datetime | None:
    """When time alone may give `look_after` something to do, None when it cannot."""
    times: list[datetime] = []
    known = scene.world.records.get(name)
    if known is not None:
        if known.quarantined is not None:
            times.append(known.quarantined.until)
        times.extend(f.next_allowed_at for f in known.failures)
    times.extend(
        activation.retry_at
        for activation in scene.activations_of(name)
        if activation.retry_at is not None and following.is_nowhere(scene, activation)
    )
    times.extend(
        activation.since + timedelta(seconds=following.UNUSED_COUNTS_AS_ANSWERED_S)
        for activation in scene.activations_of(name)
        if activation.phase == "ready" and not activation.answered
    )
    for planned in scene.index.items_of.get(name, {}).values():
        state = scene.world.nodestates.get(planned.node)
        if state is not None and state.reach == "unreachable":
            patience_s = (
                scene.settings.replace_unreachable_after_s - scene.settings.unreachable_after_s
            )
            times.append(state.since + timedelta(seconds=max(patience_s, 0.0)))
    return min((at for at in times if at > scene.now), default=None)


def _ended(scene: Scene, model: Model | None, planned: Planned, held: Held) -> Decision:
    """1. Removes the item in the decision that records its end; what happens to demand:

    a. another replica of the scope is there: nothing, the activation follows it;
    b. a failed start, or a crash that must wait: refused, with the engine's last line;
    c. a first crash, a parked copy that was lost or did not come back, a refusal of the agent, a replica that
       ended while somebody waited: wanted again;
    d. a ready replica that was stopped by somebody at the node: idle, who needs it asks again.
    """
    id_ = planned.item.replica
    replica = scene.world.replicas[id_]
    edit = PlanEdit(world=scene.world)
    edit.remove(planned)
    # What an engine last wrote explains a failure; after an orderly stop it is some older warning.
    last_line = "" if replica.phase == "stopped" else replica.last_line
    why = last_line or replica.reason or replica.code or replica.phase
    changes = list(edit.changes(f"{id_} ended: {replica.phase}"))
    failed = (
        replica.phase == "failed"
        and planned.item.stop is None
        and replica.code not in record.COSTS_NOTHING
        and is_current(planned, model)
    )
    refusal: record.Refusal | None = None
    if failed and model is not None:
        folded = record.fold_failed(
            scene.world.records.get(model.name),
            replica,
            cards_possible=placement.cards_possible(scene, model),
            planned=scene.index.items,
            now=scene.now,
            settings=scene.settings,
        )
        changes.append(folded)
        assert isinstance(folded.state, Record)
        refusal = record.hold_back(folded.state, scene.now)
    if model is not None and refusal is not None:
        changes.extend(_refused(scene, model, planned, held, refusal))  # b
    else:
        by_node = replica.phase == "stopped" and planned.item.stop is None
        said = f"{id_} was stopped: {why}" if by_node else f"{id_}: {why}"
        changes.extend(
            departures.deserted(scene, model, planned, held, said, by_node=by_node)  # c, d
        )
    return Decision(
        changes=tuple(changes),
        what=f"{planned.item.launch.model}: {id_} {replica.phase} ({why}), out of the plan",
        cause=scene.world.head("replica", replica.node, id_).id,
    )


def _refused(
    scene: Scene, model: Model, planned: Planned, held: Held, refusal: record.Refusal
) -> list[Change]:
    return [
        moves.move(
            activation,
            ActivationRefused(code=refusal.code),
            scene.now,
            refusal.reason,
            code=refusal.code,
            retry_at=refusal.retry_at,
            replicas=1,
        )
        for activation in scene.activations_of(model.name)
        if is_demanded(activation, model)
        and is_in_scope(planned, activation.scope)
        and not departures.has_others(planned, held, activation.scope)
    ]


def _taken_back(scene: Scene, model: Model | None, held: Held) -> Decision | None:
    """2. The bound passed with requests running, or what was to be parked could not be: the agent made it ready
    again, so nobody stops it."""
    for planned, hold in held:
        stop = planned.item.stop
        replica = scene.world.replicas.get(planned.item.replica)
        if hold != "stopping" or stop is None or replica is None:
            continue
        if replica.phase == "ready" and replica.taken_back == stop.decision:
            why = f"taken back, {replica.reason or 'requests were running'}"
            return _resume(scene, model, planned, replica, why)
    return None


def _demanded_again(scene: Scene, model: Model | None, held: Held) -> Decision | None:
    """3. Somebody asks for what is just being stopped for lack of demand."""
    if model is None or is_off(model):
        return None
    running = [p for p, hold in held if hold in ("ready", "pending")]
    if len(running) >= target_of(model, scene.activations_of(model.name)):
        return None
    for planned, hold in held:
        replica = scene.world.replicas.get(planned.item.replica)
        if hold != "stopping" or replica is None or not may_resume(scene, planned, replica):
            continue
        if len(running) < model.scaling.min or _is_asked_for(scene, model, planned, running):
            return _resume(scene, model, planned, replica, "demand came back")
    return None


def _is_asked_for(scene: Scene, model: Model, planned: Planned, running: Sequence[Planned]) -> bool:
    """Whether a demand that this replica may answer has fewer than it wants; one for another card does not
    count."""
    return any(
        is_demanded(activation, model)
        and is_in_scope(planned, activation.scope)
        and sum(is_in_scope(p, activation.scope) for p in running) < activation.replicas
        for activation in scene.activations_of(model.name)
    )


def may_resume(scene: Scene, planned: Planned, replica: Replica) -> bool:
    """Whether clearing the stop of this item gives a replica that answers."""
    stop = planned.item.stop
    return (
        stop is not None
        and stop.reason in RESUMABLE
        and not stop.force
        and replica.phase in ("ready", "draining")
        and scene.profile_of(planned) is not None
        and not scene.is_away(planned.node)
    )


def _resume(
    scene: Scene, model: Model | None, planned: Planned, replica: Replica, why: str
) -> Decision:
    edit = PlanEdit(world=scene.world)
    edit.resume(planned)
    changes = list(edit.changes(why))
    if model is not None and is_current(planned, model):
        for activation in scene.activations_of(model.name):
            if activation.incarnation != model.incarnation:
                continue
            if not is_in_scope(planned, activation.scope):
                continue
            changes.extend(following.returned(scene, activation, planned, replica, why))
    return Decision(
        changes=tuple(changes),
        what=f"{planned.item.launch.model}: {planned.item.replica} goes on, {why}",
        cause=scene.world.head("replica", planned.node, planned.item.replica).id,
    )


def _measured(
    scene: Scene, model: Model | None, known: Record | None, held: Held
) -> Decision | None:
    """4. What a load took and used, once per replica and again when it grew; what each park and resume took."""
    if model is None:
        return None
    for planned, hold in held:
        replica = scene.world.replicas.get(planned.item.replica)
        if hold not in ("ready", "parked") or replica is None or not is_current(planned, model):
            continue
        if not record.is_unmeasured(known, replica):
            continue
        changes = [record.fold_ready(known, replica, scene.index.items, scene.now)]
        # The activation's turn belongs to the same moment: one batch, one flush on the cold path.
        followed = following.followed(scene, model, held)
        changes.extend(followed.changes if followed is not None else ())
        return Decision(
            changes=tuple(changes),
            what=f"{model.name}: {replica.id} is {replica.phase}{_took(replica)}",
            cause=scene.world.head("replica", planned.node, replica.id).id,
        )
    return None


def _took(replica: Replica) -> str:
    took_s = replica.resume_s if replica.resume_s is not None else replica.load_s
    if replica.phase == "parked":
        took_s = replica.park_s
    return f" after {took_s:.1f} s" if took_s is not None else ""


def _lifted(scene: Scene, model: Model | None, known: Record | None) -> Decision | None:
    """5. A changed entry is a new chance, and so is the end of the quarantine."""
    if model is None or known is None or not (known.failures or known.quarantined):
        return None
    revisions = {scene.index.revision(scene.world, model.name, p) for p in model.profiles}
    change = record.to_clear(known, revisions, scene.now)
    if change is None:
        return None
    return Decision(changes=(change,), what=f"{model.name}: {change.reason}, may start again")
