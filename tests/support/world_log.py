"""Keeps the log of a yard in memory, folded into a world, and checks what must always hold of a decision.

Nothing happens here by itself: agents are acted in tests/support/world_agents.py, the leader in tests/support/worlds.py.
"""

from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Self

from msgspec.structs import replace

from controlplane.domain.activation import TRANSITIONS
from controlplane.domain.decision import Change, Decision
from controlplane.domain.world import World
from events.log import Recorded
from events.subjects import event_subject
from schemas.activation import Activation
from schemas.card import Card, CardMeasured
from schemas.commands import CommandAccepted, CommandRejected
from schemas.messages import Event, State, tag_of
from schemas.model import Model, ModelAdded
from schemas.node import CardInfo, Node, NodeStarted

GIB = 1024**3
T0 = datetime(2026, 1, 1, 12, 0, 0, tzinfo=UTC)


@dataclass
class Engine:
    """How engines of one model behave: seconds to fetch and to load, and whether the next starts fail."""

    fetch_s: float = 0.0
    load_s: float = 2.0
    fail_code: str = "exited"
    fails: int = 0
    last_line: str = "error: out of luck"
    measured_bytes: int | None = None
    tells_counters: bool = False


@dataclass
class Stream:
    """A request running on a replica until `ends_at`."""

    model: str
    replica: str
    ends_at: datetime


@dataclass
class LoggedYard:
    """What a yard has come to: its log, its world, its engines and the requests that run on them."""

    now: datetime = T0
    world: World = field(default_factory=World)
    engines: dict[str, Engine] = field(default_factory=dict)
    silent_since: dict[str, datetime] = field(default_factory=dict)
    refuses: set[str] = field(default_factory=set)
    streams: list[Stream] = field(default_factory=list)
    decisions: list[Decision] = field(default_factory=list)
    log: list[Recorded] = field(default_factory=list)
    _seq: int = 0

    # -- the log

    def append(
        self, noun: str, key: tuple[str, ...], event: Event, state: State | None, reason: str = ""
    ) -> Recorded:
        self._seq += 1
        head = self.world.head(noun, *key)
        recorded = Recorded(
            seq=self._seq,
            subject=event_subject(noun, *key),
            noun=noun,
            key=key,
            id=f"e-{self._seq}",
            type=tag_of(event),
            time=self.now,
            stored_at=self.now,
            rev=head.rev + 1,
            epoch=1,
            actor="test",
            reason=reason,
            event=event,
            state=state,
        )
        self.world.apply(recorded)
        self.log.append(recorded)
        return recorded

    def events(self, noun: str | None = None) -> list[str]:
        return [item.type for item in self.log if noun is None or item.noun == noun]

    def carry_out(self, decision: Decision) -> None:
        self.decisions.append(decision)
        self.check(decision)
        for change in decision.changes:
            self.append(change.noun, change.key, change.event, change.state, change.reason)
        outcome = decision.outcome
        if outcome is not None:
            event: CommandAccepted | CommandRejected = (
                CommandAccepted(refs=outcome.refs)
                if outcome.status == "accepted"
                else CommandRejected(code=outcome.code or "")
            )
            self.append("command", (outcome.id,), event, outcome)

    def check(self, decision: Decision) -> None:
        """What holds of every decision: something changes, one event per subject, moves of the table."""
        assert decision.changes or decision.outcome is not None, decision.what
        subjects = [(c.noun, c.key) for c in decision.changes]
        assert len(subjects) == len(set(subjects)), f"one subject twice: {decision.what}"
        for change in decision.changes:
            assert self.world.head(change.noun, *change.key).writable, decision.what
            self._check_move(change)
            self._check_progress(change, decision)

    def _check_move(self, change: Change) -> None:
        if change.noun != "activation" or not isinstance(change.state, Activation):
            return
        before = self.world.activations.get((change.key[0], change.key[1]))
        phase = before.phase if before is not None else None
        assert TRANSITIONS[(phase, tag_of(change.event))] == change.state.phase
        if change.state.phase == "refused":
            assert change.state.reason, "a refusal names its reasons"
            is_off = change.state.code == "model_off"
            assert is_off or change.state.retry_at is not None, "and when to come back"

    def _check_progress(self, change: Change, decision: Decision) -> None:
        tables: dict[str, dict[object, object]] = {  # type: ignore[assignment]
            "activation": self.world.activations,
            "plan": self.world.plans,
            "record": self.world.records,
            "nodestate": self.world.nodestates,
            "model": self.world.models,
        }
        key = change.key[0] if len(change.key) == 1 else change.key
        before = tables[change.noun].get(key)
        if decision.outcome is None:
            assert before != change.state, f"nothing changes: {decision.what}"

    # -- who is there

    def node(
        self,
        id_: str = "n1",
        cards: dict[str, float] | None = None,
        *,
        kind: str = "gpu",
        allow_commands: bool = True,
    ) -> Self:
        """A node whose cards have so many GiB."""
        given = cards if cards is not None else {"gpu0": 8}
        infos = tuple(
            CardInfo(id=card, kind=kind, memory_bytes=int(gib * GIB))  # type: ignore[arg-type]
            for card, gib in given.items()
        )
        self.append(
            "node",
            (id_,),
            NodeStarted(),
            Node(
                id=id_,
                running=True,
                started_at=self.now,
                cards=infos,
                allow_commands=allow_commands,
                epoch=1,
            ),
        )
        for info in infos:
            self.append(
                "card",
                (id_, info.id),
                CardMeasured(used_bytes=0),
                Card(node=id_, id=info.id, kind=info.kind, memory_bytes=info.memory_bytes, rev=1),
            )
        return self

    def add(self, *entries: Model) -> Self:
        for order, entry in enumerate(entries):
            self.append("model", (entry.name,), ModelAdded(by="test"), replace(entry, order=order))
        return self

    def engine(self, name: str) -> Engine:
        return self.engines.setdefault(name, Engine())
