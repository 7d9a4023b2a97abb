"""Who gets a card, who waits and who leaves for whom, by value."""

from datetime import UTC, datetime, timedelta

import pytest
from msgspec.structs import replace

from nodeagent.domain import leases
from nodeagent.domain.granting import Facts, Settled, settle
from nodeagent.domain.line import line, place_of, queue
from schemas.card import Card, Claim, Lease, ProcessRef, Stowaway, Vm, Waiter
from schemas.messages import tag_of
from schemas.model import Parking
from schemas.settings import NodeagentSettings
from tests.support.agent_yard import a_held, a_launch

NOW = datetime(2026, 1, 1, tzinfo=UTC)
REF = ProcessRef(pid=5, started=1, boot="b")
SETTINGS = NodeagentSettings()


def card(id: str = "gpu0", *held: Lease, **fields) -> Card:
    given = {"kind": "gpu", "memory_bytes": 100, "rev": 7, "leases": held, **fields}
    return Card(node="n1", id=id, **given)


def lease(holder: str, memory: int = 10, **fields) -> Lease:
    given = {"fence": 3, "since": NOW, **fields}
    return Lease(holder=holder, memory_bytes=memory, **given)


def named(holder: str, memory: int = 10, **fields) -> Lease:
    return lease(holder, memory, kind="named", name=f"n-{holder}", **fields)


def waiter(id: str, *cards: str, memory: int | None = None, **fields) -> Waiter:
    given = {"since": NOW, "expires_at": NOW + timedelta(seconds=60), **fields}
    return Waiter(
        id=id,
        cards=cards or ("gpu0",),
        memory_bytes=memory or 0,
        exclusive=memory is None,
        **given,
    )


class Node:
    """Cards and engines of a node, settled as often as the test says."""

    def __init__(self, *cards: Card, engines=(), **facts) -> None:
        self.cards = {one.id: one for one in cards}
        self.held = {one.replica.id: one for one in engines}
        self.facts = Facts(**facts)
        self.now = NOW

    def wait(self, *waiters: Waiter) -> None:
        for one in waiters:
            self.cards |= {change.card.id: change.card for change in queue(self.cards, one)}

    def settle(self, **facts) -> Settled:
        self.facts = replace(self.facts, **facts)
        settled = settle(self.cards, self.held, self.facts, self.now)
        for batch in settled.batches:
            self.cards |= {change.card.id: change.card for change in batch}
        return settled

    def drop(self, holder: str) -> None:
        for one in tuple(self.cards.values()):
            self.cards[one.id] = leases.release(one, holder) or one

    def holders(self, id: str = "gpu0") -> list[str]:
        return [x.holder for x in self.cards[id].leases]

    def line(self) -> list[str]:
        return [x.id for x in line(self.cards)]

    def waits_for(self, id: str) -> tuple[str, ...]:
        return next(x.waiting_for for x in line(self.cards) if x.id == id)


def engine(name: str, phase: str = "ready", *cards: str, **fields):
    return a_held(name, phase, cards=cards or ("gpu0",), **fields)


def tags(settled: Settled) -> list[list[str]]:
    return [[tag_of(c.event) if c.event else "" for c in batch] for batch in settled.batches]


def test_req_d15_a_lease_over_several_cards_is_granted_at_once_and_fenced_on_each():
    node = Node(card("gpu0"), card("gpu1", rev=20))
    node.wait(waiter("l-1", "gpu0", "gpu1", ttl_s=5.0))
    settled = node.settle()
    assert tags(settled) == [["card.leased", "card.leased"]]
    first, second = (node.cards[x].leases[0] for x in ("gpu0", "gpu1"))
    assert (first.fence, second.fence) == (9, 22)
    assert (first.fence, second.fence) == (node.cards["gpu0"].rev, node.cards["gpu1"].rev)
    assert first.expires_at == NOW + timedelta(seconds=5)
    assert first.memory_bytes == 100
    assert node.line() == []


