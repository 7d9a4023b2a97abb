"""The whole way of a demand through the leader's decisions, on the simulated yard."""

from datetime import timedelta

import msgspec

from schemas.activation import Activation
from schemas.commands import ModelActivate
from schemas.model import ModelChanged
from schemas.replica import ReplicaParked
from tests.support.parking import ParkingYard, parking_yard
from tests.support.worlds import SETTINGS, Yard, model, profile, yard


def test_req_a2_a_request_loads_the_model_and_idle_time_gives_its_memory_back() -> None:
    y = yard().add(model("a", idle_s=60))
    y.settle()
    assert y.items() == []
    assert y.request("a") == "waits"
    y.until(lambda: y.phase("a") == "ready", 10)
    y.until(lambda: y.activation("a").answered, 5)
    assert y.events("activation") == [
        "activation.placing",
        "activation.loading",
        "activation.ready",
        "activation.ready",
    ]
    y.until(lambda: y.phase("a") == "idle", 70)
    y.until(lambda: not y.items(), 5)
    assert y.world.cards[("n1", "gpu0")].leases == ()


def test_scn_a1_the_first_client_leaves_and_the_second_is_served_by_the_same_load() -> None:
    y = yard().add(model("a"))
    y.request("a")
    y.advance(1)
    y.waiting["a"].clear()
    y.request("a")
    y.until(lambda: y.answered, 10)
    assert y.started("a") == 1


def test_req_a19_a_client_that_leaves_does_not_cancel_the_load() -> None:
    y = yard().add(model("a"))
    y.request("a")
    y.turn()
    y.waiting["a"].clear()
    y.until(lambda: y.ready("a"), 10)


def test_scn_a3_a_long_stream_ends_by_itself_before_another_model_takes_the_room() -> None:
    y = yard().add(model("a", 6), model("b", 6))
    y.request("a", stream_s=1)
    y.until(lambda: y.answered, 10)
    y.advance(15)
    y.request("a", stream_s=30)
    ended = y.now + timedelta(seconds=30)
    y.request("b")
    y.until(lambda: y.ready("b"), 40)
    assert y.now >= ended
    assert not any(s.model == "a" for s in y.streams)
    assert y.started("b") == 1


def test_scn_a4_with_room_for_one_every_load_serves_somebody() -> None:
    y = yard().add(model("a", 6), model("b", 6))
    requests = 0
    for turn in range(40):
        y.request("ab"[turn % 2])
        requests += 1
        y.advance(3)
    y.until(lambda: not any(y.waiting.values()), 120, "everybody is answered")
    assert len(y.answered) == requests
    loads = y.started("a") + y.started("b")
    assert 2 <= loads <= requests
    for item in y.log:
        if item.type == "replica.starting":
            assert any(replica == item.key[1] for _, _, replica in y.answered)


def test_scn_a5_a_replica_that_just_became_ready_answers_before_it_makes_room() -> None:
    y = Yard(settings=msgspec.structs.replace(SETTINGS, min_residency_s=0)).node()
    y.add(model("a", 6), model("b", 6))
    y.request("a")
    y.turn()
    y.until(lambda: y.world.replicas and next(iter(y.world.replicas.values())).started_at, 5)
    y.engine("a").load_s = 2
    while not y.ready("a"):
        y.now += timedelta(seconds=1)
        y.settle()
        y.act()
    y.request("b")
    y.settle()
    [(_, item)] = y.items("a")
    assert item.stop is None, "not before its first waiter was answered"
    y.traffic()
    y.turn()
    assert [m for _, m, _ in y.answered] == ["a"]
    y.until(lambda: y.ready("b"), 20)


def test_scn_a6_a_loading_replica_is_used_capacity_and_no_victim() -> None:
    y = yard().add(model("a", 6), model("b", 6))
    y.engine("a").load_s = 100
    y.request("a")
    y.advance(1)
    y.request("b")
    y.advance(50)
    [(_, item)] = y.items("a")
    assert item.stop is None
    assert y.items("b") == []
    assert y.phase("b") == "waiting"
    y.until(lambda: len(y.answered) == 2, 120)
    assert [m for _, m, _ in y.answered] == ["a", "b"]


