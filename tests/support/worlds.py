"""Builds worlds for tests, and plays a yard in memory: a pure model of agents, engines and gateways.

`Yard` carries out the leader's decisions as the real parts would, on a clock that only `advance` moves; its agents are
tests/support/world_agents.py's, its log tests/support/world_log.py's. It decides nothing the leader decides.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timedelta

from controlplane.domain import step
from controlplane.domain.decision import (
    AgentLive,
    Decision,
    GatewayLive,
    Ids,
    Live,
    ReplicaLive,
    Step,
)
from controlplane.domain.index import StepIndex
from events.log import StoredCommand
from events.subjects import command_subject
from schemas.activation import PENDING_PHASES, Activation
from schemas.beacons import EngineCounters
from schemas.commands import Command, CommandBody, ModelActivate, Outcome
from schemas.model import Model, Profile, Scaling
from schemas.node import NodeState
from schemas.plan import PlanItem
from schemas.record import Record
from schemas.replica import Replica
from schemas.settings import ControlplaneSettings
from tests.support.world_agents import ActingYard
from tests.support.world_log import GIB, T0, Stream

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
class Yard(ActingYard):
    """One yard: the world, its nodes and the requests in it. `gateways` are names that beacon."""

    settings: ControlplaneSettings = SETTINGS
    counts: dict[str, int] = field(default_factory=lambda: {"r": 0, "d": 0, "i": 0})
    index: StepIndex | None = field(default_factory=StepIndex)
    gateways: list[str] = field(default_factory=lambda: ["gw1"])
    leading_since: datetime = T0 - timedelta(hours=1)
    silent: set[str] = field(default_factory=set)
    deaf_agents: set[str] = field(default_factory=set)
    waiting: dict[str, list[datetime]] = field(default_factory=dict)
    last_use: dict[str, datetime] = field(default_factory=dict)
    stream_s: float = 0.5
    answered: list[tuple[datetime, str, str]] = field(default_factory=list)
    refused: list[tuple[datetime, str, str]] = field(default_factory=list)
    pending: list[StoredCommand] = field(default_factory=list)
    sent: set[str] = field(default_factory=set)
    compares: bool = False
    dead_since: datetime | None = None
    _command_seq: int = 0

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