def test_all_cards_or_none():
    node = Node(card("gpu0"), card("gpu1", named("l-0", pinned=True)))
    node.wait(waiter("l-1", "gpu0", "gpu1"))
    node.settle()
    assert node.holders("gpu0") == []
    assert node.waits_for("l-1") == ("l-0",)


def test_the_rest_of_a_card_with_a_parked_copy_may_be_had_whole():
    node = Node(card("gpu0", lease("r-1", 30, kind="parked")), engines=[engine("r-1", "parked")])
    node.wait(waiter("l-1"))
    node.settle()
    assert [(x.holder, x.memory_bytes) for x in node.cards["gpu0"].leases] == [
        ("r-1", 30),
        ("l-1", 70),
    ]


def test_a_stowaway_is_in_the_way_of_a_whole_card_and_is_left_alone():
    stowaway = Stowaway(pid=9, name="blender", memory_bytes=1, since=NOW)
    node = Node(card("gpu0", stowaways=(stowaway,)))
    node.wait(waiter("l-1"), waiter("l-2", memory=10))
    assert node.settle().wishes == {}
    assert node.waits_for("l-1") == ("pid 9",)
    # Nobody overtakes, though there would be room for the second.
    assert node.waits_for("l-2") == ("l-1",)


def test_the_line_goes_by_priority_then_time_then_id():
    node = Node(card("gpu0", named("l-0", pinned=True, exclusive=True)))
    later = NOW + timedelta(seconds=1)
    node.wait(
        waiter("l-4", priority="batch"),
        waiter("l-2"),
        waiter("l-1"),
        waiter("l-3", since=later),
        waiter("l-5", priority="hold", since=later),
    )
    node.settle()
    assert node.line() == ["l-5", "l-1", "l-2", "l-3", "l-4"]
    assert place_of(node.cards, "l-2") == 3
    assert place_of(node.cards, "l-9") == 0


def test_a_turn_of_the_line_changes_nobody_but_the_next_one():
    node = Node(card("gpu0", named("l-0", pinned=True)))
    node.wait(*(waiter(f"l-{n}", pinned=True) for n in range(1, 9)))
    node.settle()
    assert [node.waits_for(f"l-{n}") for n in range(1, 9)] == [(f"l-{n}",) for n in range(8)]
    node.drop("l-0")
    assert tags(node.settle()) == [["card.leased"]]
    node.drop("l-1")
    assert tags(node.settle()) == [["card.leased"]]
    assert node.waits_for("l-3") == ("l-2",)


def test_as_few_engines_leave_as_needed_idle_ones_first_then_the_longest_unused():
    old, older = NOW - timedelta(hours=1), NOW - timedelta(hours=2)
    names = ("r-a", "r-b", "r-c", "r-d")
    node = Node(
        card("gpu0", *(lease(x, 25) for x in names)),
        engines=[
            engine("r-a", ready_at=older),
            engine("r-b", ready_at=old),
            engine("r-c", ready_at=older),
            engine("r-d", ready_at=older),
        ],
        requests={"r-a": 2},
    )
    node.wait(waiter("l-1", memory=50))
    wishes = node.settle().wishes
    assert sorted(wishes) == ["r-c", "r-d"]
    assert node.waits_for("l-1") == ("r-c", "r-d")
    stop = wishes["r-c"]
    assert (stop.decision, stop.reason, stop.park) == ("l-1", "lease", "may")
    assert (stop.drain_timeout_s, stop.take_back, stop.force) == (60.0, False, False)
    # A request that comes now changes nobody's mind.
    assert sorted(node.settle(requests={"r-c": 1}).wishes) == ["r-c", "r-d"]
    node.drop("r-c")
    assert sorted(node.settle().wishes) == ["r-d"]
    node.drop("r-d")
    assert node.settle().wishes == {}
    assert "l-1" in node.holders()


def test_no_larger_set_leaves_than_would_do():
    old = NOW - timedelta(hours=1)
    node = Node(
        card("gpu0", lease("r-a", 10), lease("r-b", 90)),
        engines=[engine("r-a", ready_at=old), engine("r-b", ready_at=NOW)],
    )
    node.wait(waiter("l-1", memory=80))
    assert sorted(node.settle().wishes) == ["r-b"]


