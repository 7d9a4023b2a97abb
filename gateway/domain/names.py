"""Decides what a method and a path mean to this gateway, and which model id a path spells.

Matching is on the raw path, exactly but for one slash at its end: an engine is only ever sent one of the paths of
`places.ENGINE_PATHS` or `places.BY_ID`, so no spelling of a management route (`//slots`, `%73lots`, `/v1/../slots`)
can reach one, under a card's or an engine's base URL neither. Pure.
"""

from collections.abc import Mapping
from functools import lru_cache
from typing import Final, Literal
from urllib.parse import unquote_to_bytes

from msgspec import Struct, structs

from gateway.domain.cards import CardRef
from gateway.domain.places import (
    BY_ID,
    ENGINE_PATHS,
    FORMS,
    INFERENCE,
    EnvelopeName,
    envelope_of,
    response_path,
)

Kind = Literal[
    "inference",
    "models",
    "model",
    "healthz",
    "readyz",
    "metrics",
    "timeline",
    "openapi",
    "preflight",
    "method_not_allowed",
    "route_not_forwarded",
    "bad_model_id",
    "bad_card_name",
    "not_found",
]

OPENAPI: Final = "/openapi.json"

_OWN: Final[dict[str, Kind]] = {
    "/v1/models": "models",
    # Where clients look whose base URL ends before /v1, as llama.cpp lets them.
    "/models": "models",
    "/healthz": "healthz",
    "/readyz": "readyz",
    "/metrics": "metrics",
    "/yard/timeline": "timeline",
    OPENAPI: "openapi",
}

_MODEL_PREFIX: Final = "/v1/models/"

_CARD_PREFIX: Final = "/cards/"

_ENGINE_PREFIX: Final = "/engines/"

LONGEST_KEPT: Final = 256
"""Characters of a path below a card or an engine whose meaning is remembered; clients ask the same few again and again."""

_OWN_ON_CARD: Final[dict[str, Kind]] = {"/v1/models": "models", "/models": "models"}
"""What of `_OWN` is answered under the base URL of a card too."""

MANAGEMENT: Final = frozenset(
    {
        "apply-template",
        "classify",
        "collective_rpc",
        "completion",
        "completions",
        "embedding",
        "embeddings",
        "engines",
        "infill",
        "inference",
        "invocations",
        "is_sleeping",
        "load",
        "load_lora_adapter",
        "lora-adapters",
        "models",
        "ping",
        "pooling",
        "props",
        "reranking",
        "reset_prefix_cache",
        "server_info",
        "shutdown",
        "sleep",
        "slots",
        "unload_lora_adapter",
        "wake_up",
    }
)
"""First segments of engines' own routes that are none of `INFERENCE`: told apart from a typo by 403 instead of 404."""


class Place(Struct, frozen=True, kw_only=True):
    """What was asked for. `model` is the decoded id of `/v1/models/<id>` or `/engines/<id>`, `allow` the methods of a 405.

    `path` is the inference path as replicas publish it, `target` the one to send where an id stands in it, `response`
    that id; `form`: the body may be multipart. `on` is the card whose base URL it was asked under, `envelope` whose
    errors are expected there.
    """

    kind: Kind
    model: str = ""
    allow: str = ""
    path: str = ""
    target: str = ""
    response: str = ""
    form: bool = False
    on: CardRef | None = None
    envelope: EnvelopeName = "openai"


_ALL: Final = {
    path: Place(kind="inference", path=path, form=path in FORMS, envelope=envelope_of(path))
    for path in ENGINE_PATHS
}
_PLAIN: Final = {path: _ALL[path] for path in INFERENCE}
_PREFLIGHT: Final = Place(kind="preflight")


def place_of(method: str, path: str) -> Place:
    """What `method` on the raw `path` (no query) means.

    1. OPTIONS on any path: a preflight
    2. an inference path: POST only. A slash at its end is no other path, and so with all that follow
    3. a path of the gateway's own: GET and HEAD only
    4. `/v1/models/<id>`: the id is everything behind, slashes included, percent-decoded once
    5. `/cards/<node>/<card>` before an inference path or a model list: that, on this card
    6. `/engines/<model>` before an inference path, of those that engines have besides too: that, of this model
    7. a path with the id of a response in it
    8. anything else below /v1, or a route engines have: not forwarded
    9. not found
    """
    if method == "OPTIONS":  # 1
        return _PREFLIGHT
    plain = _PLAIN.get(path)
    if plain is not None and method == "POST":  # 2
        return plain
    if len(path) > 1 and path.endswith("/"):
        path = path[:-1]
    if path.startswith(_CARD_PREFIX):  # 5
        # A long one is hardly a card's, and nobody shall fill memory with made-up ones.
        read = _on_card if len(path) <= LONGEST_KEPT else _on_card.__wrapped__
        return read(method, path)
    return _place_of(method, path, _OWN)


