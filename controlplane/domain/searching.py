"""Finds the best candidate among thousands of cards without judging them all.

It looks at cards in the order of their keys and stops where no later one can be better: what it finds is
what judging everything would find, and a test holds it to that. It never chooses by another rule.
"""

from collections.abc import Iterable, Iterator
from heapq import heapify, heappop, heappush, heapreplace
from itertools import groupby
from typing import Final, Protocol

from controlplane.domain.found import Demand, Facts, Found
from controlplane.domain.holders import LONG_AGO_S
from controlplane.domain.judging import judge
from controlplane.domain.rooms import LONG_AGO, CardKey, Room, RoomKey
from controlplane.domain.scene import ANY, Scene

PATTERNS_LISTED: Final = 256
"""A profile that names at most so many cards has them looked up; of more, all cards are gone through."""

_Bound = tuple[bool, float, RoomKey]


def can_search(demand: Demand) -> bool:
    """Sets of cards, and the one card of a card's own URL, are judged one by one."""
    return demand.scope == ANY and all(p.cards == 1 for p in demand.model.profiles)


class Drains:
    """Cards with replicas that may be drained, those first whose replicas were used least recently.

    It is kept from one set of beacons to the next. A card's place in it is never later than it should be, and
    is looked at again before the card is told: a use moves it back, which costs nothing until somebody asks.
    Only what moves a card forward is looked for: requests that ended, a use a gateway takes back, a change of
    the card. It is sorted no further than somebody looked.
    """

    def __init__(self, scene: Scene) -> None:
        self._look(scene)
        self._change = scene.index.change
        self._busy: set[tuple[str, CardKey]] = set()
        self._sorted: list[tuple[_Bound, Room]] = []
        rooms = scene.index.book(scene.world).drainable
        self._bounds = {where: self._bound(room) for where, room in rooms.items()}
        self._heap = [(bound, where) for where, bound in self._bounds.items()]
        heapify(self._heap)

    def _look(self, scene: Scene) -> None:
        self._live = scene.live
        self._now = scene.now
        self._now_s = scene.now.timestamp()
        self._agents = scene.agents
        gateways = scene.live.gateways
        self._inflight = [g.inflight for g in gateways if g.inflight]
        self._ages = [(g.last_use_age_s, g.age_s) for g in gateways if g.last_use_at_s is None]
        self._uses = {g.gateway: g.last_use_at_s for g in gateways if g.last_use_at_s is not None}

    def _follow(self, scene: Scene) -> None:
        """Takes these beacons and this moment in place of the last."""
        if self._live is scene.live and self._now == scene.now:
            return
        ages, uses = self._ages, self._uses
        self._look(scene)
        if ages or self._ages or not uses.keys() <= self._uses.keys():
            self.__init__(scene)
            return
        places = scene.index.items_of
        moved: set[CardKey] = set()
        for gateway, before in uses.items():
            after = self._uses[gateway]
            if after is before:
                continue
            earlier = [m for m, at_s in before.items() if after.get(m, LONG_AGO_S) < at_s]
            for planned in (p for m in earlier for p in places.get(m, {}).values()):
                moved.update((planned.node, card) for card in planned.item.cards)
        for id_, where in tuple(self._busy):
            if not self._is_busy(where[0], id_):
                self._busy.discard((id_, where))
                moved.add(where)
        self._put(scene, moved)

    def _is_busy(self, node: str, id_: str) -> bool:
        for inflight in self._inflight:
            if inflight.get(id_, 0) > 0:
                return True
        agent = self._agents.get(node)
        told = agent.replicas.get(id_) if agent is not None and agent.replicas else None
        return told is not None and (told.counters.inflight or 0) > 0

    def _bound(self, room: Room) -> _Bound:
        """The least a candidate there can come to: what holders.py says of each replica, spelled out because
        thousands are asked for at once."""
        least_busy, least_used_s = True, float("inf")
        for id_, model, used_s in room.drainable:
            for uses in self._uses.values():
                at_s = uses.get(model, used_s)
                if at_s > used_s:
                    used_s = at_s
            for ages, beacon_age_s in self._ages:
                age_s = ages.get(model)
                if age_s is not None:
                    at_s = self._now_s - (age_s + beacon_age_s)
                    if at_s > used_s:
                        used_s = at_s
            is_busy = self._is_busy(room.node, id_)
            if is_busy:
                self._busy.add((id_, room.where))
            if is_busy == least_busy:
                if used_s < least_used_s:
                    least_used_s = used_s
            elif least_busy:
                least_busy, least_used_s = False, used_s
        return (least_busy, least_used_s, room.key)

    def _put(self, scene: Scene, moved: Iterable[CardKey]) -> None:
        """Puts these cards in anew, and back what was told already: one of them may come before it."""
        rooms = scene.index.book(scene.world).drainable
        for bound, room in self._sorted:
            heappush(self._heap, (bound, room.where))
        self._sorted.clear()
        for where in moved:
            room = rooms.get(where)
            if room is None:
                self._bounds.pop(where, None)
                continue
            bound = self._bounds[where] = self._bound(room)
            heappush(self._heap, (bound, where))
        if len(self._heap) > 2 * len(rooms) + 64:
            self._heap = [(bound, where) for where, bound in self._bounds.items()]
            heapify(self._heap)

    def in_order(self, scene: Scene) -> Iterator[tuple[_Bound, Room]]:
        """Cards with the least their candidate could come to: requests on its victims, their last use."""
        self._follow(scene)
        rooms = scene.index.book(scene.world).drainable
        changed = scene.index.changed_since(self._change)
        if changed is None:
            self.__init__(scene)
        elif changed:
            self._put(scene, set(changed))
            self._change = scene.index.change
        yield from self._sorted
        while self._heap:
            bound, where = self._heap[0]
            room = rooms.get(where)
            if room is None or self._bounds.get(where) is not bound:
                heappop(self._heap)
                continue
            exact = self._bound(room)
            if exact > bound:
                self._bounds[where] = exact
                heapreplace(self._heap, (exact, where))
                continue
            heappop(self._heap)
            self._sorted.append((bound, room))
            yield bound, room


