"""Says who on a card may be asked to leave for a model, in which order, and why the others stay.

It names victims and stops nobody.
"""

from collections.abc import Collection, Iterable
from datetime import datetime, timedelta
from typing import Final

from msgspec import Struct

from controlplane.domain.rooms import Holder, Planned, Room
from controlplane.domain.scene import Scene, is_in_scope
from schemas.activation import PENDING_PHASES
from schemas.replica import Replica

LONG_AGO_S: Final = float("-inf")
"""When a parked replica was used: before all others."""


class Victim(Struct, frozen=True, kw_only=True):
    """A replica that may go. Ordered by `key`: without requests first, least recently used, then id.

    A parked one has no requests and is not used: it goes first, where what it keeps is needed.
    """

    planned: Planned
    memory_bytes: int
    has_requests: bool
    used_at_s: float
    is_parked: bool = False

    @property
    def key(self) -> tuple[bool, float, str]:
        return (self.has_requests, self.used_at_s, self.planned.item.replica)


def has_requests(scene: Scene, node: str, replica: str) -> bool:
    """Whether a gateway's last beacon or the engine's own counters show requests on it."""
    if any(gateway.inflight.get(replica, 0) > 0 for gateway in scene.live.gateways):
        return True
    agent = scene.agents.get(node)
    told = agent.replicas.get(replica) if agent is not None else None
    return told is not None and (told.counters.inflight or 0) > 0


def used_at_s(scene: Scene, model: str, ready_at_s: float) -> float:
    """The last use of a model any gateway told of, or when its replica became ready, whichever is later; in
    seconds since the epoch."""
    at_s = ready_at_s
    now_s = scene.now.timestamp()
    for gateway in scene.live.gateways:
        if gateway.last_use_at_s is not None:
            at_s = max(at_s, gateway.last_use_at_s.get(model, at_s))
            continue
        age_s = gateway.last_use_age_s.get(model)
        if age_s is not None:
            at_s = max(at_s, now_s - (age_s + gateway.age_s))
    return at_s


def _used_at_s(scene: Scene, replica: Replica) -> float:
    return used_at_s(scene, replica.model, (replica.ready_at or replica.since).timestamp())


def to_stop(scene: Scene, replicas: Iterable[Planned], count: int) -> tuple[Planned, ...]:
    """The `count` of a model's own replicas that are missed least.

    1. on their way before answering ones, 2. without requests, 3. least recently used, 4. id.
    """

    def key(planned: Planned) -> tuple[bool, bool, float, str]:
        replica = scene.world.replicas.get(planned.item.replica)
        if replica is None:
            return (False, False, planned.item.decided_at.timestamp(), planned.item.replica)
        return (
            replica.phase == "ready",
            has_requests(scene, planned.node, replica.id),
            _used_at_s(scene, replica),
            replica.id,
        )

    return tuple(sorted(replicas, key=key)[: max(count, 0)])


class Protection(Struct, frozen=True, kw_only=True):
    """Why a holder keeps its place for now. `until`: time alone ends it then; None: it does not."""

    why: str
    until: datetime | None = None


