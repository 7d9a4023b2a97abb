"""Sends a span for each request to a collector of OpenTelemetry, where a setting names one.

In batches, as JSON over HTTP (OTLP). A collector that is slow or away costs spans, never requests: what does not fit is
dropped and counted. A span tells ids, names and times, never what was asked or answered.
"""

import asyncio
import contextlib
import logging
from collections.abc import Mapping
from typing import Any, Final

import msgspec

from gateway.clock import Clock
from gateway.metrics import Metrics
from gateway.served import Served
from gateway.timeline import Timeline

log = logging.getLogger("gateway.spans")

EVERY_S: Final = 1.0
TIMEOUT_S: Final = 5.0
LAST_S: Final = 1.0
MAX_WAITING: Final = 4096
BATCH: Final = 512
PATH: Final = "/v1/traces"

_SERVER: Final = 2
_ERROR: Final = 2


class Spans:
    """The spans of one gateway; `run` is its task, `close` its last word.

    `endpoint` is the collector's address, as `http://127.0.0.1:4318`.
    """

    def __init__(self, endpoint: str, gateway: str, clock: Clock, metrics: Metrics) -> None:
        base = endpoint.rstrip("/")
        self._url = base if base.endswith(PATH) else base + PATH
        self._resource = {
            "attributes": _attributes(
                {"service.name": "modelyard-gateway", "service.instance.id": gateway}
            )
        }
        self._clock = clock
        self._metrics = metrics
        self._waiting: list[dict[str, Any]] = []
        self._full = asyncio.Event()
        self._failing = ""
        # Only who has a collector needs the library. Its import takes up to seconds, in which nothing else of
        # the process goes on: here the port is not open yet.
        import httpx

        # No proxy from the environment: the collector is named by a setting.
        self._client = httpx.AsyncClient(timeout=TIMEOUT_S, trust_env=False)
        self._failures = (httpx.HTTPError, httpx.InvalidURL, TimeoutError)

    def add(
        self, timeline: Timeline, served: Served, *, method: str, path: str, ended_s: float
    ) -> None:
        """A request has ended. Whoever began its trace decided whether it is sampled."""
        if not timeline.trace.sampled:
            return
        if len(self._waiting) >= MAX_WAITING:
            self._metrics.spans_dropped.inc()
            return
        self._waiting.append(
            span_of(timeline, served, method=method, path=path, ended_s=ended_s, clock=self._clock)
        )
        if len(self._waiting) >= BATCH:
            self._full.set()

    async def run(self) -> None:
        """Sends them until cancelled."""
        async with self._client as client:
            try:
                while True:
                    try:
                        async with asyncio.timeout(EVERY_S):
                            await self._full.wait()
                    except TimeoutError:
                        pass
                    self._full.clear()
                    await self._send(client)
            except asyncio.CancelledError:
                # The last ones, if the collector answers at once.
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(LAST_S):
                        await self._send(client)
                raise

    async def _send(self, client: Any) -> None:
        while self._waiting:
            batch, self._waiting = self._waiting[:BATCH], self._waiting[BATCH:]
            body = {
                "resourceSpans": [
                    {
                        "resource": self._resource,
                        "scopeSpans": [{"scope": {"name": "modelyard.gateway"}, "spans": batch}],
                    }
                ]
            }
            why = ""
            try:
                # The client's own bound is one of silence: an answer that drips would never end.
                async with asyncio.timeout(TIMEOUT_S):
                    answer = await client.post(
                        self._url,
                        content=msgspec.json.encode(body),
                        headers={"content-type": "application/json"},
                    )
                if answer.status_code >= 300:
                    why = f"the collector answered {answer.status_code}"
            except self._failures as error:
                why = str(error) or type(error).__name__
            if why:
                self._metrics.spans_dropped.inc(len(batch))
                if why != self._failing:
                    log.warning("spans not sent", extra={"url": self._url, "why": why})
            self._failing = why


def span_of(
    timeline: Timeline, served: Served, *, method: str, path: str, ended_s: float, clock: Clock
) -> dict[str, Any]:
    """One span as OTLP's JSON has it: ids in hex, times as text in nanoseconds since 1970."""
    trace = timeline.trace
    told: dict[str, str | int] = {
        "http.request.method": method,
        "url.path": path,
        "http.response.status_code": served.status,
        "yard.request": timeline.request_id,
        "yard.code": served.code,
        "yard.waited_ms": round(served.waited_s * 1000),
    }
    named = {
        "gen_ai.request.model": served.model,
        "yard.adapter": served.adapter,
        "yard.replica": served.replica,
        "yard.key": served.caller.id,
    }
    told |= {name: value for name, value in named.items() if value}
    if served.used is not None:
        told["gen_ai.usage.input_tokens"] = served.used.prompt
        told["gen_ai.usage.output_tokens"] = served.used.completion
    span: dict[str, Any] = {
        "traceId": trace.trace,
        "spanId": trace.span,
        "name": f"{method} {served.path or path}",
        "kind": _SERVER,
        "startTimeUnixNano": _nanos(clock, timeline.marks["received"]),
        "endTimeUnixNano": _nanos(clock, ended_s),
        "attributes": _attributes(told),
        "events": [
            {"name": mark, "timeUnixNano": _nanos(clock, at_s)}
            for mark, at_s in timeline.marks.items()
            if mark != "received"
        ],
    }
    if trace.parent:
        span["parentSpanId"] = trace.parent
    if trace.state:
        span["traceState"] = trace.state.decode("latin-1")
    if served.status >= 500 or not served.complete:
        span["status"] = {"code": _ERROR, "message": served.why or served.code}
    return span


def _nanos(clock: Clock, at_s: float) -> str:
    return str(int(clock.wall_ms(at_s) * 1_000_000))


def _attributes(values: Mapping[str, str | int]) -> list[dict[str, Any]]:
    return [
        {
            "key": key,
            "value": {"stringValue": value} if isinstance(value, str) else {"intValue": str(value)},
        }
        for key, value in values.items()
    ]
