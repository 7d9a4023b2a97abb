"""Settles a node's cards: which leases and claims are over, who gets what he waits for, and who leaves for whom.

Level-triggered: it reads how everything stands and says what has to change; settling twice changes nothing
more. It carries out nothing and measures nothing; whoever is to leave is named, not told.
"""

from collections.abc import Iterable, Mapping
from collections.abc import Set as AbstractSet
from datetime import UTC, datetime

from msgspec import Struct
from msgspec.structs import replace

from nodeagent.domain import leases
from nodeagent.domain.held import Held
from nodeagent.domain.line import Change, dequeue, detach, end_claim, grant, line, vm_id
from schemas.card import (
    Card,
    CardDraining,
    CardQueued,
    CardVmAttached,
    Lease,
    ProcessRef,
    Waiter,
)
from schemas.cardstate import is_kept, kept_by
from schemas.plan import Stop, StopReason
from schemas.replica import TERMINAL_PHASES
from schemas.settings import NodeagentSettings

DRAINABLE: frozenset[str] = frozenset({"ready", "draining"})
"""Phases of replicas that leave for an interactive waiter: never one that is still starting."""

_EVER = datetime(1970, 1, 1, tzinfo=UTC)


class Facts(Struct, frozen=True, kw_only=True):
    """What is known of the node beside its cards and replicas.

    `requests` are those running on each replica, `used_at` when each was in use last, as far as known.
    `measured` is the use of a card by holder, `ended` are processes known to be gone.
    """

    settings: NodeagentSettings = NodeagentSettings()
    requests: Mapping[str, int] = {}
    used_at: Mapping[str, datetime] = {}
    measured: Mapping[str, int] = {}
    ended: AbstractSet[ProcessRef] = frozenset()


class Settled(Struct, frozen=True, kw_only=True):
    """`batches` are changes in order; those of one batch become true together or not at all.

    `wishes` are this agent's own stops, by replica: they hold for as long as they are named.
    """

    batches: tuple[tuple[Change, ...], ...]
    wishes: Mapping[str, Stop]


def settle(
    cards: Mapping[str, Card], held: Mapping[str, Held], facts: Facts, now: datetime
) -> Settled:
    """What has to change on these cards now. In this order, until nothing changes any more:

    1. named leases end by their time or with their process.
    2. claims end with their process.
    3. whoever waited as long as he would, whose process ended, or whom nobody knows, leaves the line.
    4. a VM that did not get its card in time does without.
    5. a VM and claims: whoever may not stay beside them leaves.
    6. a VM has its card once nobody is left there.
    7. the line, in order: granted, or those in the way leave, or it waits behind another.
    """
    settling = _Settling(cards, held, facts, now)
    # What one waiter is granted or drains changes what the next one sees, and the one before him too.
    for _ in range(2 * len(cards) + 2 * sum(len(card.waiters) for card in cards.values()) + 4):
        if not settling.once():
            break
    return Settled(batches=tuple(settling.batches), wishes=settling.wishes)


