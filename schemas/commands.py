"""Commands: wishes to change, the body of `yard.cmd.<actor>.<noun>.<verb>`, and their outcome.

The actor is the subject's token, never a field. Unknown fields are refused.
"""

from datetime import datetime
from typing import Any, Literal

from msgspec import Struct


class ModelAdd(
    Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag_field="do", tag="model.add"
):
    """Adds one entry, given as it stood in the file; refused when the name exists."""

    entry: dict[str, Any]


class CatalogApply(
    Struct,
    frozen=True,
    kw_only=True,
    forbid_unknown_fields=True,
    tag_field="do",
    tag="catalog.apply",
):
    """Makes the named entries equal to the file, others alone unless `prune`; all or nothing."""

    entries: list[dict[str, Any]]
    prune: bool = False
    dry_run: bool = False


class ModelRemove(
    Struct,
    frozen=True,
    kw_only=True,
    forbid_unknown_fields=True,
    tag_field="do",
    tag="model.remove",
):
    model: str


class ModelScale(
    Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag_field="do", tag="model.scale"
):
    model: str
    min: int
    max: int


class ModelLoad(
    Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag_field="do", tag="model.load"
):
    """One replica more, up to max; counts as one use, or holds the demand for `for_s` seconds."""

    model: str
    for_s: float | None = None


class ModelUnload(
    Struct,
    frozen=True,
    kw_only=True,
    forbid_unknown_fields=True,
    tag_field="do",
    tag="model.unload",
):
    model: str
    force: bool = False


class ModelActivate(
    Struct,
    frozen=True,
    kw_only=True,
    forbid_unknown_fields=True,
    tag_field="do",
    tag="model.activate",
):
    """A gateway's wish; has no outcome, the activation event is it. `rev` is the activation's
    revision the gateway saw (0: none)."""

    model: str
    scope: str = "any"
    rev: int = 0


class NodeCordon(
    Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag_field="do", tag="node.cordon"
):
    node: str


class NodeUncordon(
    Struct,
    frozen=True,
    kw_only=True,
    forbid_unknown_fields=True,
    tag_field="do",
    tag="node.uncordon",
):
    node: str


CommandBody = (
    ModelAdd
    | CatalogApply
    | ModelRemove
    | ModelScale
    | ModelLoad
    | ModelUnload
    | ModelActivate
    | NodeCordon
    | NodeUncordon
)


class Command(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The message body. `id` is a UUIDv7 and the dedupe id; it expires `ttl_s` after it was stored."""

    id: str
    body: CommandBody
    ttl_s: float = 60.0
    correlationid: str | None = None


class Problem(Struct, frozen=True, kw_only=True):
    """One thing wrong with an entry: `path` like `[0].profiles[1].memory` (of the entries given)."""

    path: str
    sentence: str


class Outcome(Struct, frozen=True, kw_only=True):
    """The state of `yard.evt.command.<id>`. `refs` are subjects it changed; `lines` what a person reads."""

    id: str
    actor: str
    name: str
    status: Literal["accepted", "rejected"]
    at: datetime
    code: str | None = None
    sentence: str = ""
    refs: tuple[str, ...] = ()
    lines: tuple[str, ...] = ()
    problems: tuple[Problem, ...] = ()


class CommandAccepted(Struct, frozen=True, kw_only=True, tag_field="type", tag="command.accepted"):
    refs: tuple[str, ...] = ()


class CommandRejected(Struct, frozen=True, kw_only=True, tag_field="type", tag="command.rejected"):
    code: str


OutcomeEvent = CommandAccepted | CommandRejected
