"""Moves a model's activations after what its replicas, its entry and the beacons say of them.

It moves demand alone: nothing is started, stopped or taken from a plan here.
"""

from collections.abc import Sequence
from datetime import datetime, timedelta
from typing import Any, Final

from controlplane.domain import activation as moves
from controlplane.domain import memory
from controlplane.domain.decision import Change, Decision
from controlplane.domain.index import Planned
from controlplane.domain.scene import Hold, Scene, in_scope, is_off
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
    if activation.phase in ("placing", "loading", "ready"):
        return moves.move(
            activation,
            ActivationWanted(by="control"),
            scene.now,
            "its replica does not count any more",
        )
    return None


def is_leaving(scene: Scene, activation: Activation) -> bool:
    """Whether the replica of a demand is being ended by its own node (an agent told to stop)."""
    replica = scene.world.replicas.get(activation.replica or "")
    return replica is not None and replica.phase == "draining"


def _follow_pending(
    scene: Scene, activation: Activation, planned: Planned, asked: bool, is_new: bool
) -> Change | None:
    replica = scene.world.replicas.get(planned.item.replica)
    is_starting = replica is not None and replica.phase in ("starting", "fetching")
    phase = "loading" if is_starting else "placing"
    expected_at = _expected_at(scene, activation, replica)
    is_known = activation.phase == phase and activation.replica == planned.item.replica
    if is_known and (expected_at is None or activation.expected_ready_at is not None):
        return None
    if activation.phase == "refused" and not is_starting and not asked:
        return None
    if activation.phase == "ready" and not asked and is_leaving(scene, activation):
        # Its node ends it by itself. Who asks meanwhile says so; nobody else is to find it started again.
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
    event = ActivationLoading(replica=replica.id)
    return moves.move(
        activation,
        event,
        scene.now,
        f"{replica.id} is {replica.phase} on {planned.node}",
        is_new=is_new,
        expected_ready_at=expected_at,
        **_where(planned),
    )


def _expected_at(scene: Scene, activation: Activation, replica: Replica | None) -> datetime | None:
    """When a starting engine should be ready, by earlier loads; nobody knows how long a fetch takes."""
    if replica is None or replica.phase != "starting":
        return None
    known = scene.world.records.get(activation.model)
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
