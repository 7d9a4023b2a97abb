"""Carries one model's plan items and activations after what its replicas, its entry and its record say.

Level-triggered: each call looks at the state alone and returns the first thing to do, or nothing. It
starts nothing; what is short is left to the queue (reconcile.py).
"""

from collections.abc import Sequence
from datetime import datetime, timedelta
from typing import Any, Final

from controlplane.domain import activation as moves
from controlplane.domain import holders, memory, placement, record
from controlplane.domain.decision import Change, Decision
from controlplane.domain.index import Planned
from controlplane.domain.planedit import PlanEdit
from controlplane.domain.scene import (
    Hold,
    Scene,
    in_scope,
    is_demanded,
    is_in_scope,
    is_off,
    target_of,
)
from schemas.activation import (
    PENDING_PHASES,
    Activation,
    ActivationEvent,
    ActivationIdle,
    ActivationLoading,
    ActivationPlacing,
    ActivationReady,
    ActivationRefused,
    ActivationWanted,
)
from schemas.model import Model
from schemas.plan import Stop, StopReason
from schemas.record import Record
from schemas.replica import Replica

RESUMABLE: Final[frozenset[str]] = frozenset({"idle", "unload", "scaled_down"})
"""Stops that new demand takes back: nothing but the lack of demand was their reason."""

UNUSED_COUNTS_AS_ANSWERED_S: Final = 60.0
"""Waiters that are gone would otherwise give a replica its place for ever."""

Held = Sequence[tuple[Planned, Hold]]


