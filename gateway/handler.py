"""The one entry of every request: an id, CORS, what the path means, and a line in the access log.

It writes ids, sizes and times to the log, never content, and holds no policy of its own.
"""

import asyncio
import itertools
import re
from collections.abc import Callable

from gateway.accesslog import AccessLine, AccessLog
from gateway.accounting import Accounting
from gateway.admin import Admin
from gateway.callers import Callers
from gateway.domain.answers import Answer
from gateway.domain.cors import answer_headers
from gateway.domain.envelopes import envelope
from gateway.domain.names import place_of
from gateway.domain.traces import trace_of
from gateway.domain.turns import priority_of
from gateway.endpoints import Inference, reply
from gateway.gateway import Gateway
from gateway.http.errors import ClientGone, RequestError
from gateway.http.messages import Request, Responder
from gateway.metrics import Metrics
from gateway.served import Served
from gateway.spans import Spans
from gateway.timeline import Timeline

_REQUEST_ID = re.compile(rb"[A-Za-z0-9._:-]{1,128}")

CLIENT_GONE = 499
"""What the log says when nobody was there to be answered; never sent."""


class RequestHandler:
    """Called by the HTTP core once per request, in a task of its own."""

    def __init__(
        self,
        gateway: Gateway,
        inference: Inference,
        admin: Admin,
        metrics: Metrics,
        access: AccessLog,
        callers: Callers,
        accounting: Accounting,
        *,
        new_request_id: Callable[[], str],
        random_bits: Callable[[int], int],
        spans: Spans | None = None,
    ) -> None:
        self._gateway = gateway
        self._inference = inference
        self._admin = admin
        self._metrics = metrics
        self._access = access
        self._callers = callers
        self._accounting = accounting
        self._new_request_id = new_request_id
        self._random_bits = random_bits
        self._spans = spans

    async def __call__(self, request: Request, respond: Responder) -> None:
        request_id = self._request_id(request)
        respond.add_header(b"x-request-id", request_id.encode())
        origin = request.headers.get(b"origin")
        for name, value in answer_headers(origin, self._gateway.settings.cors_origins):
            respond.add_header(name, value)
        headers = request.headers
        trace = trace_of(
            headers.get(b"traceparent"),
            headers.get(b"tracestate"),
            trace=self._random_bits(128),
            span=self._random_bits(64),
        )
        timeline = Timeline(request_id, request.received_at, trace)
        served = Served()
        place = place_of(request.method, request.path)
        if place.envelope != "openai":
            respond.envelope = envelope(place.envelope, request_id)
            for name, value in respond.envelope.headers():
                respond.add_header(name, value)
        try:
            caller = self._callers.identify(place.kind, request)
            if isinstance(caller, Answer):
                await reply(respond, caller, served)
            elif place.kind == "inference":
                served.caller = caller
                await self._inference.serve(place, request, respond, timeline, served)
            else:
                served.caller = caller
                found = await self._admin.serve(place, request, respond, caller)
                if isinstance(found, Answer):
                    await reply(respond, found, served)
                else:
                    served.status = found
        except RequestError as error:
            served.status, served.code = error.status, error.code
            if not respond.started and error.retry_after_s is None:
                respond.add_header(b"x-should-retry", b"false")
            raise
        except (asyncio.CancelledError, ClientGone):
            served.status, served.code = served.status or CLIENT_GONE, "client_gone"
            served.complete = False
            raise
        except Exception:
            served.status, served.code = 500, "internal_error"
            raise
        finally:
            served.end()
            if place.kind == "inference":
                self._metrics.count(served.model, served.code)
                if served.adapter_waited_s is not None:
                    self._metrics.waited_for_adapter(served.model, served.adapter_waited_s)
                if place.on is not None:
                    self._metrics.count_on_card(served.model, served.scope, served.code)
            tail = served.tail
            first_s = timeline.marks.get("first_byte") if tail is not None and tail.last else None
            if first_s is not None:
                first_s -= request.received_at
            duration_s = self._gateway.clock.now_s() - request.received_at
            if place.kind == "inference":
                self._metrics.ended.ended(
                    served.model,
                    served.code,
                    served.caller.id,
                    duration_s=duration_s,
                    first_s=first_s,
                    tokens=served.used,
                )
            if served.model:
                self._account(served, duration_s, first_s)
            self._line(request, timeline, served, duration_s, first_s)
            if self._spans is not None and place.kind == "inference":
                ended_s = request.received_at + duration_s
                self._spans.add(
                    timeline, served, method=request.method, path=request.path, ended_s=ended_s
                )

    def _account(self, served: Served, duration_s: float, first_s: float | None) -> None:
        """What it used, of a request for a model of the catalog; `first_s` when its answer began."""
        self._accounting.add(
            model=served.model,
            key=served.caller.id,
            adapter=served.adapter,
            failed=first_s is None,
            tokens=served.used,
            first_s=first_s,
            duration_s=duration_s,
            waited_s=served.waited_s,
        )

    def _request_id(self, request: Request) -> str:
        """The client's own id when it is one we can put in a header and a log, else a new one."""
        given = request.headers.get(b"x-request-id")
        if given is not None and _REQUEST_ID.fullmatch(given):
            return given.decode("ascii")
        return self._new_request_id()

    def _line(
        self,
        request: Request,
        timeline: Timeline,
        served: Served,
        duration_s: float,
        first_s: float | None,
    ) -> None:
        used = served.used
        self._access.add(
            AccessLine(
                time=self._gateway.clock.now(),
                request=timeline.request_id,
                peer=request.peer,
                method=request.method,
                path=request.path,
                status=served.status,
                code=served.code,
                model=served.model,
                replica=served.replica,
                scope=served.scope,
                adapter=served.adapter,
                how=served.how,
                key=served.caller.id,
                prompt_tokens=0 if used is None else used.prompt,
                completion_tokens=0 if used is None else used.completion,
                first_ms=-1 if first_s is None else round(first_s * 1000),
                prio=priority_of(served.caller, request.headers.get(b"x-yard-priority")),
                trace=timeline.trace.trace,
                waited_ms=round(served.waited_s * 1000),
                duration_ms=round(duration_s * 1000),
                moves=served.moves,
                sent_bytes=served.sent_bytes,
                complete=served.complete,
                why=served.why,
            )
        )


def request_ids(prefix: str) -> Callable[[], str]:
    """Ids for requests that bring none: a random prefix of this gateway's life, and a count."""
    count = itertools.count(1)
    return lambda: f"{prefix}-{next(count):x}"
