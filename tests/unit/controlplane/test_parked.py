"""The life of a parked replica under the leader, and of one that its own node parks, ends or makes room for."""

from datetime import timedelta

import pytest
from msgspec.structs import replace

from controlplane.domain.index import StepIndex
from controlplane.domain.scene import Scene
from schemas.activation import ActivationReady
from schemas.commands import CatalogApply, ModelLoad, ModelScale, ModelUnload
from schemas.model import ModelChanged, ModelDeleted
from schemas.plan import PlanItem
from schemas.replica import ReplicaDraining, ReplicaParked, ReplicaReady, ReplicaWaiting
from tests.support.parking import ParkingYard, parking_yard
from tests.support.worlds import counting_ids, model, profile


def served(y: ParkingYard, name: str = "a") -> str:
    """Model `name` ready and answered; its replica."""
    y.request(name)
    y.until(lambda: y.ready(name), 20)
    y.until(lambda: y.activation(name).answered, 10)
    y.advance(12)
    return y.ready(name)[0]


def parked(y: ParkingYard, name: str = "a") -> str:
    """Model `name` used once and parked for lack of demand; its replica."""
    id_ = served(y, name)
    y.until(lambda: y.world.replicas[id_].phase == "parked", 90, "it idles and is parked")
    return id_


def draining(y: ParkingYard) -> str:
    """Model `a` used once, its idle stop just begun: its replica drains."""
    id_ = served(y)
    y.now += timedelta(seconds=3600)
    y.settle()
    assert y.phase("a") == "idle"
    y.act()
    assert y.world.replicas[id_].phase == "draining"
    return id_


def item_of(y: ParkingYard, id_: str) -> PlanItem:
    return next(item for _, item in y.items() if item.replica == id_)


def scene(y: ParkingYard) -> Scene:
    index = StepIndex()
    index.sync(y.world)
    heard = y.live()
    return Scene(
        world=y.world,
        live=heard,
        now=y.now,
        ids=counting_ids(),
        settings=y.settings,
        index=index,
    )


def hold(y: ParkingYard, id_: str) -> str:
    now = scene(y)
    return now.hold(now.index.items[id_])


# -- parked for lack of demand


def test_an_idle_stop_may_end_in_parking_and_the_item_stays_with_its_stop() -> None:
    y = parking_yard().add(model("a", idle_s=30))
    id_ = parked(y)
    item = item_of(y, id_)
    assert item.stop is not None
    assert (item.stop.reason, item.stop.park, item.stop.take_back) == ("idle", "may", True)
    assert y.phase("a") == "idle"
    assert hold(y, id_) == "parked"


def test_req_x2_a_parked_copy_is_not_demanded_not_judged_idle_and_not_resumed_unasked() -> None:
    y = parking_yard().add(model("a", idle_s=30))
    id_ = parked(y)
    events = len(y.log)
    y.advance(3600, by=60)
    assert len(y.log) == events, "hours pass and nothing happens"
    assert y.world.replicas[id_].phase == "parked"


def test_req_d5_new_demand_resumes_the_parked_copy_and_starts_nothing() -> None:
    y = parking_yard().add(model("a", idle_s=30))
    id_ = parked(y)
    assert y.request("a") == "waits"
    y.until(lambda: y.ready("a"), 10)
    assert y.ready("a") == [id_]
    assert y.answered[-1][2] == id_
    assert item_of(y, id_).stop is None
    assert y.activation("a").replica == id_
    assert len(y.items()) == 1


def test_inv_4_many_requests_resume_one_copy_once() -> None:
    y = parking_yard().add(model("a", idle_s=30))
    id_ = parked(y)
    y.waiting["a"] = [y.now] * 50
    for _ in range(50):
        y.send_activate("a")
    y.until(lambda: not y.waiting["a"], 10)
    resumed = [r for r in y.events("replica") if r == "replica.starting"]
    assert len(resumed) == 2, "one start, one resume"
    assert y.ready("a") == [id_]


