"""Makes the OpenAPI document of the gateway from the tables it answers by: places, codes, headers.

It says what this gateway does with a request and a refusal; what engines answer is theirs, and passed on. Pure.
"""

from collections.abc import Iterable
from typing import Final

from gateway.domain.names import OPENAPI
from gateway.domain.openapi_parts import (
    EVENTS,
    HEADERS,
    JSON,
    OF_ENGINE_ANSWER,
    PARAMETERS,
    headers,
    on_every,
    parameter,
    ref,
    schemas,
)
from gateway.domain.openapi_refusals import Responses
from gateway.domain.places import BY_ID, ENDPOINTS, EnvelopeName, envelope_of
from gateway.domain.requestshapes import SHAPES, Answered, Json, Shape

_KEYS: Final[list[Json]] = [{"bearer": []}, {"x-api-key": []}, {"api-key": []}]
_OPEN: Final[list[Json]] = []
_OPEN_HERE: Final[list[Json]] = [{}, *_KEYS]
"""Of what this machine asks without a key."""

_OWN_SERVER: Final[list[Json]] = [{"url": "/"}]
_ANSWERS: Final[dict[Answered, tuple[str, ...]]] = {
    "json": (JSON,),
    "stream": (JSON, EVENTS),
    "text": (JSON, "text/plain", EVENTS),
    "sound": ("audio/*", "application/octet-stream", JSON, EVENTS),
}


def _answered(shape: Shape, form: EnvelopeName) -> Json:
    # Whatever is in it is the engine's: a schema would be a promise of somebody else.
    content: Json = {kind: {} for kind in _ANSWERS[shape.answered]}
    names = [*on_every(form), *OF_ENGINE_ANSWER]
    if shape.answered in ("stream", "text"):
        names.append("x-yard-loading")
    return {
        "description": "The engine's answer; its other headers and its body are passed on.",
        "headers": headers(names),
        "content": content,
    }


def _body(shape: Shape, *, form: bool, named: bool) -> Json:
    """`named`: the address names the model, and the body need not."""
    schema: Json = {
        "type": "object",
        "description": "What else it may hold is the engine's affair, and passed on.",
        "properties": {"model": {"type": "string", "minLength": 1, "maxLength": 512}},
        "additionalProperties": True,
    }
    if shape.answered in ("stream", "text"):
        schema["properties"]["stream"] = {"type": ["boolean", "null"]}
    if not named:
        schema["required"] = ["model"]
    example = dict(shape.example or {})
    if named:
        example.pop("model", None)
    elif "model" not in example:
        example = {"model": "my-model", **example}
    content: Json = {JSON: {"schema": schema, "example": example}}
    if form:
        content["multipart/form-data"] = {"schema": schema}
    return {"required": not named, "content": content}


def _operation_id(method: str, path: str) -> str:
    words = "".join(c if c.isalnum() else " " for c in path).split()
    return "_".join((method, *words))


def _relayed(
    path: str, method: str, responses: Responses, *, form: bool = False, below: str = ""
) -> Json:
    """How an engine's `path` is asked; `below` is what stands before it where the address names the model."""
    shape = SHAPES[path]
    by_id = path in BY_ID
    envelope_name = envelope_of(path)
    group = {(False, False): "inference", (True, False): "response", (False, True): "engine"}.get(
        (by_id, bool(below)), "engine-response"
    )
    names = ["request-id", "traceparent", "priority"]
    if not by_id:
        names += ["session", "session-id"]
    if shape.answered in ("stream", "text") and not by_id:
        names += ["loading", "loading-header"]
    if by_id or not below:
        names.append("model")
    operation: Json = {
        "operationId": _operation_id(method.lower(), below + path),
        "summary": shape.title if method != "DELETE" else "A response is forgotten",
        "tags": ["Engines" if below else shape.tag],
        "parameters": [ref("parameters", name) for name in names],
    }
    if not by_id:
        operation["requestBody"] = _body(shape, form=form, named=bool(below))
    operation["responses"] = {
        "200": responses.named(
            f"{shape.answered}-{envelope_name}-200", _answered(shape, envelope_name)
        ),
        **responses.of(group, envelope_name, relayed=True),
    }
    return operation


def _own(
    operation_id: str,
    summary: str,
    answer: Json,
    refusals: Json,
    *,
    parameters: Iterable[Json] = (),
    security: list[Json] | None = None,
) -> Json:
    operation: Json = {
        "operationId": operation_id,
        "summary": summary,
        "tags": ["Gateway"],
        "parameters": [ref("parameters", "request-id"), *parameters],
        "responses": {"200": answer, **refusals},
    }
    if security is not None:
        operation["security"] = security
    return operation


def _is(description: str, schema: Json, kind: str = JSON) -> Json:
    return {
        "description": description,
        "headers": headers(("x-request-id",)),
        "content": {kind: {"schema": schema}},
    }


