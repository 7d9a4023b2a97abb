"""One replica's slots as sentences: what engines forget, answer late or lose never breaks what was promised.

The engine loses adapters, keeps what it was told to unload, answers too late, and tells a list that is old when it
comes. Gateways ask and tell of pins; time passes. Only the agent's own decisions are under test.
"""

from dataclasses import dataclass
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule
from msgspec.structs import replace

from nodeagent.domain import listing, pins, slots
from nodeagent.domain.badloads import Fault
from nodeagent.domain.evicting import Facts, Settled, settle
from nodeagent.domain.listing import Seen
from nodeagent.domain.slots import Hit, Join, Load, Place, Refuse, State, Wait
from schemas import codes
from schemas.adapternames import of_engine_name, pin_name
from schemas.beacons import GatewayBeacon, Pin
from tests.support.slotting import VERSION, a_place, moment

ADAPTERS = st.sampled_from("abcde")
GATEWAYS = st.sampled_from(["g1", "g2"])
KEEP_S = 30.0
LIMIT = 2


@dataclass(frozen=True)
class Call:
    """One call under way at the engine."""

    name: str
    place: Place
    applied: bool
    """Whether the engine has done it already; its answer is still to come."""


class SlotMachine(RuleBasedStateMachine):
    """`engine` is what the engine would list now, by engine-side name: whether it is from where it should be."""

    room = 3
    disturbs = True

    def __init__(self) -> None:
        super().__init__()
        self.at = 100.0
        self.state = State(limit=LIMIT, room=self.room)
        self.pins = pins.Pins()
        self.engine: dict[str, bool] = {}
        self.loads: dict[str, Call] = {}
        self.unloads: dict[str, Call] = {}
        self.lists: list[tuple[float, dict[str, bool]]] = []
        self.n = dict.fromkeys(["g1", "g2"], 0)
        self.disturbed = False
        self.waits: set[str] = set()

    # Gateways.

    @rule(adapter=ADAPTERS, gateway=GATEWAYS, told_gone=st.booleans())
    def ask(self, adapter: str, gateway: str, told_gone: bool) -> None:
        name = pin_name(adapter, VERSION)
        self.pins = pins.asked(
            self.pins,
            gateway,
            "i",
            replica="r-1",
            name=name,
            n=self.n[gateway],
            at=self.at,
            keep_s=KEEP_S,
        )
        place = self.state.places.get(name)
        gone = ""
        if told_gone and place is not None and place.engine_name not in self.engine:
            gone = place.engine_name
        before = self.state
        self.state, verdict = slots.ensure(self.state, adapter, VERSION, moment(self.at), gone=gone)
        self.waits.discard(name)
        match verdict:
            case Hit():
                assert before.places[name].phase == "loaded"
            case Join():
                assert before.places[name].phase == "loading"
            case Load(place=place):
                assert name not in self.loads, "two loads of one adapter at once"
                assert name not in self.unloads, "a load crosses an unload"
                self.loads[name] = Call(name, place, applied=False)
                if not self.disturbed:
                    assert slots.occupied(self.state) <= self.room
            case Wait(why=why):
                if why == "room":
                    self.waits.add(name)
            case Refuse():
                assert dict(self.state.places) == dict(before.places), "a refused ask took a place"
                self.pins = pins.denied(
                    self.pins, gateway, "i", replica="r-1", name=name, n=self.n[gateway]
                )
        self.look()

    @rule(gateway=GATEWAYS, listed=st.dictionaries(ADAPTERS, st.integers(0, 2), max_size=4))
    def beacon(self, gateway: str, listed: dict[str, int]) -> None:
        self.n[gateway] += 1
        told = {pin_name(a, VERSION): Pin(uses, 1.0) for a, uses in listed.items()}
        beacon = GatewayBeacon(
            gateway=gateway,
            incarnation="i",
            n=self.n[gateway],
            position=0,
            pins={"r-1": told} if told else {},
        )
        before, self.pins = self.pins, pins.heard(self.pins, beacon, self.at, KEEP_S)
        for uses in pins.given_up(before, self.pins).values():
            self.state = slots.used(self.state, uses)
        self.look()

    @rule(seconds=st.sampled_from([0.1, 1.0, 5.0, 20.0, 400.0]))
    def time_passes(self, seconds: float) -> None:
        self.at += seconds
        self.pins = pins.settled(self.pins, self.at)
        self.look()

    # The agent's own look; the real one is called after every change.

    def facts(self) -> Facts:
        return Facts(uses=pins.uses_in(self.pins, "r-1", self.at))

    def look(self) -> None:
        facts = self.facts()
        self.state, settled = settle(self.state, facts, self.at)
        for evict in settled.evict:
            use = facts.uses.get(evict.name, pins.UNUSED)
            assert not use.gateways, "an adapter that a gateway counts on is unloaded"
            assert evict.name not in self.unloads, "two unloads of one adapter at once"
            assert evict.name not in self.loads, "an unload crosses a load"
            self.unloads[evict.name] = Call(evict.name, evict.place, applied=False)
        for name in settled.recall:
            assert facts.uses[name].gateways
            assert not facts.uses[name].uses, "one in use is asked back"
            assert self.state.places[name].phase == "loaded"

    # The engine.

    @precondition(lambda self: self.loads)
    @rule(data=st.data())
    def engine_has_loaded(self, data: Any) -> None:
        """It has it, and has not said so yet."""
        name = data.draw(st.sampled_from(sorted(self.loads)))
        call = self.loads[name]
        self.engine[call.place.engine_name] = True
        self.loads[name] = Call(name, call.place, applied=True)

    @precondition(lambda self: self.loads)
    @rule(data=st.data())
    def load_is_answered(self, data: Any) -> None:
        call = self.loads.pop(data.draw(st.sampled_from(sorted(self.loads))))
        place = self.state.places[call.name]
        if self.engine.get(place.engine_name) is False:
            # There from elsewhere: the shell asks for the next name.
            self.state = slots.renamed(self.state, call.name)
            self.loads[call.name] = Call(call.name, self.state.places[call.name], applied=False)
            return
        self.engine[place.engine_name] = True
        self.state = slots.loaded(
            self.state, call.name, moment(self.at), engine_name=place.engine_name
        )
        self.look()

    @precondition(lambda self: self.loads)
    @rule(data=st.data(), late=st.booleans(), whose=st.sampled_from(["adapter", "replica"]))
    def load_fails(self, data: Any, late: bool, whose: Any) -> None:
        late = late and self.disturbs
        call = self.loads.pop(data.draw(st.sampled_from(sorted(self.loads))))
        if not late:
            self.engine.pop(call.place.engine_name, None)
        else:
            self.disturbed = True
        loaded = {n for n, p in self.state.places.items() if p.phase == "loaded"}
        fault = Fault(whose=whose, code=codes.LOAD_FAILED, text="no", late=late)
        self.state, _, restored = slots.load_failed(
            self.state, call.name, fault, (), (), moment(self.at)
        )
        assert loaded <= set(self.state.places), "a failed load cost somebody his place"
        for back in restored:
            name = pin_name(back.adapter, VERSION)
            assert name not in self.loads
            self.loads[name] = Call(name, back, applied=False)
        self.look()

    @precondition(lambda self: self.unloads)
    @rule(data=st.data())
    def unload_ends_well(self, data: Any) -> None:
        self._unload_ends(data, "gone")

    @precondition(lambda self: self.unloads and self.disturbs)
    @rule(data=st.data(), how=st.sampled_from(["kept", "failed", "running"]))
    def unload_ends_badly(self, data: Any, how: str) -> None:
        self._unload_ends(data, how)

    def _unload_ends(self, data: Any, how: str) -> None:
        call = self.unloads.pop(data.draw(st.sampled_from(sorted(self.unloads))))
        if how == "gone":
            self.engine.pop(call.place.engine_name, None)
        else:
            self.disturbed = True
        if how == "failed":
            self.state = slots.unload_failed(self.state, call.name, self.at)
        elif how == "running":
            self.state = slots.spared(self.state, call.name, self.at, rest_s=5.0)
        else:
            self.state = slots.unloaded(self.state, call.name, self.at)
        self.at += 0.001
        self.look()

    @precondition(lambda self: self.disturbs)
    @rule(adapter=ADAPTERS, is_right=st.booleans())
    def somebody_else_loads(self, adapter: str, is_right: bool) -> None:
        name = f"{pin_name(adapter, VERSION)}"
        if name not in self.engine:
            self.engine[name] = is_right
            self.disturbed = True

    @precondition(lambda self: self.disturbs)
    @rule()
    def engine_forgets(self) -> None:
        self.engine.clear()
        self.disturbed = True

    # Its list.

    @rule()
    def list_is_asked_for(self) -> None:
        self.lists = [(self.at, dict(self.engine))]
        self.at += 0.001

    @precondition(lambda self: self.lists)
    @rule()
    def list_is_answered(self) -> None:
        began, told = self.lists.pop()
        seen = tuple(
            Seen(
                engine_name=name,
                adapter=(of_engine_name(name) or ("", ""))[0],
                version=VERSION,
                root="right" if is_right else "wrong",
            )
            for name, is_right in sorted(told.items())
        )
        busy = {n: p for n, p in self.state.places.items() if p.phase != "loaded"}
        facts = self.facts()
        self.state, drift = listing.listed(self.state, seen, began, facts, moment(self.at))
        for name, place in busy.items():
            assert self.state.places[name] is place, "a list changed what is under way"
        for name in drift.lost:
            use = facts.uses.get(name, pins.UNUSED)
            wrong = any(n.startswith(name) and not right for n, right in told.items())
            assert wrong or not use.uses, "a list took an adapter in use for gone"
        self.look()

    # What holds at any moment.

    @invariant()
    def what_is_under_way_is_known(self) -> None:
        loading = {n for n, p in self.state.places.items() if p.phase == "loading"}
        unloading = {n for n, p in self.state.places.items() if p.phase == "unloading"}
        assert loading == set(self.loads)
        assert unloading == set(self.unloads)

    @invariant()
    def no_two_places_have_one_name(self) -> None:
        names = [place.engine_name for place in self.state.places.values()]
        assert len(names) == len(set(names))

    @invariant()
    def the_engine_has_what_is_loaded_and_no_more_than_its_room(self) -> None:
        if self.disturbed:
            return
        for place in self.state.places.values():
            if place.phase == "loaded":
                assert self.engine.get(place.engine_name)
        assert (
            len(set(self.engine) | {c.place.engine_name for c in self.loads.values()}) <= self.room
        )

    @invariant()
    def who_waits_finds_a_place_once_nobody_needs_one(self) -> None:
        """From every state there is a way on: all is given up, calls end well, and who waits is loaded."""
        standing = {w.name for w in slots.waiting(self.state, self.at)}
        if not standing or self.state.strays:
            return
        state, at = self.state, self.at
        for name in [n for n, p in state.places.items() if p.phase == "unloading"]:
            state = slots.unloaded(state, name, at)
        for name in [n for n, p in state.places.items() if p.phase == "loading"]:
            engine_name = state.places[name].engine_name
            state = slots.loaded(state, name, moment(at), engine_name=engine_name)
        at = max([at, *(p.rest_until for p in state.places.values())])
        for want in slots.waiting(self.state, self.at):
            for _ in range(LIMIT + 2):
                state, verdict = slots.ensure(
                    state, want.name.partition("@")[0], VERSION, moment(at), how="person"
                )
                if isinstance(verdict, Load):
                    engine_name = verdict.place.engine_name
                    state = slots.loaded(state, want.name, moment(at), engine_name=engine_name)
                if isinstance(verdict, Hit | Load):
                    break
                state, settled = settle(state, Facts(), at)
                for evict in settled.evict:
                    state = slots.unloaded(state, evict.name, at)
            else:
                raise AssertionError(f"{want.name} waits for ever")