def protection(scene: Scene, planned: Planned, waited_s: float) -> Protection | None:
    """Why a replica keeps its place, None when it may go.

    1. Not ready: its start is somebody's wait.
    2. Its first waiter has no answer yet.
    3. The model is held by `load --for`.
    4. Ready for less than the minimum residency, unless the other waits longer than the bound.
    5. Its demand cannot be ended, because what was last written of it was not understood.
    """
    id_ = planned.item.replica
    replica = scene.world.replicas.get(id_)
    if replica is None or replica.phase != "ready":  # 1
        phase = replica.phase if replica is not None else "planned"
        return Protection(why=f"{id_} is {phase}")
    held: datetime | None = None
    for activation in scene.activations_of(replica.model):
        if not is_in_scope(planned, activation.scope):
            continue  # who asked for another card does not wait for this replica
        if not scene.world.head("activation", activation.model, activation.scope).writable:  # 5
            return Protection(why=f"the demand for {replica.model} cannot be read")
        # A pending one has not followed its replica yet: its waiters were just woken.
        is_awaited = activation.phase in PENDING_PHASES
        if is_awaited or (activation.phase == "ready" and not activation.answered):  # 2
            return Protection(why=f"{id_} has not answered its first request yet")
        if activation.hold_until is not None and activation.hold_until > scene.now:  # 3
            held = activation.hold_until
    settings = scene.settings
    resident = replica.ready_at or replica.since
    residency_ends = resident + timedelta(seconds=settings.min_residency_s)
    if residency_ends > scene.now and waited_s < settings.starvation_bound_s:  # 4
        # Whichever of the two comes first ends this protection; the earlier look is never wrong.
        until = min(residency_ends, scene.after(settings.starvation_bound_s - waited_s))
        return Protection(
            # A time and no age: the sentence stays true for as long as the verdict is kept.
            why=f"{id_} is ready since {resident:%H:%M:%S} and stays for "
            f"{settings.min_residency_s:g} s (unless somebody has waited for "
            f"{settings.starvation_bound_s:g} s)",
            until=max(until, held) if held is not None else until,
        )
    if held is not None:
        return Protection(why=f"{replica.model} is held by a load", until=held)
    return None


class Draining(Struct, frozen=True, kw_only=True):
    """What one card gives when others leave it.

    `victims` to stop now, `evicted` are named leases to be asked by the agent; `leaving` are on their way
    out already; `keepers` would have to go as well but may not now, `why` says of the first of them what
    keeps it. `enough`: with victims, evicted and leaving gone there is room. `look_at` is when a keeper's
    protection ends, None when no time says so. `kept`: whoever may ever be asked to leave, there is no room.
    """

    victims: tuple[Victim, ...] = ()
    evicted: tuple[Holder, ...] = ()
    leaving: tuple[str, ...] = ()
    keepers: tuple[str, ...] = ()
    why: str = ""
    enough: bool = False
    look_at: datetime | None = None
    kept: bool = False


