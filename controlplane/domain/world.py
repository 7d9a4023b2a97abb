"""Holds everything the log says, by noun, with the sequence and revision of each subject.

The one mutable thing in the domain: the leader's loop owns it, applies events in stream order, and hands
it to pure functions that only read. It never asks a clock and never does I/O.
"""

from dataclasses import dataclass, field
from datetime import datetime
from typing import Final, TypeVar

from msgspec import Struct

from events.log import Broken, Recorded
from events.subjects import PREFIX, event_subject
from schemas.activation import Activation
from schemas.adapter import Adapter
from schemas.card import Card
from schemas.commands import Outcome
from schemas.file import BUSY_PHASES, File
from schemas.job import Job
from schemas.key import Key
from schemas.leader import Leader, LeaderLine
from schemas.model import Model
from schemas.node import Node, NodeState
from schemas.plan import Plan
from schemas.record import Record
from schemas.replica import Replica
from schemas.slots import Slots

S = TypeVar("S", bound=Struct)


class Head(Struct, frozen=True, kw_only=True):
    """Where a subject stands: what the next append must expect.

    `writable` is False when its last message was not fully decoded (newer version or broken): no
    decider may write over it; `problem` says why. `stored_at` is the server's time of that message.
    """

    seq: int = 0
    rev: int = 0
    id: str = ""
    type: str = ""
    epoch: int = 0
    stored_at: datetime | None = None
    writable: bool = True
    problem: str = ""


NO_HEAD = Head()

_TOUCHED_KEPT: Final = 20_000
"""Who is further behind than this reads everything again instead."""


@dataclass(slots=True)
class World:
    """All aggregates by their key; `position` is the last sequence applied. `prefix` is the yard's."""

    prefix: str = PREFIX
    position: int = 0
    heads: dict[str, Head] = field(default_factory=dict)
    models: dict[str, Model] = field(default_factory=dict)
    adapters: dict[str, Adapter] = field(default_factory=dict)
    activations: dict[tuple[str, str], Activation] = field(default_factory=dict)
    plans: dict[str, Plan] = field(default_factory=dict)
    records: dict[str, Record] = field(default_factory=dict)
    nodestates: dict[str, NodeState] = field(default_factory=dict)
    outcomes: dict[str, Outcome] = field(default_factory=dict)
    leader: Leader | None = None
    line: LeaderLine | None = None
    nodes: dict[str, Node] = field(default_factory=dict)
    jobs: dict[str, Job] = field(default_factory=dict)
    files: dict[str, File] = field(default_factory=dict)
    keys: dict[str, Key] = field(default_factory=dict)
    cards: dict[tuple[str, str], Card] = field(default_factory=dict)
    replicas: dict[str, Replica] = field(default_factory=dict)
    slots: dict[str, Slots] = field(default_factory=dict)
    """By replica."""
    unknown_events: int = 0
    broken_events: int = 0
    touched: list[tuple[str, tuple[str, ...]]] = field(default_factory=list)
    """(noun, key) of every aggregate folded since number `touched_from`: what an index must look at again."""
    touched_from: int = 0
    running_jobs: set[str] = field(default_factory=set)
    """Ids of the jobs that are not over."""
    busy_files: set[str] = field(default_factory=set)
    """Keys of the files some mirror is to do something with: fetch, verify or remove."""
    unread_adapters: set[str] = field(default_factory=set)
    """Names of the adapters that are not ready and not refused yet."""

    def subject(self, noun: str, *key: str) -> str:
        return event_subject(noun, *key, prefix=self.prefix)

    def head(self, noun: str, *key: str) -> Head:
        return self.heads.get(self.subject(noun, *key), NO_HEAD)

    def apply(self, item: Recorded | Broken) -> None:
        """Folds one stored event; one at or before the subject's head is ignored (own events come twice)."""
        self.position = max(self.position, item.seq)
        head = self.heads.get(item.subject, NO_HEAD)
        if item.seq <= head.seq:
            return
        if isinstance(item, Broken):
            self.broken_events += 1
            if item.previous is not None:
                self._fold(item.previous)
            self.heads[item.subject] = Head(
                seq=item.seq, rev=head.rev, writable=False, problem=item.why
            )
            return
        self.heads[item.subject] = Head(
            seq=item.seq,
            rev=item.rev,
            id=item.id,
            type=item.type,
            epoch=item.epoch,
            stored_at=item.stored_at,
            writable=item.problem is None,
            problem=item.problem or "",
        )
        if item.problem is not None:
            self.unknown_events += 1
            return
        self._fold(item)

    def _touch(self, noun: str, key: tuple[str, ...]) -> None:
        self.touched.append((noun, key))
        if len(self.touched) > _TOUCHED_KEPT * 2:
            del self.touched[:_TOUCHED_KEPT]
            self.touched_from += _TOUCHED_KEPT

    def _fold(self, item: Recorded) -> None:
        state = item.state
        self._touch(item.noun, item.key)
        match item.noun:
            case "model":
                _put(self.models, item.key[0], state, Model)
            case "adapter":
                _put(self.adapters, item.key[0], state, Adapter)
                _keep(
                    self.unread_adapters,
                    item.key[0],
                    isinstance(state, Adapter) and state.phase in ("reading", "fetching"),
                )
            case "activation":
                _put(self.activations, (item.key[0], item.key[1]), state, Activation)
            case "plan":
                _put(self.plans, item.key[0], state, Plan)
            case "record":
                _put(self.records, item.key[0], state, Record)
            case "nodestate":
                _put(self.nodestates, item.key[0], state, NodeState)
            case "command":
                _put(self.outcomes, item.key[0], state, Outcome)
            case "job":
                _put(self.jobs, item.key[0], state, Job)
                _keep(
                    self.running_jobs,
                    item.key[0],
                    isinstance(state, Job) and state.state == "running",
                )
            case "file":
                _put(self.files, item.key[0], state, File)
                _keep(
                    self.busy_files,
                    item.key[0],
                    isinstance(state, File) and any(c.phase in BUSY_PHASES for c in state.copies),
                )
            case "key":
                _put(self.keys, item.key[0], state, Key)
            case "node":
                _put(self.nodes, item.key[0], state, Node)
            case "card":
                _put(self.cards, (item.key[0], item.key[1]), state, Card)
            case "replica":
                _put(self.replicas, item.key[1], state, Replica)
            case "slots":
                _put(self.slots, item.key[1], state, Slots)
            case "leader.current":
                self.leader = state if isinstance(state, Leader) else None
            case "leader.log":
                self.line = state if isinstance(state, LeaderLine) else None
            case _:
                # A noun of a newer version: the codec already said so in `problem`.
                self.unknown_events += 1


K = TypeVar("K")


def _put(table: dict[K, S], key: K, state: object, kind: type[S]) -> None:
    """Sets or (on a tombstone) removes one aggregate; a removed one leaves no trace in the tables."""
    if isinstance(state, kind):
        table[key] = state
    else:
        table.pop(key, None)


def _keep(members: set[str], key: str, is_member: bool) -> None:
    if is_member:
        members.add(key)
    else:
        members.discard(key)
