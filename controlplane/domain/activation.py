"""Moves an activation from phase to phase along one table, and writes it as a change.

When a phase is due is decided elsewhere; here is only which moves exist.
"""

from datetime import datetime
from typing import Any, Final

from msgspec.structs import replace

from controlplane.domain.decision import Change
from schemas.activation import (
    Activation,
    ActivationEvent,
    ActivationLoading,
    ActivationPhase,
    ActivationPlacing,
    ActivationReady,
    ActivationWaiting,
    ActivationWanted,
)
from schemas.messages import tag_of

TRANSITIONS: Final[dict[tuple[ActivationPhase | None, str], ActivationPhase]] = {
    # Demand begins: nothing was known, nobody asked any more, or the last answer was no.
    (None, "activation.wanted"): "wanted",
    (None, "activation.placing"): "placing",
    (None, "activation.waiting"): "waiting",
    (None, "activation.loading"): "loading",
    (None, "activation.ready"): "ready",
    (None, "activation.refused"): "refused",
    ("idle", "activation.wanted"): "wanted",
    ("idle", "activation.placing"): "placing",
    ("idle", "activation.waiting"): "waiting",
    ("idle", "activation.loading"): "loading",
    ("idle", "activation.ready"): "ready",
    ("idle", "activation.refused"): "refused",
    ("refused", "activation.wanted"): "wanted",
    ("refused", "activation.placing"): "placing",
    ("refused", "activation.waiting"): "waiting",
    ("refused", "activation.loading"): "loading",
    ("refused", "activation.ready"): "ready",
    ("refused", "activation.refused"): "refused",
    ("refused", "activation.idle"): "idle",
    # Wanted: accepted, no place yet.
    ("wanted", "activation.wanted"): "wanted",
    ("wanted", "activation.placing"): "placing",
    ("wanted", "activation.waiting"): "waiting",
    ("wanted", "activation.loading"): "loading",
    ("wanted", "activation.ready"): "ready",
    ("wanted", "activation.refused"): "refused",
    ("wanted", "activation.idle"): "idle",
    # Placing: a plan item was written and not answered yet.
    ("placing", "activation.wanted"): "wanted",
    ("placing", "activation.placing"): "placing",
    ("placing", "activation.waiting"): "waiting",
    ("placing", "activation.loading"): "loading",
    ("placing", "activation.ready"): "ready",
    ("placing", "activation.refused"): "refused",
    ("placing", "activation.idle"): "idle",
    # Waiting: room is being made, or others are before it.
    ("waiting", "activation.wanted"): "wanted",
    ("waiting", "activation.placing"): "placing",
    ("waiting", "activation.waiting"): "waiting",
    ("waiting", "activation.loading"): "loading",
    ("waiting", "activation.ready"): "ready",
    ("waiting", "activation.refused"): "refused",
    ("waiting", "activation.idle"): "idle",
    # Loading: the engine starts; it may be lost with its node and is then wanted again.
    ("loading", "activation.wanted"): "wanted",
    ("loading", "activation.placing"): "placing",
    ("loading", "activation.waiting"): "waiting",
    ("loading", "activation.loading"): "loading",
    ("loading", "activation.ready"): "ready",
    ("loading", "activation.refused"): "refused",
    ("loading", "activation.idle"): "idle",
    # Ready: answered, another replica answers, it crashed, or nobody asks any more.
    ("ready", "activation.wanted"): "wanted",
    ("ready", "activation.placing"): "placing",
    ("ready", "activation.waiting"): "waiting",
    ("ready", "activation.loading"): "loading",
    ("ready", "activation.ready"): "ready",
    ("ready", "activation.refused"): "refused",
    ("ready", "activation.idle"): "idle",
}
"""(phase before, event) -> phase after. What is not here cannot happen; a tombstone ends any phase."""


class NoSuchMove(AssertionError):
    """A decider tried a move the table does not have: our bug, never a person's."""


_FRESH: Final[dict[str, Any]] = {
    "replica": None,
    "node": None,
    "profile": None,
    "waiting_for": (),
    "kept": False,
    "code": None,
    "retry_at": None,
    "expected_ready_at": None,
    "report": None,
}
"""What belongs to one phase only and is forgotten when another begins, unless the move says it."""


def opened(
    model: str, incarnation: str, scope: str, now: datetime, before: Activation | None
) -> Activation:
    """An activation whose demand begins now; the move that follows gives it its phase."""
    return Activation(
        model=model,
        incarnation=incarnation,
        scope=scope,
        phase=before.phase if before is not None else "wanted",
        wanted_at=now,
        since=now,
    )


def same_phase(before: Activation) -> ActivationEvent:
    """The event of a change within a pending phase, such as one replica more."""
    match before.phase:
        case "waiting":
            return ActivationWaiting(waiting_for=before.waiting_for)
        case "placing":
            return ActivationPlacing(replica=before.replica or "")
        case "loading":
            return ActivationLoading(replica=before.replica or "")
        case "ready":
            return ActivationReady(replica=before.replica or "")
        case "wanted" | "refused" | "idle":
            return ActivationWanted(by="control")


def move(
    before: Activation,
    event: ActivationEvent,
    now: datetime,
    reason: str,
    *,
    is_new: bool = False,
    **fields: Any,
) -> Change:
    """The change that `event` makes of `before`. `is_new`: no such activation was recorded yet.

    Raises NoSuchMove.
    """
    tag = tag_of(event)
    phase = TRANSITIONS.get((None if is_new else before.phase, tag))
    if phase is None:
        raise NoSuchMove(f"{before.model}: no {tag} in phase {before.phase}")
    changed = is_new or phase != before.phase
    state = replace(
        before,
        phase=phase,
        since=now if changed else before.since,
        reason=reason,
        **{**(_FRESH if changed else {}), **fields},
    )
    return Change(
        noun="activation", key=(before.model, before.scope), event=event, state=state, reason=reason
    )
