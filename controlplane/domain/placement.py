"""Chooses profile and cards for one start, or gives the reasons against every candidate.

It reads and never reserves: the caller writes the plan item in the decision that follows, and asks again
after every change. The order of nodes in the world never matters.
"""

from collections import Counter
from collections.abc import Iterator
from datetime import datetime
from heapq import nsmallest
from typing import Final

from msgspec import Struct
from msgspec.structs import replace

from controlplane.domain import crowds, memory, searching
from controlplane.domain.crowds import Outlook, counted, outlook_of
from controlplane.domain.judging import (
    Demand,
    Facts,
    Found,
    facts_of,
    is_heard,
    judge,
    judge_parked,
    judge_set,
    node_problem,
    unsuited,
)
from controlplane.domain.rooms import CardKey, Planned
from controlplane.domain.scene import ANY, Scene, is_in_scope
from schemas.cardnames import readings
from schemas.model import Model, Profile
from schemas.placement import Candidate, PlacementReport

POLICY_VERSION: Final = 2
MISSES_KEPT: Final = 8

JUDGED_AT_ONCE: Final = 64
"""Up to so many candidates are all judged and counted in the report; of more only as many as decide."""

__all__ = [
    "Claims",
    "Demand",
    "NoNode",
    "NoRoom",
    "Placed",
    "Verdict",
    "Wait",
    "candidates",
    "cards_possible",
    "place",
    "sentence",
]


class Placed(Struct, frozen=True, kw_only=True):
    """Room now, at rank 1 to 3; or at rank 4 when only leases have to leave, which the agent asks to.

    `resume` is the parked replica to bring back instead of a start, `evict` are those leases' ids.
    `memory_bytes` is per card.
    """

    profile: Profile
    node: str
    cards: tuple[str, ...]
    kind: str
    memory_bytes: int
    rank: int
    card_revs: dict[str, int]
    report: PlacementReport
    resume: Planned | None = None
    evict: tuple[str, ...] = ()
    waiting_for: tuple[str, ...] = ()

    @property
    def card(self) -> str:
        """The first of its cards, or the only one."""
        return self.cards[0]

    @property
    def places(self) -> frozenset[CardKey]:
        return frozenset((self.node, card) for card in self.cards)


class Wait(Struct, frozen=True, kw_only=True):
    """Room when `victims` (to stop now) and `waiting_for` (replicas, leases, claims, the VM) are gone.

    `claimed` are the cards later demands must leave alone; `look_at` when time alone may help. `kept`:
    every card it could have is kept by a VM, a claim, a lease that stays or a process without one.
    """

    victims: tuple[Planned, ...]
    waiting_for: tuple[str, ...]
    claimed: frozenset[CardKey]
    report: PlacementReport
    look_at: datetime | None = None
    kept: bool = False
    is_settled: bool = False
    """Its cards are being left for it: nothing but room at once, or another card left for it, is better."""


class NoRoom(Struct, frozen=True, kw_only=True):
    """Fits on no reachable card, even when emptied."""

    report: PlacementReport


class NoNode(Struct, frozen=True, kw_only=True):
    """Nothing can be placed at all now: no node that is heard, or placement is frozen."""

    reason: str


Verdict = Placed | Wait | NoRoom | NoNode


class Claims:
    """The cards that earlier demands wait for. `parts` tells two of them apart without looking at every card."""

    __slots__ = ("_all", "_known", "parts")

    def __init__(self, *parts: frozenset[CardKey]) -> None:
        self._known: set[int] = set()
        self.parts: tuple[frozenset[CardKey], ...] = ()
        self._all: frozenset[CardKey] | None = None
        for part in parts:
            self.add(part)

    def add(self, part: frozenset[CardKey]) -> None:
        # The same cards are claimed by many: they name one set (index.one_of).
        if part and id(part) not in self._known:
            self._known.add(id(part))
            self.parts = (*self.parts, part)
            self._all = None

    @property
    def all(self) -> frozenset[CardKey]:
        """Made when it is asked for: those who wait already are told apart by the parts."""
        if self._all is None:
            one = len(self.parts) == 1
            self._all = self.parts[0] if one else frozenset[CardKey]().union(*self.parts)
        return self._all


class _Known(Struct, kw_only=True):
    """A verdict that was told already, what it was judged on, and up to which change of a card it holds."""

    frozen: str
    wanted_at: datetime
    claimed: tuple[frozenset[CardKey], ...]
    verdict: Wait | NoRoom
    needed_bytes: dict[str, int]
    change: int


