"""Whole stories of a yard: whatever happens, decisions make progress, come to rest and keep the rules."""

from datetime import timedelta

import msgspec
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from controlplane.domain import idle, resting, shortage, upkeep
from controlplane.domain.index import StepIndex
from controlplane.domain.scene import Scene
from schemas.commands import ModelActivate, ModelLoad, ModelUnload, NodeCordon, NodeUncordon
from schemas.model import ModelChanged, Scaling
from schemas.plan import PlanItem
from schemas.replica import TERMINAL_PHASES
from tests.support.parking import ParkingYard
from tests.support.worlds import SETTINGS, Yard, counting_ids, model, profile

NAMES = ("a", "b", "c")


class Stories(RuleBasedStateMachine):
    """Requests, edits, commands, crashes, refusals and silences in any order, then peace."""

    @initialize(
        sizes=st.lists(st.sampled_from([1, 3, 6, 20]), min_size=3, max_size=3),
        minimums=st.lists(st.sampled_from([0, 0, 0, 1]), min_size=3, max_size=3),
        maximums=st.lists(st.sampled_from([0, 1, 1, 2]), min_size=3, max_size=3),
        nodes=st.sampled_from([1, 1, 3]),
        cards=st.sampled_from([1, 2]),
    )
    def begin(
        self,
        sizes: list[int],
        minimums: list[int],
        maximums: list[int],
        nodes: int,
        cards: int,
    ) -> None:
        self.yard = Yard(compares=True)
        for n in range(nodes):
            self.yard.node(f"n{n}", {f"gpu{c}": 8 for c in range(cards)})
        for name, gib, low, high in zip(NAMES, sizes, minimums, maximums, strict=True):
            self.yard.add(model(name, gib, minimum=min(low, high), maximum=high, idle_s=30))
        self.yard.turn()

    @rule(name=st.sampled_from(NAMES), stream_s=st.sampled_from([0.5, 5.0, 90.0]))
    def request(self, name: str, stream_s: float) -> None:
        self.yard.request(name, stream_s=stream_s)
        self.yard.turn()

    @rule(seconds=st.sampled_from([1, 5, 20]))
    def time_passes(self, seconds: int) -> None:
        self.yard.advance(seconds, by=1)

    @rule(seconds=st.sampled_from([100, 2000]))
    def much_time_passes(self, seconds: int) -> None:
        self.yard.advance(seconds, by=seconds / 20)

    @rule(name=st.sampled_from(NAMES), count=st.integers(1, 6))
    def starts_will_fail(self, name: str, count: int) -> None:
        self.yard.engine(name).fails = count

    @rule(name=st.sampled_from(NAMES))
    def an_engine_crashes(self, name: str) -> None:
        for id_ in self.yard.ready(name)[:1]:
            self.yard.fail(id_)
        self.yard.turn()

    @rule(name=st.sampled_from(NAMES), gib=st.sampled_from([1.0, 5.0]))
    def it_is_measured(self, name: str, gib: float) -> None:
        self.yard.engine(name).measured_bytes = int(gib * 1024**3)

    @rule(name=st.sampled_from(NAMES), tokens=st.sampled_from(["1", "2"]), low=st.integers(0, 2))
    def an_entry_changes(self, name: str, tokens: str, low: int) -> None:
        before = self.yard.world.models[name]
        gib = before.profiles[0].memory_bytes / 1024**3
        after = model(
            name,
            profiles=[profile(gib=gib, args=("--ctx-size", tokens))],
            minimum=low,
            maximum=max(low, 1),
            idle_s=30,
        )
        if after != before:
            self.yard.append("model", (name,), ModelChanged(by="t", fields=("profiles",)), after)
        self.yard.turn()

    @rule(name=st.sampled_from(NAMES))
    def it_is_switched_off(self, name: str) -> None:
        before = self.yard.world.models[name]
        after = model(name, profiles=before.profiles, minimum=0, maximum=0)
        assert after.scaling == Scaling(min=0, max=0, idle_timeout_s=60)
        self.yard.append("model", (name,), ModelChanged(by="t", fields=("scaling",)), after)
        self.yard.turn()

    @rule(name=st.sampled_from(NAMES), for_s=st.sampled_from([None, 60.0]))
    def load(self, name: str, for_s: float | None) -> None:
        self.yard.do(ModelLoad(model=name, for_s=for_s))
        self.yard.turn()

    @rule(name=st.sampled_from(NAMES), force=st.booleans())
    def unload(self, name: str, force: bool) -> None:
        self.yard.do(ModelUnload(model=name, force=force))
        self.yard.turn()

    @rule(cordon=st.booleans())
    def cordon(self, cordon: bool) -> None:
        self.yard.do(NodeCordon(node="n0") if cordon else NodeUncordon(node="n0"))
        self.yard.turn()

    @rule(name=st.sampled_from(NAMES))
    def agents_refuse(self, name: str) -> None:
        if name in self.yard.refuses:
            self.yard.accept_again(name)
        else:
            self.yard.refuses.add(name)

    @rule(silent=st.booleans())
    def a_node_falls_silent(self, silent: bool) -> None:
        if silent:
            self.yard.fall_silent("n0")
        else:
            self.yard.speak_again("n0")
        self.yard.turn()

    @rule()
    def another_leader_takes_over(self) -> None:
        """Nothing but the log is left of the last one, and the beacons begin anew."""
        self.yard.index = StepIndex()
        self.yard.leading_since = self.yard.now
        self.yard.turn()

    @invariant()
    def no_card_gives_more_than_it_has(self) -> None:
        if not hasattr(self, "yard"):
            return
        for card in self.yard.world.cards.values():
            assert sum(lease.memory_bytes for lease in card.leases) <= card.memory_bytes

    @invariant()
    def no_plan_promises_more_than_the_card_has(self) -> None:
        if not hasattr(self, "yard"):
            return
        for (node, id_), card in self.yard.world.cards.items():
            planned = sum(
                item.memory_bytes
                for where, item in self.yard.items()
                if where == node and id_ in item.cards and not self._has_left(item)
            )
            assert planned <= card.memory_bytes

    @invariant()
    def one_load_at_a_time_and_one_replica_per_card_and_revision(self) -> None:
        if not hasattr(self, "yard"):
            return
        places: set[tuple[str, tuple[str, ...], str, str]] = set()
        for node, item in self.yard.items():
            if item.stop is not None or self._is_over(item.replica):
                continue
            place = (node, item.cards, item.launch.model, item.launch.revision)
            assert place not in places
            places.add(place)

    @invariant()
    def an_off_model_has_nothing_running_but_what_drains(self) -> None:
        if not hasattr(self, "yard"):
            return
        for node, item in self.yard.items():
            entry = self.yard.world.models[item.launch.model]
            if entry.scaling.max == 0:
                assert item.stop is not None or self._is_over(item.replica), node

    @invariant()
    def what_rests_at_a_glance_needs_nothing(self) -> None:
        yard = self.yard
        index = StepIndex()
        index.sync(yard.world)
        for name in yard.world.models:
            scene = Scene(
                world=yard.world,
                live=yard.live(),
                now=yard.now,
                ids=counting_ids(),
                settings=SETTINGS,
                index=index,
            )
            rest = resting.at_rest(scene, name)
            if rest is not None:
                assert upkeep.look_after(scene, name) is None
                assert shortage.demand_of(scene, name) is None
                assert upkeep.due_at(scene, name) is None
                assert idle.not_before(scene, name) == rest.idle_at

    def _has_left(self, item: PlanItem) -> bool:
        """It is over, or parked and to stay so: what it keeps there is in the card's own leases."""
        replica = self.yard.world.replicas.get(item.replica)
        is_parked = replica is not None and replica.phase == "parked" and item.stop is not None
        return is_parked or self._is_over(item.replica)

    def _is_over(self, id_: str) -> bool:
        replica = self.yard.world.replicas.get(id_)
        return replica is not None and replica.phase in TERMINAL_PHASES

    def teardown(self) -> None:
        """Peace: everything works, nobody asks. What `min` asks for runs, all else is given back.

        Then `min` goes too, and with it the last thing anybody could have to wait for.
        """
        if not hasattr(self, "yard"):
            return
        y = self.yard
        y.accept_again(*NAMES)
        for engine in y.engines.values():
            engine.fails = 0
        y.speak_again("n0")
        y.do(NodeUncordon(node="n0"))
        self._let_it_rest()
        kept = False
        for name in NAMES:
            entry = y.world.models[name]
            items = [item for _, item in y.items(name)]
            kept = kept or entry.scaling.min > 0
            assert len(items) <= entry.scaling.min, (name, y.tail(20))
        assert kept or not any(y.waiting.values()), (y.waiting, y.tail(20))
        for name in NAMES:
            entry = y.world.models[name]
            given_up = msgspec.structs.replace(
                entry, scaling=msgspec.structs.replace(entry.scaling, min=0)
            )
            y.append("model", (name,), ModelChanged(by="t", fields=("scaling",)), given_up)
        self._let_it_rest()
        assert y.items() == [], y.tail(20)
        assert not any(y.waiting.values()), (y.waiting, y.tail(20))
        assert all(card.leases == () for card in y.world.cards.values())

    def _let_it_rest(self) -> None:
        y = self.yard
        y.advance(400, by=4)
        y.advance(4000, by=100)
        y.advance(200, by=4)
        before = len(y.log)
        y.now += timedelta(seconds=1)
        assert y.settle() == [], "a satisfied yard calls for nothing"
        assert len(y.log) == before


