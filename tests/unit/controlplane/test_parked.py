"""The life of a parked replica under the leader: parked, resumed, lost, and stopped when nobody needs it."""

from datetime import timedelta

import pytest

from schemas.commands import CatalogApply, ModelLoad, ModelScale, ModelUnload
from schemas.model import ModelChanged, ModelDeleted
from schemas.replica import ReplicaReady
from tests.support.parked import draining, hold, item_of, parked
from tests.support.parking import parking_yard
from tests.support.worlds import model, profile

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
