"""When a drain is over, by value: one test per case of the decision."""

import pytest
from msgspec.structs import replace

from nodeagent.domain.drains import (
    AskEngine,
    DrainFacts,
    GatewayHeard,
    KeepWaiting,
    StopNow,
    TakeBack,
    judge,
    unheard,
)
from schemas.beacons import EngineCounters
from tests.support.agent_yard import a_stop

DONE = GatewayHeard(name="g1", age_s=0.4, position=100, inflight=0)
FACTS = DrainFacts(
    stop=a_stop(drain_timeout_s=60.0),
    sequence=100,
    age_s=1.0,
    connected_s=100.0,
    gateways=(DONE,),
    gateway_gone_s=10.0,
    listen_s=3.0,
    engine=EngineCounters(inflight=0),
)


def facts(**fields) -> DrainFacts:
    return replace(FACTS, **fields)


def waits(verdict) -> str:
    assert isinstance(verdict, KeepWaiting), verdict
    return verdict.reason


def test_nobody_uses_it_any_more():
    assert judge(FACTS) == StopNow(why="drained")


def test_an_engine_that_tells_nothing_does_not_hold_the_drain_up():
    assert judge(facts(engine=EngineCounters())) == StopNow(why="drained")


def test_force_waits_for_nobody():
    busy = replace(DONE, inflight=2)
    for connected_s in (None, 100.0):
        verdict = judge(
            facts(stop=a_stop(force=True), connected_s=connected_s, gateways=(busy,), sequence=None)
        )
        assert verdict == StopNow(why="forced", running=2)


def test_an_idle_stop_is_taken_back_at_its_bound_even_when_nobody_can_be_heard():
    stop = a_stop(take_back=True, drain_timeout_s=60.0)
    busy = replace(DONE, inflight=1)
    assert isinstance(judge(facts(stop=stop, age_s=59.9, gateways=(busy,))), KeepWaiting)
    assert judge(facts(stop=stop, age_s=60.0, gateways=(busy,))) == TakeBack(running=1)
    assert judge(facts(stop=stop, age_s=60.0, connected_s=None)) == TakeBack()


def test_inv_3_a_park_somebody_asked_for_ends_no_request():
    stop = a_stop(reason="park", park="must", drain_timeout_s=60.0)
    busy = replace(DONE, inflight=1)
    assert isinstance(judge(facts(stop=stop, age_s=59.9, gateways=(busy,))), KeepWaiting)
    assert judge(facts(stop=stop, age_s=60.0, gateways=(busy,))) == TakeBack(running=1)
    assert judge(facts(stop=stop)) == StopNow(why="drained")
    may = a_stop(reason="drain", park="may", drain_timeout_s=60.0)
    assert judge(facts(stop=may, age_s=60.0, gateways=(busy,))) == StopNow(why="bound", running=1)


def test_a_drain_for_another_model_ends_the_stragglers_at_its_bound():
    busy = replace(DONE, inflight=3)
    assert judge(facts(age_s=60.0, gateways=(busy,))) == StopNow(why="bound", running=3)


@pytest.mark.parametrize("age_s", [1.0, 60.0, 6000.0])
def test_inv_3_without_a_connection_nothing_is_stopped_not_even_at_the_bound(age_s):
    assert "no connection" in waits(judge(facts(connected_s=None, age_s=age_s)))
    assert "connected just now" in waits(judge(facts(connected_s=2.9, age_s=age_s)))


@pytest.mark.parametrize("reason", ["lease", "claim", "vm"])
@pytest.mark.parametrize("connected_s", [None, 0.1])
def test_inv_5_who_was_promised_a_card_of_this_machine_waits_for_no_network(reason, connected_s):
    own = facts(stop=a_stop(reason=reason, park="may"), connected_s=connected_s, sequence=None)
    assert isinstance(judge(replace(own, age_s=59.9)), KeepWaiting)
    assert judge(replace(own, age_s=60.0)) == StopNow(why="bound")


def test_a_drain_the_log_does_not_know_cannot_have_been_confirmed():
    assert "not stored" in waits(judge(facts(sequence=None)))


def test_with_no_gateway_alive_it_listens_for_one_before_it_stops():
    for gateways in ((), (replace(DONE, age_s=10.1),)):
        assert "no gateway heard" in waits(judge(facts(gateways=gateways, age_s=2.9)))
        assert judge(facts(gateways=gateways, age_s=3.0)) == StopNow(why="drained")


def test_every_live_gateway_must_have_seen_the_drain():
    behind = replace(DONE, name="g2", position=99)
    assert waits(judge(facts(gateways=(DONE, behind)))) == "g2 has not seen the drain"


def test_a_gateway_that_leaves_need_not_follow_to_the_end_once_nothing_waits_there():
    leaving = replace(DONE, position=1, leaving=True)
    assert judge(facts(gateways=(leaving,))) == StopNow(why="drained")
    assert isinstance(judge(facts(gateways=(replace(leaving, waiting=1),))), KeepWaiting)
    assert isinstance(judge(facts(gateways=(replace(leaving, inflight=1),))), KeepWaiting)


def test_inv_3_a_running_request_on_any_live_gateway_holds_it():
    busy = replace(DONE, name="g2", inflight=1, age_s=9.9)
    assert waits(judge(facts(gateways=(DONE, busy)))) == "g2 has 1 running"


def test_a_gateway_that_fell_silent_does_not_hold_it_for_ever():
    gone = replace(DONE, name="g2", inflight=1, age_s=10.1)
    assert judge(facts(gateways=(DONE, gone))) == StopNow(why="drained")


def test_a_gateway_that_fell_silent_without_a_goodbye_may_be_cut_off_and_send_on():
    gone = replace(DONE, name="g2", age_s=10.1)
    left = replace(gone, name="g3", leaving=True)
    assert unheard((DONE, gone, left), 10.0) == ("g2",)


def test_the_engine_is_asked_last_and_its_own_requests_count():
    assert judge(facts(engine=None)) == AskEngine()
    assert isinstance(judge(facts(engine=None, gateways=(replace(DONE, inflight=1),))), KeepWaiting)
    busy = EngineCounters(inflight=2)
    assert waits(judge(facts(engine=busy))) == "the engine itself has 2 running"
