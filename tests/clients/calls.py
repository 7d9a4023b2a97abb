"""Lists the requests that curl and a page in a browser make: every endpoint on each engine, and every refusal.

It says what is asked and what must come, and asks nothing itself. That no endpoint and no code is missing is
checked against the gateway's own tables in tests/system/test_clients.py.
"""

import gzip
import json
from hashlib import sha256
from typing import Any, Final, Literal

from msgspec import Struct, field

BODY_LIMIT: Final = 64 * 1024
"""`gateway.body_limit_bytes` of the yard, small so that a body over it is soon made."""

LLAMACPP: Final = "smollm2"
SCRIPTED: Final = "scripted"
ALIAS: Final = "org/scripted"
FRAIL: Final = {name: f"frail-{name}" for name in ("fetch", "openai", "anthropic")}
"""Models whose engines fail when told, one for each client that asks at the same time: a replica that failed is
left out for a moment."""

IN_LINE: Final = 4
"""`gateway.waiting_requests` of the yard: more than there are clients, and few."""

Key = Literal["all", "narrow", "passive", "spent", "revoked", "wrong", "none"]
"""Which key a request presents: one that may all, one for the model smollm2 alone, one that may start nothing, one
whose limit is used up, one that is revoked, one of which the secret is another, or none at all."""


class File(Struct, frozen=True, kw_only=True):
    """A file as it lies beside the client."""

    name: str
    content: bytes
    type: str = "application/octet-stream"


class Call(Struct, frozen=True, kw_only=True):
    """One request and what must come of it.

    `json`, `form` or `file` is its body. `status`, `code` of the error and every text of `has` must be in the answer,
    each of `shows` must be among its headers. `busy` requests run or wait at the model `busy` meanwhile.
    """

    title: str
    path: str
    method: str = "POST"
    json: dict[str, Any] | None = None
    form: tuple[tuple[str, str | File], ...] = ()
    file: File | None = None
    headers: dict[str, str] = field(default_factory=dict)
    key: Key = "all"
    status: int = 200
    code: str = ""
    has: tuple[str, ...] = ()
    shows: tuple[str, ...] = ()
    busy: int = 0


def hello(model: str, **more: Any) -> dict[str, Any]:
    return {"model": model, "messages": [{"role": "user", "content": "Say hello."}], **more}


SOUND: Final = File(name="größe.wav", content=bytes(range(256)) * 8, type="audio/wav")
PICTURE: Final = File(
    name="picture.png", content=b"\x89PNG\r\n\x1a\n" + bytes(64), type="image/png"
)
PACKED: Final = File(
    name="body.gz", content=gzip.compress(json.dumps(hello(SCRIPTED)).encode(), mtime=0)
)
LARGE: Final = File(name="large.json", content=json.dumps(hello("x" * BODY_LIMIT)).encode())
BOMB: Final = File(name="bomb.gz", content=gzip.compress(bytes(1 << 22), mtime=0))
NOT_JSON: Final = File(name="not.json", content=b'{"model": "scripted"')
GZIP: Final = {"Content-Type": "application/json", "Content-Encoding": "gzip"}
JSON: Final = {"Content-Type": "application/json"}
ANTHROPIC: Final = {"anthropic-version": "2023-06-01"}