def place(scene: Scene, demand: Demand, claims: Claims | None = None) -> Verdict:
    """Where the next replica of `demand.model` goes: the first of `candidates`, in other words.

    1. Placement is frozen, or no node is heard: nothing is judged.
    2. A parked copy (rank 1), a free card (2) or room beside others (3) is taken.
    3. Otherwise holders are drained (rank 4): replicas are stopped first; leases are asked by the agent, for
       an item that is written at once.
    4. Otherwise the demand waits for who keeps its cards, or until those on them may go.
    5. Nothing fits, even emptied.

    `claims` are cards that demands before this one wait for. A wait that was told already and that no card
    that changed since could end is not judged again: many may wait, and every event makes the queue look.
    """
    claims = claims if claims is not None else Claims()
    activation = demand.activation
    if scene.frozen:  # 1
        return NoNode(reason=scene.frozen)
    is_new = activation is not None and (
        demand.fresh or activation.phase not in ("waiting", "ready")
    )
    key = (demand.model.name, demand.scope)
    scene.index.book(scene.world)
    known = scene.index.waits.get(key)
    if not is_new and isinstance(known, _Known) and _holds(scene, demand, claims, known):
        known.change = scene.index.change
        # It may be told only now: as of this moment, as whoever judges afresh would tell it.
        report = replace(known.verdict.report, position=scene.world.position)
        return replace(known.verdict, report=report)
    verdict = _place(scene, demand, claims)
    if isinstance(verdict, NoRoom) or (isinstance(verdict, Wait) and not verdict.victims):
        scene.index.waits[key] = _Known(
            frozen=scene.frozen,
            wanted_at=demand.wanted_at,
            claimed=claims.parts,
            verdict=verdict,
            needed_bytes=_least_needed(scene, demand.model),
            change=scene.index.change,
        )
    else:
        scene.index.waits.pop(key, None)
    return verdict


def _least_needed(scene: Scene, model: Model) -> dict[str, int]:
    known = scene.world.records.get(model.name)
    return {
        kind: min((memory.needed_bytes(p, kind, known) for p in model.profiles), default=0)
        for kind in ("cpu", "gpu")
    }


def _holds(scene: Scene, demand: Demand, claims: Claims, known: _Known) -> bool:
    """Whether a verdict still is what judging afresh would say: no card that changed since could matter.

    a. It fits nowhere: a card is larger now. b. Its card is being left for it: that card changed, or another
    has room at once or is left for it too; or, were its own not left for it, another could be had at all.
    c. It waits for what stays: a card could be had, or who keeps cards is another now.
    """
    # Sets that are the same object are equal at a glance.
    if known.wanted_at != demand.wanted_at or claims.parts != known.claimed:
        return False
    verdict = known.verdict
    if isinstance(verdict, Wait) and verdict.look_at is not None and verdict.look_at <= scene.now:
        return False
    rooms = scene.index.rooms_since(scene.world, known.change)
    if rooms is None:
        return False
    for room in rooms:
        needed = known.needed_bytes[room.kind]
        if room.total_bytes < needed:
            continue
        if isinstance(verdict, NoRoom):  # a
            return False
        if verdict.report.chosen is not None:  # b
            if room.where in verdict.claimed or room.free_bytes >= needed:
                return False
            if demand.model.name in room.leaving_for:
                return False
            if not verdict.is_settled and room.reach_bytes >= needed:
                return False
            continue
        is_kept = bool(room.kept) or room.total_bytes - room.staying_bytes < needed
        if room.reach_bytes >= needed or verdict.kept or is_kept:  # c
            return False
    return True


def candidates(scene: Scene, demand: Demand, claims: Claims | None = None) -> tuple[Candidate, ...]:
    """Every candidate with its rank or the reason against it, best first. `place` takes the first that ranks."""
    facts = facts_of(scene, demand, (claims or Claims()).all)
    found = sorted(_all(scene, facts), key=_ranking)
    return tuple(f.candidate() for f in found)


def _ranking(found: Found) -> tuple[object, ...]:
    return found.key if found.rank is not None else (9, *found.miss_key)


def _all(scene: Scene, facts: Facts) -> Iterator[Found]:
    """All candidates there are: parked copies, then each profile on each card, or set of them, of each node."""
    demand = facts.demand
    yield from _parked(scene, facts)
    world = scene.world
    book = scene.index.book(world)
    nodes = sorted(world.nodes)
    asked_for: set[CardKey] = set()
    if demand.scope != ANY:
        asked_for = {where for where in readings(demand.scope) if where in book.rooms}
        nodes = sorted({node for node, _ in asked_for})
    for place_, profile in enumerate(demand.model.profiles):
        for node in nodes:
            if profile.cards > 1:
                yield judge_set(scene, facts, place_, node)
                continue
            for where in scene.index.cards_at(node):
                if demand.scope == ANY or where in asked_for:
                    yield judge(scene, facts, place_, book.rooms[where])


