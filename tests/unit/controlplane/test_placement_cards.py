"""What is on a card decides its rank: leases, waiters, claims, a VM, stowaways, parked copies, and sets of cards."""

from collections.abc import Sequence
from typing import Any

import pytest
from msgspec.structs import replace

from controlplane.domain import placement, searching
from controlplane.domain.index import StepIndex
from controlplane.domain.placement import (
    Claims,
    Demand,
    NoRoom,
    Placed,
    Verdict,
    Wait,
    candidates,
    place,
)
from controlplane.domain.scene import ANY, Scene
from schemas import cardstate
from schemas.activation import ActivationIdle
from schemas.card import CardMeasured, Claim, Lease, Stowaway, Vm, Waiter
from schemas.model import Model
from schemas.node import NodeChanged
from schemas.placement import Candidate
from schemas.plan import Plan, PlanChanged, PlanItem, Stop
from schemas.record import Measured, Record, RecordMeasured
from schemas.replica import ReplicaParked
from tests.support.worlds import GIB, T0, Yard, counting_ids, model, profile, yard

LEASE = Lease(holder="l-1", memory_bytes=8 * GIB, fence=1, since=T0, kind="named", name="ann")
WHOLE = replace(LEASE, exclusive=True)
GAME = Claim(id="c-1", name="doom", kind="game", since=T0)
VM = Vm(name="windows", since=T0)
STOWAWAY = Stowaway(pid=7, name="blender", memory_bytes=GIB, since=T0)
WAITER = Waiter(id="l-9", since=T0, memory_bytes=8 * GIB, name="bob", cards=("gpu0",))


def on(y: Yard, card: str, node: str = "n1", **fields: Any) -> Yard:
    """The card becomes so, in its agent's words."""
    state = y.world.cards[(node, card)]
    y._card(replace(state, rev=state.rev + 1, **fields), CardMeasured(used_bytes=0))
    return y


def scene_of(y: Yard) -> Scene:
    index = StepIndex()
    index.sync(y.world)
    live = y.live()
    return Scene(
        world=y.world,
        live=live,
        now=y.now,
        ids=counting_ids(),
        settings=y.settings,
        index=index,
    )


def two(name: str = "m", gib: float = 4, **fields: object) -> Model:
    """One entry for each of two cards, gpu0 first."""
    return model(
        name,
        profiles=[
            profile("on-gpu0", gib, card=("n1/gpu0",), **fields),
            profile("on-gpu1", gib, card=("n1/gpu1",), **fields),
        ],
    )


def verdict(y: Yard, entry: Model, scope: str = ANY, claimed: Sequence[str] = ()) -> Verdict:
    if entry.name not in y.world.models:
        y.add(entry)
    claims = Claims(frozenset(("n1", card) for card in claimed))
    demand = Demand(model=y.world.models[entry.name], wanted_at=y.now, scope=scope)
    return place(scene_of(y), demand, claims)


def all_of(y: Yard, entry: Model, scope: str = ANY) -> tuple[Candidate, ...]:
    if entry.name not in y.world.models:
        y.add(entry)
    demand = Demand(model=y.world.models[entry.name], wanted_at=y.now, scope=scope)
    return candidates(scene_of(y), demand)


def ranks(y: Yard, entry: Model, scope: str = ANY) -> list[tuple[str, int | None]]:
    return [("+".join(c.cards), c.rank) for c in all_of(y, entry, scope)]


def running(y: Yard, name: str, card: str, gib: float = 4, **fields: Any) -> str:
    """A model that runs on this card, was answered, and is past its residency; its replica."""
    y.add(model(name, profiles=[profile(gib=gib, card=(f"n1/{card}",), **fields)], idle_s=0))
    y.request(name)
    y.until(lambda: y.ready(name), 20)
    y.advance(12)
    return y.ready(name)[0]


