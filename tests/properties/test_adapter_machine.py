"""Gateways, replicas and adapters, with beacons and asks that are late or lost: no adapter in use is ever unloaded.

The decisions are the real ones of both sides (pins, slots, evicting, listing); the machine is the network between
them, the engines, and everybody's clock. Gateways and the agent may be killed at any moment, and engines may start
anew in place, answer too late, fail to unload, and list what was.
"""

from collections import deque
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from functools import partial

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from gateway.domain.pins import Held
from nodeagent.domain import evicting, listing, slots
from nodeagent.domain import pins as pinned
from nodeagent.domain.badloads import Fault
from nodeagent.domain.evicting import Facts
from nodeagent.domain.listing import Seen
from nodeagent.domain.slots import Moment, Place, State
from schemas.adapternames import pin_name
from schemas.beacons import GatewayBeacon
from tests.support.adapter_network import (
    Ask,
    Beacon,
    Granted,
    OneEngine,
    OneGateway,
    Recall,
    Stream,
)

KEEP_S = 30.0
T0 = datetime(2026, 11, 30, tzinfo=UTC)
REPLICAS = ("r-1", "r-2")
ADAPTERS = ("a", "b", "c")
GATEWAYS = ("g1", "g2")
WHICH = st.integers(0, 59)
ASKED = st.sampled_from(("r-1", "r-1", "r-1", "r-2"))
"""Mostly one replica, or nothing would ever be short there."""
VERSION = "0123456789ab"
LIMIT = 1