def test_an_activation_is_loading_while_its_replica_resumes_and_says_when_by_earlier_resumes() -> (
    None
):
    y = parking_yard().add(model("a", idle_s=30))
    y.resume_s = 4
    id_ = parked(y)
    y.request("a")
    y.until(lambda: y.ready("a"), 10)
    y.until(lambda: y.world.replicas[id_].phase == "parked", 120)
    y.request("a")
    y.until(lambda: y.phase("a") == "loading", 3)
    loading = y.activation("a")
    assert "resuming" in loading.reason
    since = y.world.replicas[id_].since
    assert loading.expected_ready_at == since + timedelta(seconds=4)


# -- resumes that fail, copies that are lost


def test_req_d16_a_refused_resume_puts_the_stop_back_and_the_demand_goes_elsewhere() -> None:
    y = parking_yard(gpu0=8, gpu1=8).add(model("a", 6, idle_s=30))
    id_ = parked(y)
    [card] = y.world.replicas[id_].cards
    y.request("a")
    y.settle()
    assert item_of(y, id_).stop is None, "it is asked to come back"
    # Somebody else was given the card between the decision and the agent's answer.
    y.claim("n1", card)
    y.act()
    assert y.world.replicas[id_].card_revs
    y.settle()
    stop = item_of(y, id_).stop
    assert stop is not None
    assert (stop.park, stop.reason) == ("may", "park")
    other = next(i for _, i in y.items("a") if i.replica != id_)
    assert other.cards != (card,)
    y.until(lambda: y.ready("a"), 20)
    assert y.ready("a") == [other.replica]
    assert y.world.records["a"].failures == (), "no failure, no backoff"


def test_a_refusal_of_an_earlier_resume_does_not_stop_the_next() -> None:
    y = parking_yard().add(model("a", idle_s=30))
    id_ = parked(y)
    y.request("a")
    y.settle()
    y.claim()
    y.act()
    y.settle()
    assert item_of(y, id_).stop is not None
    y.advance(5)
    assert y.phase("a") == "waiting"
    assert item_of(y, id_).stop is not None
    y.end_claim()
    y.until(lambda: y.ready("a"), 10)
    assert y.ready("a") == [id_]


def test_a_resume_that_failed_costs_nothing_and_the_next_start_is_cold_at_once() -> None:
    y = parking_yard().add(model("a", idle_s=30))
    id_ = parked(y)
    y.lost_resumes["a"] = 1
    y.request("a")
    y.until(lambda: y.ready("a"), 10)
    assert y.ready("a") != [id_]
    assert y.refused == []
    known = y.world.records["a"]
    assert (known.failures, known.quarantined) == ((), None)


def test_a_parked_copy_that_was_lost_costs_nothing_and_is_forgotten() -> None:
    y = parking_yard().add(model("a", idle_s=30))
    id_ = parked(y)
    y.lose(id_)
    y.settle()
    assert y.items() == []
    assert y.world.records["a"].failures == ()
    assert y.phase("a") == "idle"
    y.request("a")
    y.until(lambda: y.ready("a"), 10)


def test_a_copy_lost_while_it_was_asked_for_is_replaced_by_a_cold_start() -> None:
    y = parking_yard().add(model("a", idle_s=30))
    id_ = parked(y)
    y.request("a")
    y.settle()
    y.lose(id_)
    y.settle()
    assert y.world.records["a"].failures == ()
    assert [i.replica for _, i in y.items("a")] != [id_]
    y.until(lambda: y.ready("a"), 10)


def test_a_parked_copy_that_its_node_evicts_leaves_the_plan_and_nothing_else_changes() -> None:
    y = parking_yard().add(model("a", idle_s=30))
    id_ = parked(y)
    y.evict(id_)
    y.settle()
    assert y.items() == []
    assert y.phase("a") == "idle"


# -- copies nobody needs any more


