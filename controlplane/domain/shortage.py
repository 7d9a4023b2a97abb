"""Says what models are short of, and in which order they are served.

It places nothing: reconcile.py serves who stands in line here.
"""

from collections.abc import Iterable
from datetime import UTC, datetime
from typing import Final

from controlplane.domain import record
from controlplane.domain.placement import Claims, Demand, Placed, Wait, place
from controlplane.domain.rooms import Planned
from controlplane.domain.scene import (
    ANY,
    Hold,
    Scene,
    is_demanded,
    is_in_scope,
    is_off,
    target_of,
)
from schemas.model import Model

_FIRST: Final = datetime.min.replace(tzinfo=UTC)


def demand_of(scene: Scene, name: str) -> Demand | None:
    """The first thing the model is short of, None when it has or is getting what is wanted."""
    return next(iter(demands_of(scene, name)), None)


def demands_of(scene: Scene, name: str) -> list[Demand]:
    """What the model is short of: one for each card it is asked for on, and one for any card.

    They stand in line each for itself: one that waits for its card is in nobody's way. But where `max` has no
    room for both, the one for any card comes after those for a card: what serves them serves it too, and a
    replica elsewhere would have to make way again. A replica of an older revision still serves but does not
    count: its successor is wanted too. A parked one does not count: it comes back where placement says. One
    that makes way for a card that was asked for counts until it is gone.
    """
    model = scene.world.models.get(name)
    if model is None or is_off(model):
        return []
    if scene.index.items_of.get(name):
        return _demands_of(scene, model)
    # Many may wait without a replica: what they are short of is known as long as nothing of it changes.
    asked = scene.activations_of(name)
    known = scene.index.demands.get(name)
    if known is not None and known[0] is model and known[1] == asked:
        return known[2]
    demands = _demands_of(scene, model)
    scene.index.demands[name] = (model, asked, demands)
    return demands


def _demands_of(scene: Scene, model: Model) -> list[Demand]:
    name = model.name
    activations = [a for a in scene.activations_of(name) if is_demanded(a, model)]
    held = scene.holds_of(name)
    current = [
        (p, hold)
        for p, hold in held
        if hold in ("ready", "pending") and scene.profile_of(p) is not None
    ]
    if any(hold == "pending" for _, hold in current):
        return []
    found = [
        Demand(
            model=model,
            wanted_at=activation.wanted_at,
            scope=activation.scope,
            activation=activation,
        )
        for activation in activations
        if activation.scope != ANY and not any(is_in_scope(p, activation.scope) for p, _ in current)
    ]
    plain = [a for a in activations if a.scope == ANY]
    count = len(current) + sum(_moves(p, hold) for p, hold in held)
    if count < target_of(model, plain):
        mine = plain[0] if plain else None
        wanted_at = mine.wanted_at if mine is not None else scene.now
        if len(current) < model.scaling.min:
            # `min` has been asking since the entry was written.
            wanted_at = min(wanted_at, scene.world.head("model", name).stored_at or _FIRST)
        if count + 1 + len(found) > model.scaling.max:
            wanted_at = max((wanted_at, *(d.wanted_at for d in found)))
        found.append(Demand(model=model, wanted_at=wanted_at, activation=mine))
    return found


def _moves(planned: Planned, hold: Hold) -> bool:
    """Whether a replica leaves because its own model was asked for on another card."""
    stop = planned.item.stop
    return hold == "stopping" and stop is not None and stop.for_model == planned.item.launch.model


def queue_of(scene: Scene) -> list[Demand]:
    """All that is short, in order of arrival, then name, cards before any card."""
    return _in_order(d for name in sorted(scene.index.short) for d in demands_of(scene, name))


def _in_order(demands: Iterable[Demand]) -> list[Demand]:
    return sorted(demands, key=lambda d: (d.wanted_at, d.model.name, d.scope == ANY, d.scope))


def claims_before(scene: Scene, demand: Demand) -> Claims | None:
    """The cards that demands before this one wait for; None when one of them could be placed now.

    One that is fresh comes after all others. Asked in the middle of other work, so it looks at models nothing
    was decided for yet as well.
    """
    names = scene.index.short | scene.index.dirty
    claims = Claims()
    for other in _in_order(d for name in sorted(names) for d in demands_of(scene, name)):
        if other.model.name == demand.model.name and other.scope == demand.scope:
            if demand.fresh:
                continue
            break
        if record.hold_back(scene.world.records.get(other.model.name), scene.now) is not None:
            continue
        verdict = place(scene, other, claims)
        if isinstance(verdict, Placed):
            return None
        if isinstance(verdict, Wait):
            claims.add(verdict.claimed)
    return claims
