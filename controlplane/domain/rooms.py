"""Says what each card has and who is on it, and keeps the cards in the orders placement looks at them in.

Everything here is derived from the world and changes card by card with it. Who may be drained, and where a
start goes, is decided elsewhere.
"""

from bisect import bisect_left, insort
from collections.abc import Iterable, Mapping
from datetime import UTC, datetime
from typing import Final, Literal, Protocol

from msgspec import Struct

from controlplane.domain.planned import Planned, is_leaving, stays_parked
from controlplane.domain.world import World
from schemas import cardstate
from schemas.card import PRIORITIES, Card, Lease
from schemas.node import CardInfo
from schemas.plan import PlanItem
from schemas.replica import TERMINAL_PHASES, Replica

CardKey = tuple[str, str]
RoomKey = tuple[int, datetime, str, str]

LONG_AGO: Final = datetime.min.replace(tzinfo=UTC)
"""Before anything a card can remember."""


HolderKind = Literal["replica", "parked", "lease", "waiter"]


class Holder(Struct, frozen=True, kw_only=True):
    """Who has memory of a card, or is in line for it.

    kind      planned                              may leave
    replica   its item; None: only a lease is left  as holders.py says; None: it is on its way out
    parked    its item; None: as above              always: what a parked engine keeps is no hold
    lease     None                                  unless `stays`
    waiter    None                                  never: it was here first

    `stays`: pinned, or of a higher priority than a request for a model. `name` is how it is called in a
    reason.
    """

    id: str
    kind: HolderKind
    memory_bytes: int
    planned: Planned | None = None
    stopping: bool = False
    stays: bool = False
    exclusive: bool = False
    name: str = ""
    precedence: tuple[int, datetime, str] = (0, LONG_AGO, "")
    """Of a lease: the order in which leases are asked to leave."""


class Room(Struct, frozen=True, kw_only=True):
    """What one card has. `order` is its place in the node's configuration, `rev` its revision.

    `is_free`: nobody holds it, is planned on it or is in line (what parked engines keep aside). `kept` is who
    keeps it out of reach altogether, in words. `free_bytes` may be below 0. `reach_bytes` are free when
    everybody has left who may ever be asked to, `residue_bytes` when only parked engines and those on their
    way out have. `given_at` is when it was last given, None when that is not known any more.
    """

    node: str
    card: str
    kind: str
    order: int
    total_bytes: int
    free_bytes: int
    rev: int
    holders: tuple[Holder, ...] = ()
    exclusive: bool = False
    given_at: datetime | None = None
    is_free: bool = True
    kept: str = ""
    mig: bool = False
    stowaways: int = 0
    other_bytes: int = 0
    staying_bytes: int = 0
    """What pinned and more urgent leases and what no lease explains take: nobody can be asked for it."""
    most_bytes: int = 0
    """What a model could have that shares it, were all gone who are not there to stay; `most_alone_bytes`: one
    that has to be alone there, -1 where somebody stays."""
    most_alone_bytes: int = 0
    ready_at_s: float = float("-inf")
    """When the last of the replicas on it that answer became ready, in seconds since the epoch."""
    reach_bytes: int = 0
    residue_bytes: int = 0
    leaving_for: tuple[str, ...] = ()
    """Models for which somebody is leaving it; empty with `is_leaving`: for another reason."""
    is_leaving: bool = False
    drainable: tuple[tuple[str, str, float], ...] = ()
    """Answering replicas that might make room, were they not protected at this moment: id, model, and when
    each became ready, in seconds since the epoch."""
    has_leases: bool = False
    has_residue: bool = False
    where: CardKey
    key: RoomKey
    """The order of ties: place in its node, least recently given, node, card."""


class Counts(Protocol):
    """Who knows how many plan items a model has."""

    def count_of(self, model: str) -> int: ...


