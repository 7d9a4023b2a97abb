"""When a gateway may count on an adapter without asking, and when it lets go of it."""

from gateway.domain.pins import LINGER_S, TRUST_S, Held, Pins
from schemas.beacons import Pin

A, B = "a@00000001", "b@00000002"


def asked(pins: Pins, at_s: float, pin: str = A, *, replica: str = "r-1") -> Held:
    """A request that asked at `at_s` and was told yes."""
    held = pins.begin("n1", replica, pin, at_s)
    question = pins.asking("n1", replica, pin, at_s)
    pins.granted(question, pin, at_s)
    pins.asked(question, at_s + 0.01)
    return held


def test_a_pin_is_trusted_from_the_ask_on_and_no_longer_than_that_proves() -> None:
    pins = Pins()
    held = asked(pins, 100.0)
    assert held.is_trusted(100.02)
    assert held.is_trusted(100.0 + TRUST_S - 0.001)
    assert not held.is_trusted(100.0 + TRUST_S)


def test_a_pin_nobody_said_yes_to_is_no_hit() -> None:
    pins = Pins()
    held = pins.begin("n1", "r-1", A, 0.0)
    assert not held.is_trusted(0.0)
    pins.tell(1, 0.0)
    pins.heard("n1", 1)
    assert not held.is_trusted(0.0)


def test_trust_goes_on_from_when_the_echoed_beacon_was_sent_not_from_the_echo() -> None:
    pins = Pins()
    held = asked(pins, 0.0)
    pins.tell(1, 5.0)
    pins.tell(2, 15.0)
    pins.heard("n1", 1)
    assert held.is_trusted(24.9)
    assert not held.is_trusted(25.0)
    pins.heard("n1", 2)
    assert held.is_trusted(34.9)
    # An older echo that came late takes nothing back.
    pins.heard("n1", 1)
    assert held.is_trusted(34.9)


def test_an_echo_of_another_node_or_of_a_beacon_never_sent_says_nothing() -> None:
    pins = Pins()
    held = asked(pins, 0.0)
    pins.tell(1, 10.0)
    pins.heard("n2", 1)
    pins.heard("n1", 7)
    assert not held.is_trusted(TRUST_S)


def test_a_pin_made_anew_is_not_proven_by_a_beacon_from_before() -> None:
    pins = Pins()
    first = asked(pins, 0.0)
    pins.tell(1, 1.0)
    pins.end(first, 1.5)
    assert pins.recall("r-1", [A])
    again = asked(pins, 2.0)
    # Beacon 1 listed the pin that was given up since; the agent may have evicted between.
    pins.heard("n1", 1)
    assert again.proven_s == 2.0
    pins.tell(2, 3.0)
    pins.heard("n1", 2)
    assert again.proven_s == 3.0


def test_a_pin_is_listed_from_before_the_ask_and_tells_who_uses_it() -> None:
    pins = Pins()
    question = pins.asking("n1", "r-1", A, 0.0)
    assert pins.tell(1, 0.5) == {"r-1": {A: Pin(0, 0.5)}}
    held = pins.begin("n1", "r-1", A, 1.0)
    pins.begin("n1", "r-1", A, 1.0)
    assert pins.tell(2, 1.0) == {"r-1": {A: Pin(2, 0.0)}}
    pins.granted(question, A, 0.0)
    pins.asked(question, 1.0)
    pins.end(held, 4.0)
    pins.end(held, 4.0)
    assert pins.tell(3, 6.5) == {"r-1": {A: Pin(0, 2.5)}}


def test_a_pin_lingers_after_its_last_use_and_is_given_up_by_a_beacon() -> None:
    pins = Pins()
    held = asked(pins, 0.0)
    pins.tell(1, 0.0)
    pins.end(held, 10.0)
    assert pins.tell(2, 10.0 + LINGER_S - 0.1)
    assert pins.tell(3, 10.0 + LINGER_S) == {}
    assert pins.get("r-1", A) is None
    assert len(pins) == 0


def test_a_recalled_pin_is_given_up_unless_somebody_uses_it_or_asks_for_it() -> None:
    pins = Pins()
    used = asked(pins, 0.0)
    idle = asked(pins, 0.0, B)
    pins.end(idle, 1.0)
    assert pins.recall("r-1", [A, B, "never@00000003"])
    assert pins.tell(1, 1.0) == {"r-1": {A: Pin(1, 0.0)}}
    assert not pins.recall("r-1", [A])
    pins.end(used, 2.0)
    question = pins.asking("n1", "r-1", A, 2.0)
    assert not pins.recall("r-1", [A])
    pins.asked(question, 3.0)
    assert pins.recall("r-1", [A])


def test_what_was_refused_leaves_nothing_behind_once_nobody_asks() -> None:
    pins = Pins()
    held = pins.begin("n1", "r-1", A, 0.0)
    question = pins.asking("n1", "r-1", A, 0.0)
    pins.revoke("r-1", A)
    pins.asked(question, 1.0)
    assert pins.get("r-1", A) is held  # the request is still there
    pins.end(held, 1.0)
    assert len(pins) == 0
    assert pins.tell(1, 1.0) == {}


def test_a_load_nobody_waits_for_any_more_is_kept_for_the_next_who_asks() -> None:
    pins = Pins()
    held = pins.begin("n1", "r-1", A, 0.0)
    question = pins.asking("n1", "r-1", A, 0.0)
    pins.end(held, 1.0)  # the client left
    pins.granted(question, A, 0.0)
    pins.asked(question, 8.0)
    assert pins.tell(1, 8.0) == {"r-1": {A: Pin(0, 0.0)}}
    assert pins.begin("n1", "r-1", A, 9.0).is_trusted(9.0)


def test_req_b28_a_launch_that_is_over_takes_its_pins_along_and_its_requests_still_end_once() -> (
    None
):
    pins = Pins()
    held = asked(pins, 0.0)
    pins.forget_replica("r-1")
    assert not held.is_trusted(0.0)
    assert held.uses == 1
    # B10: what comes under that name later is another launch's and begins with nothing.
    again = pins.begin("n1", "r-1", A, 0.5)
    assert again is not held
    pins.end(held, 1.0)
    assert pins.tell(1, 1.0) == {"r-1": {A: Pin(1, 0.0)}}
    pins.end(again, 1.0)
    assert len(pins) == 0


def test_what_the_log_does_not_tell_yet_is_counted_by_replica() -> None:
    pins = Pins()
    asked(pins, 0.0)
    question = pins.asking("n1", "r-1", B, 0.0)
    assert (pins.besides("r-1", ()), pins.besides("r-2", ())) == (2, 0)
    # B-2: what is told while it is asked for is one, not two.
    assert (pins.besides("r-1", {A}), pins.besides("r-1", {A, B})) == (1, 0)
    pins.granted(question, B, 0.0)
    pins.asked(question, 0.1)
    assert pins.besides("r-1", {A}) == 1
    pins.revoke("r-1", B)
    assert pins.besides("r-1", {A}) == 0
    assert pins.trusted(0.0) == 1
