"""Sees at a glance that a model has what is wanted of it: the state nearly all models of a large yard are in.

A shortcut, not a rule: it says yes only where `upkeep` and `reconcile` would find nothing to do, and
whatever it does not know at a glance it leaves to them. It must never say yes where one of them acts.
"""

from collections.abc import Mapping
from datetime import datetime, timedelta

from msgspec import Struct

from controlplane.domain import record
from controlplane.domain.planned import Planned
from controlplane.domain.scene import ANY, Scene
from schemas.model import Model

_ONLY_ANY = {ANY}


class Rest(Struct, frozen=True, kw_only=True):
    """There is nothing to do. `idle_at` is when it may have idled for long enough, None for never."""

    idle_at: datetime | None


_NEVER = Rest(idle_at=None)


def at_rest(scene: Scene, name: str) -> Rest | None:
    """The rest of a model served by one replica to everybody's satisfaction, None for all others.

    1. the entry wants one replica at most, for any place; 2. it has one, of this very entry, ready, not to
    be stopped and on a node that is heard; 3. its demand points there and its first waiter was answered;
    4. its load is in the record, and no failure is.
    """
    world = scene.world
    index = scene.index
    model = world.models.get(name)
    items = index.items_of.get(name)
    if model is None or items is None or len(items) != 1:
        return None
    known = index.rests.get(name)
    if known is not None and len(index.scopes_of[name]) == 1:
        rest, entry, planned, id_, replica, activation, about, node = known
        # Nothing it was judged by is another one than it was then.
        if (
            entry is model
            and items.get(id_) is planned
            and world.replicas.get(id_) is replica
            and world.activations.get((name, ANY)) is activation
            and world.records.get(name) is about
            and world.nodestates.get(planned.node) is node
        ):
            return rest
    rest = _judged(scene, model, items)
    if rest is None:
        index.rests.pop(name, None)
        return None
    ((id_, planned),) = items.items()
    index.rests[name] = (
        rest,
        model,
        planned,
        id_,
        world.replicas[id_],
        world.activations[(name, ANY)],
        world.records[name],
        world.nodestates.get(planned.node),
    )
    return rest


def _judged(scene: Scene, model: Model, items: Mapping[str, Planned]) -> Rest | None:
    world = scene.world
    index = scene.index
    name = model.name
    scaling = model.scaling
    if scaling.max < 1 or scaling.min > 1 or index.scopes_of.get(name) != _ONLY_ANY:  # 1
        return None
    ((id_, planned),) = items.items()
    item = planned.item
    replica = world.replicas.get(id_)
    if replica is None or replica.phase != "ready" or item.stop is not None:  # 2
        return None
    state = world.nodestates.get(planned.node)
    if state is not None and state.reach != "reachable":
        return None
    activation = world.activations[(name, ANY)]
    if (
        activation.phase != "ready"
        or not activation.answered
        or activation.replica != id_
        or activation.replicas > 1
        or activation.incarnation != model.incarnation
    ):  # 3
        return None
    known = world.records.get(name)
    if known is None or known.failures or known.quarantined is not None:  # 4
        return None
    if record.is_unmeasured(known, replica) or scene.profile_of(planned) is None:
        return None
    if scaling.min > 0 or scaling.idle_timeout_s <= 0:
        return _NEVER
    since = max(replica.ready_at or replica.since, activation.wanted_at)
    return Rest(idle_at=since + timedelta(seconds=scaling.idle_timeout_s))
