"""Makes the OpenAPI document of the gateway from the tables it answers by: places, codes, headers.

It says what this gateway does with a request and a refusal; what engines answer is theirs, and passed on. Pure.
"""

from collections.abc import Iterable
from typing import Any, Final, get_args

import msgspec

from gateway.domain import status
from gateway.domain.answers import CODES, RETRY_MAX_S, RETRY_MIN_S, Code
from gateway.domain.envelopes import anthropic_type, envelope
from gateway.domain.error_bodies import ErrorBody
from gateway.domain.names import OPENAPI
from gateway.domain.places import BY_ID, ENDPOINTS, EnvelopeName, envelope_of
from gateway.domain.requestshapes import SHAPES, Answered, Json, Shape
from gateway.domain.routing import Why
from gateway.domain.turns import CLASSES

_JSON: Final = "application/json"
_EVENTS: Final = "text/event-stream"

# Which codes a request may get, by how far it comes. -----------------------------------------------------

_CALLER: Final[tuple[Code, ...]] = ("invalid_api_key", "yard_unavailable", "internal_error")
_READING: Final[tuple[Code, ...]] = (
    "invalid_request",
    "request_too_large",
    "unsupported_media_type",
    "queue_full",
)
_SERVING: Final[tuple[Code, ...]] = (
    "key_not_allowed",
    "key_may_not_activate",
    "rate_limit_exceeded",
    "endpoint_not_supported",
    "model_not_found",
    "card_not_found",
    "model_off",
    "model_loading",
    "no_capacity",
    "start_failed",
    "model_quarantined",
    "model_busy",
    "card_kept",
    "draining",
    "engine_error",
)
_INFERENCE: Final = (*_CALLER, *_READING, *_SERVING)

CODES_OF: Final[dict[str, tuple[Code, ...]]] = {
    "inference": (*_INFERENCE, "method_not_allowed"),
    "response": (*_INFERENCE, "response_not_found", "method_not_allowed"),
    "engine": (*_INFERENCE, "route_not_forwarded", "method_not_allowed"),
    "engine-response": (
        *_INFERENCE,
        "response_not_found",
        "route_not_forwarded",
        "method_not_allowed",
    ),
    "models": (*_CALLER, "card_not_found", "method_not_allowed"),
    "model": (
        *_CALLER,
        "invalid_request",
        "key_not_allowed",
        "model_not_found",
        "card_not_found",
        "method_not_allowed",
    ),
    "numbers": (*_CALLER, "method_not_allowed"),
    "open": ("internal_error", "method_not_allowed"),
    "here": ("internal_error", "not_found", "method_not_allowed"),
}
"""The groups of operations that may get the same."""

BEFORE_A_PLACE: Final[tuple[tuple[int, str, str], ...]] = (
    (400, "invalid_request", "The request is not well-formed HTTP."),
    (408, "request_timeout", "The request head did not arrive in time."),
    (413, "request_too_large", "The request body is larger than the limit of 67108864 bytes."),
    (417, "invalid_request", "The only expectation met here is 100-continue."),
    (431, "invalid_request", "The request head is larger than it may be."),
    (505, "invalid_request", "Only HTTP/1.0 and HTTP/1.1 are spoken here."),
)
"""What the reader of HTTP refuses itself (gateway/http), at any address."""

_SENTENCES: Final[dict[Code, str]] = {
    "model_not_found": "There is no model 'my-model'.",
    "card_not_found": "There is no card 'gpu9' of the node 'local'.",
    "model_off": "The model 'my-model' is switched off.",
    "model_loading": "The model 'my-model' is still loading.",
    "no_capacity": "There is no room for the model 'my-model' now.",
    "start_failed": "The model 'my-model' could not be started.",
    "model_quarantined": "The model 'my-model' failed to start too often.",
    "queue_full": "Too many requests wait for the model 'my-model'.",
    "model_busy": "The model 'my-model' had no free place in time.",
    "card_kept": "The card is kept by somebody else.",
    "draining": "This gateway is shutting down; send the request again.",
    "yard_unavailable": "This gateway has not read the catalog yet.",
    "engine_error": "The engine gave no usable answer.",
    "invalid_api_key": "No API key was given.",
    "key_not_allowed": "The API key 'ci' may not use the model 'my-model'.",
    "key_may_not_activate": "The API key 'ci' may not start a model that is not running.",
    "rate_limit_exceeded": "The API key 'ci' is limited to 60 requests in 60 s.",
    "route_not_forwarded": "The gateway does not pass /slots on to engines.",
    "endpoint_not_supported": "The engine of the model 'my-model' has no such endpoint.",
    "response_not_found": "No engine is known to hold that response.",
    "not_found": "There is nothing at /nothing.",
    "method_not_allowed": "PUT is not answered here, only POST.",
    "invalid_request": "The request body is not valid JSON.",
    "request_too_large": "The request body is larger than the limit of 67108864 bytes.",
    "unsupported_media_type": "Content-Type 'text/csv' is not served here; send application/json.",
    "internal_error": "The gateway failed; the log says why.",
}

