"""What the leader makes of replicas that their own nodes park, end or make room for."""

from datetime import timedelta

from msgspec.structs import replace

from schemas.activation import ActivationReady
from schemas.commands import ModelLoad, ModelUnload
from schemas.replica import ReplicaDraining, ReplicaParked, ReplicaReady, ReplicaWaiting
from tests.support.parked import draining, hold, item_of, parked, served
from tests.support.parking import parking_yard
from tests.support.worlds import model

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
