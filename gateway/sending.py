"""Makes what goes out to an engine of a request, once however often it is sent.

It does no I/O but reading the request's own body, and does not know which engine gets it.
"""

from gateway.adapterdesk import Seeking
from gateway.domain.adaptertable import AdapterEntry
from gateway.domain.affinity import HEADERS, PATHS, Affinity, by_prefix, by_session
from gateway.domain.model_rewrite import Span, patch, replace_named_model
from gateway.domain.names import Place
from gateway.domain.traces import engine_lines
from gateway.http.bodies import BodySource, PatchedBody
from gateway.http.messages import Request
from gateway.http.outgoing import INLINE_BODY, Outgoing
from gateway.intake import Intake
from gateway.served import Served
from gateway.timeline import Timeline


class Sending:
    """A request on its way to engines: what goes out is made once, however often it is sent.

    `name` is the model's or adapter's name or alias as the client gave it, `path` the engine's as replicas publish
    it, `on` the card that was asked, `own` the lines by which it is found again, `seeking` what a request for an adapter has met so far.
    """

    __slots__ = (
        "_affinity",
        "_looked",
        "_made",
        "_made_for",
        "_spans",
        "_target",
        "intake",
        "name",
        "on",
        "own",
        "path",
        "request",
        "seeking",
    )

    def __init__(
        self,
        request: Request,
        place: Place,
        intake: Intake,
        timeline: Timeline,
        seeking: Seeking | None = None,
    ) -> None:
        self.request = request
        self.intake = intake
        self.on = place.on
        self.own = engine_lines(timeline.request_id, timeline.trace)
        self.path = place.path
        self.name = intake.fields.model
        self._target = place.target or place.path
        self.seeking = seeking
        self._affinity: Affinity | None = None
        self._looked = False
        self._made: Outgoing | None = None
        self._made_for = ""
        self._spans: list[Span] | None = None

    def seek(self, adapter: AdapterEntry | None, timeline: Timeline, served: Served) -> None:
        """It turned out to be for this adapter, if any; what it has met so far stays."""
        if adapter is None:
            return
        served.adapter = adapter.adapter.name
        if self.seeking is None:
            self.seeking = Seeking(self.name, timeline.request_id)

    def affinity(self) -> Affinity | None:
        """What ties it to a replica, looked for once and only where there is a choice."""
        if not self._looked:
            self._looked = True
            self._affinity = self._find_affinity()
        return self._affinity

    def _find_affinity(self) -> Affinity | None:
        for header in HEADERS:
            session = self.request.headers.get(header)
            if session is not None:
                return by_session(session)
        if self.path not in PATHS or self.intake.form:
            return None
        body = self.request.body.in_memory()
        return self.intake.prefix if body is None else by_prefix(body)

    def made(self, model: str) -> Outgoing | None:
        """What `make` made for this model, if it did."""
        return self._made if self._made_for == model else None

    async def spans(self) -> list[Span]:
        """Where the body names its model."""
        if self._spans is None:
            known = self.intake.spans
            body = await self.request.body.read_all() if known is None else b""
            self._spans = self.intake.find_spans(body)
        return self._spans

    async def make(self, model: str, *, waits: bool = False) -> Outgoing:
        """What an engine that serves `model` under that name is sent, but for its key; an alias becomes the
        catalog's name, an adapter's the engine-side one. `waits`: it does not go out at once."""
        request = self.request
        body: bytes | BodySource = request.body
        if self.name != model:
            value = self.intake.value(model)
            whole = request.body.in_memory()
            if waits or whole is None or len(whole) > INLINE_BODY:
                # What waits keeps no second copy of its body.
                body = PatchedBody(request.body, await self.spans(), value)
            elif self._spans is None and self.intake.spans is None:
                body = replace_named_model(whole, value)
            else:
                body = patch(whole, await self.spans(), value)
        target = self.intake.target(self._target, request, model)
        headers = self.intake.headers(request) + self.own
        self._made = made = Outgoing(request.method, target, headers, body)
        self._made_for = model
        return made

    def release(self) -> None:
        """It is sent to nobody any more: gives back what it keeps of the request's body."""
        self._made = None
        self._made_for = ""
        self.request.body.release()
