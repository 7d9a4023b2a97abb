"""When a fetch is tried again and when it is given up, on a clock of numbers."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from controlplane.mirror.domain.retries import (
    LONGEST_DELAY_S,
    TRIES_OF_A_MIRROR,
    Again,
    Enough,
    after_failure,
    delay_s,
    longest_silence_s,
)


@given(st.integers(1, 200), st.floats(0, 1))
def test_the_delay_grows_to_its_bound(failures: int, chance: float) -> None:
    assert 0 < delay_s(failures, chance) <= LONGEST_DELAY_S
    assert delay_s(failures, chance) <= delay_s(failures + 1, chance)


@given(st.floats(0.1, 600), st.floats(0, 1))
def test_req_c32_a_source_that_gives_no_byte_is_given_up_within_the_bound(
    bound_s: float, chance: float
) -> None:
    """The bound counts from the last new byte, whatever the number of tries; there is no total one."""
    silent_s, failures = 0.0, 0
    while True:
        failures += 1
        match after_failure(silent_s=silent_s, bound_s=bound_s, failures=failures, chance=chance):
            case Enough():
                break
            case Again(wait_s=wait_s):
                assert wait_s > 0
                silent_s += wait_s
    assert silent_s == pytest.approx(bound_s)


def test_another_mirror_gets_a_few_tries_only() -> None:
    def tried(failures: int) -> Again | Enough:
        return after_failure(
            silent_s=0.1, bound_s=300, failures=failures, chance=0.5, last_source=False
        )

    assert isinstance(tried(TRIES_OF_A_MIRROR - 1), Again)
    assert tried(TRIES_OF_A_MIRROR) == Enough()


def test_a_server_that_asks_for_a_pause_gets_it_within_the_bound() -> None:
    def asked(pause_s: float) -> Again | Enough:
        return after_failure(
            silent_s=100, bound_s=300, failures=1, chance=0.5, retry_after_s=pause_s
        )

    assert asked(60) == Again(wait_s=60)
    assert asked(0) == Again(wait_s=0)
    assert asked(200) == Enough()
    assert asked(3600) == Enough()


def test_a_connection_may_stand_still_for_a_part_of_the_bound() -> None:
    assert longest_silence_s(300) == 30
    assert longest_silence_s(9) == 3
