"""Asks an agent about its cards through NATS, and follows a place in line by the card's events.

Whoever leaves, or waits longer than it meant to, takes the place back. It prints nothing.
"""

import asyncio
import contextlib
from typing import Final

from controlplane.ctl.cardanswers import LATE_S, TAKE_BACK_S, Tell, Waits, accepted, taking_back
from controlplane.ctl.connect import Place, open_connection
from controlplane.ctl.failures import CtlError, NotKnownYet, Unreachable
from events.log import Batch, EventLog, Follower, LogError, Recorded, Wire
from events.subjects import event_subject
from schemas import codes
from schemas.card import Card, CardDequeued, CardLeased, CardVmAttached, CardVmDetached
from schemas.cardasks import CardAnswer, CardAsk, CardRequest, LeaseAcquire, VmAttach

WHAT: Final = "cards"
ANSWER_S: Final = 10.0
"""An agent answers at once; one that does not is not there."""


async def ask_afar(place: Place, node: str, body: CardAsk, tell: Tell) -> CardAnswer:
    from events.jetstream import JetStreamLog, JetStreamWire

    async with open_connection(place) as connection:
        log = JetStreamLog(connection, source="/ctl")
        return await ask_on(log, JetStreamWire(connection), node, body, tell, prefix=place.prefix)


async def ask_on(
    log: EventLog, wire: Wire, node: str, body: CardAsk, tell: Tell, *, prefix: str = "yard"
) -> CardAnswer:
    """As `ask`, on an open log and wire."""
    if not isinstance(body, Waits):
        return accepted(await _request(wire, node, body))
    cards = body.cards if isinstance(body, LeaseAcquire) else (body.card,)
    # Followed from before the ask, so that no event about it can be missed.
    follower = log.follow([event_subject("card", node, card, prefix=prefix) for card in cards])
    try:
        await _first_look(follower)
        answer = accepted(await _request(wire, node, body))
        if answer.status != "waiting":
            return answer
        tell(answer)
        return await _followed(follower, wire, node, body, tell)
    except asyncio.CancelledError:
        # Also when the first answer is still on its way: the agent may have heard the ask.
        with contextlib.suppress(NotKnownYet):
            await _take_back(wire, node, body)
        raise
    finally:
        await follower.close()


async def _first_look(follower: Follower) -> None:
    try:
        async with asyncio.timeout(ANSWER_S):
            while not (await follower.next()).synced:
                pass
    except TimeoutError:
        raise Unreachable("the log does not answer; nothing was asked") from None


async def _followed(
    follower: Follower, wire: Wire, node: str, body: Waits, tell: Tell
) -> CardAnswer:
    """Follows until it is granted or over."""
    try:
        async with asyncio.timeout(body.wait_s + LATE_S):
            fate = await _fate(follower, body, tell)
    except TimeoutError:
        await _take_back(wire, node, body)
        raise NotKnownYet(
            f"{_id_of(body)}: the agent of {node} did not say what became of it: yardctl lease list"
        ) from None
    if fate is not None:
        return accepted(fate)
    # An ask repeated under its id has no second effect: this one brings what is needed to use it.
    answer = accepted(await _request(wire, node, body))
    if answer.status == "waiting":
        await _take_back(wire, node, body)
        raise CtlError(f"{_id_of(body)}: it was granted and has ended already")
    return answer


async def _fate(follower: Follower, body: Waits, tell: Tell) -> CardAnswer | None:
    """None when it was granted, else the refusal."""
    got: set[str] = set()
    wanted = set(body.cards) if isinstance(body, LeaseAcquire) else {body.card}
    told: tuple[str, ...] | None = None
    while True:
        batch = await follower.next()
        if not batch.connected:
            tell(CardAnswer(status="waiting", sentence="NATS is away; the place in line is kept"))
            continue
        for card, item in _cards(batch):
            match item.event:
                case CardLeased(holder=holder) if holder == _id_of(body):
                    got.add(card.id)
                case CardVmAttached(name=name) if isinstance(body, VmAttach) and name == body.name:
                    got.add(card.id)
                case CardDequeued(waiter=waiter, why=why) if waiter == _id_of(body):
                    return _over(why)
                case CardVmDetached(name=name) if isinstance(body, VmAttach) and name == body.name:
                    return _over(item.reason or "it was detached")
                case _:
                    pass
            if _has(card, body):
                got.add(card.id)
            ahead = next((w.waiting_for for w in card.waiters if w.id == _id_of(body)), told)
            if ahead is not None and ahead != told:
                told = ahead
                tell(CardAnswer(status="waiting", id=_id_of(body), waiting_for=ahead))
        if got >= wanted:
            return None


def _cards(batch: Batch) -> list[tuple[Card, Recorded]]:
    return [
        (item.state, item)
        for item in batch.items
        if isinstance(item, Recorded) and isinstance(item.state, Card)
    ]


def _has(card: Card, body: Waits) -> bool:
    if isinstance(body, VmAttach):
        return card.vm is not None and card.vm.attached and card.vm.name == body.name
    return any(lease.holder == body.id for lease in card.leases)


def _over(why: str) -> CardAnswer:
    if why == "expired":
        return CardAnswer(
            status="refused",
            code=codes.TIMED_OUT,
            sentence="it waited in line as long as it was told to",
        )
    return CardAnswer(
        status="refused", code=codes.CONFLICT, sentence=f"it left the line: {why or 'withdrawn'}"
    )


def _id_of(body: Waits) -> str:
    return body.id if isinstance(body, LeaseAcquire) else body.name


async def _request(wire: Wire, node: str, body: CardAsk) -> CardAnswer:
    try:
        return await wire.request(WHAT, node, CardRequest(ask=body), CardAnswer, timeout_s=ANSWER_S)
    except LogError as error:
        raise Unreachable(
            f"the agent of node {node} does not answer ({error}); yardctl node list shows the nodes"
        ) from error


async def _take_back(wire: Wire, node: str, body: Waits) -> None:
    """Raises NotKnownYet when the agent does not confirm it."""
    back = taking_back(body)
    assert back is not None
    try:
        async with asyncio.timeout(TAKE_BACK_S):
            await _request(wire, node, back)
    except (Unreachable, TimeoutError):
        raise NotKnownYet(
            f"{_id_of(body)}: whether it left the line is not known: yardctl lease list"
        ) from None