def _parked(scene: Scene, facts: Facts) -> Iterator[Found]:
    demand = facts.demand
    for planned, hold in scene.holds_of(demand.model.name):
        if hold != "parked":
            continue
        if not is_in_scope(planned, demand.scope):
            continue
        found = judge_parked(scene, facts, planned)
        if found is not None:
            yield found


def _place(scene: Scene, demand: Demand, claims: Claims) -> Verdict:
    facts = facts_of(scene, demand, claims.all)
    judged: list[Found] = []
    whole: Outlook | None = None
    is_large = len(scene.index.book(scene.world).rooms) * len(demand.model.profiles)
    if is_large > JUDGED_AT_ONCE and searching.can_search(demand):
        parked = list(_parked(scene, facts))
        best = searching.best(scene, facts, parked, judged)
        if best is not None:
            return _verdict(scene, best, judged)
        whole = crowds.outlook(scene, facts, parked)
    if whole is None:
        whole = outlook_of(list(_all(scene, facts)))
    best = min((f for f in whole.found if f.rank is not None), key=lambda f: f.key, default=None)
    if best is not None and best.rank != 5:
        return _verdict(scene, best, whole.found)
    if not any(is_heard(scene, node) for node in scene.world.nodes):
        return NoNode(reason="no node is reachable")
    report = _report(scene, whole.found, None, whole.counts)
    if best is None:  # 5
        return NoRoom(report=report)
    return Wait(  # 4
        victims=(),
        waiting_for=best.waiting_for,
        claimed=scene.index.one_of(whole.claimed),
        report=report,
        look_at=whole.look_at,
        kept=whole.kept,
    )


def _verdict(scene: Scene, best: Found, judged: list[Found]) -> Placed | Wait:
    """What the best candidate of rank 1 to 4 comes to.

    Once somebody is leaving cards for this demand only those are claimed: the others stay open.
    """
    assert best.rank is not None
    report = _report(scene, judged, best)
    victims = best.victims
    if best.rank == 4 and (victims or best.leaving):
        return Wait(
            victims=tuple(v.planned for v in victims),
            waiting_for=best.waiting_for,
            claimed=scene.index.one_of(frozenset((best.node, card) for card in best.cards)),
            report=report,
            is_settled=best.is_settled,
        )
    return Placed(
        profile=best.profile,
        node=best.node,
        cards=best.cards,
        kind=best.parts[0].room.kind,
        memory_bytes=best.needed_bytes,
        rank=best.rank,
        card_revs={part.room.card: part.room.rev for part in best.parts},
        report=report,
        resume=best.resumes,
        evict=best.evicted,
        waiting_for=best.waiting_for,
    )


def cards_possible(scene: Scene, model: Model) -> int:
    """On how many cards of usable nodes the model might ever be started, whatever is on them."""
    known = scene.world.records.get(model.name)
    count = 0
    for node in scene.world.nodes:
        if node_problem(scene, node):
            continue
        for where in scene.index.cards_at(node):
            room = scene.index.room(scene.world, where)
            count += room is not None and any(
                not unsuited(scene, model, profile, room)
                and memory.needed_bytes(profile, room.kind, known) <= room.total_bytes
                for profile in model.profiles
            )
    return count


def _report(
    scene: Scene, judged: list[Found], best: Found | None, counts: Counter[str] | None = None
) -> PlacementReport:
    others = [f for f in judged if f is not best]
    misses = nsmallest(MISSES_KEPT, others, key=lambda f: f.miss_key)
    counts = counts if counts is not None else counted(judged)
    return PlacementReport(
        chosen=best.candidate() if best is not None else None,
        misses=tuple(f.candidate() for f in misses),
        counts=dict(sorted(counts.items())),
        position=scene.world.position,
        policy_version=POLICY_VERSION,
    )


def sentence(report: PlacementReport) -> str:
    """The reasons of a report for a person, in one line: of the card chosen, or of the nearest misses."""
    nearest = [report.chosen] if report.chosen is not None else report.misses
    reasons = [candidate.reason for candidate in nearest if candidate.reason]
    if not reasons:
        return "there is no card"
    return "; ".join(dict.fromkeys(reasons))
