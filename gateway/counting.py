"""Counters and histograms for one event loop: adding to one costs a dict's look and an addition, nothing more.

The client library's own take a lock and check what they are for each time, which for every request comes to more than
its routing. These are read through its registry as the others are, when somebody scrapes. They decide nothing.
"""

from bisect import bisect_left
from collections.abc import Iterable, Sequence
from functools import cache
from itertools import accumulate
from math import inf

from prometheus_client import CollectorRegistry
from prometheus_client.core import CounterMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from gateway.families import HistogramFamily, PlainFamily


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
        yield PlainFamily(self._name, self._documentation, "counter", self._labels, self._rows)

    def _rows(self) -> Iterable[tuple[Sequence[str], float]]:
        return ((values, child.value) for values, child in [*self._children.items()])


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
        return list(zip(_texts(self._bounds), accumulate(self.counts), strict=True))


@cache
def _texts(bounds: tuple[float, ...]) -> tuple[str, ...]:
    return (*map(str, bounds), "+Inf")


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
        yield HistogramFamily(
            self._name, self._documentation, self._labels, lambda: [*self._children.items()]
        )
