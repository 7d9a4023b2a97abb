"""Makes the events a gateway folds, as values: a small story of models, replicas and activations.

No log is behind it; positions only have to grow.
"""

from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from typing import Any

from events.log import Broken, Recorded
from events.subjects import event_subject
from gateway.domain.table import Change, Table
from schemas.activation import (
    Activation,
    ActivationDeleted,
    ActivationIdle,
    ActivationLoading,
    ActivationPhase,
    ActivationPlacing,
    ActivationReady,
    ActivationRefused,
    ActivationWaiting,
    ActivationWanted,
)
from schemas.adapter import Adapter, AdapterAdded, AdapterDeleted, AdapterReady, AdapterRefused
from schemas.messages import TYPE_PREFIX, Event, State, tag_of
from schemas.model import Model, ModelAdded, ModelChanged, ModelDeleted, Profile, Scaling
from schemas.node import (
    CardInfo,
    Node,
    NodeDeleted,
    NodeStarted,
    NodeState,
    NodeStateJoined,
    NodeStateUnreachable,
)
from schemas.record import Quarantine, Record, RecordCleared, RecordMeasured, RecordQuarantined
from schemas.replica import (
    Replica,
    ReplicaDraining,
    ReplicaFailed,
    ReplicaFetching,
    ReplicaParked,
    ReplicaPhase,
    ReplicaReady,
    ReplicaStarting,
    ReplicaStopped,
    ReplicaWaiting,
)
from schemas.slots import BadAdapter, Slot, Slots, SlotsDeleted, SlotsDrifted

NOW = datetime(2026, 3, 1, 12, 0, 0, tzinfo=UTC)
CHAT = "/v1/chat/completions"
PATHS = (CHAT, "/v1/completions")


def a_model(name: str = "m", **fields: Any) -> Model:
    fields.setdefault("scaling", Scaling(min=0, max=1))
    fields.setdefault("incarnation", f"inc-{name}")
    return Model(name=name, **fields)


def a_replica(id: str = "r-1", phase: ReplicaPhase = "ready", **fields: Any) -> Replica:
    model = fields.setdefault("model", "m")
    defaults: dict[str, Any] = {
        "node": "n1",
        "incarnation": f"inc-{model}",
        "profile": "cpu",
        "revision": "v1",
        "engine": "command",
        "since": NOW,
        "epoch": 1,
        "endpoint": "http://127.0.0.1:20001",
        "paths": PATHS,
        "pid": 100,
        "started_at": NOW,
        "was_ready": phase in ("ready", "draining"),
    }
    return Replica(id=id, phase=phase, **(defaults | fields))


def a_profile(*card: str, name: str = "p", **fields: Any) -> Profile:
    """For cards of any kind unless told for which."""
    fields.setdefault("engine", "command")
    fields.setdefault("memory_bytes", 1)
    return Profile(name=name, card=card or ("cpu", "gpu"), **fields)


def a_node(node: str = "n1", *ids: str, **fields: Any) -> Node:
    """A machine with its `cpu` card and one of kind gpu for each id."""
    cards = [CardInfo(id="cpu", kind="cpu", memory_bytes=1 << 30)]
    cards += [CardInfo(id=id, kind="gpu", memory_bytes=1 << 30) for id in ids]
    defaults: dict[str, Any] = {"cards": tuple(cards), "running": True, "started_at": NOW}
    return Node(id=node, **(defaults | fields))


def an_adapter(name: str = "poet", **fields: Any) -> Adapter:
    """Ready, of the model `m`, unless told otherwise."""
    base = fields.setdefault("base", "m")
    defaults: dict[str, Any] = {
        "incarnation": f"inc-{name}",
        "base_incarnation": f"inc-{base}",
        "phase": "ready",
        "since": NOW,
        "version": f"{sum(name.encode()):012x}",
    }
    return Adapter(name=name, **(defaults | fields))


def a_slot(adapter: str | Adapter, **fields: Any) -> Slot:
    """The place of the present version of an adapter, of one by name as `an_adapter` makes it."""
    of = an_adapter(adapter) if isinstance(adapter, str) else adapter
    return Slot(adapter=of.name, **({"version": of.version, "since": NOW} | fields))


def a_failure(adapter: str | Adapter, **fields: Any) -> BadAdapter:
    """A load of it that failed, remembered for a minute."""
    of = an_adapter(adapter) if isinstance(adapter, str) else adapter
    defaults: dict[str, Any] = {
        "version": of.version,
        "code": "load_failed",
        "reason": "the engine said no",
        "until": NOW + timedelta(seconds=60),
    }
    return BadAdapter(adapter=of.name, **(defaults | fields))


def some_slots(replica: str = "r-1", *loaded: str | Adapter | Slot, **fields: Any) -> Slots:
    """What the agent tells of a replica's adapters."""
    places = tuple(s if isinstance(s, Slot) else a_slot(s) for s in loaded)
    defaults: dict[str, Any] = {"node": "n1", "model": "m", "epoch": 1, "limit": 4, "since": NOW}
    return Slots(replica=replica, loaded=places, **(defaults | fields))


def an_activation(phase: ActivationPhase = "loading", **fields: Any) -> Activation:
    model = fields.setdefault("model", "m")
    defaults: dict[str, Any] = {
        "incarnation": f"inc-{model}",
        "wanted_at": NOW,
        "since": NOW,
        "profile": "cpu",
    }
    return Activation(phase=phase, **(defaults | fields))


_REPLICA_EVENTS: dict[str, Event] = {
    "waiting": ReplicaWaiting(waiting_for="l-1"),
    "fetching": ReplicaFetching(source="mirror"),
    "starting": ReplicaStarting(port=20001),
    "ready": ReplicaReady(),
    "draining": ReplicaDraining(decision="d-1"),
    "parked": ReplicaParked(),
    "stopped": ReplicaStopped(),
    "failed": ReplicaFailed(code="exited"),
}

