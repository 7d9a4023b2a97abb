"""Reads what a request for inference asks for: unpacks its body, and finds the model's name wherever it stands.

It decides neither who may ask nor where the request goes, and changes nothing of a body but the name in it.
"""

from typing import Final
from urllib.parse import quote, unquote_to_bytes

import msgspec
from msgspec import Struct, structs

from gateway.domain.admission import Route, Wait, out_of_reach
from gateway.domain.affinity import Affinity, by_prefix
from gateway.domain.answers import Answer, answer
from gateway.domain.http_rules import HeaderList, Headers, engine_request_headers
from gateway.domain.model_rewrite import Span, model_spans, named_model_spans
from gateway.domain.multipart import FormReader, boundary_of
from gateway.domain.names import Place
from gateway.domain.request_fields import (
    MAX_MODEL_NAME,
    FieldsProblem,
    RequestFields,
    model_missing,
    read_fields,
)
from gateway.domain.responseids import Kept
from gateway.domain.table import Table
from gateway.http.messages import JSON_TYPE, Request, Responder
from gateway.http.outgoing import rendered
from gateway.http.unpacking import UNDERSTOOD, unpacked

_NEVER_JSON: Final = (b"multipart/", b"image/", b"audio/", b"video/")
_ACCEPTED: Final = (b"accept-encoding", b"gzip, deflate")


class Intake(Struct, frozen=True, kw_only=True):
    """What was read of one request.

    `form`: the body goes on with its own Content-Type. `spans`: where the body names its model, None: not looked for
    yet; what is put there stands between `before` and `behind`. `in_query`: the query named it. `replica` is the one
    that holds the response asked for, where that is known; `by_id`: the request is for a response. `prefix`: what ties
    a body that is not in memory to a replica.
    """

    fields: RequestFields
    form: bool = False
    spans: list[Span] | None = None
    before: bytes = b""
    behind: bytes = b""
    in_query: bool = False
    by_id: bool = False
    replica: str | None = None
    prefix: Affinity | None = None

    def find_spans(self, body: bytes) -> list[Span]:
        """Where the whole `body` names its model."""
        return named_model_spans(body) if self.spans is None else self.spans

    def value(self, model: str) -> bytes:
        """What stands at every span when the engine knows the model as `model`."""
        name = model.encode() if self.form else msgspec.json.encode(model)
        return b"%b%b%b" % (self.before, name, self.behind)

    def headers(self, request: Request) -> bytes:
        """Those that go on to the engine, rendered; the same for every request with the same headers. A body that is
        no form is JSON, whatever its label said."""
        headers = request.headers
        if self.form:
            return _onward(headers, "to engine, form", _PACKING, ())
        if self.by_id and not request.body.size:
            return _onward(headers, "to engine, bare", _BODY_HEADERS, ())
        return json_onward(headers)

    def target(self, path: str, request: Request, model: str) -> str:
        """Path and query for an engine that knows the model as `model`."""
        query = request.query.decode("latin-1")
        if self.in_query and model != self.fields.model:
            named = f"model={quote(model, safe='')}"
            parts = [named if p.partition("=")[0] == "model" else p for p in query.split("&")]
            query = "&".join(parts)
        return f"{path}?{query}" if query else path


def json_onward(headers: Headers) -> bytes:
    """Of a request's headers those that go on to an engine with a JSON body, rendered."""
    return _onward(headers, "to engine", _BODY_HEADERS, (JSON_TYPE,))


def _onward(headers: Headers, kind: str, dropped: frozenset[bytes], extra: HeaderList) -> bytes:
    memo = headers.memo
    found: bytes | None = memo.get(kind)
    if found is None:
        kept = [h for h in headers.items if h[0] not in dropped]
        found = memo[kind] = rendered(engine_request_headers(kept, extra=extra))
    return found


def may_be_json(headers: Headers) -> bool:
    """Whether its label lets a body be JSON as it came: whatever says nothing else may be."""
    return headers.get(b"content-encoding") is None and not _kind(headers).startswith(_NEVER_JSON)


def _kind(headers: Headers) -> bytes:
    """The Content-Type without its parameters."""
    return (headers.get(b"content-type") or b"").split(b";")[0].strip().lower()


_BODY_HEADERS: Final = frozenset((b"content-type", b"content-encoding"))
_PACKING: Final = frozenset((b"content-encoding",))


async def read_intake(
    place: Place, request: Request, respond: Responder, kept: Kept | None = None
) -> Intake | Answer:
    """What `request` asks for at `place`, or why that cannot be read. `kept` is what is known of the response asked for.

    1. a response by its id: the name it was asked for by, else the address's or the query's
    2. a body with a label that cannot be JSON or a form, or packed in a way not understood: 415. One that is
       compressed is unpacked, and is the request's body from then on
    3. a form, where the endpoint takes one
    4. no body at all: the query's name
    5. JSON, of which only the fields needed are decoded
    """
    if place.response:  # 1
        refused = await _unpack(request, respond)
        return _of_response(request, kept, place.model) if refused is None else refused
    kind = _kind(request.headers)
    form = place.form and kind.startswith(b"multipart/")
    if not form and kind.startswith(_NEVER_JSON):  # 2
        other = " or multipart/form-data" if place.form else ""
        return answer(
            "unsupported_media_type",
            f"Content-Type {kind.decode('latin-1')!r} is not served here; "
            f"send application/json{other}.",
        )
    if request.headers.get(b"content-encoding") is not None:
        refused = await _unpack(request, respond)
        if refused is not None:
            return refused
    named = place.model or None
    if form:  # 3
        return await _of_form(request, named)
    body = await request.body.read_all()
    if not body and named is None:  # 4
        name = _query_model(request.query)
        if isinstance(name, FieldsProblem):
            return _refused(name)
        if name is not None:
            return Intake(fields=RequestFields(model=name), spans=[], in_query=True)
    if named is not None:
        return _of_engine(body, named)
    fields = read_fields(body)  # 5
    if isinstance(fields, FieldsProblem):
        return _refused(fields)
    # One on the disk is not read again to see how it begins.
    prefix = by_prefix(body) if request.body.in_memory() is None else None
    return Intake(fields=fields, prefix=prefix)


