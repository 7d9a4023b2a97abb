"""Carries on after what a node did by itself to a replica: it parked it, lets it go, or had no room to resume it.

The plan is made to say what is (a parked replica has a stop) and the demand looks for another place. Who is
parked, and whether a resume has room, is the agent's to decide; when to resume is placement's.
"""

from collections.abc import Sequence

from controlplane.domain import departures
from controlplane.domain.decision import Decision
from controlplane.domain.index import Planned
from controlplane.domain.planedit import PlanEdit
from controlplane.domain.scene import Hold, Scene
from schemas.model import Model
from schemas.plan import Stop

Held = Sequence[tuple[Planned, Hold]]


def parted(scene: Scene, model: Model | None, held: Held) -> Decision | None:
    """The first of these:

    1. parked without a stop: its node parked it (a lease, a claim, a VM), or a resume was refused there. The stop
       is put (back) into the plan, or it would be resumed when the card is given back, wanted or not;
    2. draining by its node's own decision: its demand does not wait for the end.

    Nothing restarts where it left: its card is somebody else's now, and placement sees that.
    """
    for planned, hold in held:
        if hold == "parked" and planned.item.stop is None:  # 1
            return _put_back(scene, model, planned, held)
    for planned, hold in held:
        if hold == "stopping" and scene.is_leaving(planned):  # 2
            replica = scene.world.replicas[planned.item.replica]
            why = f"{replica.id} leaves {planned.node}"
            why += f": {replica.reason}" if replica.reason else ""
            changes = departures.deserted(scene, model, planned, held, why, by_node=True)
            if changes:
                return Decision(
                    changes=tuple(changes),
                    what=f"{planned.item.launch.model}: {why}",
                    cause=scene.world.head("replica", planned.node, replica.id).id,
                )
    return None


def _put_back(scene: Scene, model: Model | None, planned: Planned, held: Held) -> Decision:
    replica = scene.world.replicas[planned.item.replica]
    is_refused = scene.is_resume_refused(planned)
    why = f"{replica.id} {'stays' if is_refused else 'was'} parked"
    why += f": {replica.reason}" if replica.reason else ""
    edit = PlanEdit(world=scene.world)
    edit.stop(
        planned,
        Stop(
            decision=scene.ids.decision(),
            reason="park",
            decided_at=scene.now,
            drain_timeout_s=scene.settings.drain_timeout_s,
            park="may",
        ),
    )
    changes = list(edit.changes(why))
    changes.extend(departures.deserted(scene, model, planned, held, why, by_node=not is_refused))
    return Decision(
        changes=tuple(changes),
        what=f"{planned.item.launch.model}: {why}",
        cause=scene.world.head("replica", planned.node, replica.id).id,
    )
