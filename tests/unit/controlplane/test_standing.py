"""Nodes join, fall silent, come back and are lost; what ran there goes on elsewhere."""

from datetime import timedelta

from schemas.commands import NodeCordon, NodeUncordon
from tests.support.worlds import Yard, model


def nodes(count: int) -> Yard:
    y = Yard()
    for n in range(1, count + 1):
        y.node(f"n{n}", {"gpu0": 8})
    y.settle()
    return y


def reach(y: Yard, node: str) -> str:
    return y.nodestate(node).reach


def test_a_node_joins_when_its_inventory_is_first_seen() -> None:
    y = nodes(1)
    assert y.events("nodestate") == ["nodestate.joined"]
    assert (y.nodestate("n1").admin, reach(y, "n1")) == ("open", "reachable")


def test_thirty_seconds_of_silence_are_unreachable_and_a_beacon_ends_it() -> None:
    y = nodes(3)
    y.fall_silent("n1")
    y.advance(29.5)
    assert reach(y, "n1") == "reachable"
    y.advance(2)
    assert reach(y, "n1") == "unreachable"
    assert reach(y, "n2") == "reachable"
    y.speak_again("n1")
    y.settle()
    assert reach(y, "n1") == "reachable"
    assert y.events("nodestate").count("nodestate.unreachable") == 1


def test_a_new_leader_judges_nobody_in_its_first_thirty_seconds() -> None:
    y = nodes(1)
    y.deaf_agents.add("n1")
    y.leading_since = y.now
    y.advance(29)
    assert reach(y, "n1") == "reachable"
    y.advance(3)
    assert reach(y, "n1") == "unreachable"


def test_when_most_nodes_fall_silent_together_the_leader_suspects_itself() -> None:
    y = nodes(3).add(model("a"))
    y.fall_silent("n1", "n2")
    y.advance(120)
    assert reach(y, "n1") == reach(y, "n2") == "reachable"
    y.send_activate("a")
    y.settle()
    assert y.phase("a") == "wanted"
    assert "placement is frozen: 2 of 3 nodes" in y.activation("a").reason
    y.speak_again("n1")
    y.until(lambda: y.ready("a"), 10, "the freeze ends when one is heard again")
    assert reach(y, "n2") == "unreachable"


def test_half_of_the_nodes_or_a_single_one_is_judged() -> None:
    y = nodes(4)
    y.fall_silent("n1", "n2")
    y.advance(32)
    assert reach(y, "n1") == reach(y, "n2") == "unreachable"
    lone = nodes(1)
    lone.fall_silent("n1")
    lone.advance(32)
    assert reach(lone, "n1") == "unreachable"


def test_a_wanted_model_of_an_unreachable_node_is_placed_elsewhere_after_a_minute() -> None:
    y = nodes(3).add(model("a"))
    y.request("a")
    y.until(lambda: y.answered, 10)
    [(node, item)] = y.items("a")
    silent_at = y.now
    y.fall_silent(node)
    y.until(lambda: len(y.items("a")) == 2, 70)
    assert 59 <= (y.now - silent_at).total_seconds() <= 63
    assert item.stop is None
    [other] = [n for n, _ in y.items("a") if n != node]
    y.until(lambda: len(y.ready("a")) == 2, 10)
    assert y.activation("a").node == other
    y.speak_again(node)
    y.until(lambda: len(y.items("a")) == 1, 20, "one copy when it is back")


def test_an_unreachable_nodes_model_comes_back_in_time_and_nothing_moves() -> None:
    y = nodes(3).add(model("a", idle_s=0))
    y.request("a")
    y.until(lambda: y.answered, 10)
    [(node, item)] = y.items("a")
    y.fall_silent(node)
    y.advance(45)
    y.speak_again(node)
    y.advance(30)
    assert [i.replica for _, i in y.items("a")] == [item.replica]
    assert y.started("a") == 1