@pytest.mark.parametrize(
    ("priority", "phase", "leaves", "bound_s"),
    [
        ("hold", "starting", True, 10.0),
        ("foreground", "ready", True, 10.0),
        ("interactive", "ready", True, 60.0),
        ("interactive", "starting", False, 0.0),
        ("batch", "ready", False, 0.0),
    ],
)
def test_a_drain_for_a_lease_is_bounded_by_its_class(priority, phase, leaves, bound_s):
    node = Node(card("gpu0", lease("r-1", 50)), engines=[engine("r-1", phase)])
    node.wait(waiter("l-1", priority=priority))
    wishes = node.settle().wishes
    assert ("r-1" in wishes) == leaves
    assert node.waits_for("l-1") == ("r-1",)
    if leaves:
        assert wishes["r-1"].drain_timeout_s == bound_s


def test_nobody_leaves_in_vain():
    """The rest of the card is pinned: whatever leaves, there is no room."""
    node = Node(
        card("gpu0", lease("r-1", 30), named("l-0", 50, pinned=True)), engines=[engine("r-1")]
    )
    node.wait(waiter("l-1", memory=60))
    assert node.settle().wishes == {}
    assert node.waits_for("l-1") == ("l-0", "r-1")


@pytest.mark.parametrize(
    ("fields", "leaves"),
    [
        ({}, True),
        ({"priority": "batch"}, True),
        ({"priority": "foreground"}, False),
        ({"pinned": True}, False),
    ],
)
def test_a_named_lease_leaves_for_one_of_its_own_priority_or_a_higher_one(fields, leaves):
    node = Node(card("gpu0", named("l-0", process=REF, **fields)))
    node.wait(waiter("l-1"))
    settled = node.settle()
    assert bool(node.cards["gpu0"].leases[0].leaving) == leaves
    assert ["card.draining"] in tags(settled) or not leaves
    # Its process is asked first, so it holds its memory until that has ended.
    assert not node.cards["gpu0"].leases[0].returning
    node.settle(ended=frozenset({REF}))
    assert node.cards["gpu0"].leases[0].returning


def test_a_lease_without_a_process_that_is_asked_to_leave_is_over_with_that():
    node = Node(card("gpu0", named("l-0")))
    node.wait(waiter("l-1"))
    node.settle()
    (left,) = node.cards["gpu0"].leases
    assert (left.returning, left.why, left.leaving) == (True, "drained", "l-1")
    # Nothing is given before the memory was read back.
    assert node.line() == ["l-1"]
    node.drop("l-0")
    node.settle()
    assert node.holders() == ["l-1"]


def test_a_lease_ends_by_its_time_and_with_its_process_on_all_its_cards_at_once():
    expires = {"expires_at": NOW + timedelta(seconds=9)}
    lives = {"process": REF}
    node = Node(
        card("gpu0", named("l-1", **expires), named("l-2", **lives)),
        card("gpu1", named("l-1", **expires)),
    )
    assert node.settle().batches == ()
    node.now += timedelta(seconds=9)
    settled = node.settle(ended=frozenset({REF}))
    assert [len(batch) for batch in settled.batches] == [2, 1]
    told = {(x.holder, x.why) for one in node.cards.values() for x in one.leases if x.returning}
    assert told == {("l-1", "expired"), ("l-2", "process ended")}


def test_a_waiter_leaves_the_line_by_its_time_and_with_its_process():
    node = Node(card("gpu0", named("l-0", pinned=True)))
    node.wait(waiter("l-1"), waiter("l-2", process=REF, expires_at=None))
    node.settle(ended=frozenset({REF}))
    assert node.line() == ["l-1"]
    node.now += timedelta(seconds=60)
    settled = node.settle()
    assert node.line() == []
    assert [c.event.why for batch in settled.batches for c in batch] == ["expired"]


