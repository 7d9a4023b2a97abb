"""Our counters and histograms are read as the client library's own are."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client import Counter as LibraryCounter
from prometheus_client import Histogram as LibraryHistogram

from gateway.counting import Counter, Histogram


def _read(registry: CollectorRegistry) -> list[str]:
    """What a scrape gets, without when each was made, which ours do not tell."""
    lines = generate_latest(registry).decode().splitlines()
    return sorted(line for line in lines if "_created" not in line)


@given(
    st.lists(
        st.tuples(st.sampled_from(["a", 'b"\\', ""]), st.floats(min_value=0, max_value=100)),
        max_size=30,
    )
)
def test_they_read_as_the_librarys_do(seen: list[tuple[str, float]]) -> None:
    ours, theirs = CollectorRegistry(), CollectorRegistry()
    count = Counter("yard_things", "Things.", ["of"], registry=ours)
    took = Histogram("yard_took_seconds", "Took.", ["of"], buckets=(0.5, 1, 20), registry=ours)
    plain = Counter("yard_all", "All.", registry=ours)
    whole = Histogram("yard_whole", "Whole.", buckets=(1, 2.5), registry=ours)
    count2 = LibraryCounter("yard_things", "Things.", ["of"], registry=theirs)
    took2 = LibraryHistogram(
        "yard_took_seconds", "Took.", ["of"], buckets=(0.5, 1, 20), registry=theirs
    )
    plain2 = LibraryCounter("yard_all", "All.", registry=theirs)
    whole2 = LibraryHistogram("yard_whole", "Whole.", buckets=(1, 2.5), registry=theirs)
    for label, amount in seen:
        for counter, histogram in ((count, took), (count2, took2)):
            counter.labels(label).inc(amount)
            histogram.labels(label).observe(amount)
        for single, every in ((plain, whole), (plain2, whole2)):
            single.inc()
            every.observe(amount)
    assert _read(ours) == _read(theirs)


def test_a_bound_belongs_to_its_bucket() -> None:
    registry = CollectorRegistry()
    Histogram("yard_took", "Took.", buckets=(1, 2), registry=registry).observe(1.0)
    assert registry.get_sample_value("yard_took_bucket", {"le": "1.0"}) == 1


def test_labels_are_given_in_full() -> None:
    registry = CollectorRegistry()
    with pytest.raises(ValueError, match="has the labels"):
        Counter("yard_things", "Things.", ["of"], registry=registry).labels("a", "b")
    with pytest.raises(ValueError, match="has the labels"):
        Histogram("yard_took", "T.", ["of"], buckets=(1,), registry=registry).labels()
