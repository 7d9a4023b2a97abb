"""An activation: the answer to a request for a model that is not running, and its events.

phase     meaning
wanted    asked for; nothing could be placed yet (no node, placement frozen)
placing   a plan item was written; the agent has not started it yet
waiting   room is being made, or the request is in the queue for room
loading   the engine is starting
ready     a replica answers; the demand lasts until the idle stop
refused   not possible now: `code`, `reason`, `retry_at`
idle      nobody asks; nothing is demanded
"""

from datetime import datetime
from typing import Literal

from msgspec import Struct

from schemas.codes import RefusalCode
from schemas.placement import PlacementReport

ActivationPhase = Literal["wanted", "placing", "waiting", "loading", "ready", "refused", "idle"]

LIVE_PHASES: frozenset[str] = frozenset({"wanted", "placing", "waiting", "loading", "ready"})
"""Phases in which the model is demanded: the reconciler keeps `replicas` of it."""

PENDING_PHASES: frozenset[str] = frozenset({"wanted", "placing", "waiting", "loading"})
"""Phases in which a gateway joins and sends nothing."""


class Activation(Struct, frozen=True, kw_only=True):
    """The state of `yard.evt.activation.<model>.<scope>`.

    `wanted_at` is when this demand began and is the place in the queue for room; `since` is when
    the phase began. `replicas` is how many are demanded (1; more by `load`). `hold_until` keeps the
    demand until then whatever the idle clock says. `expected_ready_at` comes from measured loads.
    `answered` is False from ready until some gateway reported a use: the replica keeps its place.
    """

    model: str
    incarnation: str
    phase: ActivationPhase
    wanted_at: datetime
    since: datetime
    scope: str = "any"
    replicas: int = 1
    replica: str | None = None
    node: str | None = None
    profile: str | None = None
    waiting_for: tuple[str, ...] = ()
    kept: bool = False
    """Of a waiting one: every card it could have is kept (a VM, a claim, a pinned lease)."""
    code: RefusalCode | None = None
    reason: str = ""
    retry_at: datetime | None = None
    expected_ready_at: datetime | None = None
    hold_until: datetime | None = None
    answered: bool = True
    report: PlacementReport | None = None


class ActivationWanted(
    Struct, frozen=True, kw_only=True, tag_field="type", tag="activation.wanted"
):
    by: str


class ActivationPlacing(
    Struct, frozen=True, kw_only=True, tag_field="type", tag="activation.placing"
):
    replica: str


class ActivationWaiting(
    Struct, frozen=True, kw_only=True, tag_field="type", tag="activation.waiting"
):
    waiting_for: tuple[str, ...]


class ActivationLoading(
    Struct, frozen=True, kw_only=True, tag_field="type", tag="activation.loading"
):
    replica: str


class ActivationReady(Struct, frozen=True, kw_only=True, tag_field="type", tag="activation.ready"):
    replica: str


class ActivationRefused(
    Struct, frozen=True, kw_only=True, tag_field="type", tag="activation.refused"
):
    code: RefusalCode


class ActivationIdle(Struct, frozen=True, kw_only=True, tag_field="type", tag="activation.idle"):
    cause: str


class ActivationDeleted(
    Struct, frozen=True, kw_only=True, tag_field="type", tag="activation.deleted"
):
    """A tombstone."""


ActivationEvent = (
    ActivationWanted
    | ActivationPlacing
    | ActivationWaiting
    | ActivationLoading
    | ActivationReady
    | ActivationRefused
    | ActivationIdle
    | ActivationDeleted
)