@pytest.mark.parametrize(
    ("kind", "force", "bound_s", "park"),
    [("game", True, 0.0, "never"), ("app", False, 30.0, "may")],
)
def test_a_claim_has_others_leave_at_once_or_within_its_bound(kind, force, bound_s, park):
    claim = Claim(id="c-1", name="doom", kind=kind, since=NOW)
    node = Node(
        card("gpu0", lease("r-1"), named("l-1"), named("l-2", pinned=True), claims=(claim,)),
        engines=[engine("r-1")],
    )
    stop = node.settle().wishes["r-1"]
    assert (stop.decision, stop.reason, stop.force) == ("c-1", "claim", force)
    assert (stop.drain_timeout_s, stop.park) == (bound_s, park)
    assert [(x.holder, x.leaving) for x in node.cards["gpu0"].leases] == [
        ("r-1", ""),
        ("l-1", "c-1"),
        ("l-2", ""),
    ]
    # With its process the claim is over, and with that the wish.
    gone = replace(claim, process=REF)
    node.cards["gpu0"] = replace(node.cards["gpu0"], claims=(gone,))
    settled = node.settle(ended=frozenset({REF}))
    assert settled.wishes == {}
    assert ["card.claim_ended"] in tags(settled)


def test_a_game_ends_at_once_whatever_else_asked_before():
    app = Claim(id="c-0", name="cad", kind="app", since=NOW)
    game = Claim(id="c-1", name="doom", kind="game", since=NOW)
    node = Node(
        card("gpu0", lease("r-1", 10, fence=1), claims=(app,)),
        card("gpu1", lease("r-1", 10, fence=1), claims=(game,)),
        engines=[engine("r-1", "ready", "gpu0", "gpu1")],
    )
    assert node.settle().wishes["r-1"].decision == "c-1"


@pytest.mark.parametrize(("way", "stays"), [("sleep", False), ("checkpoint", True)])
def test_after_a_vm_only_a_checkpoint_may_stay(way, stays):
    vm = Vm(name="win", since=NOW)
    node = Node(
        card("gpu0", lease("r-1", 2, kind="parked"), vm=vm),
        engines=[engine("r-1", "parked", park_way=way)],
    )
    settled = node.settle()
    found = node.cards["gpu0"].vm
    assert found is not None
    assert found.attached == stays
    assert ("r-1" in settled.wishes) != stays
    if not stays:
        assert settled.wishes["r-1"].park == "never"
        node.drop("r-1")
        assert tags(node.settle()) == [["card.vm_attached"]]


def test_an_engine_leaves_for_a_vm_within_the_bound_and_parks_only_by_checkpoint():
    vm = Vm(name="win", since=NOW)
    for way, park in (("sleep", "never"), ("checkpoint", "may")):
        launch = a_launch(parking=Parking(way=way))
        node = Node(card("gpu0", lease("r-1"), vm=vm), engines=[engine("r-1", launch=launch)])
        stop = node.settle().wishes["r-1"]
        assert (stop.decision, stop.reason, stop.park) == ("vm-win@gpu0", "vm", park)
        assert stop.drain_timeout_s == 60.0


def test_a_vm_that_did_not_get_its_card_in_time_does_without_it():
    vm = Vm(name="win", since=NOW, expires_at=NOW + timedelta(seconds=5))
    node = Node(card("gpu0", lease("r-1"), vm=vm), engines=[engine("r-1")])
    node.now += timedelta(seconds=5)
    settled = node.settle()
    assert node.cards["gpu0"].vm is None
    assert settled.wishes == {}


def test_a_waiter_waits_behind_a_claim_and_is_served_after_it():
    claim = Claim(id="c-1", name="doom", kind="game", since=NOW)
    node = Node(card("gpu0", claims=(claim,)))
    node.wait(waiter("l-1", memory=10))
    node.settle()
    assert node.waits_for("l-1") == ("c-1",)
    node.cards["gpu0"] = replace(node.cards["gpu0"], claims=())
    node.settle()
    assert node.holders() == ["l-1"]