def test_the_parked_copy_of_a_removed_entry_is_stopped() -> None:
    y = parking_yard().add(model("a", idle_s=30))
    id_ = parked(y)
    y.append("model", ("a",), ModelDeleted(), None)
    y.settle()
    stop = item_of(y, id_).stop
    assert stop is not None
    assert (stop.reason, stop.park) == ("removed", "never")
    y.advance(1)
    assert y.items() == []


@pytest.mark.parametrize(
    ("entry", "reason"),
    [
        (model("a", maximum=0), "scaled_down"),
        (model("a", profiles=[profile(args=("--ctx-size", "4096"))], idle_s=30), "changed"),
    ],
)
def test_the_parked_copy_of_a_changed_or_switched_off_entry_is_stopped(
    entry: object, reason: str
) -> None:
    y = parking_yard().add(model("a", idle_s=30))
    id_ = parked(y)
    y.append("model", ("a",), ModelChanged(by="test", fields=("x",)), entry)  # type: ignore[arg-type]
    y.settle()
    stop = item_of(y, id_).stop
    assert stop is not None
    assert (stop.reason, stop.park) == (reason, "never")


def test_unload_stops_parked_copies_too() -> None:
    y = parking_yard().add(model("a", idle_s=30))
    id_ = parked(y)
    outcome = y.do(ModelUnload(model="a"))
    assert (outcome.status, id_ in outcome.sentence) == ("accepted", True)
    stop = item_of(y, id_).stop
    assert stop is not None
    assert (stop.reason, stop.park) == ("unload", "never")
    y.advance(1)
    assert y.items() == []


def test_unload_takes_back_the_leave_to_park_of_a_stop_that_is_being_carried_out() -> None:
    y = parking_yard().add(model("a", idle_s=30))
    id_ = draining(y)
    stop = item_of(y, id_).stop
    assert stop is not None
    assert stop.park == "may"
    y.do(ModelUnload(model="a"))
    stop = item_of(y, id_).stop
    assert stop is not None
    assert (stop.reason, stop.park) == ("unload", "never")


def test_copies_above_max_go_the_longest_parked_first() -> None:
    y = parking_yard(gpu0=8, gpu1=8).add(model("a", 6, maximum=2, idle_s=30))
    y.do(ModelLoad(model="a"))
    y.until(lambda: len(y.ready("a")) == 1, 20)
    y.do(ModelLoad(model="a"))
    y.until(lambda: len(y.ready("a")) == 2, 20)
    y.until(
        lambda: [r.phase for r in y.world.replicas.values()] == ["parked", "parked"], 200, "both"
    )
    copies = sorted(y.world.replicas.values(), key=lambda r: (r.parked_at, r.id))
    y.do(ModelScale(model="a", min=0, max=1))
    y.advance(1)
    assert [item.replica for _, item in y.items()] == [copies[1].id]


def test_a_copy_that_a_cold_start_elsewhere_made_needless_goes_when_that_answers() -> None:
    y = parking_yard(gpu0=8, gpu1=8).add(model("a", 6, idle_s=30))
    id_ = parked(y)
    [card] = y.world.replicas[id_].cards
    y.claim("n1", card)
    y.request("a")
    y.settle()
    assert item_of(y, id_).stop is not None
    y.advance(1)
    assert id_ in [i.replica for _, i in y.items()], "while the other starts it stays"
    y.until(lambda: y.ready("a"), 20)
    y.advance(1)
    assert [i.replica for _, i in y.items()] == y.ready("a")


# -- what a node does by itself


def test_req_d13_what_a_claim_parks_is_not_resumed_there_and_who_asks_gets_another_card() -> None:
    y = parking_yard(gpu0=8, gpu1=8).add(model("a", 6, idle_s=600))
    id_ = served(y)
    [card] = y.world.replicas[id_].cards
    y.claim("n1", card)
    y.turn()
    assert y.world.replicas[id_].phase == "parked"
    assert y.phase("a") == "idle", "nobody waits, nothing is started"
    assert [i.replica for _, i in y.items()] == [id_]
    stop = item_of(y, id_).stop
    assert stop is not None
    assert (stop.park, stop.reason) == ("may", "park")
    y.request("a")
    y.until(lambda: y.ready("a"), 20)
    [other] = y.ready("a")
    assert other != id_
    assert y.world.replicas[other].cards != (card,)