def park(y: Yard, id_: str, residual_gib: float = 0.0, ram_gib: float = 4.0) -> str:
    """The replica was drained and parked: what it keeps is on its cards, its weights are in RAM."""
    replica = y.world.replicas[id_]
    plan = y.world.plans[replica.node]
    items: list[PlanItem] = []
    for item in plan.items:
        if item.replica == id_:
            stop = Stop(decision="d-idle", reason="idle", decided_at=y.now, park="may")
            items.append(replace(item, stop=stop))
        else:
            items.append(item)
    y.append(
        "plan",
        (replica.node,),
        PlanChanged(stopping=(id_,)),
        Plan(node=replica.node, items=tuple(items)),
    )
    residual = int(residual_gib * GIB)
    activation = y.world.activations[(replica.model, ANY)]
    idle = replace(activation, phase="idle", replica=None, node=None)
    y.append("activation", (replica.model, ANY), ActivationIdle(cause="idle"), idle)
    for card in replica.cards:
        state = y.world.cards[(replica.node, card)]
        leases = tuple(
            replace(lease, kind="parked", memory_bytes=residual) if lease.holder == id_ else lease
            for lease in state.leases
        )
        on(y, card, replica.node, leases=leases)
    y._tell(
        replace(
            replica,
            phase="parked",
            endpoint=None,
            park_way="sleep",
            parked_at=y.now,
            residual_bytes=residual,
            ram_bytes=int(ram_gib * GIB),
        ),
        ReplicaParked(way="sleep"),
    )
    return id_


def chosen(found: Verdict) -> tuple[str, int]:
    assert isinstance(found, Placed), found
    return found.card, found.rank


# -- the order of D


def test_req_d1_one_model_has_one_entry_for_each_card() -> None:
    y = yard(gpu0=8, gpu1=8)
    found = all_of(y, two())
    assert [(c.profile, c.cards, c.rank) for c in found if c.rank is not None] == [
        ("on-gpu0", ("gpu0",), 2),
        ("on-gpu1", ("gpu1",), 2),
    ]


def test_req_d2_a_demand_for_a_card_is_judged_on_that_card_alone() -> None:
    y = yard(gpu0=8, gpu1=8)
    on(y, "gpu1", claims=(GAME,))
    found = verdict(y, two(), "n1~gpu1")
    assert isinstance(found, Wait)
    assert found.kept, "gpu0 is free, and nobody asked for it"
    assert {c.cards for c in all_of(y, two(), "n1~gpu1")} == {("gpu1",)}
    assert all_of(y, two(), "n1~gpu7") == ()


def test_req_d3_a_busy_card_is_not_drained_while_another_is_free() -> None:
    y = yard(gpu0=8, gpu1=8)
    running(y, "busy", "gpu0", 8)
    assert chosen(verdict(y, two())) == ("gpu1", 2)


def test_req_d5_parked_then_free_then_drained_then_kept() -> None:
    y = yard(gpu0=8, gpu1=8, gpu2=8, gpu3=8, gpu4=8)
    running(y, "beside", "gpu3", 2)
    running(y, "full", "gpu1", 8)
    entry = model("m", profiles=[profile(gib=4)], maximum=3)
    y.add(entry)
    y.request("m")
    y.until(lambda: y.ready("m"), 20)
    [id_] = y.ready("m")
    assert y.world.replicas[id_].cards == ("gpu0",)
    park(y, id_)
    on(y, "gpu4", claims=(GAME,))
    assert [r for r in ranks(y, entry) if r[1] is not None] == [
        ("gpu0", 1),
        ("gpu2", 2),
        ("gpu3", 3),
        ("gpu1", 4),
        ("gpu4", 5),
    ]


@pytest.mark.parametrize(
    "state",
    [
        {"leases": (replace(LEASE, memory_bytes=GIB),)},
        {"waiters": (replace(WAITER, memory_bytes=GIB),)},
        {"stowaways": (STOWAWAY,), "other_bytes": GIB},
        {"claims": (GAME,)},
        {"vm": VM},
    ],
    ids=["lease", "waiter", "stowaway", "claim", "vm"],
)
def test_req_d6_a_card_with_any_of_the_five_is_not_free(state: dict[str, Any]) -> None:
    y = on(yard(gpu0=8, gpu1=8), "gpu0", **state)
    assert chosen(verdict(y, two())) == ("gpu1", 2)
    assert all(rank != 2 for card, rank in ranks(y, two()) if card == "gpu0")