def _generating(model: str) -> tuple[Call, ...]:
    """What both engines have."""
    eight: dict[str, Any] = {"max_tokens": 8, "temperature": 0}
    streamed: dict[str, Any] = {**eight, "stream": True}
    named = f'"model":"{model}"'
    return (
        Call(
            title="chat",
            path="/v1/chat/completions",
            json=hello(model, **eight),
            has=('"chat.completion"', '"usage"', named),
            shows=("x-request-id", "x-yard-replica"),
        ),
        Call(
            title="chat, as a stream",
            path="/v1/chat/completions",
            json=hello(model, **streamed),
            has=("data: ", '"chat.completion.chunk"', named, "data: [DONE]"),
        ),
        Call(
            title="a completion",
            path="/v1/completions",
            json={"model": model, "prompt": "Once upon a time", **eight},
            has=('"text_completion"', named),
        ),
        Call(
            title="a completion, as a stream",
            path="/v1/completions",
            json={"model": model, "prompt": "Once upon a time", **streamed},
            has=("data: [DONE]",),
        ),
        Call(
            title="embeddings",
            path="/v1/embeddings",
            json={"model": model, "input": ["hello", "world"]},
            has=('"embedding"', named),
        ),
        Call(
            title="a response",
            path="/v1/responses",
            json={"model": model, "input": "Say hello.", "max_output_tokens": 8},
            has=('"output_text"', named),
        ),
        Call(
            title="a response, as a stream",
            path="/v1/responses",
            json={"model": model, "input": "Say hello.", "max_output_tokens": 8, "stream": True},
            has=("event: response.created", "event: response.completed"),
        ),
        Call(
            title="how long an input is",
            path="/v1/responses/input_tokens",
            json={"model": model, "input": "Say hello."},
            has=('"input_tokens"',),
        ),
        Call(
            title="a message",
            path="/v1/messages",
            headers=ANTHROPIC,
            json=hello(model, **eight),
            has=('"type":"message"', '"output_tokens"', named),
        ),
        Call(
            title="a message, as a stream",
            path="/v1/messages",
            headers=ANTHROPIC,
            json=hello(model, **streamed),
            has=("event: message_start", "event: message_stop"),
        ),
        Call(
            title="how long a message is",
            path="/v1/messages/count_tokens",
            headers=ANTHROPIC,
            json=hello(model),
            has=('"input_tokens"',),
        ),
        Call(
            title="documents in order",
            path="/v1/rerank",
            json={"model": model, "query": "a pet", "documents": ["a cat", "a stone"]},
            has=('"relevance_score"',),
        ),
        Call(
            title="the same without /v1",
            path="/rerank",
            json={"model": model, "query": "a pet", "documents": ["a cat", "a stone"]},
            has=('"relevance_score"',),
        ),
        Call(
            title="tokens of a text",
            path="/tokenize",
            json={"model": model, "content": "hello"},
            has=('"tokens"',),
        ),
        Call(
            title="the text of tokens",
            path="/detokenize",
            json={"model": model, "tokens": [104, 105]},
            has=('"content"',),
        ),
    )


ON_LLAMACPP: Final = (
    *_generating(LLAMACPP),
    Call(
        title="llama.cpp's own completion",
        path=f"/engines/{LLAMACPP}/completion",
        json={"prompt": "Once upon a time", "n_predict": 8, "temperature": 0},
        has=('"content"',),
    ),
    Call(
        title="llama.cpp's own template",
        path=f"/engines/{LLAMACPP}/apply-template",
        json=hello(LLAMACPP),
        has=('"prompt"',),
    ),
    Call(
        title="what it has not",
        path="/v1/audio/speech",
        json={"model": LLAMACPP, "input": "hello", "voice": "alloy"},
        status=501,
        code="endpoint_not_supported",
    ),
)
"""llama.cpp keeps no responses, scores nothing and neither hears, speaks nor draws without more files."""

_SPOKEN: Final = {"model": SCRIPTED, "input": "hello", "voice": "alloy"}
ON_SCRIPTED: Final = (
    *_generating(SCRIPTED),
    Call(
        title="under an alias",
        path="/v1/chat/completions",
        json=hello(ALIAS, max_tokens=2),
        has=(f'"model":"{ALIAS}"',),
    ),
    Call(
        title="its model in the address",
        path="/engines/org%2Fscripted/v1/chat/completions",
        json={"messages": [{"role": "user", "content": "Say hello."}]},
        has=(f'"model":"{ALIAS}"',),
    ),
    Call(
        title="a card's own base URL",
        path="/cards/local/cpu/v1/chat/completions",
        json=hello(SCRIPTED, max_tokens=2),
        has=('"w0 w1 "',),
    ),
    Call(
        title="a compressed body",
        path="/v1/chat/completions",
        headers=GZIP,
        file=PACKED,
        has=('"chat.completion"',),
    ),
    Call(
        title="documents in order, the second version",
        path="/v2/rerank",
        json={"model": SCRIPTED, "query": "a pet", "documents": ["a cat", "a stone"]},
        has=('"relevance_score"',),
    ),
    Call(
        title="a score",
        path="/v1/score",
        json={"model": SCRIPTED, "text_1": "a pet", "text_2": ["a cat", "a stone"]},
        has=('"score"',),
    ),
    Call(
        title="the same without /v1",
        path="/score",
        json={"model": SCRIPTED, "text_1": "a pet", "text_2": ["a cat", "a stone"]},
        has=('"score"',),
    ),
    Call(
        title="a transcription, the file before the model",
        path="/v1/audio/transcriptions",
        form=(("file", SOUND), ("model", SCRIPTED)),
        has=(f"wav 2048 {sha256(SOUND.content).hexdigest()}",),
    ),
    Call(
        title="a translation",
        path="/v1/audio/translations",
        form=(("model", SCRIPTED), ("file", SOUND)),
        has=("2048",),
    ),
    Call(title="speech", path="/v1/audio/speech", json=_SPOKEN),
    Call(
        title="a picture",
        path="/v1/images/generations",
        json={"model": SCRIPTED, "prompt": "a cat"},
        has=('"b64_json"',),
    ),
    Call(
        title="a picture changed",
        path="/v1/images/edits",
        form=(("model", SCRIPTED), ("prompt", "a hat"), ("image", PICTURE)),
        has=('"b64_json"',),
    ),
)