def test_inv_1_who_waits_while_its_node_lets_a_replica_go_is_placed_elsewhere_at_once() -> None:
    y = parking_yard(gpu0=8, gpu1=8).add(model("a", 6, idle_s=600))
    id_ = served(y)
    [card] = y.world.replicas[id_].cards
    y.request("a", stream_s=20)
    y.claim("n1", card)
    y.turn()
    assert y.world.replicas[id_].phase == "draining"
    assert y.request("a") == "waits"
    y.settle()
    items = [i for _, i in y.items("a")]
    assert len(items) == 2, "it does not wait for the stream there to end"
    other = next(i for i in items if i.replica != id_)
    assert other.cards != (card,)
    assert y.activation("a").replica == other.replica
    y.until(lambda: not y.waiting["a"], 20)


def test_inv_1_a_start_that_a_claim_ends_is_begun_elsewhere_and_is_no_failure() -> None:
    y = parking_yard(gpu0=8, gpu1=8).add(model("a", 6))
    y.engine("a").load_s = 30
    y.request("a")
    y.until(lambda: y.phase("a") == "loading", 5)
    [(_, item)] = y.items("a")
    y.claim("n1", item.cards[0])
    y.turn()
    [(_, other)] = y.items("a")
    assert other.cards != item.cards
    assert y.world.records.get("a") is None or y.world.records["a"].failures == ()
    y.until(lambda: not y.waiting["a"], 60)


def test_a_kept_model_that_its_node_lets_go_is_started_elsewhere_unasked() -> None:
    y = parking_yard(gpu0=8, gpu1=8).add(model("a", 6, minimum=1, maximum=1))
    y.until(lambda: y.ready("a"), 20)
    [id_] = y.ready("a")
    y.advance(12)
    y.claim("n1", y.world.replicas[id_].cards[0])
    y.until(lambda: y.ready("a") not in ([], [id_]), 20, "min holds on another card")


def test_what_a_load_holds_is_wanted_again_when_its_node_lets_it_go() -> None:
    y = parking_yard(gpu0=8, gpu1=8).add(model("a", 6))
    y.do(ModelLoad(model="a", for_s=3600))
    y.until(lambda: y.ready("a"), 20)
    [id_] = y.ready("a")
    y.advance(12)
    y.claim("n1", y.world.replicas[id_].cards[0])
    y.until(lambda: y.ready("a") not in ([], [id_]), 20)


def test_a_drain_that_its_node_takes_back_is_a_ready_replica_again() -> None:
    y = parking_yard().add(model("a", 6, idle_s=60))
    id_ = served(y)
    y.request("a", stream_s=30)
    y.claim()
    y.turn()
    draining = y.world.replicas[id_]
    assert draining.phase == "draining"
    assert y.phase("a") == "idle"
    y.end_claim()
    back = replace(draining, phase="ready", stop_decision=None, taken_back=draining.stop_decision)
    y._tell(back, ReplicaReady(taken_back=draining.stop_decision))
    y.settle()
    assert item_of(y, id_).stop is None
    assert y.request("a") == "served"
    y.until(lambda: y.world.replicas[id_].phase == "parked", 200, "and idles as any other")


def test_a_drain_that_was_just_cleared_is_coming_back_and_no_second_one_is_started() -> None:
    y = parking_yard(gpu0=8, gpu1=8).add(model("a", 6, idle_s=30))
    id_ = draining(y)
    stop = item_of(y, id_).stop
    assert stop is not None
    y.send_activate("a")
    y.settle()
    item = item_of(y, id_)
    assert (item.stop, item.cleared) == (None, stop.decision)
    assert hold(y, id_) == "pending"
    assert len(y.items()) == 1