def test_parked_copies_make_way_for_a_start_on_cpu_the_longest_parked_first():
    early, late = NOW - timedelta(hours=2), NOW - timedelta(hours=1)
    copies = [
        lease("r-1", 30, kind="parked", since=late),
        lease("r-2", 30, kind="parked", since=early),
    ]
    node = Node(
        card("cpu", *copies, kind="cpu"),
        engines=[engine("r-1", "parked"), engine("r-2", "parked"), engine("r-9", "waiting")],
    )
    node.wait(waiter("r-9", "cpu", memory=60, kind="replica", expires_at=None))
    wishes = node.settle().wishes
    assert sorted(wishes) == ["r-2"]
    assert (wishes["r-2"].reason, wishes["r-2"].park) == ("ram", "never")
    node.drop("r-2")
    node.settle()
    assert node.cards["cpu"].leases[-1].kind == "replica"
    assert node.holders("cpu") == ["r-1", "r-9"]


def test_a_planned_start_has_only_those_leave_that_its_plan_names_and_that_may():
    node = Node(
        card("gpu0", named("l-1", 60), named("l-2", 40), lease("r-1", 0)),
        engines=[engine("r-9", "waiting")],
    )
    node.wait(waiter("r-9", memory=50, kind="replica", waiting_for=("l-1",), expires_at=None))
    node.settle()
    assert [bool(x.leaving) for x in node.cards["gpu0"].leases] == [True, False, False]


def test_a_planned_start_that_can_have_no_room_is_out_of_line():
    for there in (named("l-1", 60), named("l-1", 60, pinned=True)):
        node = Node(card("gpu0", there), engines=[engine("r-9", "waiting")])
        names = ("l-1",) if there.pinned else ()
        node.wait(waiter("r-9", memory=50, kind="replica", waiting_for=names, expires_at=None))
        settled = node.settle()
        assert node.line() == []
        assert tags(settled) == [["card.dequeued"]]
    claim = Claim(id="c-1", name="doom", kind="game", since=NOW)
    node = Node(card("gpu0", claims=(claim,)), engines=[engine("r-9", "waiting")])
    node.wait(waiter("r-9", memory=50, kind="replica", expires_at=None))
    (batch,) = node.settle().batches
    assert batch[0].event.why == "gpu0 is kept by claim doom"


def test_a_drain_that_is_needed_no_more_is_wished_no_more():
    node = Node(card("gpu0", lease("r-1", 60), named("l-0", 40)), engines=[engine("r-1")])
    node.cards["gpu0"] = replace(
        node.cards["gpu0"],
        leases=(
            node.cards["gpu0"].leases[0],
            replace(node.cards["gpu0"].leases[1], pinned=True),
        ),
    )
    node.wait(waiter("l-1", memory=30))
    assert sorted(node.settle().wishes) == ["r-1"]
    # Somebody else went by himself.
    node.drop("l-0")
    assert node.settle().wishes == {}
    assert "l-1" in node.holders()


@pytest.mark.parametrize("leased", [False, True])
def test_a_waiter_of_a_card_that_is_gone_is_out_of_line(leased):
    """One that is gone and still has leases is there with no memory at all."""
    node = Node(card("gpu0"), card("gpu1", named("l-0", pinned=True)))
    node.wait(waiter("l-1", "gpu0", "gpu1"))
    node.settle()
    if leased:
        node.cards["gpu1"] = replace(node.cards["gpu1"], memory_bytes=0)
    else:
        del node.cards["gpu1"]
    node.settle()
    assert node.line() == []


@pytest.mark.parametrize(
    ("engines", "stays"),
    [
        ([engine("r-9", "waiting")], True),
        ([engine("r-9", "parked")], True),
        ([engine("r-9", "parked", ending=True)], False),
        ([engine("r-9", "withdrawn")], False),
        ([], False),
    ],
)
def test_a_place_in_line_that_no_engine_stands_in_blocks_nobody(engines, stays):
    node = Node(card("gpu0", named("l-0", process=REF)), engines=engines)
    names = ("l-0",)
    node.wait(waiter("r-9", memory=95, kind="replica", waiting_for=names, expires_at=None))
    node.settle()
    assert (node.line() == ["r-9"]) == stays
