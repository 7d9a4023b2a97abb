"""Folds the log's events into what a request needs to know: names, ready replicas, activations, records, adapters, keys.

The one mutable thing of the gateway's domain: its follower owns it and applies events in stream order;
everybody else only reads. It must not ask a clock, do I/O or remember anything about requests, so that
a table rebuilt from the log or from a snapshot is equal to the one that was there before.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from datetime import datetime

from msgspec import Struct

from events.log import Broken, Recorded
from gateway.domain.adaptertable import AdapterEntry, AdapterTable, Places
from gateway.domain.aliases import take_out
from gateway.domain.cards import CardRef, KnownCard, NodeCards
from gateway.domain.keytable import KeyTable
from schemas.activation import Activation
from schemas.adapter import Adapter
from schemas.cardnames import ANY_SCOPE, scope_of
from schemas.key import Key
from schemas.model import Model
from schemas.node import Node, NodeState
from schemas.record import Record, RecordCleared
from schemas.replica import TERMINAL_PHASES, Replica
from schemas.slots import Slots

NOUNS: frozenset[str] = frozenset(
    {"model", "adapter", "activation", "replica", "slots", "record", "node", "nodestate", "key"}
)
"""What this table is made of; the gateway follows these subjects and no others."""

IGNORED_NOUNS: frozenset[str] = frozenset(
    {"plan", "command", "leader.current", "leader.log", "card", "job", "file"}
)
"""Nouns a gateway has no use for, should a wider filter deliver them."""


class ModelEntry(Struct, frozen=True, kw_only=True):
    """A catalog entry, when it was added, and the sequence of its last change."""

    model: Model
    created: datetime
    seq: int

    @property
    def name(self) -> str:
        return self.model.name

    @property
    def aliases(self) -> tuple[str, ...]:
        return self.model.aliases


class ActivationEntry(Struct, frozen=True, kw_only=True):
    """An activation with the revision a new wish must name; `activation` None after a tombstone.

    The revision outlives the tombstone: a re-added model must not repeat an old dedupe id.
    """

    activation: Activation | None
    rev: int
    seq: int


class RecordEntry(Struct, frozen=True, kw_only=True):
    """A record and the sequence at which its failures were last cleared (0: never)."""

    record: Record
    cleared_seq: int = 0


class ReplicaChanged(Struct, frozen=True, kw_only=True):
    """A replica's state before and after one event; `after` None: the aggregate ended."""

    seq: int
    before: Replica | None
    after: Replica | None


class ModelTouched(Struct, frozen=True, kw_only=True):
    """Something a waiting request of `model` must look at again: entry, activation or record."""

    seq: int
    model: str


class NodeTouched(Struct, frozen=True, kw_only=True):
    """A node's standing or its cards changed, and with them what may be routed there."""

    seq: int
    node: str


class AdapterTouched(Struct, frozen=True, kw_only=True):
    """Something a waiting request for this adapter of `base` must look at again."""

    seq: int
    adapter: str
    base: str


class SlotsChanged(Struct, frozen=True, kw_only=True):
    """What a replica has loaded before and after one event; `after` None: its aggregate ended."""

    seq: int
    replica: str
    before: Places | None
    after: Places | None


Change = ReplicaChanged | ModelTouched | NodeTouched | AdapterTouched | SlotsChanged

NO_ACTIVATION = ActivationEntry(activation=None, rev=0, seq=0)


