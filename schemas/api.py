"""The bodies of the control plane's read API: states with the event that made them, event lines, errors.

Data only. Every list and every single state comes with `applied_seq`, the position it is true for.
"""

from datetime import datetime
from typing import Any

from msgspec import Struct

from schemas.activation import Activation
from schemas.adapter import Adapter
from schemas.card import Card
from schemas.commands import Outcome
from schemas.file import File
from schemas.job import FileSet, Job, MemoryEstimate
from schemas.key import Priority
from schemas.model import Model
from schemas.node import Node, NodeState
from schemas.placement import Candidate
from schemas.replica import Replica
from schemas.slots import Slots
from schemas.usage import UsageTotal


class StateEvent(Struct, frozen=True, kw_only=True):
    """The event that made a state: who, when, why and from what. `change` is what it says happened.

    `problem` says why the subject's last event (`seq`) could not be read; the state is the one before.
    """

    subject: str
    seq: int
    rev: int
    type: str
    id: str
    time: datetime
    actor: str
    reason: str = ""
    causationid: str | None = None
    correlationid: str | None = None
    change: dict[str, Any] | None = None
    problem: str | None = None


class Unread(Struct, frozen=True, kw_only=True):
    """Something of which only events of a newer version are known: no state of it can be told.

    `name` is how the API names one of its kind, `event` the first of those events; its `problem` and `seq` are the
    last one's.
    """

    name: str
    event: StateEvent


class ModelView(Model, frozen=True, kw_only=True):
    event: StateEvent


class AdapterView(Adapter, frozen=True, kw_only=True):
    event: StateEvent


class ReplicaView(Replica, frozen=True, kw_only=True):
    event: StateEvent


class SlotsView(Slots, frozen=True, kw_only=True):
    event: StateEvent


class NodeView(Node, frozen=True, kw_only=True):
    """`standing` is how the control plane judges the node."""

    event: StateEvent
    standing: NodeState | None = None


class CardView(Card, frozen=True, kw_only=True):
    event: StateEvent


class ActivationView(Activation, frozen=True, kw_only=True):
    event: StateEvent


class OutcomeView(Outcome, frozen=True, kw_only=True):
    event: StateEvent


class JobView(Job, frozen=True, kw_only=True):
    event: StateEvent


class FileView(File, frozen=True, kw_only=True):
    event: StateEvent


class KeyView(Struct, frozen=True, kw_only=True):
    """A key as `schemas.key.Key` has it, without the hash of its secret."""

    id: str
    name: str
    created_at: datetime
    event: StateEvent
    by: str = ""
    models: tuple[str, ...] = ()
    may_activate: bool = False
    rpm: int = 0
    tpm: int = 0
    parallel: int = 0
    priority: Priority = "normal"
    expires_at: datetime | None = None
    revoked_at: datetime | None = None


class ModelList(Struct, frozen=True, kw_only=True):
    data: tuple[ModelView, ...]
    applied_seq: int
    unread: tuple[Unread, ...] = ()


class ModelOne(Struct, frozen=True, kw_only=True):
    data: ModelView
    applied_seq: int


class AdapterList(Struct, frozen=True, kw_only=True):
    data: tuple[AdapterView, ...]
    applied_seq: int
    unread: tuple[Unread, ...] = ()


class AdapterOne(Struct, frozen=True, kw_only=True):
    data: AdapterView
    applied_seq: int


class ReplicaList(Struct, frozen=True, kw_only=True):
    data: tuple[ReplicaView, ...]
    applied_seq: int
    unread: tuple[Unread, ...] = ()


class ReplicaOne(Struct, frozen=True, kw_only=True):
    data: ReplicaView
    applied_seq: int


class SlotsList(Struct, frozen=True, kw_only=True):
    data: tuple[SlotsView, ...]
    applied_seq: int
    unread: tuple[Unread, ...] = ()


class SlotsOne(Struct, frozen=True, kw_only=True):
    data: SlotsView
    applied_seq: int


class NodeList(Struct, frozen=True, kw_only=True):
    data: tuple[NodeView, ...]
    applied_seq: int
    unread: tuple[Unread, ...] = ()


class NodeOne(Struct, frozen=True, kw_only=True):
    data: NodeView
    applied_seq: int


class CardList(Struct, frozen=True, kw_only=True):
    data: tuple[CardView, ...]
    applied_seq: int
    unread: tuple[Unread, ...] = ()


class CardOne(Struct, frozen=True, kw_only=True):
    data: CardView
    applied_seq: int


class ActivationList(Struct, frozen=True, kw_only=True):
    data: tuple[ActivationView, ...]
    applied_seq: int
    unread: tuple[Unread, ...] = ()


class ActivationOne(Struct, frozen=True, kw_only=True):
    data: ActivationView
    applied_seq: int


class KeyList(Struct, frozen=True, kw_only=True):
    data: tuple[KeyView, ...]
    applied_seq: int
    unread: tuple[Unread, ...] = ()


class KeyOne(Struct, frozen=True, kw_only=True):
    data: KeyView
    applied_seq: int


class UsageList(Struct, frozen=True, kw_only=True):
    """`applied_seq` is the position in the stream of usage, not in that of events."""

    data: tuple[UsageTotal, ...]
    applied_seq: int