@pytest.mark.parametrize(
    ("state", "who"),
    [
        ({"vm": VM}, "vm windows"),
        ({"claims": (GAME,)}, "claim doom"),
        ({"leases": (replace(WHOLE, pinned=True),)}, "lease ann"),
        ({"leases": (replace(WHOLE, priority="foreground"),)}, "lease ann"),
    ],
    ids=["vm", "game", "pinned", "more urgent"],
)
def test_req_d7_out_of_reach_is_waited_for_and_not_refused(state: dict[str, Any], who: str) -> None:
    y = on(yard(gpu0=8), "gpu0", **state)
    found = verdict(y, model("m", 4))
    assert isinstance(found, Wait)
    assert (found.kept, found.waiting_for, found.victims) == (True, (who,), ())
    assert found.report.misses[0].reason == f"gpu0: kept by {who}"
    assert found.report.counts == {"kept": 1}


def test_req_d8_a_tie_keeps_the_order_of_the_configuration() -> None:
    y = yard(gpu0=8, gpu1=8)
    assert chosen(verdict(y, two())) == ("gpu0", 2)
    same_card = model("s", profiles=[profile("z"), profile("a")])
    found = verdict(y, same_card)
    assert isinstance(found, Placed)
    assert found.profile.name == "z", "the first entry wins, whatever it is called"


def test_req_d9_one_entry_on_one_card_is_placed_drained_and_waited_for_as_ever() -> None:
    y = yard(gpu0=8)
    assert chosen(verdict(y, model("m", 4))) == ("gpu0", 2)
    busy = running(y, "busy", "gpu0", 8)
    found = verdict(y, model("m", 4))
    assert isinstance(found, Wait)
    assert [v.item.replica for v in found.victims] == [busy]
    assert isinstance(verdict(y, model("huge", 9)), NoRoom)


def test_req_d10_all_entries_are_ranked_and_the_least_rank_is_taken() -> None:
    y = on(yard(gpu0=8, gpu1=8, gpu2=8), "gpu0", vm=VM)
    running(y, "busy", "gpu1", 8)
    profiles = [profile(f"p{n}", 4, card=(f"n1/gpu{n}",)) for n in range(3)]
    found = all_of(y, model("m", profiles=profiles))
    assert [(c.profile, c.rank) for c in found if c.rank is not None] == [
        ("p2", 2),
        ("p1", 4),
        ("p0", 5),
    ]


def test_req_d11_what_is_free_is_what_the_agent_says_is_free() -> None:
    y = yard(gpu0=8)
    states: tuple[dict[str, Any], ...] = (
        {"leases": (replace(LEASE, memory_bytes=3 * GIB),), "other_bytes": GIB},
        {"leases": (replace(LEASE, kind="parked", holder="r-x", memory_bytes=GIB),)},
        {"leases": (), "other_bytes": 2 * GIB, "stowaways": (STOWAWAY,)},
    )
    for state in states:
        on(y, "gpu0", **state)
        room = scene_of(y).index.room(y.world, ("n1", "gpu0"))
        card = y.world.cards[("n1", "gpu0")]
        assert room is not None
        assert room.free_bytes == cardstate.free_bytes(card)
        assert room.is_free == cardstate.is_free(card) or bool(card.leases)


def test_req_d12_what_a_load_took_does_not_change_the_order() -> None:
    y = yard(gpu0=8, gpu1=8).add(two())
    measured = (
        Measured(profile="on-gpu0", card_kind="gpu", memory_bytes=0, load_s=(600.0,)),
        Measured(profile="on-gpu1", card_kind="gpu", memory_bytes=0, load_s=(1.0,)),
    )
    y.append(
        "record",
        ("m",),
        RecordMeasured(replica="r", memory_bytes=0, load_s=1),
        Record(model="m", incarnation="i-m", measured=measured),
    )
    assert chosen(verdict(y, two())) == ("gpu0", 2)


# -- the five cases of D13, on the facts alone


def test_req_d13_case_a_both_free_is_the_first() -> None:
    assert chosen(verdict(yard(gpu0=8, gpu1=8), two())) == ("gpu0", 2)


