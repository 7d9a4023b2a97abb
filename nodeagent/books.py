"""The agent's books: what it holds, its cards and ports, kept the same in memory, journal and report.

Every change is one synchronous step, so a decision and what it reserves are never apart. Each replica
event is checked against the table of transitions. It decides nothing and does no I/O of its own.
"""

import asyncio
from collections.abc import Callable
from datetime import datetime

from msgspec.structs import replace

from nodeagent.domain import leases, ports
from nodeagent.domain.assignments import Held, Observed
from nodeagent.domain.lifecycle import next_phase
from nodeagent.journal import (
    Change,
    DropEnded,
    DropHeld,
    Entry,
    Journal,
    KnownPlan,
    Memory,
    PutCard,
    PutHeld,
    PutPlan,
    PutPorts,
    Queue,
)
from nodeagent.ownlog import card_subject, replica_subject
from nodeagent.reporter import Reporter
from schemas.card import Card, CardEvent, CardLeased, CardMeasured, CardReleased
from schemas.messages import tag_of
from schemas.node import CardInfo
from schemas.plan import Plan
from schemas.replica import (
    TERMINAL_PHASES,
    Replica,
    ReplicaDeleted,
    ReplicaDraining,
    ReplicaEvent,
    ReplicaFailed,
    ReplicaFetching,
    ReplicaParked,
    ReplicaReady,
    ReplicaRefused,
    ReplicaStarting,
    ReplicaStopFailed,
    ReplicaStopped,
    ReplicaWaiting,
    ReplicaWithdrawn,
)


def event_of(held: Held) -> ReplicaEvent:
    """The event that tells of the phase a replica is in."""
    replica = held.replica
    match replica.phase:
        case "waiting":
            return ReplicaWaiting(waiting_for=replica.reason)
        case "refused":
            return ReplicaRefused(card_revs=replica.card_revs)
        case "fetching":
            return ReplicaFetching(source=held.launch.source if held.launch else "")
        case "starting":
            return ReplicaStarting(port=held.port)
        case "ready":
            return ReplicaReady(load_s=replica.load_s)
        case "draining":
            return ReplicaDraining(decision=replica.stop_decision or "")
        case "parked":
            return ReplicaParked()
        case "withdrawn":
            return ReplicaWithdrawn()
        case "stopped":
            return ReplicaStopped(exit_status=replica.exit_status)
        case "stop_failed":
            return ReplicaStopFailed()
        case "failed":
            return ReplicaFailed(code=replica.code or "lost", exit_status=replica.exit_status)