class AdapterMachine(RuleBasedStateMachine):
    """One agent with two replicas of one place (two in the engine), two gateways, three adapters."""

    room = 2

    def __init__(self) -> None:
        super().__init__()
        self.at = 1000.0
        self.gateways = {name: OneGateway(name) for name in GATEWAYS}
        self.engines = {name: OneEngine() for name in REPLICAS}
        self.agents = 0
        self.start_agent()
        # The first one was there before its engines.
        self.began_s -= KEEP_S

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
            self.states[replica] = State(limit=LIMIT, room=self.room, places=places)

    @property
    def moment(self) -> Moment:
        return Moment(at=self.at, now=T0 + timedelta(seconds=self.at))

    def facts(self, replica: str) -> Facts:
        uses = pinned.uses_in(self.pins, replica, self.at)
        return Facts(uses=uses, calm=self.at - self.began_s >= KEEP_S)

    def settle(self) -> None:
        """The agent looks at its replicas, and begins what it decides."""
        self.pins = pinned.settled(self.pins, self.at)
        recall: dict[str, tuple[str, ...]] = {}
        for replica in REPLICAS:
            facts = self.facts(replica)
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
        state, verdict = slots.ensure(
            self.states[ask.replica], ask.adapter, VERSION, self.moment, gone=ask.gone
        )
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

    def stream(self, gateway: OneGateway, held: Held, replica: str) -> bool:
        """Sends a request counted under a pin; False: its engine began anew and says it knows no such model."""
        engine = self.engines[replica]
        if held.engine_name not in engine.loaded and engine.restarts:
            return False
        gateway.streams.append(Stream(held, replica, held.engine_name))
        return True

    def ask(self, gateway: OneGateway, replica: str, adapter: str, gone: str = "") -> None:
        """Asks for what a request counted already wants."""
        held = gateway.pins.asking("n1", replica, pin_name(adapter, VERSION), self.at)
        incarnation = str(gateway.incarnation)
        ask = Ask(gateway.name, incarnation, gateway.n, replica, adapter, self.at, held, gone)
        gateway.asking.append(ask)
        gateway.outgoing.append(ask)

    # What may happen.

    def a_request_comes(self, name: str, replica: str, adapter: str) -> None:
        gateway = self.gateways[name]
        held = gateway.pins.begin("n1", replica, pin_name(adapter, VERSION), self.at)
        gone = ""
        if held.is_trusted(self.at):
            if self.stream(gateway, held, replica):
                return
            gone = held.engine_name
            gateway.pins.revoke(replica, pin_name(adapter, VERSION))
        self.ask(gateway, replica, adapter, gone)

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

    def a_request_ends(self, name: str, which: int) -> None:
        gateway = self.gateways[name]
        if gateway.streams:
            stream = gateway.streams.pop(which % len(gateway.streams))
            gateway.pins.end(stream.held, self.at)

    def what_a_gateway_sent_arrives(self, name: str, count: int) -> None:
        gateway = self.gateways[name]
        for _ in range(min(count, len(gateway.outgoing))):
            message = gateway.outgoing.popleft()
            if isinstance(message, Beacon):
                self.pins = pinned.heard(self.pins, message.body, self.at, KEEP_S)
            else:
                self.take_ask(message)
        self.settle()

    def what_a_gateway_sent_changes_places(self, name: str) -> None:
        outgoing = self.gateways[name].outgoing
        if len(outgoing) > 1:
            outgoing[0], outgoing[1] = outgoing[1], outgoing[0]

    def what_a_gateway_sent_is_lost(self, name: str) -> None:
        gateway = self.gateways[name]
        if gateway.outgoing:
            message = gateway.outgoing.popleft()
            if isinstance(message, Ask):
                gateway.incoming.append(Granted(message, ""))

    def what_the_agent_sent_arrives(self, name: str, count: int) -> None:
        gateway = self.gateways[name]
        for _ in range(min(count, len(gateway.incoming))):
            self.take(gateway, gateway.incoming.popleft())

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
        if not (message.engine_name and ask.held.is_trusted(self.at)):
            gateway.pins.end(ask.held, self.at)
        elif not self.stream(gateway, ask.held, ask.replica):
            gateway.pins.revoke(ask.replica, ask.held.pin)
            self.ask(gateway, ask.replica, ask.adapter, message.engine_name)

    def a_gateway_beacons(self, name: str) -> None:
        self.send_beacon(self.gateways[name])

    def the_agent_beacons(self) -> None:
        self.settle()
        self.tell_gateways({})

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
            self.load_failed(replica, name, Fault(whose="replica", code="load_failed", text="no"))
        self.settle()

    def load_failed(self, replica: str, name: str, fault: Fault) -> None:
        state, _, restored = slots.load_failed(
            self.states[replica], name, fault, (), (), self.moment
        )
        self.states[replica] = state
        for back in restored:
            self.begin_load(replica, pin_name(back.adapter, back.version), back)

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

    def time_passes(self, seconds: float) -> None:
        self.at += seconds
        for engine in self.engines.values():
            for name in [name for name, end in engine.late.items() if end < self.at]:
                del engine.late[name]
        self.settle()

    def a_person_wants_it_unloaded_or_not(self, replica: str, adapter: str, go: bool) -> None:
        state = self.states[replica]
        for name in slots.names_of(state, adapter):
            if state.places[name].phase != "unloading":
                change = slots.leaving if go else slots.staying
                self.states[replica] = change(state, name)
        self.settle()

    def a_load_is_not_answered_in_time(self, replica: str) -> None:
        """It goes on in the engine."""
        engine = self.engines[replica]
        if not engine.loading or engine.loading[0][0] != self.agents:
            return
        _, name, place = engine.loading.pop(0)
        engine.late[place.engine_name] = self.at + slots.LATE_S
        fault = Fault(whose="replica", code="load_timeout", text="no answer", late=True)
        self.load_failed(replica, name, fault)

    def what_was_late_is_over(self, replica: str, has_it: bool) -> None:
        engine = self.engines[replica]
        if engine.late:
            name = min(engine.late)
            del engine.late[name]
            if has_it:
                engine.loaded.add(name)

    def a_list_is_asked_for(self, replica: str) -> None:
        engine = self.engines[replica]
        engine.lists = [(self.agents, self.at, frozenset(engine.loaded))]
        self.at += 0.001

    def a_list_is_answered(self, replica: str) -> None:
        engine = self.engines[replica]
        if not engine.lists:
            return
        who, began, told = engine.lists.pop()
        if who != self.agents:
            return
        seen = tuple(
            Seen(engine_name=name, adapter=name[0], version=VERSION, root="right")
            for name in sorted(told)
        )
        self.states[replica], _ = listing.listed(
            self.states[replica], seen, began, self.facts(replica), self.moment
        )
        self.settle()

    def an_engine_begins_anew(self, replica: str) -> None:
        """In place: its requests end, what it was asked fails, and nothing is loaded."""
        engine = self.engines[replica]
        engine.restarts += 1
        engine.loaded.clear()
        engine.late.clear()
        for gateway in self.gateways.values():
            for stream in [one for one in gateway.streams if one.replica == replica]:
                gateway.streams.remove(stream)
                gateway.pins.end(stream.held, self.at)
        while engine.loading:
            self.a_load_ends(replica, True)
        while engine.unloading:
            who, name, _, _ = engine.unloading.pop()
            if who == self.agents:
                self.states[replica] = slots.unload_failed(self.states[replica], name, self.at)
        self.settle()

    def an_engine_tells_what_runs(self, replica: str, tells: bool) -> None:
        self.engines[replica].tells = tells

    def a_gateway_is_killed(self, name: str) -> None:
        """Its requests end with it, and so does what it had not sent yet."""
        before = self.gateways[name]
        self.gateways[name] = OneGateway(name, incarnation=before.incarnation + 1)

    def the_agent_is_killed(self) -> None:
        """What it asked of engines goes on there; the next one reads their lists when that is over."""
        for engine in self.engines.values():
            for _, _, place in engine.loading:
                engine.loaded.add(place.engine_name)
            engine.loaded |= engine.late.keys()
            engine.loading.clear()
            engine.unloading.clear()
            engine.late.clear()
        for gateway in self.gateways.values():
            for ask in gateway.asking:
                if not any(isinstance(m, Granted) and m.ask is ask for m in gateway.incoming):
                    gateway.incoming.append(Granted(ask, ""))
            gateway.outgoing = deque(m for m in gateway.outgoing if isinstance(m, Beacon))
        self.start_agent()

    # In which order: few rules, so that nearly every run has all of them.

    @rule(
        name=st.sampled_from(GATEWAYS),
        replica=ASKED,
        adapter=st.sampled_from(ADAPTERS),
        how=st.sampled_from(("comes", "comes", "is served", "is served and runs on")),
    )
    def a_request(self, name: str, replica: str, adapter: str, how: str) -> None:
        if how == "comes":
            self.a_request_comes(name, replica, adapter)
        else:
            self.a_request_is_served_at_once(name, replica, adapter, how != "is served")

    @rule(which=WHICH, fails=st.sampled_from((False, False, False, True)))
    def something_goes_on(self, which: int, fails: bool) -> None:
        """One thing that is under way anywhere comes a step further."""
        going: list[Callable[[], None]] = []
        for name, gateway in self.gateways.items():
            if gateway.outgoing:
                going.append(partial(self.what_a_gateway_sent_arrives, name, 1 + which % 3))
            if gateway.incoming:
                going.append(partial(self.what_the_agent_sent_arrives, name, 1 + which % 3))
            if gateway.streams:
                going.append(partial(self.a_request_ends, name, which))
        for replica, engine in self.engines.items():
            if engine.loading:
                going.append(partial(self.a_load_ends, replica, fails))
            if engine.unloading:
                going.append(partial(self.an_unload_is_carried_out, replica))
            if engine.lists:
                going.append(partial(self.a_list_is_answered, replica))
            if engine.late:
                going.append(partial(self.what_was_late_is_over, replica, not fails))
        if going:
            going[which % len(going)]()

    @rule(which=WHICH)
    def something_goes_wrong(self, which: int) -> None:
        wrong: list[Callable[[], None]] = []
        for name in GATEWAYS:
            wrong.append(partial(self.what_a_gateway_sent_changes_places, name))
            wrong.append(partial(self.what_a_gateway_sent_is_lost, name))
            wrong.append(partial(self.what_the_agent_sent_is_lost, name))
        for replica, engine in self.engines.items():
            wrong.append(partial(self.an_engine_tells_what_runs, replica, not engine.tells))
            wrong.append(partial(self.a_load_is_not_answered_in_time, replica))
        wrong[which % len(wrong)]()

    @rule(
        what=st.sampled_from((*GATEWAYS, *GATEWAYS, "agent", "leave", "stay", "list")),
        replica=ASKED,
        adapter=st.sampled_from(ADAPTERS),
    )
    def somebody_looks_in(self, what: str, replica: str, adapter: str) -> None:
        match what:
            case "leave" | "stay":
                self.a_person_wants_it_unloaded_or_not(replica, adapter, what == "leave")
            case "list":
                self.a_list_is_asked_for(replica)
            case "agent":
                self.the_agent_beacons()
            case _:
                self.a_gateway_beacons(what)

    @rule(seconds=st.sampled_from((0.01, 0.3, 1.5, 6.0, 13.0, 25.0)))
    def a_while_goes_by(self, seconds: float) -> None:
        self.time_passes(seconds)

    @rule(what=st.sampled_from(("agent", *GATEWAYS, *REPLICAS)))
    def something_is_killed(self, what: str) -> None:
        if what in GATEWAYS:
            self.a_gateway_is_killed(what)
        elif what in REPLICAS:
            self.an_engine_begins_anew(what)
        else:
            self.the_agent_is_killed()

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
            assert len(engine.loaded | on_the_way | engine.late.keys()) <= self.room, replica

    @invariant()
    def the_agent_knows_what_is_streamed_from(self) -> None:
        for gateway in self.gateways.values():
            for stream in gateway.streams:
                place = self.states[stream.replica].places.get(stream.held.pin)
                assert place is not None, f"{stream.held.pin} runs and is not known to be loaded"
                assert place.engine_name == stream.engine_name

    @invariant()
    def inv_4_nothing_is_asked_twice_at_once(self) -> None:
        for replica, engine in self.engines.items():
            calls = [
                name for who, name, *_ in engine.loading + engine.unloading if who == self.agents
            ]
            assert len(calls) == len(set(calls)), calls
            busy = {n for n, p in self.states[replica].places.items() if p.phase != "loaded"}
            assert busy == set(calls)


class TightAdapterMachine(AdapterMachine):
    """The engines' caches are no larger than the limit: something leaves before anything is loaded."""

    room = 1


AdapterMachine.TestCase.settings = settings(max_examples=200, stateful_step_count=50, deadline=None)
TightAdapterMachine.TestCase.settings = settings(
    max_examples=60, stateful_step_count=50, deadline=None
)
test_inv_3_no_adapter_in_use_is_unloaded_whatever_is_late_or_lost = AdapterMachine.TestCase
test_inv_3_nor_where_something_has_to_leave_first = TightAdapterMachine.TestCase


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
