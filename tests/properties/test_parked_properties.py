"""Whatever happens to cards and parked copies: who asks is answered, nothing starts where somebody else is, nothing
is undone and done again for ever."""

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from controlplane.domain.index import StepIndex
from controlplane.domain.scene import Scene
from schemas.commands import (
    ModelActivate,
    ModelLoad,
    ModelScale,
    ModelUnload,
    ReplicaPark,
    ReplicaResume,
)
from schemas.replica import ReplicaParked
from tests.support.parking import ParkingYard, parkable, parking_yard
from tests.support.worlds import counting_ids

NAMES = ("a", "b", "c")
CARDS = ("gpu0", "gpu1")


class ParkedStories(RuleBasedStateMachine):
    """Three models on two cards, games and leases that come and go, copies that are parked, lost and evicted."""

    @initialize(
        gibs=st.lists(st.sampled_from([3, 6]), min_size=3, max_size=3),
        minimum=st.integers(0, 1),
        maximum=st.integers(1, 2),
        parks=st.sets(st.sampled_from(NAMES)),
    )
    def begin(self, gibs: list[int], minimum: int, maximum: int, parks: set[str]) -> None:
        self.y: ParkingYard = parking_yard(gpu0=8, gpu1=8)
        self.y.compares = True
        self.y.parks = {"a", *parks}
        self.y.add(
            *(
                parkable(
                    name,
                    gib,
                    idle_s=20,
                    minimum=minimum if name == "c" else 0,
                    maximum=maximum,
                )
                for name, gib in zip(NAMES, gibs, strict=True)
            )
        )
        self.leases: dict[str, str] = {}
        self.y.turn()

    @rule(name=st.sampled_from(NAMES), stream_s=st.sampled_from([0.5, 15.0]))
    def somebody_asks(self, name: str, stream_s: float) -> None:
        self.y.request(name, stream_s=stream_s)
        self.y.turn()

    @rule(name=st.sampled_from(NAMES), card=st.sampled_from(CARDS))
    def somebody_asks_on_a_card(self, name: str, card: str) -> None:
        self.y.send(ModelActivate(model=name, scope=f"n1~{card}"), actor="gateway")
        self.y.settle()

    @rule(card=st.sampled_from(CARDS))
    def a_game_starts(self, card: str) -> None:
        if not self.y.world.cards[("n1", card)].claims:
            self.y.claim("n1", card)
            self.y.settle()

    @rule(card=st.sampled_from(CARDS))
    def a_game_ends(self, card: str) -> None:
        self.y.end_claim("n1", card)
        self.y.settle()

    @rule(card=st.sampled_from(CARDS), pinned=st.booleans())
    def a_lease_is_taken(self, card: str, pinned: bool) -> None:
        here = self.y.world.cards[("n1", card)]
        if not here.leases and not here.claims:
            self.leases[card] = self.y.lease("n1", card, f"job-{card}", pinned=pinned)
            self.y.settle()

    @rule(card=st.sampled_from(CARDS))
    def a_lease_ends(self, card: str) -> None:
        holder = self.leases.pop(card, None)
        if holder is not None:
            self.y.end_lease(holder)
            self.y.settle()

    @rule(seconds=st.sampled_from([1, 5, 25, 60]))
    def time_passes(self, seconds: int) -> None:
        self.y.advance(seconds, by=1.0)

    @rule(place=st.integers(0, 5), lost=st.booleans())
    def a_parked_copy_goes(self, place: int, lost: bool) -> None:
        copies = sorted(r.id for r in self.y.world.replicas.values() if r.phase == "parked")
        if copies:
            id_ = copies[place % len(copies)]
            self.y.lose(id_) if lost else self.y.evict(id_)
            self.y.turn()

    @rule(name=st.sampled_from(NAMES))
    def the_next_resume_fails(self, name: str) -> None:
        self.y.lost_resumes[name] = 1

    @rule(place=st.integers(0, 5))
    def a_new_agent_says_again_what_is_parked(self, place: int) -> None:
        copies = sorted(r.id for r in self.y.world.replicas.values() if r.phase == "parked")
        if copies:
            replica = self.y.world.replicas[copies[place % len(copies)]]
            self.y._tell(replica, ReplicaParked(way="sleep"))
            self.y.turn()

    @rule(name=st.sampled_from(NAMES), place=st.integers(0, 3), back=st.booleans())
    def a_person_parks_or_resumes(self, name: str, place: int, back: bool) -> None:
        ids = sorted(item.replica for _, item in self.y.items(name))
        if ids:
            id_ = ids[place % len(ids)]
            self.y.do(ReplicaResume(replica=id_) if back else ReplicaPark(replica=id_))

    @rule(name=st.sampled_from(NAMES), maximum=st.integers(0, 2))
    def it_is_scaled(self, name: str, maximum: int) -> None:
        self.y.do(ModelScale(model=name, min=0, max=maximum))
        self.y.turn()

    @rule(name=st.sampled_from(NAMES))
    def it_is_loaded(self, name: str) -> None:
        self.y.do(ModelLoad(model=name))

    @rule(name=st.sampled_from(NAMES))
    def it_is_unloaded(self, name: str) -> None:
        self.y.do(ModelUnload(model=name))
        self.y.turn()

    def scene(self) -> Scene:
        index = StepIndex()
        index.sync(self.y.world)
        heard = self.y.live()
        return Scene(
            world=self.y.world,
            live=heard,
            now=self.y.now,
            ids=counting_ids(),
            settings=self.y.settings,
            index=index,
        )

    @invariant()
    def a_parked_copy_has_its_stop_or_is_on_its_way_back(self) -> None:
        if not hasattr(self, "y"):
            return
        scene = self.scene()
        for planned in scene.index.items.values():
            replica = self.y.world.replicas.get(planned.item.replica)
            if replica is not None and replica.phase == "parked" and planned.item.stop is None:
                assert scene.hold(planned) == "pending"

    @invariant()
    def as_many_run_as_may(self) -> None:
        if not hasattr(self, "y"):
            return
        scene = self.scene()
        for name in NAMES:
            model = self.y.world.models[name]
            holds = [hold for _, hold in scene.holds_of(name)]
            assert holds.count("ready") + holds.count("pending") <= model.scaling.max
            if holds.count("ready"):
                assert holds.count("ready") + holds.count("parked") <= model.scaling.max

    @invariant()
    def nothing_is_begun_on_a_card_that_somebody_keeps(self) -> None:
        if not hasattr(self, "y"):
            return
        for node, item in self.y.items():
            replica = self.y.world.replicas.get(item.replica)
            is_new = replica is None or replica.phase == "parked"
            if is_new and item.stop is None:
                kept = [c for c in item.cards if self.y.world.cards[(node, c)].claims]
                revs = {c: self.y.world.cards[(node, c)].rev for c in kept}
                assert all(item.card_revs.get(c, 0) < rev for c, rev in revs.items())

    def teardown(self) -> None:
        if not hasattr(self, "y"):
            return
        for card in CARDS:
            self.a_game_ends(card)
            self.a_lease_ends(card)
        self.y.lost_resumes.clear()
        for name in NAMES:
            if self.y.world.models[name].scaling.max == 0:
                self.y.waiting.pop(name, None)
        self.y.advance(120, by=2.0)
        assert not any(self.y.waiting.values()), f"nobody waits for ever: {self.y.tail()}"
        # What nobody used counts as answered after a minute; then others may have their turn.
        self.y.advance(300, by=10)
        events = len(self.y.log)
        self.y.advance(200, by=50)
        assert len(self.y.log) == events, f"it comes to rest: {self.y.tail()}"


TestParkedStories = ParkedStories.TestCase
TestParkedStories.settings = settings(max_examples=12, stateful_step_count=15, deadline=None)
