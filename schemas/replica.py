"""A replica: one launch of one engine process serving a model, as its node's agent tells it.

The id is minted by the control plane, used for one launch and never again.
"""

from datetime import datetime
from typing import Literal

from msgspec import Struct

from schemas.model import EngineName

ReplicaPhase = Literal[
    "waiting",
    "refused",
    "fetching",
    "starting",
    "ready",
    "draining",
    "parked",
    "withdrawn",
    "stopped",
    "stop_failed",
    "failed",
]

TERMINAL_PHASES: frozenset[str] = frozenset({"refused", "withdrawn", "stopped", "failed"})
"""No process is left and nothing more will happen under this id."""

RUNNING_PHASES: frozenset[str] = frozenset(
    {"starting", "ready", "draining", "parked", "stop_failed"}
)
"""A process may hold memory."""


class Replica(Struct, frozen=True, kw_only=True):
    """The state of `yard.evt.replica.<node>.<replica>`.

    `endpoint` is a base URL without a path. `paths` are the inference paths a gateway may forward.
    `memory_bytes` is what was reserved, `measured_memory_bytes` what the process group used (PSS).
    `was_ready` tells a crash of a served replica from a start that failed. `code` of a failed one:
    exited, start_timeout, lost, spawn_failed, source_missing, fetch_failed, disk_full, resume_failed, parked_lost.
    The last two are no failed starts: a parked copy is gone. `stop_decision` is
    the decision id of the stop that is being carried out; `taken_back` the one whose bound passed
    unfinished.
    """

    id: str
    node: str
    model: str
    incarnation: str
    profile: str
    revision: str
    engine: EngineName
    phase: ReplicaPhase
    since: datetime
    epoch: int
    cards: tuple[str, ...] = ("cpu",)
    card_kind: str = "cpu"
    memory_bytes: int = 0
    weight: int = 1
    endpoint: str | None = None
    paths: tuple[str, ...] = ()
    has_key: bool = False
    pid: int | None = None
    started_at: datetime | None = None
    ready_at: datetime | None = None
    was_ready: bool = False
    load_s: float | None = None
    measured_memory_bytes: int | None = None
    stop_decision: str | None = None
    taken_back: str | None = None
    forced: bool = False
    """Of a draining one: nothing is waited for, whatever runs there ends now."""
    code: str | None = None
    reason: str = ""
    last_line: str = ""
    exit_status: int | None = None
    card_revs: dict[str, int] = {}
    """Of a refused one, and of a parked one whose resume was refused: the card revisions it was refused at."""
    waiting_for: tuple[str, ...] = ()
    """Of a waiting one: the holders that leave its cards first."""
    park_way: str = ""
    """Of a parked one: how it was parked (sleep, checkpoint, command); it resumes the same way."""
    parked_at: datetime | None = None
    ram_bytes: int = 0
    """Of a parked one: what its lease on `cpu` holds."""
    residual_bytes: int = 0
    """Of a parked one: what it keeps on each of its cards."""
    adapter_slots: int = 0
    """How many adapters its agent keeps loaded in it; 0: it loads none."""
    park_s: float | None = None
    resume_s: float | None = None
    """Seconds its last park, and its last resume, took."""


class ReplicaWaiting(Struct, frozen=True, kw_only=True, tag_field="type", tag="replica.waiting"):
    """Room is being made for it on its cards; it starts by itself when that is done. `place` in line from 1."""

    waiting_for: str
    place: int = 1


class ReplicaRefused(Struct, frozen=True, kw_only=True, tag_field="type", tag="replica.refused"):
    """The agent cannot start it now; no failure and no backoff. `card_revs` are what it refused at."""

    card_revs: dict[str, int] = {}


class ReplicaFetching(Struct, frozen=True, kw_only=True, tag_field="type", tag="replica.fetching"):
    source: str


class ReplicaStarting(Struct, frozen=True, kw_only=True, tag_field="type", tag="replica.starting"):
    """`resumed`: it comes back from being parked, under its old process."""

    port: int
    resumed: bool = False


class ReplicaReady(Struct, frozen=True, kw_only=True, tag_field="type", tag="replica.ready"):
    load_s: float | None = None
    resume_s: float | None = None
    taken_back: str | None = None


class ReplicaDraining(Struct, frozen=True, kw_only=True, tag_field="type", tag="replica.draining"):
    decision: str


class ReplicaParked(Struct, frozen=True, kw_only=True, tag_field="type", tag="replica.parked"):
    """The process lives, its card is given back. `refused`: a resume was asked for and has no room now."""

    way: str = ""
    ram_bytes: int = 0
    residual_bytes: int = 0
    refused: bool = False


class ReplicaWithdrawn(
    Struct, frozen=True, kw_only=True, tag_field="type", tag="replica.withdrawn"
):
    """A plan item that never started was taken out of the plan."""


class ReplicaStopped(Struct, frozen=True, kw_only=True, tag_field="type", tag="replica.stopped"):
    exit_status: int | None = None


class ReplicaStopFailed(
    Struct, frozen=True, kw_only=True, tag_field="type", tag="replica.stop_failed"
):
    survivors: tuple[int, ...] = ()


class ReplicaFailed(Struct, frozen=True, kw_only=True, tag_field="type", tag="replica.failed"):
    code: str
    exit_status: int | None = None


class ReplicaDeleted(Struct, frozen=True, kw_only=True, tag_field="type", tag="replica.deleted"):
    """A tombstone."""


ReplicaEvent = (
    ReplicaWaiting
    | ReplicaRefused
    | ReplicaFetching
    | ReplicaStarting
    | ReplicaReady
    | ReplicaDraining
    | ReplicaParked
    | ReplicaWithdrawn
    | ReplicaStopped
    | ReplicaStopFailed
    | ReplicaFailed
    | ReplicaDeleted
)