def look_after(scene: Scene, name: str) -> Decision | None:
    """The first of these that applies to the model:

    1. an item whose replica ended leaves the plan, its end goes into the record, demand goes on or is
       answered;
    2. a stop its agent took back is cleared; 3. so is one that new demand makes needless;
    4. load time and memory of a ready replica are recorded;
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
        _taken_back(scene, model, held),  # 2
        _demanded_again(scene, model, held),  # 3
        _measured(scene, model, known, held),  # 4
        _lifted(scene, model, known),  # 5
        _followed(scene, model, held),  # 6
        _switched_off(scene, model, name),  # 6: nobody waits for a model that is off
        _stopped(scene, model, name, held),  # 7
        _answered(scene, model),  # 8
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
        activation.since + timedelta(seconds=UNUSED_COUNTS_AS_ANSWERED_S)
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


def is_current(planned: Planned, model: Model | None) -> bool:
    return model is not None and planned.item.launch.incarnation == model.incarnation


def _ended(scene: Scene, model: Model | None, planned: Planned, held: Held) -> Decision:
    """1. Removes the item in the decision that records its end; what happens to demand:

    a. another replica of the scope is there: nothing, the activation follows it;
    b. a failed start, or a crash that must wait: refused, with the engine's last line;
    c. a first crash, a refusal of the agent, a replica that ended while somebody waited: wanted again;
    d. a ready replica that was stopped by somebody at the node: idle, who needs it asks again.
    """
    id_ = planned.item.replica
    replica = scene.world.replicas[id_]
    edit = PlanEdit(world=scene.world)
    edit.remove(planned)
    why = replica.last_line or replica.reason or replica.code or replica.phase
    changes = list(edit.changes(f"{id_} ended: {replica.phase}"))
    failed = replica.phase == "failed" and planned.item.stop is None and is_current(planned, model)
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
    for activation in scene.activations_of(model.name) if model is not None else ():
        if model is None or not is_demanded(activation, model):
            continue
        if not is_in_scope(planned, activation.scope):
            continue
        if _others(planned, held, activation.scope):  # a
            continue
        if refusal is not None:  # b
            event: ActivationEvent = ActivationRefused(code=refusal.code)
            changes.append(
                moves.move(
                    activation,
                    event,
                    scene.now,
                    refusal.reason,
                    code=refusal.code,
                    retry_at=refusal.retry_at,
                    replicas=1,
                )
            )
        elif (
            replica.phase == "stopped"
            and planned.item.stop is None
            and activation.phase == "ready"
            and not _is_held(scene, activation)
        ):  # d
            event = ActivationIdle(cause="stopped")
            changes.append(
                moves.move(activation, event, scene.now, f"{id_} was stopped: {why}", replicas=1)
            )
        elif activation.phase != "wanted":  # c
            event = ActivationWanted(by=id_)
            changes.append(moves.move(activation, event, scene.now, f"{id_}: {why}"))
    return Decision(
        changes=tuple(changes),
        what=f"{planned.item.launch.model}: {id_} {replica.phase} ({why}), out of the plan",
        cause=scene.world.head("replica", replica.node, id_).id,
    )


def _others(planned: Planned, held: Held, scope: str) -> bool:
    return any(
        other.item.replica != planned.item.replica
        and hold in ("ready", "pending")
        and is_in_scope(other, scope)
        for other, hold in held
    )


def _is_held(scene: Scene, activation: Activation) -> bool:
    return activation.hold_until is not None and activation.hold_until > scene.now


def _taken_back(scene: Scene, model: Model | None, held: Held) -> Decision | None:
    """2. The bound passed with requests running: the agent made it ready again, so nobody stops it."""
    for planned, hold in held:
        stop = planned.item.stop
        replica = scene.world.replicas.get(planned.item.replica)
        if hold != "stopping" or stop is None or replica is None:
            continue
        if replica.phase == "ready" and replica.taken_back == stop.decision:
            return _resume(scene, model, planned, replica, "taken back, requests were running")
    return None


def _demanded_again(scene: Scene, model: Model | None, held: Held) -> Decision | None:
    """3. Somebody asks for what is just being stopped for lack of demand."""
    if model is None or is_off(model):
        return None
    running = sum(1 for _, hold in held if hold in ("ready", "pending"))
    if running >= target_of(model, scene.activations_of(model.name)):
        return None
    for planned, hold in held:
        replica = scene.world.replicas.get(planned.item.replica)
        if hold == "stopping" and replica is not None and may_resume(scene, planned, replica):
            return _resume(scene, model, planned, replica, "demand came back")
    return None


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
            changes.extend(_back(scene, activation, planned, replica, why))
    return Decision(
        changes=tuple(changes),
        what=f"{planned.item.launch.model}: {planned.item.replica} goes on, {why}",
        cause=scene.world.head("replica", planned.node, planned.item.replica).id,
    )


def rejoined(
    scene: Scene,
    wanted: Activation,
    planned: Planned,
    replica: Replica,
    why: str,
    *,
    is_new: bool,
) -> Change:
    """The demand that cleared a stop: answered at once, or when the agent has taken the drain back."""
    event: ActivationEvent
    if replica.phase == "ready":
        event = ActivationReady(replica=replica.id)
        return moves.move(
            wanted, event, scene.now, why, is_new=is_new, answered=False, **_where(planned)
        )
    event = ActivationPlacing(replica=replica.id)
    return moves.move(wanted, event, scene.now, why, is_new=is_new, **_where(planned))


def _back(
    scene: Scene, activation: Activation, planned: Planned, replica: Replica, why: str
) -> list[Change]:
    """The demand of a replica whose stop was cleared: ready at once, or when its agent says so."""
    if activation.phase == "ready":
        return []
    where = _where(planned)
    if replica.phase == "ready":
        waited_for = activation.phase in PENDING_PHASES
        event: ActivationEvent = ActivationReady(replica=replica.id)
        return [moves.move(activation, event, scene.now, why, answered=not waited_for, **where)]
    if activation.phase in PENDING_PHASES and activation.phase != "placing":
        event = ActivationPlacing(replica=replica.id)
        return [moves.move(activation, event, scene.now, why, **where)]
    return []


def _measured(
    scene: Scene, model: Model | None, known: Record | None, held: Held
) -> Decision | None:
    """4. What a load took and used, once per replica and again when it grew."""
    if model is None:
        return None
    for planned, hold in held:
        replica = scene.world.replicas.get(planned.item.replica)
        if hold != "ready" or replica is None or not is_current(planned, model):
            continue
        if not record.is_unmeasured(known, replica):
            continue
        changes = [record.fold_ready(known, replica, scene.index.items, scene.now)]
        # The activation's turn belongs to the same moment: one batch, one flush on the cold path.
        followed = _followed(scene, model, held)
        changes.extend(followed.changes if followed is not None else ())
        return Decision(
            changes=tuple(changes),
            what=f"{model.name}: {replica.id} is ready"
            + (f" after {replica.load_s:.1f} s" if replica.load_s is not None else ""),
            cause=scene.world.head("replica", planned.node, replica.id).id,
        )
    return None


def _lifted(scene: Scene, model: Model | None, known: Record | None) -> Decision | None:
    """5. A changed entry is a new chance, and so is the end of the quarantine."""
    if model is None or known is None or not (known.failures or known.quarantined):
        return None
    revisions = {scene.index.revision(scene.world, model.name, p) for p in model.profiles}
    change = record.to_clear(known, revisions, scene.now)
    if change is None:
        return None
    return Decision(changes=(change,), what=f"{model.name}: {change.reason}, may start again")


def _followed(scene: Scene, model: Model | None, held: Held) -> Decision | None:
    """6. Demand that has a replica is as far as that replica is; demand without one is wanted."""
    if model is None or is_off(model):
        return None
    for activation in scene.activations_of(model.name):
        if activation.incarnation != model.incarnation or activation.phase == "idle":
            continue
        mine = in_scope(held, activation.scope)
        change = follow(scene, activation, mine)
        if change is not None:
            assert isinstance(change.state, Activation)
            return Decision(
                changes=(change,),
                what=f"{model.name}: {change.state.phase}, {change.reason}",
                cause=_cause(scene, change.state),
            )
    return None


def _cause(scene: Scene, state: Activation) -> str:
    if state.replica is None or state.node is None:
        return ""
    return scene.world.head("replica", state.node, state.replica).id


def follow(
    scene: Scene,
    activation: Activation,
    held: Held,
    *,
    asked: bool = False,
    is_new: bool = False,
) -> Change | None:
    """The move that brings an activation to where the replicas of its scope are, None when it is there.

    A refused one follows too: `min` or another demand may have started what was refused. `asked`: the
    demand begins with this move; `is_new`: it was never recorded.
    """
    ready = [p for p, hold in held if hold == "ready"]
    if ready:
        if activation.phase == "ready" and any(p.item.replica == activation.replica for p in ready):
            return None
        best = min(ready, key=lambda p: _precedence(scene, p))
        was_awaited = activation.phase != "ready"
        return moves.move(
            activation,
            ActivationReady(replica=best.item.replica),
            scene.now,
            f"{best.item.replica} answers",
            is_new=is_new,
            answered=False if was_awaited else activation.answered,
            **_where(best),
        )
    pending = [p for p, hold in held if hold == "pending"]
    if pending:
        best = min(pending, key=lambda p: _precedence(scene, p))
        return _follow_pending(scene, activation, best, asked, is_new)
    if activation.phase in ("placing", "loading", "ready"):
        return moves.move(
            activation,
            ActivationWanted(by="control"),
            scene.now,
            "its replica does not count any more",
        )
    return None


def _follow_pending(
    scene: Scene, activation: Activation, planned: Planned, asked: bool, is_new: bool
) -> Change | None:
    replica = scene.world.replicas.get(planned.item.replica)
    is_starting = replica is not None and replica.phase in ("starting", "fetching")
    phase = "loading" if is_starting else "placing"
    if activation.phase == phase and activation.replica == planned.item.replica:
        return None
    if activation.phase == "refused" and not is_starting and not asked:
        return None
    event: ActivationEvent
    if replica is None or not is_starting:
        event = ActivationPlacing(replica=planned.item.replica)
        return moves.move(
            activation,
            event,
            scene.now,
            f"{planned.item.replica} is planned on {planned.node}",
            is_new=is_new,
            **_where(planned),
        )
    known = scene.world.records.get(activation.model)
    load_s = memory.expected_load_s(known, replica.profile, replica.card_kind)
    started_at = replica.started_at or scene.now
    event = ActivationLoading(replica=replica.id)
    return moves.move(
        activation,
        event,
        scene.now,
        f"{replica.id} is {replica.phase} on {planned.node}",
        is_new=is_new,
        expected_ready_at=None if load_s is None else started_at + timedelta(seconds=load_s),
        **_where(planned),
    )


def _where(planned: Planned) -> dict[str, Any]:
    return {
        "replica": planned.item.replica,
        "node": planned.node,
        "profile": planned.item.launch.profile,
    }


def _precedence(scene: Scene, planned: Planned) -> tuple[bool, datetime, str]:
    """Those that are what the entry asks for first, the oldest of them first."""
    is_outdated = scene.profile_of(planned) is None
    return (is_outdated, planned.item.decided_at, planned.item.replica)


def _switched_off(scene: Scene, model: Model | None, name: str) -> Decision | None:
    """6. Demand for a model that was switched off is refused; demand of a former incarnation ends."""
    for activation in scene.activations_of(name):
        is_live = activation.phase in PENDING_PHASES or activation.phase == "ready"
        if not is_live:
            continue
        if model is None or activation.incarnation != model.incarnation:
            event: ActivationEvent = ActivationIdle(cause="removed")
            change = moves.move(activation, event, scene.now, "the model was removed", replicas=1)
        elif is_off(model):
            if activation.phase == "ready":
                event = ActivationIdle(cause="off")
                change = moves.move(
                    activation, event, scene.now, "switched off", replicas=1, hold_until=None
                )
            else:
                event = ActivationRefused(code="model_off")
                change = moves.move(
                    activation,
                    event,
                    scene.now,
                    "the model was switched off",
                    code="model_off",
                    replicas=1,
                    hold_until=None,
                )
        else:
            continue
        return Decision(changes=(change,), what=f"{name}: {change.reason}")
    return None


def _stopped(scene: Scene, model: Model | None, name: str, held: Held) -> Decision | None:
    """7. Replicas that are not to run any more:

    a. the entry is gone, or another of the same name; b. it is off;
    c. started from an older revision: those not needed while the new one comes up;
    d. more than `max`.
    """
    running = [p for p, hold in held if hold in ("ready", "pending", "away")]
    gone = [p for p in running if not is_current(p, model)]
    if gone:  # a
        return stop_decision(scene, name, gone, "removed", "the entry was removed")
    if model is None or not running:
        return None
    if is_off(model):  # b
        return stop_decision(scene, name, running, "scaled_down", "the model is off")
    holds = {p.item.replica: hold for p, hold in held}
    outdated = [p for p in running if scene.profile_of(p) is None]
    current = [p for p in running if scene.profile_of(p) is not None]
    if outdated:  # c
        target = target_of(model, scene.activations_of(name))
        answering = sum(1 for p in current if holds[p.item.replica] == "ready")
        loading = [p for p in outdated if holds[p.item.replica] != "ready"]
        serving = [p for p in outdated if holds[p.item.replica] == "ready"]
        needless = holders.to_stop(scene, serving, answering + len(serving) - target)
        stopping = [*loading, *needless]
        if stopping:
            return stop_decision(scene, name, stopping, "changed", "the entry changed")
    counted = [p for p in current if holds[p.item.replica] != "away"]
    excess = len(counted) - model.scaling.max
    if excess > 0:  # d
        surplus = holders.to_stop(scene, counted, excess)
        return stop_decision(scene, name, surplus, "scaled_down", f"max is {model.scaling.max}")
    return None


def stop_decision(
    scene: Scene,
    name: str,
    stopping: list[Planned] | tuple[Planned, ...],
    reason: StopReason,
    why: str,
) -> Decision:
    edit = PlanEdit(world=scene.world)
    stop = Stop(
        decision=scene.ids.decision(),
        reason=reason,
        decided_at=scene.now,
        drain_timeout_s=scene.settings.drain_timeout_s,
    )
    for planned in stopping:
        edit.stop(planned, stop)
    ids = ", ".join(p.item.replica for p in stopping)
    return Decision(
        changes=edit.changes(why),
        what=f"{name}: {ids} to stop, {why}",
        cause=scene.world.head("model", name).id,
    )


def _answered(scene: Scene, model: Model | None) -> Decision | None:
    """8. From now on the replica may make room for others.

    Some gateway shows a request on it or a use since it was ready; or a minute nobody came.
    """
    if model is None:
        return None
    for activation in scene.activations_of(model.name):
        if activation.phase != "ready" or activation.answered:
            continue
        if not _was_used(scene, activation):
            continue
        change = moves.move(
            activation,
            ActivationReady(replica=activation.replica or ""),
            scene.now,
            "answered",
            answered=True,
        )
        return Decision(changes=(change,), what=f"{model.name}: its first waiter was answered")
    return None


def _was_used(scene: Scene, activation: Activation) -> bool:
    ready_for_s = scene.age_s(activation.since)
    for gateway in scene.live.gateways:
        if activation.replica and gateway.inflight.get(activation.replica, 0) > 0:
            return True
        age_s = gateway.last_use_age_s.get(activation.model)
        if age_s is not None and age_s + gateway.age_s <= ready_for_s:
            return True
    if ready_for_s < UNUSED_COUNTS_AS_ANSWERED_S:
        return False
    return not any(gateway.waiting.get(activation.model, 0) for gateway in scene.live.gateways)
