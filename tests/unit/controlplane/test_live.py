"""Beacons become ages: what is heard, what is missed, and what an outage leaves."""

from typing import Any

from controlplane.domain.decision import AgentLive, GatewayLive
from controlplane.live import FORGET_AFTER_S, LiveTracker
from schemas.beacons import AgentBeacon, EngineCounters, GatewayBeacon


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


def gateway(n: int, **given: Any) -> GatewayBeacon:
    return GatewayBeacon(**{"gateway": "g", "incarnation": "i1", "n": n, "position": 5, **given})


def agent(**given: Any) -> AgentBeacon:
    return AgentBeacon(**{"node": "n", "epoch": 3, "position": 5, **given})


def tracker() -> tuple[LiveTracker, Clock]:
    clock = Clock()
    return LiveTracker(clock, row_gap_s=30.0), clock


def only_gateway(live: LiveTracker) -> GatewayLive:
    (found,) = live.view(leading_since=0.0).gateways
    return found


def only_agent(live: LiveTracker) -> AgentLive:
    (found,) = live.view(leading_since=0.0).agents
    return found


def test_ages_grow_with_the_own_clock() -> None:
    live, clock = tracker()
    live.on_gateway("g", gateway(1, inflight={"r": 1}, last_use_age_s={"m": 4.0}))
    clock.now += 2.5
    found = only_gateway(live)
    assert found.age_s == 2.5
    assert found.inflight == {"r": 1}
    assert found.last_use_age_s == {"m": 4.0}
    assert live.view(leading_since=clock.now - 7).leading_for_s == 7


def test_only_a_beacon_that_says_something_new_wakes() -> None:
    live, clock = tracker()
    assert live.on_gateway("g", gateway(1, inflight={"r": 1}))
    clock.now += 1
    assert not live.on_gateway("g", gateway(2, inflight={"r": 1}))
    assert live.on_gateway("g", gateway(3, inflight={}))
    assert live.on_gateway("g", gateway(4, last_use_age_s={"m": 0.0}))
    clock.now += 1
    assert not live.on_gateway("g", gateway(5, last_use_age_s={"m": 1.0}))
    assert live.on_gateway("g", gateway(6, last_use_age_s={"m": 0.1}))
    assert live.on_gateway("g", gateway(7, leaving=True))


def test_a_beacon_out_of_order_or_of_another_name_is_ignored() -> None:
    live, _ = tracker()
    live.on_gateway("g", gateway(5, inflight={"r": 1}))
    assert not live.on_gateway("g", gateway(4))
    assert only_gateway(live).inflight == {"r": 1}
    assert not live.on_gateway("h", gateway(9))
    assert not live.on_agent("x", agent())
    assert live.misnamed == 2


def test_a_killed_gateways_uses_stay_uses() -> None:
    live, clock = tracker()
    live.on_gateway("g", gateway(9, last_use_age_s={"m": 1.0}, waiting={"w": 2}))
    clock.now += 10
    live.on_gateway("g", gateway(1, incarnation="i2"))
    assert only_gateway(live).last_use_age_s == {"m": 11.0, "w": 10.0}


def test_beacons_in_a_row_are_counted_until_a_gap_or_an_outage() -> None:
    live, clock = tracker()
    for _ in range(3):
        live.on_agent("n", agent())
        clock.now += 5
    assert (only_agent(live).heard, only_agent(live).heard_for_s) == (3, 15.0)
    assert only_agent(live).trusted_for_s == 5.0
    live.on_agent("n", agent())
    assert only_agent(live).trusted_for_s == 5.0, "a beacon more changes nothing about the third"
    live.reset()
    assert (only_agent(live).heard, only_agent(live).heard_for_s) == (0, 0.0)
    assert only_agent(live).trusted_for_s is None
    live.on_agent("n", agent())
    assert only_agent(live).heard == 1
    clock.now += 31
    live.on_agent("n", agent())
    assert only_agent(live).heard == 1


def test_an_agent_that_was_replaced_is_not_heard() -> None:
    live, _ = tracker()
    live.on_agent("n", agent(epoch=9))
    assert not live.on_agent("n", agent(epoch=3))
    assert only_agent(live).epoch == 9


def test_engine_counters_tell_use_by_running_requests_and_by_change() -> None:
    live, clock = tracker()

    def tell(inflight: int | None, total: int | None) -> float | None:
        counters = EngineCounters(inflight=inflight, requests_total=total)
        live.on_agent("n", agent(replicas={"r": counters}))
        return only_agent(live).replicas["r"].changed_age_s

    assert tell(0, 5) is None  # seen once: no change is known
    clock.now += 5
    assert tell(0, 5) is None
    clock.now += 5
    assert tell(0, 6) == 0
    clock.now += 5
    assert tell(0, 6) == 5
    assert tell(2, 6) == 0
    clock.now += 5
    assert tell(0, 6) == 0  # it was running until some moment since the last beacon
    clock.now += 5
    assert tell(0, 6) == 5


def test_a_use_during_an_outage_shows_after_it() -> None:
    live, clock = tracker()
    live.on_agent("n", agent(replicas={"r": EngineCounters(inflight=0, requests_total=5)}))
    live.reset()
    clock.now += 60
    live.on_agent("n", agent(replicas={"r": EngineCounters(inflight=0, requests_total=8)}))
    assert only_agent(live).replicas["r"].changed_age_s == 0


def test_who_is_silent_for_a_day_is_forgotten() -> None:
    live, clock = tracker()
    live.on_gateway("g", gateway(1))
    live.on_agent("n", agent())
    clock.now += FORGET_AFTER_S + 1
    view = live.view(leading_since=0.0)
    assert (view.gateways, view.agents) == ((), ())
