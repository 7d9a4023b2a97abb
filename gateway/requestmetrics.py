"""Numbers about requests that ended, for Prometheus: how long they took, what they came to, and for which keys.

Kept as plain lists and written as families while somebody reads them: a histogram with a lock costs ten times as much, and
this is on the way of every request. Labels are names of the catalog, codes, and ids of keys up to a bound.
"""

from collections.abc import Callable, Iterable, Sequence
from typing import Final

from prometheus_client.core import Metric
from prometheus_client.registry import Collector

from gateway.counting import Count, Spread
from gateway.domain.tokens import Tokens
from gateway.families import HistogramFamily, Plain, PlainFamily

MAX_KEYS: Final = 200
"""So many keys have numbers of their own; the others are counted together."""

OTHER: Final = "other"

SECONDS: Final = (
    *(0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0),
    *(2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0),
)
KINDS: Final = ("prompt", "cached", "completion")


class Alike:
    """The numbers of all requests of one model, with one code and one key. Others share some of them."""

    __slots__ = ("_durations", "_estimated", "_firsts", "_key_tokens", "_of_key", "_tokens")

    def __init__(
        self,
        durations: Spread,
        firsts: Spread,
        tokens: list[int],
        estimated: Count,
        of_key: Count | None,
        key_tokens: list[int] | None,
    ) -> None:
        self._durations = durations
        self._firsts = firsts
        self._tokens = tokens
        self._estimated = estimated
        self._of_key = of_key
        self._key_tokens = key_tokens

    def count(self, duration_s: float, first_s: float | None, tokens: Tokens | None) -> None:
        """One of them has ended."""
        self._durations.observe(duration_s)
        if first_s is not None:
            self._firsts.observe(first_s)
        if self._of_key is not None:
            self._of_key.value += 1
        if tokens is None:
            return
        _add(self._tokens, tokens)
        if tokens.estimated:
            self._estimated.value += 1
        if self._key_tokens is not None:
            _add(self._key_tokens, tokens)

    def add(
        self, took: Sequence[int], seconds: float, requests: int, tokens: tuple[int, int, int]
    ) -> None:
        """So many have ended, each with its first byte: how many within each of `SECONDS`, and all their seconds."""
        self._durations.add(took, seconds)
        self._firsts.add(took, seconds)
        if self._of_key is not None:
            self._of_key.value += requests
        for sums in (self._tokens, self._key_tokens):
            if sums is not None:
                for kind, count in enumerate(tokens):
                    sums[kind] += count


class RequestNumbers(Collector):
    """What was told of requests that ended, until the process does."""

    def __init__(self) -> None:
        self.before_reading: Callable[[], None] = lambda: None
        """Told before anything of the registry is read, if this is the first in it."""
        self._alike: dict[tuple[str, str, str], Alike] = {}
        self._durations: dict[tuple[str, str], Spread] = {}
        self._firsts: dict[str, Spread] = {}
        self._tokens: dict[str, list[int]] = {}
        self._estimated: dict[str, Count] = {}
        self._of_keys: dict[tuple[str, str], Count] = {}
        self._key_tokens: dict[str, list[int]] = {}

    def of(self, model: str, code: str, key: str) -> Alike:
        """The numbers of such requests; `model` and `key` are empty where there was none."""
        found = self._alike.get((model, code, key))
        if found is None:
            found = self._make(model, code, key)
        return found

    def count(
        self,
        model: str,
        code: str,
        key: str,
        *,
        duration_s: float,
        first_s: float | None,
        tokens: Tokens | None,
    ) -> None:
        """A request has ended."""
        self.of(model, code, key).count(duration_s, first_s, tokens)

    def _make(self, model: str, code: str, key: str) -> Alike:
        counted = key
        if key and key not in self._key_tokens and len(self._key_tokens) >= MAX_KEYS:
            counted = OTHER
        found = Alike(
            self._durations.setdefault((model, code), Spread(SECONDS)),
            self._firsts.setdefault(model, Spread(SECONDS)),
            self._tokens.setdefault(model, [0, 0, 0]),
            self._estimated.setdefault(model, Count()),
            self._of_keys.setdefault((counted, code), Count()) if key else None,
            self._key_tokens.setdefault(counted, [0, 0, 0]) if key else None,
        )
        if counted == key:
            # Those counted together are not remembered one by one: there is no bound of them.
            self._alike[model, code, key] = found
        return found

    def collect(self) -> Iterable[Metric]:
        self.before_reading()
        yield HistogramFamily(
            "yard_gateway_request_seconds",
            "From a request's head to its end, by catalog model (empty: none) and code.",
            ["model", "code"],
            lambda: [*self._durations.items()],
        )
        yield HistogramFamily(
            "yard_gateway_first_token_seconds",
            "From a request's head to the first byte of its answer's body, waits included.",
            ["model"],
            lambda: (((m,), spread) for m, spread in [*self._firsts.items()] if any(spread.counts)),
        )
        yield _counters(
            "yard_gateway_tokens",
            "Tokens that engines told, by kind: prompt (with cached), cached, completion.",
            ["model", "kind"],
            lambda: (
                ((model, kind), count)
                for model, counts in [*self._tokens.items()]
                if any(counts)
                for kind, count in zip(KINDS, counts, strict=True)
            ),
        )
        yield _counters(
            "yard_gateway_estimated",
            "Requests whose engine told no tokens, so that their answer's events were counted.",
            ["model"],
            lambda: (((m,), c.value) for m, c in [*self._estimated.items()] if c.value),
        )
        yield _counters(
            "yard_gateway_key_requests",
            f"Requests by the id of their key, {MAX_KEYS} at most (then: {OTHER}), and code.",
            ["key", "code"],
            lambda: ((labels, count.value) for labels, count in [*self._of_keys.items()]),
        )
        yield _counters(
            "yard_gateway_key_tokens",
            "Tokens by the id of the key they count for, and kind.",
            ["key", "kind"],
            lambda: (
                ((key, kind), count)
                for key, counts in [*self._key_tokens.items()]
                for kind, count in zip(KINDS, counts, strict=True)
            ),
        )


def _counters(name: str, about: str, labels: Sequence[str], rows: Plain) -> Metric:
    return PlainFamily(name, about, "counter", labels, rows)


def _add(counts: list[int], tokens: Tokens) -> None:
    counts[0] += tokens.prompt
    counts[1] += tokens.cached
    counts[2] += tokens.completion
