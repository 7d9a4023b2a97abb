"""Says what an answer of vLLM's adapter routes means: done, done already, or whose fault it is and why.

One table per dialect, read by status, error type and a piece of the text; never by a whole text, nor by upper and
lower case, because both changed between releases. What no row knows is the replica's fault, `known=False`: whether
it is the adapter's shows when another replica says the same. It asks nobody (`lora.py` does) and must not raise for
anything an engine can answer.

dialect  envelope                                                    error types
flat     {"object": "error", "message", "type", "param", "code"}     InvalidUserInput, NotFoundError, …
nested   {"error": {"message", "type", "param", "code": 400}}        the same
rust     {"error": {"message", "type", "param", "code": "…"}}        invalid_request_error, server_error
none     anything else: a proxy's page, {"detail": …}, nothing
"""

import json
from collections.abc import Collection
from typing import Any, Final, Literal, cast

from msgspec import Struct

from nodeagent.drivers.driver import AdapterDone, AdapterFault
from schemas import codes
from schemas.slots import Whose

Dialect = Literal["flat", "nested", "rust", "none"]
Call = Literal["load", "unload"]
Means = Literal["already", "absent"]

TEXT_LENGTH: Final = 400
"""So many characters of an engine's words are kept: they go into events and to clients."""

LOAD_ROUTE: Final = "/v1/load_lora_adapter"
UNLOAD_ROUTE: Final = "/v1/unload_lora_adapter"

FOLDER: Final = "its folder"
"""What stands for the path of a node in an engine's words, so that two replicas can say the same."""

NO_ROUTES: Final = "this engine has no routes to load adapters while it runs"
"""What stands before an engine's words for that: mostly these are a bare "Not Found", which tells nobody what."""

_TELLING_LENGTH: Final = 10
"""An engine-side name has at least so many characters. What is shorter is part of other words."""


class Said(Struct, frozen=True, kw_only=True):
    """An error answer taken apart. `text` is the engine's own sentence, `type` its error type or empty."""

    status: int
    dialect: Dialect
    type: str
    text: str


class Row(Struct, frozen=True, kw_only=True):
    """One known answer: `text` is a piece of it in lower case, `type` a piece of its type (empty: any).

    `statuses` empty: any but 200. `means` empty: a fault, `whose` and `code`.
    """

    text: str
    statuses: tuple[int, ...] = ()
    type: str = ""
    call: Call | None = None
    means: Means | None = None
    whose: Whose = "replica"
    code: str = codes.LOAD_FAILED


def _adapter(code: str, text: str) -> Row:
    """What a worker says of an adapter. Front ends give it 400, or 500, bare or in words of their own."""
    return Row(text=text, statuses=(400, 500), call="load", whose="adapter", code=code)


_WORKER: Final = (
    _adapter(codes.RANK_TOO_HIGH, "greater than max_lora_rank"),
    _adapter(codes.UNSUPPORTED_ADAPTER, "supports modules_to_save being none"),
    _adapter(codes.UNSUPPORTED_ADAPTER, "support dora"),
    _adapter(codes.UNSUPPORTED_ADAPTER, "adapter bias"),
    _adapter(codes.UNSUPPORTED_ADAPTER, "is unsupported lora weight"),
    _adapter(codes.UNSUPPORTED_ADAPTER, "expected target modules in"),
    _adapter(codes.UNSUPPORTED_ADAPTER, "greater than lora_extra_vocab_size"),
    _adapter(codes.NOT_AN_ADAPTER, "missing required configuration fields"),
    # The files are not where this node said they are.
    Row(text="no adapter found", statuses=(400, 404, 500), call="load", code=codes.FILES_MISSING),
    Row(text="lora is not enabled", code=codes.ROUTE_OFF),
    Row(text="no free lora slots", call="load"),
    Row(text="out of memory", call="load"),
)
"""What the engine behind every front end says, as its exceptions are worded."""

_ANY: Final = (
    Row(
        text="conflicts with a served base model",
        statuses=(400,),
        call="load",
        whose="adapter",
        code=codes.LOAD_REFUSED,
    ),
    # Name or path were empty: nothing that is said of the adapter.
    Row(text="must be provided", statuses=(400,), call="load"),
    Row(text="to be provided", statuses=(400,), call="unload"),
)
"""What every front end says in the same words."""

_PYTHON: Final = (
    Row(
        text="already been loaded",
        statuses=(400,),
        type="invaliduserinput",
        call="load",
        means="already",
    ),
    Row(
        text="cannot be found",
        statuses=(404,),
        type="notfounderror",
        call="unload",
        means="absent",
    ),
    # Before it had a status of its own.
    Row(text="cannot be found", statuses=(400,), call="unload", means="absent"),
    # The engine had dropped it by itself, and goes on listing the name.
    Row(text="failed to remove lora adapter", statuses=(500,), call="unload"),
)

