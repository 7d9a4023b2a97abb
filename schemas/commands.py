"""Commands: wishes to change, the body of `yard.cmd.<actor>.<noun>.<verb>`, and their outcome.

The actor is the subject's token, never a field. Unknown fields are refused.
"""

from datetime import datetime
from typing import Any, Literal

from msgspec import Struct

from schemas.key import Priority


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


class AdapterAdd(
    Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag_field="do", tag="adapter.add"
):
    """Adds a LoRA adapter of the model `base`. `source` is an absolute path on the control plane's machine,
    `OWNER/REPO[@REVISION]`, or the URL of a folder. `trust_base`: do not compare the base its configuration names.
    """

    name: str
    base: str
    source: str
    pinned: bool = False
    aliases: list[str] = []
    trust_base: bool = False


class AdapterRemove(
    Struct,
    frozen=True,
    kw_only=True,
    forbid_unknown_fields=True,
    tag_field="do",
    tag="adapter.remove",
):
    adapter: str


class AdapterPin(
    Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag_field="do", tag="adapter.pin"
):
    """Whether replicas that have it loaded may give it up for others."""

    adapter: str
    pinned: bool = True


class KeyCreate(
    Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag_field="do", tag="key.create"
):
    """Makes a key known. Whoever sends this made `id` and secret, and tells only the secret's `hash`; fields as in
    schemas.key.Key. `expires_s` is counted from when the command was stored; None: it never expires.
    """

    id: str
    name: str
    hash: str
    models: list[str] = []
    may_activate: bool = False
    rpm: int = 0
    tpm: int = 0
    parallel: int = 0
    priority: Priority = "normal"
    expires_s: float | None = None


class KeyChange(
    Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag_field="do", tag="key.change"
):
    """Changes what is given of the key with this id or name; the secret stays. `expires_s` 0: it never expires."""

    key: str
    models: list[str] | None = None
    may_activate: bool | None = None
    rpm: int | None = None
    tpm: int | None = None
    parallel: int | None = None
    priority: Priority | None = None
    expires_s: float | None = None


class KeyRevoke(
    Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag_field="do", tag="key.revoke"
):
    """Ends the key with this id or name; gateways refuse it as soon as they read of it. It never comes back."""

    key: str


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


class ReplicaPark(
    Struct,
    frozen=True,
    kw_only=True,
    forbid_unknown_fields=True,
    tag_field="do",
    tag="replica.park",
):
    """Drains a replica and parks it; rejected when its engine cannot be parked on that node."""

    replica: str


class ReplicaResume(
    Struct,
    frozen=True,
    kw_only=True,
    forbid_unknown_fields=True,
    tag_field="do",
    tag="replica.resume",
):
    """Brings a parked replica back to its cards; rejected while they are not to be had."""

    replica: str


class JobServe(
    Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag_field="do", tag="job.serve"
):
    """Starts a serve job, as typed by a person; or joins a running one that asks for the same."""

    repo: str
    quant: str | None = None
    file: str | None = None
    name: str | None = None
    aliases: list[str] = []
    description: str = ""
    replicas: int = 1
    ctx_pool: int = 0
    context_length: int = 0
    revision: str | None = None


class JobCancel(
    Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag_field="do", tag="job.cancel"
):
    job: str


class JobRetry(
    Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag_field="do", tag="job.retry"
):
    job: str


class MirrorRemove(
    Struct,
    frozen=True,
    kw_only=True,
    forbid_unknown_fields=True,
    tag_field="do",
    tag="mirror.remove",
):
    """Removes files from the mirrors: `what` is a key, a beginning of one (8 characters or more), or `OWNER/REPO[@COMMIT][/PATH]`."""

    what: str


class MirrorVerify(
    Struct,
    frozen=True,
    kw_only=True,
    forbid_unknown_fields=True,
    tag_field="do",
    tag="mirror.verify",
):
    """Reads files again and compares their sha256; `what` as in mirror.remove, empty = every file."""

    what: str = ""


class MirrorGc(
    Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag_field="do", tag="mirror.gc"
):
    """Removes what no catalog entry and no running job needs."""

    dry_run: bool = False


CommandBody = (
    ModelAdd
    | CatalogApply
    | ModelRemove
    | ModelScale
    | ModelLoad
    | ModelUnload
    | ModelActivate
    | AdapterAdd
    | AdapterRemove
    | AdapterPin
    | KeyCreate
    | KeyChange
    | KeyRevoke
    | NodeCordon
    | NodeUncordon
    | ReplicaPark
    | ReplicaResume
    | JobServe
    | JobCancel
    | JobRetry
    | MirrorRemove
    | MirrorVerify
    | MirrorGc
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
