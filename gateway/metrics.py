"""The gateway's numbers for Prometheus; its labels are bounded by the catalog and the code table.

A name a client made up never becomes a label. Reading them changes nothing and wakes nothing.
"""

from collections.abc import AsyncIterator, Callable, Iterable, Mapping

from msgspec import Struct
from prometheus_client import CollectorRegistry, Gauge, generate_latest
from prometheus_client.core import Metric
from prometheus_client.registry import Collector

from gateway import exposition
from gateway.counting import Counter, Histogram
from gateway.families import PlainFamily
from gateway.requestmetrics import RequestNumbers

CONTENT_TYPE = b"text/plain; version=0.0.4; charset=utf-8"

_WAIT_BUCKETS = (0.01, 0.05, 0.1, 0.5, 1, 2, 5, 10, 20, 30, 45, 60)
BYTE_SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60)


class Reading(Struct, frozen=True, kw_only=True):
    """One gauge: what it tells, and its value for each value of its label ("" for one without)."""

    text: str
    values: dict[str, float]
    label: str = "model"


class GatewayNumbers(Collector):
    """Gauges that are read from the gateway when it is scraped instead of being kept up to date."""

    def __init__(self, read: Callable[[], Mapping[str, Reading]]) -> None:
        self._read = read

    def collect(self) -> Iterable[Metric]:
        for name, reading in self._read().items():
            labels = [reading.label] if set(reading.values) != {""} else []
            rows = [((of,) if labels else (), value) for of, value in reading.values.items()]
            yield PlainFamily(name, reading.text, "gauge", labels, lambda told=rows: told)


class Metrics:
    """All counters of one gateway, in a registry of its own."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self.of_requests = RequestNumbers()
        self.registry.register(self.of_requests)
        self._adapter_uses: dict[tuple[str, str], int] = {}  # not in `adapters` yet
        self.requests = Counter(
            "yard_gateway_requests",
            "Requests answered, by catalog model (empty: none) and code (ok, or the refusal's).",
            ["model", "code"],
            registry=self.registry,
        )
        self.on_cards = Counter(
            "yard_gateway_card_requests",
            "Requests under the base URL of a card, by catalog model, scope (empty: no such card) and code.",
            ["model", "scope", "code"],
            registry=self.registry,
        )
        self.waited = Histogram(
            "yard_gateway_wait_seconds",
            "How long requests waited for a model that was not running.",
            ["model"],
            buckets=_WAIT_BUCKETS,
            registry=self.registry,
        )
        self.first_byte = Histogram(
            "yard_gateway_first_byte_seconds",
            "From the request written to the engine to the first byte of its answer.",
            ["model"],
            buckets=BYTE_SECONDS,
            registry=self.registry,
        )
        self.rerouted = Counter(
            "yard_gateway_rerouted",
            "Requests that lost their replica before the first byte, by how.",
            ["loss"],
            registry=self.registry,
        )
        self.adapters = Counter(
            "yard_gateway_adapter_requests",
            "Requests for adapters that were answered, by base model and how the adapter came to be there: "
            "hit (loaded, nobody was asked or its agent only confirmed it), joined (somebody else's load), "
            "loaded (by this request), unpinned (no agent could be asked).",
            ["model", "outcome"],
            registry=self.registry,
        )
        self.adapter_waited = Histogram(
            "yard_gateway_adapter_seconds",
            "How long requests waited for their adapter when its agent had to be asked.",
            ["model"],
            buckets=(0.001, 0.003, *_WAIT_BUCKETS, 120),
            registry=self.registry,
        )
        self.adapter_asks = Counter(
            "yard_gateway_adapter_asks",
            "Questions to agents about adapters, by what was answered.",
            ["answer"],
            registry=self.registry,
        )
        self.adapters_gone = Counter(
            "yard_gateway_adapters_gone",
            "Requests whose engine did not know an adapter it was said to have.",
            registry=self.registry,
        )
        self.stalled = Counter(
            "yard_gateway_stalled",
            "Requests whose engine was silent for longer than first_byte_s or stream_stall_s.",
            ["model"],
            registry=self.registry,
        )
        self.activates = Counter(
            "yard_gateway_activates",
            "Wishes sent to the log, repeats included.",
            registry=self.registry,
        )
        self.activates_failed = Counter(
            "yard_gateway_activates_failed", "Wishes the log did not take.", registry=self.registry
        )
        self.snapshot_failed = Counter(
            "yard_gateway_snapshot_failed",
            "Snapshots that could not be written.",
            registry=self.registry,
        )
        self.spans_dropped = Counter(
            "yard_gateway_spans_dropped",
            "Spans no collector took.",
            registry=self.registry,
        )
        self.usage_failed = Counter(
            "yard_gateway_usage_failed",
            "Accounts of usage the log did not take; they are kept and sent again.",
            registry=self.registry,
        )
        self.usage_lost = Counter(
            "yard_gateway_usage_lost",
            "Rows of usage that no log took for as long as one keeps them: nobody is told what they held.",
            registry=self.registry,
        )
        self.loop_lag = Gauge(
            "yard_gateway_loop_lag_seconds",
            "How late the last beacon timer ran.",
            registry=self.registry,
        )

    def count(self, model: str, code: str) -> None:
        """One request answered."""
        self.requests.labels(model, code).value += 1

    def count_on_card(self, model: str, scope: str, code: str) -> None:
        """The same request once more, when it came under the base URL of a card."""
        self.on_cards.labels(model, scope, code).value += 1

    def waited_for(self, model: str, seconds: float) -> None:
        """A request waited so long for the model."""
        self.waited.labels(model).observe(seconds)

    def count_adapter(self, model: str, outcome: str) -> None:
        """A request for an adapter of `model` is being answered. It is in `adapters` from the next `render` on: a
        counter with a lock costs ten times as much as one without, and this is on the way of every hit."""
        key = model, outcome
        self._adapter_uses[key] = self._adapter_uses.get(key, 0) + 1

    def waited_for_adapter(self, model: str, seconds: float) -> None:
        """A request waited so long for an adapter of `model`."""
        self.adapter_waited.labels(model).observe(seconds)

    def answered_first(self, model: str, seconds: float) -> None:
        """An engine's first byte came so long after the request was written to it."""
        self.first_byte.labels(model).observe(seconds)

    def watch(self, read: Callable[[], Mapping[str, Reading]]) -> None:
        """Adds gauges read at scrape time, by name."""
        self.registry.register(GatewayNumbers(read))

    def render(self) -> bytes:
        """All numbers as Prometheus reads them, at once; for a page that is shown see `page`."""
        self._tell_adapters()
        return generate_latest(self.registry)

    def pieces(self) -> AsyncIterator[bytes]:
        """As `render`, and nobody has to stop meanwhile: a page of thousands of models takes seconds."""
        self._tell_adapters()
        return exposition.pieces(self.registry.collect())

    async def page(self) -> bytes:
        """All `pieces`."""
        return b"".join([piece async for piece in self.pieces()])

    def _tell_adapters(self) -> None:
        uses, self._adapter_uses = self._adapter_uses, {}
        for (model, outcome), count in uses.items():
            self.adapters.labels(model, outcome).inc(count)
