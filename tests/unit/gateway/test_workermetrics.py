"""The page of several workers: every sample under its worker, every family described once."""

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.parser import text_string_to_metric_families

from gateway.domain.workermetrics import merge


def a_page(count: int, model: str) -> bytes:
    registry = CollectorRegistry()
    Counter("asked", "With a label.", ["model"], registry=registry).labels(model).inc(count)
    Counter("plain", "Without.", registry=registry).inc(count)
    Histogram("took", "Seconds.", buckets=(1,), registry=registry).observe(count)
    return generate_latest(registry)


def test_each_sample_has_its_worker_and_each_family_one_head() -> None:
    odd = 'a"b\\c {d} e'
    page = merge({2: a_page(5, odd), 1: a_page(3, "m")}).decode()
    families = {f.name: f for f in text_string_to_metric_families(page)}
    asked = [s for s in families["asked"].samples if s.name == "asked_total"]
    assert [(s.labels, s.value) for s in asked] == [
        ({"worker": "1", "model": "m"}, 3.0),
        ({"worker": "2", "model": odd}, 5.0),
    ]
    plain = [s for s in families["plain"].samples if s.name == "plain_total"]
    assert [(s.labels, s.value) for s in plain] == [({"worker": "1"}, 3.0), ({"worker": "2"}, 5.0)]
    buckets = [s.labels for s in families["took"].samples if s.name == "took_bucket"]
    assert {"worker": "1", "le": "1.0"} in buckets
    for name in ("asked_total", "plain_total", "took"):
        assert page.count(f"# TYPE {name} ") == 1


def test_a_family_only_one_worker_has_is_there() -> None:
    registry = CollectorRegistry()
    Counter("alone", "Only here.", registry=registry).inc()
    page = merge({1: a_page(1, "m"), 2: generate_latest(registry)}).decode()
    assert 'alone_total{worker="2"} 1.0' in page


def test_of_a_page_that_was_cut_the_whole_lines_are_told() -> None:
    """A worker may be killed while it is asked; what it did not say to the end must not spoil the numbers of all."""
    whole = a_page(1, "grö\u00dfe")
    for end in range(len(whole)):
        page = merge({1: a_page(2, "m"), 2: whole[:end]}).decode()
        families = {f.name: f for f in text_string_to_metric_families(page)}
        assert {s.labels["worker"] for s in families["plain"].samples} >= {"1"}
        for line in page.splitlines():
            assert line.startswith("#") or 'worker="' in line, line