def drain_of(
    scene: Scene,
    room: Room,
    needed_bytes: int,
    *,
    empty: bool,
    for_model: str,
    waited_s: float,
    own: str = "",
    gone: Collection[str] = (),
    spare: dict[str, int] | None = None,
) -> Draining:
    """Who must leave `room` for `needed_bytes`; `empty` when nobody may stay (an exclusive profile).

    1. Who is leaving already, and `gone` (chosen for another card of the same set), leaves anyway;
       `own` is the parked replica that wants to come back: what it keeps there is its own.
    2. Replicas at their model's `min`, protected ones and those of the same model stay for now.
    3. Waiters, pinned and more urgent leases stay. Other named leases go last: they are somebody's.
    4. Of those that may go as few as needed go: parked ones, then replicas in Victim's order, then leases.

    `spare` counts how many of each model may still go, over all cards of a set.
    """
    spare = {} if spare is None else spare
    free = room.free_bytes
    leaving: list[str] = []
    staying: list[Holder] = []
    whys: list[str] = []
    victims: list[Victim] = []
    evictable: list[Holder] = []
    sizes: dict[str, int] = {}
    look_at: datetime | None = None
    for holder in room.holders:
        sizes[holder.id] = holder.memory_bytes
        if holder.id == own:
            free += holder.memory_bytes
        elif holder.stopping or holder.id in gone:  # 1
            leaving.append(holder.id)
            free += holder.memory_bytes
        elif holder.kind == "lease" and not holder.stays:
            evictable.append(holder)
        elif holder.planned is None:  # 3
            staying.append(holder)
            whys.append(f"{holder.name} stays")
        elif holder.planned.item.launch.model == for_model:  # 2
            if holder.kind != "parked":
                staying.append(holder)
                whys.append(f"{holder.name} runs there")
        elif holder.kind == "parked":
            victims.append(
                Victim(
                    planned=holder.planned,
                    memory_bytes=holder.memory_bytes,
                    has_requests=False,
                    used_at_s=LONG_AGO_S,
                    is_parked=True,
                )
            )
        else:
            found = protection(scene, holder.planned, waited_s)
            if found is not None:  # 2
                staying.append(holder)
                whys.append(found.why)
                if found.until is not None:
                    look_at = found.until if look_at is None else min(look_at, found.until)
                continue
            replica = scene.world.replicas[holder.id]
            victims.append(
                Victim(
                    planned=holder.planned,
                    memory_bytes=holder.memory_bytes,
                    has_requests=has_requests(scene, holder.planned.node, holder.id),
                    used_at_s=_used_at_s(scene, replica),
                )
            )
    # Only those count who hold the card: what a parked engine keeps is in nobody's way.
    left = len(staying) + len(evictable) + sum(not v.is_parked for v in victims)
    blocked = empty and room.stowaways > 0
    chosen: list[Victim] = []
    used: dict[str, int] = {}
    for victim in sorted(victims, key=lambda v: v.key):  # 4
        if not (empty and left) and free >= needed_bytes:
            break
        model = victim.planned.item.launch.model
        if not victim.is_parked:
            left_of = spare[model] if model in spare else _above_min(scene, model)
            if left_of - used.get(model, 0) <= 0:
                whys.append(f"{victim.planned.item.replica} is kept by the min of {model}")
                continue
            used[model] = used.get(model, 0) + 1
            left -= 1
        chosen.append(victim)
        free += victim.memory_bytes
    evicted: list[Holder] = []
    for lease in sorted(evictable, key=lambda h: h.precedence):
        if not (empty and left) and free >= needed_bytes:
            break
        evicted.append(lease)
        left -= 1
        free += lease.memory_bytes
    enough = not blocked and not (empty and left) and free >= needed_bytes
    if enough:
        chosen, evicted = _without_needless(chosen, evicted, free - needed_bytes, empty)
        for victim in chosen:
            if not victim.is_parked:
                model = victim.planned.item.launch.model
                spare[model] = spare.get(model, _above_min(scene, model)) - 1
    going = {v.planned.item.replica for v in chosen} | {h.id for h in evicted} | {*leaving, own}
    reachable = room.total_bytes - room.staying_bytes
    stays_for_good = empty and (room.stowaways > 0 or any(h.kind == "lease" for h in staying))
    return Draining(
        victims=tuple(chosen) if enough else (),
        evicted=tuple(evicted) if enough else (),
        leaving=tuple(leaving),
        keepers=tuple(h.name or h.id for h in room.holders if h.id not in going),
        why="" if enough else next(iter(whys), ""),
        enough=enough,
        look_at=look_at,
        kept=not enough and (stays_for_good or reachable < needed_bytes),
    )


def _without_needless(
    chosen: list[Victim], evicted: list[Holder], surplus_bytes: int, empty: bool
) -> tuple[list[Victim], list[Holder]]:
    """Spares the most precious ones that the others made needless; of those that hold the card none when it
    has to be empty."""
    leases = list(evicted)
    if not empty:
        for lease in reversed(evicted):
            if lease.memory_bytes <= surplus_bytes:
                leases.remove(lease)
                surplus_bytes -= lease.memory_bytes
    kept = list(chosen)
    for victim in sorted(chosen, key=lambda v: v.key, reverse=True):
        if empty and not victim.is_parked:
            continue
        if victim.memory_bytes <= surplus_bytes:
            kept.remove(victim)
            surplus_bytes -= victim.memory_bytes
    return kept, leases


def _above_min(scene: Scene, model: str) -> int:
    entry = scene.world.models.get(model)
    count = sum(1 for _, hold in scene.holds_of(model) if hold == "ready")
    return count - (entry.scaling.min if entry is not None else 0)
