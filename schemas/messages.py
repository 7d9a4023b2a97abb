"""Every noun of the log in one table: its state, its events, its version and who may write it.

Adding an event type: its struct beside its noun, its union here, a golden file; the rest is found
by the type checker (CONTRIBUTING.md has the list).
"""

from typing import Any, Final, Literal, get_args

from msgspec import Struct

from schemas.activation import Activation, ActivationEvent
from schemas.adapter import Adapter, AdapterEvent
from schemas.card import Card, CardEvent
from schemas.commands import Outcome, OutcomeEvent
from schemas.file import File, FileEvent
from schemas.job import Job, JobEvent
from schemas.key import Key, KeyEvent
from schemas.leader import Leader, LeaderDecided, LeaderElected, LeaderLine
from schemas.model import Model, ModelEvent
from schemas.node import Node, NodeEvent, NodeState, NodeStateEvent
from schemas.plan import Plan, PlanEvent
from schemas.record import Record, RecordEvent
from schemas.replica import Replica, ReplicaEvent
from schemas.slots import Slots, SlotsEvent

SCHEMA: Final = 1
"""The yard's schema number (stream metadata `yard.schema`): a process with a lower one may not lead."""

TYPE_PREFIX: Final = "dev.modelyard."

Writer = Literal["control", "agent"]


class Noun(Struct, frozen=True, kw_only=True):
    """One kind of aggregate. `tokens` names the subject tokens after `yard.evt.<name>`.

    For `leader` the single token is `current` or `log` and selects the state.
    """

    name: str
    tokens: tuple[str, ...]
    state: type[Struct]
    events: tuple[type[Struct], ...]
    writer: Writer
    version: int = 1


def _noun(
    name: str,
    tokens: tuple[str, ...],
    state: type[Struct],
    union: Any,
    writer: Writer,
    version: int = 1,
) -> Noun:
    events = get_args(union) or (union,)
    return Noun(
        name=name, tokens=tokens, state=state, events=events, writer=writer, version=version
    )


NOUNS: Final[dict[str, Noun]] = {
    n.name: n
    for n in (
        _noun("model", ("model",), Model, ModelEvent, "control"),
        _noun("adapter", ("adapter",), Adapter, AdapterEvent, "control"),
        _noun("activation", ("model", "scope"), Activation, ActivationEvent, "control"),
        _noun("plan", ("node",), Plan, PlanEvent, "control"),
        _noun("record", ("model",), Record, RecordEvent, "control"),
        _noun("nodestate", ("node",), NodeState, NodeStateEvent, "control"),
        _noun("job", ("id",), Job, JobEvent, "control"),
        _noun("file", ("key",), File, FileEvent, "control"),
        _noun("key", ("id",), Key, KeyEvent, "control"),
        _noun("command", ("id",), Outcome, OutcomeEvent, "control"),
        _noun("leader.current", (), Leader, LeaderElected, "control"),
        _noun("leader.log", (), LeaderLine, LeaderDecided, "control"),
        _noun("node", ("node",), Node, NodeEvent, "agent"),
        _noun("card", ("node", "card"), Card, CardEvent, "agent"),
        _noun("replica", ("node", "replica"), Replica, ReplicaEvent, "agent", version=2),
        _noun("slots", ("node", "replica"), Slots, SlotsEvent, "agent"),
    )
}
"""The key is the noun as the subject spells it after `yard.evt.`."""

State = (
    Model
    | Adapter
    | Activation
    | Plan
    | Record
    | NodeState
    | Job
    | File
    | Key
    | Outcome
    | Leader
    | LeaderLine
    | Node
    | Card
    | Replica
    | Slots
)
Event = (
    ModelEvent
    | AdapterEvent
    | ActivationEvent
    | PlanEvent
    | RecordEvent
    | NodeStateEvent
    | JobEvent
    | FileEvent
    | KeyEvent
    | OutcomeEvent
    | LeaderElected
    | LeaderDecided
    | NodeEvent
    | CardEvent
    | ReplicaEvent
    | SlotsEvent
)


def tag_of(event: Event) -> str:
    """The event's short type, e.g. `replica.ready`."""
    return str(type(event).__struct_config__.tag)