TestStories = Stories.TestCase
TestStories.settings = hypothesis_settings(max_examples=25, stateful_step_count=25)


class CardStories(Stories):
    """The same, on cards that games claim and people lease, with engines that are parked."""

    @initialize(
        sizes=st.lists(st.sampled_from([1, 3, 6, 8]), min_size=3, max_size=3),
        minimums=st.lists(st.sampled_from([0, 0, 0, 1]), min_size=3, max_size=3),
        maximums=st.lists(st.sampled_from([0, 1, 1, 2]), min_size=3, max_size=3),
        nodes=st.sampled_from([1, 1, 3]),
        cards=st.sampled_from([1, 2]),
    )
    def begin(
        self,
        sizes: list[int],
        minimums: list[int],
        maximums: list[int],
        nodes: int,
        cards: int,
    ) -> None:
        self.yard = ParkingYard(compares=True, residual_bytes=2**29, parks={"a", "b"})
        for n in range(nodes):
            self.yard.node(f"n{n}", {f"gpu{c}": 8 for c in range(cards)})
            self.yard.can_park(f"n{n}", "sleep", engine="llamacpp")
        for name, gib, low, high in zip(NAMES, sizes, minimums, maximums, strict=True):
            self.yard.add(model(name, gib, minimum=min(low, high), maximum=high, idle_s=30))
        self.yard.turn()

    def _cards(self) -> ParkingYard:
        assert isinstance(self.yard, ParkingYard)
        return self.yard

    @rule(name=st.sampled_from(("a", "b")), other=st.sampled_from(NAMES))
    def one_is_parked_and_asked_for_again(self, name: str, other: str) -> None:
        y = self._cards()
        for asked in (name, other, name):
            y.request(asked, stream_s=0.5)
            y.advance(50, by=5)

    @rule(claim=st.booleans())
    def a_game_comes_or_goes(self, claim: bool) -> None:
        y = self._cards()
        if y.world.cards[("n0", "gpu0")].claims:
            y.end_claim("n0")
        elif claim:
            y.claim("n0")
        y.turn()

    @rule(card=st.sampled_from(["gpu0", "gpu1"]), pinned=st.booleans())
    def somebody_leases(self, card: str, pinned: bool) -> None:
        y = self._cards()
        state = y.world.cards.get(("n0", card))
        if state is None or state.leases or state.claims:
            return
        y.lease("n0", card, card, pinned=pinned)
        y.turn()

    @rule(card=st.sampled_from(["gpu0", "gpu1"]))
    def a_lease_ends(self, card: str) -> None:
        self._cards().end_lease(f"l-{card}")
        self.yard.turn()

    @rule(name=st.sampled_from(NAMES), card=st.sampled_from(["gpu0", "gpu1"]))
    def a_card_is_asked_for(self, name: str, card: str) -> None:
        self.yard.send(ModelActivate(model=name, scope=f"n0~{card}"), actor="gateway")
        self.yard.turn()

    @rule()
    def nobody_asks_anew(self) -> None:
        """Whatever is kept, short or asked for on a card: models do not move about for ever."""
        y = self._cards()
        for engine in y.engines.values():
            engine.fails = 0
        y.advance(60, by=4)
        before = {name: y.started(name) for name in NAMES}
        y.advance(120, by=4)
        for name, count in before.items():
            assert y.started(name) - count <= 4, (name, y.tail(20))

    @rule(name=st.sampled_from(NAMES))
    def a_parked_copy_is_lost(self, name: str) -> None:
        y = self._cards()
        parked = [r for r in y.world.replicas.values() if r.phase == "parked" and r.model == name]
        for replica in parked[:1]:
            y.lose(replica.id)
        y.turn()

    def teardown(self) -> None:
        """Peace: nobody keeps a card and nothing can be parked, so what is parked is lost one by one."""
        if not hasattr(self, "yard"):
            return
        y = self._cards()
        if y.world.cards[("n0", "gpu0")].claims:
            y.end_claim("n0")
        for card in ("gpu0", "gpu1"):
            y.end_lease(f"l-{card}")
        y.parks = set()
        y.accept_again(*NAMES)
        y.speak_again("n0")
        y.do(NodeUncordon(node="n0"))
        y.advance(100, by=4)
        for replica in list(y.world.replicas.values()):
            if replica.phase == "parked":
                y.lose(replica.id)
        y.turn()
        super().teardown()


TestCardStories = CardStories.TestCase
TestCardStories.settings = hypothesis_settings(max_examples=25, stateful_step_count=25)
