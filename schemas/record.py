"""A model's record: what its starts cost and how they failed, kept by the control plane."""

from datetime import datetime

from msgspec import Struct

from schemas.placement import PlacementReport


class Measured(Struct, frozen=True, kw_only=True):
    """Measured per (profile, card kind). `load_s` holds the last eight load times, newest last.

    `memory_bytes` is 0 until an agent has read it, a moment after the first ready.
    """

    profile: str
    card_kind: str
    memory_bytes: int
    load_s: tuple[float, ...] = ()
    park_s: tuple[float, ...] = ()
    resume_s: tuple[float, ...] = ()
    """As `load_s`, of parks and of resumes."""


class Failures(Struct, frozen=True, kw_only=True):
    """Per (profile, node, card): failed starts and crashes in a row, and when the next may be tried.

    `count` are failed starts in a row. `crashes` are ends of ready replicas nobody asked for within
    ten minutes; the first costs no backoff.
    """

    profile: str
    node: str
    card: str
    revision: str
    count: int
    last_at: datetime
    next_allowed_at: datetime
    crashes: int = 0
    code: str = ""
    reason: str = ""


class Quarantine(Struct, frozen=True, kw_only=True):
    since: datetime
    until: datetime
    reason: str


class Record(Struct, frozen=True, kw_only=True):
    """The state of `yard.evt.record.<model>`. `counted` are replica ids already folded in (last 16), `timed` the
    parks and resumes of planned replicas that are."""

    model: str
    incarnation: str
    measured: tuple[Measured, ...] = ()
    failures: tuple[Failures, ...] = ()
    quarantined: Quarantine | None = None
    unplaceable: PlacementReport | None = None
    counted: tuple[str, ...] = ()
    timed: tuple[str, ...] = ()


class RecordMeasured(Struct, frozen=True, kw_only=True, tag_field="type", tag="record.measured"):
    replica: str
    memory_bytes: int
    load_s: float
    park_s: float | None = None
    resume_s: float | None = None


class RecordStartFailed(
    Struct, frozen=True, kw_only=True, tag_field="type", tag="record.start_failed"
):
    replica: str
    code: str
    next_allowed_at: datetime


class RecordQuarantined(
    Struct, frozen=True, kw_only=True, tag_field="type", tag="record.quarantined"
):
    until: datetime


class RecordUnplaceable(
    Struct, frozen=True, kw_only=True, tag_field="type", tag="record.unplaceable"
):
    pass


class RecordCleared(Struct, frozen=True, kw_only=True, tag_field="type", tag="record.cleared"):
    cause: str


class RecordDeleted(Struct, frozen=True, kw_only=True, tag_field="type", tag="record.deleted"):
    """A tombstone."""


RecordEvent = (
    RecordMeasured
    | RecordStartFailed
    | RecordQuarantined
    | RecordUnplaceable
    | RecordCleared
    | RecordDeleted
)
