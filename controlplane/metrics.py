"""Counts what this control plane does, in its own Prometheus registry; scraping has no other effect.

One object per process, handed to whoever counts. No default registry: two control planes in one test
must not share numbers.
"""

from collections.abc import Callable, Iterable

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"

Reading = tuple[str, str, dict[tuple[str, ...], float], tuple[str, ...]]
"""Name, help, value by label values, label names: a gauge read when it is scraped."""


class _Readings(Collector):
    def __init__(self) -> None:
        self.sources: list[Callable[[], Iterable[Reading]]] = []

    def collect(self) -> Iterable[Metric]:
        for source in self.sources:
            for name, text, values, labels in source():
                family = GaugeMetricFamily(name, text, labels=labels)
                for labelled, value in sorted(values.items()):
                    family.add_metric(labelled, value)
                yield family


class Metrics:
    """Every number of a control plane; `read_from` adds gauges that are read at each scrape."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry(auto_describe=False)
        self._readings = _Readings()
        self.registry.register(self._readings)
        self.elections = Counter(
            "yard_leader_elections", "Terms this instance began.", registry=self.registry
        )
        self.deposed = Counter(
            "yard_leader_deposed", "Terms this instance lost.", registry=self.registry
        )
        self.leading = Gauge(
            "yard_leading", "1 while this instance leads, else 0.", registry=self.registry
        )
        self.decisions = Counter(
            "yard_decisions", "Decisions that took effect.", registry=self.registry
        )
        self.refused_batches = Counter(
            "yard_refused_batches",
            "Batches that did not take effect at once.",
            ["why"],
            registry=self.registry,
        )
        self.append_s = Histogram(
            "yard_decision_append_seconds",
            "Time to store one decision.",
            registry=self.registry,
            buckets=(0.001, 0.002, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 1.0, 5.0, 15.0),
        )
        self.decide_s = Histogram(
            "yard_decide_seconds",
            "Time of one pass of the decision function.",
            registry=self.registry,
            buckets=(0.0001, 0.0005, 0.001, 0.005, 0.01, 0.05, 0.1, 0.5),
        )
        self.rebuilds = Counter(
            "yard_projection_rebuilds",
            "Times the sqlite projection was read from the start.",
            ["why"],
            registry=self.registry,
        )
        self.usage_unreadable = Counter(
            "yard_usage_unreadable",
            "Accounts of usage that could not be read and are in no total.",
            registry=self.registry,
        )
        self.api_requests = Counter(
            "yard_api_requests", "Requests to the API.", ["status"], registry=self.registry
        )
        self.event_streams = Gauge(
            "yard_event_streams", "Clients following /v1/events.", registry=self.registry
        )

    def read_from(self, source: Callable[[], Iterable[Reading]]) -> None:
        self._readings.sources.append(source)

    def text(self) -> bytes:
        return generate_latest(self.registry)