class OutcomeList(Struct, frozen=True, kw_only=True):
    data: tuple[OutcomeView, ...]
    applied_seq: int
    unread: tuple[Unread, ...] = ()


class OutcomeOne(Struct, frozen=True, kw_only=True):
    data: OutcomeView
    applied_seq: int


class JobList(Struct, frozen=True, kw_only=True):
    data: tuple[JobView, ...]
    applied_seq: int
    unread: tuple[Unread, ...] = ()


class JobOne(Struct, frozen=True, kw_only=True):
    data: JobView
    applied_seq: int


class FileList(Struct, frozen=True, kw_only=True):
    data: tuple[FileView, ...]
    applied_seq: int
    unread: tuple[Unread, ...] = ()


class FileOne(Struct, frozen=True, kw_only=True):
    data: FileView
    applied_seq: int


class ErrorDetail(Struct, frozen=True, kw_only=True):
    """A code for machines and a sentence for people."""

    code: str
    sentence: str


class RegistrySet(Struct, frozen=True, kw_only=True):
    """A file set of a repository; `picked`: what would be taken."""

    name: str
    quant: str
    shards: int
    bytes: int
    picked: bool = False


class RegistryView(Struct, frozen=True, kw_only=True):
    """A repository at one commit. `sentence` says what would be picked and why, or why nothing would."""

    repo: str
    commit: str
    gated: str | None
    private: bool
    suggested_name: str
    sets: tuple[RegistrySet, ...]
    left_out: tuple[str, ...] = ()
    sentence: str = ""


class RegistryOne(Struct, frozen=True, kw_only=True):
    data: RegistryView


class PlanView(Struct, frozen=True, kw_only=True):
    """What `job.serve` would do, found out without a change. `problems` are why it would fail.

    `explained` is the estimate in words; `places` are all candidates, best first, with their reasons.
    `entry` is the catalog entry that would be added.
    """

    repo: str
    commit: str
    model: str
    file_set: FileSet | None = None
    fetched_bytes: int = 0
    """Bytes of the set that the mirror has already."""
    architecture: str = ""
    context_length: int | None = None
    estimate: MemoryEstimate | None = None
    explained: str = ""
    places: tuple[Candidate, ...] = ()
    entry: dict[str, Any] = {}
    problems: tuple[ErrorDetail, ...] = ()


class PlanOne(Struct, frozen=True, kw_only=True):
    data: PlanView
    applied_seq: int


class PlaceView(Struct, frozen=True, kw_only=True):
    """Where a replica would go now: all candidates, best first, those without a rank last.

    `sentence` says what would come of a request. It is true for `position`.
    """

    model: str
    scope: str
    sentence: str
    candidates: tuple[Candidate, ...] = ()
    position: int = 0
    policy_version: int = 0


class PlaceOne(Struct, frozen=True, kw_only=True):
    data: PlaceView
    applied_seq: int


class EventLine(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One event as `GET /v1/events` tells it. `type` is `broken` for a message nobody can read as
    an event; `problem` says why that, or a part of it, could not be read.

    `change` is what happened, `state` the whole state after it (absent for a tombstone).
    """

    seq: int
    subject: str
    type: str
    id: str | None = None
    time: datetime | None = None
    stored_at: datetime | None = None
    rev: int | None = None
    epoch: int | None = None
    actor: str = ""
    source: str = ""
    reason: str = ""
    causationid: str | None = None
    correlationid: str | None = None
    traceparent: str | None = None
    change: Any = None
    state: Any = None
    problem: str | None = None


class GapLine(Struct, frozen=True, kw_only=True):
    """Told when the history was replaced: the lines after it start from the state, not from where one was."""

    gap: str


class ErrorBody(Struct, frozen=True, kw_only=True):
    error: ErrorDetail
    applied_seq: int | None = None


class FindingView(Struct, frozen=True, kw_only=True):
    code: str
    sentence: str


class ReadyBody(Struct, frozen=True, kw_only=True):
    ready: bool
    findings: tuple[FindingView, ...] = ()


class ProjectionView(Struct, frozen=True, kw_only=True):
    name: str
    position: int
    synced: bool
    stopped: str | None = None


class UnreadableView(Struct, frozen=True, kw_only=True):
    """A subject whose last event this version cannot read."""

    subject: str
    seq: int
    why: str


class LeaderView(Struct, frozen=True, kw_only=True):
    instance: str
    host: str
    pid: int
    since: datetime
    term: int


class GatewayView(Struct, frozen=True, kw_only=True):
    """A gateway that beaconed within a day and did not say goodbye. `position`: how far it has read the log;
    `silent_s`: how long ago it was heard last, seconds."""

    name: str
    position: int
    silent_s: float


class DoctorBody(Struct, frozen=True, kw_only=True):
    """What `yardctl doctor` shows of one control plane. `log_seq`: the log's own last sequence, when known."""

    instance: str
    version: str
    schema: int
    connected: bool
    leading: bool
    leader: LeaderView | None
    log_seq: int | None
    log_schema: int | None
    stream_id: str | None
    commands_position: int | None
    projections: tuple[ProjectionView, ...]
    unknown_events: int
    broken_events: int
    unreadable: tuple[UnreadableView, ...]
    findings: tuple[FindingView, ...]
    misnamed_beacons: int = 0
    gateways: tuple[GatewayView, ...] = ()
