"""Says what a demand comes to that no card has a place for, without judging thousands of cards one by one.

Cards of one kind on nodes of one sort differ for a demand only in numbers: they are counted, and only those
told by name are judged. It must say what judging all would say, and a test holds it to that.
"""

from bisect import bisect_left, insort
from collections import Counter
from collections.abc import Iterable
from datetime import datetime
from heapq import nsmallest
from typing import Final

from msgspec import Struct

from controlplane.domain.judging import Facts, Found, judge, node_problem, unsuited
from controlplane.domain.rooms import CardKey, Room, RoomKey
from controlplane.domain.scene import Scene

PATTERNS_LISTED: Final = 256
"""A profile that names at most so many cards has them judged one by one; of more, all cards are."""

TOLD: Final = 8
"""Cards of a crowd that are judged for their reasons."""

_MARGIN_S: Final = 1.0

_Engines = frozenset[tuple[str, bool]]
"""What a node can run, by name, and whether it loads adapters."""

_Sort = tuple[str, bool, bool, bool, _Engines, bool]


class Outlook(Struct, frozen=True, kw_only=True):
    """What all candidates together come to. `found` are those judged, with the best of them among them;
    `counts` are all there are, by the group of the reason.

    `claimed` are the cards to be left alone for the demand, `kept` whether every one it could have is kept;
    `look_at` is when time alone may help.
    """

    found: list[Found]
    counts: Counter[str]
    claimed: frozenset[CardKey]
    look_at: datetime | None
    kept: bool


class Crowd:
    """Cards of one sort, in the order of ties and by what is free."""

    def __init__(self, sort: _Sort) -> None:
        self.sort = sort
        self.by_key: list[tuple[RoomKey, Room]] = []
        self.by_free: list[tuple[int, RoomKey, Room]] = []
        self._all: frozenset[CardKey] | None = None
        self._least = (0, 0, 0)

    def put(self, room: Room) -> None:
        insort(self.by_key, (room.key, room), key=_first)
        insort(self.by_free, (-room.free_bytes, room.key, room), key=_first_two)
        self._all = None

    def take(self, room: Room) -> None:
        del self.by_key[bisect_left(self.by_key, room.key, key=_first)]
        del self.by_free[bisect_left(self.by_free, (-room.free_bytes, room.key), key=_first_two)]
        self._all = None

    def fill(self, rooms: list[Room]) -> None:
        self.by_key = sorted(((room.key, room) for room in rooms), key=_first)
        self.by_free = sorted(((-r.free_bytes, r.key, r) for r in rooms), key=_first_two)
        self._all = None

    @property
    def all(self) -> frozenset[CardKey]:
        if self._all is None:
            rooms = [room for _, room in self.by_key]
            self._all = frozenset(room.where for room in rooms)
            self._least = (
                min((room.total_bytes for room in rooms), default=0),
                min((room.most_bytes for room in rooms), default=0),
                min((room.most_alone_bytes for room in rooms), default=0),
            )
        return self._all

    def split(
        self, needed: int, alone: bool
    ) -> tuple[frozenset[CardKey], frozenset[CardKey], frozenset[CardKey]]:
        """Those that could be had if all left who may ever be asked to, those too small, those kept."""
        everybody, nobody = self.all, frozenset[CardKey]()
        total, shared, by_itself = self._least
        is_kept = self.sort[3]
        if needed <= total and (is_kept or needed <= (by_itself if alone else shared)):
            return (nobody, nobody, everybody) if is_kept else (everybody, nobody, nobody)
        rooms = [room for _, room in self.by_key]
        small = frozenset(room.where for room in rooms if room.total_bytes < needed)
        if is_kept:
            return nobody, small, everybody - small
        within = frozenset(
            room.where
            for room in rooms
            if (room.most_alone_bytes if alone else room.most_bytes) >= needed
        )
        return within - small, small, everybody - within - small


