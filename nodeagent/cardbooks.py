"""The agent's books of its cards: every change in memory, journal and report at once, and told to who must know.

Each change is one synchronous step, and what changes on several cards together is one batch for the log. It
decides nothing but what a step itself reserves, and does no I/O of its own.
"""

import asyncio
from collections.abc import Callable, Mapping
from datetime import datetime
from typing import Final

from msgspec.structs import replace

from nodeagent.cards.provider import Reading
from nodeagent.domain import leases
from nodeagent.domain.held import Held
from nodeagent.domain.inventory import CPU_CARD
from nodeagent.domain.line import Change
from nodeagent.journal import Change as Written
from nodeagent.journal import Entry, Journal, Memory, PutCard, Queue
from nodeagent.ownlog import card_subject
from nodeagent.reporter import Reporter
from schemas.card import (
    Card,
    CardLeased,
    CardMeasured,
    CardParked,
    CardReleased,
    CardStowawayGone,
    CardStowawaySeen,
    CardStuck,
    Stowaway,
)
from schemas.cardstate import free_bytes
from schemas.node import CardInfo
from schemas.replica import TERMINAL_PHASES
from schemas.settings import MIB

Told = Callable[[tuple[Change, ...]], None]

WORTH_TELLING_BYTES: Final = 64 * MIB
WORTH_TELLING_PART: Final = 0.01
"""A measured use is told when it moved by both: it trembles all the time, and the log is no graph."""


