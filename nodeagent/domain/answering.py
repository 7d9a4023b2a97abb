"""Decides what is asked about a node's cards: leases, claims and VMs, granted, put in line, ended or refused.

Pure and total: the answer is the same whenever the cards are. An ask that is repeated under its id finds its
first effect and has no second. It never waits: who is in line is served by `domain/granting.py`.
"""

from collections.abc import Mapping
from datetime import datetime, timedelta

from msgspec import Struct
from msgspec.structs import replace

from nodeagent.domain import leases
from nodeagent.domain.granting import Facts, settle
from nodeagent.domain.held import Held
from nodeagent.domain.line import (
    Change,
    dequeue,
    detach,
    end_claim,
    grant,
    line,
    queue,
    vm_id,
)
from schemas import codes
from schemas.card import (
    PRIORITIES,
    Card,
    CardClaimed,
    CardVmAttaching,
    Claim,
    ProcessRef,
    Vm,
    Waiter,
)
from schemas.cardasks import (
    CardAnswer,
    CardAsk,
    ClaimEnd,
    ClaimStart,
    LeaseAcquire,
    LeaseRelease,
    VmAttach,
    VmDetach,
)
from schemas.cardstate import kept_by


class Asker(Struct, frozen=True, kw_only=True):
    """Who asks, and the process whose life the lease or claim shares."""

    by: str
    process: ProcessRef | None = None


class Decided(Struct, frozen=True, kw_only=True):
    """`changes` become true together. `answer` is None when it follows from the cards after them."""

    id: str
    changes: tuple[Change, ...] = ()
    answer: CardAnswer | None = None


def decide(
    ask: CardAsk,
    asker: Asker,
    cards: Mapping[str, Card],
    held: Mapping[str, Held],
    facts: Facts,
    now: datetime,
) -> Decided:
    """What comes of an ask, on these cards, now."""
    match ask:
        case LeaseAcquire():
            return _acquire(ask, asker, cards, held, facts, now)
        case LeaseRelease(what=what):
            return _release(what, cards)
        case ClaimStart():
            return _claim(ask, asker, cards, now)
        case ClaimEnd(what=what):
            return _unclaim(what, cards)
        case VmAttach():
            return _attach(ask, asker, cards, now)
        case VmDetach():
            return _detach(ask, cards)


def standing(cards: Mapping[str, Card], id: str) -> CardAnswer | None:
    """How a lease, waiter, claim or VM of this id stands; None when there is none (any more)."""
    fences: dict[str, int] = {}
    for card in cards.values():
        lease = leases.lease_of(card, id)
        if lease is not None and lease.kind == "named" and not lease.returning:
            fences[card.id] = lease.fence
        if any(claim.id == id for claim in card.claims):
            return CardAnswer(status="granted", id=id)
        waiter = leases.waiter_of(card, id)
        if waiter is not None:
            return CardAnswer(status="waiting", id=id, waiting_for=waiter.waiting_for)
        if card.vm is not None and vm_id(card.id, card.vm.name) == id:
            if card.vm.attached:
                return CardAnswer(status="granted", id=id)
            leaving = tuple(sorted({x.holder for x in card.leases}))
            return CardAnswer(status="waiting", id=id, waiting_for=leaving)
    return CardAnswer(status="granted", id=id, fences=fences) if fences else None


def _refused(id: str, code: str, sentence: str) -> Decided:
    answer = CardAnswer(status="refused", id=id, code=code, sentence=sentence)
    return Decided(id=id, answer=answer)


def _unknown(id: str, names: tuple[str, ...], cards: Mapping[str, Card]) -> Decided | None:
    missing = [name for name in names if name not in cards]
    if not missing:
        return None
    there = ", ".join(sorted(cards)) or "none"
    sentence = f"this node has no card {', '.join(missing)}; its cards are: {there}"
    return _refused(id, codes.NOT_FOUND, sentence)


