"""Grants memory of a node's cards and takes it back: the one ledger of this node.

A grant returns the cards as they are after it, so that deciding and reserving are one step. A card is
never given beyond its memory, and a lease ends exactly once. It never measures anything itself, and what
the state of a card means (free, kept) is said in schemas/cardstate.py alone.
"""

from collections.abc import Mapping, Sequence
from datetime import datetime

from msgspec import Struct
from msgspec.structs import replace

from nodeagent.domain.held import Held
from schemas.card import Card, Lease, LeaseKind, Waiter
from schemas.cardstate import free_bytes, kept_by
from schemas.node import CardInfo


class Granted(Struct, frozen=True, kw_only=True):
    """`cards` are the changed cards, each with the new lease; the fence is the card's revision."""

    cards: tuple[Card, ...]


class NoRoom(Struct, frozen=True, kw_only=True):
    """`reason` names every card that lacks room, with its numbers; `card_revs` what was looked at.

    `kept`: at least one of them is out of reach, whatever leaves it.
    """

    reason: str
    card_revs: dict[str, int]
    kept: bool = False


def lease_of(card: Card, holder: str) -> Lease | None:
    """The lease `holder` has on this card."""
    return next((lease for lease in card.leases if lease.holder == holder), None)


def waiter_of(card: Card, id: str) -> Waiter | None:
    """The place `id` has in line for this card."""
    return next((waiter for waiter in card.waiters if waiter.id == id), None)


def without(card: Card, holders: frozenset[str] | set[str]) -> Card:
    """The card as it would be if these holders had left it."""
    return replace(card, leases=tuple(x for x in card.leases if x.holder not in holders))


def set_aside_bytes(card: Card, holder: str) -> int | None:
    """Bytes that those in line for the card wait for, `holder` itself apart; None: all of it."""
    others = [waiter for waiter in card.waiters if waiter.id != holder]
    if any(waiter.exclusive for waiter in others):
        return None
    return sum(waiter.memory_bytes for waiter in others)


def lacks(
    card: Card, memory_bytes: int, measured: Mapping[str, int], *, exclusive: bool = False
) -> str:
    """What stands against so many bytes of this card (of all of it when `exclusive`), empty when nothing.

    What parked engines keep is no hold on a card, so it does not stand against having all the rest of it.
    """
    if card.mig:
        return f"{card.id}: divided by MIG and left alone"
    if card.memory_bytes <= 0:
        return f"{card.id}: the card is not there any more"
    if exclusive:
        others = [lease for lease in card.leases if lease.kind != "parked"]
        if others:
            names = ", ".join(lease.name or lease.holder for lease in others)
            return f"{card.id}: wanted whole, and {names} has a lease there"
        if card.stowaways:
            pids = ", ".join(str(stowaway.pid) for stowaway in card.stowaways)
            return f"{card.id}: wanted whole, and processes without a lease are there ({pids})"
    whole = next((lease for lease in card.leases if lease.exclusive), None)
    if whole is not None:
        return f"{card.id}: {whole.name or whole.holder} has the whole card"
    free = free_bytes(card, measured)
    if memory_bytes > free:
        return f"{card.id}: needs {gib(memory_bytes)}, {gib(free)} free of {gib(card.memory_bytes)}"
    return ""


def reserve(
    cards: Mapping[str, Card],
    holder: str,
    wanted: Sequence[str],
    memory_bytes: int,
    now: datetime,
    measured: Mapping[str, int],
    *,
    exclusive: bool = False,
) -> Granted | NoRoom:
    """Leases `memory_bytes` on each wanted card to an engine, or says with numbers why not.

    All cards or none. What others wait in line for is not given away, nor a card that somebody keeps. A
    holder that already has its lease is granted the cards unchanged; what it kept while it was parked is
    part of what it gets back.
    """
    reasons: list[str] = []
    changed: list[Card] = []
    kept = False
    for name in wanted:
        card = cards.get(name)
        if card is None:
            reasons.append(f"{name}: no such card on this node")
            continue
        own = lease_of(card, holder)
        if own is not None and own.kind != "parked":
            changed.append(card)
            continue
        rest = without(card, {holder})
        reason, is_kept = _against(rest, holder, memory_bytes, measured, exclusive)
        if reason:
            kept = kept or is_kept
            reasons.append(reason)
            continue
        lease = Lease(
            holder=holder,
            memory_bytes=memory_bytes,
            fence=card.rev + 1,
            since=now,
            exclusive=exclusive,
        )
        changed.append(with_lease(card, lease))
    if reasons or not wanted:
        revs = {name: cards[name].rev if name in cards else 0 for name in wanted}
        return NoRoom(reason="; ".join(reasons) or "no card was named", card_revs=revs, kept=kept)
    return Granted(cards=tuple(changed))