def make_room(
    world: World,
    node: str,
    order: int,
    info: CardInfo,
    items: Mapping[str, Planned],
    given_at: datetime | None,
    models: Counts,
) -> Room:
    """The room of a card from its state and the plan's `items` on it."""
    card = world.cards.get((node, info.id))
    if card is None:
        card = Card(node=node, id=info.id, kind=info.kind, memory_bytes=info.memory_bytes, rev=0)
    if not items and not card.leases and not card.waiters:
        free = card.memory_bytes - card.other_bytes
        return _room(world, card, info, order, free, (), given_at, models)
    found = {h.id: h for h in _of_items(world, card, items)}
    measured: dict[str, int] = {}
    for planned in items.values():
        used = _measured(world.replicas.get(planned.item.replica))
        if used:
            measured[planned.item.replica] = used
    extra = 0
    room_in_ram = 0
    leased: set[str] = set()
    for lease in card.leases:
        if lease.kind == "parked" and card.kind == "cpu":
            # A parked copy makes way for a start: its agent ends the one that was parked longest.
            room_in_ram += lease.memory_bytes
            continue
        given = lease.memory_bytes
        if lease.kind != "parked":
            given = max(given, measured.get(lease.holder, 0))
        leased.add(lease.holder)
        known = found.get(lease.holder)
        if known is None:
            found[lease.holder] = _of_lease(lease)
        elif known.memory_bytes > given:
            extra += known.memory_bytes - given
        else:
            found[lease.holder] = _larger(known, given)
    extra += sum(h.memory_bytes for h in found.values() if h.id not in leased)
    for waiter in card.waiters:
        if waiter.id not in found:
            extra += waiter.memory_bytes
            found[waiter.id] = Holder(
                id=waiter.id,
                kind="waiter",
                memory_bytes=waiter.memory_bytes,
                stays=True,
                exclusive=waiter.exclusive,
                name=f"{waiter.name or waiter.id} in line",
            )
    free = card.memory_bytes - cardstate.held_bytes(card, measured) - extra + room_in_ram
    holders = tuple(found[id_] for id_ in sorted(found))
    return _room(world, card, info, order, free, holders, given_at, models)


def _room(
    world: World,
    card: Card,
    info: CardInfo,
    order: int,
    free: int,
    holders: tuple[Holder, ...],
    given_at: datetime | None,
    models: Counts,
) -> Room:
    kept = cardstate.kept_by(card)
    drainable: list[tuple[str, str, float]] = []
    leaving_for: set[str] = set()
    residue = reach = free
    staying = card.other_bytes
    ready_at_s = float("-inf")
    exclusive = any(h.exclusive for h in holders)
    stays = bool(card.stowaways) or any(h.kind == "lease" and h.stays for h in holders)
    for holder in holders:
        if holder.kind == "replica" and holder.planned is not None:
            ready_at_s = max(ready_at_s, _ready_at_s(world.replicas.get(holder.id)))
        if holder.stopping:
            residue += holder.memory_bytes
            stop = holder.planned.item.stop if holder.planned is not None else None
            if stop is not None and stop.for_model:
                leaving_for.add(stop.for_model)
        elif holder.kind == "parked":
            residue += holder.memory_bytes
        elif holder.kind == "lease":
            if holder.stays:
                staying += holder.memory_bytes
            else:
                reach += holder.memory_bytes
        elif holder.planned is not None and _may_drain(world, holder.planned, models):
            reach += holder.memory_bytes
            replica = world.replicas[holder.id]
            drainable.append((holder.id, replica.model, _ready_at_s(replica)))
    reach += residue - free
    return Room(
        node=card.node,
        card=info.id,
        kind=info.kind,
        order=order,
        total_bytes=card.memory_bytes,
        free_bytes=free,
        rev=card.rev,
        holders=holders,
        exclusive=exclusive,
        given_at=given_at,
        is_free=cardstate.is_free(card) and all(h.kind == "parked" for h in holders),
        kept=kept,
        mig=info.mig,
        stowaways=len(card.stowaways),
        other_bytes=card.other_bytes,
        staying_bytes=staying,
        most_bytes=-1 if stays and exclusive else card.memory_bytes - staying,
        most_alone_bytes=-1 if stays else card.memory_bytes - staying,
        ready_at_s=ready_at_s,
        reach_bytes=-1 if kept or info.mig else reach,
        residue_bytes=-1 if kept or info.mig else residue,
        leaving_for=tuple(sorted(leaving_for)),
        is_leaving=any(h.stopping for h in holders),
        drainable=tuple(drainable),
        has_leases=any(h.kind == "lease" and not h.stays for h in holders),
        has_residue=any(h.kind == "parked" and not h.stopping for h in holders),
        where=(card.node, info.id),
        key=(order, given_at or LONG_AGO, card.node, info.id),
    )


