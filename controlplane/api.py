"""The read API of a control plane: states, events, readiness, metrics; it changes nothing.

Reads come from the sqlite projection, never from the leader's World, so every instance answers the same
questions whether it leads or not.
"""

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Final

import msgspec
from litestar import Litestar, MediaType, Request, Response, get
from litestar.exceptions import HTTPException
from litestar.handlers import HTTPRouteHandler
from litestar.openapi import OpenAPIConfig
from litestar.openapi.plugins import JsonRenderPlugin, YamlRenderPlugin
from litestar.openapi.spec import (
    Components,
    OpenAPIMediaType,
    OpenAPIResponse,
    Operation,
    Schema,
    SecurityScheme,
)
from litestar.openapi.spec.enums import OpenAPIType
from litestar.params import FromQuery, HeaderParameter, PathParameter, QueryParameter
from litestar.response import Stream
from msgspec import Raw, Struct

from controlplane import keyviews, place_api, serve_api, usage_api
from controlplane.api_refusals import EVENTS, ONE, OPEN, STATE, error_body, responses, told
from controlplane.api_version import program_version
from controlplane.doctor import Doctor
from controlplane.events_api import BadQuery, EventStreams, TooManyStreams, parse_query
from controlplane.metrics import CONTENT_TYPE, Metrics
from controlplane.placing import NotThere, Placer
from controlplane.planning import BadRequest, NotAnswered, Planner
from controlplane.projections.readmodel import Entry, NotSynced, ReadModel
from controlplane.projections.usage import UsageModel
from events.ids import utc_now
from events.log import LogError
from events.settings import parse_seconds
from schemas import api as bodies
from schemas import codes
from schemas.api import DoctorBody, ErrorBody, EventLine, ReadyBody

log = logging.getLogger(__name__)

DEFAULT_WAIT_S: Final = 5.0
LONGEST_WAIT_S: Final = 60.0

SSE: Final = "text/event-stream"
NDJSON: Final = "application/x-ndjson"

MinSeq = Annotated[
    int | None,
    QueryParameter(ge=0, description="Answer only when this sequence is applied."),
]
Wait = Annotated[
    str | None,
    QueryParameter(description="How long to wait for min_seq, as 5s; 60s at most."),
]


class Kind(Struct, frozen=True, kw_only=True):
    """One resource of the API: the path, the noun behind it and the documented bodies."""

    path: str
    noun: str
    one: type[Struct]
    many: type[Struct]
    id_help: str


KINDS: Final = (
    Kind(
        path="models",
        noun="model",
        one=bodies.ModelOne,
        many=bodies.ModelList,
        id_help="The name of the model.",
    ),
    Kind(
        path="adapters",
        noun="adapter",
        one=bodies.AdapterOne,
        many=bodies.AdapterList,
        id_help="The name of the adapter.",
    ),
    Kind(
        path="replicas",
        noun="replica",
        one=bodies.ReplicaOne,
        many=bodies.ReplicaList,
        id_help="The id of the replica.",
    ),
    Kind(
        path="slots",
        noun="slots",
        one=bodies.SlotsOne,
        many=bodies.SlotsList,
        id_help="Node and replica, as `local/r-abcdefgh23`.",
    ),
    Kind(
        path="nodes",
        noun="node",
        one=bodies.NodeOne,
        many=bodies.NodeList,
        id_help="The id of the node.",
    ),
    Kind(
        path="cards",
        noun="card",
        one=bodies.CardOne,
        many=bodies.CardList,
        id_help="Node and card, as `local/cpu`.",
    ),
    Kind(
        path="activations",
        noun="activation",
        one=bodies.ActivationOne,
        many=bodies.ActivationList,
        id_help="The model, or model and scope as `my-model/any`.",
    ),
    Kind(
        path="jobs",
        noun="job",
        one=bodies.JobOne,
        many=bodies.JobList,
        id_help="The id of the job.",
    ),
    Kind(
        path="files",
        noun="file",
        one=bodies.FileOne,
        many=bodies.FileList,
        id_help="The key of the file.",
    ),
    Kind(
        path="keys",
        noun="key",
        one=bodies.KeyOne,
        many=bodies.KeyList,
        id_help="The id of the key, or its name.",
    ),
    Kind(
        path="commands",
        noun="command",
        one=bodies.OutcomeOne,
        many=bodies.OutcomeList,
        id_help="The id of the command.",
    ),
)