def test_after_an_hour_a_node_is_lost_and_its_replicas_count_as_gone() -> None:
    y = nodes(1).add(model("a", minimum=1))
    y.until(lambda: y.ready("a"), 10)
    y.fall_silent("n1")
    y.advance(3590, by=10)
    assert reach(y, "n1") == "unreachable"
    assert y.items("a")
    y.advance(30)
    assert reach(y, "n1") == "lost"
    assert y.items("a") == []
    y.speak_again("n1")
    y.settle()
    assert reach(y, "n1") == "reachable"
    y.until(lambda: len(y.ready("a")) == 1 and len(y.items("a")) == 1, 20)


def test_a_lost_nodes_demand_is_wanted_again() -> None:
    y = nodes(1).add(model("a", idle_s=0))
    y.request("a")
    y.until(lambda: y.answered, 10)
    y.fall_silent("n1")
    y.advance(3700, by=10)
    assert y.phase("a") == "wanted"
    y.node("n2", {"gpu0": 8})
    y.until(lambda: y.phase("a") == "ready", 10)
    assert y.activation("a").node == "n2"


def test_a_new_leader_goes_on_counting_the_silence_from_the_log() -> None:
    y = nodes(1)
    y.fall_silent("n1")
    y.advance(40)
    y.leading_since = y.now
    y.advance(3580, by=10)
    assert reach(y, "n1") == "lost"


def test_an_agent_that_stopped_cleanly_is_not_lost_but_no_candidate() -> None:
    y = nodes(1).add(model("a", minimum=1), model("b"))
    y.until(lambda: y.ready("a"), 10)
    y.stop_agent("n1")
    y.request("b")
    y.advance(10)
    assert len(y.ready("a")) == 1
    assert y.phase("b") == "wanted"
    y.node("n1", {"gpu0": 8})
    y.until(lambda: y.ready("b"), 10)


def test_cordon_keeps_what_runs_and_places_nothing_new() -> None:
    y = nodes(1).add(model("a", minimum=1), model("b"))
    y.until(lambda: y.ready("a"), 10)
    assert y.do(NodeCordon(node="n1")).status == "accepted"
    y.request("b")
    y.settle()
    assert y.activation("b").code == "no_capacity"
    assert y.activation("b").reason == "n1: is cordoned"
    assert y.ready("a")
    before = len(y.events("nodestate"))
    assert y.do(NodeCordon(node="n1")).sentence == "n1 is cordoned already"
    assert len(y.events("nodestate")) == before
    y.do(NodeUncordon(node="n1"))
    y.now += timedelta(seconds=61)
    y.request("b")
    y.until(lambda: y.ready("b"), 10)


def test_a_cordon_outlives_a_silence() -> None:
    y = nodes(3)
    y.do(NodeCordon(node="n1"))
    y.fall_silent("n1")
    y.advance(40)
    y.speak_again("n1")
    y.settle()
    assert (y.nodestate("n1").admin, reach(y, "n1")) == ("cordoned", "reachable")


def test_an_unknown_node_is_not_found() -> None:
    y = nodes(1)
    outcome = y.do(NodeCordon(node="n7"))
    assert (outcome.status, outcome.code) == ("rejected", "not_found")
    assert outcome.sentence == "there is no node 'n7'; known: n1"


def test_a_kept_leader_and_a_new_one_agree_when_time_alone_makes_a_model_short() -> None:
    y = nodes(3).add(model("a", minimum=1), model("b", 20, minimum=1))
    y.compares = True
    y.until(lambda: y.ready("a"), 10)
    [(node, _)] = y.items("a")
    y.fall_silent(node)
    y.until(lambda: len(y.items("a")) == 2, 70)


def test_after_a_reconnect_old_silence_is_nobodys_fault_for_thirty_seconds() -> None:
    y = nodes(3)
    y.fall_silent("n1")
    y.advance(20)
    y.leading_since = y.now
    y.advance(25)
    assert reach(y, "n1") == "reachable", "silent for 45 s, but this leader listens for 25 s only"
    y.advance(6)
    assert reach(y, "n1") == "unreachable"