def _acquire(
    ask: LeaseAcquire,
    asker: Asker,
    cards: Mapping[str, Card],
    held: Mapping[str, Held],
    facts: Facts,
    now: datetime,
) -> Decided:
    """1. it stands already, or is on its way back: as it stands. 2. no such card, one of which nothing is ever
    given, or more than one has: refused. 3. it would be served at once: granted. 4. it does not want to wait: refused with what stands
    against it. 5. in line."""
    if any(_has(card, ask.id) for card in cards.values()):  # 1
        return _as_it_stands(ask.id, cards)
    unknown = _unknown(ask.id, ask.cards, cards)  # 2
    if unknown is not None:
        return unknown
    for name in ask.cards:
        if cards[name].memory_bytes <= 0:
            sentence = leases.lacks(cards[name], 0, facts.measured)
            return _refused(ask.id, codes.NO_CAPACITY, sentence)
        if ask.memory_bytes is not None and ask.memory_bytes > cards[name].memory_bytes:
            has = leases.gib(cards[name].memory_bytes)
            asked = leases.gib(ask.memory_bytes)
            sentence = f"{name} has {has}, {asked} are more than that"
            return _refused(ask.id, codes.NO_CAPACITY, sentence)
    waiter = Waiter(
        id=ask.id,
        since=now,
        memory_bytes=ask.memory_bytes or 0,
        name=ask.name,
        cards=ask.cards,
        exclusive=ask.memory_bytes is None,
        pinned=ask.pinned,
        priority=ask.priority,
        # Of one that does not wait it means nothing: it is granted in this step, or refused.
        expires_at=now + timedelta(seconds=max(ask.wait_s, 1.0)),
        ttl_s=ask.ttl_s,
        process=asker.process,
        by=asker.by,
    )
    changes = queue(cards, waiter)
    after = dict(cards) | {change.card.id: change.card for change in changes}
    batches = settle(after, held, facts, now).batches
    for batch in batches:
        after.update({change.card.id: change.card for change in batch})
    found = standing(after, ask.id)
    at_once = found is not None and found.status == "granted"
    if at_once and len(batches) == 1:  # 3
        return Decided(id=ask.id, changes=grant(cards, waiter, now))
    if not at_once and ask.wait_s <= 0:  # 4
        code, sentence = _against(waiter, cards, facts)
        return _refused(ask.id, code, sentence)
    return Decided(id=ask.id, changes=changes)  # 5


def _against(waiter: Waiter, cards: Mapping[str, Card], facts: Facts) -> tuple[str, str]:
    """What stands against a grant now, as code and sentence."""
    sentences: list[str] = []
    code = codes.NO_CAPACITY
    for name in waiter.cards:
        card = cards[name]
        keeper = kept_by(card, waiter.priority)
        ahead = [x for x in line({name: card}) if _rank(x) <= _rank(waiter)]
        if keeper:
            code = codes.CARD_KEPT
            sentences.append(f"{name}: kept by {keeper}")
        elif ahead:
            sentences.append(f"{name}: {ahead[0].name or ahead[0].id} is in line for it")
        else:
            need = waiter.memory_bytes
            lacking = leases.lacks(card, need, facts.measured, exclusive=waiter.exclusive)
            if lacking:
                sentences.append(lacking)
    told = "; ".join(sentences) or "somebody has to leave first"
    return code, f"{told} (with a wait, it stands in line)"


def _rank(waiter: Waiter) -> tuple[int, datetime, str]:
    return (PRIORITIES.index(waiter.priority), waiter.since, waiter.id)


def _has(card: Card, id: str) -> bool:
    return leases.lease_of(card, id) is not None or leases.waiter_of(card, id) is not None


def _as_it_stands(id: str, cards: Mapping[str, Card]) -> Decided:
    found = standing(cards, id)
    if found is None:  # its lease is on its way back
        return _refused(id, codes.CONFLICT, f"the lease {id} has ended already")
    return Decided(id=id, answer=found)


def _release(what: str, cards: Mapping[str, Card]) -> Decided:
    """Ends the lease or the waiting of that id, else of the only one of that name; one that has ended already
    and is on its way back counts only where no other has its name."""
    found: dict[str, str] = {}
    ended: set[str] = set()
    for card in cards.values():
        for lease in card.leases:
            if lease.kind == "named":
                found[lease.holder] = lease.name
                ended.update({lease.holder} if lease.returning else ())
            elif lease.holder == what:
                sentence = f"{what} is an engine; its lease ends with it (`yardctl model unload`)"
                return _refused("", codes.CONFLICT, sentence)
        found.update({x.id: x.name for x in card.waiters if x.kind == "named"})
    called = sorted(id for id, name in found.items() if name == what)
    named = [id for id in called if id not in ended] or called[:1]
    if what not in found and len(named) > 1:
        return _ambiguous(what, named)
    if what not in found and not named:
        return _refused("", codes.NOT_FOUND, f"no lease and nobody in line is called {what}")
    id = what if what in found else named[0]
    changes = [
        Change(card=leases.returning(card, id, "released"), event=None, cause=id)
        for card in cards.values()
        if (lease := leases.lease_of(card, id)) is not None and not lease.returning
    ]
    answer = CardAnswer(status="done", id=id)
    return Decided(id=id, changes=(*changes, *dequeue(cards, id, "withdrawn")), answer=answer)