def test_req_d13_case_b_a_game_on_the_first_is_the_second() -> None:
    y = on(yard(gpu0=8, gpu1=8), "gpu0", claims=(GAME,))
    assert chosen(verdict(y, two())) == ("gpu1", 2)


def test_req_d13_case_c_a_lease_on_the_first_is_the_second() -> None:
    y = on(yard(gpu0=8, gpu1=8), "gpu0", leases=(WHOLE,))
    assert chosen(verdict(y, two())) == ("gpu1", 2)


def test_req_d13_case_d_a_lease_is_asked_to_leave_before_anybody_queues_behind_a_game() -> None:
    y = on(yard(gpu0=8, gpu1=8), "gpu0", claims=(GAME,))
    on(y, "gpu1", leases=(WHOLE,))
    found = verdict(y, two())
    assert chosen(found) == ("gpu1", 4)
    assert isinstance(found, Placed)
    assert (found.evict, found.waiting_for) == (("l-1",), ("lease ann",))


def test_req_d13_case_e_a_parked_copy_on_the_second_is_the_second() -> None:
    y = yard(gpu0=8, gpu1=8)
    id_ = _parked_on_gpu1(y)
    found = verdict(y, two())
    assert chosen(found) == ("gpu1", 1)
    assert isinstance(found, Placed)
    assert found.resume is not None
    assert found.resume.item.replica == id_
    assert all_of(y, two())[0].resumes == id_


def _parked_on_gpu1(y: Yard, residual_gib: float = 0.0) -> str:
    """The model ran on gpu1 while gpu0 was taken, and was parked."""
    on(y, "gpu0", claims=(GAME,))
    y.add(two())
    y.request("m")
    y.until(lambda: y.ready("m"), 20)
    y.advance(12)
    [id_] = y.ready("m")
    park(y, id_, residual_gib)
    on(y, "gpu0", claims=())
    return id_


# -- parked copies (D16)


def test_req_d16_a_parked_copy_on_a_held_card_comes_before_a_plain_drain() -> None:
    y = yard(gpu0=8, gpu1=8)
    id_ = _parked_on_gpu1(y)
    running(y, "x", "gpu0", 8)
    running(y, "z", "gpu1", 8)
    found = all_of(y, two())
    assert [(c.cards[0], c.rank, c.resumes) for c in found[:2]] == [
        ("gpu1", 4, id_),
        ("gpu0", 4, ""),
    ]
    answer = verdict(y, two())
    assert isinstance(answer, Wait)
    assert [v.item.launch.model for v in answer.victims] == ["z"]


def test_req_d16_a_parked_copy_on_a_kept_card_waits_and_a_free_card_is_taken_instead() -> None:
    y = yard(gpu0=8, gpu1=8)
    id_ = _parked_on_gpu1(y)
    on(y, "gpu1", vm=VM)
    found = [(c.cards[0], c.rank, c.resumes) for c in all_of(y, two()) if c.rank is not None]
    assert found == [("gpu0", 2, ""), ("gpu1", 5, id_)]


def test_a_parked_copy_of_an_older_revision_does_not_come_back() -> None:
    y = yard(gpu0=8, gpu1=8)
    _parked_on_gpu1(y)
    y.add(two(args=("--ctx-size", "7")))
    assert chosen(verdict(y, two())) == ("gpu0", 2)


def test_a_refused_resume_is_out_until_the_card_changes() -> None:
    y = yard(gpu0=8, gpu1=8)
    id_ = _parked_on_gpu1(y)
    rev = y.world.cards[("n1", "gpu1")].rev
    refused = replace(y.world.replicas[id_], card_revs={"gpu1": rev})
    y._tell(refused, ReplicaParked(refused=True))
    assert chosen(verdict(y, two())) == ("gpu0", 2)
    assert "had no room for" in next(c.reason for c in all_of(y, two()) if c.resumes)
    on(y, "gpu1")
    assert chosen(verdict(y, two())) == ("gpu1", 1)


def test_a_parked_copy_needs_no_more_than_it_has_not_yet() -> None:
    y = yard(gpu0=8, gpu1=4)
    _parked_on_gpu1(y, residual_gib=1)
    assert chosen(verdict(y, two())) == ("gpu1", 1), "1 GiB of its 4 is its own"


