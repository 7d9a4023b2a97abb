"""What is on a card decides its rank: leases, waiters, claims, a VM, stowaways."""

from typing import Any

import pytest
from msgspec.structs import replace

from controlplane.domain import placement, searching
from controlplane.domain.placement import Demand, NoRoom, Placed, Wait, candidates
from controlplane.domain.scene import ANY
from schemas import cardstate
from schemas.card import Lease, Stowaway, Waiter
from schemas.model import Model
from schemas.node import NodeChanged
from schemas.record import Measured, Record, RecordMeasured
from tests.support.placing import (
    GAME,
    VM,
    all_of,
    chosen,
    on,
    park,
    parked_on_gpu1,
    running,
    scene_of,
    two,
    verdict,
)
from tests.support.worlds import GIB, T0, Yard, model, profile, yard

LEASE = Lease(holder="l-1", memory_bytes=8 * GIB, fence=1, since=T0, kind="named", name="ann")

WHOLE = replace(LEASE, exclusive=True)

STOWAWAY = Stowaway(pid=7, name="blender", memory_bytes=GIB, since=T0)

WAITER = Waiter(id="l-9", since=T0, memory_bytes=8 * GIB, name="bob", cards=("gpu0",))


def ranks(y: Yard, entry: Model, scope: str = ANY) -> list[tuple[str, int | None]]:
    return [("+".join(c.cards), c.rank) for c in all_of(y, entry, scope)]


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
    id_ = parked_on_gpu1(y)
    found = verdict(y, two())
    assert chosen(found) == ("gpu1", 1)
    assert isinstance(found, Placed)
    assert found.resume is not None
    assert found.resume.item.replica == id_
    assert all_of(y, two())[0].resumes == id_


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
