"""The agent's books: what it holds, its slots and ports (and its cards), the same in memory, journal and report.

Every change is one synchronous step, so a decision and what it reserves are never apart. Each replica
event is checked against the table of transitions. It decides nothing and does no I/O of its own.
"""

import asyncio
from collections.abc import Callable, Mapping
from datetime import datetime

from msgspec.structs import replace

from nodeagent.cardbooks import CardBooks
from nodeagent.domain import ports
from nodeagent.domain.assignments import Observed
from nodeagent.domain.held import Held
from nodeagent.domain.lifecycle import next_phase
from nodeagent.journal import (
    DropEnded,
    DropHeld,
    DropSlots,
    Entry,
    Journal,
    KnownPlan,
    Memory,
    PutHeld,
    PutPlan,
    PutPorts,
    PutSlots,
)
from nodeagent.ownlog import replica_subject, slots_subject
from nodeagent.reporter import Reporter
from schemas.messages import tag_of
from schemas.plan import Plan, Stop
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
from schemas.slots import Slots, SlotsDeleted, SlotsEvent


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
            return ReplicaStarting(port=held.port, resumed=held.resuming)
        case "ready":
            return ReplicaReady(load_s=replica.load_s)
        case "draining":
            return ReplicaDraining(decision=replica.stop_decision or "")
        case "parked":
            return ReplicaParked(
                way=replica.park_way,
                ram_bytes=replica.ram_bytes,
                residual_bytes=replica.residual_bytes,
                refused=bool(replica.card_revs),
            )
        case "withdrawn":
            return ReplicaWithdrawn()
        case "stopped":
            return ReplicaStopped(exit_status=replica.exit_status)
        case "stop_failed":
            return ReplicaStopFailed()
        case "failed":
            return ReplicaFailed(code=replica.code or "lost", exit_status=replica.exit_status)


class Books(CardBooks):
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
        super().__init__(
            node=node, prefix=prefix, memory=memory, journal=journal, reporter=reporter, now=now
        )
        self.used: set[str] = set(memory.used)
        self.ended: dict[str, datetime] = dict(memory.ended)
        self.slots: dict[str, Slots] = dict(memory.slots)
        self.known: KnownPlan | None = memory.plan
        self.knows_ports = memory.ports is not None
        self._ports = memory.ports or book
        # The journal remembers what was given; the range itself is the configuration's.
        self._ports = replace(self._ports, first=book.first, last=book.last, rest_s=book.rest_s)
        for entry in memory.unsent:
            reporter.put(entry, None)

    def observed(
        self,
        engines: frozenset[str],
        allow_commands: bool,
        wishes: Mapping[str, Stop] | None = None,
    ) -> Observed:
        return Observed(
            held=self.held,
            cards=self.cards,
            used=self.used,
            unreported=self._reporter.unreported(),
            engines=engines,
            allow_commands=allow_commands,
            wishes=wishes or {},
            measured=self.measured_use(),
        )

    def plan_read(self, plan: Plan, seq: int) -> None:
        """Remembers the plan, to act on it when the next start finds no log."""
        self.known = KnownPlan(plan=plan, seq=seq)
        self._journal.write(PutPlan(known=self.known))

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
        return self._write([PutHeld(held=after)], [self._entry(replica, event, now, reason, cause)])

    def repeat(self, name: str) -> None:
        """Says again how a replica stands, for a log that may not have heard it or a new epoch."""
        held = self.held[name]
        replica = replace(held.replica, epoch=self._reporter.epoch)
        after = replace(held, replica=replica)
        self.held[name] = after
        event = event_of(after)
        reason = replica.reason or "said again by its agent"
        entry = self._entry(replica, event, self._now(), reason, held.cause or None)
        self._write([PutHeld(held=after)], [entry])

    def note(self, held: Held) -> "asyncio.Future[None]":
        """Remembers something about a replica that is no event."""
        self.held[held.replica.id] = held
        return self._journal.write(PutHeld(held=held))

    # Slots.

    def say_slots(
        self, slots: Slots, event: SlotsEvent, *, reason: str = "", cause: str = ""
    ) -> None:
        """Makes `slots` the truth about the adapters of one replica, and reports it."""
        self.slots[slots.replica] = slots
        entry = self._slots_entry(slots.replica, slots, event, reason, cause or None)
        self._write([PutSlots(slots=slots)], [entry])

    def note_slots(self, slots: Slots) -> None:
        """Remembers what of a replica's slots is no event."""
        self.slots[slots.replica] = slots
        self._journal.write(PutSlots(slots=slots))

    def slots_told(self, told: dict[str, Slots]) -> None:
        """Takes over the slots that only the log knew."""
        for name, slots in told.items():
            if name not in self.slots:
                self.note_slots(slots)

    def end_slots(self, name: str) -> None:
        """Writes the tombstone of a replica's slots, if anything was ever said of them."""
        if self.slots.pop(name, None) is None:
            return
        entry = self._slots_entry(name, None, SlotsDeleted(), "its replica ended long ago", None)
        self._write([DropSlots(replica=name)], [entry])

    def _slots_entry(
        self, replica: str, slots: Slots | None, event: SlotsEvent, reason: str, cause: str | None
    ) -> Entry:
        n, self._next_n = self._next_n, self._next_n + 1
        return Entry(
            n=n,
            subject=slots_subject(self.node, replica, self._prefix),
            event=event,
            time=self._now(),
            slots=slots,
            reason=reason,
            causationid=cause,
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
        """Writes the tombstones of an ended replica: of its slots first, or nobody would ever end those."""
        self.end_slots(name)
        del self.ended[name]
        entry = self._entry(None, ReplicaDeleted(), self._now(), "ended long ago", None, name)
        self._write([DropEnded(replica=name)], [entry])

    def _card_kind(self, cards: tuple[str, ...]) -> str:
        first = self.cards.get(cards[0]) if cards else None
        return first.kind if first is not None else "cpu"

    def _entry(
        self,
        replica: Replica | None,
        event: ReplicaEvent,
        now: datetime,
        reason: str,
        cause: str | None,
        name: str = "",
    ) -> Entry:
        n, self._next_n = self._next_n, self._next_n + 1
        return Entry(
            n=n,
            subject=replica_subject(
                self.node, replica.id if replica is not None else name, self._prefix
            ),
            event=event,
            time=now,
            replica=replica,
            reason=reason,
            causationid=cause,
        )