def _of_items(world: World, card: Card, items: Mapping[str, Planned]) -> Iterable[Holder]:
    """Each planned replica that is not over: an item nobody answered yet counts as use of its cards."""
    for id_, planned in items.items():
        item = planned.item
        replica = world.replicas.get(id_)
        phase = replica.phase if replica is not None else None
        if phase in TERMINAL_PHASES:
            continue
        is_ended = item.stop is not None and item.stop.park == "never"
        if replica is not None and phase == "parked" and (is_ended or stays_parked(world, planned)):
            yield Holder(
                id=id_,
                kind="parked",
                memory_bytes=0 if card.kind == "cpu" else replica.residual_bytes,
                planned=planned,
                stopping=is_ended,
                name=f"{id_} (parked)",
            )
            continue
        yield Holder(
            id=id_,
            kind="replica",
            memory_bytes=max(item.memory_bytes, _measured(replica)),
            planned=planned,
            # Survivors of a stop that failed hold the memory until somebody acts: they do not leave.
            stopping=phase != "stop_failed"
            and (item.stop is not None or is_leaving(world, planned)),
            exclusive=_is_exclusive(world, item),
            name=id_,
        )


def _ready_at_s(replica: Replica | None) -> float:
    if replica is None or replica.phase != "ready":
        return float("-inf")
    return (replica.ready_at or replica.since).timestamp()


