"""Grants memory of a node's cards and takes it back: the one ledger of this node.

A grant returns the cards as they are after it, so that deciding and reserving are one step. A card is
never given beyond its memory, and a lease ends exactly once. It never measures anything itself.
"""

from collections.abc import Mapping, Sequence
from datetime import datetime

from msgspec import Struct
from msgspec.structs import replace

from schemas.card import Card, Lease
from schemas.node import CardInfo


class Granted(Struct, frozen=True, kw_only=True):
    """`cards` are the changed cards, each with the new lease; the fence is the card's revision."""

    cards: tuple[Card, ...]


class NoRoom(Struct, frozen=True, kw_only=True):
    """`reason` names every card that lacks room, with its numbers; `card_revs` what was looked at."""

    reason: str
    card_revs: dict[str, int]


def held_bytes(card: Card, measured: Mapping[str, int]) -> int:
    """Bytes of a card that are spoken for: per lease the larger of what was reserved and measured."""
    return sum(max(lease.memory_bytes, measured.get(lease.holder, 0)) for lease in card.leases)


def lease_of(card: Card, holder: str) -> Lease | None:
    """The lease `holder` has on this card."""
    return next((lease for lease in card.leases if lease.holder == holder), None)


def reserve(
    cards: Mapping[str, Card],
    holder: str,
    wanted: Sequence[str],
    memory_bytes: int,
    now: datetime,
    measured: Mapping[str, int],
) -> Granted | NoRoom:
    """Leases `memory_bytes` on each wanted card to `holder`, or says with numbers why not.

    All cards or none. A holder that already has its lease is granted the cards unchanged.
    """
    reasons: list[str] = []
    changed: list[Card] = []
    for name in wanted:
        card = cards.get(name)
        if card is None:
            reasons.append(f"{name}: no such card on this node")
            continue
        if lease_of(card, holder) is not None:
            changed.append(card)
            continue
        free = card.memory_bytes - held_bytes(card, measured)
        if memory_bytes > free:
            reasons.append(
                f"{name}: needs {gib(memory_bytes)}, {gib(max(free, 0))} free of"
                f" {gib(card.memory_bytes)}"
            )
            continue
        rev = card.rev + 1
        lease = Lease(holder=holder, memory_bytes=memory_bytes, fence=rev, since=now)
        changed.append(replace(card, rev=rev, leases=(*card.leases, lease)))
    if reasons or not wanted:
        revs = {name: cards[name].rev if name in cards else 0 for name in wanted}
        return NoRoom(reason="; ".join(reasons) or "no card was named", card_revs=revs)
    return Granted(cards=tuple(changed))


def claim(card: Card, holder: str, memory_bytes: int, now: datetime) -> Card:
    """The card with a lease for a holder that lives there already, whether there is room or not.

    Only for an adopted engine whose lease was lost with the journal: its memory is taken in any case.
    """
    if lease_of(card, holder) is not None:
        return card
    rev = card.rev + 1
    lease = Lease(holder=holder, memory_bytes=memory_bytes, fence=rev, since=now)
    return replace(card, rev=rev, leases=(*card.leases, lease))


def newer(kept: Card | None, told: Card) -> Card:
    """Of what the journal kept and the log tells of one card, what counts: the one that changed last.

    The journal on a tie: it knows of leases that are on their way back.
    """
    return told if kept is None or told.rev > kept.rev else kept


def returning(card: Card, holder: str) -> Card:
    """The card after `holder` stopped: its lease stays until its memory was read back."""
    return replace(
        card,
        leases=tuple(
            replace(lease, returning=True) if lease.holder == holder else lease
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
        return Card(node=node, id=info.id, kind=info.kind, memory_bytes=info.memory_bytes, rev=0)
    return replace(card, kind=info.kind, memory_bytes=info.memory_bytes)


def gib(count: int) -> str:
    """A number of bytes as a person reads it: `9.2 GiB`, small ones in MiB."""
    if count < 1 << 30:
        return f"{count / (1 << 20):.0f} MiB"
    return f"{count / (1 << 30):.1f} GiB"