def test_a_drain_told_after_its_stop_was_cleared_is_coming_back_too() -> None:
    y = parking_yard(gpu0=8, gpu1=8).add(model("a", 6, idle_s=30))
    id_ = served(y)
    y.now += timedelta(seconds=3600)
    y.settle()
    stop = item_of(y, id_).stop
    assert stop is not None
    y.send_activate("a")
    y.settle()
    assert item_of(y, id_).stop is None
    # The agent had begun before it saw that.
    late = replace(y.world.replicas[id_], phase="draining", stop_decision=stop.decision)
    y._tell(late, ReplicaDraining(decision=stop.decision))
    y.settle()
    assert hold(y, id_) == "pending"
    assert len(y.items()) == 1


def test_a_park_that_crossed_with_new_demand_comes_back_by_itself() -> None:
    y = parking_yard(gpu0=8, gpu1=8).add(model("a", 6, idle_s=30))
    id_ = draining(y)
    y.send_activate("a")
    y.settle()
    assert item_of(y, id_).stop is None
    y._put_away(y.world.replicas[id_])  # the agent was parking it already
    y.settle()
    assert item_of(y, id_).stop is None, "no stop: the agent resumes it"
    assert hold(y, id_) == "pending"
    y.until(lambda: y.ready("a") == [id_], 10)


def test_a_parking_told_again_by_a_new_agent_changes_nothing() -> None:
    y = parking_yard().add(model("a", idle_s=30))
    id_ = parked(y)
    again = y.world.replicas[id_]
    for _ in range(3):
        y._tell(again, ReplicaParked(way="sleep"))
        assert y.settle() == []
    y.request("a")
    y.settle()
    assert item_of(y, id_).stop is None


# -- an agent makes room


def test_inv_5_a_start_its_agent_makes_room_for_waits_and_is_no_failure() -> None:
    y = parking_yard().add(model("a", 6))
    y.rooms["a"] = ("l-1",)
    y.request("a")
    y.advance(1)
    waiting = y.activation("a")
    assert (waiting.phase, waiting.waiting_for) == ("waiting", ("l-1",))
    assert waiting.replica is not None
    assert not waiting.kept
    assert y.world.records.get("a") is None
    y.advance(30)
    assert len(y.items("a")) == 1, "it is not moved while its agent makes room"
    del y.rooms["a"]
    y.until(lambda: y.ready("a"), 10)
    assert y.ready("a") == [waiting.replica]


def test_who_it_waits_for_is_told_as_it_changes() -> None:
    y = parking_yard().add(model("a", 6))
    y.rooms["a"] = ("l-1", "l-2")
    y.request("a")
    y.advance(1)
    [(_, item)] = y.items("a")
    fewer = replace(y.world.replicas[item.replica], waiting_for=("l-2",))
    y._tell(fewer, ReplicaWaiting(waiting_for="l-2"))
    y.settle()
    assert y.activation("a").waiting_for == ("l-2",)


def test_one_that_waits_for_room_is_withdrawn_when_nobody_asks_for_it_any_more() -> None:
    y = parking_yard(gpu0=8, gpu1=8).add(model("a", 6, maximum=2, idle_s=60))
    id_ = served(y)
    y.rooms["a"] = ("l-1",)
    y.do(ModelLoad(model="a"))
    y.advance(1)
    waiting = next(r for r in y.world.replicas.values() if r.phase == "waiting")
    # The wish for two ends: one of them is all that is asked for.
    before = y.activation("a")
    y.append(
        "activation",
        ("a", "any"),
        ActivationReady(replica=id_),
        replace(before, replicas=1),
        "one is enough",
    )
    y.settle()
    y.act()
    assert y.world.replicas[waiting.id].phase == "withdrawn"
    y.settle()
    assert [i.replica for _, i in y.items()] == [id_]


