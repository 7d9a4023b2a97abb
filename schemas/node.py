"""A node: one machine's inventory as its agent reports it, and its standing as the control plane judges it."""

from datetime import datetime
from typing import Literal

from msgspec import Struct

from schemas.card import Provider
from schemas.model import ParkWay


class CardInfo(Struct, frozen=True, kw_only=True):
    """One card of the inventory, in configuration order; `memory_bytes` is what may be given out."""

    id: str
    kind: Literal["cpu", "gpu"]
    memory_bytes: int
    provider: Provider = "static"
    device: str = ""
    """The driver's UUID (nvml)."""
    pci: str = ""
    name: str = ""
    mig: bool = False
    """Divided by MIG: shown and left alone, nothing is placed on it."""


class EngineInfo(Struct, frozen=True, kw_only=True):
    """An engine this node can run. `architectures` are the GGUF names it loads (llamacpp)."""

    name: str
    version: str
    architectures: tuple[str, ...] = ()
    card_kinds: tuple[Literal["cpu", "gpu"], ...] = ("cpu",)
    """Kinds of cards this build of the engine can use."""
    park_ways: tuple[ParkWay, ...] = ()
    """Ways this node can park it by; empty: it is stopped."""
    adapters: bool = False
    """Whether it loads LoRA adapters while it runs."""


class Node(Struct, frozen=True, kw_only=True):
    """The state of `yard.evt.node.<node>`; epoch = the sequence of its last node.started (0 inside that event)."""

    id: str
    running: bool
    started_at: datetime
    host: str = ""
    pid: int = 0
    version: str = ""
    cards: tuple[CardInfo, ...] = ()
    engines: tuple[EngineInfo, ...] = ()
    allow_commands: bool = False
    epoch: int = 0


class NodeStarted(Struct, frozen=True, kw_only=True, tag_field="type", tag="node.started"):
    adopted: tuple[str, ...] = ()


class NodeChanged(Struct, frozen=True, kw_only=True, tag_field="type", tag="node.changed"):
    fields: tuple[str, ...] = ()


class NodeStopped(Struct, frozen=True, kw_only=True, tag_field="type", tag="node.stopped"):
    engines_left: int = 0


class NodeDeleted(Struct, frozen=True, kw_only=True, tag_field="type", tag="node.deleted"):
    """A tombstone."""


NodeEvent = NodeStarted | NodeChanged | NodeStopped | NodeDeleted


class NodeState(Struct, frozen=True, kw_only=True):
    """The state of `yard.evt.nodestate.<node>`, written by the control plane.

    `admin` is what an operator wants of the node, `reach` what its heartbeats say.
    """

    node: str
    since: datetime
    admin: Literal["open", "cordoned", "draining", "removed"] = "open"
    reach: Literal["reachable", "unreachable", "lost"] = "reachable"


class NodeStateJoined(Struct, frozen=True, kw_only=True, tag_field="type", tag="nodestate.joined"):
    pass


class NodeStateCordoned(
    Struct, frozen=True, kw_only=True, tag_field="type", tag="nodestate.cordoned"
):
    by: str


class NodeStateUncordoned(
    Struct, frozen=True, kw_only=True, tag_field="type", tag="nodestate.uncordoned"
):
    by: str


class NodeStateDraining(
    Struct, frozen=True, kw_only=True, tag_field="type", tag="nodestate.draining"
):
    by: str


class NodeStateUnreachable(
    Struct, frozen=True, kw_only=True, tag_field="type", tag="nodestate.unreachable"
):
    silent_s: float


class NodeStateReachable(
    Struct, frozen=True, kw_only=True, tag_field="type", tag="nodestate.reachable"
):
    pass


class NodeStateLost(Struct, frozen=True, kw_only=True, tag_field="type", tag="nodestate.lost"):
    silent_s: float


class NodeStateRemoved(
    Struct, frozen=True, kw_only=True, tag_field="type", tag="nodestate.removed"
):
    by: str


class NodeStateDeleted(
    Struct, frozen=True, kw_only=True, tag_field="type", tag="nodestate.deleted"
):
    """A tombstone."""


NodeStateEvent = (
    NodeStateJoined
    | NodeStateCordoned
    | NodeStateUncordoned
    | NodeStateDraining
    | NodeStateUnreachable
    | NodeStateReachable
    | NodeStateLost
    | NodeStateRemoved
    | NodeStateDeleted
)