class Crowds:
    """All cards of a yard by their sort; a card that changed moves, and none is looked at twice for nothing."""

    def __init__(self, scene: Scene) -> None:
        book = scene.index.book(scene.world)
        self._change = scene.index.change
        self._faults = _faults(scene)
        self._unwritable: set[str] = set()
        self._sorts: dict[str, tuple[bool, _Engines, bool]] = {}
        self.rooms: dict[CardKey, tuple[Crowd, Room]] = {}
        self.crowds: dict[_Sort, Crowd] = {}
        members: dict[_Sort, list[Room]] = {}
        for room in book.rooms.values():
            members.setdefault(self._sort(scene, room), []).append(room)
        for sort, rooms in members.items():
            crowd = self.crowds[sort] = Crowd(sort)
            crowd.fill(rooms)
            self.rooms.update((room.where, (crowd, room)) for room in rooms)
        self._ready = sorted((room.ready_at_s, room.where) for room in book.rooms.values())

    def _sort(self, scene: Scene, room: Room) -> _Sort:
        of_node = self._sorts.get(room.node)
        if of_node is None:
            node = scene.world.nodes[room.node]
            if not scene.world.head("plan", room.node).writable:
                self._unwritable.add(room.node)
            of_node = self._sorts[room.node] = (
                not node_problem(scene, room.node),
                frozenset((engine.name, engine.adapters) for engine in node.engines),
                node.allow_commands,
            )
        is_usable, engines, commands = of_node
        return (room.kind, is_usable, room.mig, bool(room.kept), engines, commands)

    def follow(self, scene: Scene) -> None:
        """Takes in the cards that changed since."""
        book = scene.index.book(scene.world)
        changed = scene.index.changed_since(self._change)
        again = any(scene.world.head("plan", node).writable for node in self._unwritable)
        if changed is None or again or self._faults != _faults(scene):
            self.__init__(scene)
            return
        self._change = scene.index.change
        places = set(changed)
        for node in {node for node, _ in places}:
            self._sorts.pop(node, None)
        for where in places:
            room = book.rooms.get(where)
            known = self.rooms.get(where)
            if known is not None:
                if (
                    known[1] is room
                    and room is not None
                    and self._sort(scene, room) == known[0].sort
                ):
                    continue
                known[0].take(known[1])
                del self._ready[bisect_left(self._ready, (known[1].ready_at_s, where))]
                del self.rooms[where]
            if room is not None:
                sort = self._sort(scene, room)
                crowd = self.crowds.setdefault(sort, Crowd(sort))
                crowd.put(room)
                self.rooms[where] = (crowd, room)
                insort(self._ready, (room.ready_at_s, where))

    def became_ready_since(self, at_s: float) -> Iterable[CardKey]:
        for ready_at_s, where in reversed(self._ready):
            if ready_at_s < at_s:
                return
            yield where


def _faults(scene: Scene) -> tuple[int, int]:
    return scene.world.broken_events, scene.world.unknown_events


def _first(pair: tuple[RoomKey, Room]) -> RoomKey:
    return pair[0]


def _first_two(entry: tuple[int, RoomKey, Room]) -> tuple[int, RoomKey]:
    return entry[0], entry[1]


def outlook(scene: Scene, facts: Facts, parked: list[Found]) -> Outlook | None:
    """What every candidate comes to, when none is of rank 1 to 4 (`parked` are those that come back); None when
    a profile names too many cards one by one."""
    profiles = facts.demand.model.profiles
    named = [frozenset(scene.index.matching(profile.card)) for profile in profiles]
    if any(len(cards) > PATTERNS_LISTED for cards in named):
        return None
    crowds = scene.index.crowds
    if not isinstance(crowds, Crowds):
        crowds = scene.index.crowds = Crowds(scene)
    crowds.follow(scene)
    special = _special(scene, facts, crowds)
    counts: Counter[str] = Counter()
    apart = list(parked)
    told: list[Found] = []
    claimed: list[frozenset[CardKey]] = []
    out: list[_Out] = []
    is_kept = True
    for place, cards in enumerate(named):
        here = {where for where in special | cards if where in crowds.rooms}
        apart.extend(judge(scene, facts, place, crowds.rooms[where][1]) for where in sorted(here))
        inside = Counter(crowds.rooms[where][0].sort for where in here)
        for crowd in crowds.crowds.values():
            count = len(crowd.by_key) - inside[crowd.sort]
            if count == 0:
                continue
            sample = next(room for _, room in crowd.by_key if room.where not in here)
            if not crowd.sort[1] or unsuited(scene, facts.demand.model, profiles[place], sample):
                group = "card" if crowd.sort[1] else "node"
                counts[group] += count
                out.append((place, True, crowd.all - here))
                continue
            had, small, kept = _split(facts, place, crowd)
            if here:
                had, small, kept = had - here, small - here, kept - here
            counts["memory"] += len(had) + len(small)
            counts["kept"] += len(kept)
            out.append((place, False, small))
            claimed.append(had)
            is_kept = is_kept and not had
            rooms = _told(crowd, had)
            if len(rooms) < TOLD:
                rooms += _told(crowd, kept)
            told.extend(judge(scene, facts, place, room) for room in rooms)
    if sum(f.rank is not None for f in (*apart, *told)) < TOLD:
        # The nearest of those it never runs on are told as well.
        rooms = [(p, far, crowds.rooms[where][1]) for p, far, cards in out for where in cards]
        near = nsmallest(TOLD, rooms, key=lambda one: _nearness(facts, *one))
        told.extend(judge(scene, facts, place, room) for place, _, room in near)
    whole = outlook_of([*apart, *told])
    most = max(claimed, key=len, default=whole.claimed)
    rest = [cards for cards in (whole.claimed, *claimed) if not _is_in(cards, most)]
    return Outlook(
        found=whole.found,
        counts=counts + counted(apart),
        # Many who wait claim the same: it is one set as long as that is true.
        claimed=most.union(*rest) if rest else most,
        look_at=whole.look_at,
        kept=is_kept and whole.kept,
    )


