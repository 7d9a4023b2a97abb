"""Asking for a card from another machine: what the card's events say of a place in line, and who takes it back."""

import asyncio
import contextlib
from collections.abc import Awaitable, Callable
from datetime import UTC, datetime
from typing import Any

import pytest
from msgspec.structs import replace

from controlplane.ctl import cardafar
from controlplane.ctl.cardafar import WHAT, ask_on
from controlplane.ctl.failures import CtlError, NotKnownYet, RejectedByYard, Unreachable
from events.log import Draft
from events.memory import MemoryLog, MemoryWire
from events.memory_broker import MemoryBroker
from events.subjects import event_subject
from schemas.card import (
    Card,
    CardDequeued,
    CardEvent,
    CardLeased,
    CardMeasured,
    CardQueued,
    CardReleased,
    CardVmAttached,
    CardVmAttaching,
    CardVmDetached,
    Lease,
    Vm,
    Waiter,
)
from schemas.cardasks import (
    CardAnswer,
    CardAsk,
    CardRequest,
    ClaimStart,
    LeaseAcquire,
    LeaseRelease,
    VmAttach,
    VmDetach,
)
from tests.support.aio import run, until

NOW = datetime(2026, 1, 1, tzinfo=UTC)
LEASE = LeaseAcquire(id="l-abcdefgh23", name="render", cards=("gpu0", "gpu1"), wait_s=60)
VM = VmAttach(name="win", card="gpu0", wait_s=60)


class Node:
    """An agent in memory: its answers, its cards' events, and what it was asked."""

    def __init__(self, answer: Callable[[CardAsk], CardAnswer]) -> None:
        self.broker = MemoryBroker()
        self.log = MemoryLog(self.broker, source="/agent/n1")
        self.wire = MemoryWire(self.log.connection)
        self.asked: list[CardAsk] = []
        self.answer = answer
        self.told: list[CardAnswer] = []
        self.seqs: dict[str, int] = {}
        self.cards = {
            name: Card(node="n1", id=name, kind="gpu", memory_bytes=8, rev=1)
            for name in ("gpu0", "gpu1")
        }

    async def serve(self, request: CardRequest) -> CardAnswer:
        self.asked.append(request.ask)
        return self.answer(request.ask)

    async def put(self, name: str, event: CardEvent, **changes: Any) -> None:
        card = self.cards[name] = replace(self.cards[name], **changes)
        subject = event_subject("card", "n1", name)
        draft = Draft(
            subject=subject, event=event, state=card, expected_seq=self.seqs.get(name, 0), rev=1
        )
        self.seqs[name] = (await self.log.append(draft, epoch=0)).seqs[0]

    async def queue(self, *ahead: str, id_: str = LEASE.id) -> None:
        for name in LEASE.cards:
            waiter = Waiter(id=id_, since=NOW, memory_bytes=8, waiting_for=ahead)
            await self.put(name, CardQueued(waiter=id_, waiting_for=ahead), waiters=(waiter,))

    async def lease(self, name: str) -> None:
        mine = Lease(holder=LEASE.id, memory_bytes=8, fence=5, since=NOW, kind="named")
        event = CardLeased(holder=LEASE.id, memory_bytes=8, fence=5)
        await self.put(name, event, leases=(mine,), waiters=())

    def ask(self, body: CardAsk) -> "asyncio.Task[CardAnswer]":
        return asyncio.create_task(ask_on(self.log, self.wire, "n1", body, self.told.append))


def waiting(_: CardAsk) -> CardAnswer:
    return CardAnswer(status="waiting", waiting_for=("r-1",))


def tell(
    story: Callable[[Node], Awaitable[None]], answer: Callable[[CardAsk], CardAnswer] = waiting
) -> None:
    async def whole() -> None:
        node = Node(answer)
        serving = await node.wire.serve(WHAT, "n1", CardRequest, node.serve)
        await node.put("gpu0", CardMeasured(used_bytes=0))
        await node.put("gpu1", CardMeasured(used_bytes=0))
        try:
            await story(node)
        finally:
            await serving.close()

    run(whole())


def test_what_never_waits_is_one_question() -> None:
    claim = ClaimStart(id="c-abcdefgh23", name="quake", card="gpu0")

    async def story(node: Node) -> None:
        assert (await node.ask(claim)).status == "granted"
        assert node.asked == [claim]
        assert node.told == []

    tell(story, lambda _: CardAnswer(status="granted"))


def test_a_no_is_told_with_its_code() -> None:

    async def story(node: Node) -> None:
        with pytest.raises(RejectedByYard, match=r"kept by quake \[card_kept\]"):
            await node.ask(LEASE)

    tell(story, lambda _: CardAnswer(status="refused", code="card_kept", sentence="kept by quake"))


def test_a_place_in_line_is_followed_until_all_cards_are_leased() -> None:
    final = CardAnswer(status="granted", id=LEASE.id, fences={"gpu0": 5, "gpu1": 5})

    async def story(node: Node) -> None:
        asking = node.ask(LEASE)
        await until(lambda: len(node.told) == 1, "waiting")
        await node.queue("r-2")
        await until(lambda: len(node.told) == 2, "another holder")
        assert node.told[-1].waiting_for == ("r-2",)
        await node.lease("gpu0")
        await node.put("gpu1", CardMeasured(used_bytes=1))
        node.answer = lambda _: final
        assert not asking.done()
        await node.lease("gpu1")
        assert await asking == final
        # Asked again under its id, which has no second effect, for what is needed to use it.
        assert node.asked == [LEASE, LEASE]

    tell(story)