class Refusal(Exception):
    """An answer that is no data: status, code and sentence, with the position where one is known."""

    def __init__(self, status: int, code: str, sentence: str, applied_seq: int | None = None):
        super().__init__(sentence)
        self.status = status
        self.body = error_body(code, sentence, applied_seq)


async def _await_position(model: ReadModel, min_seq: int | None, wait: str | None) -> None:
    """Read-your-writes: returns when `min_seq` is applied. Raises Refusal when the wait ends first."""
    if min_seq is None:
        return
    try:
        wait_s = DEFAULT_WAIT_S if wait is None else min(parse_seconds(wait), LONGEST_WAIT_S)
    except ValueError as error:
        raise Refusal(400, "bad_request", f"wait: {error}") from None
    if not await model.reached(min_seq, wait_s):
        raise Refusal(
            504,
            "not_applied_yet",
            f"sequence {min_seq} was not applied within {wait_s:g} s; this control plane is at "
            f"{model.position}",
            model.position,
        )


_EVENT_KEY: Final = b'"event":'


def _event_of(entry: Entry) -> bytes:
    return msgspec.json.encode(
        {
            "subject": entry.subject,
            "seq": entry.seq,
            "rev": entry.rev,
            "type": entry.type,
            "id": entry.event_id,
            "time": entry.time,
            "actor": entry.actor,
            "reason": entry.reason,
            "causationid": entry.causationid,
            "correlationid": entry.correlationid,
            "change": entry.change,
            "problem": entry.problem,
        }
    )


def _json_of(entry: Entry, extra: bytes = b"") -> bytes:
    """The state with the event that made it, put together as text: states are stored as JSON already."""
    assert entry.state is not None
    state = bytes(entry.state)
    comma = b"," if len(state) > 2 else b""
    return state[:-1] + comma + _EVENT_KEY + _event_of(entry) + extra + b"}"


def _unread(entry: Entry) -> bytes:
    """What is known of a thing whose state nobody here can read."""
    return (
        b'{"name":' + msgspec.json.encode(entry.name) + b"," + _EVENT_KEY + _event_of(entry) + b"}"
    )


def _newer(kind: Kind, entry: Entry) -> str:
    return (
        f"{kind.noun} {entry.name!r} was written by a newer version of Modelyard ({entry.problem}, sequence "
        f"{entry.seq}) than this control plane: bring it up to date"
    )


def _answer(data: bytes, position: int, unread: bytes = b"") -> Response[bytes]:
    return Response(
        b'{"data":' + data + b',"applied_seq":' + str(position).encode() + unread + b"}",
        media_type=MediaType.JSON,
    )


async def _standings(model: ReadModel) -> dict[str, Raw]:
    entries, _ = await model.entries("nodestate")
    return {entry.name: entry.state for entry in entries if entry.state is not None}


async def _with_standing(model: ReadModel, entries: Sequence[Entry]) -> list[bytes]:
    standings = await _standings(model)
    return [
        _json_of(
            entry,
            b',"standing":'
            + (bytes(standings[entry.name]) if entry.name in standings else b"null"),
        )
        for entry in entries
    ]


async def _texts(kind: Kind, model: ReadModel, entries: Sequence[Entry]) -> list[bytes]:
    if kind.noun == "node":
        return await _with_standing(model, entries)
    if kind.noun == "key":
        entries = keyviews.shown(entries)
    return [_json_of(entry) for entry in entries]


