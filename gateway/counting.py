"""Counters and histograms for one event loop: adding to one costs a dict's look and an addition, nothing more.

The client library's own take a lock and check what they are for each time, which for every request comes to more than
its routing. These are read through its registry as the others are, when somebody scrapes. They decide nothing.
"""

from bisect import bisect_left
from collections.abc import Iterable, Sequence
from math import inf

from prometheus_client import CollectorRegistry
from prometheus_client.core import CounterMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector


class Count:
    """One counter of a family."""

    __slots__ = ("value",)

    def __init__(self) -> None:
        self.value = 0.0

    def inc(self, amount: float = 1.0) -> None:
        self.value += amount


class Counter(Collector):
    """A family of counters by the values of its labels; one without labels is used as it is."""

    def __init__(
        self,
        name: str,
        documentation: str,
        labelnames: Sequence[str] = (),
        *,
        registry: CollectorRegistry,
    ) -> None:
        self._name = name
        self._documentation = documentation
        self._labels = tuple(labelnames)
        self._children: dict[tuple[str, ...], Count] = {}
        if not self._labels:
            self.labels()
        registry.register(self)

    def labels(self, *values: str) -> Count:
        """The counter of these values, made when it is first asked for."""
        child = self._children.get(values)
        if child is None:
            if len(values) != len(self._labels):
                raise ValueError(f"{self._name} has the labels {self._labels}")
            child = self._children[values] = Count()
        return child

    def inc(self, amount: float = 1.0) -> None:
        """Of a family without labels."""
        self._children[()].inc(amount)

    def describe(self) -> Iterable[Metric]:
        return [CounterMetricFamily(self._name, self._documentation, labels=self._labels)]

    def collect(self) -> Iterable[Metric]:
        family = CounterMetricFamily(self._name, self._documentation, labels=self._labels)
        for values, child in self._children.items():
            family.add_metric(values, child.value)
        yield family


class Spread:
    """One histogram of a family."""

    __slots__ = ("_bounds", "counts", "total")

    def __init__(self, bounds: tuple[float, ...]) -> None:
        self._bounds = bounds
        self.counts = [0] * (len(bounds) + 1)
        self.total = 0.0

    def observe(self, amount: float) -> None:
        self.counts[bisect_left(self._bounds, amount)] += 1
        self.total += amount

    def add(self, counts: Sequence[int], total: float) -> None:
        """Many at once: how many for each bound, and their sum."""
        self.counts = [mine + more for mine, more in zip(self.counts, counts, strict=True)]
        self.total += total

    def buckets(self) -> list[tuple[str, float]]:
        """As the client library takes them: each bound, and how many are not above it."""
        found: list[tuple[str, float]] = []
        seen = 0
        for bound, count in zip([*map(str, self._bounds), "+Inf"], self.counts, strict=True):
            seen += count
            found.append((bound, seen))
        return found


class Histogram(Collector):
    """A family of histograms by the values of its labels; one without labels is used as it is."""

    def __init__(
        self,
        name: str,
        documentation: str,
        labelnames: Sequence[str] = (),
        *,
        buckets: Sequence[float],
        registry: CollectorRegistry,
    ) -> None:
        self._name = name
        self._documentation = documentation
        self._labels = tuple(labelnames)
        self._bounds = tuple(float(bound) for bound in buckets)
        assert inf not in self._bounds, "the last bucket is there by itself"
        self._children: dict[tuple[str, ...], Spread] = {}
        if not self._labels:
            self.labels()
        registry.register(self)

    def labels(self, *values: str) -> Spread:
        """The histogram of these values, made when it is first asked for."""
        child = self._children.get(values)
        if child is None:
            if len(values) != len(self._labels):
                raise ValueError(f"{self._name} has the labels {self._labels}")
            child = self._children[values] = Spread(self._bounds)
        return child

    def observe(self, amount: float) -> None:
        """Of a family without labels."""
        self._children[()].observe(amount)

    def describe(self) -> Iterable[Metric]:
        return [HistogramMetricFamily(self._name, self._documentation, labels=self._labels)]

    def collect(self) -> Iterable[Metric]:
        family = HistogramMetricFamily(self._name, self._documentation, labels=self._labels)
        for values, child in self._children.items():
            family.add_metric(values, buckets=child.buckets(), sum_value=child.total)
        yield family