def test_scn_a7_three_cold_models_with_room_for_one_are_served_in_order_of_arrival() -> None:
    y = yard().add(model("c", 6), model("b", 6), model("a", 6))
    for name in "bca":
        y.request(name)
        y.advance(0.5)
    y.until(lambda: len(y.answered) == 3, 120)
    assert [m for _, m, _ in y.answered] == ["b", "c", "a"]
    assert y.refused == []


def test_scn_a8_an_engine_that_always_crashes_is_started_at_most_four_times_a_minute() -> None:
    y = yard().add(model("bad"), model("good"))
    y.engine("bad").fails = 1000
    y.engine("bad").last_line = "CUDA error: no kernel image"
    seen: list[float] = []
    for _ in range(60):
        y.request("bad")
        y.advance(1)
        if y.phase("bad") == "refused":
            retry_at = y.activation("bad").retry_at
            assert retry_at is not None
            seen.append((retry_at - y.activation("bad").since).total_seconds())
    assert 2 <= y.started("bad") <= 4
    assert seen == sorted(seen), "it grows"
    assert seen[0] < seen[-1]
    assert y.activation("bad").reason == "CUDA error: no kernel image"
    assert {code for _, _, code in y.refused} == {"start_failed"}
    y.request("good")
    y.until(lambda: y.ready("good"), 10)


def test_scn_a9_a_start_that_took_too_long_is_tried_again_after_its_cooldown() -> None:
    y = yard().add(model("a"))
    y.engine("a").fails = 1
    y.request("a")
    y.until(lambda: y.phase("a") == "refused", 10)
    y.advance(16)
    assert y.request("a") == "waits"
    y.until(lambda: y.ready("a"), 10)
    assert y.world.records["a"].failures == ()


def test_scn_a13_a_generation_longer_than_the_idle_timeout_is_not_stopped() -> None:
    y = yard().add(model("a", idle_s=10))
    y.request("a", stream_s=0.5)
    y.until(lambda: y.ready("a"), 10)
    y.request("a", stream_s=30)
    y.advance(30)
    assert y.phase("a") == "ready"
    y.advance(9)
    assert y.phase("a") == "ready", "its clock starts at the last byte"
    y.until(lambda: y.phase("a") == "idle", 3)


def test_scn_a15_an_edit_starts_the_new_revision_beside_the_old_one_and_drains_it() -> None:
    y = yard().add(model("a", 2), model("other", 1))
    for name in ("a", "other"):
        y.request(name)
    y.until(lambda: y.ready("a") and y.ready("other"), 10)
    y.advance(2)
    [old] = y.ready("a")
    other = y.ready("other")
    edited = model("a", profiles=[profile(gib=2, args=("--ctx-size", "4096"))])
    y.append("model", ("a",), ModelChanged(by="test", fields=("profiles",)), edited)
    y.settle()
    revisions = [item.launch.revision for _, item in y.items("a")]
    assert len(revisions) == len(set(revisions)) == 2
    assert all(item.stop is None for _, item in y.items("a")), "the old one serves meanwhile"
    y.until(lambda: y.ready("a") not in ([], [old]), 10)
    y.until(lambda: len(y.items("a")) == 1, 10)
    assert y.items("a")[0][1].replica != old
    assert y.ready("other") == other
    assert y.started("other") == 1
    assert y.activation("a").replica == y.items("a")[0][1].replica


def test_scn_a15_without_room_for_both_the_old_revision_drains_first() -> None:
    y = yard().add(model("a", 6))
    y.request("a")
    y.until(lambda: y.answered, 10)
    y.advance(2)
    [old] = y.ready("a")
    edited = model("a", profiles=[profile(gib=6, args=("--ctx-size", "4096"))])
    y.append("model", ("a",), ModelChanged(by="test", fields=("profiles",)), edited)
    y.until(lambda: y.ready("a") not in ([], [old]), 20)
    assert len(y.items("a")) == 1
    assert y.started("a") == 2