def _resource(kind: Kind, model: ReadModel) -> list[HTTPRouteHandler]:
    """The list and the single one of a kind."""

    @get(
        f"/v1/{kind.path}",
        name=f"list {kind.path}",
        operation_id=f"list_{kind.path}",
        summary=f"All {kind.path}",
        responses=responses(
            STATE, ok=told(kind.many, f"All {kind.path}, each with its last event.")
        ),
    )
    async def many(min_seq: MinSeq = None, wait: Wait = None) -> Response[bytes]:
        await _await_position(model, min_seq, wait)
        entries, position = await model.entries(kind.noun)
        read = [entry for entry in entries if entry.state is not None]
        # Beside the others: who decodes the list needs whole states, and must hear of these too.
        unread = b",".join(_unread(entry) for entry in entries if entry.state is None)
        return _answer(
            b"[" + b",".join(await _texts(kind, model, read)) + b"]",
            position,
            b',"unread":[' + unread + b"]",
        )

    @get(
        f"/v1/{kind.path}/{{key:path}}",
        name=f"show {kind.path}",
        operation_id=f"show_{kind.path}",
        summary=f"One of {kind.path}",
        responses=responses(ONE, ok=told(kind.one, "Its state, with the event that made it.")),
    )
    async def one(
        key: Annotated[str, PathParameter(description=kind.id_help)],
        min_seq: MinSeq = None,
        wait: Wait = None,
    ) -> Response[bytes]:
        await _await_position(model, min_seq, wait)
        name = key.removeprefix("/")
        entry, position = await model.entry(kind.noun, name)
        if entry is None and kind.noun == "activation":
            entry, position = await model.entry(kind.noun, f"{name}/any")
        if entry is None and kind.noun == "key":
            keys, position = await model.entries(kind.noun)
            entry = keyviews.named(keys, name, utc_now())
        if entry is None:
            raise Refusal(404, "not_found", f"there is no {kind.noun} {name!r}", position)
        if entry.state is None:
            raise Refusal(409, codes.UPGRADE_REQUIRED, _newer(kind, entry), position)
        return _answer((await _texts(kind, model, [entry]))[0], position)

    return [many, one]


@dataclass
class EventsOperation(Operation):
    """The operation of a stream, which comes in two forms; a route can describe one."""

    def __post_init__(self) -> None:
        answered = (self.responses or {}).get("200")
        if isinstance(answered, OpenAPIResponse) and answered.content is not None:
            text = Schema(type=OpenAPIType.STRING, description="Server-sent events.")
            answered.content[SSE] = OpenAPIMediaType(schema=text)


def _events(streams: EventStreams, prefix: str) -> HTTPRouteHandler:
    @get(
        "/v1/events",
        operation_id="events",
        summary="The log as it grows: server-sent events, or lines of JSON",
        description=(
            "Answers SSE when Accept asks for text/event-stream, else one JSON object per line. Resumes "
            "behind Last-Event-ID, at from_seq, or at a time. `{}` lines and comments are signs of life."
        ),
        responses=responses(
            EVENTS,
            ok=told(
                EventLine, "One event after the other, as they are asked for.", media_type=NDJSON
            ),
        ),
        operation_class=EventsOperation,
    )
    async def events(
        request: Request[Any, Any, Any],
        subject: FromQuery[list[str] | None] = None,
        type_: Annotated[list[str] | None, QueryParameter(name="type")] = None,
        model: FromQuery[str | None] = None,
        from_seq: FromQuery[int | None] = None,
        since: FromQuery[str | None] = None,
        from_state: Annotated[bool, QueryParameter(name="state")] = False,
        follow: FromQuery[bool] = True,
        last_event_id: Annotated[str | None, HeaderParameter(name="Last-Event-ID")] = None,
    ) -> Stream:
        sse = SSE in request.headers.get("accept", "")
        query = parse_query(
            subjects=subject or [],
            types=type_ or [],
            model=model,
            from_seq=from_seq,
            since=since,
            state=from_state,
            follow=follow,
            last_event_id=last_event_id,
            prefix=prefix,
            now=utc_now(),
        )
        lines = await streams.open(query, "sse" if sse else "ndjson")
        return Stream(
            lines,
            media_type=SSE if sse else NDJSON,
            headers={"Cache-Control": "no-cache", "X-Accel-Buffering": "no"},
        )

    return events


