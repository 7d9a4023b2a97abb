"""The entry of every request that needs a task: an id, CORS, what the path means, and how it ended.

It holds no policy of its own. What gateway/errand.py began goes on here.
"""

import asyncio
import itertools
import re
from collections.abc import Callable

from gateway.admin import Admin
from gateway.begun import Begun
from gateway.callers import Callers
from gateway.domain.answers import Answer
from gateway.domain.cors import answer_headers
from gateway.domain.envelopes import envelope
from gateway.domain.names import Place, place_of
from gateway.domain.traces import trace_of
from gateway.endings import Endings
from gateway.endpoints import Inference, reply
from gateway.gateway import Gateway
from gateway.http.errors import ClientGone, RequestError
from gateway.http.messages import Request, Responder
from gateway.served import CLIENT_GONE, Served
from gateway.timeline import Timeline

_REQUEST_ID = re.compile(rb"[A-Za-z0-9._:-]{1,128}")


class RequestHandler:
    """Called by the HTTP core for a request, in a task of its own."""

    def __init__(
        self,
        gateway: Gateway,
        inference: Inference,
        admin: Admin,
        callers: Callers,
        endings: Endings,
        *,
        new_request_id: Callable[[], str],
        random_bits: Callable[[int], int],
    ) -> None:
        self._gateway = gateway
        self._inference = inference
        self._admin = admin
        self._callers = callers
        self._endings = endings
        self._new_request_id = new_request_id
        self._random_bits = random_bits

    async def __call__(self, request: Request, respond: Responder) -> None:
        begun = request.begun
        if isinstance(begun, Begun):
            timeline, served, place = begun.timeline, begun.served, begun.place
        else:
            begun = None
            timeline, served = self._timeline(request), Served()
            place = place_of(request.method, request.path)
        respond.add_header(b"x-request-id", timeline.request_id.encode())
        origin = request.headers.get(b"origin")
        for name, value in answer_headers(origin, self._gateway.settings.cors_origins):
            respond.add_header(name, value)
        if place.envelope != "openai":
            respond.envelope = envelope(place.envelope, timeline.request_id)
            for name, value in respond.envelope.headers():
                respond.add_header(name, value)
        try:
            if begun is not None:
                await self._inference.serve(place, request, respond, timeline, served, begun)
            else:
                await self._serve(place, request, respond, timeline, served)
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
            self._endings.ended(
                served,
                timeline,
                place,
                method=request.method,
                path=request.path,
                peer=request.peer,
                received_s=request.received_at,
                priority=request.headers.get(b"x-yard-priority"),
            )

    async def _serve(
        self, place: Place, request: Request, respond: Responder, timeline: Timeline, served: Served
    ) -> None:
        caller = self._callers.identify(place.kind, request.headers, request.peer)
        if isinstance(caller, Answer):
            await reply(respond, caller, served)
            return
        served.caller = caller
        if place.kind == "inference":
            await self._inference.serve(place, request, respond, timeline, served)
            return
        found = await self._admin.serve(place, request, respond, caller)
        if isinstance(found, Answer):
            await reply(respond, found, served)
        else:
            served.status = found

    def _timeline(self, request: Request) -> Timeline:
        headers = request.headers
        trace = trace_of(
            headers.get(b"traceparent"),
            headers.get(b"tracestate"),
            trace=self._random_bits(128),
            span=self._random_bits(64),
        )
        return Timeline(self._request_id(request), request.received_at, trace)

    def _request_id(self, request: Request) -> str:
        """The client's own id when it is one we can put in a header and a log, else a new one."""
        given = request.headers.get(b"x-request-id")
        if given is not None and _REQUEST_ID.fullmatch(given):
            return given.decode("ascii")
        return self._new_request_id()


def request_ids(prefix: str) -> Callable[[], str]:
    """Ids for requests that bring none: a random prefix of this gateway's life, and a count."""
    count = itertools.count(1)
    return lambda: f"{prefix}-{next(count):x}"
