"""Says of each request that has ended what it was: to the counters, the accounts, the access log and the traces.

It is told once for each, by whoever served it, and decides nothing. Ids, sizes and times go out of here, never content.
"""

from gateway.accesslog import AccessLine, AccessLog, lined, template_of
from gateway.accounting import Accounting
from gateway.clock import Clock
from gateway.domain.names import Place
from gateway.domain.tokens import Tokens
from gateway.domain.turns import priority_of
from gateway.metrics import Metrics
from gateway.served import Served
from gateway.spans import Spans
from gateway.timeline import Timeline


class Plain:
    """What plain requests have in common that ask the same of the same replica, with the same head, and are answered."""

    __slots__ = ("adapter", "alike", "count", "first_byte", "key", "line", "model")

    def __init__(self, metrics: Metrics, line: AccessLine) -> None:
        self.model = line.model
        self.key = line.key
        self.adapter = line.adapter
        self.count = metrics.requests.labels(line.model, line.code)
        self.alike = metrics.ended.of(line.model, line.code, line.key)
        self.first_byte = metrics.first_byte.labels(line.model)
        self.line = template_of(line)


class Endings:
    """One for all requests of a gateway; `spans` where a collector is told of them."""

    def __init__(
        self,
        clock: Clock,
        metrics: Metrics,
        access: AccessLog,
        accounting: Accounting,
        spans: Spans | None = None,
    ) -> None:
        self._clock = clock
        self._metrics = metrics
        self._access = access
        self._accounting = accounting
        self._spans = spans

    def ended(
        self,
        served: Served,
        timeline: Timeline,
        place: Place,
        *,
        method: str,
        path: str,
        peer: str,
        received_s: float,
        priority: bytes | None,
    ) -> None:
        """A request for `place` is over; gives back what it held of its key's limits.

        `path` is as it was sent, `priority` the header that lowers the caller's. `received_s` as `Timeline`.
        """
        served.end()
        duration_s = self._clock.now_s() - received_s
        first_s = timeline.marks.get("first_byte") if served.has_body else None
        if first_s is not None:
            first_s -= received_s
        if place.kind == "inference":
            self._count(served, place, duration_s, first_s)
        used = served.used
        model, key, waited_s = served.model, served.caller.id, served.waited_s
        now = self._clock.now()
        if model:
            self._accounting.add(
                model=model,
                key=key,
                adapter=served.adapter,
                failed=first_s is None,
                tokens=used,
                first_s=first_s,
                duration_s=duration_s,
                waited_s=waited_s,
                now=now,
            )
        self._access.add(
            AccessLine(
                time=now,
                request=timeline.request_id,
                peer=peer,
                method=method,
                path=path,
                status=served.status,
                code=served.code,
                model=model,
                replica=served.replica,
                scope=served.scope,
                adapter=served.adapter,
                how=served.how,
                key=key,
                prompt_tokens=0 if used is None else used.prompt,
                completion_tokens=0 if used is None else used.completion,
                first_ms=-1 if first_s is None else round(first_s * 1000),
                prio=priority_of(served.caller, priority),
                trace=timeline.trace.trace,
                waited_ms=round(waited_s * 1000),
                duration_ms=round(duration_s * 1000),
                moves=served.moves,
                sent_bytes=served.sent_bytes,
                complete=served.complete,
                why=served.why,
            )
        )
        if self._spans is not None and place.kind == "inference":
            self._spans.add(
                timeline, served, method=method, path=path, ended_s=received_s + duration_s
            )

    def plain(self, served: Served, place: Place, peer: str, priority: bytes | None) -> Plain:
        """What is the same of all requests like this one, which did not wait and is answered well."""
        line = AccessLine(
            time=self._clock.now(),
            request="",
            peer=peer,
            method="POST",
            path=place.path,
            status=200,
            code="ok",
            waited_ms=0,
            duration_ms=0,
            sent_bytes=0,
            complete=True,
            model=served.model,
            replica=served.replica,
            adapter=served.adapter,
            how=served.how,
            key=served.caller.id,
            prio=priority_of(served.caller, priority),
        )
        return Plain(self._metrics, line)

    def answered(
        self,
        plain: Plain,
        timeline: Timeline,
        *,
        received_s: float,
        written_s: float,
        answered_s: float,
        used: Tokens | None,
        sent_bytes: int,
    ) -> None:
        """A request of this kind had its whole answer at `answered_s`, as `ended` tells of others. Times are seconds
        of the gateway's clock."""
        duration_s = answered_s - received_s
        duration_ms = round(duration_s * 1000)
        plain.count.value += 1
        plain.alike.ended(duration_s, duration_s, used)
        plain.first_byte.observe(answered_s - written_s)
        now = self._clock.now()
        self._accounting.add(
            model=plain.model,
            key=plain.key,
            adapter=plain.adapter,
            failed=False,
            tokens=used,
            first_s=duration_s,
            duration_s=duration_s,
            waited_s=0.0,
            now=now,
        )
        self._access.add_line(
            lined(
                plain.line,
                time=now,
                request=timeline.request_id.encode(),
                duration_ms=duration_ms,
                sent_bytes=sent_bytes,
                prompt_tokens=0 if used is None else used.prompt,
                completion_tokens=0 if used is None else used.completion,
                first_ms=duration_ms,
                trace=timeline.trace.trace.encode(),
            )
        )

    @property
    def tells_spans(self) -> bool:
        """Whether a collector is told of each request."""
        return self._spans is not None

    def _count(
        self, served: Served, place: Place, duration_s: float, first_s: float | None
    ) -> None:
        metrics, model, code = self._metrics, served.model, served.code
        metrics.count(model, code)
        if served.adapter_waited_s is not None:
            metrics.waited_for_adapter(model, served.adapter_waited_s)
        if place.on is not None:
            metrics.count_on_card(model, served.scope, code)
        metrics.ended.ended(
            model,
            code,
            served.caller.id,
            duration_s=duration_s,
            first_s=first_s,
            tokens=served.used,
        )