def test_inv_4_fifty_requests_on_two_gateways_are_one_load() -> None:
    y = yard().add(model("a"))
    y.gateways = ["gw1", "gw2"]
    for n in range(50):
        y.send(ModelActivate(model="a", rev=0), actor="gateway", id_=f"x-{n}")
    y.waiting["a"] = [y.now] * 50
    y.until(lambda: len(y.answered) == 50, 10)
    assert y.started("a") == 1


def test_inv_11_requests_for_a_quarantined_and_an_unknown_model_leave_the_log_alone() -> None:
    y = yard().add(model("bad"), model("off", maximum=0))
    y.engine("bad").fails = 1000
    while y.world.records.get("bad") is None or y.record("bad").quarantined is None:
        y.request("bad")
        y.advance(5, by=5)
    y.advance(2)
    before = len(y.log)
    for n in range(600):
        for name in ("bad", "unknown", "off"):
            y.send(ModelActivate(model=name, rev=n), actor="gateway", id_=f"{name}-{n}")
        y.settle(bound=10)
        y.now += timedelta(seconds=0.1)
    assert len(y.log) - before <= 3
    assert y.activation("bad").code == "model_quarantined"


def test_inv_5_every_refusal_says_why_and_when_to_come_back() -> None:
    y = yard(gpu0=8).add(model("large", 20), model("bad"))
    y.engine("bad").fails = 1000
    for _ in range(8):
        for name in ("large", "bad"):
            y.request(name)
        y.advance(120, by=10)
    codes: set[str] = set()
    for item in y.log:
        if isinstance(item.state, Activation) and item.state.phase == "refused":
            assert item.state.reason
            assert item.state.retry_at is not None
            assert item.state.retry_at > item.state.since
            codes.add(item.state.code or "")
    assert codes == {"no_capacity", "start_failed", "model_quarantined"}


def test_a_waiter_answered_before_the_leader_wrote_ready_counts_as_answered() -> None:
    y = yard().add(model("a"))
    y.request("a")
    y.until(lambda: y.phase("a") == "loading", 5)
    y.engine("a").load_s = 1
    y.now += timedelta(seconds=1)
    y.act()
    y.traffic()
    y.now += timedelta(seconds=0.8)
    y.streams.clear()
    y.settle()
    assert y.activation("a").answered


def test_a_gateway_that_died_while_somebody_waited_does_not_keep_the_place_for_ever() -> None:
    y = yard().add(model("a", 6), model("b", 6))
    y.request("a")
    y.until(lambda: y.phase("a") == "loading", 5)
    y.dead_since = y.now
    while not y.ready("a"):
        y.now += timedelta(seconds=1)
        y.act()
        y.settle()
    assert not y.activation("a").answered
    y.now += timedelta(seconds=61)
    y.settle()
    assert y.activation("a").answered


# The five cases of two cards, and what follows from them


def two_cards(*names: str, gib: float = 6) -> ParkingYard:
    return parking_yard(gpu0=8, gpu1=8).add(*(model(name, gib, idle_s=30) for name in names))


def card_of(y: ParkingYard, name: str) -> str:
    [id_] = y.ready(name)
    [card] = y.world.replicas[id_].cards
    return card


def test_req_d13_a_both_free_is_the_first_card() -> None:
    y = two_cards("a")
    y.request("a")
    y.until(lambda: y.ready("a"), 10)
    assert card_of(y, "a") == "gpu0"


def test_req_d13_b_a_game_on_the_first_is_the_second() -> None:
    y = two_cards("a")
    y.claim("n1", "gpu0")
    y.request("a")
    y.until(lambda: y.ready("a"), 10)
    assert card_of(y, "a") == "gpu1"