def best(scene: Scene, facts: Facts, parked: list[Found], judged: list[Found]) -> Found | None:
    """The best candidate of rank 1 to 4, None when there is none. `judged` takes all that were looked at.

    1. A parked copy that can come back. 2. The first free card, 3. the first with room beside others, of those
    where the model did not fail last; only then the others of that rank. 4. Somebody has to leave.
    """
    judged.extend(parked)
    ranked = [f for f in parked if f.rank is not None and f.rank < 5]
    best_parked = min(ranked, key=lambda f: f.key, default=None)
    if best_parked is not None and best_parked.rank == 1:
        return best_parked
    for rank in (2, 3):
        found = _at_once(scene, facts, rank, judged)
        if found is not None:
            return found
    drained = _drained(scene, facts, judged)
    found_4 = [f for f in (best_parked, drained) if f is not None]
    return min(found_4, key=lambda f: f.key, default=None)


def _by_priority(facts: Facts) -> Iterator[list[int]]:
    """The places of the profiles in groups of equal priority, the highest first."""
    profiles = facts.demand.model.profiles
    places = sorted(range(len(profiles)), key=lambda n: (-profiles[n].priority, n))
    for _, group in groupby(places, key=lambda n: profiles[n].priority):
        yield list(group)


def _at_once(scene: Scene, facts: Facts, rank: int, judged: list[Found]) -> Found | None:
    """The best candidate of rank 2 or 3: cards come in the order of ties, so the first of a profile is its best."""
    failed: list[Found] = []
    for group in _by_priority(facts):
        firsts: list[Found] = []
        for place in group:
            for room in _rooms_at_once(scene, facts, place, rank):
                if room.where in facts.claimed:
                    continue
                found = judge(scene, facts, place, room)
                judged.append(found)
                if found.rank != rank:
                    continue
                if found.parts[0].failed_before:
                    failed.append(found)
                else:
                    firsts.append(found)
                    break
        if firsts:
            return min(firsts, key=lambda f: f.key)
    return min(failed, key=lambda f: f.key, default=None)