class _Settling:
    """One run of `settle`: the cards as they are so far, and what was said to get there."""

    def __init__(
        self, cards: Mapping[str, Card], held: Mapping[str, Held], facts: Facts, now: datetime
    ) -> None:
        self.cards = dict(cards)
        self.held = held
        self.facts = facts
        self.now = now
        self.batches: list[tuple[Change, ...]] = []
        self.wishes: dict[str, Stop] = {}

    def once(self) -> bool:
        """One pass over all cases; whether it changed anything."""
        before = len(self.batches)
        self.wishes = {}
        self._end_leases()
        self._end_claims()
        self._leave_line()
        self._give_up_vms()
        self._make_way_for_owners()
        self._attach_vms()
        self._serve_line()
        return len(self.batches) > before

    # Saying.

    def _say(self, *changes: Change) -> None:
        self.batches.append(changes)
        self.cards.update({change.card.id: change.card for change in changes})

    def _over(self, process: ProcessRef | None) -> bool:
        return process is not None and process in self.facts.ended

    def _past(self, at: datetime | None) -> bool:
        return at is not None and self.now >= at

    # 1 to 4: endings.

    def _end_leases(self) -> None:
        for lease in _each(x for card in self.cards.values() for x in card.leases):
            if lease.kind != "named" or lease.returning:
                continue
            if self._over(lease.process):
                self._end_lease(lease.holder, "process ended")
            elif self._past(lease.expires_at):
                self._end_lease(lease.holder, "expired")

    def _end_lease(self, holder: str, why: str) -> None:
        self._say(
            *(
                Change(card=leases.returning(card, holder, why), event=None, cause=holder)
                for card in self.cards.values()
                if leases.lease_of(card, holder) is not None
            )
        )

    def _end_claims(self) -> None:
        for card in tuple(self.cards.values()):
            for claim in card.claims:
                if self._over(claim.process):
                    self._say(end_claim(self.cards[card.id], claim, "process ended"))

    def _leave_line(self) -> None:
        for waiter in line(self.cards):
            if self._over(waiter.process):
                self._say(*dequeue(self.cards, waiter.id, "process ended"))
            elif self._past(waiter.expires_at):
                self._say(*dequeue(self.cards, waiter.id, "expired"))
            elif any(self._is_gone(name) for name in waiter.cards):
                self._say(*dequeue(self.cards, waiter.id, "no such card"))
            elif waiter.kind == "replica" and not self._is_for_somebody(waiter):
                self._say(*dequeue(self.cards, waiter.id, "withdrawn"))

    def _is_gone(self, name: str) -> bool:
        """Whether nothing of that card will be given any more: not in this node, or left alone."""
        card = self.cards.get(name)
        return card is None or card.memory_bytes <= 0

    def _is_for_somebody(self, waiter: Waiter) -> bool:
        """Whether an engine still waits in that place: one that was lost with a journal would stand there
        for ever."""
        one = self.held.get(waiter.id)
        return one is not None and one.replica.phase in ("waiting", "parked") and not one.ending

    def _give_up_vms(self) -> None:
        for card in tuple(self.cards.values()):
            vm = card.vm
            if vm is not None and not vm.attached and self._past(vm.expires_at):
                self._say(detach(card, "expired"))

    # 5 and 6: a VM and claims have the card at once.

    def _make_way_for_owners(self) -> None:
        for card in tuple(self.cards.values()):
            cause = cause_of(card)
            if cause is None:
                continue
            for lease in card.leases:
                if lease.kind == "named":
                    if not lease.pinned:
                        self._ask_to_leave((lease.holder,), cause.id)
                elif (wish := self._wish_of_owner(lease, cause)) is not None:
                    self._wish(lease.holder, wish)

    def _wish_of_owner(self, lease: Lease, cause: "Cause") -> Stop | None:
        one = self.held.get(lease.holder)
        if one is None or lease.returning:
            return None
        # After a VM only what refers to the device no more may stay: a sleeping engine still does.
        leaves_device = _way(one) == "checkpoint"
        if lease.kind == "parked" and (cause.reason != "vm" or leaves_device):
            return None
        may_park = lease.kind != "parked" and not cause.force
        if cause.reason == "vm":
            may_park = may_park and leaves_device
        return Stop(
            decision=cause.id,
            reason=cause.reason,
            decided_at=cause.since,
            drain_timeout_s=_bound(cause, self.facts.settings),
            force=cause.force,
            park="may" if may_park else "never",
        )

    def _wish(self, replica: str, stop: Stop) -> None:
        """The strongest wish counts: to end at once before to drain, else the first that was named."""
        known = self.wishes.get(replica)
        if known is None or (stop.force and not known.force):
            self.wishes[replica] = stop

    def _ask_to_leave(self, holders: tuple[str, ...], for_holder: str) -> None:
        """Marks named leases as leaving on every card they have. One without a process is over with that."""
        changes: list[Change] = []
        for card in self.cards.values():
            after, told = _leaving(card, frozenset(holders), for_holder)
            if told:
                event = CardDraining(holders=told, for_holder=for_holder)
                changes.append(Change(card=after, event=event, cause=for_holder))
        if changes:
            self._say(*changes)

    def _attach_vms(self) -> None:
        for card in tuple(self.cards.values()):
            vm = card.vm
            if vm is None or vm.attached or any(self._holds_device(x) for x in card.leases):
                continue
            after = replace(card, rev=card.rev + 1, vm=replace(vm, attached=True, expires_at=None))
            event = CardVmAttached(name=vm.name)
            self._say(Change(card=after, event=event, cause=vm_id(card.id, vm.name)))

    def _holds_device(self, lease: Lease) -> bool:
        one = self.held.get(lease.holder)
        return not (lease.kind == "parked" and one is not None and _way(one) == "checkpoint")

    # 7: the line.

    def _serve_line(self) -> None:
        taken: dict[str, str] = {}
        """Card -> the last so far who waits for it; the next one waits for him alone.

        Naming the first instead would change everybody behind him with every turn of the line.
        """
        for waiter in line(self.cards):
            ahead = tuple(sorted({taken[name] for name in waiter.cards if name in taken}))
            if ahead:
                self._wait_for(waiter, (*self._still_there(waiter), *ahead))
            elif not self._serve(waiter):
                continue
            for name in waiter.cards:
                taken[name] = waiter.id

    def _serve(self, waiter: Waiter) -> bool:
        """Grants, drains or waits; whether it is still in line."""
        gone: set[str] = set()
        coming: set[str] = set()
        blocked: set[str] = set()
        for name in waiter.cards:
            card = self.cards[name]
            if waiter.kind == "replica" and kept_by(card):
                self._say(*dequeue(self.cards, waiter.id, f"{name} is kept by {kept_by(card)}"))
                return False
            way = self._way_on(card, waiter, gone)
            gone |= way.victims
            coming |= way.coming
            blocked |= way.blocked
        if blocked and waiter.kind == "replica" and not coming:
            self._say(*dequeue(self.cards, waiter.id, "no room"))
            return False
        if blocked:
            self._wait_for(waiter, (*coming, *blocked))
            return True
        if not gone and not coming:
            self._say(*grant(self.cards, waiter, self.now))
            return False
        for victim in sorted(gone):
            if victim in self.held:
                self._wish(victim, self._wish_of(waiter, victim))
        self._wait_for(waiter, (*coming, *gone), draining=frozenset(gone))
        return True

    def _way_on(self, card: Card, waiter: Waiter, gone: AbstractSet[str]) -> "_Way":
        """Who is in the way of `waiter` on one card, when those in `gone` leave anyway."""
        if card.vm is not None or card.claims:
            keepers = [claim.id for claim in card.claims]
            if card.vm is not None:
                keepers.append(vm_id(card.id, card.vm.name))
            return _Way(blocked=frozenset(keepers))
        card = leases.without(card, {waiter.id})
        here = {lease.holder for lease in card.leases}
        coming = {x.holder for x in card.leases if self._is_leaving(x)}
        coming |= gone & here
        if self._fits(card, waiter):
            return _Way()
        if self._fits(leases.without(card, coming), waiter):
            # Of those already on their way only the ones that matter are waited for.
            return _Way(coming=frozenset(coming))
        movable = [
            x for x in card.leases if x.holder not in coming and self._moves(card, x, waiter)
        ]
        victims: list[str] = []
        for lease in sorted(movable, key=lambda x: self._order(x, waiter)):
            victims.append(lease.holder)
            if self._fits(leases.without(card, {*coming, *victims}), waiter):
                break
        else:
            stay = here - coming
            stray = {f"pid {stowaway.pid}" for stowaway in card.stowaways if waiter.exclusive}
            nobody = frozenset({"nobody"}) if not stay and not stray else frozenset[str]()
            return _Way(coming=frozenset(coming), blocked=frozenset(stay | stray) | nobody)
        for name in tuple(victims):
            rest = [x for x in victims if x != name]
            if self._fits(leases.without(card, {*coming, *rest}), waiter):
                victims = rest
        return _Way(coming=frozenset(coming), victims=frozenset(victims))

    def _fits(self, card: Card, waiter: Waiter) -> bool:
        memory = 0 if waiter.exclusive and waiter.kind == "named" else waiter.memory_bytes
        return not leases.lacks(card, memory, self.facts.measured, exclusive=waiter.exclusive)

    def _is_leaving(self, lease: Lease) -> bool:
        one = self.held.get(lease.holder)
        return lease.returning or bool(lease.leaving) or (one is not None and one.ending)

    def _moves(self, card: Card, lease: Lease, waiter: Waiter) -> bool:
        """Whether a lease may be made to leave for this waiter."""
        if waiter.kind == "replica":
            if lease.kind == "parked":
                return card.kind == "cpu" and lease.holder in leases.copies(card, self.held)
            named = lease.kind == "named" and lease.holder in waiter.waiting_for
            return named and not is_kept(lease, waiter.priority)
        if waiter.priority == "batch":
            return False
        if lease.kind == "named":
            return not is_kept(lease, waiter.priority)
        one = self.held.get(lease.holder)
        if one is None or one.replica.phase in TERMINAL_PHASES:
            return False
        if lease.kind == "parked":
            return not waiter.exclusive and lease.holder in leases.copies(card, self.held)
        return waiter.priority != "interactive" or one.replica.phase in DRAINABLE

    def _order(self, lease: Lease, waiter: Waiter) -> tuple[bool, int, datetime, str]:
        """Who leaves first: whoever was asked already, then by requests running, last use, id."""
        facts = self.facts
        one = self.held.get(lease.holder)
        ready_at = one.replica.ready_at if one is not None else None
        used_at = max(facts.used_at.get(lease.holder) or ready_at or lease.since, ready_at or _EVER)
        if lease.kind == "parked":
            used_at = lease.since
        asked = lease.holder in waiter.waiting_for
        return (not asked, min(facts.requests.get(lease.holder, 0), 1), used_at, lease.holder)

    def _wish_of(self, waiter: Waiter, victim: str) -> Stop:
        settings = self.facts.settings
        urgent = waiter.priority in ("hold", "foreground")
        one = self.held[victim]
        ram = waiter.kind == "replica"
        return Stop(
            decision=waiter.id,
            reason="ram" if ram else "lease",
            decided_at=waiter.since,
            drain_timeout_s=(
                settings.foreground_drain_s if urgent else settings.interactive_drain_s
            ),
            park="never" if one.replica.phase == "parked" else "may",
        )

    def _still_there(self, waiter: Waiter) -> tuple[str, ...]:
        """Of those it waited for, who still has something on its cards."""
        there = {x.holder for name in waiter.cards for x in self.cards[name].leases}
        return tuple(x for x in waiter.waiting_for if x in there)

    def _wait_for(
        self, waiter: Waiter, names: Iterable[str], *, draining: frozenset[str] = frozenset()
    ) -> None:
        """Writes down who it waits for, on all its cards, and asks named leases among `draining` to leave."""
        waiting_for = tuple(sorted(set(names)))
        changes: dict[str, Change] = {}
        for card in self.cards.values():
            after, told = _leaving(card, draining, waiter.id)
            mine = leases.waiter_of(card, waiter.id)
            if mine is not None:
                new = (draining & {x.holder for x in card.leases}) - set(mine.waiting_for)
                told = tuple(sorted({*told, *new}))
                if mine.waiting_for != waiting_for:
                    after = replace(
                        after,
                        waiters=tuple(
                            replace(x, waiting_for=waiting_for) if x.id == waiter.id else x
                            for x in after.waiters
                        ),
                    )
            if after == card:
                continue
            event = (
                CardDraining(holders=told, for_holder=waiter.id)
                if told
                else CardQueued(waiter=waiter.id, waiting_for=waiting_for)
            )
            changes[card.id] = Change(card=after, event=event, cause=waiter.id)
        if changes:
            self._say(*changes.values())