def test_a_resume_is_written_as_the_end_of_the_stop_under_the_same_id() -> None:
    y = yard(gpu0=8, gpu1=8)
    id_ = _parked_on_gpu1(y)
    y.request("m")
    y.settle()
    [(_, item)] = y.items("m")
    assert (item.replica, item.stop) == (id_, None)
    assert item.card_revs == {"gpu1": y.world.cards[("n1", "gpu1")].rev}
    activation = y.activation("m")
    assert (activation.phase, activation.replica) == ("placing", id_)
    assert activation.report is not None
    assert activation.report.chosen is not None
    assert activation.report.chosen.resumes == id_


def test_what_a_parked_engine_keeps_is_memory_and_no_hold() -> None:
    y = yard(gpu0=8, gpu1=8)
    _parked_on_gpu1(y, residual_gib=2)
    alone = model("alone", profiles=[profile(gib=6, card=("n1/gpu1",), exclusive=True)])
    assert chosen(verdict(y, alone)) == ("gpu1", 2), "beside what is parked"
    more = model("more", profiles=[profile(gib=7, card=("n1/gpu1",))])
    found = verdict(y, more)
    assert isinstance(found, Wait)
    assert [v.item.launch.model for v in found.victims] == ["m"], (
        "it ends, nothing else gives it back"
    )


def test_a_drained_parked_copy_is_ended_and_a_running_one_may_be_parked() -> None:
    y = yard(gpu0=8, gpu1=8)
    id_ = _parked_on_gpu1(y, residual_gib=2)
    y.add(model("more", profiles=[profile(gib=7, card=("n1/gpu1",))]))
    y.request("more")
    y.settle()
    stop = y.items("m")[0][1].stop
    assert y.items("m")[0][1].replica == id_
    assert stop is not None
    assert (stop.reason, stop.park, stop.for_model) == ("drain", "never", "more")
    other = yard(gpu0=8)
    running(other, "a", "gpu0", 8)
    other.add(model("b", 8))
    other.request("b")
    other.settle()
    stop = other.items("a")[0][1].stop
    assert stop is not None
    assert (stop.reason, stop.park) == ("drain", "may")


def test_parked_copies_in_ram_are_room_for_a_start_there() -> None:
    y = Yard().node("n1", {"cpu": 8}, kind="cpu")
    y.settle()
    copy = Lease(holder="r-old", memory_bytes=7 * GIB, fence=1, since=T0, kind="parked")
    on(y, "cpu", leases=(copy,))
    assert chosen(verdict(y, model("m", profiles=[profile(gib=6, card=("cpu",))]))) == ("cpu", 2)


# -- what does not fit (D17), who is in the way, what waits (D18)


def test_req_d17_what_does_not_fit_is_excluded_with_its_numbers() -> None:
    y = yard(gpu0=8, gpu1=2)
    found = all_of(y, model("m", 4))
    assert [(c.cards[0], c.rank, c.reason) for c in found] == [
        ("gpu0", 2, "gpu0: free"),
        ("gpu1", None, "gpu1: needs 4.0 GiB, has 2.0 GiB"),
    ]


def test_req_d18_a_demand_that_waits_behind_what_keeps_its_cards_says_so_until_it_changes() -> None:
    y = on(yard(gpu0=8), "gpu0", claims=(GAME,)).add(model("m", 4))
    y.request("m")
    y.settle()
    waiting = y.activation("m")
    assert (waiting.phase, waiting.kept, waiting.waiting_for) == ("waiting", True, ("claim doom",))
    on(y, "gpu0", claims=(), vm=VM)
    y.settle()
    assert y.activation("m").waiting_for == ("vm windows",)
    on(y, "gpu0", vm=None)
    y.settle()
    assert (y.activation("m").phase, y.activation("m").kept) == ("placing", False)


def test_a_wait_for_those_who_leave_is_no_kept_card() -> None:
    y = on(yard(gpu0=8, gpu1=8), "gpu0", claims=(GAME,))
    running(y, "busy", "gpu1", 8, priority=1)
    found = verdict(y, two())
    assert isinstance(found, Wait)
    assert (found.kept, [v.item.launch.model for v in found.victims]) == (False, ["busy"])


