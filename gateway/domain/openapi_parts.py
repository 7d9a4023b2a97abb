"""Holds the parts that the gateway's OpenAPI document shares: headers, parameters, bodies of errors and models.

Each is made of the table that the program itself uses, where there is one. Pure.
"""

from collections.abc import Iterable
from typing import Any, Final, get_args

import msgspec

from gateway.domain import status
from gateway.domain.answers import RETRY_MAX_S, RETRY_MIN_S
from gateway.domain.envelopes import anthropic_type
from gateway.domain.error_bodies import ErrorBody
from gateway.domain.places import EnvelopeName
from gateway.domain.requestshapes import Json
from gateway.domain.routing import Why
from gateway.domain.turns import CLASSES

JSON: Final = "application/json"
EVENTS: Final = "text/event-stream"


def ref(kind: str, name: str) -> Json:
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
OF_ENGINE_ANSWER: Final = (*_OF_REPLICA, "x-yard-adapter", *_OF_LIMITS)


def on_every(form: EnvelopeName) -> tuple[str, ...]:
    """On every answer at places of this form."""
    return ("x-request-id", "request-id") if form == "anthropic" else ("x-request-id",)


def parameter(name: str, place: str, description: str, **schema: Any) -> Json:
    return {
        "name": name,
        "in": place,
        "description": description,
        "schema": {"type": "string", **schema},
    }


_REQUEST_ID: Final = parameter(
    "x-request-id", "header", "Becomes the id of this request.", pattern="^[A-Za-z0-9._:-]{1,128}$"
)
PARAMETERS: Final[dict[str, Json]] = {
    "request-id": _REQUEST_ID,
    "traceparent": parameter("traceparent", "header", "The trace that this request is part of."),
    "session": parameter(
        "x-yard-session", "header", "Requests of a session go to one replica while it is free."
    ),
    "session-id": parameter("x-session-id", "header", "The same as `x-yard-session`."),
    "priority": parameter(
        "x-yard-priority",
        "header",
        "Lowers the key's priority for this request; it never raises it.",
        enum=list(CLASSES),
    ),
    "loading": parameter(
        "loading",
        "query",
        "Of a stream: its head goes out while the model loads, and comments say how far that is.",
        enum=["stream"],
    ),
    "loading-header": parameter(
        "x-yard-loading", "header", "The same as the parameter `loading`.", enum=["stream"]
    ),
    "model": parameter("model", "query", "The model, where there is no body to name it."),
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
ERROR: Final[dict[EnvelopeName, str]] = {"openai": "ErrorBody", "anthropic": "AnthropicError"}
ENGINE_ERROR: Final[dict[EnvelopeName, str]] = {
    "openai": "EngineError",
    "anthropic": "AnthropicEngineError",
}


def schemas() -> Json:
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
        found[ENGINE_ERROR[name]] = schema
    return found


def headers(names: Iterable[str]) -> Json:
    return {name: ref("headers", name) for name in names}