def _rooms_at_once(scene: Scene, facts: Facts, place: int, rank: int) -> Iterable[Room]:
    profile = facts.demand.model.profiles[place]
    book = scene.index.book(scene.world)
    kinds = [kind for kind in ("cpu", "gpu") if kind in profile.card]
    named = scene.index.matching(profile.card)
    needed = facts.needed[place]
    if not kinds and len(named) <= PATTERNS_LISTED:
        rooms = [book.rooms[where] for where in named]
        rooms = [r for r in rooms if r.free_bytes >= needed[r.kind] and r.is_free == (rank == 2)]
        return sorted(rooms, key=lambda r: r.key)
    if len(named) > 0:
        kinds = ["cpu", "gpu"]
    if rank == 2:
        lists = [book.free[kind] for kind in kinds]
        return _merged(lists, needed)
    if profile.exclusive:
        return ()
    found = [entry for kind in kinds for entry in book.with_room(kind, needed[kind])]
    return _in_order([(key, room) for _, key, room in found])


def _in_order(found: list[tuple[RoomKey, Room]]) -> Iterator[Room]:
    """Nearly always the first will do: no more is sorted than is looked at."""
    heap = [(key, n) for n, (key, _) in enumerate(found)]
    heapify(heap)
    while heap:
        yield found[heappop(heap)[1]][1]


def _merged(lists: list[list[tuple[RoomKey, Room]]], needed: dict[str, int]) -> Iterator[Room]:
    """Free cards of one kind, or of both, in the order of ties."""
    if len(lists) == 1:
        for _, room in lists[0]:
            if room.free_bytes >= needed[room.kind]:
                yield room
        return
    both = sorted((pair for one in lists for pair in one), key=_key_of)
    for _, room in both:
        if room.free_bytes >= needed[room.kind]:
            yield room


def _key_of(pair: tuple[RoomKey, Room]) -> RoomKey:
    return pair[0]


def _drained(scene: Scene, facts: Facts, judged: list[Found]) -> Found | None:
    """The best candidate of rank 4, of those where the model did not fail last if there is one.

    a. Cards others are leaving for this very model come first of all; b. then those others are leaving, those
    where parked engines keep something, those with leases; c. last those with replicas to drain, by their last
    use.
    """
    book = scene.index.book(scene.world)
    name = facts.demand.model.name
    failed: list[Found] = []

    def one(place: int, room: Room, least: int) -> Found | None:
        if least < facts.needed[place][room.kind] or room.where in facts.claimed:
            return None
        found = judge(scene, facts, place, room)
        judged.append(found)
        if found.rank != 4:
            return None
        if found.parts[0].failed_before:
            failed.append(found)
            return None
        return found

    places = range(len(facts.demand.model.profiles))
    for_it = [room for room in book.leaving.values() if name in room.leaving_for]
    best = _least(one(p, room, room.reach_bytes) for room in for_it for p in places)
    if best is not None and not best.victims and not best.evicted:  # a
        return best
    leaving = _least(one(p, r, r.reach_bytes) for r in book.leaving.values() for p in places)
    best = _least((best, leaving))  # b
    if best is not None and not best.victims and not best.evicted:
        return best
    residue = _least(one(p, r, r.residue_bytes) for r in book.residue.values() for p in places)
    leased = _least(one(p, r, r.reach_bytes) for r in book.leased.values() for p in places)
    best = _least((best, residue, leased))
    drains = scene.index.drains
    if not isinstance(drains, Drains):
        drains = scene.index.drains = Drains(scene)
    others_wait = len(facts.claimed) >= len(book.drainable)
    if others_wait and all(where in facts.claimed for where in book.drainable):
        return best or min(failed, key=lambda f: f.key, default=None)
    for group in _by_priority(facts):  # c
        found = _first_drained(scene, drains, group, one)
        best = _least((best, found))
    if best is None:
        return min(failed, key=lambda f: f.key, default=None)
    return best


def _least(found: Iterable[Found | None]) -> Found | None:
    return min((f for f in found if f is not None), key=lambda f: f.key, default=None)


class _Judge(Protocol):
    def __call__(self, place: int, room: Room, least: int, /) -> Found | None: ...


def _first_drained(scene: Scene, drains: Drains, group: list[int], one: _Judge) -> Found | None:
    best: Found | None = None
    bound: _Bound = (True, float("inf"), (0, LONG_AGO, "", ""))
    for least, room in drains.in_order(scene):
        if best is not None and least > bound:
            break
        for place in group:
            found = one(place, room, room.reach_bytes)
            if found is None or (best is not None and best.key <= found.key):
                continue
            best = found
            if found.evicted or not found.victims:
                continue
            used_at = max(v.used_at_s for v in found.victims)
            bound = (any(v.has_requests for v in found.victims), used_at, room.key)
    return best
