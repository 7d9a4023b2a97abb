"""Stops replicas the catalog no longer asks for: removed, switched off, changed, above `max`.

Idle stops (idle.py) and those that make room (reconcile.py) are not decided here.
"""

from collections.abc import Sequence

from controlplane.domain import holders
from controlplane.domain.decision import Decision
from controlplane.domain.index import Planned
from controlplane.domain.planedit import PlanEdit
from controlplane.domain.scene import Hold, Scene, is_current, is_off, target_of
from schemas.model import Model
from schemas.plan import Stop, StopReason

Held = Sequence[tuple[Planned, Hold]]


def stopped(scene: Scene, model: Model | None, name: str, held: Held) -> Decision | None:
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
