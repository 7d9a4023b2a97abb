"""Gateways, replicas and adapters, with beacons and asks that are late or lost: no adapter in use is ever unloaded.

The decisions are the real ones of both sides (pins, slots, evicting); the machine is the network between them,
the engines, and everybody's clock. Gateways and the agent may be killed at any moment.
"""

from collections import deque
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from gateway.domain.pins import Held, Pins
from nodeagent.domain import evicting, slots
from nodeagent.domain import pins as pinned
from nodeagent.domain.badloads import Fault
from nodeagent.domain.evicting import Facts
from nodeagent.domain.slots import Moment, Place, State
from schemas.adapternames import pin_name
from schemas.beacons import GatewayBeacon

KEEP_S = 30.0
T0 = datetime(2026, 11, 30, tzinfo=UTC)
REPLICAS = ("r-1", "r-2")
ADAPTERS = ("a", "b", "c")
GATEWAYS = ("g1", "g2")
VERSION = "0123456789ab"
LIMIT, ROOM = 1, 2


@dataclass(slots=True)
class Ask:
    gateway: str
    incarnation: str
    n: int
    replica: str
    adapter: str
    asked_s: float
    held: Held


@dataclass(slots=True)
class Beacon:
    body: GatewayBeacon


@dataclass(slots=True)
class Recall:
    """What an agent's beacon says to one gateway."""

    n: int
    incarnation: str
    recall: dict[str, tuple[str, ...]]


@dataclass(slots=True)
class Granted:
    ask: Ask
    engine_name: str
    """Empty: ask again, or no."""


@dataclass(slots=True)
class Stream:
    """One request at an engine, under a pin."""

    held: Held
    replica: str
    engine_name: str


@dataclass(slots=True)
class OneGateway:
    name: str
    incarnation: int = 1
    n: int = 0
    pins: Pins = field(default_factory=Pins)
    streams: list[Stream] = field(default_factory=list)
    asking: list[Ask] = field(default_factory=list)
    outgoing: deque[Ask | Beacon] = field(default_factory=deque)
    incoming: deque[Recall | Granted] = field(default_factory=deque)


@dataclass(slots=True)
class OneEngine:
    """What one engine has, and what it is being asked. A call that began comes to its end some time."""

    loaded: set[str] = field(default_factory=set)
    loading: list[tuple[int, str, Place]] = field(default_factory=list)
    unloading: list[tuple[int, str, Place, bool]] = field(default_factory=list)
    tells: bool = True


