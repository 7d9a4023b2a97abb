"""Builds worlds for tests, and plays a yard in memory: a pure model of agents, engines and gateways.

`Yard` carries out the leader's decisions as the real parts would, on a clock that only `advance` moves.
It checks on the way what must always hold of decisions; it decides nothing the leader decides.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta

from msgspec.structs import replace

from controlplane.domain import step
from controlplane.domain.activation import TRANSITIONS
from controlplane.domain.decision import (
    AgentLive,
    Change,
    Decision,
    GatewayLive,
    Ids,
    Live,
    ReplicaLive,
    Step,
)
from controlplane.domain.index import StepIndex
from controlplane.domain.world import World
from events.log import Recorded, StoredCommand
from events.subjects import command_subject, event_subject
from schemas.activation import PENDING_PHASES, Activation
from schemas.beacons import EngineCounters
from schemas.card import Card, CardLeased, CardMeasured, CardReleased, Lease
from schemas.commands import (
    Command,
    CommandAccepted,
    CommandBody,
    CommandRejected,
    ModelActivate,
    Outcome,
)
from schemas.messages import Event, State, tag_of
from schemas.model import Model, ModelAdded, Profile, Scaling
from schemas.node import CardInfo, Node, NodeStarted, NodeState, NodeStopped
from schemas.plan import PlanItem
from schemas.record import Record
from schemas.replica import (
    TERMINAL_PHASES,
    Replica,
    ReplicaDraining,
    ReplicaFailed,
    ReplicaFetching,
    ReplicaReady,
    ReplicaRefused,
    ReplicaStarting,
    ReplicaStopped,
    ReplicaWithdrawn,
)
from schemas.settings import ControlplaneSettings

GIB = 1024**3
T0 = datetime(2026, 1, 1, 12, 0, 0, tzinfo=UTC)
SETTINGS = ControlplaneSettings()


def profile(name: str = "p", gib: float = 1, **fields: object) -> Profile:
    defaults: dict[str, object] = {
        "engine": "llamacpp",
        "card": ("gpu",),
        "memory_bytes": int(gib * GIB),
    }
    return Profile(name=name, **{**defaults, **fields})  # type: ignore[arg-type]


def model(
    name: str = "a",
    gib: float = 1,
    *,
    minimum: int = 0,
    maximum: int = 1,
    idle_s: float = 60.0,
    profiles: Sequence[Profile] | None = None,
    incarnation: str | None = None,
    **fields: object,
) -> Model:
    return Model(
        name=name,
        incarnation=incarnation or f"i-{name}",
        source=f"/models/{name}.gguf",
        scaling=Scaling(min=minimum, max=maximum, idle_timeout_s=idle_s),
        profiles=tuple(profiles) if profiles is not None else (profile(gib=gib),),
        **fields,  # type: ignore[arg-type]
    )


def counting_ids(counts: dict[str, int] | None = None) -> Ids:
    """Ids counted up in `counts`, which a test may copy to see the same ids again."""
    counts = counts if counts is not None else {}

    def mint(kind: str) -> Callable[[], str]:
        def one() -> str:
            counts[kind] = counts.get(kind, 0) + 1
            return f"{kind}-{counts[kind]:04d}"

        return one

    return Ids(replica=mint("r"), decision=mint("d"), incarnation=mint("i"), job=mint("j"))


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
class Yard:
    """One yard: the world, its nodes and the requests in it. `gateways` are names that beacon."""

    settings: ControlplaneSettings = SETTINGS
    now: datetime = T0
    world: World = field(default_factory=World)
    counts: dict[str, int] = field(default_factory=lambda: {"r": 0, "d": 0, "i": 0})
    index: StepIndex | None = field(default_factory=StepIndex)
    engines: dict[str, Engine] = field(default_factory=dict)
    gateways: list[str] = field(default_factory=lambda: ["gw1"])
    leading_since: datetime = T0 - timedelta(hours=1)
    silent: set[str] = field(default_factory=set)
    silent_since: dict[str, datetime] = field(default_factory=dict)
    deaf_agents: set[str] = field(default_factory=set)
    refuses: set[str] = field(default_factory=set)
    streams: list[Stream] = field(default_factory=list)
    waiting: dict[str, list[datetime]] = field(default_factory=dict)
    last_use: dict[str, datetime] = field(default_factory=dict)
    stream_s: float = 0.5
    answered: list[tuple[datetime, str, str]] = field(default_factory=list)
    refused: list[tuple[datetime, str, str]] = field(default_factory=list)
    pending: list[StoredCommand] = field(default_factory=list)
    decisions: list[Decision] = field(default_factory=list)
    log: list[Recorded] = field(default_factory=list)
    sent: set[str] = field(default_factory=set)
    compares: bool = False
    dead_since: datetime | None = None
    _seq: int = 0
    _command_seq: int = 0

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
    ) -> "Yard":
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

    def add(self, *entries: Model) -> "Yard":
        for order, entry in enumerate(entries):
            self.append("model", (entry.name,), ModelAdded(by="test"), replace(entry, order=order))
        return self

    def engine(self, name: str) -> Engine:
        return self.engines.setdefault(name, Engine())

    # -- what the leader hears

    def live(self) -> Live:
        leading = (self.now - self.leading_since).total_seconds()
        inflight: dict[str, int] = {}
        for stream in self.streams:
            inflight[stream.replica] = inflight.get(stream.replica, 0) + 1
        use = {m: (self.now - at).total_seconds() for m, at in self.last_use.items()}
        used_at = {m: at.timestamp() for m, at in self.last_use.items()}
        dead_s = (self.now - self.dead_since).total_seconds() if self.dead_since else 0.0
        gateways = tuple(
            GatewayLive(
                gateway=name,
                incarnation="1",
                age_s=dead_s,
                position=self.world.position,
                inflight=inflight if place == 0 else {},
                waiting={m: len(w) for m, w in self.waiting.items() if w} if place == 0 else {},
                last_use_age_s=use if place == 0 else {},
                last_use_at_s=used_at if place == 0 else {},
            )
            for place, name in enumerate(self.gateways)
        )
        agents: list[AgentLive] = []
        for node in sorted(self.world.nodes):
            if node in self.deaf_agents:
                continue
            since = self.silent_since.get(node)
            age = (self.now - since).total_seconds() if since is not None else 0.0
            agents.append(
                AgentLive(
                    node=node,
                    epoch=1,
                    age_s=age,
                    heard=max(int(leading // 5), 1),
                    heard_for_s=leading,
                    trusted_for_s=leading - 10.0 if leading >= 10.0 else None,
                    replicas=self._counters(node, inflight),
                )
            )
        return Live(leading_for_s=leading, gateways=gateways, agents=tuple(agents))

    def _counters(self, node: str, inflight: dict[str, int]) -> dict[str, ReplicaLive]:
        return {
            r.id: ReplicaLive(counters=EngineCounters(inflight=inflight.get(r.id, 0)))
            for r in self.world.replicas.values()
            if r.node == node and r.phase == "ready" and self.engine(r.model).tells_counters
        }

    def fall_silent(self, *nodes: str) -> None:
        for node in nodes:
            self.silent_since[node] = self.now

    def speak_again(self, *nodes: str) -> None:
        for node in nodes:
            self.silent_since.pop(node, None)

    # -- commands

    def send(
        self,
        body: CommandBody,
        *,
        actor: str = "admin",
        id_: str | None = None,
        ttl_s: float = 60.0,
    ) -> str:
        self._command_seq += 1
        command = Command(id=id_ or f"c-{self._command_seq:04d}", body=body, ttl_s=ttl_s)
        name = str(type(body).__struct_config__.tag)
        self.pending.append(
            StoredCommand(
                seq=self._command_seq,
                subject=command_subject(actor, name),
                actor=actor,
                name=name,
                stored_at=self.now,
                command=command,
                id=command.id,
            )
        )
        return command.id

    def do(self, body: CommandBody, **kw: object) -> Outcome:
        """Sends a command, lets the leader act, and returns its outcome."""
        id_ = self.send(body, **kw)  # type: ignore[arg-type]
        self.settle()
        return self.world.outcomes[id_]

    # -- the leader

    def step(self) -> Step:
        return step.next_decision(
            self.world,
            self.live(),
            tuple(self.pending),
            self.now,
            counting_ids(self.counts),
            self.settings,
            self.index,
        )

    def step_afresh(self) -> Step:
        """What a leader without any memory would answer now, with the ids the next step will mint."""
        return step.next_decision(
            self.world,
            self.live(),
            tuple(self.pending),
            self.now,
            counting_ids(dict(self.counts)),
            self.settings,
        )

    def settle(self, bound: int = 60) -> list[Decision]:
        """Lets the leader decide until it has nothing left to do; fails when it does not come to rest."""
        made: list[Decision] = []
        for _ in range(bound):
            afresh = self.step_afresh() if self.compares else None
            answer = self.step()
            if afresh is not None:
                assert afresh.decision == answer.decision, (
                    f"a new leader would decide otherwise: {afresh.decision} not {answer.decision}"
                )
                assert afresh.consumed == answer.consumed
            if answer.consumed is not None:
                self.pending.remove(answer.consumed)
            if answer.decision is not None:
                self.carry_out(answer.decision)
                made.append(answer.decision)
            elif answer.consumed is None:
                return made
        raise AssertionError(f"no rest: {[d.what for d in made[-6:]]}")

    # -- agents and engines

    def act(self) -> bool:
        """Every agent does what is to be done now, once per item; True when something was."""
        before = self._seq
        for node in sorted(self.world.nodes):
            if node in self.silent_since or not self.world.nodes[node].running:
                continue
            plan = self.world.plans.get(node)
            items = plan.items if plan is not None else ()
            for item in items:
                self._act_on(node, item)
            known = {item.replica for item in items}
            for replica in list(self.world.replicas.values()):
                gone = replica.node == node and replica.id not in known
                if gone and replica.phase not in TERMINAL_PHASES:
                    self._stop(replica)
        return self._seq != before

    def _act_on(self, node: str, item: PlanItem) -> None:
        replica = self.world.replicas.get(item.replica)
        if replica is None:
            if item.stop is not None:
                self._tell(self._fresh(node, item, "withdrawn"), ReplicaWithdrawn())
            else:
                self._start(node, item)
            return
        if replica.phase in TERMINAL_PHASES:
            return
        if item.stop is not None:
            if replica.phase == "fetching":
                self._tell(replace(replica, phase="withdrawn"), ReplicaWithdrawn())
                self._release(replica)
            elif item.stop.force or replica.phase == "starting":
                self._stop(replica)
            elif replica.phase == "ready" and replica.taken_back != item.stop.decision:
                self._tell(
                    replace(replica, phase="draining", stop_decision=item.stop.decision),
                    ReplicaDraining(decision=item.stop.decision),
                )
            elif replica.phase == "draining":
                self._drain(replica, item)
            return
        if replica.phase == "draining":
            self._tell(replace(replica, phase="ready", stop_decision=None), ReplicaReady())
        elif replica.phase == "fetching":
            self._fetch(replica)
        elif replica.phase == "starting":
            self._load(replica)

    def _drain(self, replica: Replica, item: PlanItem) -> None:
        assert item.stop is not None
        if not any(s.replica == replica.id for s in self.streams):
            self._stop(replica)
        elif (self.now - replica.since).total_seconds() >= item.stop.drain_timeout_s:
            if item.stop.take_back:
                self._tell(
                    replace(
                        replica,
                        phase="ready",
                        stop_decision=None,
                        taken_back=item.stop.decision,
                    ),
                    ReplicaReady(taken_back=item.stop.decision),
                )
            else:
                self.streams = [s for s in self.streams if s.replica != replica.id]
                self._stop(replica)

    def _start(self, node: str, item: PlanItem) -> None:
        card = self.world.cards[(node, item.cards[0])]
        used = sum(lease.memory_bytes for lease in card.leases)
        if used + item.memory_bytes > card.memory_bytes or item.launch.model in self.refuses:
            fresh = self._fresh(node, item, "refused")
            self._tell(
                replace(fresh, card_revs={card.id: card.rev}, reason="no room on the card"),
                ReplicaRefused(card_revs={card.id: card.rev}),
            )
            return
        lease = Lease(
            holder=item.replica, memory_bytes=item.memory_bytes, fence=card.rev, since=self.now
        )
        self._card(
            replace(card, rev=card.rev + 1, leases=(*card.leases, lease)),
            CardLeased(holder=item.replica, memory_bytes=item.memory_bytes, fence=card.rev),
        )
        if self.engine(item.launch.model).fetch_s > 0:
            self._tell(
                self._fresh(node, item, "fetching"), ReplicaFetching(source=item.launch.source)
            )
            return
        fresh = replace(self._fresh(node, item, "starting"), started_at=self.now)
        self._tell(fresh, ReplicaStarting(port=20000))

    def _fetch(self, replica: Replica) -> None:
        if (self.now - replica.since).total_seconds() >= self.engine(replica.model).fetch_s:
            starting = replace(replica, phase="starting", started_at=self.now)
            self._tell(starting, ReplicaStarting(port=20000))

    def _load(self, replica: Replica) -> None:
        engine = self.engine(replica.model)
        assert replica.started_at is not None
        took = (self.now - replica.started_at).total_seconds()
        if took < engine.load_s:
            return
        if engine.fails > 0:
            engine.fails -= 1
            self.fail(replica.id, code=engine.fail_code, last_line=engine.last_line)
            return
        self._tell(
            replace(
                replica,
                phase="ready",
                ready_at=self.now,
                was_ready=True,
                load_s=took,
                endpoint="http://127.0.0.1:20000",
                measured_memory_bytes=engine.measured_bytes,
            ),
            ReplicaReady(load_s=took),
        )

    def _fresh(self, node: str, item: PlanItem, phase: str) -> Replica:
        kind = self.world.cards[(node, item.cards[0])].kind
        return Replica(
            id=item.replica,
            node=node,
            model=item.launch.model,
            incarnation=item.launch.incarnation,
            profile=item.launch.profile,
            revision=item.launch.revision,
            engine=item.launch.engine,
            phase=phase,  # type: ignore[arg-type]
            since=self.now,
            epoch=1,
            cards=item.cards,
            card_kind=kind,
            memory_bytes=item.memory_bytes,
        )

    def _tell(self, replica: Replica, event: Event) -> None:
        self.append("replica", (replica.node, replica.id), event, replace(replica, since=self.now))

    def _card(self, card: Card, event: Event) -> None:
        self.append("card", (card.node, card.id), event, card)

    def _stop(self, replica: Replica) -> None:
        self._tell(replace(replica, phase="stopped", endpoint=None), ReplicaStopped())
        self._release(replica)

    def fail(self, id_: str, code: str = "exited", last_line: str = "error: out of luck") -> None:
        """The engine ends by itself; its memory comes back."""
        replica = self.world.replicas[id_]
        self.streams = [s for s in self.streams if s.replica != id_]
        self._tell(
            replace(replica, phase="failed", code=code, last_line=last_line, endpoint=None),
            ReplicaFailed(code=code),
        )
        self._release(replica)

    def _release(self, replica: Replica) -> None:
        for name in replica.cards:
            card = self.world.cards[(replica.node, name)]
            held = [lease for lease in card.leases if lease.holder == replica.id]
            if held:
                rest = tuple(lease for lease in card.leases if lease.holder != replica.id)
                self._card(
                    replace(card, rev=card.rev + 1, leases=rest),
                    CardReleased(holder=replica.id, memory_bytes=held[0].memory_bytes),
                )

    def accept_again(self, *names: str) -> None:
        """What the agents refused for is over: each of their cards changes with it."""
        self.refuses -= set(names)
        for card in list(self.world.cards.values()):
            self._card(replace(card, rev=card.rev + 1), CardMeasured(used_bytes=0))

    def stop_agent(self, node: str) -> None:
        state = self.world.nodes[node]
        self.append("node", (node,), NodeStopped(), replace(state, running=False))

    # -- requests

    def request(self, name: str, *, stream_s: float | None = None, asks: bool = True) -> str:
        """A client asks: `served`, `refused` at once, or `waits` (and the gateway asks for the model)."""
        ready = self.ready(name)
        if ready:
            self._serve(name, ready[0], stream_s)
            return "served"
        entry = self.world.models.get(name)
        if entry is None or entry.scaling.max == 0:
            return "refused"
        activation = self.world.activations.get((name, "any"))
        if (
            activation is not None
            and activation.phase == "refused"
            and activation.retry_at is not None
            and activation.retry_at > self.now
        ):
            self.refused.append((self.now, name, activation.code or ""))
            return "refused"
        self.waiting.setdefault(name, []).append(self.now)
        if asks:
            self.ask(name)
        return "waits"

    def ask(self, name: str) -> None:
        """The gateway's activate, deduplicated as its message id does."""
        activation = self.world.activations.get((name, "any"))
        if activation is not None and activation.phase in PENDING_PHASES:
            return
        rev = self.world.head("activation", name, "any").rev
        window = int((self.now - T0).total_seconds() // 30)
        message_id = f"activate-{name}-any-{rev}-{window}"
        if message_id in self.sent:
            return
        self.sent.add(message_id)
        self.send(ModelActivate(model=name, rev=rev), actor="gateway", id_=message_id)

    def send_activate(self, name: str) -> None:
        """An activate of some gateway, whatever its table says."""
        self.send(ModelActivate(model=name), actor="gateway")

    def _serve(self, name: str, replica: str, stream_s: float | None = None) -> None:
        length = self.stream_s if stream_s is None else stream_s
        self.answered.append((self.now, name, replica))
        self.last_use[name] = self.now
        self.streams.append(Stream(name, replica, self.now + timedelta(seconds=length)))

    def traffic(self) -> None:
        """Streams end, waiters are served by a ready replica or answered by a refusal."""
        for stream in list(self.streams):
            if stream.ends_at <= self.now:
                self.streams.remove(stream)
                self.last_use[stream.model] = stream.ends_at
        for name, waiters in self.waiting.items():
            if not waiters:
                continue
            ready = self.ready(name)
            activation = self.world.activations.get((name, "any"))
            if ready:
                for _ in waiters:
                    self._serve(name, ready[0])
                waiters.clear()
            elif activation is not None and activation.phase == "refused":
                joined = [at for at in waiters if at <= activation.since]
                self.refused.extend((self.now, name, activation.code or "") for _ in joined)
                waiters[:] = [at for at in waiters if at > activation.since]
                if waiters:
                    self.ask(name)
            else:
                self.ask(name)

    # -- time

    def advance(self, seconds: float, by: float = 0.5) -> None:
        """Lets so much time pass: streams, agents and the leader act every `by` seconds."""
        end = self.now + timedelta(seconds=seconds)
        self.turn()
        while self.now < end:
            self.now = min(end, self.now + timedelta(seconds=by))
            self.turn()

    def turn(self) -> None:
        """Everybody acts until nothing more is to be done at this instant."""
        for _ in range(40):
            self.traffic()
            made = self.settle()
            if not self.act() and not made:
                return
        raise AssertionError("the yard does not come to rest")

    def until(self, wanted: Callable[[], object], within_s: float, what: str = "") -> None:
        end = self.now + timedelta(seconds=within_s)
        self.turn()
        while not wanted():
            assert self.now < end, f"not within {within_s} s: {what}; {self.tail()}"
            self.now += timedelta(seconds=0.5)
            self.turn()

    def tail(self, count: int = 8) -> list[str]:
        return [d.what for d in self.decisions[-count:]]

    # -- what is there

    def ready(self, name: str) -> list[str]:
        return sorted(
            r.id for r in self.world.replicas.values() if r.model == name and r.phase == "ready"
        )

    def items(self, name: str | None = None) -> list[tuple[str, PlanItem]]:
        return [
            (node, item)
            for node in sorted(self.world.plans)
            for item in self.world.plans[node].items
            if name is None or item.launch.model == name
        ]

    def phase(self, name: str, scope: str = "any") -> str | None:
        activation = self.world.activations.get((name, scope))
        return activation.phase if activation is not None else None

    def activation(self, name: str) -> Activation:
        return self.world.activations[(name, "any")]

    def record(self, name: str) -> Record:
        return self.world.records[name]

    def started(self, name: str) -> int:
        return sum(
            1
            for item in self.log
            if item.type == "replica.starting"
            and isinstance(item.state, Replica)
            and item.state.model == name
        )

    def nodestate(self, node: str) -> NodeState:
        return self.world.nodestates[node]


def yard(**cards: float) -> Yard:
    """A yard of one node n1 with these cards (default gpu0 of 8 GiB), joined."""
    made = Yard().node("n1", cards or None)
    made.settle()
    return made
