"""Gathers what a decision changes in plans, so that each plan is written once and says what changed.

It carries out; whether something is to start or stop was decided by its caller.
"""

from dataclasses import dataclass, field

from msgspec.structs import replace

from controlplane.domain.decision import Change
from controlplane.domain.index import Planned
from controlplane.domain.world import World
from schemas.plan import Plan, PlanChanged, PlanItem, Stop


@dataclass(slots=True)
class PlanEdit:
    """Edits of one decision, by node; `changes` are them as events, nodes in order of their id."""

    world: World
    _added: dict[str, list[PlanItem]] = field(default_factory=dict)
    _stops: dict[str, dict[str, Stop | None]] = field(default_factory=dict)
    _removed: dict[str, set[str]] = field(default_factory=dict)
    _evict: dict[str, tuple[str, ...]] = field(default_factory=dict)

    def add(self, node: str, item: PlanItem) -> None:
        self._added.setdefault(node, []).append(item)

    def stop(self, planned: Planned, stop: Stop) -> None:
        self._stops.setdefault(planned.node, {})[planned.item.replica] = stop

    def resume(self, planned: Planned, evict: tuple[str, ...] = ()) -> None:
        """Clears the stop; `evict` are leases that have to leave for it. Of a parked one the card revisions of this moment are written too: what the agent
        refuses from then on is this resume and no earlier one."""
        self._stops.setdefault(planned.node, {})[planned.item.replica] = None
        self._evict[planned.item.replica] = evict

    def remove(self, planned: Planned) -> None:
        self._removed.setdefault(planned.node, set()).add(planned.item.replica)

    def changes(self, reason: str) -> tuple[Change, ...]:
        nodes = sorted({*self._added, *self._stops, *self._removed})
        return tuple(self._change(node, reason) for node in nodes)

    def _change(self, node: str, reason: str) -> Change:
        before = self.world.plans.get(node, Plan(node=node))
        stops = self._stops.get(node, {})
        removed = self._removed.get(node, set())
        added = self._added.get(node, [])
        items = [
            self._edited(node, item, stops[item.replica]) if item.replica in stops else item
            for item in before.items
            if item.replica not in removed
        ]
        return Change(
            noun="plan",
            key=(node,),
            event=PlanChanged(
                added=tuple(item.replica for item in added),
                stopping=tuple(sorted(r for r, stop in stops.items() if stop is not None)),
                resumed=tuple(sorted(r for r, stop in stops.items() if stop is None)),
                removed=tuple(sorted(removed)),
            ),
            state=Plan(node=node, items=(*items, *added)),
            reason=reason,
        )

    def _edited(self, node: str, item: PlanItem, stop: Stop | None) -> PlanItem:
        if stop is not None:
            return replace(item, stop=stop)
        replica = self.world.replicas.get(item.replica)
        cleared = item.stop.decision if item.stop is not None else item.cleared
        if replica is not None and replica.phase == "draining":
            # The agent may be carrying out an older stop than the last one written.
            cleared = replica.stop_decision or cleared
        if replica is None or replica.phase != "parked":
            return replace(item, stop=None, cleared=cleared)
        cards = {name: self.world.cards.get((node, name)) for name in item.cards}
        revs = {name: card.rev for name, card in cards.items() if card is not None}
        parked = self.world.head("replica", node, item.replica).id
        evict = self._evict.get(item.replica, ())
        return replace(
            item, stop=None, cleared=cleared, card_revs=revs, resumed=parked, evict=evict
        )
