"""What is answered to asks about cards, by value."""

from datetime import UTC, datetime, timedelta

import pytest

from nodeagent.domain.answering import Asker, Decided, decide, standing
from nodeagent.domain.granting import Facts, settle
from nodeagent.domain.held import Held
from schemas import codes
from schemas.card import Card, Claim, Lease, ProcessRef, Vm
from schemas.cardasks import (
    CardAsk,
    ClaimEnd,
    ClaimStart,
    LeaseAcquire,
    LeaseRelease,
    VmAttach,
    VmDetach,
)
from schemas.settings import GIB
from tests.support.agent_yard import a_held

NOW = datetime(2026, 1, 1, tzinfo=UTC)
REF = ProcessRef(pid=5, started=1, boot="b")
CLAIM = Claim(id="c-0", name="doom", kind="game", since=NOW)


def card(id: str = "gpu0", *held: Lease, **fields) -> Card:
    given = {"kind": "gpu", "memory_bytes": 8 * GIB, "rev": 7, "leases": held, **fields}
    return Card(node="n1", id=id, **given)


def named(holder: str, memory: int = 1, **fields) -> Lease:
    given = {"fence": 3, "since": NOW, "kind": "named", "name": f"n-{holder}", **fields}
    return Lease(holder=holder, memory_bytes=memory * GIB, **given)


def acquire(id: str = "l-1", *cards: str, **fields) -> LeaseAcquire:
    return LeaseAcquire(id=id, name="train", cards=cards or ("gpu0",), **fields)


class Node:
    def __init__(self, *cards: Card, held: tuple[Held, ...] = ()) -> None:
        self.cards = {one.id: one for one in cards}
        self.held = {one.replica.id: one for one in held}

    def ask(self, ask: CardAsk, process: ProcessRef | None = None) -> Decided:
        asker = Asker(by="ana", process=process)
        decided = decide(ask, asker, self.cards, self.held, Facts(), NOW)
        self.apply(decided.changes)
        for batch in settle(self.cards, self.held, Facts(), NOW).batches:
            self.apply(batch)
        return decided

    def apply(self, batch) -> None:
        self.cards |= {change.card.id: change.card for change in batch}

    def answer(self, ask: CardAsk, process: ProcessRef | None = None):
        decided = self.ask(ask, process)
        return decided.answer or standing(self.cards, decided.id)


def test_a_lease_is_granted_with_its_fences_and_says_who_asked():
    node = Node(card("gpu0"), card("gpu1"))
    ask = acquire("l-1", "gpu0", "gpu1", memory_bytes=GIB, ttl_s=60.0, pinned=True)
    answer = node.answer(ask, REF)
    assert (answer.status, answer.fences) == ("granted", {"gpu0": 8, "gpu1": 8})
    (lease,) = node.cards["gpu1"].leases
    assert (lease.by, lease.process, lease.pinned, lease.name) == ("ana", REF, True, "train")
    assert lease.expires_at == NOW + timedelta(seconds=60)


def test_req_x4_an_ask_repeated_under_its_id_has_no_second_effect():
    node = Node(card())
    first = node.answer(acquire())
    before = dict(node.cards)
    assert node.answer(acquire()) == first
    assert node.cards == before
    waiting = acquire("l-2", wait_s=30.0, priority="batch")
    again = node.answer(waiting)
    before = dict(node.cards)
    assert (again.status, node.answer(waiting)) == ("waiting", again)
    assert node.cards == before


def test_a_lease_that_is_on_its_way_back_is_not_granted_again_by_a_late_repetition():
    node = Node(card())
    node.answer(acquire())
    node.answer(LeaseRelease(what="l-1"))
    answer = node.answer(acquire())
    assert (answer.status, answer.code) == ("refused", codes.CONFLICT)


def test_inv_9_a_refusal_says_with_numbers_what_stands_against_it():
    node = Node(card("gpu0", named("l-0", 6, pinned=True)))
    before = dict(node.cards)
    answer = node.answer(acquire(memory_bytes=4 * GIB))
    assert (answer.status, answer.code) == ("refused", codes.NO_CAPACITY)
    assert answer.sentence.startswith("gpu0: needs 4.0 GiB, 2.0 GiB free of 8.0 GiB")
    answer = node.answer(acquire(memory_bytes=9 * GIB, wait_s=60.0))
    assert answer.sentence == "gpu0 has 8.0 GiB, 9.0 GiB are more than that"
    answer = node.answer(acquire("l-1", "gpu7", "gpu0"))
    assert (answer.code, answer.sentence) == (
        codes.NOT_FOUND,
        "this node has no card gpu7; its cards are: gpu0",
    )
    assert node.cards == before


def test_nobody_waits_for_a_card_of_which_nothing_can_be_given():
    for gone, told in (
        (card(memory_bytes=0), "gpu0: the card is not there any more"),
        (card(memory_bytes=0, mig=True), "gpu0: divided by MIG and left alone"),
    ):
        for ask in (acquire(wait_s=60.0), acquire(memory_bytes=GIB, wait_s=60.0)):
            node = Node(gone)
            answer = node.answer(ask)
            assert (answer.status, answer.code) == ("refused", codes.NO_CAPACITY)
            assert answer.sentence == told
            assert node.cards["gpu0"].waiters == ()


def test_who_does_not_wait_has_nobody_leave():
    node = Node(card("gpu0", named("l-0", 8, exclusive=True)))
    before = dict(node.cards)
    answer = node.answer(acquire(priority="hold"))
    assert (answer.status, node.cards) == ("refused", before)
    answer = node.answer(acquire(priority="hold", wait_s=5.0))
    assert (answer.status, answer.waiting_for) == ("waiting", ("l-0",))