class Books:
    """One owner, one event loop. `now` gives the wall clock time events carry."""

    def __init__(
        self,
        *,
        node: str,
        prefix: str,
        memory: Memory,
        book: ports.PortBook,
        journal: Journal,
        reporter: Reporter,
        now: Callable[[], datetime],
    ) -> None:
        self.node = node
        self.held: dict[str, Held] = dict(memory.held)
        self.cards: dict[str, Card] = dict(memory.cards)
        self.used: set[str] = set(memory.used)
        self.ended: dict[str, datetime] = dict(memory.ended)
        self.known: KnownPlan | None = memory.plan
        self._prefix = prefix
        self.knows_ports = memory.ports is not None
        self._ports = memory.ports or book
        # The journal remembers what was given; the range itself is the configuration's.
        self._ports = replace(self._ports, first=book.first, last=book.last, rest_s=book.rest_s)
        self._journal = journal
        self._reporter = reporter
        self._now = now
        self._next_n = max((entry.n for entry in memory.unsent), default=0) + 1
        for entry in memory.unsent:
            reporter.put(entry, None)

    def observed(self, engines: frozenset[str], allow_commands: bool) -> Observed:
        return Observed(
            held=self.held,
            cards=self.cards,
            used=self.used,
            unreported=self._reporter.unreported(),
            engines=engines,
            allow_commands=allow_commands,
        )

    def plan_read(self, plan: Plan, seq: int) -> None:
        """Remembers the plan, to act on it when the next start finds no log."""
        self.known = KnownPlan(plan=plan, seq=seq)
        self._journal.write(PutPlan(known=self.known))

    def cards_told(self, told: dict[str, Card]) -> None:
        """Takes over what the log knows better of the cards than the journal."""
        for name, card in told.items():
            self.cards[name] = leases.newer(self.cards.get(name), card)

    def set_up_cards(self, infos: tuple[CardInfo, ...]) -> None:
        """Makes the cards those of the inventory. A card that is gone but leased is kept until it is free."""
        kept = {info.id: leases.conform(self.cards.get(info.id), info, self.node) for info in infos}
        for name, card in self.cards.items():
            if name not in kept and card.leases:
                kept[name] = replace(card, memory_bytes=0)
        self.cards = kept
        self._journal.write(*(PutCard(card=card) for card in kept.values()))

    def say(self, held: Held, event: ReplicaEvent, *, reason: str = "") -> "asyncio.Future[None]":
        """Makes `held` the truth, with the phase `event` leads to, and reports it.

        Raises NotAllowed when the event cannot follow. The future tells when it is durable here.
        """
        name = held.replica.id
        before = self.held.get(name)
        phase = next_phase(before.replica.phase if before else None, tag_of(event))
        now = self._now()
        since = now if before is None or before.replica.phase != phase else before.replica.since
        replica = replace(
            held.replica,
            phase=phase,
            since=since,
            reason=reason,
            epoch=self._reporter.epoch,
            card_kind=self._card_kind(held.replica.cards),
        )
        after = replace(held, replica=replica)
        self.held[name] = after
        cause = held.stop.decision if held.stop is not None else held.cause or None
        return self._write(
            [PutHeld(held=after)], [self._entry(replica, None, event, now, reason, cause)]
        )

    def repeat(self, name: str) -> None:
        """Says again how a replica stands, for a log that may not have heard it or a new epoch."""
        held = self.held[name]
        replica = replace(held.replica, epoch=self._reporter.epoch)
        after = replace(held, replica=replica)
        self.held[name] = after
        event = event_of(after)
        reason = replica.reason or "said again by its agent"
        entry = self._entry(replica, None, event, self._now(), reason, held.cause or None)
        self._write([PutHeld(held=after)], [entry])

    def note(self, held: Held) -> "asyncio.Future[None]":
        """Remembers something about a replica that is no event."""
        self.held[held.replica.id] = held
        return self._journal.write(PutHeld(held=held))

    def lease(self, cards: tuple[Card, ...], holder: str) -> None:
        """Takes over cards a start was granted, and reports each new lease."""
        now = self._now()
        for card in cards:
            lease = leases.lease_of(card, holder)
            if lease is None or self.cards.get(card.id) == card:
                continue
            event = CardLeased(holder=holder, memory_bytes=lease.memory_bytes, fence=lease.fence)
            self._put_card(card, event, now)

    def claim(self, holder: str, cards: tuple[str, ...], memory_bytes: int) -> None:
        """Gives an adopted engine the lease it must have had."""
        now = self._now()
        for name in cards:
            card = self.cards.get(name)
            if card is not None:
                self.lease((leases.claim(card, holder, memory_bytes, now),), holder)

    def returning(self, holder: str) -> None:
        """The holder's engine ended: its leases stay until the memory was read back."""
        for card in list(self.cards.values()):
            after = leases.returning(card, holder)
            if after != card:
                self.cards[card.id] = after
                self._journal.write(PutCard(card=after))

    def release(self, holder: str, *, freed_bytes: int) -> None:
        """Ends every lease of `holder`, whose memory (`freed_bytes` at the last reading) is back."""
        now = self._now()
        for card in list(self.cards.values()):
            lease = leases.lease_of(card, holder)
            after = leases.release(card, holder)
            if lease is None or after is None:
                continue
            # Added up anew: two readings of one engine differ, and what one left over would add up.
            left = self.use_of(card.id)
            after = replace(after, used_bytes=left, measured_at=now)
            event = CardReleased(
                holder=holder,
                memory_bytes=lease.memory_bytes,
                used_before_bytes=max(card.used_bytes, freed_bytes),
                used_after_bytes=left,
            )
            self._put_card(after, event, now)

    def measured(self, card: str, used_bytes: int) -> None:
        """Reports what the engines on a card use."""
        now = self._now()
        before = self.cards.get(card)
        if before is not None:
            after = replace(before, used_bytes=used_bytes, measured_at=now)
            self._put_card(after, CardMeasured(used_bytes=used_bytes), now)

    def use_of(self, card: str) -> int:
        """Bytes used on a card by all engines there, each split evenly over its cards."""
        return sum(
            (held.replica.measured_memory_bytes or 0) // max(len(held.replica.cards), 1)
            for held in self.held.values()
            if card in held.replica.cards and held.replica.phase not in TERMINAL_PHASES
        )

    def repeat_card(self, card: str) -> None:
        """Says again how a card stands, for a log that may not have heard it."""
        self._put_card(
            self.cards[card], CardMeasured(used_bytes=self.cards[card].used_bytes), self._now()
        )

    def take_port(self, is_free: Callable[[int], bool]) -> int:
        """The port of the next engine, remembered as given. Raises ports.NoPort."""
        port, self._ports = ports.give(self._ports, self._now(), is_free)
        self._journal.write(PutPorts(book=self._ports))
        return port

    def rest_port(self, port: int) -> None:
        """The engine on `port` ended: nobody gets the port before it has rested."""
        if port:
            self._ports = ports.keep_resting(self._ports, port, self._now())
            self._journal.write(PutPorts(book=self._ports))

    def forget(self, name: str) -> None:
        """Drops an ended replica; its id stays used, its subject is ended later."""
        held = self.held.pop(name)
        self.used.add(name)
        self.ended[name] = held.replica.since
        self._journal.write(DropHeld(replica=name, at=held.replica.since))

    def remember_ended(self, replica: Replica) -> None:
        """Takes over an ended replica that only the log knew."""
        if replica.phase in TERMINAL_PHASES and replica.id not in self.held:
            self.used.add(replica.id)
            self.ended[replica.id] = replica.since
            self._journal.write(DropHeld(replica=replica.id, at=replica.since))

    def end_subject(self, name: str) -> None:
        """Writes the tombstone of an ended replica."""
        del self.ended[name]
        entry = self._entry(None, None, ReplicaDeleted(), self._now(), "ended long ago", None, name)
        self._write([DropEnded(replica=name)], [entry])

    def _card_kind(self, cards: tuple[str, ...]) -> str:
        first = self.cards.get(cards[0]) if cards else None
        return first.kind if first is not None else "cpu"

    def _put_card(self, card: Card, event: CardEvent, now: datetime) -> None:
        self.cards[card.id] = card
        self._write([PutCard(card=card)], [self._entry(None, card, event, now, "", None)])

    def _entry(
        self,
        replica: Replica | None,
        card: Card | None,
        event: ReplicaEvent | CardEvent,
        now: datetime,
        reason: str,
        cause: str | None,
        name: str = "",
    ) -> Entry:
        if card is not None:
            subject = card_subject(self.node, card.id, self._prefix)
        else:
            name = replica.id if replica is not None else name
            subject = replica_subject(self.node, name, self._prefix)
        n, self._next_n = self._next_n, self._next_n + 1
        return Entry(
            n=n,
            subject=subject,
            event=event,
            time=now,
            replica=replica,
            card=card,
            reason=reason,
            causationid=cause,
        )

    def _write(self, changes: list[Change], entries: list[Entry]) -> "asyncio.Future[None]":
        """Journals a change together with its report, then hands the report over."""
        durable = self._journal.write(*changes, *(Queue(entry=entry) for entry in entries))
        for entry in entries:
            self._reporter.put(entry, durable)
        return durable
