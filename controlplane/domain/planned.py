"""Says what a parked or draining replica without a word of the plan means: it stays so, comes back, or goes.

Read from plan and replica together; nothing is parked, resumed or stopped here.
"""

from msgspec import Struct

from controlplane.domain.world import World
from schemas.plan import PlanItem


class Planned(Struct, frozen=True, kw_only=True):
    """A plan item and the node whose plan it is in."""

    node: str
    item: PlanItem


def stays_parked(world: World, planned: Planned) -> bool:
    """Whether a parked replica is to stay so: its stop allows it, its last resume was refused, or nobody but
    its own node parked it."""
    stop = planned.item.stop
    if stop is not None:
        return stop.park != "never"
    return is_resume_refused(world, planned) or not _is_resuming(world, planned)


def is_leaving(world: World, planned: Planned) -> bool:
    """Whether its own node ends it: it drains, and not under a stop that was just cleared."""
    replica = world.replicas.get(planned.item.replica)
    if replica is None or replica.phase != "draining" or planned.item.stop is not None:
        return False
    return replica.stop_decision != planned.item.cleared


def _is_resuming(world: World, planned: Planned) -> bool:
    """Whether a parked replica without a stop is to come back: the clearing of its stop answered that it was
    parked, or crossed with it."""
    replica = world.replicas.get(planned.item.replica)
    if replica is not None and replica.stop_decision == planned.item.cleared:
        return True
    head = world.head("replica", planned.node, planned.item.replica)
    return head.id == planned.item.resumed


def is_resume_refused(world: World, planned: Planned) -> bool:
    """Whether a parked replica without a stop was refused since it was to be resumed.

    A resume is written with the card revisions it was decided at (planedit.py); a refusal at older ones
    answered an earlier resume.
    """
    replica = world.replicas.get(planned.item.replica)
    if replica is None or replica.phase != "parked" or planned.item.stop is not None:
        return False
    revs = planned.item.card_revs
    return bool(replica.card_revs) and all(
        revs.get(card, 0) <= rev for card, rev in replica.card_revs.items()
    )