def test_a_copy_in_line_for_its_way_back_stays_parked_when_nobody_asks_any_more() -> None:
    y = parking_yard(gpu0=8, gpu1=8).add(model("a", 6, maximum=2, idle_s=600))
    id_ = served(y)
    y.do(ModelLoad(model="a"))
    y.until(lambda: len(y.ready("a")) == 2, 20)
    y.advance(12)
    # Its node parked one of the two; the load still asks for both, so it is to come back.
    y.claim("n1", y.world.replicas[id_].cards[0])
    y.act()
    y.act()
    assert y.world.replicas[id_].phase == "parked"
    y.end_claim("n1", y.world.replicas[id_].cards[0])
    y.settle()
    assert item_of(y, id_).stop is None
    before = y.activation("a")
    y.append(
        "activation",
        ("a", "any"),
        ActivationReady(replica=before.replica or ""),
        replace(before, replicas=1),
        "one is enough",
    )
    y.settle()
    stop = item_of(y, id_).stop
    assert stop is not None
    assert (stop.reason, stop.park) == ("park", "may")


def test_unload_withdraws_one_that_waits_for_room() -> None:
    y = parking_yard().add(model("a", 6))
    y.rooms["a"] = ("l-1",)
    y.request("a")
    y.advance(1)
    y.waiting["a"].clear()
    y.do(ModelUnload(model="a"))
    y.advance(1)
    assert y.items() == []
    assert y.phase("a") == "idle"


# -- what it costs


def test_parks_and_resumes_are_measured_the_last_eight_of_each() -> None:
    y = parking_yard().add(model("a", idle_s=20))
    id_ = parked(y)
    for turn in range(10):
        y.resume_s = 1.0 + turn
        y.park_s = 2.0 + turn
        y.request("a")
        y.until(lambda: y.ready("a"), 30)
        y.until(lambda: y.world.replicas[id_].phase == "parked", 120)
        y.settle()
    [known] = y.world.records["a"].measured
    assert known.park_s == tuple(4.0 + n for n in range(8))
    assert known.resume_s == tuple(3.0 + n for n in range(8))
    assert len(known.load_s) == 1, "a resume is no load"
    assert len(y.world.records["a"].timed) == 2


def test_what_a_replica_tells_again_is_measured_once() -> None:
    y = parking_yard().add(model("a", idle_s=30))
    id_ = parked(y)
    y.request("a")
    y.until(lambda: y.ready("a"), 10)
    before = y.world.records["a"]
    for _ in range(3):
        y._tell(y.world.replicas[id_], ReplicaReady())
        y.settle()
    assert y.world.records["a"] == before
    measured = [e for e in y.events("record") if e == "record.measured"]
    assert len(measured) == 3, "load, park, resume"


def test_a_new_leader_decides_alike_with_parked_replicas() -> None:
    y = parking_yard(gpu0=8, gpu1=8).add(model("a", 6, idle_s=30), model("b", 6, idle_s=30))
    y.compares = True
    id_ = parked(y)
    y.claim("n1", y.world.replicas[id_].cards[0])
    y.request("a")
    y.request("b")
    y.advance(60)
    y.end_claim("n1", y.world.replicas[id_].cards[0])
    y.advance(60)
    assert not any(y.waiting.values())


def test_who_waits_behind_a_kept_card_stays_in_line_while_a_replica_leaves_another() -> None:
    y = parking_yard(gpu0=8).add(model("a", 6, minimum=1, maximum=1))
    y.until(lambda: y.ready("a"), 20)
    y.request("a", stream_s=30)
    y.claim()
    y.turn()
    [id_] = [i.replica for _, i in y.items()]
    assert y.world.replicas[id_].phase == "draining"
    y.do(ModelLoad(model="a"))
    y.advance(5)
    assert (y.phase("a"), y.activation("a").kept) == ("waiting", True)
    assert y.world.replicas[id_].phase == "draining"


def test_what_changes_of_parked_copies_is_told_before_it_is_done() -> None:
    y = parking_yard().add(model("a", idle_s=30))
    id_ = parked(y)
    outcome = y.do(CatalogApply(entries=[], prune=True, dry_run=True))
    assert f"  {id_} on n1 is parked, and stops" in outcome.lines
