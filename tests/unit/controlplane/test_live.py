"""Beacons become ages: what is heard, what is missed, and what an outage leaves."""

from datetime import timedelta
from typing import Any

from controlplane.domain.decision import AgentLive, GatewayLive
from controlplane.live import AGES_HOLD_S, FORGET_AFTER_S, LiveTracker
from schemas.api import GatewayView
from schemas.beacons import AgentBeacon, EngineCounters, GatewayBeacon
from tests.support.worlds import T0


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


def test_who_was_heard_and_did_not_say_goodbye_is_told_with_its_silence() -> None:
    live, clock = tracker()
    live.on_gateway("g", gateway(1))
    live.on_gateway("left", gateway(1, gateway="left", leaving=True))
    live.on_gateway("old", gateway(1, gateway="old"))
    clock.now += FORGET_AFTER_S - 1
    live.on_gateway("g", gateway(2, position=9))
    clock.now += 2.54
    assert live.gateways() == (GatewayView(name="g", position=9, silent_s=2.5),)


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


def test_ages_are_the_same_object_until_somebody_speaks_or_a_moment_passed() -> None:
    live, clock = tracker()
    live.on_gateway("g", gateway(1))
    live.on_agent("n", agent())
    live.on_agent("o", AgentBeacon(node="o", epoch=1, position=5))
    first = live.view(leading_since=0.0)
    clock.now += AGES_HOLD_S / 2
    assert live.view(leading_since=0.0) is first
    live.on_agent("n", agent(leaving=True))
    second = live.view(leading_since=0.0)
    assert [(a.node, a.leaving) for a in second.agents] == [("n", True), ("o", False)]
    assert second.agents[1] is first.agents[1], "of others only the ages would differ"
    live.on_gateway("g", gateway(2, inflight={"r": 1}))
    assert live.view(leading_since=0.0).gateways[0].inflight == {"r": 1}
    assert live.view(leading_since=5.0).leading_for_s == clock.now - 5.0
    clock.now += AGES_HOLD_S
    assert [a.age_s for a in live.view(leading_since=5.0).agents] == [
        clock.now - 1000.025,
        clock.now - 1000.0,
    ]


def test_a_model_nobody_used_since_keeps_the_very_time_of_its_last_use() -> None:
    clock = Clock()
    wall = T0
    live = LiveTracker(clock, row_gap_s=30.0, now=lambda: wall)
    live.on_gateway("g", gateway(1, last_use_age_s={"m": 4.0, "k": 2.0}))
    first = live.view(leading_since=0.0).gateways[0].last_use_at_s
    assert first == {"m": T0.timestamp() - 4, "k": T0.timestamp() - 2}
    clock.now += 1.0
    wall += timedelta(seconds=1.0004)  # the two clocks drift apart
    live.on_gateway("g", gateway(2, last_use_age_s={"m": 5.0, "k": 0.0}))
    second = live.view(leading_since=0.0).gateways[0].last_use_at_s
    assert second == {"m": first["m"], "k": T0.timestamp() + 1}
    wall += timedelta(hours=1)  # set
    clock.now += 1.0
    third = live.view(leading_since=0.0).gateways[0].last_use_at_s
    assert first is not None
    assert third is not None
    assert abs(third["m"] - first["m"] - 3600) < 1