_ACTIVATION_EVENTS: dict[str, Event] = {
    "wanted": ActivationWanted(by="gateway"),
    "placing": ActivationPlacing(replica="r-1"),
    "waiting": ActivationWaiting(waiting_for=("r-0",)),
    "loading": ActivationLoading(replica="r-1"),
    "ready": ActivationReady(replica="r-1"),
    "refused": ActivationRefused(code="start_failed"),
    "idle": ActivationIdle(cause="nobody asked"),
}


@dataclass
class Story:
    """Counts sequences and revisions; each method gives one stored event."""

    seq: int = 0
    revs: dict[str, int] = field(default_factory=dict)

    def event(
        self, noun: str, key: tuple[str, ...], event: Event, state: State | None, **fields: Any
    ) -> Recorded:
        self.seq += 1
        subject = event_subject(noun, *key)
        self.revs[subject] = self.revs.get(subject, 0) + 1
        defaults: dict[str, Any] = {
            "id": f"e-{self.seq}",
            "type": TYPE_PREFIX + tag_of(event),
            "time": NOW + timedelta(milliseconds=self.seq),
            "stored_at": NOW + timedelta(milliseconds=self.seq),
            "rev": self.revs[subject],
            "epoch": 1,
            "actor": "test",
            "reason": "",
            "event": event,
            "state": state,
        }
        return Recorded(seq=self.seq, subject=subject, noun=noun, key=key, **(defaults | fields))

    def model(self, name: str = "m", **fields: Any) -> Recorded:
        subject = event_subject("model", name)
        event: Event = ModelAdded(by="test")
        if subject in self.revs:
            event = ModelChanged(by="test", fields=())
        return self.event("model", (name,), event, a_model(name, **fields))

    def model_gone(self, name: str = "m") -> Recorded:
        return self.event("model", (name,), ModelDeleted(), None)

    def replica(self, id: str = "r-1", phase: ReplicaPhase = "ready", **fields: Any) -> Recorded:
        state = a_replica(id, phase, **fields)
        return self.event("replica", (state.node, id), _REPLICA_EVENTS[phase], state)

    def adapter(self, name: str = "poet", **fields: Any) -> Recorded:
        state = an_adapter(name, **fields)
        event: Event = AdapterAdded(by="test")
        if state.phase == "ready":
            event = AdapterReady(version=state.version)
        elif state.phase == "refused":
            event = AdapterRefused(code=state.code)
        return self.event("adapter", (name,), event, state)

    def adapter_gone(self, name: str = "poet") -> Recorded:
        return self.event("adapter", (name,), AdapterDeleted(), None)

    def slots(self, replica: str = "r-1", *loaded: str | Adapter | Slot, **fields: Any) -> Recorded:
        """What is loaded in a replica, as its agent tells it."""
        state = some_slots(replica, *loaded, **fields)
        return self.event("slots", (state.node, replica), SlotsDrifted(), state)

    def slots_gone(self, replica: str = "r-1", node: str = "n1") -> Recorded:
        return self.event("slots", (node, replica), SlotsDeleted(), None)

    def activation(self, phase: ActivationPhase = "loading", **fields: Any) -> Recorded:
        state = an_activation(phase, **fields)
        return self.event(
            "activation", (state.model, state.scope), _ACTIVATION_EVENTS[phase], state
        )

    def activation_gone(self, model: str = "m", scope: str = "any") -> Recorded:
        return self.event("activation", (model, scope), ActivationDeleted(), None)

    def record(self, model: str = "m", **fields: Any) -> Recorded:
        state = Record(model=model, incarnation=f"inc-{model}", **fields)
        event = RecordMeasured(replica="r-1", memory_bytes=1, load_s=1.0)
        return self.event("record", (model,), event, state)

    def quarantined(self, until: datetime, reason: str = "gave up", model: str = "m") -> Recorded:
        quarantine = Quarantine(since=NOW, until=until, reason=reason)
        state = Record(model=model, incarnation=f"inc-{model}", quarantined=quarantine)
        return self.event("record", (model,), RecordQuarantined(until=until), state)

    def cleared(self, model: str = "m") -> Recorded:
        state = Record(model=model, incarnation=f"inc-{model}")
        return self.event("record", (model,), RecordCleared(cause="load"), state)

    def node(self, node: str = "n1", **fields: Any) -> Recorded:
        state = NodeState(node=node, since=NOW, **fields)
        event: Event = NodeStateJoined()
        if state.reach == "unreachable":
            event = NodeStateUnreachable(silent_s=30.0)
        return self.event("nodestate", (node,), event, state)

    def cards(self, node: str = "n1", *ids: str, **fields: Any) -> Recorded:
        """What an agent tells of its machine: a `cpu` card and one of kind gpu for each id."""
        state = a_node(node, *ids, **fields)
        return self.event("node", (node,), NodeStarted(), state)

    def cards_gone(self, node: str = "n1") -> Recorded:
        return self.event("node", (node,), NodeDeleted(), None)

    def broken(self, noun: str, *key: str, previous: Recorded | None = None) -> Broken:
        self.seq += 1
        return Broken(
            seq=self.seq, subject=event_subject(noun, *key), why="not JSON", previous=previous
        )


def folded(*items: Recorded | Broken, table: Table | None = None) -> Table:
    """The table after these events."""
    table = table or Table()
    for item in items:
        table.apply(item)
    return table


def changes(table: Table, *items: Recorded | Broken) -> list[Change]:
    return [c for i in items if (c := table.apply(i)) is not None]