def test_a_lease_of_a_part_keeps_that_part_only() -> None:
    part = replace(LEASE, memory_bytes=3 * GIB, pinned=True)
    y = on(yard(gpu0=8), "gpu0", leases=(part,))
    assert chosen(verdict(y, model("small", 4))) == ("gpu0", 3)
    found = verdict(y, model("large", 6))
    assert isinstance(found, Wait)
    assert found.kept
    assert found.waiting_for == ("lease ann",)


def test_leases_go_after_replicas_and_only_when_they_are_needed() -> None:
    y = yard(gpu0=8)
    busy = running(y, "busy", "gpu0", 3)
    state = y.world.cards[("n1", "gpu0")]
    on(y, "gpu0", leases=(*state.leases, replace(LEASE, memory_bytes=3 * GIB)))
    found = verdict(y, model("m", 4))
    assert isinstance(found, Wait)
    assert [v.item.replica for v in found.victims] == [busy]
    assert found.waiting_for == (busy,)
    both = verdict(y, model("n", 8))
    assert isinstance(both, Wait), "replicas first; the item that evicts follows when they are gone"
    assert both.waiting_for == (busy, "lease ann")


def test_the_least_urgent_lease_is_asked_first() -> None:
    first = replace(LEASE, memory_bytes=3 * GIB)
    batch = replace(first, holder="l-2", name="night", priority="batch")
    y = on(yard(gpu0=8), "gpu0", leases=(first, batch))
    found = verdict(y, model("m", 4))
    assert isinstance(found, Placed)
    assert found.evict == ("l-2",)


def test_an_evicting_item_names_the_leases_and_is_written_at_once() -> None:
    y = on(yard(gpu0=8), "gpu0", leases=(WHOLE,)).add(model("m", 4))
    y.request("m")
    y.settle()
    [(_, item)] = y.items("m")
    assert item.evict == ("l-1",)
    assert y.activation("m").waiting_for == ("lease ann",)


def test_a_stowaway_is_in_the_way_of_an_exclusive_profile_for_good() -> None:
    y = on(yard(gpu0=8), "gpu0", stowaways=(STOWAWAY,), other_bytes=GIB)
    assert chosen(verdict(y, model("beside", 4))) == ("gpu0", 3)
    found = verdict(y, model("alone", profiles=[profile(gib=4, exclusive=True)]))
    assert isinstance(found, Wait)
    assert found.kept
    assert "used by 1 process(es) without a lease" in found.report.misses[0].reason


def test_memory_nobody_explains_is_taken() -> None:
    y = on(yard(gpu0=8), "gpu0", other_bytes=5 * GIB)
    found = verdict(y, model("m", 4))
    assert isinstance(found, Wait)
    assert "5.0 GiB used without a lease" in found.report.misses[0].reason
    assert found.kept


def test_a_card_somebody_is_in_line_for_is_not_taken_before_them() -> None:
    y = on(yard(gpu0=8), "gpu0", waiters=(WAITER,))
    found = verdict(y, model("m", 4))
    assert isinstance(found, Wait)
    assert (found.kept, found.waiting_for) == (False, ("bob in line",))


def test_a_lease_of_the_whole_card_is_shared_by_nobody() -> None:
    y = on(yard(gpu0=8), "gpu0", leases=(replace(WHOLE, memory_bytes=GIB),))
    assert chosen(verdict(y, model("m", 1))) == ("gpu0", 4)


def test_residency_and_the_bound_of_starvation_are_said() -> None:
    y = yard(gpu0=8).add(model("a", 6))
    y.request("a")
    y.until(lambda: y.answered, 10)
    y.advance(3)
    [id_] = y.ready("a")
    y.add(model("b", 6))
    fresh = verdict(y, model("b", 6))
    assert isinstance(fresh, Wait)
    said = fresh.report.misses[0].reason
    assert f"{id_} is ready since " in said
    assert "and stays for 10 s (unless somebody has waited for 30 s)" in said


