"""Lists the paths of engines that this gateway may ask, how each is asked, and whose errors it answers with.

A table and no more: what is not in it never reaches an engine, whatever its replica publishes. Pure.
"""

import re
from typing import Final, Literal

from msgspec import Struct

EnvelopeName = Literal["openai", "anthropic"]
"""Whose form a refusal has."""


class Endpoint(Struct, frozen=True, kw_only=True):
    """One path as replicas publish it. `form`: its body may be multipart/form-data instead of JSON.

    `own`: a client may ask for it directly; the others only below `/engines/<model>`.
    """

    path: str
    form: bool = False
    own: bool = True


RESPONSES: Final = "/v1/responses"
RESPONSE: Final = "/v1/responses/{id}"
"""Published by engines that keep their responses; with an id in it the path is asked by GET or DELETE."""

RESPONSE_CANCEL: Final = "/v1/responses/{id}/cancel"
RESPONSE_INPUTS: Final = "/v1/responses/{id}/input_items"

ENDPOINTS: Final = (
    Endpoint(path="/v1/chat/completions"),
    Endpoint(path="/v1/completions"),
    Endpoint(path="/v1/embeddings"),
    Endpoint(path=RESPONSES),
    Endpoint(path="/v1/responses/input_tokens"),
    Endpoint(path="/v1/messages"),
    Endpoint(path="/v1/messages/count_tokens"),
    Endpoint(path="/v1/rerank"),
    Endpoint(path="/rerank"),
    Endpoint(path="/v2/rerank"),
    Endpoint(path="/v1/score"),
    Endpoint(path="/score"),
    Endpoint(path="/v1/audio/transcriptions", form=True),
    Endpoint(path="/v1/audio/translations", form=True),
    Endpoint(path="/v1/audio/speech"),
    Endpoint(path="/v1/images/generations"),
    Endpoint(path="/v1/images/edits", form=True),
    Endpoint(path="/tokenize"),
    Endpoint(path="/detokenize"),
    # llama.cpp's own
    Endpoint(path="/completion", own=False),
    Endpoint(path="/embedding", own=False),
    Endpoint(path="/infill", own=False),
    Endpoint(path="/apply-template", own=False),
    Endpoint(path="/v1/chat/completions/input_tokens", own=False),
    # vLLM's own
    Endpoint(path="/pooling", own=False),
    Endpoint(path="/classify", own=False),
)
"""All are asked by POST."""

INFERENCE: Final = tuple(e.path for e in ENDPOINTS if e.own)
"""What a client may ask for directly; an engine gets it only if its replica publishes it too."""

ENGINE_PATHS: Final = tuple(e.path for e in ENDPOINTS)
"""The same with what is asked for below `/engines/<model>` alone."""

BY_ID: Final[dict[str, tuple[str, ...]]] = {
    RESPONSE: ("GET", "DELETE"),
    RESPONSE_CANCEL: ("POST",),
    RESPONSE_INPUTS: ("GET",),
}
"""Paths with the id of a response in them, and how they are asked."""

FORMS: Final = frozenset(e.path for e in ENDPOINTS if e.form)

OURS: Final = frozenset((*INFERENCE, *BY_ID))
"""Endpoints a client may expect of any gateway; an engine without one is told apart from a closed door."""

_RESPONSE_ID: Final = re.compile(
    r"/v1/responses/(?P<id>[A-Za-z0-9_-]{1,128})(?P<rest>/cancel|/input_items)?"
)
_RESTS: Final = {None: RESPONSE, "/cancel": RESPONSE_CANCEL, "/input_items": RESPONSE_INPUTS}


def response_path(path: str) -> tuple[str, str] | None:
    """The published path that `path` is with an id in it, and that id; None: it is none of them.

    An id of another alphabet is none of ours: what goes to an engine holds no escape and no dot.
    """
    found = _RESPONSE_ID.fullmatch(path)
    if found is None:
        return None
    return _RESTS[found["rest"]], found["id"]


def envelope_of(path: str) -> EnvelopeName:
    """Whose errors are answered at an engine's `path`: Anthropic's at and below `/v1/messages`."""
    below = path.startswith("/v1/messages/") or path == "/v1/messages"
    return "anthropic" if below else "openai"