class TightSlotMachine(SlotMachine):
    """The engine's cache is no larger than the limit: something leaves before anything is loaded."""

    room = 2


class CalmSlotMachine(SlotMachine):
    """An engine that does as it is told: what is known is what is so, at any moment."""

    disturbs = False


TestSlots = SlotMachine.TestCase
TestCalmSlots = CalmSlotMachine.TestCase
TestTightSlots = TightSlotMachine.TestCase
TestCalmSlots.settings = settings(max_examples=60, stateful_step_count=50)
TestSlots.settings = settings(max_examples=60, stateful_step_count=50)
TestTightSlots.settings = settings(max_examples=60, stateful_step_count=50)


PHASES = st.sampled_from(["loading", "loaded", "unloading"])


@settings(max_examples=300)
@given(
    phases=st.lists(st.tuples(PHASES, st.booleans()), max_size=4),
    over=st.integers(-1, 1),
    spare=st.integers(0, 1),
    asks=st.booleans(),
    recalls=st.booleans(),
)
def test_a_look_at_what_is_at_rest_chooses_nothing(phases, over, spare, asks, recalls):
    """Whatever gateways do: that is why it is not looked at. Only the catalog's own wishes are no part of it."""
    places = {
        pin_name(name, VERSION): a_place(name, phase=phase, leaving=leaving)
        for name, (phase, leaving) in zip("abcd", phases, strict=False)
    }
    limit = max(len(places) - over, 0)
    state = State(limit=limit, room=limit + spare, places=places)
    if asks:
        state, _ = slots.ensure(state, "e", VERSION, moment(1.0))
    if recalls and places:
        state = replace(state, recalled={min(places): 0.5})
    if slots.is_at_rest(state):
        assert settle(state, Facts(), 2.0) == (state, Settled())
