"""Holds what one step decides on: world, beacons, time, settings, and the questions all deciders ask of them.

It answers and never decides: a wish it is asked about is neither granted nor refused here.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from typing import Final, Literal

import msgspec

from controlplane.domain import planned as planning
from controlplane.domain.decision import AgentLive, Change, Decision, Ids, Live
from controlplane.domain.index import Planned, StepIndex
from controlplane.domain.world import World
from events.envelope import MAX_EVENT_BYTES
from schemas.activation import LIVE_PHASES, Activation
from schemas.cardnames import ANY_SCOPE, scope_of
from schemas.model import Model, Profile
from schemas.replica import TERMINAL_PHASES
from schemas.settings import ControlplaneSettings

ANY: Final = ANY_SCOPE

MOST_STATE_BYTES: Final = MAX_EVENT_BYTES - 16 * 1024
"""A state of an event; the rest is for its envelope, reason and change."""

Hold = Literal["pending", "ready", "stopping", "parked", "ended", "away"]
"""How an item counts: on its way, answering, on its way out, parked, over, or on a node nobody hears.

A parked one does not count as running. One that is being resumed is on its way again; one whose resume
was refused is parked, with or without its stop. One that its own node ends or parks is on its way out, or
parked, although no stop of the plan says so.
"""


@dataclass(slots=True)
class Scene:
    """Everything a decision may look at. `frozen` says why nothing is placed now, empty when it is.

    `blocked` collects, as sentences, the decisions that cannot be written: an aggregate's last event
    was not understood, or its state would be larger than an event may be. The world does not change while a scene lasts, so answers are kept.
    """

    world: World
    live: Live
    now: datetime
    ids: Ids
    settings: ControlplaneSettings
    index: StepIndex
    frozen: str = ""
    blocked: list[str] = field(default_factory=list)
    agents: dict[str, AgentLive] = field(init=False)
    """Those of `live`, by node."""
    _holds: dict[str, list[tuple[Planned, Hold]]] = field(default_factory=dict)
    _activations: dict[str, list[Activation]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.agents = {agent.node: agent for agent in self.live.agents}

    def after(self, seconds: float) -> datetime:
        return self.now + timedelta(seconds=seconds)

    def age_s(self, at: datetime) -> float:
        return (self.now - at).total_seconds()

    def unwritable(self, changes: Iterable[Change]) -> str:
        """Why one of the changes may not be written, empty when all may."""
        for change in changes:
            head = self.world.head(change.noun, *change.key)
            if not head.writable:
                return f"{change.noun} {' '.join(change.key)}: {head.problem}"
            size = 0 if change.state is None else len(msgspec.json.encode(change.state))
            if size > MOST_STATE_BYTES:
                return f"{change.noun} {' '.join(change.key)}: {size} bytes, more than fit an event"
        return ""

    def checked(self, decision: Decision | None) -> Decision | None:
        """The decision, or None (and a note in `blocked`) when it cannot be written: others must go on."""
        if decision is None:
            return None
        why = self.unwritable(decision.changes)
        if not why:
            return decision
        self.blocked.append(f"{decision.what}: {why}")
        return None

    def hold(self, planned: Planned) -> Hold:
        replica = self.world.replicas.get(planned.item.replica)
        phase = replica.phase if replica is not None else None
        if phase in TERMINAL_PHASES:
            return "ended"
        if phase == "parked" and planning.stays_parked(self.world, planned):
            return "parked"
        if planned.item.stop is not None or phase == "stop_failed" or self.is_leaving(planned):
            return "stopping"
        if self.is_away(planned.node):
            return "away"
        return "ready" if phase == "ready" else "pending"

    def is_leaving(self, planned: Planned) -> bool:
        """Whether its own node ends it: it drains, and not under a stop that was just cleared."""
        return planning.is_leaving(self.world, planned)

    def is_resume_refused(self, planned: Planned) -> bool:
        """Whether a parked replica without a stop was refused since it was to be resumed."""
        return planning.is_resume_refused(self.world, planned)

    def is_away(self, node: str) -> bool:
        """Whether what is wanted there is to run elsewhere: unreachable for long enough."""
        state = self.world.nodestates.get(node)
        if state is None or state.reach == "reachable":
            return False
        # The silence began one `unreachable_after_s` before the event that named it.
        patience_s = self.settings.replace_unreachable_after_s - self.settings.unreachable_after_s
        return state.reach == "lost" or self.age_s(state.since) >= patience_s

    def holds_of(self, model: str) -> list[tuple[Planned, Hold]]:
        """The model's plan items with how they count, by replica id."""
        known = self._holds.get(model)
        if known is None:
            items = self.index.items_of.get(model, {})
            fresh: list[tuple[Planned, Hold]] = []
            for id_ in sorted(items):
                hold = self.hold(items[id_])
                fresh.append((items[id_], hold))
            known = self._holds[model] = fresh
        return known

    def activations_of(self, model: str) -> list[Activation]:
        known = self._activations.get(model)
        if known is None:
            scopes = self.index.scopes_of.get(model, ())
            known = [self.world.activations[(model, scope)] for scope in sorted(scopes)]
            self._activations[model] = known
        return known

    def profile_of(self, planned: Planned) -> Profile | None:
        """The profile the item was started from, None when the catalog no longer has it as it was.

        This is the one place that says whether a running replica still is what the entry asks for.
        """
        launch = planned.item.launch
        model = self.world.models.get(launch.model)
        if model is None or model.incarnation != launch.incarnation:
            return None
        for profile in model.profiles:
            if profile.name == launch.profile:
                same = self.index.revision(self.world, model.name, profile) == launch.revision
                return profile if same else None
        return None


def is_current(planned: Planned, model: Model | None) -> bool:
    """Whether the item belongs to this very entry and not to a former one of the same name."""
    return model is not None and planned.item.launch.incarnation == model.incarnation


def is_off(model: Model) -> bool:
    return model.scaling.max <= 0


def is_demanded(activation: Activation, model: Model) -> bool:
    return activation.phase in LIVE_PHASES and activation.incarnation == model.incarnation


def is_in_scope(planned: Planned, scope: str) -> bool:
    return scope == ANY or any(scope_of(planned.node, card) == scope for card in planned.item.cards)


def in_scope(held: Iterable[tuple[Planned, Hold]], scope: str) -> list[tuple[Planned, Hold]]:
    found: list[tuple[Planned, Hold]] = []
    for planned, hold in held:
        if is_in_scope(planned, scope):
            found.append((planned, hold))
    return found


def target_of(model: Model, activations: Iterable[Activation]) -> int:
    """How many replicas of the model are wanted, over all scopes, never more than `max`."""
    if is_off(model):
        return 0
    wanted = model.scaling.min
    for activation in activations:
        if is_demanded(activation, model):
            wanted = max(wanted, activation.replicas)
    return min(wanted, model.scaling.max)
