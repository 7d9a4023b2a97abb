"""A plan: which replicas shall run on one node, decided by the control plane alone."""

from datetime import datetime
from typing import Literal

from msgspec import Struct

from schemas.model import EngineName, Parking, SecretRef

StopReason = Literal[
    "idle",
    "drain",
    "unload",
    "changed",
    "removed",
    "scaled_down",
    "node",
    "lost",
    "park",
    "lease",
    "claim",
    "vm",
    "ram",
]
"""The last four are an agent's own: a lease, a claim or a VM wants the card, or RAM is short."""


class Launch(Struct, frozen=True, kw_only=True):
    """Everything an agent needs to start one engine; `revision` names what of it must be equal."""

    model: str
    incarnation: str
    profile: str
    revision: str
    engine: EngineName
    source: str = ""
    args: tuple[str, ...] = ()
    command: tuple[str, ...] = ()
    env: dict[str, str | SecretRef] = {}
    health: str = "/health"
    key_env: str | None = None
    start_timeout_s: float = 600.0
    weight: int = 1
    exclusive: bool = False
    parking: Parking | None = None
    adapters: int = 0
    """How many adapters the agent keeps loaded in it; 0: the engine is started without."""
    lora_rank: int = 0
    """The rank it is started for, unless its arguments say so themselves; 0: the engine's default."""


class Stop(Struct, frozen=True, kw_only=True):
    """The wish to end a replica: drain for at most `drain_timeout_s`, then stop.

    `take_back`: when the bound passes with requests still running the replica becomes ready again
    (an idle stop) instead of ending them. `force`: end running requests at once. `park`: whether the
    drained replica may be parked instead of stopped (the agent decides by measured times), must be, or
    must not.
    """

    decision: str
    reason: StopReason
    decided_at: datetime
    drain_timeout_s: float = 60.0
    take_back: bool = False
    force: bool = False
    for_model: str | None = None
    park: Literal["never", "may", "must"] = "never"


class PlanItem(Struct, frozen=True, kw_only=True):
    """One replica on this node. `card_revs` are the card revisions the decision was made at.

    `memory_bytes` is per card. `evict` are named leases that have to leave its cards for it. An item whose
    replica is parked and that has no `stop` any more is to be resumed.

    `cleared` and `resumed` tell whoever reads plan and replica together what the lack of a `stop` answers: a
    replica that drains or is parked under any other decision was told so by its own node.
    """

    replica: str
    launch: Launch
    cards: tuple[str, ...]
    memory_bytes: int
    decided_at: datetime
    cause: str
    card_revs: dict[str, int] = {}
    stop: Stop | None = None
    evict: tuple[str, ...] = ()
    cleared: str = ""
    """The decision that was taken back when the stop was last cleared."""
    resumed: str = ""
    """The event of the parked replica that the last resume answered."""


class Plan(Struct, frozen=True, kw_only=True):
    """The state of `yard.evt.plan.<node>`; level-triggered, so missing one and seeing the next is fine."""

    node: str
    items: tuple[PlanItem, ...] = ()


class PlanChanged(Struct, frozen=True, kw_only=True, tag_field="type", tag="plan.changed"):
    added: tuple[str, ...] = ()
    stopping: tuple[str, ...] = ()
    resumed: tuple[str, ...] = ()
    removed: tuple[str, ...] = ()


class PlanDeleted(Struct, frozen=True, kw_only=True, tag_field="type", tag="plan.deleted"):
    """A tombstone."""


PlanEvent = PlanChanged | PlanDeleted