_STATUSES: Final[dict[int, str]] = {
    400: "The request cannot be read, or names no model.",
    401: "An API key is needed, and this is none.",
    403: "The key may not do that, or the route is closed.",
    404: "There is no such thing.",
    405: "The address is asked in another way.",
    408: "The request did not come in time.",
    413: "The body is too large.",
    415: "The body is of a kind that is not taken.",
    417: "An expectation that is not met.",
    429: "A limit of the key is reached.",
    431: "The head is too large.",
    500: "The gateway failed; its log says why.",
    501: "The model's engine has no such endpoint.",
    502: "The engine failed.",
    503: "Not now; the code says why.",
    505: "A version of HTTP that is not spoken.",
}

# Parts that are shared. ------------------------------------------------------------------------------------


def _ref(kind: str, name: str) -> Json:
    return {"$ref": f"#/components/{kind}/{name}"}


def _text(description: str, **more: Any) -> Json:
    return {"description": description, "schema": {"type": "string", **more}}


_COUNT: Final[Json] = {"type": "integer", "minimum": 0}

HEADERS: Final[dict[str, Json]] = {
    "x-request-id": _text("The id of this request: the client's own where it gave one."),
    "request-id": _text("The same, where Anthropic's clients look."),
    "retry-after": {
        "description": "Seconds after which it is worth asking again.",
        "schema": {"type": "integer", "minimum": RETRY_MIN_S, "maximum": RETRY_MAX_S},
    },
    "x-should-retry": _text("Whether a client should ask again by itself.", enum=["true", "false"]),
    "accept-encoding": _text("The compressions of a body that are understood."),
    "www-authenticate": _text("How a key is presented."),
    "allow": _text("The methods that are answered here."),
    "x-yard-model": _text("The model's name in the catalog, percent-encoded."),
    "x-yard-replica": _text("The replica that answered."),
    "x-yard-why": _text("Why it was that one.", enum=list(get_args(Why))),
    "x-yard-waited-ms": {
        "description": "How long the request waited for its model or its turn, in milliseconds.",
        "schema": _COUNT,
    },
    "x-yard-adapter": _text(
        "How the adapter was had.", enum=["hit", "joined", "loaded", "unpinned"]
    ),
    "x-yard-loading": _text("The stream began while its model loads.", enum=["stream"]),
    "x-ratelimit-limit-requests": {"description": "The key's `rpm`.", "schema": _COUNT},
    "x-ratelimit-remaining-requests": {"description": "Left of it.", "schema": _COUNT},
    "x-ratelimit-reset-requests": _text("Until all of it is free again, as `1m0s`."),
    "x-ratelimit-limit-tokens": {"description": "The key's `tpm`.", "schema": _COUNT},
    "x-ratelimit-remaining-tokens": {"description": "Left of it.", "schema": _COUNT},
    "x-ratelimit-reset-tokens": _text("Until all of it is free again, as `1m0s`."),
}
_OF_REPLICA: Final = ("x-yard-model", "x-yard-replica", "x-yard-why", "x-yard-waited-ms")
_OF_LIMITS: Final = tuple(name for name in HEADERS if name.startswith("x-ratelimit-"))
_OF_ENGINE_ANSWER: Final = (*_OF_REPLICA, "x-yard-adapter", *_OF_LIMITS)


def _on(form: EnvelopeName) -> tuple[str, ...]:
    """On every answer at places of this form."""
    return ("x-request-id", "request-id") if form == "anthropic" else ("x-request-id",)


def _parameter(name: str, place: str, description: str, **schema: Any) -> Json:
    return {
        "name": name,
        "in": place,
        "description": description,
        "schema": {"type": "string", **schema},
    }