_RUST: Final = (
    Row(text="already been loaded", statuses=(400,), call="load", means="already"),
    Row(text="is already loaded", statuses=(400,), call="load", means="already"),
    # Its model-not-found, which names no adapter.
    Row(text="does not exist", statuses=(404,), call="unload", means="absent"),
    Row(text="must not be empty", statuses=(400,), call="load"),
    Row(text="does not match loaded adapter", statuses=(400,), call="unload"),
    Row(
        text="adapter path must exist and be accessible",
        statuses=(400,),
        call="load",
        code=codes.FILES_MISSING,
    ),
    # Its allow-list is not what this node started it with.
    Row(text="local lora adapter path", statuses=(400,), call="load"),
    Row(text="vllm_runtime_lora_allowed_path_prefixes", statuses=(400, 500), call="load"),
    Row(text="path policy is unavailable", statuses=(500,), call="load"),
    Row(text="not started with lora enabled", statuses=(400,), code=codes.ROUTE_OFF),
    Row(text="lora state differs across engine ranks"),
)

TABLES: Final[dict[Dialect, tuple[Row, ...]]] = {
    "flat": (*_PYTHON, *_ANY, *_WORKER),
    # One envelope, told apart by words that change: what fits the other's rows is no less true.
    "nested": (*_PYTHON, *_RUST, *_ANY, *_WORKER),
    "rust": (*_RUST, *_PYTHON, *_ANY, *_WORKER),
    "none": _WORKER,
}

_REPLICAS: Final = (401, 403, 408, 415, 422, 429, 502, 503, 504)
"""Statuses that say nothing of the adapter, whatever stands beside them: keys, limits, a request it cannot read, an
engine that is not there."""

_NO_ROUTE: Final = (405, 501)


def judged(
    status: int, body: bytes, *, call: Call, name: str, paths: Collection[str] = ()
) -> AdapterDone | AdapterFault:
    """What the answer to `call` means.

    `name` and `paths` are what was asked with: they stand in the engine's sentence, and whoever chose the adapter's
    name must not choose the meaning by it.

    1. 200, and no other 2xx: done.
    2. A row of the dialect's table.
    3. 404 that names neither an adapter nor a model, 405, 501: the routes are not there.
    4. A status that is about the replica.
    5. Nobody knows it: the replica's, until another says the same.
    """
    if status == 200:
        return AdapterDone()  # 1
    said = read(status, body)
    words = _without(said.text, (name, *paths, LOAD_ROUTE, UNLOAD_ROUTE)).lower()
    text = told(said, paths)
    for row in TABLES[said.dialect]:
        if _fits(row, said, words, call):  # 2
            if row.means is not None:
                return AdapterDone(already=True)
            return AdapterFault(whose=row.whose, code=row.code, text=text)
    if status in _NO_ROUTE or (status == 404 and _is_no_route(words)):  # 3
        return AdapterFault(whose="replica", code=codes.ROUTE_OFF, text=f"{NO_ROUTES}: {text}")
    if status in _REPLICAS:  # 4
        return AdapterFault(whose="replica", code=codes.LOAD_FAILED, text=text)
    return AdapterFault(whose="replica", code=codes.LOAD_FAILED, text=text, known=False)  # 5


def read(status: int, body: bytes) -> Said:
    """Takes an error answer apart: `error.message`, else `message`, else `detail`, else the trimmed body."""
    plain = body.decode(errors="replace").strip()
    found = _json_object(body)
    inner = found.get("error")
    if isinstance(inner, dict):
        error = cast("dict[str, Any]", inner)
        kind = _word(error.get("type"))
        is_rust = isinstance(error.get("code"), str) or kind.endswith("_error")
        return Said(
            status=status,
            dialect="rust" if is_rust else "nested",
            type=kind,
            text=_word(error.get("message")) or plain,
        )
    if isinstance(found.get("message"), str):
        kind = _word(found.get("type"))
        return Said(status=status, dialect="flat", type=kind, text=_word(found["message"]))
    text = _word(found.get("detail")) or _word(inner) or plain
    return Said(status=status, dialect="none", type="", text=text)


def told(said: Said, paths: Collection[str] = ()) -> str:
    """The engine's words for people: on one line, bounded, without paths of this node; never empty."""
    words = said.text
    for path in sorted(filter(None, paths), key=len, reverse=True):
        words = words.replace(path, FOLDER)
    words = " ".join(words.split())
    if not words:
        return f"it answered {said.status} without a word"
    return words if len(words) <= TEXT_LENGTH else words[: TEXT_LENGTH - 1] + "…"


def _fits(row: Row, said: Said, words: str, call: Call) -> bool:
    return (
        (row.call is None or row.call == call)
        and (not row.statuses or said.status in row.statuses)
        and row.type in said.type.lower()
        and row.text in words
    )


def _is_no_route(words: str) -> bool:
    """A framework's own 404: `{"detail": "Not Found"}`, an empty body, a page."""
    return not any(noun in words for noun in ("adapter", "lora", "model"))


def _without(text: str, given: Collection[str]) -> str:
    for word in sorted(given, key=len, reverse=True):
        if len(word) >= _TELLING_LENGTH:
            text = text.replace(word, "·")
    return text


def _json_object(body: bytes) -> dict[str, Any]:
    try:
        # Not msgspec's decoder: a body that was cut, or one with NaN in it, is no reason to raise either.
        found = json.loads(body)
    except (ValueError, RecursionError):
        return {}
    return cast("dict[str, Any]", found) if isinstance(found, dict) else {}


def _word(value: object) -> str:
    return value.strip() if isinstance(value, str) else ""
