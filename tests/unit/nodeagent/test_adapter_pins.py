"""Gateways' pins: given by asks and beacons, given up by beacons and time, never by an old word."""

from nodeagent.domain import pins as p
from nodeagent.domain.pins import Pins, uses_in
from schemas.beacons import GatewayBeacon, Pin

KEEP_S = 30.0


def beacon(n: int, listed: dict[str, Pin] | None = None, gateway="g1", incarnation="i1", **fields):
    return GatewayBeacon(
        gateway=gateway,
        incarnation=incarnation,
        n=n,
        position=0,
        pins={"r-1": listed} if listed else {},
        **fields,
    )


def hear(pins: Pins, at: float, *args, **fields) -> Pins:
    return p.heard(pins, beacon(*args, **fields), at, KEEP_S)


def ask(pins: Pins, at: float, n: int, name="a@1", gateway="g1", incarnation="i1") -> Pins:
    return p.asked(pins, gateway, incarnation, replica="r-1", name=name, n=n, at=at, keep_s=KEEP_S)


def test_an_ask_pins_before_any_beacon_lists_it():
    pins = ask(Pins(), 10.0, n=4)
    use = uses_in(pins, "r-1", 39.9)["a@1"]
    assert (use.gateways, use.uses, use.used_at) == (("g1",), 0, 10.0)
    late = uses_in(pins, "r-1", 40.0)["a@1"]
    assert (late.gateways, late.silent) == ((), 1)
    assert uses_in(pins, "r-2", 11.0) == {}


def test_a_beacon_sent_before_the_ask_does_not_give_it_up_and_the_next_does():
    pins = hear(ask(Pins(), 10.0, n=4), 10.1, 4)
    assert "a@1" in uses_in(pins, "r-1", 11.0)
    assert uses_in(hear(pins, 10.5, 5), "r-1", 11.0) == {}


def test_a_listed_pin_runs_out_keep_s_after_the_last_beacon_that_lists_it():
    pins = hear(Pins(), 10.0, 1, {"a@1": Pin(0, 3.0)})
    assert uses_in(pins, "r-1", 11.0)["a@1"].used_at == 7.0
    pins = hear(pins, 20.0, 2, {"a@1": Pin(0, 13.0)})
    assert "a@1" in uses_in(pins, "r-1", 49.9)
    assert uses_in(pins, "r-1", 50.0)["a@1"].gateways == ()


def test_a_beacon_older_than_the_last_says_nothing():
    pins = hear(Pins(), 10.0, 7, {"a@1": Pin(1)})
    assert hear(pins, 11.0, 6) is pins
    assert hear(pins, 11.0, 7) is pins
    assert uses_in(hear(pins, 11.0, 8), "r-1", 12.0) == {}


def test_a_pin_given_up_and_asked_for_again_stays_whatever_older_beacons_say():
    pins = hear(ask(Pins(), 1.0, n=1), 2.0, 2)
    pins = ask(pins, 2.5, n=2)
    pins = hear(pins, 2.6, 2)
    assert "a@1" in uses_in(pins, "r-1", 3.0)
    assert "a@1" in uses_in(hear(pins, 3.0, 3, {"a@1": Pin(1)}), "r-1", 3.0)


def test_uses_of_all_gateways_are_counted_and_the_last_use_is_the_newest():
    pins = hear(Pins(), 10.0, 1, {"a@1": Pin(2), "b@1": Pin(0, 4.0)})
    pins = hear(pins, 11.0, 1, {"a@1": Pin(1), "b@1": Pin(0, 2.0)}, gateway="g2")
    uses = uses_in(pins, "r-1", 12.0)
    assert (uses["a@1"].gateways, uses["a@1"].uses) == (("g1", "g2"), 3)
    assert (uses["b@1"].uses, uses["b@1"].used_at) == (0, 9.0)


def test_what_a_silent_gateway_had_running_may_still_run():
    pins = hear(Pins(), 10.0, 1, {"a@1": Pin(2), "b@1": Pin(0)})
    uses = uses_in(pins, "r-1", 41.0)
    # It may have begun one just before it stopped trusting the pin.
    assert (uses["b@1"].gateways, uses["b@1"].uses, uses["b@1"].silent) == ((), 0, 1)
    assert (uses["a@1"].gateways, uses["a@1"].uses, uses["a@1"].silent) == ((), 0, 2)
    assert uses_in(p.settled(pins, 41.0), "r-1", 41.0) == uses
    assert uses_in(pins, "r-1", 10.0 + p.FORGET_S + 1) == {}
    assert p.settled(pins, 10.0 + p.FORGET_S + 1).gateways == {}


def test_a_gateway_heard_under_a_new_incarnation_has_nothing_running_of_the_old_after_a_while():
    pins = hear(Pins(), 10.0, 5, {"a@1": Pin(1)})
    pins = hear(pins, 12.0, 1, incarnation="i2")
    assert uses_in(pins, "r-1", 20.0)["a@1"].uses == 1
    assert uses_in(pins, "r-1", 41.0) == {}
    assert set(p.settled(pins, 41.0).gateways) == {("g1", "i2")}


def test_a_denied_ask_pins_nothing_and_takes_nothing_from_a_pin_beacons_list():
    asked = ask(Pins(), 10.0, n=4)
    denied = p.denied(asked, "g1", "i1", replica="r-1", name="a@1", n=4)
    assert uses_in(denied, "r-1", 11.0) == {}
    later = ask(asked, 11.0, n=5)
    assert p.denied(later, "g1", "i1", replica="r-1", name="a@1", n=4) is later
    used = ask(hear(Pins(), 9.0, 4, {"a@1": Pin(1)}), 10.0, n=4)
    assert p.denied(used, "g1", "i1", replica="r-1", name="a@1", n=4) is used
    assert p.denied(used, "g9", "i1", replica="r-1", name="a@1", n=4) is used


def test_a_launch_that_is_over_has_no_pins():
    pins = hear(Pins(), 10.0, 1, {"a@1": Pin(1)})
    assert uses_in(p.without_replica(pins, "r-1"), "r-1", 11.0) == {}
    assert p.without_replica(pins, "r-2") is pins


def test_req_b56_the_last_use_of_what_is_given_up_is_not_forgotten():
    before = hear(Pins(), 10.0, 1, {"a@1": Pin(0, 1.0), "b@1": Pin(1)})
    after = hear(before, 11.0, 2, {"b@1": Pin(0)})
    assert p.given_up(before, after) == {"r-1": {"a@1": 9.0}}
    assert p.given_up(after, after) == {}
    assert p.given_up(before, p.settled(before, 10.0 + p.FORGET_S + 1)) == {
        "r-1": {"a@1": 9.0, "b@1": 10.0}
    }
