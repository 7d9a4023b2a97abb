"""Who is kept as the only holder of an adapter is who would be found anew, and chosen the long way."""

from datetime import datetime, timedelta

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from gateway.adapterdesk import AdapterDesk, Seeking
from gateway.domain.adapters import BUSY
from gateway.domain.adaptertable import AdapterEntry, AdapterTable, places_of
from gateway.domain.admission import Route
from gateway.domain.pins import Held
from tests.support.gateway_world import NOW, a_model, a_replica, a_slot, an_adapter, some_slots

IDS = ("r-1", "r-2")
REPLICAS = tuple(a_replica(id, adapter_slots=4, node=f"n-{id}") for id in IDS)
ENTRY = AdapterEntry(adapter=an_adapter("poet"), created=NOW, seq=2)
PIN = ENTRY.pin
ID = st.sampled_from(IDS)


class Stopped:
    def __init__(self) -> None:
        self.s = 100.0

    def now_s(self) -> float:
        return self.s

    def wall_ms(self, at_s: float) -> float:
        return at_s * 1000

    def now(self) -> datetime:
        return NOW + timedelta(seconds=self.s)


class Hits(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.clock = Stopped()
        self.desk = AdapterDesk(self.clock)
        self.table = AdapterTable(entries={"poet": ENTRY}, _pins={"poet": PIN})
        self.inflight: dict[str, int] = {}
        self.asked: list[Held] = []
        self.used: list[Held] = []
        self.beacon = 0
        self.route_anew()
        self.loads("r-1")

    def route_anew(self) -> None:
        """As the gateway does whenever its table changes."""
        self.route = Route(model=a_model(), candidates=REPLICAS, adapter=ENTRY)

    @rule(id=ID)
    def asks(self, id: str) -> None:
        self.asked.append(self.desk.pins.asking(f"n-{id}", id, PIN, self.clock.s))

    @rule()
    def are_refused(self) -> None:
        while self.asked:
            self.desk.pins.asked(self.asked.pop(0), self.clock.s)

    @rule(id=ID)
    def loads(self, id: str) -> None:
        held = self.desk.pins.asking(f"n-{id}", id, PIN, self.clock.s)
        self.desk.pins.granted(held, "poet@1", self.clock.s)
        self.desk.pins.asked(held, self.clock.s)

    @rule(id=ID)
    def uses(self, id: str) -> None:
        self.used.append(self.desk.pins.begin(f"n-{id}", id, PIN, self.clock.s))

    @rule()
    def end(self) -> None:
        while self.used:
            self.desk.pins.end(self.used.pop(), self.clock.s)

    @rule(id=ID)
    def revokes(self, id: str) -> None:
        self.desk.pins.revoke(id, PIN)

    @rule(id=ID)
    def recalls(self, id: str) -> None:
        self.desk.pins.recall(id, (PIN,))

    @rule(id=ID)
    def loses(self, id: str) -> None:
        self.desk.replica_over(id)

    @rule(id=ID)
    def beacons(self, id: str) -> None:
        self.beacon += 1
        self.desk.pins.tell(self.beacon, self.clock.s)
        self.desk.pins.heard(f"n-{id}", self.beacon)

    @rule(seconds=st.sampled_from([1.0, 1.0, 19.0, 31.0]))
    def passes(self, seconds: float) -> None:
        self.clock.s += seconds

    @rule(id=ID)
    def is_silent_for_a_second(self, id: str) -> None:
        self.desk.unheard(f"n-{id}", 0.1)
        self.what_is_kept_is_what_is_found()
        self.clock.s += 1.0
        self.desk.heard(f"n-{id}")

    @rule(id=ID, told=st.sampled_from(["nothing", "nothing", "loaded", "leaving"]))
    def the_log_tells(self, id: str, told: str) -> None:
        before = self.table.places.get(id)
        slots = () if told == "nothing" else (a_slot(ENTRY.adapter, leaving=told == "leaving"),)
        after = self.table.places[id] = places_of(some_slots(id, *slots))
        self.desk.places_changed(id, before, after)
        self.route_anew()

    @rule(id=ID, count=st.sampled_from([0, 1, BUSY + 1, BUSY]))
    def runs(self, id: str, count: int) -> None:
        self.inflight[id] = count

    @invariant()
    def what_is_kept_is_what_is_found(self) -> None:
        found = self.desk.hit(self.route, self.table, self.inflight)
        anew = AdapterDesk(self.clock)
        anew.pins = self.desk.pins
        if not self.desk._silent_until_s:
            assert anew.hit(self.route, self.table, self.inflight) == found
            if found is not None:
                found[1].uses -= 1
        if found is None:
            return
        replica, held = found
        held.uses -= 1
        assert held.is_trusted(self.clock.s)
        chosen = self.desk.choose(
            ENTRY, REPLICAS, Seeking("poet"), self.table, self.inflight, connected=True
        )
        assert isinstance(chosen, tuple)
        assert chosen[:2] == (replica, held)
        held.uses -= 1


TestHits = Hits.TestCase
TestHits.settings = settings(max_examples=100, stateful_step_count=50, deadline=None)
