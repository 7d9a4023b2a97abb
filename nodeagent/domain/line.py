"""The line before each card and the changes that are made to a card: queued, out of line, granted, over.

Each function returns cards as they are after it, with what is told of that. Who comes next, and whether there
is room for him, is decided in `domain/granting.py`.
"""

from collections.abc import Mapping
from datetime import datetime, timedelta
from typing import Final

from msgspec import Struct
from msgspec.structs import replace

from nodeagent.domain import leases
from schemas.card import (
    PRIORITIES,
    Card,
    CardClaimEnded,
    CardDequeued,
    CardEvent,
    CardLeased,
    CardQueued,
    CardVmDetached,
    Claim,
    Lease,
    Waiter,
)
from schemas.cardstate import free_bytes

_LATER: Final = timedelta(microseconds=1)


class Change(Struct, frozen=True, kw_only=True):
    """A card as it is from now on, and what is told of that (None: nothing yet), because of `cause`."""

    card: Card
    event: CardEvent | None
    cause: str = ""
    reason: str = ""


def vm_id(card: str, name: str) -> str:
    """What a VM on a card is called where an id is needed."""
    return f"vm-{name}@{card}"


def line(cards: Mapping[str, Card]) -> list[Waiter]:
    """Everybody in line on these cards, the first first: by priority, then time, then id."""
    waiters = {waiter.id: waiter for card in cards.values() for waiter in card.waiters}
    return sorted(waiters.values(), key=lambda x: (PRIORITIES.index(x.priority), x.since, x.id))


def place_of(cards: Mapping[str, Card], id: str) -> int:
    """The place of `id` among those in line on any of its cards, from 1; 0 when it is not in line."""
    waiters = line(cards)
    mine = next((waiter for waiter in waiters if waiter.id == id), None)
    if mine is None:
        return 0
    near = [x for x in waiters if set(x.cards) & set(mine.cards)]
    return near.index(mine) + 1


def queue(cards: Mapping[str, Card], waiter: Waiter) -> tuple[Change, ...]:
    """Puts a waiter in line on all its cards, all of which are on this node.

    He came after everybody who is there already, whatever the clock says: it may have been set back.
    """
    latest = max((x.since for name in waiter.cards for x in cards[name].waiters), default=None)
    if latest is not None and waiter.since < latest:
        waiter = replace(waiter, since=latest + _LATER)
    event = CardQueued(waiter=waiter.id, waiting_for=waiter.waiting_for)
    changes: list[Change] = []
    for name in waiter.cards:
        card = cards[name]
        whole = waiter.exclusive and waiter.kind == "named"
        own = replace(waiter, memory_bytes=card.memory_bytes if whole else waiter.memory_bytes)
        after = replace(card, rev=card.rev + 1, waiters=(*card.waiters, own))
        changes.append(Change(card=after, event=event, cause=waiter.id))
    return tuple(changes)


def dequeue(cards: Mapping[str, Card], id: str, why: str) -> tuple[Change, ...]:
    """Takes a waiter out of line everywhere."""
    changes: list[Change] = []
    for card in cards.values():
        if leases.waiter_of(card, id) is not None:
            rest = tuple(x for x in card.waiters if x.id != id)
            after = replace(card, rev=card.rev + 1, waiters=rest)
            event = CardDequeued(waiter=id, why=why)
            changes.append(Change(card=after, event=event, cause=id, reason=why))
    return tuple(changes)


def grant(cards: Mapping[str, Card], waiter: Waiter, now: datetime) -> tuple[Change, ...]:
    """The lease a waiter was in line for, on all its cards at once. There must be room for it."""
    changes: list[Change] = []
    for name in waiter.cards:
        card = leases.without(cards[name], {waiter.id})
        memory = waiter.memory_bytes
        if waiter.exclusive and waiter.kind == "named":
            memory = free_bytes(card)
        lease = Lease(
            holder=waiter.id,
            memory_bytes=memory,
            fence=card.rev + 1,
            since=now,
            kind="named" if waiter.kind == "named" else "replica",
            name=waiter.name,
            exclusive=waiter.exclusive,
            pinned=waiter.pinned,
            priority=waiter.priority,
            expires_at=_after(now, waiter.ttl_s),
            process=waiter.process,
            by=waiter.by,
        )
        event = CardLeased(
            holder=waiter.id, memory_bytes=memory, fence=lease.fence, name=waiter.name
        )
        changes.append(Change(card=leases.with_lease(card, lease), event=event, cause=waiter.id))
    return tuple(changes)


def _after(now: datetime, seconds: float | None) -> datetime | None:
    return None if seconds is None else now + timedelta(seconds=seconds)


def end_claim(card: Card, claim: Claim, why: str) -> Change:
    """The card without that claim."""
    rest = tuple(x for x in card.claims if x.id != claim.id)
    event = CardClaimEnded(claim=claim.id, why=why)
    after = replace(card, rev=card.rev + 1, claims=rest)
    return Change(card=after, event=event, cause=claim.id, reason=why)


def detach(card: Card, why: str) -> Change:
    """The card without its VM, which it must have."""
    assert card.vm is not None
    event = CardVmDetached(name=card.vm.name)
    cause = vm_id(card.id, card.vm.name)
    after = replace(card, rev=card.rev + 1, vm=None)
    return Change(card=after, event=event, cause=cause, reason=why)


def due_at(cards: Mapping[str, Card]) -> datetime | None:
    """When the first lease, waiter or VM of these cards ends by time."""
    times = [
        at
        for card in cards.values()
        for at in (
            *(x.expires_at for x in card.leases if not x.returning),
            *(x.expires_at for x in card.waiters),
            card.vm.expires_at if card.vm is not None and not card.vm.attached else None,
        )
        if at is not None
    ]
    return min(times, default=None)
