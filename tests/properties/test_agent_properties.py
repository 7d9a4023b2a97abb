"""The agent's decisions against a model of its node: random plans, engines that load, crash and serve.

The machine carries the actions out as the agent does, in one step each; only processes, log and gateways
are played.
"""

from datetime import UTC, datetime, timedelta

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule
from msgspec.structs import replace

from nodeagent.domain import assignments, drains, leases
from nodeagent.domain.assignments import Held
from nodeagent.domain.lifecycle import next_phase
from schemas.beacons import EngineCounters
from schemas.card import Card
from schemas.cardstate import held_bytes
from schemas.messages import tag_of
from schemas.plan import Plan, PlanItem, Stop
from schemas.replica import (
    TERMINAL_PHASES,
    ReplicaDraining,
    ReplicaEvent,
    ReplicaFailed,
    ReplicaReady,
    ReplicaRefused,
    ReplicaStarting,
    ReplicaStopped,
    ReplicaWithdrawn,
)
from tests.support.agent_yard import a_held, an_item

START = datetime(2026, 1, 1, tzinfo=UTC)
GATEWAYS = ("g1", "g2")
BOUND_S = 60.0


class AgentOnANode(RuleBasedStateMachine):
    """One node with one card of 100 bytes."""

    def __init__(self) -> None:
        super().__init__()
        self.now = START
        self.items: dict[str, PlanItem] = {}
        self.held: dict[str, Held] = {}
        self.used: set[str] = set()
        self.cards = {"cpu": Card(node="n1", id="cpu", kind="cpu", memory_bytes=100, rev=0)}
        self.processes: set[str] = set()
        self.launched: list[str] = []
        self.releases: list[str] = []
        self.inflight: dict[tuple[str, str], int] = {}
        self.drain_began: dict[str, datetime] = {}
        self.confirmed: dict[str, set[str]] = {}
        self.next_id = 0
        self.next_decision = 0

    # What the control plane may do.

    @rule(memory=st.integers(1, 70), soon=st.booleans(), busy=st.booleans())
    def want_one_more(self, memory: int, soon: bool, busy: bool) -> None:
        self.next_id += 1
        name = f"r-{self.next_id}"
        self.items[name] = an_item(name, memory_bytes=memory)
        if soon:
            self.act()
            if self.held[name].replica.phase == "starting":
                self._say(self.held[name], ReplicaReady())
                if busy:
                    self.inflight["g1", name] = 1

    @precondition(lambda self: self.used - self.items.keys())
    @rule(data=st.data())
    def name_an_id_that_was_used(self, data: st.DataObject) -> None:
        name = data.draw(st.sampled_from(sorted(self.used - self.items.keys())))
        self.items[name] = an_item(name, memory_bytes=1)

    @precondition(lambda self: self.items)
    @rule(data=st.data(), take_back=st.booleans(), force=st.sampled_from([False, False, True]))
    def want_it_stopped(self, data: st.DataObject, take_back: bool, force: bool) -> None:
        name = data.draw(st.sampled_from(sorted(self.items)))
        self.next_decision += 1
        stop = Stop(
            decision=f"d-{self.next_decision}",
            reason="idle",
            decided_at=self.now,
            drain_timeout_s=BOUND_S,
            take_back=take_back,
            force=force,
        )
        self.items[name] = replace(self.items[name], stop=stop)
        self.act()

    @precondition(lambda self: self.items)
    @rule(data=st.data())
    def want_it_after_all(self, data: st.DataObject) -> None:
        name = data.draw(st.sampled_from(sorted(self.items)))
        self.items[name] = replace(self.items[name], stop=None)

    @precondition(lambda self: self.items)
    @rule(data=st.data())
    def take_it_out(self, data: st.DataObject) -> None:
        del self.items[data.draw(st.sampled_from(sorted(self.items)))]

    # What the agent does.

    @rule()
    def act(self) -> None:
        for action in self._plan():
            self._carry_out(action)
        assert self._plan() == (), "a plan that was carried out needs nothing more"

    def _plan(self) -> tuple[assignments.Action, ...]:
        observed = assignments.Observed(
            held=self.held,
            cards=self.cards,
            used=self.used,
            unreported=frozenset(),
            engines=frozenset({"command"}),
            allow_commands=True,
        )
        return assignments.plan(
            Plan(node="n1", items=tuple(self.items.values())), observed, self.now
        )

    def _carry_out(self, action: assignments.Action) -> None:
        match action:
            case assignments.Start(item=item, cards=cards):
                for card in cards:
                    self.cards[card.id] = card
                self._say(a_held(item.replica), ReplicaStarting(port=1))
                self.launched.append(item.replica)
                self.processes.add(item.replica)
            case assignments.Refuse(item=item):
                self._say(a_held(item.replica), ReplicaRefused())
            case assignments.Withdraw(replica=name):
                self._say(self.held.get(name) or a_held(name), ReplicaWithdrawn())
            case assignments.Drain(replica=name, stop=stop):
                self.drain_began[name] = self.now
                self.confirmed[name] = set()
                self._say(replace(self.held[name], stop=stop), ReplicaDraining(decision=""))
            case assignments.Halt(replica=name, stop=stop):
                assert not self._running(name), "a replica that serves is never halted"
                self.held[name] = replace(self.held[name], stop=stop, ending=True)
            case assignments.Resume(replica=name, decision=decision):
                replica = replace(self.held[name].replica, taken_back=decision)
                self._say(replace(self.held[name], replica=replica, stop=None), ReplicaReady())
            case assignments.Forget(replica=name):
                del self.held[name]
                self.used.add(name)

    def _say(self, held: Held, event: ReplicaEvent) -> None:
        name = held.replica.id
        before = self.held.get(name)
        phase = next_phase(before.replica.phase if before else None, tag_of(event))
        self.held[name] = replace(held, replica=replace(held.replica, phase=phase))

    # What happens by itself.

    @rule(seconds=st.sampled_from([0.5, 5.0, 61.0]))
    def time_passes(self, seconds: float) -> None:
        self.now += timedelta(seconds=seconds)

    def _in_phase(self, *phases: str) -> list[str]:
        return sorted(n for n, h in self.held.items() if h.replica.phase in phases)

    @precondition(lambda self: self._in_phase("starting"))
    @rule(data=st.data())
    def an_engine_becomes_ready(self, data: st.DataObject) -> None:
        name = data.draw(st.sampled_from(self._in_phase("starting")))
        if not self.held[name].ending:
            self._say(self.held[name], ReplicaReady())

    @precondition(lambda self: self._in_phase("starting", "ready"))
    @rule(data=st.data())
    def an_engine_crashes(self, data: st.DataObject) -> None:
        name = data.draw(st.sampled_from(self._in_phase("starting", "ready")))
        self._gone(name)
        self._say(self.held[name], ReplicaFailed(code="exited"))
        self._give_back(name)

    @precondition(lambda self: self._in_phase("ready"))
    @rule(data=st.data(), gateway=st.sampled_from(GATEWAYS))
    def a_request_begins(self, data: st.DataObject, gateway: str) -> None:
        name = data.draw(st.sampled_from(self._in_phase("ready")))
        key = (gateway, name)
        self.inflight[key] = self.inflight.get(key, 0) + 1

    @precondition(lambda self: self.inflight)
    @rule(data=st.data())
    def a_request_ends(self, data: st.DataObject) -> None:
        key = data.draw(st.sampled_from(sorted(self.inflight)))
        self.inflight[key] -= 1
        if not self.inflight[key]:
            del self.inflight[key]

    @precondition(lambda self: self._in_phase("draining"))
    @rule(data=st.data(), gateway=st.sampled_from(GATEWAYS))
    def a_gateway_that_has_not_seen_the_drain_still_sends_one(
        self, data: st.DataObject, gateway: str
    ) -> None:
        name = data.draw(st.sampled_from(self._in_phase("draining")))
        if gateway not in self.confirmed[name] and name in self.processes:
            key = (gateway, name)
            self.inflight[key] = self.inflight.get(key, 0) + 1

    @precondition(lambda self: self._in_phase("draining"))
    @rule(data=st.data(), gateways=st.sampled_from([("g1",), ("g2",), GATEWAYS, GATEWAYS]))
    def gateways_see_the_drain(self, data: st.DataObject, gateways: tuple[str, ...]) -> None:
        name = data.draw(st.sampled_from(self._in_phase("draining")))
        self.confirmed[name].update(gateways)

    @precondition(lambda self: self._in_phase("draining"))
    @rule(
        data=st.data(),
        connected=st.sampled_from([True, True, False]),
        engine_tells=st.booleans(),
    )
    def a_drain_is_judged(self, data: st.DataObject, connected: bool, engine_tells: bool) -> None:
        name = data.draw(st.sampled_from(self._in_phase("draining")))
        held = self.held[name]
        assert held.stop is not None
        if held.ending:
            return
        age_s = (self.now - self.drain_began[name]).total_seconds()
        facts = drains.DrainFacts(
            stop=held.stop,
            sequence=10,
            age_s=age_s,
            connected_s=100.0 if connected else None,
            gateways=tuple(
                drains.GatewayHeard(
                    name=gateway,
                    age_s=0.1,
                    position=10 if gateway in self.confirmed[name] else 9,
                    inflight=self.inflight.get((gateway, name), 0),
                )
                for gateway in GATEWAYS
            ),
            gateway_gone_s=10.0,
            listen_s=3.0,
        )
        verdict = drains.judge(facts)
        if isinstance(verdict, drains.AskEngine):
            verdict = drains.judge(
                replace(
                    facts,
                    engine=EngineCounters(inflight=self._running(name) if engine_tells else None),
                )
            )
        match verdict:
            case drains.StopNow(why=why):
                if self._running(name):
                    excused = why == "forced" or (why == "bound" and age_s >= BOUND_S)
                    assert excused, "a drain never stops under a request"
                if why == "drained":
                    everybody = self.confirmed[name] == set(GATEWAYS)
                    assert everybody, "a gateway that has not seen the drain may still send one"
                self.held[name] = replace(held, ending=True)
            case drains.TakeBack():
                assert held.stop.take_back
                replica = replace(held.replica, taken_back=held.stop.decision)
                self._say(replace(held, replica=replica, stop=None), ReplicaReady())
            case drains.KeepWaiting() | drains.AskEngine():
                pass

    @rule()
    def processes_told_to_end_are_gone(self) -> None:
        for name in [n for n, h in sorted(self.held.items()) if h.ending]:
            if self.held[name].replica.phase in TERMINAL_PHASES:
                continue
            self._gone(name)
            self._say(self.held[name], ReplicaStopped())
            self._give_back(name)

    def _running(self, name: str) -> int:
        return sum(count for (_, replica), count in self.inflight.items() if replica == name)

    def _gone(self, name: str) -> None:
        self.processes.discard(name)
        self.inflight = {k: n for k, n in self.inflight.items() if k[1] != name}

    def _give_back(self, name: str) -> None:
        after = leases.release(self.cards["cpu"], name)
        assert after is not None, "whoever ran had a lease"
        self.cards["cpu"] = after
        self.releases.append(name)

    # What must always hold.

    @invariant()
    def an_id_is_started_at_most_once(self) -> None:
        assert len(self.launched) == len(set(self.launched))

    @invariant()
    def the_card_is_never_given_beyond_its_memory(self) -> None:
        card = self.cards["cpu"]
        assert held_bytes(card, {}) <= card.memory_bytes

    @invariant()
    def exactly_the_living_processes_hold_leases(self) -> None:
        holders = {lease.holder for lease in self.cards["cpu"].leases}
        assert holders == self.processes
        assert len(self.releases) == len(set(self.releases)), "every lease is released once"

    @invariant()
    def a_process_is_alive_exactly_in_the_phases_that_say_so(self) -> None:
        alive = {n for n, h in self.held.items() if h.replica.phase not in TERMINAL_PHASES}
        assert alive == self.processes


TestAgentOnANode = AgentOnANode.TestCase