def test_who_does_not_wait_does_not_overtake_who_does():
    node = Node(card("gpu0", named("l-0", 5, pinned=True)))
    assert node.answer(acquire("l-1", wait_s=60.0, memory_bytes=4 * GIB)).status == "waiting"
    answer = node.answer(acquire("l-2", memory_bytes=GIB))
    assert answer.sentence.startswith("gpu0: train is in line for it")
    # Of a higher priority he is before them.
    assert node.answer(acquire("l-3", memory_bytes=GIB, priority="hold")).status == "granted"


@pytest.mark.parametrize(
    ("fields", "keeper"),
    [
        ({"claims": (CLAIM,)}, "claim doom"),
        ({"vm": Vm(name="win", since=NOW, attached=True)}, "vm win"),
        ({"leases": (named("l-0", 8, exclusive=True, pinned=True),)}, "lease n-l-0"),
    ],
)
def test_a_kept_card_is_refused_by_the_name_of_who_keeps_it(fields, keeper):
    node = Node(card("gpu0", **fields) if "leases" not in fields else card(**fields))
    answer = node.answer(acquire())
    assert answer.code == codes.CARD_KEPT
    assert f"gpu0: kept by {keeper}" in answer.sentence
    # It may wait there instead.
    assert node.answer(acquire(wait_s=9.0)).status == "waiting"


def test_a_release_is_by_id_or_by_the_only_one_of_that_name():
    node = Node(
        card("gpu0", named("l-1", name="a"), named("l-2", name="b"), named("l-3", name="b"))
    )
    assert node.answer(LeaseRelease(what="a")).status == "done"
    assert [(x.holder, x.why) for x in node.cards["gpu0"].leases if x.returning] == [
        ("l-1", "released")
    ]
    ambiguous = node.answer(LeaseRelease(what="b"))
    assert (ambiguous.code, ambiguous.sentence) == (
        codes.AMBIGUOUS_NAME,
        "several are called b: l-2, l-3",
    )
    assert node.answer(LeaseRelease(what="l-3")).status == "done"
    assert node.answer(LeaseRelease(what="l-9")).code == codes.NOT_FOUND


def test_a_lease_that_is_on_its_way_back_has_given_its_name_up():
    node = Node(
        card("gpu0", named("l-1", name="train", returning=True), named("l-2", name="train"))
    )
    answer = node.answer(LeaseRelease(what="train"))
    assert (answer.status, answer.id) == ("done", "l-2")
    # Both have ended now, and a release that is repeated still is one.
    assert node.answer(LeaseRelease(what="l-2")).status == "done"


def test_a_release_takes_a_waiter_out_of_line_and_no_engine_off_its_card():
    engine = Lease(holder="r-1", memory_bytes=GIB, fence=1, since=NOW)
    node = Node(card("gpu0", engine, named("l-0", pinned=True)), held=(a_held("r-1"),))
    assert node.answer(acquire(wait_s=9.0)).status == "waiting"
    assert node.answer(LeaseRelease(what="train")).status == "done"
    assert node.cards["gpu0"].waiters == ()
    assert node.answer(LeaseRelease(what="r-1")).code == codes.CONFLICT
    assert len(node.cards["gpu0"].leases) == 2


def test_a_claim_has_its_card_at_once_but_not_from_a_vm():
    node = Node(card("gpu0", named("l-1", pinned=True)))
    start = ClaimStart(id="c-1", name="doom", card="gpu0")
    assert node.answer(start, REF).status == "granted"
    assert node.answer(start, REF).status == "granted"
    (claim,) = node.cards["gpu0"].claims
    assert (claim.by, claim.process, claim.kind) == ("ana", REF, "game")
    # A second one may come: two players, one card.
    assert node.answer(ClaimStart(id="c-2", name="doom", card="gpu0")).status == "granted"
    assert node.answer(ClaimEnd(what="doom")).code == codes.AMBIGUOUS_NAME
    assert node.answer(ClaimEnd(what="c-1")).status == "done"
    assert node.answer(ClaimEnd(what="doom")).status == "done"
    assert node.answer(ClaimEnd(what="doom")).code == codes.NOT_FOUND
    vm = Node(card("gpu0", vm=Vm(name="win", since=NOW)))
    answer = vm.answer(start)
    assert (answer.code, answer.sentence) == (codes.CARD_KEPT, "gpu0: kept by vm win")


def test_a_vm_waits_for_engines_and_is_refused_where_somebody_keeps_the_card():
    engine = Lease(holder="r-1", memory_bytes=GIB, fence=1, since=NOW)
    attach = VmAttach(name="win", card="gpu0", wait_s=5.0)
    node = Node(card("gpu0", engine), held=(a_held("r-1"),))
    answer = node.answer(attach)
    assert (answer.status, answer.waiting_for) == ("waiting", ("r-1",))
    assert node.answer(attach) == answer
    assert node.answer(VmAttach(name="mac", card="gpu0")).code == codes.CARD_KEPT
    assert node.answer(VmDetach(card="gpu0", name="mac")).code == codes.NOT_FOUND
    assert node.answer(VmDetach(card="gpu0", name="win")).status == "done"
    assert node.answer(VmDetach(card="gpu0")).code == codes.NOT_FOUND
    assert node.answer(attach).status == "waiting"
    assert node.answer(VmDetach(card="gpu0")).status == "done"
    assert Node(card()).answer(attach).status == "granted"
    for kept in (card("gpu0", claims=(CLAIM,)), card("gpu0", named("l-1", pinned=True))):
        assert Node(kept).answer(attach).code == codes.CARD_KEPT
    cpu = Node(card("cpu", kind="cpu"))
    assert cpu.answer(VmAttach(name="win", card="cpu")).code == codes.INVALID