OF_THE_GATEWAY: Final = (
    Call(title="the models", method="GET", path="/v1/models", has=('"smollm2"', '"scripted"')),
    Call(title="the same", method="GET", path="/models/", has=('"smollm2"', '"scripted"')),
    Call(title="its head", method="HEAD", path="/v1/models"),
    Call(
        title="what a key may use",
        method="GET",
        path="/v1/models",
        key="narrow",
        has=('"smollm2"',),
    ),
    Call(title="a model", method="GET", path=f"/v1/models/{SCRIPTED}", has=('"scripted"',)),
    Call(title="whether it lives", method="GET", path="/healthz", key="none"),
    Call(title="whether it serves", method="GET", path="/readyz", key="none"),
    Call(
        title="what may be asked",
        method="OPTIONS",
        path="/v1/chat/completions",
        key="none",
        status=204,
    ),
)

RESPONSES: Final = (
    Call(title="a kept response", method="GET", path="/v1/responses/{id}", has=('"completed"',)),
    Call(
        title="its input",
        method="GET",
        path="/v1/responses/{id}/input_items",
        has=('"list"',),
    ),
    Call(title="cancelled", path="/v1/responses/{id}/cancel", has=('"cancelled"',)),
    Call(title="deleted", method="DELETE", path="/v1/responses/{id}", has=('"deleted":true',)),
    Call(
        title="asked for again",
        method="GET",
        path="/v1/responses/{id}",
        status=404,
        has=("not found",),
    ),
)
"""Of a response that was made just before; `{id}` is its id."""


def refused(title: str, status: int, code: str, **more: Any) -> Call:
    """A chat that is refused, unless `more` says otherwise."""
    body = {} if {"json", "file", "form"} & more.keys() else {"json": hello(SCRIPTED)}
    return Call(
        title=title,
        status=status,
        code=code,
        **{"path": "/v1/chat/completions", **body, **more},
    )