def _plain(metrics: Metrics, doctor: Doctor) -> list[HTTPRouteHandler]:
    @get(
        "/healthz",
        operation_id="healthz",
        summary="The process answers",
        media_type="text/plain",
        security=OPEN,
        response_description="It does.",
        responses=responses(),
    )
    async def healthz() -> str:
        return "ok\n"

    @get(
        "/readyz",
        operation_id="readyz",
        summary="Whether this control plane does its work; 503 names what does not",
        security=OPEN,
        response_description="It does.",
        responses={**responses(), 503: told(ReadyBody, "It does not; `findings` say why.")},
    )
    async def readyz() -> Response[ReadyBody]:
        body = doctor.ready()
        return Response(body, status_code=200 if body.ready else 503)

    @get(
        "/metrics",
        operation_id="metrics",
        summary="Numbers for Prometheus",
        media_type="text/plain",
        security=OPEN,
        response_description="All of them, in Prometheus' text format.",
        responses=responses(),
    )
    async def show_metrics() -> Response[bytes]:
        return Response(metrics.text(), media_type=CONTENT_TYPE)

    @get(
        "/v1/doctor",
        operation_id="doctor",
        summary="Everything that may be wrong",
        responses=responses(
            ok=told(DoctorBody, "What this instance knows of itself and of the log.")
        ),
    )
    async def show_doctor() -> DoctorBody:
        return await doctor.examine()

    return [healthz, readyz, show_metrics, show_doctor]


def _refused(_: Request[Any, Any, Any], error: Refusal) -> Response[ErrorBody]:
    return Response(error.body, status_code=error.status)


def _error(status: int, code: str, sentence: str) -> Response[ErrorBody]:
    return Response(error_body(code, sentence), status_code=status)


def _http_error(_: Request[Any, Any, Any], error: HTTPException) -> Response[ErrorBody]:
    codes = {
        400: "bad_request",
        404: "not_found",
        405: "method_not_allowed",
        413: "request_too_large",
    }
    sentences = [error.detail or "the request was refused"]
    extra = error.extra if isinstance(error.extra, list) else []
    sentences += [
        f"{part.get('key', 'request')}: {part.get('message', '')}"
        for part in extra
        if isinstance(part, dict)
    ]
    return _error(error.status_code, codes.get(error.status_code, "refused"), "; ".join(sentences))


def _fault(request: Request[Any, Any, Any], error: Exception) -> Response[ErrorBody]:
    log.error("a request failed", exc_info=error, extra={"path": request.url.path})
    return _error(500, "internal", "the control plane failed to answer; its log has the reason")


def build_api(
    *,
    model: ReadModel,
    streams: EventStreams,
    metrics: Metrics,
    doctor: Doctor,
    prefix: str,
    planner: Planner | None = None,
    placer: Placer | None = None,
    usage: UsageModel | None = None,
) -> Litestar:
    """The application, without its guard (api_guard.py) and its server (app.py)."""
    handlers: list[HTTPRouteHandler] = [
        handler for kind in KINDS for handler in _resource(kind, model)
    ]
    handlers += [_events(streams, prefix), *_plain(metrics, doctor)]
    if planner is not None:
        handlers += serve_api.handlers(planner)
    if placer is not None:
        handlers += place_api.handlers(placer)
    if usage is not None:
        handlers += usage_api.handlers(usage)
    exception_handlers: dict[int | type[Exception], Any] = {
        Refusal: _refused,
        BadRequest: serve_api.bad_request,
        NotAnswered: serve_api.not_answered,
        NotThere: place_api.not_there,
        NotSynced: lambda _, error: _error(503, "not_synced", f"{error}; try again soon"),
        BadQuery: lambda _, error: _error(400, "bad_request", str(error)),
        TooManyStreams: lambda _, __: _error(
            503, "too_many_streams", "too many clients follow the events already"
        ),
        LogError: lambda _, error: _error(503, "nats_unavailable", str(error)),
        RecursionError: lambda _, __: _error(400, "bad_request", "the body is nested too deeply"),
        HTTPException: _http_error,
        Exception: _fault,
    }
    return Litestar(
        handlers,
        exception_handlers=exception_handlers,
        openapi_config=OpenAPIConfig(
            title="Modelyard control plane",
            version=program_version(),
            description=(
                "What a yard's log says, read from any control plane; nothing of it changes anything. Each answer "
                "says with `applied_seq` up to which event it is true. Every refusal has the same body: a code for "
                "programs and a sentence for people."
            ),
            path="/schema",
            render_plugins=[
                JsonRenderPlugin(path=["/", "/openapi.json"]),
                YamlRenderPlugin(),
            ],
            security=[{"token": []}],
            components=Components(
                security_schemes={
                    "token": SecurityScheme(
                        type="http",
                        scheme="bearer",
                        description="The token in `secrets/api.token` of the yard's data folder.",
                    )
                }
            ),
        ),
        logging_config=None,
        debug=False,
    )