@dataclass(slots=True)
class Table:
    """All that the gateway knows from the log, as of `position`.

    `broken` are subjects whose last message cannot be read: the state before it is kept.
    """

    position: int = 0
    models: dict[str, ModelEntry] = field(default_factory=dict)
    aliases: dict[str, str] = field(default_factory=dict)
    activations: dict[tuple[str, str], ActivationEntry] = field(default_factory=dict)
    records: dict[str, RecordEntry] = field(default_factory=dict)
    replicas: dict[str, Replica] = field(default_factory=dict)
    nodes: dict[str, NodeCards] = field(default_factory=dict)
    nodestates: dict[str, NodeState] = field(default_factory=dict)
    adapters: AdapterTable = field(default_factory=AdapterTable)
    keys: KeyTable = field(default_factory=KeyTable)
    broken: dict[str, str] = field(default_factory=dict)
    unknown_events: int = 0
    _of_model: dict[str, dict[str, Replica]] = field(default_factory=dict)
    _routable: dict[str, tuple[Replica, ...]] = field(default_factory=dict)
    _on_card: dict[str, dict[str, tuple[Replica, ...]]] = field(default_factory=dict)
    _cards: dict[str, KnownCard] | None = None

    # -- reading ---------------------------------------------------------------------------------

    def model(self, name: str) -> Model | None:
        """The model of that name or alias; a name wins over an alias."""
        entry = self.models.get(name) or self.models.get(self.aliases.get(name, ""))
        return None if entry is None else entry.model

    def adapter(self, name: str) -> AdapterEntry | None:
        """The adapter a client means by `NAME` or `BASE:NAME`, where either may be an alias."""
        return self.adapters.find(name, self._name_of_model)

    def base_of(self, entry: AdapterEntry) -> Model | None:
        """The model an adapter is for; None when that name is another model's by now."""
        base = self.models.get(entry.adapter.base)
        if base is None or base.model.incarnation != entry.adapter.base_incarnation:
            return None
        return base.model

    def _name_of_model(self, name: str) -> str | None:
        model = self.model(name)
        return None if model is None else model.name

    def activation(self, model: str, scope: str = ANY_SCOPE) -> ActivationEntry:
        return self.activations.get((model, scope), NO_ACTIVATION)

    def record(self, model: str) -> Record | None:
        entry = self.records.get(model)
        return None if entry is None else entry.record

    def replicas_of(self, model: str, scope: str = ANY_SCOPE) -> Iterable[Replica]:
        """Its replicas of the scope that are not over, ordered by id."""
        found = [r for _, r in sorted(self._of_model.get(model, {}).items())]
        return found if scope == ANY_SCOPE else [r for r in found if self.is_on(r, scope)]

    def routable(self, model: str, scope: str = ANY_SCOPE) -> tuple[Replica, ...]:
        """Its ready replicas a request of the scope may go to by what the log says, ordered by id."""
        found = self._routable.get(model)
        if found is None:
            found = tuple(r for r in self.replicas_of(model) if self.may_route(r))
            self._routable[model] = found
        if scope == ANY_SCOPE:
            return found
        by_scope = self._on_card.setdefault(model, {})
        here = by_scope.get(scope)
        if here is None:
            here = tuple(r for r in found if self.is_on(r, scope))
            if scope in self.cards():  # a scope that a client made up is not remembered
                by_scope[scope] = here
        return here

    def is_on(self, replica: Replica, scope: str) -> bool:
        """Whether a request of the scope may be answered by this replica: one of its cards is that card."""
        if scope == ANY_SCOPE:
            return True
        if all(scope_of(replica.node, card) != scope for card in replica.cards):
            return False
        # Names that hold a `~` could spell one scope for two cards: it is that of the known one.
        known = self.cards().get(scope)
        return known is None or (known.ref.node == replica.node and known.ref.card in replica.cards)

    def cards(self) -> Mapping[str, KnownCard]:
        """Every card of a node that was not removed, by its scope; of two with one scope, the first."""
        found = self._cards
        if found is None:
            found = self._cards = {}
            for name, node in sorted(self.nodes.items()):
                state = self.nodestates.get(name)
                if state is not None and state.admin == "removed":
                    continue
                for info in node.cards:
                    ref = CardRef(node=name, card=info.id)
                    found.setdefault(ref.scope, KnownCard(ref=ref, info=info))
        return found

    def card(self, ref: CardRef) -> KnownCard | None:
        """The card of that name, None when no node has it."""
        known = self.cards().get(ref.scope)
        return known if known is not None and known.ref == ref else None

    def may_ask_for(self, scope: str) -> bool:
        """Whether a demand of the scope can mean anything: a card nobody reported is no wish's business."""
        return scope == ANY_SCOPE or scope in self.cards()

    def may_route(self, replica: Replica) -> bool:
        """Ready, of the entry's present incarnation, on a node that was not given up."""
        entry = self.models.get(replica.model)
        if (
            replica.phase != "ready"
            or replica.endpoint is None
            or entry is None
            or entry.model.incarnation != replica.incarnation
        ):
            return False
        node = self.nodestates.get(replica.node)
        return node is None or (node.reach != "lost" and node.admin != "removed")

    def unreachable(self, replica: Replica) -> bool:
        """Whether its node is silent: routed to only while the gateway's own probe passes."""
        node = self.nodestates.get(replica.node)
        return node is not None and node.reach == "unreachable"

    # -- folding ---------------------------------------------------------------------------------

    def apply(self, item: Recorded | Broken) -> Change | None:
        """Folds one stored event and says what it touched.

        1. at or before the position: seen already, ignored
        2. broken: the state before stays (taken from `previous` when there is none here), marked
        3. of a newer type or version: the state before stays, counted
        4. a noun of `IGNORED_NOUNS`: only the position moves
        5. otherwise folded; a state of None ends the aggregate
        """
        if item.seq <= self.position:  # 1
            return None
        self.position = item.seq
        if isinstance(item, Broken):  # 2
            self.broken[item.subject] = item.why
            if item.previous is not None:
                return self._fold(item.previous, known=False)
            self._not_read(item.subject)
            return None
        if item.problem is not None:  # 3
            self.unknown_events += 1
            self._not_read(item.subject)
            return None
        if item.noun in IGNORED_NOUNS:  # 4
            return None
        self.broken.pop(item.subject, None)
        return self._fold(item, known=True)  # 5

    def advance(self, position: int) -> None:
        """Nothing of interest was stored up to `position`."""
        self.position = max(self.position, position)

    def _not_read(self, subject: str) -> None:
        """Nothing is known of a key but that there is one: a yard must not open because of that."""
        _, *rest = subject.split(".")
        if rest[:2] == ["evt", "key"]:
            self.keys.not_read(rest[-1])

    def _fold(self, item: Recorded, *, known: bool) -> Change | None:
        """`known` False: an older event of a subject whose newest is broken; kept only when we have none."""
        state = item.state
        match item.noun:
            case "model":
                name = item.key[0]
                if not known and name in self.models:
                    return None
                self._fold_model(name, state if isinstance(state, Model) else None, item)
                return ModelTouched(seq=item.seq, model=name)
            case "adapter":
                name = item.key[0]
                before_entry = self.adapters.entries.get(name)
                if not known and before_entry is not None:
                    return None
                adapter = state if isinstance(state, Adapter) else None
                self.adapters.fold_adapter(name, adapter, item.time, item.seq)
                ended = before_entry.adapter if before_entry is not None else None
                base = adapter or ended
                return AdapterTouched(
                    seq=item.seq, adapter=name, base="" if base is None else base.base
                )
            case "slots":
                replica_id = item.key[1]
                before_places = self.adapters.places.get(replica_id)
                if not known and before_places is not None:
                    return None
                self.adapters.fold_slots(replica_id, state if isinstance(state, Slots) else None)
                return SlotsChanged(
                    seq=item.seq,
                    replica=replica_id,
                    before=before_places,
                    after=self.adapters.places.get(replica_id),
                )
            case "activation":
                key = (item.key[0], item.key[1])
                if not known and key in self.activations:
                    return None
                self.activations[key] = ActivationEntry(
                    activation=state if isinstance(state, Activation) else None,
                    rev=item.rev,
                    seq=item.seq,
                )
                return ModelTouched(seq=item.seq, model=item.key[0])
            case "record":
                name = item.key[0]
                if not known and name in self.records:
                    return None
                self._fold_record(name, state if isinstance(state, Record) else None, item)
                return ModelTouched(seq=item.seq, model=name)
            case "replica":
                replica_id = item.key[1]
                before = self.replicas.get(replica_id)
                if not known and before is not None:
                    return None
                after = state if isinstance(state, Replica) else None
                if after is None:
                    self._drop_replica(replica_id)
                else:
                    self.put_replica(after)
                return ReplicaChanged(seq=item.seq, before=before, after=after)
            case "node":
                node = item.key[0]
                before_cards = self.nodes.get(node)
                if not known and before_cards is not None:
                    return None
                if isinstance(state, Node):
                    told = NodeCards(node=node, cards=state.cards)
                    if told == before_cards:
                        return None  # its engines changed, or its agent ended or began
                    self.nodes[node] = told
                else:
                    self.nodes.pop(node, None)
                self._forget_cards()
                return NodeTouched(seq=item.seq, node=node)
            case "key":
                # Whoever was let in stays; who comes next is judged by what the table says then.
                id = item.key[0]
                if not known and id in self.keys.keys:
                    return None
                if isinstance(state, Key):
                    self.keys.put(state)
                else:
                    self.keys.drop(id)
                return None
            case "nodestate":
                node = item.key[0]
                if not known and node in self.nodestates:
                    return None
                if isinstance(state, NodeState):
                    self.nodestates[node] = state
                else:
                    self.nodestates.pop(node, None)
                self._routable.clear()
                self._forget_cards()
                return NodeTouched(seq=item.seq, node=node)
            case _:
                # A noun of a newer version that the codec let through.
                self.unknown_events += 1
                return None

    def put_model(self, entry: ModelEntry) -> None:
        """Sets one catalog entry and its aliases in place of what it had before."""
        name = entry.model.name
        self._drop_model(name)
        self.models[name] = entry
        self.aliases.update(dict.fromkeys(entry.model.aliases, name))

    def put_replica(self, replica: Replica) -> None:
        """Sets one replica; one that is over leaves no trace: its id never comes back."""
        self._drop_replica(replica.id)
        if replica.phase not in TERMINAL_PHASES:
            self.replicas[replica.id] = replica
            self._of_model.setdefault(replica.model, {})[replica.id] = replica
            self._forget_routable(replica.model)

    def _forget_routable(self, model: str) -> None:
        self._routable.pop(model, None)
        self._on_card.pop(model, None)

    def _forget_cards(self) -> None:
        self._cards = None
        self._on_card.clear()

    def _fold_model(self, name: str, model: Model | None, item: Recorded) -> None:
        if model is None:
            self._drop_model(name)
            return
        before = self.models.get(name)
        same = before is not None and before.model.incarnation == model.incarnation
        created = before.created if before is not None and same else item.time
        self.put_model(ModelEntry(model=model, created=created, seq=item.seq))

    def _fold_record(self, name: str, record: Record | None, item: Recorded) -> None:
        if record is None:
            self.records.pop(name, None)
            return
        before = self.records.get(name)
        cleared = 0 if before is None else before.cleared_seq
        if isinstance(item.event, RecordCleared):
            cleared = item.seq
        self.records[name] = RecordEntry(record=record, cleared_seq=cleared)

    def _drop_model(self, name: str) -> None:
        take_out(self.models, self.aliases, name)
        self._forget_routable(name)

    def _drop_replica(self, replica_id: str) -> None:
        before = self.replicas.pop(replica_id, None)
        if before is None:
            return
        of_model = self._of_model[before.model]
        del of_model[replica_id]
        if not of_model:
            del self._of_model[before.model]
        self._forget_routable(before.model)
