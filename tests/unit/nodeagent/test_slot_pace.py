"""Events about adapters come at a pace of their own: a burst at once, then one a second, whatever clients do."""

from hypothesis import given, settings
from hypothesis import strategies as st

from nodeagent.domain.pace import AT_ONCE, EVERY_S, Pace, take


def test_a_burst_is_told_as_it_happens_and_the_next_one_a_second_later() -> None:
    pace = Pace(at=0.0)
    for _ in range(AT_ONCE):
        pace, in_s = take(pace, 0.0)
        assert in_s == 0.0
    pace, in_s = take(pace, 0.0)
    assert in_s == EVERY_S
    pace, in_s = take(pace, EVERY_S)
    assert in_s == 0.0


def test_after_a_quiet_while_a_whole_burst_may_come_and_no_more() -> None:
    pace = Pace(at=0.0, left=0.0)
    told = 0
    for _ in range(3 * AT_ONCE):
        pace, in_s = take(pace, 1000.0)
        told += in_s == 0.0
    assert told == AT_ONCE


@given(steps=st.lists(st.floats(min_value=0.0, max_value=3.0), max_size=60))
@settings(max_examples=50)
def test_inv_11_no_traffic_gets_more_told_than_a_burst_and_one_a_second(steps: list[float]) -> None:
    pace, at, told = Pace(at=0.0), 0.0, 0
    for step in steps:
        at += step
        pace, in_s = take(pace, at)
        told += in_s == 0.0
        assert 0.0 <= in_s <= EVERY_S
        assert told <= AT_ONCE + at / EVERY_S + 1e-6