def _place_of(method: str, path: str, owned: Mapping[str, Kind]) -> Place:
    """All but 1 and 5 of `place_of`, with the own paths there are here."""
    asked = _inference(method, path, _PLAIN)
    if asked is not None:  # 2, 7
        return asked
    own = owned.get(path)
    if own is not None:
        if method not in ("GET", "HEAD"):
            return Place(kind="method_not_allowed", allow="GET, HEAD")
        return Place(kind=own)  # 3
    if path.startswith(_MODEL_PREFIX) and path != _MODEL_PREFIX:  # 4
        if method not in ("GET", "HEAD"):
            # DELETE /v1/models/<id> is OpenAI's way to remove a model: not through here.
            return Place(kind="method_not_allowed", allow="GET, HEAD")
        name = decode_model_id(path[len(_MODEL_PREFIX) :])
        return Place(kind="bad_model_id") if name is None else Place(kind="model", model=name)
    if path.startswith(_ENGINE_PREFIX):  # 6
        read = _of_engine if len(path) <= LONGEST_KEPT else _of_engine.__wrapped__
        return read(method, path)
    first = path.lstrip("/").split("/", 1)[0].lower()
    if first in ("v1", "v2") or first in MANAGEMENT:  # 8
        return Place(kind="route_not_forwarded", envelope=envelope_of(path))
    return Place(kind="not_found")  # 9


def _inference(method: str, path: str, known: Mapping[str, Place]) -> Place | None:
    """An inference path of those `known`, or one with an id in it; None: it is none."""
    found = known.get(path)
    if found is not None:
        if method == "POST":
            return found
        return Place(kind="method_not_allowed", allow="POST", envelope=found.envelope)
    by_id = response_path(path)
    if by_id is None:
        return None
    published, response = by_id
    methods = BY_ID[published]
    if method not in methods:
        return Place(kind="method_not_allowed", allow=", ".join(methods))
    return Place(kind="inference", path=published, target=path, response=response)


@lru_cache(maxsize=1024)
def _of_engine(method: str, path: str) -> Place:
    """What stands behind `/engines/<model>`: an inference path, and nothing else.

    The name is one segment, percent-decoded once; one that holds a slash spells it `%2F`.
    """
    parts = path.split("/", 3)
    inner = f"/{parts[3]}" if len(parts) == 4 else ""
    envelope = envelope_of(inner)
    found = _inference(method, inner, _ALL) if parts[2] else None
    if found is None:
        return Place(kind="route_not_forwarded", envelope=envelope)
    if found.kind != "inference":
        return found
    name = decode_model_id(parts[2])
    if name is None:
        return Place(kind="bad_model_id", envelope=envelope)
    return structs.replace(found, model=name)


@lru_cache(maxsize=1024)
def _on_card(method: str, path: str) -> Place:
    """What stands behind `/cards/<node>/<card>`, by the same rules as without it.

    Each name is one segment, percent-decoded once; a name that holds a slash spells it `%2F`. The
    gateway's own routes that tell nothing of a card are not there.
    """
    parts = path.split("/", 4)
    if len(parts) < 5 or not parts[2] or not parts[3]:
        return Place(kind="not_found")
    found = _place_of(method, f"/{parts[4]}", _OWN_ON_CARD)
    if found.kind not in ("inference", "models", "model"):
        return found
    node, card = decode_model_id(parts[2]), decode_model_id(parts[3])
    if node is None or card is None:
        return Place(kind="bad_card_name", envelope=found.envelope)
    return structs.replace(found, on=CardRef(node=node, card=card))


def decode_model_id(raw: str) -> str | None:
    """The id a path segment spells: `a%2Fb` and `a/b` are both `a/b`; None: not UTF-8, or empty."""
    try:
        # surrogateescape undoes a latin-1 or escaped reading of raw bytes on the request line.
        name = unquote_to_bytes(raw.encode("utf-8", "surrogateescape")).decode("utf-8")
    except UnicodeDecodeError:
        return None
    return name or None