_REQUEST_ID: Final = _parameter(
    "x-request-id", "header", "Becomes the id of this request.", pattern="^[A-Za-z0-9._:-]{1,128}$"
)
PARAMETERS: Final[dict[str, Json]] = {
    "request-id": _REQUEST_ID,
    "traceparent": _parameter("traceparent", "header", "The trace that this request is part of."),
    "session": _parameter(
        "x-yard-session", "header", "Requests of a session go to one replica while it is free."
    ),
    "session-id": _parameter("x-session-id", "header", "The same as `x-yard-session`."),
    "priority": _parameter(
        "x-yard-priority",
        "header",
        "Lowers the key's priority for this request; it never raises it.",
        enum=list(CLASSES),
    ),
    "loading": _parameter(
        "loading",
        "query",
        "Of a stream: its head goes out while the model loads, and comments say how far that is.",
        enum=["stream"],
    ),
    "loading-header": _parameter(
        "x-yard-loading", "header", "The same as the parameter `loading`.", enum=["stream"]
    ),
    "model": _parameter("model", "query", "The model, where there is no body to name it."),
}

_ANTHROPIC: Final[Json] = {
    "type": "object",
    "description": "What Anthropic's clients read; `code` is the gateway's own.",
    "required": ["type", "error", "request_id"],
    "properties": {
        "type": {"const": "error"},
        "error": {
            "type": "object",
            "required": ["type", "message"],
            "properties": {
                "type": {
                    "type": "string",
                    "enum": sorted({anthropic_type(code) for code in (*range(400, 600),)}),
                },
                "message": {"type": "string"},
                "code": {"type": "string"},
            },
        },
        "request_id": {"type": "string"},
    },
}
_OF_ENGINE: Final[dict[EnvelopeName, Json]] = {
    "openai": {
        "type": "object",
        "description": "An engine's own error, passed on as it came where it has this form.",
        "required": ["error"],
        "properties": {
            "error": {
                "type": "object",
                "required": ["message"],
                "properties": {"message": {"type": "string"}},
            }
        },
    },
    "anthropic": {
        "type": "object",
        "description": "An engine's own error, passed on as it came where it has this form.",
        "required": ["type", "error"],
        "properties": {"type": {"const": "error"}, "error": {"type": "object"}},
    },
}
_ERROR: Final[dict[EnvelopeName, str]] = {"openai": "ErrorBody", "anthropic": "AnthropicError"}
_ENGINE_ERROR: Final[dict[EnvelopeName, str]] = {
    "openai": "EngineError",
    "anthropic": "AnthropicEngineError",
}


def _schemas() -> Json:
    _, own = msgspec.json.schema_components(
        (ErrorBody, status.ModelCard, status.ModelList, status.Readiness),
        ref_template="#/components/schemas/{name}",
    )
    listed: Json = own["ModelList"]
    listed["properties"]["models"] = {
        "type": "array",
        "description": "The same as llama.cpp and Ollama list their models.",
        "items": {"type": "object", "required": ["name", "model"]},
    }
    found: Json = dict(sorted(own.items()))
    found["AnthropicError"] = _ANTHROPIC
    for name, schema in _OF_ENGINE.items():
        found[_ENGINE_ERROR[name]] = schema
    return found


# Refusals. -------------------------------------------------------------------------------------------------


def _error_example(
    form: EnvelopeName, code_status: int, code: str, message: str, type: str | None
) -> Json:
    body = envelope(form, "req-1").body(code_status, code, message, type=type)
    return {"summary": message, "value": msgspec.json.decode(body)}


def _headers(names: Iterable[str]) -> Json:
    return {name: _ref("headers", name) for name in names}


def _refusals(form: EnvelopeName, codes: tuple[Code, ...], *, relayed: bool) -> dict[str, Json]:
    """The refusals of one group by their status, each with all its codes."""
    examples: dict[int, Json] = {}
    more: dict[int, list[str]] = {}
    for code in codes:
        row = CODES[code]
        examples.setdefault(row.status, {})[code] = _error_example(
            form, row.status, code, _SENTENCES[code], row.type
        )
        headers = more.setdefault(row.status, [])
        headers += ["x-should-retry"] if row.should_retry is not None else []
        headers += ["retry-after"] if row.retry != "none" else []
    more.get(401, []).append("www-authenticate")
    more.get(405, []).append("allow")
    more.get(415, []).append("accept-encoding")
    # An engine's own error has the status of one of ours, and comes with what is told of its replica.
    told = _on(form) + (_OF_ENGINE_ANSWER if relayed else ("x-yard-waited-ms",))
    early: set[int] = set()
    for code_status, code, message in BEFORE_A_PLACE:
        of_status = examples.setdefault(code_status, {})
        if code not in of_status:
            of_status[code] = _error_example(form, code_status, code, message, None)
        early.add(code_status)
    found: dict[str, Json] = {}
    for code_status in sorted(examples):
        may_be = [_ref("schemas", _ERROR[form])]
        if code_status in early and form != "openai":
            # Before the address is known an error has the form that most clients read.
            may_be.append(_ref("schemas", _ERROR["openai"]))
        if relayed:
            may_be.append(_ref("schemas", _ENGINE_ERROR[form]))
        names = [*told, *dict.fromkeys(more.get(code_status, []))]
        found[str(code_status)] = {
            "description": _STATUSES[code_status],
            "headers": _headers(names),
            "content": {
                _JSON: {
                    "schema": may_be[0] if len(may_be) == 1 else {"anyOf": may_be},
                    "examples": examples[code_status],
                }
            },
        }
    if relayed:
        for kind, code_status in (("4XX", 422), ("5XX", 500)):
            rewritten = _error_example(
                form, code_status, "engine_error", "The input is too long.", None
            )
            found[kind] = {
                "description": "The engine's own error: as it came where it has this form, else `engine_error`.",
                "headers": _headers(told),
                "content": {
                    _JSON: {
                        "schema": _ref("schemas", _ENGINE_ERROR[form]),
                        "examples": {"engine_error": rewritten},
                    }
                },
            }
    return found