class AdapterMachine(RuleBasedStateMachine):
    """One agent with two replicas of one place (two in the engine), two gateways, three adapters."""

    def __init__(self) -> None:
        super().__init__()
        self.at = 1000.0
        self.gateways = {name: OneGateway(name) for name in GATEWAYS}
        self.engines = {name: OneEngine() for name in REPLICAS}
        self.agents = 0
        self.start_agent()

    # The agent.

    def start_agent(self) -> None:
        """A new one: it has read its engines' lists, and knows no pin."""
        self.agents += 1
        self.began_s = self.at
        self.pins = pinned.Pins()
        self.states: dict[str, State] = {}
        for replica, engine in self.engines.items():
            places = {
                name: Place(
                    adapter=name.partition("@")[0],
                    version=VERSION,
                    engine_name=name,
                    phase="loaded",
                    since=T0,
                    how="found",
                    used_at=self.at,
                    changed_at=self.at,
                )
                for name in engine.loaded
            }
            self.states[replica] = State(limit=LIMIT, room=ROOM, places=places)

    @property
    def moment(self) -> Moment:
        return Moment(at=self.at, now=T0 + timedelta(seconds=self.at))

    def settle(self) -> None:
        """The agent looks at its replicas, and begins what it decides."""
        self.pins = pinned.settled(self.pins, self.at)
        recall: dict[str, tuple[str, ...]] = {}
        for replica in REPLICAS:
            uses = pinned.uses_in(self.pins, replica, self.at)
            facts = Facts(uses=uses, calm=self.at - self.began_s >= KEEP_S)
            state, settled = evicting.settle(self.states[replica], facts, self.at)
            self.states[replica] = state
            for evict in settled.evict:
                self.engines[replica].unloading.append(
                    (self.agents, evict.name, evict.place, evict.must_know)
                )
            if settled.recall:
                recall[replica] = settled.recall
        if recall:
            self.tell_gateways(recall)

    def tell_gateways(self, recall: dict[str, tuple[str, ...]]) -> None:
        for name, gateway in self.gateways.items():
            heard = [g for g in self.pins.gateways.values() if g.name == name]
            last = max(heard, key=lambda g: g.heard_at, default=None)
            gateway.incoming.append(
                Recall(
                    n=last.n if last is not None else -1,
                    incarnation=last.incarnation if last is not None else "",
                    recall=recall,
                )
            )

    def take_ask(self, ask: Ask) -> None:
        gateway = self.gateways[ask.gateway]
        name = pin_name(ask.adapter, VERSION)
        self.pins = pinned.asked(
            self.pins,
            ask.gateway,
            ask.incarnation,
            replica=ask.replica,
            name=name,
            n=ask.n,
            at=self.at,
            keep_s=KEEP_S,
        )
        state, verdict = slots.ensure(self.states[ask.replica], ask.adapter, VERSION, self.moment)
        self.states[ask.replica] = state
        engine_name = ""
        match verdict:
            case slots.Hit():
                engine_name = verdict.engine_name
            case slots.Load(place=place):
                self.begin_load(ask.replica, name, place)
            case slots.Join() | slots.Wait():
                pass
            case slots.Refuse():
                self.pins = pinned.denied(
                    self.pins,
                    ask.gateway,
                    ask.incarnation,
                    replica=ask.replica,
                    name=name,
                    n=ask.n,
                )
        gateway.incoming.append(Granted(ask, engine_name))

    def begin_load(self, replica: str, name: str, place: Place) -> None:
        engine = self.engines[replica]
        # inv 4: one load per adapter per replica, and no unload of it beside it.
        assert all(name != other for who, other, _ in engine.loading if who == self.agents)
        assert all(name != other for who, other, *_ in engine.unloading if who == self.agents)
        engine.loading.append((self.agents, name, place))

    # Gateways.

    def send_beacon(self, gateway: OneGateway) -> None:
        gateway.n += 1
        body = GatewayBeacon(
            gateway=gateway.name,
            incarnation=str(gateway.incarnation),
            n=gateway.n,
            position=1,
            pins=gateway.pins.tell(gateway.n, self.at),
        )
        gateway.outgoing.append(Beacon(body))

    def stream(self, gateway: OneGateway, held: Held, replica: str) -> None:
        gateway.streams.append(Stream(held, replica, held.engine_name))

    # What may happen.

    @rule(
        name=st.sampled_from(GATEWAYS),
        replica=st.sampled_from(REPLICAS),
        adapter=st.sampled_from(ADAPTERS),
    )
    def a_request_comes(self, name: str, replica: str, adapter: str) -> None:
        gateway = self.gateways[name]
        held = gateway.pins.begin("n1", replica, pin_name(adapter, VERSION), self.at)
        if held.is_trusted(self.at):
            self.stream(gateway, held, replica)
            return
        held = gateway.pins.asking("n1", replica, pin_name(adapter, VERSION), self.at)
        ask = Ask(name, str(gateway.incarnation), gateway.n, replica, adapter, self.at, held)
        gateway.asking.append(ask)
        gateway.outgoing.append(ask)

    @rule(
        name=st.sampled_from(GATEWAYS),
        replica=st.sampled_from(REPLICAS),
        adapter=st.sampled_from(ADAPTERS),
        runs_on=st.booleans(),
    )
    def a_request_is_served_at_once(
        self, name: str, replica: str, adapter: str, runs_on: bool
    ) -> None:
        """Nothing is late or lost here, as nearly always; `runs_on`: it is not over at once either."""
        gateway = self.gateways[name]
        before = len(gateway.streams)
        for _ in range(3):
            self.a_request_comes(name, replica, adapter)
            self.settle_all(replica)
            if len(gateway.streams) > before:
                break
        while not runs_on and len(gateway.streams) > before:
            self.a_request_ends(name, before)

    def settle_all(self, replica: str) -> None:
        for _ in range(3):
            for other in GATEWAYS:
                self.what_a_gateway_sent_arrives(other, 50)
                self.what_the_agent_sent_arrives(other, 50)
            while self.engines[replica].unloading:
                self.an_unload_is_carried_out(replica)
            while self.engines[replica].loading:
                self.a_load_ends(replica, False)

    @rule(name=st.sampled_from(GATEWAYS), which=st.integers(0, 20))
    def a_request_ends(self, name: str, which: int) -> None:
        gateway = self.gateways[name]
        if gateway.streams:
            stream = gateway.streams.pop(which % len(gateway.streams))
            gateway.pins.end(stream.held, self.at)

    @rule(name=st.sampled_from(GATEWAYS), count=st.integers(1, 4))
    def what_a_gateway_sent_arrives(self, name: str, count: int) -> None:
        gateway = self.gateways[name]
        for _ in range(min(count, len(gateway.outgoing))):
            message = gateway.outgoing.popleft()
            if isinstance(message, Beacon):
                self.pins = pinned.heard(self.pins, message.body, self.at, KEEP_S)
            else:
                self.take_ask(message)
        self.settle()

    @rule(name=st.sampled_from(GATEWAYS))
    def what_a_gateway_sent_changes_places(self, name: str) -> None:
        outgoing = self.gateways[name].outgoing
        if len(outgoing) > 1:
            outgoing[0], outgoing[1] = outgoing[1], outgoing[0]

    @rule(name=st.sampled_from(GATEWAYS))
    def what_a_gateway_sent_is_lost(self, name: str) -> None:
        gateway = self.gateways[name]
        if gateway.outgoing:
            message = gateway.outgoing.popleft()
            if isinstance(message, Ask):
                gateway.incoming.append(Granted(message, ""))

    @rule(name=st.sampled_from(GATEWAYS), count=st.integers(1, 4))
    def what_the_agent_sent_arrives(self, name: str, count: int) -> None:
        gateway = self.gateways[name]
        for _ in range(min(count, len(gateway.incoming))):
            self.take(gateway, gateway.incoming.popleft())

    @rule(name=st.sampled_from(GATEWAYS))
    def what_the_agent_sent_is_lost(self, name: str) -> None:
        gateway = self.gateways[name]
        if gateway.incoming and isinstance(gateway.incoming[0], Recall):
            gateway.incoming.popleft()

    def take(self, gateway: OneGateway, message: Recall | Granted) -> None:
        if isinstance(message, Recall):
            if message.incarnation == str(gateway.incarnation) and message.n >= 0:
                gateway.pins.heard("n1", message.n)
            dropped = False
            for replica, names in message.recall.items():
                dropped = gateway.pins.recall(replica, names) or dropped
            if dropped:
                self.send_beacon(gateway)
            return
        ask = message.ask
        if ask.incarnation != str(gateway.incarnation):
            return
        gateway.asking.remove(ask)
        if message.engine_name:
            gateway.pins.granted(ask.held, message.engine_name, ask.asked_s)
        gateway.pins.asked(ask.held, self.at)
        if message.engine_name and ask.held.is_trusted(self.at):
            self.stream(gateway, ask.held, ask.replica)
        else:
            gateway.pins.end(ask.held, self.at)

    @rule(name=st.sampled_from(GATEWAYS))
    def a_gateway_beacons(self, name: str) -> None:
        self.send_beacon(self.gateways[name])

    @rule()
    def the_agent_beacons(self) -> None:
        self.settle()
        self.tell_gateways({})

    @rule(replica=st.sampled_from(REPLICAS), fails=st.booleans())
    def a_load_ends(self, replica: str, fails: bool) -> None:
        engine = self.engines[replica]
        if not engine.loading:
            return
        who, name, place = engine.loading.pop(0)
        if not fails:
            engine.loaded.add(place.engine_name)
        if who != self.agents:
            return
        if not fails:
            self.states[replica] = slots.loaded(
                self.states[replica], name, self.moment, engine_name=place.engine_name
            )
        else:
            fault = Fault(whose="replica", code="load_failed", text="no")
            state, _, restored = slots.load_failed(
                self.states[replica], name, fault, (), (), self.moment
            )
            self.states[replica] = state
            for back in restored:
                self.begin_load(replica, pin_name(back.adapter, back.version), back)
        self.settle()

    @rule(replica=st.sampled_from(REPLICAS))
    def an_unload_is_carried_out(self, replica: str) -> None:
        engine = self.engines[replica]
        if not engine.unloading:
            return
        who, name, place, must_know = engine.unloading.pop(0)
        if who != self.agents:
            return  # Its agent died before it asked the engine.
        running = self.running(replica, place.engine_name)
        if (running and engine.tells) or (must_know and not engine.tells):
            # The engine's own word is asked before every unload: it is the second net.
            assert must_know or not running, f"{name} is in use and was chosen all the same"
            self.states[replica] = slots.spared(self.states[replica], name, self.at, rest_s=5.0)
            self.settle()
            return
        assert not running, f"{name} is unloaded from {replica} under {running} requests"
        engine.loaded.discard(place.engine_name)
        self.states[replica] = slots.unloaded(self.states[replica], name, self.at)
        self.settle()

    @rule(seconds=st.sampled_from((0.01, 0.3, 1.5, 6.0, 13.0, 25.0)))
    def time_passes(self, seconds: float) -> None:
        self.at += seconds
        self.settle()

    @rule(replica=st.sampled_from(REPLICAS), tells=st.booleans())
    def an_engine_tells_what_runs(self, replica: str, tells: bool) -> None:
        self.engines[replica].tells = tells

    @rule(name=st.sampled_from(GATEWAYS))
    def a_gateway_is_killed(self, name: str) -> None:
        """Its requests end with it, and so does what it had not sent yet."""
        before = self.gateways[name]
        self.gateways[name] = OneGateway(name, incarnation=before.incarnation + 1)

    @rule()
    def the_agent_is_killed(self) -> None:
        """What it asked of engines goes on there; the next one reads their lists when that is over."""
        for engine in self.engines.values():
            for _, _, place in engine.loading:
                engine.loaded.add(place.engine_name)
            engine.loading.clear()
            engine.unloading.clear()
        for gateway in self.gateways.values():
            for ask in gateway.asking:
                if not any(isinstance(m, Granted) and m.ask is ask for m in gateway.incoming):
                    gateway.incoming.append(Granted(ask, ""))
            gateway.outgoing = deque(m for m in gateway.outgoing if isinstance(m, Beacon))
        self.start_agent()

    # What must hold.

    def running(self, replica: str, engine_name: str) -> int:
        return sum(
            stream.replica == replica and stream.engine_name == engine_name
            for gateway in self.gateways.values()
            for stream in gateway.streams
        )

    @invariant()
    def inv_3_whoever_streams_from_an_adapter_still_has_it(self) -> None:
        for gateway in self.gateways.values():
            for stream in gateway.streams:
                assert stream.engine_name in self.engines[stream.replica].loaded

    @invariant()
    def no_engine_holds_more_than_its_cache(self) -> None:
        for replica, engine in self.engines.items():
            on_the_way = {place.engine_name for who, _, place in engine.loading}
            assert len(engine.loaded | on_the_way) <= ROOM, replica


AdapterMachine.TestCase.settings = settings(max_examples=200, stateful_step_count=50, deadline=None)
test_inv_3_no_adapter_in_use_is_unloaded_whatever_is_late_or_lost = AdapterMachine.TestCase


def test_inv_3_a_request_begun_late_under_a_trusted_pin_keeps_its_adapter_when_its_gateway_is_cut_off() -> (
    None
):
    """The last beacon that came told of no use; the pin has run out, and its request goes on."""
    story = AdapterMachine()
    story.a_request_is_served_at_once("g1", "r-1", "a", False)
    story.time_passes(13.0)
    story.time_passes(6.0)
    story.a_request_comes("g1", "r-1", "a")
    assert story.gateways["g1"].streams, "the pin was trusted still"
    story.time_passes(13.0)
    for adapter in ("b", "c"):
        story.a_request_comes("g2", "r-1", adapter)
        story.what_a_gateway_sent_arrives("g2", 50)
        story.a_load_ends("r-1", False)
        story.an_unload_is_carried_out("r-1")
        story.inv_3_whoever_streams_from_an_adapter_still_has_it()