REFUSALS: Final = (
    refused("no key", 401, "invalid_api_key", key="none"),
    refused("a key with another secret", 401, "invalid_api_key", key="wrong"),
    refused("a revoked key", 401, "invalid_api_key", key="revoked", has=("revoked",)),
    refused("a key for another model", 403, "key_not_allowed", key="narrow"),
    refused(
        "a key that may start nothing",
        403,
        "key_may_not_activate",
        key="passive",
        json=hello("asleep"),
    ),
    refused(
        "a limit that is used up",
        429,
        "rate_limit_exceeded",
        key="spent",
        shows=("retry-after", "x-ratelimit-limit-requests", "x-ratelimit-reset-requests"),
    ),
    refused("no such model", 404, "model_not_found", json=hello("nobody")),
    refused("no such card", 404, "card_not_found", path="/cards/local/gpu9/v1/chat/completions"),
    refused(
        "no such response",
        404,
        "response_not_found",
        method="GET",
        path="/v1/responses/resp_none",
        json=None,
    ),
    refused("no such place", 404, "not_found", method="GET", path="/cards/local", json=None),
    refused(
        "a place of OpenAI's that is none here", 403, "route_not_forwarded", path="/v1/moderations"
    ),
    refused(
        "another method", 405, "method_not_allowed", method="GET", path="/v1/embeddings", json=None
    ),
    refused("no model is named", 400, "invalid_request", json={"messages": []}),
    refused("no JSON", 400, "invalid_request", headers=JSON, file=NOT_JSON),
    refused(
        "two models in a form",
        400,
        "invalid_request",
        path="/v1/audio/transcriptions",
        form=(("model", SCRIPTED), ("model", LLAMACPP), ("file", SOUND)),
    ),
    refused("a body over the cap", 413, "request_too_large", headers=JSON, file=LARGE),
    refused("a body that unpacks to more", 413, "request_too_large", headers=GZIP, file=BOMB),
    refused(
        "a compression nobody here knows",
        415,
        "unsupported_media_type",
        headers={**JSON, "Content-Encoding": "br"},
        file=PACKED,
    ),
    refused("an engine's own door", 403, "route_not_forwarded", path=f"/engines/{LLAMACPP}/slots"),
    refused(
        "another engine's door",
        403,
        "route_not_forwarded",
        path=f"/engines/{SCRIPTED}/classify",
        json={"input": "hello"},
    ),
    refused(
        "what the engine has not",
        501,
        "endpoint_not_supported",
        path="/v1/images/generations",
        json={"model": LLAMACPP, "prompt": "a cat"},
        shows=("x-should-retry",),
    ),
    refused("a model that is off", 503, "model_off", json=hello("off")),
    refused("a model larger than every card", 503, "no_capacity", json=hello("vast")),
    refused(
        "a model that loads for longer than one waits",
        503,
        "model_loading",
        json=hello("cold"),
        shows=("retry-after", "x-should-retry"),
    ),
    refused("a model whose engine dies", 503, "start_failed", json=hello("dying")),
    refused("a model that others use", 503, "model_busy", json=hello("busy"), busy=1),
    refused("and for which others wait", 503, "queue_full", json=hello("busy"), busy=1 + IN_LINE),
    refused(
        "an engine that hangs up",
        502,
        "engine_error",
        json=hello(FRAIL["fetch"], script={"cut_after_tokens": 1}),
    ),
    refused(
        "an engine that says 500",
        500,
        "",
        json=hello(FRAIL["fetch"], script={"status": 500}),
        has=('"error"', "scripted failure"),
    ),
    refused("an engine that says 400", 400, "", json=hello(FRAIL["fetch"], script={"no_such": 1})),
    Call(
        title="an engine that hangs up in a stream",
        path="/v1/chat/completions",
        json=hello(FRAIL["fetch"], stream=True, script={"cut_after_tokens": 2}),
        has=('"content":"w1 "', 'data: {"error"', '"engine_error"'),
    ),
    Call(
        title="a stream that is told of the load, and refused in the end",
        path="/v1/chat/completions?loading=stream",
        json=hello("cold", stream=True),
        has=(": loading step=", 'data: {"error"', '"model_loading"'),
        shows=("x-yard-loading",),
    ),
)

_MESSAGES: Final = {"path": "/v1/messages", "headers": ANTHROPIC}
IN_ANTHROPICS_FORM: Final = (
    refused(
        "no key", 401, "invalid_api_key", key="none", has=('"authentication_error"',), **_MESSAGES
    ),
    refused(
        "a key for another model",
        403,
        "key_not_allowed",
        key="narrow",
        has=('"permission_error"',),
        **_MESSAGES,
    ),
    refused(
        "no such model",
        404,
        "model_not_found",
        json=hello("nobody"),
        has=('"not_found_error"', '"request_id"'),
        shows=("request-id",),
        **_MESSAGES,
    ),
    refused(
        "a limit that is used up",
        429,
        "rate_limit_exceeded",
        key="spent",
        has=('"rate_limit_error"',),
        **_MESSAGES,
    ),
    refused(
        "a model that is off",
        503,
        "model_off",
        json=hello("off"),
        has=('"overloaded_error"',),
        **_MESSAGES,
    ),
    Call(
        title="an engine that hangs up in a stream",
        json=hello(FRAIL["fetch"], stream=True, script={"cut_after_tokens": 2}),
        has=("event: error", '"type":"error"', '"api_error"'),
        **_MESSAGES,
    ),
)

SECTIONS: Final = (
    ("On llama.cpp", ON_LLAMACPP),
    ("On the scripted engine", ON_SCRIPTED),
    ("A response by its id", RESPONSES),
    ("The gateway's own", OF_THE_GATEWAY),
    ("Refusals", REFUSALS),
    ("Refusals in Anthropic's form", IN_ANTHROPICS_FORM),
)

ELSEWHERE: Final = {
    "model_quarantined": "after several failed starts in a row",
    "card_kept": "a virtual machine or a person's lease keeps the card",
    "draining": "the gateway is being stopped",
    "yard_unavailable": "NATS or the control plane is away",
    "internal_error": "a fault of the gateway's own; none is known",
}
"""Codes no client can bring about in a yard that is well: when they are said."""
