"""Stops replicas the catalog no longer asks for: removed, switched off, changed, above `max`, and parked copies with
them.

What the catalog does not ask for any more is not parked. Idle stops (idle.py) and those that make room (reconcile.py) are not decided here.
"""

from collections.abc import Sequence
from datetime import datetime
from typing import Literal

from controlplane.domain import holders
from controlplane.domain.decision import Decision
from controlplane.domain.index import Planned
from controlplane.domain.planedit import PlanEdit
from controlplane.domain.scene import Hold, Scene, is_current, is_in_scope, is_off, target_of
from schemas.activation import PENDING_PHASES
from schemas.model import Model
from schemas.plan import Stop, StopReason

Held = Sequence[tuple[Planned, Hold]]


def stopped(scene: Scene, model: Model | None, name: str, held: Held) -> Decision | None:
    """7. Replicas that are not to run any more:

    a. the entry is gone, or another of the same name; b. it is off;
    c. started from an older revision: those not needed while the new one comes up;
    d. more than `max`; e. parked copies of a model that has as many as it may have answering;
    f. one that waits for room on its card and that nobody asks for any more; a parked copy that was to come
       back stays parked then.
    """
    running = [p for p, hold in held if hold in ("ready", "pending", "away")]
    parked = [p for p, hold in held if hold == "parked"]
    gone = [p for p in (*running, *parked) if not is_current(p, model)]
    if gone:  # a
        return stop_decision(scene, name, gone, "removed", "the entry was removed")
    if model is None or not (running or parked):
        return None
    if is_off(model):  # b
        return stop_decision(scene, name, [*running, *parked], "scaled_down", "the model is off")
    holds = {p.item.replica: hold for p, hold in held}
    outdated = [p for p in (*running, *parked) if scene.profile_of(p) is None]
    current = [p for p in running if scene.profile_of(p) is not None]
    activations = scene.activations_of(name)
    if outdated:  # c
        target = target_of(model, activations)
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
    ready = sum(1 for p in counted if holds[p.item.replica] == "ready")
    copies = [p for p in parked if scene.profile_of(p) is not None]
    surplus = _longest_parked(scene, copies, ready + len(copies) - model.scaling.max)
    if surplus:  # e
        why = f"max is {model.scaling.max}, {ready} ready"
        return stop_decision(scene, name, surplus, "scaled_down", why)
    unasked = [p for p in counted if _is_unasked(scene, p)]
    for planned in holders.to_stop(
        scene, unasked, len(counted) - target_of(model, activations)
    ):  # f
        why = "nobody asks for it any more"
        replica = scene.world.replicas[planned.item.replica]
        if replica.phase == "parked":
            return stop_decision(scene, name, [planned], "park", why, park="may")
        return stop_decision(scene, name, [planned], "scaled_down", why)
    return None


def _longest_parked(scene: Scene, parked: list[Planned], count: int) -> tuple[Planned, ...]:
    """The `count` that were parked first, then by id."""

    def key(planned: Planned) -> tuple[datetime, str]:
        replica = scene.world.replicas[planned.item.replica]
        return (replica.parked_at or replica.since, replica.id)

    return tuple(sorted(parked, key=key)[: max(count, 0)])


def _is_unasked(scene: Scene, planned: Planned) -> bool:
    """Whether its agent still makes room for it, or for its way back, and no demand that may use its card is
    pending."""
    replica = scene.world.replicas.get(planned.item.replica)
    if replica is None or replica.phase not in ("waiting", "parked"):
        return False
    return not any(
        activation.phase in PENDING_PHASES and is_in_scope(planned, activation.scope)
        for activation in scene.activations_of(replica.model)
    )


def stop_decision(
    scene: Scene,
    name: str,
    stopping: list[Planned] | tuple[Planned, ...],
    reason: StopReason,
    why: str,
    *,
    park: Literal["never", "may"] = "never",
) -> Decision:
    edit = PlanEdit(world=scene.world)
    stop = Stop(
        decision=scene.ids.decision(),
        reason=reason,
        decided_at=scene.now,
        drain_timeout_s=scene.settings.drain_timeout_s,
        park=park,
    )
    for planned in stopping:
        edit.stop(planned, stop)
    ids = ", ".join(p.item.replica for p in stopping)
    return Decision(
        changes=edit.changes(why),
        what=f"{name}: {ids} to stop, {why}",
        cause=scene.world.head("model", name).id,
    )