def _ambiguous(what: str, ids: list[str]) -> Decided:
    sentence = f"several are called {what}: {', '.join(ids)}"
    return _refused("", codes.AMBIGUOUS_NAME, sentence)


def _claim(ask: ClaimStart, asker: Asker, cards: Mapping[str, Card], now: datetime) -> Decided:
    found = standing(cards, ask.id)
    if found is not None:
        return Decided(id=ask.id, answer=found)
    unknown = _unknown(ask.id, (ask.card,), cards)
    if unknown is not None:
        return unknown
    card = cards[ask.card]
    if card.vm is not None:
        return _refused(ask.id, codes.CARD_KEPT, f"{card.id}: kept by vm {card.vm.name}")
    claim = Claim(
        id=ask.id,
        name=ask.name,
        kind=ask.kind,
        since=now,
        process=asker.process,
        by=asker.by,
    )
    after = _later(card, claims=(*card.claims, claim))
    event = CardClaimed(claim=ask.id, name=ask.name)
    return Decided(id=ask.id, changes=(Change(card=after, event=event, cause=ask.id),))


def _unclaim(what: str, cards: Mapping[str, Card]) -> Decided:
    found = {claim.id: (card, claim) for card in cards.values() for claim in card.claims}
    named = sorted(id for id, (_, claim) in found.items() if claim.name == what)
    if what not in found and len(named) > 1:
        return _ambiguous(what, named)
    if what not in found and not named:
        return _refused("", codes.NOT_FOUND, f"no claim is called {what}")
    card, claim = found[what if what in found else named[0]]
    answer = CardAnswer(status="done", id=claim.id)
    changes = (end_claim(card, claim, "ended"),)
    return Decided(id=claim.id, changes=changes, answer=answer)


def _attach(ask: VmAttach, asker: Asker, cards: Mapping[str, Card], now: datetime) -> Decided:
    """Refused where another VM, a claim or a pinned lease keeps the card; else it is kept from now on."""
    id = vm_id(ask.card, ask.name)
    found = standing(cards, id)
    if found is not None:
        return Decided(id=id, answer=found)
    unknown = _unknown(id, (ask.card,), cards)
    if unknown is not None:
        return unknown
    card = cards[ask.card]
    if card.kind == "cpu":
        return _refused(id, codes.INVALID, f"{card.id} is no card that can be handed to a VM")
    keeper = f"vm {card.vm.name}" if card.vm is not None else ""
    if not keeper and card.claims:
        keeper = f"claim {card.claims[0].name}"
    pinned = [x for x in card.leases if x.kind == "named" and x.pinned]
    if not keeper and pinned:
        keeper = f"lease {pinned[0].name or pinned[0].holder}"
    if keeper:
        return _refused(id, codes.CARD_KEPT, f"{card.id}: kept by {keeper}")
    expires_at = now + timedelta(seconds=ask.wait_s) if ask.wait_s > 0 else None
    vm = Vm(name=ask.name, since=now, by=asker.by, expires_at=expires_at)
    event = CardVmAttaching(name=ask.name)
    return Decided(id=id, changes=(Change(card=_later(card, vm=vm), event=event, cause=id),))


def _detach(ask: VmDetach, cards: Mapping[str, Card]) -> Decided:
    name = ask.card
    unknown = _unknown("", (name,), cards)
    if unknown is not None:
        return unknown
    card = cards[name]
    if card.vm is None:
        return _refused("", codes.NOT_FOUND, f"{name} is not handed to a VM")
    if ask.name and ask.name != card.vm.name:
        return _refused("", codes.NOT_FOUND, f"{name} is not handed to {ask.name}")
    id = vm_id(name, card.vm.name)
    answer = CardAnswer(status="done", id=id)
    return Decided(id=id, changes=(detach(card, "detached"),), answer=answer)


def _later(card: Card, *, claims: tuple[Claim, ...] | None = None, vm: Vm | None = None) -> Card:
    """The card with that, a revision later."""
    return replace(
        card,
        rev=card.rev + 1,
        claims=card.claims if claims is None else claims,
        vm=card.vm if vm is None else vm,
    )
