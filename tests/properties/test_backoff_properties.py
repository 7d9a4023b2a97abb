"""Failed starts are tried again ever more slowly, and never without an end."""

import itertools

from hypothesis import given
from hypothesis import strategies as st

from controlplane.domain.record import backoff_s
from schemas.settings import ControlplaneSettings
from tests.support.worlds import SETTINGS, Yard, model


@given(st.integers(1, 10_000))
def test_a_backoff_never_shrinks_and_never_exceeds_its_bound(failed: int) -> None:
    here, further = backoff_s(failed, SETTINGS), backoff_s(failed + 1, SETTINGS)
    assert SETTINGS.backoff_s <= here <= further <= SETTINGS.backoff_max_s


@given(st.floats(0.1, 60), st.floats(60, 600), st.integers(1, 40))
def test_it_doubles_until_the_bound(first_s: float, longest_s: float, failed: int) -> None:
    settings = ControlplaneSettings(backoff_s=first_s, backoff_max_s=longest_s)
    assert backoff_s(failed, settings) == min(first_s * 2 ** (failed - 1), longest_s)


@given(
    st.lists(st.sampled_from([1, 1, 3, 10, 40]), min_size=10, max_size=30),
    st.integers(1, 3),
)
def test_however_often_it_is_asked_for_a_broken_model_starts_rarely(
    gaps: list[int], cards: int
) -> None:
    """The n-th start comes no sooner than the backoff of the starts before it allows."""
    y = Yard().node("n1", {f"gpu{c}": 8 for c in range(cards)})
    y.add(model("bad"), model("good"))
    y.engine("bad").fails = 10_000
    y.settle()
    for gap in gaps:
        y.request("bad")
        y.advance(gap, by=1)
    starts = [
        item.time for item in y.log if item.type == "replica.starting" and item.noun == "replica"
    ]
    for n, (one, other) in enumerate(itertools.pairwise(starts), start=1):
        assert (other - one).total_seconds() >= min(backoff_s(n, SETTINGS), 240)
    assert len(starts) <= SETTINGS.quarantine_after
    y.request("good")
    y.until(lambda: y.ready("good"), 10)