class CardBooks:
    """The cards of one node and the replicas that use them. `now` gives the time events carry."""

    def __init__(
        self,
        *,
        node: str,
        prefix: str,
        memory: Memory,
        journal: Journal,
        reporter: Reporter,
        now: Callable[[], datetime],
    ) -> None:
        self.node = node
        self.held: dict[str, Held] = dict(memory.held)
        self.cards: dict[str, Card] = dict(memory.cards)
        self._of: dict[str, Mapping[str, int]] = {}
        """Card -> holder -> bytes, as the last reading told them apart."""
        self._prefix = prefix
        self._journal = journal
        self._reporter = reporter
        self._now = now
        self._told: list[Told] = []
        self._next_n = max((entry.n for entry in memory.unsent), default=0) + 1

    def on_cards(self, told: Told) -> None:
        """Calls `told` after each change of cards, with what changed."""
        self._told.append(told)

    def durable(self) -> "asyncio.Future[None]":
        """Done when everything said so far would survive a kill."""
        return self._journal.write()

    # What is there.

    def cards_told(self, told: dict[str, Card]) -> None:
        """Takes over what the log knows better of the cards than the journal."""
        for name, card in told.items():
            self.cards[name] = leases.newer(self.cards.get(name), card)

    def set_up_cards(self, infos: tuple[CardInfo, ...]) -> None:
        """Makes the cards those of the inventory. A card that is gone but leased is kept until it is free,
        and one that a VM has is: this machine does not see it, and it comes back."""
        kept = {info.id: leases.conform(self.cards.get(info.id), info, self.node) for info in infos}
        for name, card in self.cards.items():
            if name in kept:
                continue
            if card.vm is not None:
                kept[name] = card
            elif card.leases or card.waiters or card.claims:
                kept[name] = replace(card, memory_bytes=0)
        self.cards = kept
        self._journal.write(*(PutCard(card=card) for card in kept.values()))

    def change(self, *changes: Change) -> None:
        """Makes these changes the truth, together. One without an event is told with the next that has."""
        now = self._now()
        written: list[Written] = []
        entries: list[Entry] = []
        told = [change for change in changes if change.event is not None]
        batch = self._next_n if len(told) > 1 else 0
        for change in changes:
            card = replace(change.card, epoch=self._reporter.epoch)
            self.cards[card.id] = card
            written.append(PutCard(card=card))
            if change.event is None:
                continue
            n, self._next_n = self._next_n, self._next_n + 1
            entries.append(
                Entry(
                    n=n,
                    subject=card_subject(self.node, card.id, self._prefix),
                    event=change.event,
                    time=now,
                    card=card,
                    reason=change.reason,
                    causationid=change.cause or None,
                    batch=batch,
                )
            )
        self._write(written, entries)
        for listener in self._told:
            listener(changes)

    # Leases.

    def lease(self, cards: tuple[Card, ...], holder: str, cause: str = "") -> None:
        """Takes over cards a start was granted, and reports each new lease."""
        changes: list[Change] = []
        for card in cards:
            lease = leases.lease_of(card, holder)
            if lease is None or self.cards.get(card.id) == card:
                continue
            event = CardLeased(
                holder=holder, memory_bytes=lease.memory_bytes, fence=lease.fence, name=lease.name
            )
            changes.append(Change(card=card, event=event, cause=cause))
        if changes:
            self.change(*changes)

    def fences(self, holder: str) -> dict[str, int]:
        """The card revisions at which `holder` was granted what it has."""
        return {
            card.id: lease.fence
            for card in self.cards.values()
            if (lease := leases.lease_of(card, holder)) is not None and lease.kind != "parked"
        }

    def still_leased(self, holder: str, fences: Mapping[str, int]) -> bool:
        """Whether `holder` still has the very leases it was granted at `fences`, on all its cards.

        To be asked directly before a process is started on them: a fetch may have taken hours.
        """
        for name, fence in fences.items():
            card = self.cards.get(name)
            lease = leases.lease_of(card, holder) if card is not None else None
            if lease is None or lease.fence != fence or lease.returning:
                return False
        return bool(fences)

    def claim(self, holder: str, cards: tuple[str, ...], memory_bytes: int) -> None:
        """Gives an adopted engine the lease it must have had; a parked one those of a parked one."""
        now = self._now()
        held = self.held.get(holder)
        parked = held is not None and held.replica.phase == "parked"
        for name in cards:
            card = self.cards.get(name)
            if card is None:
                continue
            if parked and held is not None:
                kept = held.replica.residual_bytes
                self.lease((leases.claim(card, holder, kept, now, kind="parked"),), holder)
            else:
                exclusive = held is not None and held.launch is not None and held.launch.exclusive
                after = leases.claim(card, holder, memory_bytes, now, exclusive=exclusive)
                self.lease((after,), holder)
        cpu = self.cards.get(CPU_CARD)
        if held is not None and parked and cpu is not None and held.replica.ram_bytes:
            ram = held.replica.ram_bytes
            self.lease((leases.claim(cpu, holder, ram, now, kind="parked"),), holder)

    def returning(self, holder: str, why: str = "") -> None:
        """The holder ended: its leases stay until the memory was read back."""
        changes = [
            Change(card=after, event=None)
            for card in self.cards.values()
            if (after := leases.returning(card, holder, why)) != card
        ]
        if changes:
            self.change(*changes)

    def stuck(self, holder: str, why: str) -> None:
        """The holder is gone and its memory is not back: says so, once for each `why`."""
        changes: list[Change] = []
        for card in self.cards.values():
            lease = leases.lease_of(card, holder)
            if lease is None or lease.stuck == why:
                continue
            after = replace(
                card,
                leases=tuple(
                    replace(x, stuck=why) if x.holder == holder else x for x in card.leases
                ),
            )
            event = CardStuck(holder=holder)
            changes.append(Change(card=after, event=event, cause=holder, reason=why))
        if changes:
            self.change(*changes)

    def release(self, holder: str, *, freed_bytes: int, why: str = "stopped") -> None:
        """Ends every lease of `holder`, whose memory (`freed_bytes` at the last reading) is back."""
        now = self._now()
        changes: list[Change] = []
        for card in self.cards.values():
            lease = leases.lease_of(card, holder)
            after = leases.release(card, holder)
            if lease is None or after is None:
                continue
            self._forget_use(card.id, holder)
            left = self._use_without(card, freed_bytes)
            after = replace(after, used_bytes=left, measured_at=now)
            event = CardReleased(
                holder=holder,
                memory_bytes=lease.memory_bytes,
                used_before_bytes=max(card.used_bytes, freed_bytes),
                used_after_bytes=left,
                why=lease.why or ("released" if lease.kind == "named" else why),
            )
            changes.append(Change(card=after, event=event, cause=holder))
        if changes:
            self.change(*changes)

    # Parking.

    def park(self, holder: str, *, residual_bytes: int, ram_bytes: int) -> None:
        """The engine is parked: what it keeps on each of its cards, and its RAM on `cpu`, in one batch."""
        now = self._now()
        changes: list[Change] = []
        for card in self.cards.values():
            lease = leases.lease_of(card, holder)
            if card.id == CPU_CARD:
                memory = ram_bytes
            elif lease is not None:
                memory = residual_bytes
            else:
                continue
            event = CardParked(holder=holder, memory_bytes=memory)
            after = leases.parked(card, holder, memory, now)
            changes.append(Change(card=after, event=event, cause=holder))
        if changes:
            self.change(*changes)

    def reserve_ram(self, holder: str, ram_bytes: int) -> bool:
        """Leases RAM on `cpu` for an engine about to be parked; False, and nothing, without room now."""
        cpu = self.cards.get(CPU_CARD)
        if cpu is None:
            return False
        rest = leases.without(cpu, {holder})
        aside = leases.set_aside_bytes(cpu, holder)
        if aside is None or free_bytes(rest, self.measured_use()) - aside < ram_bytes:
            return False
        after = leases.parked(cpu, holder, ram_bytes, self._now())
        self.lease((after,), holder, cause=holder)
        return True

    def end_ram(self, holder: str) -> None:
        """The engine is back on its cards, or was not parked after all: its RAM on `cpu` is free again."""
        cpu = self.cards.get(CPU_CARD)
        lease = leases.lease_of(cpu, holder) if cpu is not None else None
        if cpu is None or lease is None or lease.kind != "parked":
            return
        after = leases.release(cpu, holder)
        assert after is not None
        event = CardReleased(
            holder=holder,
            memory_bytes=lease.memory_bytes,
            used_before_bytes=cpu.used_bytes,
            used_after_bytes=cpu.used_bytes,
            why="resumed",
        )
        self.change(Change(card=after, event=event, cause=holder))

    # Readings.

    def reading(self, reading: Reading, now: datetime) -> None:
        """Takes over what a card shows: who came and went without a lease, and the use, if it moved."""
        card = self.cards.get(reading.card)
        if card is None:
            return
        self._of[card.id] = dict(reading.of)
        seen = {stranger.pid: stranger for stranger in reading.strangers}
        for known in card.stowaways:
            if known.pid not in seen:
                card = self.cards[reading.card]
                rest = tuple(x for x in card.stowaways if x.pid != known.pid)
                after = replace(card, rev=card.rev + 1, stowaways=rest)
                self.change(Change(card=after, event=CardStowawayGone(pid=known.pid)))
        known_pids = {stowaway.pid for stowaway in card.stowaways}
        for pid in sorted(seen.keys() - known_pids):
            card, stranger = self.cards[reading.card], seen[pid]
            stowaway = Stowaway(
                pid=pid, name=stranger.name, memory_bytes=stranger.memory_bytes, since=now
            )
            after = replace(card, rev=card.rev + 1, stowaways=(*card.stowaways, stowaway))
            event = CardStowawaySeen(
                pid=pid, name=stranger.name, memory_bytes=stranger.memory_bytes
            )
            self.change(Change(card=after, event=event))
        self._use_read(reading, now)

    def _use_read(self, reading: Reading, now: datetime) -> None:
        card = self.cards[reading.card]
        other = _moved(card.other_bytes, reading.other_bytes, card.memory_bytes)
        used = _moved(card.used_bytes, reading.used_bytes, card.memory_bytes)
        if not (other or used):
            return
        # Of what no lease explains depends what may be given, so whoever was refused may ask again.
        after = replace(
            card,
            rev=card.rev + 1 if other else card.rev,
            used_bytes=reading.used_bytes,
            other_bytes=reading.other_bytes if other else card.other_bytes,
            measured_at=now,
        )
        event = CardMeasured(used_bytes=after.used_bytes, other_bytes=after.other_bytes)
        self.change(Change(card=after, event=event))

    def measured(self, card: str, used_bytes: int) -> None:
        """Reports what the engines on a card use."""
        before = self.cards.get(card)
        if before is not None:
            after = replace(before, used_bytes=used_bytes, measured_at=self._now())
            event = CardMeasured(used_bytes=used_bytes, other_bytes=before.other_bytes)
            self.change(Change(card=after, event=event))

    def use_of(self, card: str) -> int:
        """Bytes used on a card by all engines there, each split evenly over its cards, and by named
        leases as read last."""
        engines = sum(
            (held.replica.measured_memory_bytes or 0) // max(len(held.replica.cards), 1)
            for held in self.held.values()
            if card in held.replica.cards and held.replica.phase not in TERMINAL_PHASES
        )
        found = self.cards.get(card)
        read = self._of.get(card, {})
        named = () if found is None else [x.holder for x in found.leases if x.kind == "named"]
        return engines + sum(read.get(holder, 0) for holder in named)

    def measured_use(self) -> dict[str, int]:
        """What each holder uses of each of its cards: engines as measured, named leases as read last."""
        use = {
            name: (held.replica.measured_memory_bytes or 0) // max(len(held.replica.cards), 1)
            for name, held in self.held.items()
        }
        for card in self.cards.values():
            read = self._of.get(card.id, {})
            for lease in card.leases:
                if lease.kind == "named":
                    use[lease.holder] = max(use.get(lease.holder, 0), read.get(lease.holder, 0))
        return use

    def repeat_card(self, card: str) -> None:
        """Says again how a card stands, for a log that may not have heard it."""
        known = self.cards[card]
        event = CardMeasured(used_bytes=known.used_bytes, other_bytes=known.other_bytes)
        self.change(Change(card=known, event=event))

    def _use_without(self, card: Card, freed_bytes: int) -> int:
        if card.provider == "nvml":  # the next reading tells; until then what is known is taken off
            return max(card.used_bytes - freed_bytes, 0)
        # Added up anew: two readings of one engine differ, and what one left over would add up.
        return self.use_of(card.id)

    def _forget_use(self, card: str, holder: str) -> None:
        read = self._of.get(card)
        if read is not None and holder in read:
            self._of[card] = {name: used for name, used in read.items() if name != holder}

    def _write(self, changes: list[Written], entries: list[Entry]) -> "asyncio.Future[None]":
        """Journals a change together with its report, then hands the report over."""
        durable = self._journal.write(*changes, *(Queue(entry=entry) for entry in entries))
        for entry in entries:
            self._reporter.put(entry, durable)
        return durable


def _moved(before: int, after: int, whole: int) -> bool:
    """Whether a figure moved enough to be told; going to nothing always is."""
    if before == after:
        return False
    if not after:
        return True
    return abs(after - before) >= max(WORTH_TELLING_BYTES, int(whole * WORTH_TELLING_PART))
