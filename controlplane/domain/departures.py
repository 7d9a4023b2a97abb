"""Says what becomes of a model's demand when replicas of it go: stopped, parked, ended by themselves or by their
node.

It moves activations alone; who goes, and why, was decided by its caller.
"""

from collections.abc import Collection, Iterable, Sequence
from typing import Final

from controlplane.domain import activation as moves
from controlplane.domain.decision import Change
from controlplane.domain.index import Planned
from controlplane.domain.scene import Hold, Scene, is_demanded, is_in_scope
from schemas.activation import ActivationEvent, ActivationIdle, ActivationReady, ActivationWanted
from schemas.model import Model

PLACED: Final[frozenset[str]] = frozenset({"placing", "loading", "ready"})
"""Phases of a demand that counts on a replica."""

Held = Sequence[tuple[Planned, Hold]]


def deserted(
    scene: Scene, model: Model | None, planned: Planned, held: Held, why: str, *, by_node: bool
) -> list[Change]:
    """What becomes of the demand of a replica that answers no more:

    a. another one of the scope is there: nothing, the demand follows it;
    b. its own node ended or parked it while nobody waited for it (`by_node`): idle, who needs it asks again;
    c. anything else, and what a `load --for` holds: wanted again; one that is in line for room stays there.
    """
    changes: list[Change] = []
    for activation in scene.activations_of(model.name) if model is not None else ():
        if model is None or not is_demanded(activation, model):
            continue
        if not is_in_scope(planned, activation.scope) or has_others(
            planned, held, activation.scope
        ):
            continue  # a
        is_held = activation.hold_until is not None and activation.hold_until > scene.now
        if by_node and activation.phase == "ready" and not is_held:  # b
            event: ActivationEvent = ActivationIdle(cause="stopped")
            changes.append(moves.move(activation, event, scene.now, why, replicas=1))
        elif activation.replica == planned.item.replica or activation.phase in PLACED:  # c
            event = ActivationWanted(by=planned.item.replica)
            changes.append(moves.move(activation, event, scene.now, why))
    return changes


def has_others(planned: Planned, held: Held, scope: str) -> bool:
    """Whether another replica of the scope answers or is on its way."""
    return any(
        other.item.replica != planned.item.replica
        and hold in ("ready", "pending")
        and is_in_scope(other, scope)
        for other, hold in held
    )


def withdrawn_from(
    scene: Scene,
    model: Model,
    ready: Iterable[Planned],
    gone: Collection[str],
    cause: str,
    why: str,
) -> list[Change]:
    """What becomes of the demands of a model whose replicas `gone`, of those `ready`, are to stop or park: idle, or
    ready with those of their scope that are left. A demand that outlived its last replica would start it
    again at once; one that never counted on them is left alone.
    """
    changes: list[Change] = []
    for activation in scene.activations_of(model.name):
        here = [p for p in ready if is_in_scope(p, activation.scope)]
        left = sorted(p.item.replica for p in here if p.item.replica not in gone)
        if len(left) == len(here) or not is_demanded(activation, model):
            continue
        if activation.phase != "ready" or not left:
            event: ActivationEvent = ActivationIdle(cause=cause)
            changes.append(
                moves.move(activation, event, scene.now, why, replicas=1, hold_until=None)
            )
            continue
        replica = activation.replica if activation.replica in left else left[0]
        replicas = min(activation.replicas, len(left))
        if (replica, replicas) != (activation.replica, activation.replicas):
            event = ActivationReady(replica=replica or "")
            changes.append(
                moves.move(activation, event, scene.now, why, replica=replica, replicas=replicas)
            )
    return changes