def test_divided_cards_are_left_alone_and_say_so() -> None:
    y = yard(gpu0=8, gpu1=8)
    node = y.world.nodes["n1"]
    cards = (replace(node.cards[0], mig=True), node.cards[1])
    y.append("node", ("n1",), NodeChanged(), replace(node, cards=cards))
    assert ranks(y, model("m", 4)) == [("gpu1", 2), ("gpu0", None)]
    assert "is divided (MIG)" in all_of(y, model("m", 4))[1].reason


def test_a_card_that_left_its_node_is_no_candidate() -> None:
    y = yard(gpu0=8, gpu1=8)
    node = y.world.nodes["n1"]
    scene = scene_of(y)
    demand = Demand(model=y.add(model("m", 4)).world.models["m"], wanted_at=y.now)
    scene.index.sync(y.world)
    assert [c.cards[0] for c in candidates(scene, demand)] == ["gpu0", "gpu1"]
    y.append("node", ("n1",), NodeChanged(), replace(node, cards=node.cards[1:]))
    scene.index.sync(y.world)
    assert [c.cards[0] for c in candidates(scene, demand)] == ["gpu1"]


# -- sets of cards


def several(count: int, gib: float = 4, **fields: Any) -> Model:
    return model("set", profiles=[profile(gib=gib, cards=count, **fields)])


def test_a_set_is_the_best_cards_of_one_node_and_ranks_as_the_worst() -> None:
    y = yard(gpu0=8, gpu1=8, gpu2=8)
    running(y, "beside", "gpu0", 2)
    found = verdict(y, several(2))
    assert isinstance(found, Placed)
    assert (found.cards, found.rank) == (("gpu1", "gpu2"), 2)
    assert set(found.card_revs) == {"gpu1", "gpu2"}
    three = verdict(y, replace(several(3), name="three"))
    assert isinstance(three, Placed)
    assert (set(three.cards), three.rank) == ({"gpu0", "gpu1", "gpu2"}, 3)


def test_the_cards_of_a_set_are_never_of_two_nodes() -> None:
    y = Yard().node("n1", {"gpu0": 8}).node("n2", {"gpu0": 8})
    y.settle()
    found = verdict(y, several(2))
    assert isinstance(found, NoRoom)
    assert found.report.misses[0].reason == "n1: needs 2 cards at once, 1 of 1 would do"


def test_one_card_comes_before_several_of_the_same_rank() -> None:
    y = yard(gpu0=8, gpu1=8)
    entry = model("m", profiles=[profile("pair", 4, cards=2), profile("one", 4)])
    found = verdict(y, entry)
    assert isinstance(found, Placed)
    assert found.profile.name == "one"


def test_memory_is_per_card_and_the_item_takes_both() -> None:
    y = yard(gpu0=8, gpu1=8).add(several(2, 5))
    y.request("set")
    y.settle()
    [(_, item)] = y.items("set")
    assert (item.cards, item.memory_bytes) == (("gpu0", "gpu1"), 5 * GIB)
    book = scene_of(y).index.book(y.world)
    assert [book.rooms[("n1", c)].free_bytes for c in item.cards] == [3 * GIB, 3 * GIB]


def test_a_set_drains_on_all_its_cards_and_spares_the_min_of_a_model() -> None:
    y = yard(gpu0=8, gpu1=8)
    one = running(y, "x", "gpu0", 8)
    other = running(y, "z", "gpu1", 8)
    found = verdict(y, several(2))
    assert isinstance(found, Wait)
    assert {v.item.replica for v in found.victims} == {one, other}
    assert found.claimed == {("n1", "gpu0"), ("n1", "gpu1")}
    twice = yard(gpu0=8, gpu1=8)
    twice.add(model("two", 8, minimum=2, maximum=2, idle_s=0))
    twice.until(lambda: len(twice.ready("two")) == 2, 30)
    twice.advance(70)
    left = replace(twice.world.models["two"].scaling, min=1)
    twice.add(replace(twice.world.models["two"], scaling=left))
    kept = verdict(twice, several(2))
    assert isinstance(kept, Wait)
    assert kept.victims == (), "one of the two has to stay"
    assert kept.report.misses[0].victims == (), "and the other is not stopped for nothing"