def test_req_d13_c_a_lease_on_the_first_is_the_second() -> None:
    y = two_cards("a")
    y.lease("n1", "gpu0")
    y.request("a")
    y.until(lambda: y.ready("a"), 10)
    assert card_of(y, "a") == "gpu1"
    assert y.world.cards[("n1", "gpu0")].leases, "nobody was asked to leave"


def test_req_d13_d_a_lease_leaves_before_anybody_queues_behind_a_game() -> None:
    y = two_cards("a")
    y.claim("n1", "gpu0")
    holder = y.lease("n1", "gpu1")
    y.request("a")
    y.settle()
    [(_, item)] = y.items("a")
    assert (item.cards, item.evict) == (("gpu1",), (holder,))
    y.act()
    y.settle()
    waiting = y.activation("a")
    assert (waiting.phase, waiting.waiting_for, waiting.kept) == ("waiting", (holder,), False)
    y.until(lambda: y.ready("a"), 10)
    assert card_of(y, "a") == "gpu1"


def test_req_d13_e_a_parked_copy_is_resumed_where_it_is() -> None:
    y = two_cards("a")
    y.claim("n1", "gpu0")
    y.request("a")
    y.until(lambda: y.ready("a"), 10)
    [id_] = y.ready("a")
    y.until(lambda: y.world.replicas[id_].phase == "parked", 90)
    y.end_claim("n1", "gpu0")
    # Another agent took over there, and said again what it found.
    y._tell(y.world.replicas[id_], ReplicaParked(way="sleep"))
    y.settle()
    y.request("a")
    y.until(lambda: y.ready("a"), 10)
    assert y.ready("a") == [id_]
    assert card_of(y, "a") == "gpu1"


def test_req_d16_a_parked_copy_on_a_held_card_comes_back_when_the_holder_was_drained() -> None:
    y = parking_yard(gpu0=8).add(model("a", 6, idle_s=30), model("b", 6, idle_s=3000))
    y.request("a")
    y.until(lambda: y.ready("a"), 10)
    [copy] = y.ready("a")
    y.until(lambda: y.world.replicas[copy].phase == "parked", 90)
    y.request("b")
    y.until(lambda: y.ready("b"), 10)
    [holder] = y.ready("b")
    y.advance(15)
    y.request("a")
    y.settle()
    stop = next(item.stop for _, item in y.items("b"))
    assert stop is not None
    assert (stop.reason, stop.park) == ("drain", "may")
    y.until(lambda: y.ready("a"), 20)
    assert y.ready("a") == [copy]
    assert y.world.replicas[holder].phase == "parked", "and makes room by parking itself"


def test_req_d18_behind_what_keeps_every_card_the_demand_waits_and_says_for_whom() -> None:
    y = two_cards("a")
    y.claim("n1", "gpu0", name="Half-Life")
    pinned = y.lease("n1", "gpu1", "render", pinned=True)
    y.request("a")
    y.turn()
    waiting = y.activation("a")
    assert (waiting.phase, waiting.kept) == ("waiting", True)
    assert "Half-Life" in waiting.reason or "render" in waiting.reason
    assert waiting.waiting_for
    assert y.items("a") == []
    y.advance(600, by=10)
    assert y.activation("a").phase == "waiting", "it is not refused, and nobody is drained"
    assert y.world.cards[("n1", "gpu1")].leases
    y.end_lease(pinned)
    y.until(lambda: y.ready("a"), 10)
    assert (card_of(y, "a"), y.activation("a").kept) == ("gpu1", False)


def test_req_d19_two_requests_at_once_take_two_free_cards() -> None:
    y = two_cards("a", "b")
    y.request("a")
    y.request("b")
    y.settle()
    cards = [item.cards for _, item in y.items()]
    assert sorted(cards) == [("gpu0",), ("gpu1",)]


