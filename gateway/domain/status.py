"""Tells how each model and adapter of the catalog stands, in the shape of OpenAI's model list with fields of ours.

Beside it stands the same as llama.cpp and Ollama list their models, for clients that look there.

A query: it reads the table and changes nothing, so listing models can never start one or keep it
awake. Pure.
"""

from datetime import UTC, datetime
from typing import Any, Literal

import msgspec
from msgspec import Struct

from gateway.domain.adapteranswers import not_served_now
from gateway.domain.adaptertable import AdapterEntry
from gateway.domain.admission import ON_ITS_WAY, standing_refusal
from gateway.domain.answers import load_left_s
from gateway.domain.oncards import is_served
from gateway.domain.table import ModelEntry, Table
from schemas.cardnames import ANY_SCOPE

ModelStatus = Literal[
    "off",
    "ready",
    "draining",
    "wanted",
    "placing",
    "waiting",
    "loading",
    "refused",
    "quarantined",
    "parked",
    "idle",
    "reading",
    "fetching",
]
"""The last two are of adapters whose files are not there yet."""


class ModelCard(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One entry of `GET /v1/models`. `id` is the name it was asked by, `model` the catalog name.

    `name` is what interfaces show of it. `reason` and `code` belong to refused and quarantined, `retry_after_s` to those and to a load. Of an adapter
    `parent` is its base and `root` its catalog name, never a path; `replicas_ready` are those of its base that
    load adapters, `replicas_loaded` those that have it.
    """

    id: str
    object: str
    created: int
    owned_by: str
    status: ModelStatus
    model: str
    name: str = ""
    aliases: tuple[str, ...] = ()
    description: str = ""
    context_length: int | None = None
    max_output: int | None = None
    replicas_ready: int = 0
    waiting: int = 0
    code: str | None = None
    reason: str | None = None
    retry_after_s: int | None = None
    parent: str | None = None
    root: str | None = None
    replicas_loaded: int = 0
    pinned: bool = False


class ModelList(Struct, frozen=True, kw_only=True):
    """The body of `GET /v1/models`. `stale`: from a snapshot, the log was not read yet."""

    data: tuple[ModelCard, ...]
    object: str = "list"
    stale: bool = False


class Readiness(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The body of `GET /readyz`. `position`: the last event applied, None before there is a table; `broken`: what
    could not be read, and why; `stopped`: why the table does not follow the log any more, a fault of the program."""

    ready: bool
    synced: bool
    connected: bool
    draining: bool
    position: int | None
    broken: dict[str, str]
    stopped: str | None = None


def model_card(
    table: Table,
    entry: ModelEntry,
    now: datetime,
    *,
    asked_as: str | None = None,
    waiting: int = 0,
    ejected: frozenset[str] = frozenset(),
    scope: str = ANY_SCOPE,
) -> ModelCard:
    """How one model stands, in the whole yard or on one card."""
    model = entry.model
    ready = [r for r in table.routable(model.name, scope) if r.id not in ejected]
    status, code, reason, retry_after_s = _standing(
        table, entry, now, ready_count=len(ready), scope=scope
    )
    return ModelCard(
        id=asked_as or model.name,
        object="model",
        created=int(entry.created.timestamp()),
        owned_by="modelyard",
        status=status,
        model=model.name,
        name=asked_as or model.name,
        aliases=model.aliases,
        description=model.description,
        context_length=model.context_length,
        max_output=model.max_output,
        replicas_ready=len(ready),
        waiting=waiting,
        code=code,
        reason=reason,
        retry_after_s=retry_after_s,
    )


def adapter_card(
    table: Table,
    entry: AdapterEntry,
    now: datetime,
    *,
    asked_as: str | None = None,
    ejected: frozenset[str] = frozenset(),
    scope: str = ANY_SCOPE,
) -> ModelCard:
    """How one adapter stands: as its base does, once it could be loaded at all."""
    adapter = entry.adapter
    base = table.base_of(entry)
    ready = [
        r
        for r in table.routable(adapter.base, scope)
        if r.id not in ejected and r.adapter_slots > 0
    ]
    status: ModelStatus
    code: str | None = None
    reason: str | None = None
    retry_after_s: int | None = None
    told = not_served_now(entry, base, asked_as or adapter.name, now)
    if told is None:
        status, code, reason, retry_after_s = _standing(
            table, table.models[adapter.base], now, ready_count=len(ready), scope=scope
        )
    elif adapter.phase in ("reading", "fetching") and told.code == "model_loading":
        status, retry_after_s = adapter.phase, told.retry_after_s
    else:
        status, code, reason = "refused", adapter.code or told.code, told.message
    pin = table.adapters.pin(entry)
    holders = [r for r in ready if table.adapters.serves(r.id, pin)]
    return ModelCard(
        id=asked_as or adapter.name,
        object="model",
        created=int(entry.created.timestamp()),
        owned_by="modelyard",
        status=status,
        model=adapter.name,
        name=asked_as or adapter.name,
        aliases=adapter.aliases,
        context_length=None if base is None else base.context_length,
        max_output=None if base is None else base.max_output,
        replicas_ready=len(ready),
        code=code,
        reason=reason,
        retry_after_s=retry_after_s,
        parent=adapter.base,
        root=adapter.name,
        replicas_loaded=len(holders),
        pinned=adapter.pinned,
    )


def _standing(
    table: Table, entry: ModelEntry, now: datetime, *, ready_count: int, scope: str
) -> tuple[ModelStatus, str | None, str | None, int | None]:
    """Status, code, reason, seconds to come back in; the first that applies:

    1. off  2. ready  3. refused or quarantined, while that stands  4. the phase of its activation
    5. a replica on its way that no demand asked for (min)  6. draining  7. a parked copy  8. idle
    """
    name = entry.model.name
    if entry.model.scaling.max == 0:  # 1
        return "off", None, None, None
    if ready_count:  # 2
        return "ready", None, None, None
    head = table.activation(name, scope)
    refused = standing_refusal(table, name, head, now)
    if refused is not None:  # 3
        status: ModelStatus = "quarantined" if refused.code == "model_quarantined" else "refused"
        return status, refused.code, refused.message, refused.retry_after_s
    if head.activation is not None:  # 4
        left_s = round(load_left_s(head.activation, table.record(name), now))
        match head.activation.phase:
            case "wanted" | "placing" | "waiting" | "loading" as phase:
                return phase, None, head.activation.reason or None, left_s
            case "ready" | "refused" | "idle":
                pass
    phases = {r.phase for r in table.replicas_of(name, scope)}
    if phases & ON_ITS_WAY:  # 5
        return "loading", None, None, None
    if "draining" in phases:  # 6
        return "draining", None, None, None
    if "parked" in phases:  # 7
        return "parked", None, None, None
    return "idle", None, None, None  # 8


def model_list(
    table: Table,
    now: datetime,
    *,
    waiting: dict[str, int],
    stale: bool = False,
    ejected: frozenset[str] = frozenset(),
    scope: str = ANY_SCOPE,
) -> ModelList:
    """Every model of the catalog that may run in the scope, by name, and behind them every adapter of theirs that
    may be asked for; aliases are fields."""
    models = [e for _, e in sorted(table.models.items()) if is_served(table, e.model, scope)]
    served = {e.model.name for e in models}
    adapters = [
        e
        for _, e in sorted(table.adapters.entries.items())
        if e.adapter.base in served and not_served_now(e, table.base_of(e), "", now) is None
    ]
    return ModelList(
        data=(
            *(
                model_card(
                    table,
                    entry,
                    now,
                    waiting=waiting.get(entry.model.name, 0),
                    ejected=ejected,
                    scope=scope,
                )
                for entry in models
            ),
            *(adapter_card(table, e, now, ejected=ejected, scope=scope) for e in adapters),
        ),
        stale=stale,
    )


def list_body(listed: ModelList) -> bytes:
    """The JSON of a list: OpenAI's `data`, and beside it `models` as llama.cpp and Ollama list them.

    What of their fields tells of a file is left empty: which file an engine loads is nobody's affair here.
    """
    models: list[dict[str, Any]] = [
        {
            "name": card.id,
            "model": card.id,
            "modified_at": _iso(card.created),
            "size": 0,
            "digest": "",
            "type": "model",
            "description": card.description,
            "tags": (),
            "capabilities": ("completion",),
            "parameters": "",
            "details": {
                "parent_model": card.parent or "",
                "format": "",
                "family": "",
                "families": (),
                "parameter_size": "",
                "quantization_level": "",
            },
        }
        for card in listed.data
    ]
    return msgspec.json.encode(
        {"object": "list", "data": listed.data, "models": models, "stale": listed.stale}
    )


def _iso(seconds: int) -> str:
    return datetime.fromtimestamp(seconds, UTC).isoformat().replace("+00:00", "Z")