def _of_engine(body: bytes, named: str) -> Intake | Answer:
    """JSON below a model's engine, which need not name the model."""
    if not body:
        return Intake(fields=RequestFields(model=named), spans=[])
    fields = read_fields(body, named=named)
    if isinstance(fields, FieldsProblem):
        return _refused(fields)
    spans = model_spans(body)
    if spans:
        return Intake(fields=fields, spans=spans)
    # An engine with adapters would answer for its base: the name is put in where it has another there.
    at = body.index(b"{") + 1
    alone = body[at:].lstrip().startswith(b"}")
    behind = b"" if alone else b","
    return Intake(fields=fields, spans=[(at, at)], before=b'"model":', behind=behind)


async def _of_form(request: Request, named: str | None) -> Intake | Answer:
    boundary = boundary_of(request.headers.get(b"content-type") or b"")
    if isinstance(boundary, FieldsProblem):
        return _refused(boundary)
    reader = FormReader(boundary, named=named)
    async for block in request.body.replay():
        reader.feed(block)
        if reader.problem is not None:
            break
    found = reader.finish()
    if isinstance(found, FieldsProblem):
        return _refused(found)
    if found.span is not None:
        return Intake(fields=found.fields, form=True, spans=[found.span])
    before = b'--%b\r\nContent-Disposition: form-data; name="model"\r\n\r\n' % boundary
    return Intake(fields=found.fields, form=True, spans=[(0, 0)], before=before, behind=b"\r\n")


def _of_response(request: Request, kept: Kept | None, named: str) -> Intake | Answer:
    queried = _query_model(request.query)
    if isinstance(queried, FieldsProblem):
        return _refused(queried)
    if named and queried not in (None, named):
        told = "The address and the query name two different models."
        return _refused(FieldsProblem(message=told, param="model"))
    name = named or queried
    if kept is not None and name in (None, kept.name):
        fields = RequestFields(model=kept.name)
        in_query = queried is not None
        return Intake(fields=fields, spans=[], in_query=in_query, by_id=True, replica=kept.replica)
    if name is None:
        return response_unknown("this gateway does not know it; name its model with `?model=`.")
    in_query = queried is not None
    return Intake(fields=RequestFields(model=name), spans=[], in_query=in_query, by_id=True)


def response_unknown(why: str) -> Answer:
    """The answer about a response that cannot be asked for."""
    return answer("response_not_found", f"No engine is known to hold that response: {why}")


def where_response_is(
    decision: Route | Wait, intake: Intake, table: Table, scope: str
) -> Route | Answer:
    """Where a request for a response goes: to the replica that gave it, or, where only the model is known, to one of
    its replicas. It never starts any: a new engine holds nothing. One that only does not answer just now is not gone."""
    candidates = decision.candidates if isinstance(decision, Route) else ()
    found = tuple(r for r in candidates if intake.replica in (None, r.id))
    if found:
        assert isinstance(decision, Route), "who waits has no candidates"
        return structs.replace(decision, candidates=found, adapter=None)
    model = decision.model.name
    ready = table.routable(model, scope)
    if any(intake.replica in (None, r.id) for r in ready):
        return out_of_reach(model)
    if intake.replica is not None:
        return response_unknown("the replica that gave it is gone.")
    return response_unknown(f"no engine of the model {intake.fields.model!r} runs.")


async def _unpack(request: Request, respond: Responder) -> Answer | None:
    """Puts the unpacked body in the packed one's place, if it is packed; or says why not."""
    encoding = (request.headers.get(b"content-encoding") or b"").strip().lower()
    if encoding in (b"", b"identity"):
        return None
    if encoding not in UNDERSTOOD:
        respond.add_header(*_ACCEPTED)
        return answer(
            "unsupported_media_type",
            f"Content-Encoding {encoding.decode('latin-1')!r} is not understood; "
            "send the body as it is, or packed with gzip or deflate.",
        )
    packed = request.body
    request.body = await unpacked(packed, encoding)
    packed.release()
    return None


def _query_model(query: bytes) -> str | FieldsProblem | None:
    """The model a query names; None: it names none."""
    if b"model=" not in query:
        return None
    names = {
        value
        for name, _, value in (p.partition(b"=") for p in query.split(b"&"))
        if name == b"model"
    }
    if not names:
        return None
    if len(names) > 1:
        return FieldsProblem(message="The query names more than one model.", param="model")
    try:
        model = unquote_to_bytes(names.pop().replace(b"+", b" ")).decode("utf-8")
    except UnicodeDecodeError:
        return FieldsProblem(message="The model in the query is not UTF-8.", param="model")
    if not model:
        return model_missing("`model` in the query is empty")
    if len(model) > MAX_MODEL_NAME:
        return FieldsProblem(
            message=f"The model name is longer than {MAX_MODEL_NAME} characters.", param="model"
        )
    return model


def _refused(problem: FieldsProblem) -> Answer:
    return answer("invalid_request", problem.message, param=problem.param)
