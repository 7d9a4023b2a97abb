"""Says which refusals each kind of operation may get, for the gateway's OpenAPI document, with a body for each code.

The codes, their statuses and their headers are those of the table of answers; both forms are written as answers are. Pure.
"""

from typing import Final

import msgspec

from gateway.domain.answers import CODES, Code
from gateway.domain.envelopes import envelope
from gateway.domain.openapi_parts import (
    ENGINE_ERROR,
    ERROR,
    JSON,
    OF_ENGINE_ANSWER,
    headers,
    on_every,
    ref,
)
from gateway.domain.places import EnvelopeName
from gateway.domain.requestshapes import Json

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


def _error_example(
    form: EnvelopeName, code_status: int, code: str, message: str, type: str | None
) -> Json:
    body = envelope(form, "req-1").body(code_status, code, message, type=type)
    return {"summary": message, "value": msgspec.json.decode(body)}


def _refusals(form: EnvelopeName, codes: tuple[Code, ...], *, relayed: bool) -> dict[str, Json]:
    """The refusals of one group by their status, each with all its codes."""
    examples: dict[int, Json] = {}
    more: dict[int, list[str]] = {}
    for code in codes:
        row = CODES[code]
        examples.setdefault(row.status, {})[code] = _error_example(
            form, row.status, code, _SENTENCES[code], row.type
        )
        said = more.setdefault(row.status, [])
        said += ["x-should-retry"] if row.should_retry is not None else []
        said += ["retry-after"] if row.retry != "none" else []
    more.get(401, []).append("www-authenticate")
    more.get(405, []).append("allow")
    more.get(415, []).append("accept-encoding")
    # An engine's own error has the status of one of ours, and comes with what is told of its replica.
    told = on_every(form) + (OF_ENGINE_ANSWER if relayed else ("x-yard-waited-ms",))
    early: set[int] = set()
    for code_status, code, message in BEFORE_A_PLACE:
        of_status = examples.setdefault(code_status, {})
        if code not in of_status:
            of_status[code] = _error_example(form, code_status, code, message, None)
        early.add(code_status)
    found: dict[str, Json] = {}
    for code_status in sorted(examples):
        may_be = [ref("schemas", ERROR[form])]
        if code_status in early and form != "openai":
            # Before the address is known an error has the form that most clients read.
            may_be.append(ref("schemas", ERROR["openai"]))
        if relayed:
            may_be.append(ref("schemas", ENGINE_ERROR[form]))
        names = [*told, *dict.fromkeys(more.get(code_status, []))]
        found[str(code_status)] = {
            "description": _STATUSES[code_status],
            "headers": headers(names),
            "content": {
                JSON: {
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
                "headers": headers(told),
                "content": {
                    JSON: {
                        "schema": ref("schemas", ENGINE_ERROR[form]),
                        "examples": {"engine_error": rewritten},
                    }
                },
            }
    return found


class Responses:
    """Responses of all operations, each once among the document's components."""

    def __init__(self) -> None:
        self.components: dict[str, Json] = {}
        self._names: dict[bytes, str] = {}

    def named(self, name: str, response: Json) -> Json:
        """A reference to it, under this name or the one it has already."""
        known = self._names.setdefault(msgspec.json.encode(response), name)
        self.components.setdefault(known, response)
        return ref("responses", known)

    def of(self, group: str, form: EnvelopeName = "openai", *, relayed: bool = False) -> Json:
        """The refusals of a group by their status."""
        found = _refusals(form, CODES_OF[group], relayed=relayed)
        return {s: self.named(f"{group}-{form}-{s}", response) for s, response in found.items()}