def _own_paths(responses: Responses) -> Json:
    """What the gateway answers itself."""
    listed = _is("How each model stands.", ref("schemas", "ModelList"))
    card = _is("How it stands.", ref("schemas", "ModelCard"))
    name = {
        "name": "model",
        "in": "path",
        "required": True,
        "description": "A model, an alias or an adapter; a slash in it may stand as it is.",
        "schema": {"type": "string", "minLength": 1},
    }
    wanted = parameter("request", "query", "The id of a request, as its answer told it.")
    ready = ref("schemas", "Readiness")
    is_open = responses.of("open")
    found: Json = {
        "/v1/models": {"get": _own("list_models", "All models", listed, responses.of("models"))},
        "/models": {
            "get": _own(
                "list_models_too", "The same as `/v1/models`", listed, responses.of("models")
            )
        },
        "/v1/models/{model}": {
            "get": _own("show_model", "One model", card, responses.of("model"), parameters=(name,))
        },
        "/healthz": {
            "get": _own(
                "healthz",
                "The process answers",
                _is("It does.", {"type": "object", "properties": {"status": {"const": "ok"}}}),
                is_open,
                security=_OPEN,
            )
        },
        "/readyz": {
            "get": _own(
                "readyz",
                "Whether it would serve a request now",
                _is("It would.", ready),
                {**is_open, "503": _is("It would not.", ready)},
                security=_OPEN,
            )
        },
        "/metrics": {
            "get": _own(
                "metrics",
                "Numbers for Prometheus; from this machine without a key",
                _is("All of them.", {"type": "string"}, "text/plain"),
                responses.of("numbers"),
                security=_OPEN_HERE,
            )
        },
        OPENAPI: {
            "get": _own(
                "openapi",
                "This document",
                _is("OpenAPI 3.1.", {"type": "object"}),
                is_open,
                security=_OPEN,
            )
        },
        "/yard/timeline": {
            "get": _own(
                "timeline",
                "What happened to a request and when; to this machine alone",
                _is("The marks of the request.", {"type": "object"}),
                responses.of("here"),
                parameters=(wanted,),
                security=_OPEN,
            )
        },
    }
    for path in ("/healthz", "/readyz", "/metrics", OPENAPI, "/yard/timeline"):
        # Not below the base URL of a card.
        found[path]["servers"] = _OWN_SERVER
    return found


def _inference_paths(responses: Responses) -> Json:
    engine = {
        "name": "model",
        "in": "path",
        "required": True,
        "description": "The model as one segment, percent-encoded.",
        "schema": {"type": "string", "minLength": 1, "pattern": "^[^/]+$"},
    }
    response = {
        "name": "id",
        "in": "path",
        "required": True,
        "description": "The id of the response.",
        "schema": {"type": "string", "pattern": "^[A-Za-z0-9_-]{1,128}$"},
    }
    direct: Json = {}
    below: Json = {}
    head = "/engines/{model}"
    for endpoint in ENDPOINTS:
        path, form = endpoint.path, endpoint.form
        if endpoint.own:
            direct[path] = {"post": _relayed(path, "POST", responses, form=form)}
        asked = _relayed(path, "POST", responses, form=form, below=head)
        below[head + path] = {"parameters": [engine], "post": asked}
    for path, methods in BY_ID.items():
        direct[path] = {
            "parameters": [response],
            **{m.lower(): _relayed(path, m, responses) for m in methods},
        }
        below[head + path] = {
            "parameters": [engine, response],
            **{m.lower(): _relayed(path, m, responses, below=head) for m in methods},
        }
    return {**direct, **below}


_ABOUT: Final = (
    "Inference endpoints are passed on to an engine that serves the model, which may be started for it; the rest the "
    "gateway answers itself. An endpoint works for a model when its engine has it, else the answer is 501. `HEAD` is "
    "answered where `GET` is the gateway's own, `OPTIONS` everywhere. A slash at the end of a path is no other path. "
    "Every refusal has a code; its form is Anthropic's at and below `/v1/messages`, else OpenAI's. A stream that breaks "
    "ends with an event in that form. A key is needed once the yard has one."
)


def document(version: str) -> Json:
    """The document; `version` is the program's."""
    responses = Responses()
    paths = {**_inference_paths(responses), **_own_paths(responses)}
    key = "An API key of the yard, `yk_<id>_<secret>`."
    return {
        "openapi": "3.1.0",
        "info": {"title": "Modelyard gateway", "version": version, "description": _ABOUT},
        "servers": [
            {"url": "/", "description": "The whole yard."},
            {
                "url": "/cards/{node}/{card}",
                "description": "One card: the same without the gateway's own routes, models aside.",
                "variables": {"node": {"default": "local"}, "card": {"default": "gpu0"}},
            },
        ],
        "security": _KEYS,
        "tags": [
            {"name": "Inference", "description": "Passed on to an engine of the model named."},
            {"name": "Responses", "description": "Of engines that keep what they answered."},
            {
                "name": "Engines",
                "description": "The same, and engines' own, where the address names the model.",
            },
            {"name": "Gateway", "description": "The gateway's own; none starts or wakes a model."},
        ],
        "paths": paths,
        "components": {
            "securitySchemes": {
                "bearer": {"type": "http", "scheme": "bearer", "description": key},
                "x-api-key": {
                    "type": "apiKey",
                    "in": "header",
                    "name": "x-api-key",
                    "description": key,
                },
                "api-key": {
                    "type": "apiKey",
                    "in": "header",
                    "name": "api-key",
                    "description": key,
                },
            },
            "schemas": schemas(),
            "headers": HEADERS,
            "parameters": PARAMETERS,
            "responses": dict(sorted(responses.components.items())),
        },
    }
