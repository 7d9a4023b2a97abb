"""Says of each request that has ended what it was: to the counters, the accounts, the access log and the traces.

It is told once for each, by whoever served it, and decides nothing. Ids, sizes and times go out of here, never content.
"""

from bisect import bisect_left

from gateway.accesslog import AccessLine, AccessLog, encoded, template_of
from gateway.accounting import Accounting
from gateway.clock import Clock
from gateway.domain.names import Place
from gateway.domain.tally import Sum, one_request
from gateway.domain.tokens import Tokens
from gateway.domain.turns import priority_of
from gateway.metrics import BYTE_SECONDS, Metrics
from gateway.requestmetrics import SECONDS
from gateway.served import Served
from gateway.spans import Spans
from gateway.timeline import Timeline


class Plain:
    """Plain requests that ask the same of the same replica, with the same head, and are answered well.

    What they come to is added up here, and from here to all else when somebody reads that (`Endings.add_up`).
    """

    __slots__ = (
        "adapter",
        "cached",
        "completion",
        "first_s",
        "firsts",
        "key",
        "line",
        "model",
        "ms",
        "prompt",
        "requests",
        "seconds",
        "took",
    )

    def __init__(self, line: AccessLine) -> None:
        self.model = line.model
        self.key = line.key
        self.adapter = line.adapter
        self.line = template_of(line)
        self.clear()

    def clear(self) -> None:
        """Nothing of it is left to be added anywhere."""
        self.requests = self.ms = 0
        self.seconds = self.first_s = 0.0
        self.prompt = self.cached = self.completion = 0
        self.took = [0] * (len(SECONDS) + 1)
        self.firsts = [0] * (len(BYTE_SECONDS) + 1)

    def came_to(self) -> Sum:
        """Its row of the accounts: an answer in one piece is there with its first byte, and waited for nothing."""
        found = Sum()
        found.requests = found.first_tokens = self.requests
        found.prompt_tokens, found.cached_tokens = self.prompt, self.cached
        found.completion_tokens = self.completion
        found.first_token_ms = found.duration_ms = self.ms
        return found


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
        self._grown: list[Plain] = []
        metrics.of_requests.before_reading = self.add_up
        accounting.before_telling = self.add_up

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
            came_to = one_request(used, first_s=first_s, duration_s=duration_s, waited_s=waited_s)
            adapter = served.adapter
            self._accounting.add(came_to, model=model, key=key, adapter=adapter, now=now)
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

    def plain(self, served: Served, path: str, peer: str, priority: bytes | None) -> Plain:
        """What is the same of all requests like this one, for `path` as it was sent, which did not wait and is answered
        well."""
        line = AccessLine(
            time=self._clock.now(),
            request="",
            peer=peer,
            method="POST",
            path=path,
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
        return Plain(line)

    def answered(
        self,
        plain: Plain,
        timeline: Timeline,
        *,
        received_s: float,
        written_s: float,
        answered_s: float,
        used: Tokens,
        sent_bytes: int,
    ) -> None:
        """A request of this kind had its whole answer at `answered_s`, as `ended` tells of others. Times are seconds
        of the gateway's clock."""
        seconds = answered_s - received_s
        ms = round(seconds * 1000)
        if not plain.requests:
            self._grown.append(plain)
        plain.requests += 1
        plain.ms += ms
        plain.seconds += seconds
        plain.took[bisect_left(SECONDS, seconds)] += 1
        first_s = answered_s - written_s
        plain.first_s += first_s
        plain.firsts[bisect_left(BYTE_SECONDS, first_s)] += 1
        plain.prompt += used.prompt
        plain.cached += used.cached
        plain.completion += used.completion
        self._access.add_line(
            plain.line
            % (
                encoded(self._clock.now()),
                timeline.request_id.encode(),
                ms,
                sent_bytes,
                used.prompt,
                used.completion,
                ms,
                timeline.trace.trace.encode(),
            )
        )

    def add_up(self) -> None:
        """Puts what plain requests came to where it is read."""
        grown, self._grown = self._grown, []
        metrics, now = self._metrics, self._clock.now()
        for plain in grown:
            model = plain.model
            metrics.requests.labels(model, "ok").value += plain.requests
            metrics.first_byte.labels(model).add(plain.firsts, plain.first_s)
            tokens = (plain.prompt, plain.cached, plain.completion)
            alike = metrics.of_requests.of(model, "ok", plain.key)
            alike.add(plain.took, plain.seconds, plain.requests, tokens)
            self._accounting.add(
                plain.came_to(), model=model, key=plain.key, adapter=plain.adapter, now=now
            )
            plain.clear()

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
        metrics.of_requests.count(
            model,
            code,
            served.caller.id,
            duration_s=duration_s,
            first_s=first_s,
            tokens=served.used,
        )
