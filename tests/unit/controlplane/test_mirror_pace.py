"""Bandwidth, rate and the second between two words of progress, on a clock of numbers."""

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from controlplane.mirror.domain import pace
from controlplane.mirror.domain.pace import Bucket, Meter


@given(
    st.integers(1, 10**9),
    st.lists(st.tuples(st.floats(0, 5), st.integers(0, 10**8)), min_size=1, max_size=40),
)
def test_no_more_comes_than_the_limit_and_one_burst_allow(
    rate: int, takes: list[tuple[float, int]]
) -> None:
    """Everybody waits as told; what was taken before the last one is within rate x time + burst."""
    bucket, now, taken = Bucket(), 0.0, 0
    for idle_s, amount in takes:
        now += idle_s
        assert taken <= rate * (now + pace.BURST_S) * (1 + 1e-9) + 1
        bucket, wait_s = pace.spend(bucket, now, amount, rate)
        taken += amount
        now += wait_s
    assert taken <= rate * (now + pace.BURST_S) * (1 + 1e-9) + 1


def test_two_who_take_at_the_same_moment_wait_one_after_the_other() -> None:
    bucket, first_s = pace.spend(Bucket(), 0.0, 1000, 1000)
    _, second_s = pace.spend(bucket, 0.0, 1000, 1000)
    assert (first_s, second_s) == (1.0, 2.0)


def test_no_limit_never_waits() -> None:
    assert pace.spend(Bucket(), 5.0, 10**12, 0)[1] == 0.0


@pytest.mark.parametrize(
    ("rate", "expected"), [(0, 1000_000), (10, 4096), (100_000, 10_000), (10**9, 1000_000)]
)
def test_a_low_limit_reads_little_at_once(rate: int, expected: int) -> None:
    assert pace.largest_read(rate, 1000_000) == expected


def test_the_rate_is_that_of_the_last_seconds() -> None:
    meter = Meter()
    for second in range(20):
        meter = pace.measured(meter, float(second), second * 100)
    for second in range(20, 40):
        meter = pace.measured(meter, float(second), 2000 + (second - 20) * 500)
    assert pace.rate_bytes_s(meter) == pytest.approx(500)
    assert len(meter.samples) <= pace.RATE_OVER_S + 2


def test_before_anything_moved_there_is_no_rate() -> None:
    assert pace.rate_bytes_s(Meter()) == 0.0
    still = pace.measured(pace.measured(Meter(), 0.0, 5), 1.0, 5)
    assert pace.rate_bytes_s(still) == 0.0


def test_bytes_that_were_thrown_away_are_no_negative_rate() -> None:
    meter = pace.measured(pace.measured(Meter(), 0.0, 0), 1.0, 1000)
    meter = pace.measured(meter, 2.0, 10)
    assert pace.rate_bytes_s(meter) == 0.0
    assert pace.rate_bytes_s(pace.measured(meter, 3.0, 110)) == 100.0


def test_req_c33_progress_is_said_at_most_once_a_second() -> None:
    said: list[float] = []
    now = 0.0
    while now < 10:
        if pace.is_due(said[-1] if said else None, now):
            said.append(now)
        now += 0.05
    assert len(said) == 10
    assert min(b - a for a, b in itertools.pairwise(said)) >= 1.0 - 1e-9