class _Responses:
    """Responses of all operations, each once among the document's components."""

    def __init__(self) -> None:
        self.components: dict[str, Json] = {}
        self._names: dict[bytes, str] = {}

    def named(self, name: str, response: Json) -> Json:
        """A reference to it, under this name or the one it has already."""
        known = self._names.setdefault(msgspec.json.encode(response), name)
        self.components.setdefault(known, response)
        return _ref("responses", known)

    def of(self, group: str, form: EnvelopeName = "openai", *, relayed: bool = False) -> Json:
        """The refusals of a group by their status."""
        found = _refusals(form, CODES_OF[group], relayed=relayed)
        return {s: self.named(f"{group}-{form}-{s}", response) for s, response in found.items()}


# Operations. -----------------------------------------------------------------------------------------------

_KEYS: Final[list[Json]] = [{"bearer": []}, {"x-api-key": []}, {"api-key": []}]
_OPEN: Final[list[Json]] = []
_OPEN_HERE: Final[list[Json]] = [{}, *_KEYS]
"""Of what this machine asks without a key."""

_OWN_SERVER: Final[list[Json]] = [{"url": "/"}]
_ANSWERS: Final[dict[Answered, tuple[str, ...]]] = {
    "json": (_JSON,),
    "stream": (_JSON, _EVENTS),
    "text": (_JSON, "text/plain", _EVENTS),
    "sound": ("audio/*", "application/octet-stream", _JSON, _EVENTS),
}


def _answered(shape: Shape, form: EnvelopeName) -> Json:
    # Whatever is in it is the engine's: a schema would be a promise of somebody else.
    content: Json = {kind: {} for kind in _ANSWERS[shape.answered]}
    names = [*_on(form), *_OF_ENGINE_ANSWER]
    if shape.answered in ("stream", "text"):
        names.append("x-yard-loading")
    return {
        "description": "The engine's answer; its other headers and its body are passed on.",
        "headers": _headers(names),
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
    content: Json = {_JSON: {"schema": schema, "example": example}}
    if form:
        content["multipart/form-data"] = {"schema": schema}
    return {"required": not named, "content": content}


def _operation_id(method: str, path: str) -> str:
    words = "".join(c if c.isalnum() else " " for c in path).split()
    return "_".join((method, *words))


def _relayed(
    path: str, method: str, responses: _Responses, *, form: bool = False, below: str = ""
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
        "parameters": [_ref("parameters", name) for name in names],
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
        "parameters": [_ref("parameters", "request-id"), *parameters],
        "responses": {"200": answer, **refusals},
    }
    if security is not None:
        operation["security"] = security
    return operation


def _is(description: str, schema: Json, kind: str = _JSON) -> Json:
    return {
        "description": description,
        "headers": _headers(("x-request-id",)),
        "content": {kind: {"schema": schema}},
    }


def _own_paths(responses: _Responses) -> Json:
    """What the gateway answers itself."""
    listed = _is("How each model stands.", _ref("schemas", "ModelList"))
    card = _is("How it stands.", _ref("schemas", "ModelCard"))
    name = {
        "name": "model",
        "in": "path",
        "required": True,
        "description": "A model, an alias or an adapter; a slash in it may stand as it is.",
        "schema": {"type": "string", "minLength": 1},
    }
    wanted = _parameter("request", "query", "The id of a request, as its answer told it.")
    ready = _ref("schemas", "Readiness")
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


def _inference_paths(responses: _Responses) -> Json:
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
    responses = _Responses()
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
            "schemas": _schemas(),
            "headers": HEADERS,
            "parameters": PARAMETERS,
            "responses": dict(sorted(responses.components.items())),
        },
    }