def _against(
    card: Card, holder: str, memory_bytes: int, measured: Mapping[str, int], exclusive: bool
) -> tuple[str, bool]:
    """What stands against a start there, and whether the card is out of reach altogether."""
    keeper = kept_by(card)
    if keeper:
        return f"{card.id}: kept by {keeper}", True
    aside = set_aside_bytes(card, holder)
    ahead = next((waiter for waiter in card.waiters if waiter.id != holder), None)
    if ahead is not None and (aside is None or exclusive):
        return f"{card.id}: {ahead.name or ahead.id} waits for the card", False
    aside = aside or 0
    reason = lacks(card, memory_bytes, measured, exclusive=exclusive)
    if reason:
        return reason, False
    left = free_bytes(card, measured) - aside
    if memory_bytes > left:
        waited = f", {gib(aside)} of it waited for" if aside else ""
        free = gib(free_bytes(card, measured))
        return f"{card.id}: needs {gib(memory_bytes)}, {free} free{waited}", False
    return "", False


def with_lease(card: Card, lease: Lease) -> Card:
    """The card with this lease in the place of any its holder had, and out of line; a revision later."""
    rest = tuple(x for x in card.leases if x.holder != lease.holder)
    line = tuple(x for x in card.waiters if x.id != lease.holder)
    return replace(card, rev=card.rev + 1, leases=(*rest, lease), waiters=line)


def claim(
    card: Card,
    holder: str,
    memory_bytes: int,
    now: datetime,
    *,
    kind: LeaseKind = "replica",
    exclusive: bool = False,
) -> Card:
    """The card with a lease for a holder that lives there already, whether there is room or not.

    Only for an adopted engine whose lease was lost with the journal: its memory is taken in any case.
    """
    if lease_of(card, holder) is not None:
        return card
    return with_lease(
        card,
        Lease(
            holder=holder,
            memory_bytes=memory_bytes,
            fence=card.rev + 1,
            since=now,
            kind=kind,
            exclusive=exclusive,
        ),
    )


def parked(card: Card, holder: str, memory_bytes: int, now: datetime) -> Card:
    """The card after `holder` was parked: its lease is what it keeps here; `since` tells when that was."""
    return with_lease(
        card,
        Lease(
            holder=holder,
            memory_bytes=memory_bytes,
            fence=card.rev + 1,
            since=now,
            kind="parked",
        ),
    )


def parked_to_evict(
    cpu: Card, held: Mapping[str, Held], need_bytes: int, measured: Mapping[str, int]
) -> tuple[str, ...] | None:
    """The parked copies that have to go for `need_bytes` more RAM, the least recently parked first.

    Empty when there is room, or will be by what leaves already. None when not even all of them would do.
    """
    leaving = {
        lease.holder
        for lease in cpu.leases
        if lease.returning or ((one := held.get(lease.holder)) is not None and one.ending)
    }
    aside = sum(waiter.memory_bytes for waiter in cpu.waiters)
    gone: list[str] = []
    for name in ["", *copies(cpu, held)]:
        if name and name not in leaving:
            gone.append(name)
        if free_bytes(without(cpu, {*leaving, *gone}), measured) - aside >= need_bytes:
            return tuple(gone)
    return None


def copies(card: Card, held: Mapping[str, Held]) -> tuple[str, ...]:
    """The parked engines with a lease here that nobody brings back now, least recently parked first."""
    names = [
        (lease.since, lease.holder)
        for lease in card.leases
        if lease.kind == "parked"
        and (one := held.get(lease.holder)) is not None
        and one.replica.phase == "parked"
    ]
    return tuple(name for _, name in sorted(names))


def newer(kept: Card | None, told: Card) -> Card:
    """Of what the journal kept and the log tells of one card, what counts: the one that changed last.

    The journal on a tie: it knows of leases that are on their way back.
    """
    return told if kept is None or told.rev > kept.rev else kept


def returning(card: Card, holder: str, why: str = "") -> Card:
    """The card after `holder` stopped: its lease stays until its memory was read back."""
    return replace(
        card,
        leases=tuple(
            replace(lease, returning=True, why=lease.why or why)
            if lease.holder == holder
            else lease
            for lease in card.leases
        ),
    )


def release(card: Card, holder: str) -> Card | None:
    """The card without `holder`'s lease, or None when it holds none (released already)."""
    if lease_of(card, holder) is None:
        return None
    rest = tuple(lease for lease in card.leases if lease.holder != holder)
    return replace(card, rev=card.rev + 1, leases=rest)


def conform(card: Card | None, info: CardInfo, node: str) -> Card:
    """The card's state for the inventory entry of this start: leases and revision are kept."""
    if card is None:
        card = Card(node=node, id=info.id, kind=info.kind, memory_bytes=info.memory_bytes, rev=0)
    return replace(
        card,
        kind=info.kind,
        memory_bytes=info.memory_bytes,
        provider=info.provider,
        device=info.device,
        mig=info.mig,
    )


def gib(count: int) -> str:
    """A number of bytes as a person reads it: `9.2 GiB`, small ones in MiB."""
    if count < 1 << 30:
        return f"{count / (1 << 20):.0f} MiB"
    return f"{count / (1 << 30):.1f} GiB"
