"""Numbers about requests that ended, for Prometheus: how long they took, what they came to, and for which keys.

Kept as plain lists and made into families when somebody scrapes: a histogram with a lock costs ten times as much, and
this is on the way of every request. Labels are names of the catalog, codes, and ids of keys up to a bound.
"""

from bisect import bisect_left
from collections.abc import Iterable
from typing import Final

from prometheus_client.core import CounterMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from gateway.domain.tokens import Tokens

MAX_KEYS: Final = 200
"""So many keys have numbers of their own; the others are counted together."""

OTHER: Final = "other"

SECONDS: Final = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300)
KINDS: Final = ("prompt", "cached", "completion")


class _Histogram:
    __slots__ = ("counts", "total")

    def __init__(self) -> None:
        self.counts = [0] * (len(SECONDS) + 1)
        self.total = 0.0

    def observe(self, seconds: float) -> None:
        self.counts[bisect_left(SECONDS, seconds)] += 1
        self.total += seconds

    def buckets(self) -> list[tuple[str, float]]:
        found: list[tuple[str, float]] = []
        under = 0
        for bound, count in zip((*SECONDS, float("inf")), self.counts, strict=True):
            under += count
            found.append(("+Inf" if bound == float("inf") else repr(float(bound)), float(under)))
        return found


class RequestNumbers(Collector):
    """What `ended` was told, until the process ends."""

    def __init__(self) -> None:
        self._durations: dict[tuple[str, str], _Histogram] = {}
        self._firsts: dict[str, _Histogram] = {}
        self._tokens: dict[str, list[int]] = {}
        self._estimated: dict[str, int] = {}
        self._of_keys: dict[tuple[str, str], int] = {}
        self._key_tokens: dict[str, list[int]] = {}

    def ended(
        self,
        model: str,
        code: str,
        key: str,
        *,
        duration_s: float,
        first_s: float | None,
        tokens: Tokens | None,
    ) -> None:
        """A request has ended; `model` and `key` are empty where there was none."""
        durations = self._durations.get((model, code))
        if durations is None:
            durations = self._durations[model, code] = _Histogram()
        durations.observe(duration_s)
        if first_s is not None:
            firsts = self._firsts.get(model)
            if firsts is None:
                firsts = self._firsts[model] = _Histogram()
            firsts.observe(first_s)
        if tokens is not None:
            _add(self._tokens, model, tokens)
            if tokens.estimated:
                self._estimated[model] = self._estimated.get(model, 0) + 1
        if key:
            of_key = self._key_tokens.get(key)
            if of_key is None and len(self._key_tokens) >= MAX_KEYS:
                key = OTHER
            if of_key is None:
                self._key_tokens.setdefault(key, [0, 0, 0])
            self._of_keys[key, code] = self._of_keys.get((key, code), 0) + 1
            if tokens is not None:
                _add(self._key_tokens, key, tokens)

    def collect(self) -> Iterable[Metric]:
        durations = HistogramMetricFamily(
            "yard_gateway_request_seconds",
            "From a request's head to its end, by catalog model (empty: none) and code.",
            labels=["model", "code"],
        )
        for labels, histogram in self._durations.items():
            durations.add_metric(labels, histogram.buckets(), histogram.total)
        yield durations
        firsts = HistogramMetricFamily(
            "yard_gateway_first_token_seconds",
            "From a request's head to the first byte of its answer's body, waits included.",
            labels=["model"],
        )
        for model, histogram in self._firsts.items():
            firsts.add_metric([model], histogram.buckets(), histogram.total)
        yield firsts
        tokens = CounterMetricFamily(
            "yard_gateway_tokens",
            "Tokens that engines told, by kind: prompt (with cached), cached, completion.",
            labels=["model", "kind"],
        )
        for model, counts in self._tokens.items():
            for kind, count in zip(KINDS, counts, strict=True):
                tokens.add_metric([model, kind], count)
        yield tokens
        estimated = CounterMetricFamily(
            "yard_gateway_estimated",
            "Requests whose engine told no tokens, so that their answer's events were counted.",
            labels=["model"],
        )
        for model, count in self._estimated.items():
            estimated.add_metric([model], count)
        yield estimated
        of_keys = CounterMetricFamily(
            "yard_gateway_key_requests",
            f"Requests by the id of their key, {MAX_KEYS} at most (then: {OTHER}), and code.",
            labels=["key", "code"],
        )
        for (key, code), count in self._of_keys.items():
            of_keys.add_metric([key, code], count)
        yield of_keys
        key_tokens = CounterMetricFamily(
            "yard_gateway_key_tokens",
            "Tokens by the id of the key they count for, and kind.",
            labels=["key", "kind"],
        )
        for key, counts in self._key_tokens.items():
            for kind, count in zip(KINDS, counts, strict=True):
                key_tokens.add_metric([key, kind], count)
        yield key_tokens


def _add(sums: dict[str, list[int]], label: str, tokens: Tokens) -> None:
    counts = sums.get(label)
    if counts is None:
        counts = sums[label] = [0, 0, 0]
    counts[0] += tokens.prompt
    counts[1] += tokens.cached
    counts[2] += tokens.completion
