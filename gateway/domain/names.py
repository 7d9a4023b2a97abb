"""Decides what a method and a path mean to this gateway, and which model id a path spells.

Matching is on the raw path, exactly: an engine is only ever sent one of the paths in `INFERENCE`, so no
spelling of a management route (`//slots`, `%73lots`, `/v1/../slots`) can reach one, under a card's base URL
neither. Pure.
"""

from collections.abc import Mapping
from functools import lru_cache
from typing import Final, Literal
from urllib.parse import unquote_to_bytes

from msgspec import Struct

from gateway.domain.cards import CardRef

Kind = Literal[
    "inference",
    "models",
    "model",
    "healthz",
    "readyz",
    "metrics",
    "timeline",
    "preflight",
    "method_not_allowed",
    "route_not_forwarded",
    "bad_model_id",
    "bad_card_name",
    "not_found",
]

INFERENCE: Final = ("/v1/chat/completions", "/v1/completions", "/v1/embeddings")
"""What a client may ask for; an engine gets it only if its replica publishes it too."""

_OWN: Final[dict[str, Kind]] = {
    "/v1/models": "models",
    "/healthz": "healthz",
    "/readyz": "readyz",
    "/metrics": "metrics",
    "/yard/timeline": "timeline",
}

_MODEL_PREFIX: Final = "/v1/models/"

_CARD_PREFIX: Final = "/cards/"

LONGEST_KEPT: Final = 256
"""Characters of a path below a card whose meaning is remembered; clients ask the same few again and again."""

_OWN_ON_CARD: Final[dict[str, Kind]] = {"/v1/models": "models"}
"""What of `_OWN` is answered under the base URL of a card too."""

MANAGEMENT: Final = frozenset(
    {
        "apply-template",
        "collective_rpc",
        "completion",
        "completions",
        "detokenize",
        "embedding",
        "embeddings",
        "infill",
        "inference",
        "invocations",
        "is_sleeping",
        "load",
        "load_lora_adapter",
        "lora-adapters",
        "models",
        "ping",
        "props",
        "rerank",
        "reset_prefix_cache",
        "server_info",
        "shutdown",
        "sleep",
        "slots",
        "tokenize",
        "unload_lora_adapter",
        "wake_up",
    }
)
"""First segments of engines' own routes: told apart from a typo by 403 instead of 404."""


class Place(Struct, frozen=True, kw_only=True):
    """What was asked for. `model` is the decoded id of `/v1/models/<id>`, `allow` the methods of a 405.

    `path` is the inference path, `on` the card whose base URL it was asked under.
    """

    kind: Kind
    model: str = ""
    allow: str = ""
    path: str = ""
    on: CardRef | None = None


_PLAIN: Final = {path: Place(kind="inference", path=path) for path in INFERENCE}
_PREFLIGHT: Final = Place(kind="preflight")


def place_of(method: str, path: str) -> Place:
    """What `method` on the raw `path` (no query) means.

    1. OPTIONS on any path: a preflight
    2. an inference path: POST only
    3. a path of the gateway's own: GET and HEAD only
    4. `/v1/models/<id>`: the id is everything behind, slashes included, percent-decoded once
    5. `/cards/<node>/<card>` before an inference path or a model list: that, on this card
    6. anything else below /v1, or a route engines have: not forwarded
    7. not found
    """
    if method == "OPTIONS":  # 1
        return _PREFLIGHT
    plain = _PLAIN.get(path)
    if plain is not None:  # 2
        return plain if method == "POST" else Place(kind="method_not_allowed", allow="POST")
    if path.startswith(_CARD_PREFIX):  # 5
        # A long one is hardly a card's, and nobody shall fill memory with made-up ones.
        read = _on_card if len(path) <= LONGEST_KEPT else _on_card.__wrapped__
        return read(method, path)
    return _place_of(method, path, _OWN)


def _place_of(method: str, path: str, owned: Mapping[str, Kind]) -> Place:
    """3, 4, 6 and 7 of `place_of`, with the own paths there are here."""
    own = owned.get(path)
    if own is not None or (path.startswith(_MODEL_PREFIX) and path != _MODEL_PREFIX):
        if method not in ("GET", "HEAD"):
            # DELETE /v1/models/<id> is OpenAI's way to remove a model: not through here.
            return Place(kind="method_not_allowed", allow="GET, HEAD")
        if own is not None:  # 3
            return Place(kind=own)
        name = decode_model_id(path[len(_MODEL_PREFIX) :])  # 4
        return Place(kind="bad_model_id") if name is None else Place(kind="model", model=name)
    first = path.lstrip("/").split("/", 1)[0].lower()
    if first in ("v1", "v2") or first in MANAGEMENT:  # 6
        return Place(kind="route_not_forwarded")
    return Place(kind="not_found")  # 7


@lru_cache(maxsize=1024)
def _on_card(method: str, path: str) -> Place:
    """What stands behind `/cards/<node>/<card>`, by the same rules as without it.

    Each name is one segment, percent-decoded once; a name that holds a slash spells it `%2F`. The
    gateway's own routes that tell nothing of a card are not there.
    """
    parts = path.split("/", 4)
    if len(parts) < 5 or not parts[2] or not parts[3]:
        return Place(kind="not_found")
    inner = f"/{parts[4]}"
    plain = _PLAIN.get(inner)
    if plain is None:
        found = _place_of(method, inner, _OWN_ON_CARD)
        if found.kind not in ("models", "model"):
            return found
    elif method != "POST":
        return Place(kind="method_not_allowed", allow="POST")
    else:
        found = plain
    node, card = decode_model_id(parts[2]), decode_model_id(parts[3])
    if node is None or card is None:
        return Place(kind="bad_card_name")
    on = CardRef(node=node, card=card)
    return Place(kind=found.kind, model=found.model, path=found.path, on=on)


def decode_model_id(raw: str) -> str | None:
    """The id a path segment spells: `a%2Fb` and `a/b` are both `a/b`; None: not UTF-8, or empty."""
    try:
        # surrogateescape undoes a latin-1 or escaped reading of raw bytes on the request line.
        name = unquote_to_bytes(raw.encode("utf-8", "surrogateescape")).decode("utf-8")
    except UnicodeDecodeError:
        return None
    return name or None