class _Way(Struct, frozen=True, kw_only=True):
    """On one card: who leaves already, who would have to, and who stays whatever happens."""

    coming: frozenset[str] = frozenset()
    victims: frozenset[str] = frozenset()
    blocked: frozenset[str] = frozenset()


class Cause(Struct, frozen=True, kw_only=True):
    """The VM or claim that has a card: its id, and how it makes others leave."""

    id: str
    reason: StopReason
    since: datetime
    force: bool = False


def cause_of(card: Card) -> Cause | None:
    """A game before a VM before an app: what ends others soonest counts."""
    games = [claim for claim in card.claims if claim.kind == "game"]
    if games:
        return Cause(id=games[0].id, reason="claim", since=games[0].since, force=True)
    if card.vm is not None:
        return Cause(id=vm_id(card.id, card.vm.name), reason="vm", since=card.vm.since)
    if card.claims:
        return Cause(id=card.claims[0].id, reason="claim", since=card.claims[0].since)
    return None


def _bound(cause: Cause, settings: NodeagentSettings) -> float:
    if cause.reason == "vm":
        return settings.interactive_drain_s
    return 0.0 if cause.force else settings.app_drain_s


def _way(one: Held) -> str:
    """How a parked engine was parked, else how this one would be if its profile says so."""
    if one.replica.park_way:
        return one.replica.park_way
    parking = one.launch.parking if one.launch is not None else None
    return parking.way if parking is not None else ""


def _leaving(card: Card, holders: frozenset[str], for_holder: str) -> tuple[Card, tuple[str, ...]]:
    """The card with those named leases asked to leave, and which of them were not before."""
    told: list[str] = []
    after: list[Lease] = []
    for lease in card.leases:
        asked = lease.leaving or lease.returning or lease.kind != "named"
        if lease.holder not in holders or asked:
            after.append(lease)
            continue
        told.append(lease.holder)
        lease = replace(lease, leaving=for_holder)
        if lease.process is None:
            lease = replace(lease, returning=True, why="drained")
        after.append(lease)
    if not told:
        return card, ()
    return replace(card, leases=tuple(after)), tuple(sorted(told))


def _each(found: Iterable[Lease]) -> list[Lease]:
    """One of each holder's leases, by holder."""
    return [x for _, x in sorted({lease.holder: lease for lease in found}.items())]
