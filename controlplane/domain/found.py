"""Holds what one candidate of a placement came to: its cards, its rank or the reason against it, and its order.

It judges nothing (judging.py) and chooses nothing (placement.py); the order is total.
"""

from collections.abc import Collection, Iterable
from datetime import datetime
from typing import Final

from msgspec import Struct

from controlplane.domain import holders
from controlplane.domain.holders import Draining, Victim
from controlplane.domain.rooms import LONG_AGO, CardKey, Planned, Room
from controlplane.domain.scene import ANY
from schemas.activation import Activation
from schemas.model import Model, Profile
from schemas.placement import Candidate
from schemas.record import Record

_NOTHING: Final = Draining()


class Demand(Struct, frozen=True, kw_only=True):
    """One replica more of a model. `wanted_at` is its place in the queue.

    `activation` is the demand's own; None when only `min` asks. `fresh`: the demand begins with the
    decision it is placed in.
    """

    model: Model
    wanted_at: datetime
    scope: str = ANY
    activation: Activation | None = None
    fresh: bool = False


class Facts(Struct, frozen=True, kw_only=True):
    """What is the same for all candidates of one demand."""

    demand: Demand
    waited_s: float
    known: Record | None
    refused: Collection[CardKey]
    parked_refused: Collection[str]
    """Parked replicas whose resume was refused, their cards being as they were."""
    claimed: Collection[CardKey]
    needed: tuple[dict[str, int], ...]
    """Of each profile, in the order of the entry: bytes on a card of each kind."""


class Part(Struct, frozen=True, kw_only=True):
    """One card of a candidate; `rank` None with the group of its reason, or ranked with what it costs."""

    room: Room
    rank: int | None = None
    group: str = ""
    reason: str = ""
    failed_before: bool = False
    draining: Draining = _NOTHING
    kept: bool = False


class Found(Struct, frozen=True, kw_only=True):
    """One candidate: the cards of `parts`, of which the worst gives the rank."""

    profile: Profile
    place: int
    """Of its profile in the entry."""
    node: str
    needed_bytes: int
    parts: tuple[Part, ...]
    rank: int | None = None
    group: str = ""
    reason: str = ""
    resumes: Planned | None = None
    kept: bool = False
    launches: str = ""
    """The model's name."""

    @property
    def cards(self) -> tuple[str, ...]:
        return tuple(part.room.card for part in self.parts)

    @property
    def victims(self) -> tuple[Victim, ...]:
        if len(self.parts) == 1:
            return self.parts[0].draining.victims
        found = {v.planned.item.replica: v for p in self.parts for v in p.draining.victims}
        return tuple(found.values())

    @property
    def evicted(self) -> tuple[str, ...]:
        """Ids of the leases that have to go."""
        return _once(holder.id for part in self.parts for holder in part.draining.evicted)

    @property
    def leaving(self) -> tuple[str, ...]:
        return _once(id_ for part in self.parts for id_ in part.draining.leaving)

    @property
    def waiting_for(self) -> tuple[str, ...]:
        """Who has to go first: of rank 4 those who will, of rank 5 those who do not."""
        if self.rank == 4:
            names = (h.name for part in self.parts for h in part.draining.evicted)
            ids = (v.planned.item.replica for v in self.victims)
            return _once((*self.leaving, *ids, *names))
        if self.rank == 5:
            return _once(name for part in self.parts for name in part.draining.keepers)
        return ()

    @property
    def key(self) -> tuple[object, ...]:
        """The total order:

        1. rank; cards that failed last come last in it;
        2. of kept ones those that are not kept for good;
        3. cards others are leaving already before those somebody would have to leave, and of them those
           left for this very model, then those left for nobody in particular;
        4. parked copies before starts; replicas to drain before leases; those without requests;
        5. profile priority, fewer cards, the victims used least recently;
        6. configuration order within the node, least recently given, node, card, place of the profile.
        """
        victims = self.victims
        evicted = self.evicted
        rooms = [part.room for part in self.parts]
        return (
            self.rank if self.rank is not None else 9,
            any(part.failed_before for part in self.parts),
            self.kept,
            bool(victims or evicted),
            self._left_for(),
            self.resumes is None,
            bool(evicted),
            any(v.has_requests for v in victims),
            -self.profile.priority,
            len(rooms),
            max((v.used_at_s for v in victims), default=holders.LONG_AGO_S),
            tuple(room.order for room in rooms),
            max((room.given_at or LONG_AGO for room in rooms), default=LONG_AGO),
            self.node,
            tuple(room.card for room in rooms),
            self.place,
            self.resumes.item.replica if self.resumes is not None else "",
        )

    def _left_for(self) -> int:
        """0 for the model itself or nobody leaves, 1 for nobody in particular, 2 for another model."""
        if self.rank != 4 or self.victims or self.evicted:
            return 0
        worst = 0
        for part in self.parts:
            if part.rank == 4 and self.launches not in part.room.leaving_for:
                worst = max(worst, 2 if part.room.leaving_for else 1)
        return worst

    @property
    def is_settled(self) -> bool:
        """Whether its cards did not fail last and are being left for this very model."""
        return self.key[1:5] == (False, False, False, 0)

    @property
    def miss_key(self) -> tuple[object, ...]:
        """The nearest misses first: those that ranked, then those short of the least memory.

        Of what is excluded nothing counts that changes with use: a refusal is not told again for that.
        """
        if self.rank is not None:
            free = min((part.room.free_bytes for part in self.parts), default=0)
            return (False, self.group != "memory", self.needed_bytes - free, *self.key[8:])
        rooms = [part.room for part in self.parts]
        return (
            True,
            self.group != "memory",
            self.needed_bytes - min((room.total_bytes for room in rooms), default=0),
            -self.profile.priority,
            tuple(room.order for room in rooms),
            self.node,
            self.cards,
            self.place,
        )

    def candidate(self) -> Candidate:
        # Of a set whose other cards are kept nobody is stopped: it would be for nothing.
        victims = self.victims if self.rank == 4 else ()
        return Candidate(
            profile=self.profile.name,
            node=self.node,
            cards=self.cards,
            rank=self.rank,
            reason=self.reason,
            victims=tuple(v.planned.item.replica for v in victims),
            resumes=self.resumes.item.replica if self.resumes is not None else "",
            waiting_for=self.waiting_for,
        )


def _once(names: Iterable[str]) -> tuple[str, ...]:
    return tuple(dict.fromkeys(names))


def combined(
    facts: Facts,
    profile: Profile,
    place: int,
    node: str,
    needed: int,
    parts: list[Part],
    resumes: Planned | None = None,
) -> Found:
    """A candidate of several cards: its rank, its reason and what keeps it are those of the worst."""
    worst = max(parts, key=lambda p: (p.rank if p.rank is not None else 9, p.kept))
    reason = worst.reason
    if resumes is not None and worst.rank is not None:
        reason = f"{resumes.item.replica} is parked, {reason}"
    return Found(
        profile=profile,
        place=place,
        node=node,
        needed_bytes=needed,
        parts=tuple(parts),
        rank=worst.rank,
        group=worst.group,
        reason=reason,
        resumes=resumes,
        kept=worst.rank == 5 and any(part.kept for part in parts),
        launches=facts.demand.model.name,
    )