def _is_in(some: frozenset[CardKey], most: frozenset[CardKey]) -> bool:
    return some is most or some <= most


def outlook_of(found: list[Found]) -> Outlook:
    """The same of candidates that were all judged."""
    ranked = [f for f in found if f.rank is not None]
    looks = [p.draining.look_at for f in ranked for p in f.parts if p.draining.look_at is not None]
    return Outlook(
        found=found,
        counts=counted(found),
        claimed=frozenset(
            (part.room.node, part.room.card)
            for f in ranked
            # Of what is kept nothing is put aside: who keeps it may stay for hours.
            if f.group != "refused" and not f.kept
            for part in f.parts
        ),
        look_at=min(looks, default=None),
        kept=all(f.kept for f in ranked),
    )


def counted(found: Iterable[Found]) -> Counter[str]:
    return Counter(f.group for f in found if f.rank is None or f.rank == 5)


_Out = tuple[int, bool, frozenset[CardKey]]
"""Cards a profile never runs on: its place, whether for another reason than memory, and which."""


def _nearness(facts: Facts, place: int, is_far: bool, room: Room) -> tuple[object, ...]:
    """The order of misses (judging.Found.miss_key) of a card that is excluded."""
    short_bytes = facts.needed[place][room.kind] - room.total_bytes
    priority = facts.demand.model.profiles[place].priority
    return (is_far, short_bytes, -priority, room.order, room.node, room.card, place)


def _special(scene: Scene, facts: Facts, crowds: Crowds) -> set[CardKey]:
    """Cards whose verdict depends on more than their numbers: those this model is on, was refused or failed
    on, those with replicas whose protection ends by itself, those of nodes whose plan may be full."""
    index = scene.index
    models = {facts.demand.model.name, *index.held}
    special = {
        (planned.node, card)
        for name in models
        for planned in index.items_of.get(name, {}).values()
        for card in planned.item.cards
    }
    special.update(facts.refused)
    if facts.known is not None:
        special.update((f.node, f.card) for f in facts.known.failures)
    resident_s = scene.now.timestamp() - scene.settings.min_residency_s - _MARGIN_S
    special.update(crowds.became_ready_since(resident_s))
    special.update(where for node in index.long_plans for where in index.cards_at(node))
    return special


def _split(
    facts: Facts, place: int, crowd: Crowd
) -> tuple[frozenset[CardKey], frozenset[CardKey], frozenset[CardKey]]:
    kind = crowd.sort[0]
    had, small, kept = crowd.split(
        facts.needed[place][kind], facts.demand.model.profiles[place].exclusive
    )
    if kept and not crowd.sort[3]:
        # What others wait for is not judged any further.
        waited_for = kept & frozenset(facts.claimed)
        had, kept = had | waited_for, kept - waited_for
    return had, small, kept


def _told(crowd: Crowd, of: frozenset[CardKey]) -> list[Room]:
    """The first of these in the order of ties, which is the best of them, and those with the most free."""
    first = next((room for _, room in crowd.by_key if room.where in of), None)
    told = [] if first is None else [first]
    for _, _, room in crowd.by_free:
        if len(told) > TOLD:
            break
        if room.where in of and room is not first:
            told.append(room)
    return told
