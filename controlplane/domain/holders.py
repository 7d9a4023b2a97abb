"""Says which replicas on a card may be drained for another model, and in which order.

It names victims and stops nobody.
"""

from collections.abc import Iterable
from datetime import datetime, timedelta

from msgspec import Struct

from controlplane.domain.index import Holder, Planned, Room
from controlplane.domain.scene import Scene
from schemas.activation import PENDING_PHASES
from schemas.replica import Replica


class Victim(Struct, frozen=True, kw_only=True):
    """A replica that may go. Ordered by `key`: without requests first, least recently used, then id."""

    planned: Planned
    memory_bytes: int
    has_requests: bool
    used_at: datetime

    @property
    def key(self) -> tuple[bool, datetime, str]:
        return (self.has_requests, self.used_at, self.planned.item.replica)


def has_requests(scene: Scene, node: str, replica: str) -> bool:
    """Whether a gateway's last beacon or the engine's own counters show requests on it."""
    if any(gateway.inflight.get(replica, 0) > 0 for gateway in scene.live.gateways):
        return True
    agent = scene.agents.get(node)
    told = agent.replicas.get(replica) if agent is not None else None
    return told is not None and (told.counters.inflight or 0) > 0


def used_at(scene: Scene, replica: Replica) -> datetime:
    """The last use of the replica's model any gateway told of, or when it became ready."""
    at = replica.ready_at or replica.since
    for gateway in scene.live.gateways:
        age_s = gateway.last_use_age_s.get(replica.model)
        if age_s is not None:
            at = max(at, scene.now - timedelta(seconds=age_s + gateway.age_s))
    return at


def to_stop(scene: Scene, replicas: Iterable[Planned], count: int) -> tuple[Planned, ...]:
    """The `count` of a model's own replicas that are missed least.

    1. on their way before answering ones, 2. without requests, 3. least recently used, 4. id.
    """

    def key(planned: Planned) -> tuple[bool, bool, datetime, str]:
        replica = scene.world.replicas.get(planned.item.replica)
        if replica is None:
            return (False, False, planned.item.decided_at, planned.item.replica)
        return (
            replica.phase == "ready",
            has_requests(scene, planned.node, replica.id),
            used_at(scene, replica),
            replica.id,
        )

    return tuple(sorted(replicas, key=key)[: max(count, 0)])


def protected_until(scene: Scene, planned: Planned, waited_s: float) -> datetime | bool | None:
    """Whether a holder keeps its place: True = for now, a time = until then, None = it may go.

    1. Not ready: its start is somebody's wait.
    2. Its first waiter has no answer yet.
    3. The model is held by `load --for`.
    4. Ready for less than the minimum residency, unless the other waits longer than the bound.
    5. Its demand cannot be ended, because what was last written of it was not understood.
    """
    replica = scene.world.replicas.get(planned.item.replica)
    if replica is None or replica.phase != "ready":  # 1
        return True
    until: datetime | None = None
    for activation in scene.activations_of(replica.model):
        if not scene.world.head("activation", activation.model, activation.scope).writable:  # 5
            return True
        # A pending one has not followed its replica yet: its waiters were just woken.
        is_awaited = activation.phase in PENDING_PHASES
        if is_awaited or (activation.phase == "ready" and not activation.answered):  # 2
            return True
        if activation.hold_until is not None and activation.hold_until > scene.now:  # 3
            until = activation.hold_until
    resident = replica.ready_at or replica.since
    residency_ends = resident + timedelta(seconds=scene.settings.min_residency_s)
    if residency_ends > scene.now and waited_s < scene.settings.starvation_bound_s:  # 4
        # Whichever of the two comes first ends this protection; the earlier look is never wrong.
        starved = scene.after(scene.settings.starvation_bound_s - waited_s)
        until = max(until, min(residency_ends, starved)) if until else min(residency_ends, starved)
    return until


class Draining(Struct, frozen=True, kw_only=True):
    """What one card gives when others leave it.

    `victims` to stop now; `leaving` are stopping already; `keepers` would have to go as well but may
    not now. `enough`: with victims and leaving gone there is room. `look_at` is when a keeper's
    protection ends, None when no time says so.
    """

    victims: tuple[Victim, ...] = ()
    leaving: tuple[str, ...] = ()
    keepers: tuple[str, ...] = ()
    enough: bool = False
    look_at: datetime | None = None


def drain_of(
    scene: Scene, room: Room, needed_bytes: int, *, empty: bool, for_model: str, waited_s: float
) -> Draining:
    """Who must leave `room` for `needed_bytes`; `empty` when nobody may stay (an exclusive profile).

    Replicas at their model's `min` never go. Of the others as few as needed go, in Victim's order.
    """
    leaving = [h for h in room.holders if h.stopping]
    free = room.free_bytes + sum(h.memory_bytes for h in leaving)
    staying: list[Holder] = []
    candidates: list[Victim] = []
    look_at: datetime | None = None
    spare: dict[str, int] = {}
    for holder in room.holders:
        if holder.stopping or holder.planned is None:
            continue
        until = protected_until(scene, holder.planned, waited_s)
        if until is not None or holder.planned.item.launch.model == for_model:
            staying.append(holder)
            if isinstance(until, datetime):
                look_at = until if look_at is None else min(look_at, until)
            continue
        replica = scene.world.replicas[holder.replica]
        candidates.append(
            Victim(
                planned=holder.planned,
                memory_bytes=holder.memory_bytes,
                has_requests=has_requests(scene, holder.planned.node, holder.replica),
                used_at=used_at(scene, replica),
            )
        )
    chosen: list[Victim] = []
    for victim in sorted(candidates, key=lambda v: v.key):
        if _suffices(free, needed_bytes, empty, len(staying) + len(candidates) - len(chosen)):
            break
        model = victim.planned.item.launch.model
        if model not in spare:
            spare[model] = _above_min(scene, model)
        if spare[model] <= 0:
            continue
        spare[model] -= 1
        chosen.append(victim)
        free += victim.memory_bytes
    left = len(staying) + len(candidates) - len(chosen)
    enough = _suffices(free, needed_bytes, empty, left)
    if enough and not empty:
        chosen = _without_needless(chosen, free - needed_bytes)
    gone = {v.planned.item.replica for v in chosen} | {h.replica for h in leaving}
    return Draining(
        victims=tuple(chosen) if enough else (),
        leaving=tuple(h.replica for h in leaving),
        keepers=tuple(h.replica for h in room.holders if h.replica not in gone),
        enough=enough,
        look_at=look_at,
    )


def _suffices(free_bytes: int, needed_bytes: int, empty: bool, left: int) -> bool:
    return left == 0 if empty else free_bytes >= needed_bytes


def _without_needless(chosen: list[Victim], surplus_bytes: int) -> list[Victim]:
    """Spares the most precious ones that the others made needless."""
    kept = list(chosen)
    for victim in sorted(chosen, key=lambda v: v.key, reverse=True):
        if victim.memory_bytes <= surplus_bytes:
            kept.remove(victim)
            surplus_bytes -= victim.memory_bytes
    return kept


def _above_min(scene: Scene, model: str) -> int:
    entry = scene.world.models.get(model)
    count = sum(1 for _, hold in scene.holds_of(model) if hold == "ready")
    return count - (entry.scaling.min if entry is not None else 0)