def test_a_grant_before_the_first_event_is_seen_is_not_missed() -> None:
    async def story(node: Node) -> None:
        def answer(_: CardAsk) -> CardAnswer:
            node.answer = lambda _: CardAnswer(status="granted")
            return CardAnswer(status="waiting")

        node.answer = answer
        asking = node.ask(LEASE)
        await until(lambda: len(node.asked) == 1, "an ask")
        await node.lease("gpu0")
        await node.lease("gpu1")
        assert (await asking).status == "granted"

    tell(story)


def test_a_lease_that_was_had_and_ended_is_no_second_place_in_line() -> None:
    async def story(node: Node) -> None:
        asking = node.ask(LEASE)
        await until(lambda: len(node.told) == 1, "waiting")
        for name in LEASE.cards:
            await node.lease(name)
            ended = CardReleased(holder=LEASE.id, memory_bytes=8, why="expired")
            await node.put(name, ended, leases=())
        with pytest.raises(CtlError, match="ended already"):
            await asking
        assert node.asked == [LEASE, LEASE, LeaseRelease(what=LEASE.id)]

    tell(story)


@pytest.mark.parametrize(
    ("why", "says"),
    [("expired", r"\[timed_out\]"), ("its process ended", "left the line: its process ended")],
)
def test_a_place_in_line_that_ends_is_told(why: str, says: str) -> None:
    async def story(node: Node) -> None:
        asking = node.ask(LEASE)
        await until(lambda: len(node.told) == 1, "waiting")
        await node.queue("r-1", id_="l-other")
        await node.put("gpu0", CardDequeued(waiter="l-other", why=why), waiters=())
        await node.queue("r-1")
        await node.put("gpu0", CardDequeued(waiter=LEASE.id, why=why), waiters=())
        with pytest.raises(RejectedByYard, match=says):
            await asking

    tell(story)


def test_a_vm_is_followed_until_it_has_the_card() -> None:
    async def story(node: Node) -> None:
        asking = node.ask(VM)
        await until(lambda: len(node.told) == 1, "waiting")
        await node.put("gpu0", CardVmAttaching(name="win"), vm=Vm(name="win", since=NOW))
        node.answer = lambda _: CardAnswer(status="granted")
        attached = Vm(name="win", since=NOW, attached=True)
        await node.put("gpu0", CardVmAttached(name="win"), vm=attached)
        assert (await asking).status == "granted"

    tell(story)


def test_a_vm_that_was_detached_meanwhile_is_told() -> None:
    async def story(node: Node) -> None:
        asking = node.ask(VM)
        await until(lambda: len(node.told) == 1, "waiting")
        await node.put("gpu0", CardVmDetached(name="win"), vm=None)
        with pytest.raises(RejectedByYard, match="detached"):
            await asking

    tell(story)


@pytest.mark.parametrize(
    ("body", "back"),
    [(LEASE, LeaseRelease(what=LEASE.id)), (VM, VmDetach(card="gpu0", name="win"))],
)
def test_who_leaves_takes_the_place_back(body: CardAsk, back: CardAsk) -> None:
    async def story(node: Node) -> None:
        asking = node.ask(body)
        await until(lambda: len(node.told) == 1, "waiting")
        asking.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await asking
        assert asking.cancelled()
        assert node.asked == [body, back]

    tell(story)


def test_who_leaves_before_the_first_answer_takes_it_back_too() -> None:
    async def story(node: Node) -> None:
        held = asyncio.Event()

        async def slow(request: CardRequest) -> CardAnswer:
            node.asked.append(request.ask)
            if isinstance(request.ask, LeaseAcquire):
                await held.wait()
            return CardAnswer(status="done")

        await node.wire.serve(WHAT, "n2", CardRequest, slow)
        asking = asyncio.create_task(ask_on(node.log, node.wire, "n2", LEASE, node.told.append))
        await until(lambda: node.asked == [LEASE], "the ask is heard")
        asking.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await asking
        assert node.asked == [LEASE, LeaseRelease(what=LEASE.id)]

    tell(story)


def test_an_agent_that_never_says_is_left_in_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cardafar, "LATE_S", 0.05)

    async def story(node: Node) -> None:
        body = replace(LEASE, wait_s=0.0)
        with pytest.raises(NotKnownYet, match="yardctl lease list"):
            await node.ask(body)
        assert node.asked == [body, LeaseRelease(what=LEASE.id)]

    tell(story)


def test_an_agent_that_only_starts_is_69() -> None:
    async def story(node: Node) -> None:
        with pytest.raises(Unreachable, match="in a moment"):
            await node.ask(LEASE)

    early = CardAnswer(status="refused", code="yard_unavailable", sentence="ask again in a moment")
    tell(story, lambda _: early)


def test_no_agent_is_69() -> None:
    async def story() -> None:
        log = MemoryLog(MemoryBroker())
        with pytest.raises(Unreachable, match="the agent of node n9"):
            await ask_on(log, MemoryWire(log.connection), "n9", LEASE, lambda _: None)

    run(story())


def test_nats_away_in_the_middle_keeps_the_place() -> None:
    async def story(node: Node) -> None:
        asking = node.ask(LEASE)
        await until(lambda: len(node.told) == 1, "waiting")
        node.log.connection.disconnect()
        await until(lambda: len(node.told) == 2, "told that NATS is away")
        assert "NATS is away" in node.told[-1].sentence
        asking.cancel()
        with contextlib.suppress(asyncio.CancelledError, NotKnownYet):
            await asking

    tell(story)