def _measured(replica: Replica | None) -> int:
    """Bytes a replica was seen to use on each of its cards, 0 when nobody looked yet."""
    if replica is None or not replica.measured_memory_bytes:
        return 0
    return -(-replica.measured_memory_bytes // max(len(replica.cards), 1))


def _of_lease(lease: Lease) -> Holder:
    """A lease no item explains. One of a replica is of one that ended or was never planned: its agent is
    stopping it, or reads its memory back."""
    if lease.kind == "named":
        stays = cardstate.is_kept(lease)
        return Holder(
            id=lease.holder,
            kind="lease",
            memory_bytes=lease.memory_bytes,
            stopping=bool(lease.leaving) or lease.returning,
            stays=stays,
            exclusive=lease.exclusive,
            name=f"lease {lease.name or lease.holder}",
            precedence=(-PRIORITIES.index(lease.priority), lease.since, lease.holder),
        )
    return Holder(
        id=lease.holder,
        kind=lease.kind,
        memory_bytes=lease.memory_bytes,
        stopping=True,
        name=lease.holder,
    )


def _larger(holder: Holder, memory_bytes: int) -> Holder:
    if memory_bytes == holder.memory_bytes:
        return holder
    return Holder(
        id=holder.id,
        kind=holder.kind,
        memory_bytes=memory_bytes,
        planned=holder.planned,
        stopping=holder.stopping,
        exclusive=holder.exclusive,
        name=holder.name,
    )


def _may_drain(world: World, planned: Planned, models: Counts) -> bool:
    """Whether a replica could be a victim at all: it answers, and its model is not down to its `min`."""
    replica = world.replicas.get(planned.item.replica)
    if replica is None or replica.phase != "ready":
        return False
    model = world.models.get(planned.item.launch.model)
    return model is None or models.count_of(model.name) > model.scaling.min


def _is_exclusive(world: World, item: PlanItem) -> bool:
    if item.launch.exclusive:
        return True
    model = world.models.get(item.launch.model)
    if model is None:
        return False
    return any(p.exclusive for p in model.profiles if p.name == item.launch.profile)


class RoomBook:
    """The cards of a yard in the orders a search needs; one changed card costs a few bisections.

    free      nobody there, in the order of ties
    shared    (free bytes, key) of those somebody is on that take more
    residue   those where parked engines keep something, in the order of ties
    leaving   those somebody leaves; leased: those with leases that may be asked to go
    drainable those with replicas that may be drained
    """

    def __init__(self) -> None:
        self.rooms: dict[CardKey, Room] = {}
        self.free: dict[str, list[tuple[RoomKey, Room]]] = {"cpu": [], "gpu": []}
        self.shared: dict[str, list[tuple[int, RoomKey, Room]]] = {"cpu": [], "gpu": []}
        self.residue: dict[CardKey, Room] = {}
        self.leaving: dict[CardKey, Room] = {}
        self.leased: dict[CardKey, Room] = {}
        self.drainable: dict[CardKey, Room] = {}

    def put(self, rooms: Iterable[Room], gone: Iterable[CardKey]) -> None:
        """Takes these in place of what was known of their cards."""
        fresh = list(rooms)
        is_many = len(fresh) > 64
        for where in [*(r.where for r in fresh), *gone]:
            before = self.rooms.pop(where, None)
            if before is not None and not is_many:
                self._take_out(before)
        for room in fresh:
            self.rooms[room.where] = room
            if not is_many:
                self._put_in(room)
        if is_many:
            self._rebuild()

    def _rebuild(self) -> None:
        known = self.rooms
        self.__init__()
        self.rooms = known
        for room in known.values():
            self._put_in(room, sort=False)
        for kind in self.free:
            self.free[kind].sort(key=_first)
            self.shared[kind].sort(key=_first_two)

    def _put_in(self, room: Room, *, sort: bool = True) -> None:
        if room.kept or room.mig:
            return
        if room.is_free:
            free = self.free[room.kind]
            if sort:
                insort(free, (room.key, room), key=_first)
            else:
                free.append((room.key, room))
        elif not room.exclusive:
            shared = self.shared[room.kind]
            if sort:
                insort(shared, (room.free_bytes, room.key, room), key=_first_two)
            else:
                shared.append((room.free_bytes, room.key, room))
        if room.has_residue:
            self.residue[room.where] = room
        if room.is_leaving:
            self.leaving[room.where] = room
        if room.has_leases:
            self.leased[room.where] = room
        if room.drainable:
            self.drainable[room.where] = room

    def _take_out(self, room: Room) -> None:
        if room.kept or room.mig:
            return
        if room.is_free:
            free = self.free[room.kind]
            del free[bisect_left(free, room.key, key=_first)]
        elif not room.exclusive:
            shared = self.shared[room.kind]
            del shared[bisect_left(shared, (room.free_bytes, room.key), key=_first_two)]
        for table in (self.residue, self.leaving, self.leased, self.drainable):
            table.pop(room.where, None)

    def with_room(self, kind: str, needed_bytes: int) -> list[tuple[int, RoomKey, Room]]:
        """Those in use on which so much is free, in no order that matters."""
        shared = self.shared[kind]
        return shared[bisect_left(shared, needed_bytes, key=_free_bytes) :]


def _first(pair: tuple[RoomKey, Room]) -> RoomKey:
    return pair[0]


def _first_two(entry: tuple[int, RoomKey, Room]) -> tuple[int, RoomKey]:
    return entry[0], entry[1]


def _free_bytes(entry: tuple[int, RoomKey, Room]) -> int:
    return entry[0]