def test_req_d19_a_card_that_was_given_meanwhile_is_refused_and_the_other_is_taken() -> None:
    y = two_cards("a")
    y.request("a")
    y.settle()
    [(_, item)] = y.items("a")
    assert item.cards == ("gpu0",)
    # Somebody at the machine was faster: the agent knows, the plan did not.
    y.lease("n1", "gpu0", "training")
    y.act()
    assert y.world.replicas[item.replica].phase == "refused"
    y.until(lambda: y.ready("a"), 10)
    assert card_of(y, "a") == "gpu1"
    assert y.record("a").failures == ()


def test_req_x4_one_demand_for_a_card_and_one_for_any_are_one_load_there() -> None:
    y = two_cards("a")
    y.send(ModelActivate(model="a", scope="n1~gpu1"), actor="gateway")
    y.settle()
    y.send(ModelActivate(model="a"), actor="gateway")
    y.until(lambda: y.ready("a"), 10)
    assert card_of(y, "a") == "gpu1"
    assert y.started("a") == 1
    assert (y.phase("a"), y.phase("a", "n1~gpu1")) == ("ready", "ready")


def test_req_d2_a_model_at_its_max_moves_to_the_card_that_is_asked_for() -> None:
    y = parking_yard(gpu0=8, gpu1=8).add(model("a", 6, idle_s=3000))
    y.send(ModelActivate(model="a", scope="n1~gpu1"), actor="gateway")
    y.until(lambda: y.ready("a"), 10)
    # Not while its first waiter there has no answer; and that it waits itself is no reason to stay.
    y.send(ModelActivate(model="a", scope="n1~gpu0"), actor="gateway")
    y.turn()
    assert y.phase("a", "n1~gpu0") == "waiting"
    y.until(lambda: y.ready("a") and card_of(y, "a") == "gpu0", 120)
    assert y.started("a") == 2


def test_a_demand_that_waits_for_its_card_is_not_in_the_way_of_one_for_any() -> None:
    y = two_cards("a")
    y.claim("n1", "gpu0")
    y.send(ModelActivate(model="a", scope="n1~gpu0"), actor="gateway")
    y.settle()
    assert y.phase("a", "n1~gpu0") == "waiting"
    pinned = y.lease("n1", "gpu1", pinned=True)
    y.request("a")
    y.settle()
    assert y.phase("a") == "waiting"
    y.end_lease(pinned)
    y.until(lambda: y.ready("a"), 10)
    assert card_of(y, "a") == "gpu1"
    assert y.phase("a", "n1~gpu0") == "waiting"


def test_req_d18_who_names_a_kept_card_waits_for_it_although_another_is_free() -> None:
    y = two_cards("a")
    y.send(ModelActivate(model="a", scope="n1~gpu0"), actor="gateway")
    y.until(lambda: y.phase("a", "n1~gpu0") == "ready", 10)
    y.advance(15)
    y.claim("n1", "gpu0", name="Half-Life")
    y.turn()
    assert y.phase("a", "n1~gpu0") == "idle"
    y.send(ModelActivate(model="a", scope="n1~gpu0"), actor="gateway")
    y.turn()
    waiting = y.world.activations[("a", "n1~gpu0")]
    assert (waiting.phase, waiting.kept) == ("waiting", True)
    assert "Half-Life" in waiting.reason
    [(_, item)] = y.items("a")
    assert item.stop is not None, "the copy that was parked there, and nothing on the free card"
    y.end_claim("n1", "gpu0")
    y.until(lambda: y.phase("a", "n1~gpu0") == "ready", 10)
    assert y.ready("a") == [item.replica]


def test_req_x6_and_everybody_who_waits_is_told_for_whom_and_kept_ends_with_the_wait() -> None:
    y = two_cards("a")
    for card in ("gpu0", "gpu1"):
        y.claim("n1", card, name=f"game on {card}")
    y.request("a")
    y.turn()
    assert y.activation("a").kept
    y.end_claim("n1", "gpu1")
    y.turn()
    loading = y.activation("a")
    assert (loading.phase, loading.kept, loading.waiting_for) == ("loading", False, ())