def test_a_card_that_was_asked_for_is_in_the_set() -> None:
    y = yard(gpu0=8, gpu1=8, gpu2=8)
    found = verdict(y, several(2), "n1~gpu2")
    assert isinstance(found, Placed)
    assert set(found.cards) == {"gpu0", "gpu2"}


def test_a_set_with_a_kept_card_waits_for_it() -> None:
    y = on(yard(gpu0=8, gpu1=8), "gpu1", vm=VM)
    found = verdict(y, several(2))
    assert isinstance(found, Wait)
    assert (found.kept, found.waiting_for) == (True, ("vm windows",))


def test_a_refused_set_is_tried_again_when_one_of_its_cards_changed() -> None:
    y = yard(gpu0=8, gpu1=8).add(several(2))
    y.refuses.add("set")
    y.request("set")
    y.turn()
    assert [r.phase for r in y.world.replicas.values()] == ["refused"]
    y.advance(5)
    assert len(y.world.replicas) == 1, "nothing changed there"
    y.refuses.clear()
    on(y, "gpu0")
    y.until(lambda: y.ready("set"), 10, "that card may be what was missing")


def test_a_set_on_gpus_is_given_what_it_was_measured_to_need_there() -> None:
    y = Yard().node("n1", {"gpu0": 8, "gpu1": 8, "cpu": 8})
    node = y.world.nodes["n1"]
    infos = tuple(replace(c, kind="cpu") if c.id == "cpu" else c for c in node.cards)
    y.append("node", ("n1",), NodeChanged(fields=("cards",)), replace(node, cards=infos))
    y._card(replace(y.world.cards[("n1", "cpu")], kind="cpu"), CardMeasured(used_bytes=0))
    y.settle()
    y.add(several(2, 2, card=("gpu",)))
    used = Measured(profile="p", card_kind="gpu", memory_bytes=10 * GIB)
    known = Record(model="set", incarnation="i-set", measured=(used,))
    y.append("record", ("set",), RecordMeasured(replica="r-0", memory_bytes=1, load_s=1.0), known)
    found = verdict(y, several(2, 2, card=("gpu",)))
    assert isinstance(found, Placed)
    assert (found.cards, found.memory_bytes) == (("gpu0", "gpu1"), 5 * GIB * 11 // 10)


# -- two at once (D19), and a card's own URL at max


def test_req_d19_two_at_once_get_two_cards_and_a_refused_one_is_ranked_again() -> None:
    y = yard(gpu0=8, gpu1=8).add(two("m"), two("n"))
    y.request("m")
    y.request("n")
    y.settle()
    assert sorted(item.cards[0] for _, item in y.items()) == ["gpu0", "gpu1"]
    late = yard(gpu0=8, gpu1=8).add(two("m"))
    late.request("m")
    late.settle()
    on(late, "gpu0", leases=(WHOLE,))
    late.turn()
    assert [r.cards[0] for r in late.world.replicas.values()] == ["gpu0", "gpu1"]
    late.until(lambda: late.ready("m"), 10, "the second card is taken instead")


def test_a_model_of_a_large_yard_is_found_a_place_without_judging_all() -> None:
    y = Yard()
    for n in range(12):
        y.node(f"n{n:02}", {f"gpu{c}": 8 for c in range(8)})
    y.settle()
    found = verdict(y, model("m", 4))
    assert isinstance(found, Placed)
    assert (found.node, found.card) == ("n00", "gpu0")
    assert len(found.report.misses) < 8
    assert searching.can_search(Demand(model=model("m", 4), wanted_at=y.now))


@pytest.mark.parametrize("at_once", [0, 1000])
def test_the_card_whose_first_victim_was_used_least_recently_need_not_be_the_best(
    at_once: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(placement, "JUDGED_AT_ONCE", at_once)
    y = yard(gpu0=8, gpu1=8)
    running(y, "old", "gpu0", 3)
    running(y, "middle", "gpu1", 8)
    running(y, "recent", "gpu0", 5)
    found = verdict(y, model("m", 8))
    assert isinstance(found, Wait)
    assert [v.item.launch.model for v in found.victims] == ["middle"]
