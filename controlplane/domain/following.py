"""Moves a model's activations after what its replicas, its entry and the beacons say of them.

It moves demand alone: nothing is started, stopped or taken from a plan here. A demand that is bound to one card
follows only what runs on that card.
"""

from collections.abc import Sequence
from datetime import datetime, timedelta
from typing import Any, Final

from controlplane.domain import activation as moves
from controlplane.domain import memory
from controlplane.domain.catalog import TOMBSTONE_TTL_S
from controlplane.domain.decision import Change, Decision
from controlplane.domain.index import Planned
from controlplane.domain.scene import ANY, Hold, Scene, in_scope, is_off
from schemas.activation import (
    PENDING_PHASES,
    Activation,
    ActivationDeleted,
    ActivationEvent,
    ActivationIdle,
    ActivationLoading,
    ActivationPlacing,
    ActivationReady,
    ActivationRefused,
    ActivationWaiting,
    ActivationWanted,
)
from schemas.cardnames import readings
from schemas.model import Model
from schemas.replica import Replica

UNUSED_COUNTS_AS_ANSWERED_S: Final = 60.0
"""Waiters that are gone would otherwise give a replica its place for ever."""

ANSWERED_BEFORE_S: Final = 2.0
"""A waiter may be answered before the leader came to write that its replica is ready."""

Held = Sequence[tuple[Planned, Hold]]


def followed(scene: Scene, model: Model | None, held: Held) -> Decision | None:
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
    # Nothing is there to follow: who begins to ask is placed, who waits for room waits on.
    is_waiting_on_one = activation.phase == "waiting" and activation.replica is not None
    if not asked and (activation.phase in ("placing", "loading", "ready") or is_waiting_on_one):
        return moves.move(
            activation,
            ActivationWanted(by="control"),
            scene.now,
            "its replica does not count any more",
        )
    return None


def is_leaving(scene: Scene, activation: Activation) -> bool:
    """Whether the replica of a demand is on its way out or parked: who asks now must not wait for it."""
    planned = scene.index.items.get(activation.replica or "")
    return planned is not None and scene.hold(planned) in ("stopping", "parked")


def _follow_pending(
    scene: Scene, activation: Activation, planned: Planned, asked: bool, is_new: bool
) -> Change | None:
    """1. the engine starts, resumes or gets its files: loading; 2. its agent makes room for it: waiting;
    3. it was not answered yet: placing."""
    replica = scene.world.replicas.get(planned.item.replica)
    is_starting = replica is not None and replica.phase in ("starting", "fetching")
    if activation.phase == "refused" and not is_starting and not asked:
        return None
    is_same = activation.replica == planned.item.replica and not is_new
    if replica is not None and is_starting:  # 1
        expected_at = _expected_at(scene, activation, replica)
        is_known = is_same and activation.phase == "loading"
        if is_known and (expected_at is None or activation.expected_ready_at is not None):
            return None
        is_back = is_resuming(replica)
        return moves.move(
            activation,
            ActivationLoading(replica=replica.id),
            scene.now,
            f"{replica.id} is {'resuming' if is_back else replica.phase} on {planned.node}",
            is_new=is_new,
            expected_ready_at=expected_at,
            **_where(planned),
        )
    if replica is not None and replica.phase == "waiting":  # 2
        if is_same and (activation.phase, activation.waiting_for) == (
            "waiting",
            replica.waiting_for,
        ):
            return None
        return moves.move(
            activation,
            ActivationWaiting(waiting_for=replica.waiting_for),
            scene.now,
            replica.reason or f"{planned.node} makes room for {replica.id}",
            is_new=is_new,
            waiting_for=replica.waiting_for,
            kept=False,
            **_where(planned),
        )
    if is_same and activation.phase == "placing":  # 3
        return None
    return moves.move(
        activation,
        ActivationPlacing(replica=planned.item.replica),
        scene.now,
        f"{planned.item.replica} is planned on {planned.node}",
        is_new=is_new,
        **_where(planned),
    )


def is_resuming(replica: Replica) -> bool:
    """Whether a starting replica comes back from being parked: it answered before."""
    return replica.phase == "starting" and replica.was_ready


def _expected_at(scene: Scene, activation: Activation, replica: Replica | None) -> datetime | None:
    """When a starting engine should be ready, by earlier loads or resumes; nobody knows how long a fetch takes."""
    if replica is None or replica.phase != "starting":
        return None
    known = scene.world.records.get(activation.model)
    if is_resuming(replica):
        back_s = memory.expected_resume_s(known, replica.profile, replica.card_kind)
        return None if back_s is None else replica.since + timedelta(seconds=back_s)
    load_s = memory.expected_load_s(known, replica.profile, replica.card_kind)
    started_at = replica.started_at or scene.now
    return None if load_s is None else started_at + timedelta(seconds=load_s)


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


def returned(
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


def _cause(scene: Scene, state: Activation) -> str:
    if state.replica is None or state.node is None:
        return ""
    return scene.world.head("replica", state.node, state.replica).id


def switched_off(scene: Scene, model: Model | None, name: str) -> Decision | None:
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


def is_nowhere(scene: Scene, activation: Activation) -> bool:
    """Whether a refused demand is bound to a card that no node has."""
    return activation.phase == "refused" and not is_somewhere(scene, activation.scope)


def is_somewhere(scene: Scene, scope: str) -> bool:
    """Whether a scope is `any`, or the card it names is in the inventory of its node."""
    return scope == ANY or any(
        scene.index.room(scene.world, where) is not None for where in readings(scope)
    )


def forgotten(scene: Scene, name: str) -> Decision | None:
    """6. A refusal for a card that no node has ends with its time: clients may name any card they like."""
    for activation in scene.activations_of(name):
        until = activation.retry_at
        if until is not None and until <= scene.now and is_nowhere(scene, activation):
            why = f"there is no card {activation.scope.replace('~', '/')}"
            change = Change(
                noun="activation",
                key=(name, activation.scope),
                event=ActivationDeleted(),
                state=None,
                reason=why,
                ttl_s=TOMBSTONE_TTL_S,
            )
            return Decision(changes=(change,), what=f"{name}: {why}, its refusal is over")
    return None


def answered(scene: Scene, model: Model | None) -> Decision | None:
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
        if age_s is not None and age_s + gateway.age_s <= ready_for_s + ANSWERED_BEFORE_S:
            return True
    if ready_for_s < UNUSED_COUNTS_AS_ANSWERED_S:
        return False
    return not any(
        gateway.waiting.get(activation.model, 0) > 0
        for gateway in scene.live.gateways
        # The last words of a gateway that was killed are nobody's wait any more.
        if gateway.age_s <= scene.settings.stale_gateway_s
    )
