"""A placement fits, is the best candidate, depends on nothing but the facts, and only gets better with more room."""

from datetime import timedelta

from hypothesis import given
from hypothesis import strategies as st
from msgspec import Struct
from msgspec.structs import replace

from controlplane.domain import placement
from controlplane.domain.index import StepIndex
from controlplane.domain.placement import (
    Claims,
    Demand,
    NoNode,
    NoRoom,
    Placed,
    Verdict,
    Wait,
    candidates,
    place,
)
from controlplane.domain.scene import Scene
from schemas.activation import ActivationIdle
from schemas.card import CardMeasured, Claim, Lease, Stowaway, Vm, Waiter
from schemas.model import Model, Profile
from schemas.node import NodeState, NodeStateJoined
from schemas.placement import Candidate
from schemas.plan import Plan, PlanChanged, Stop
from schemas.replica import ReplicaParked
from tests.support.worlds import GIB, Yard, counting_ids, model, profile

CARDS = st.lists(st.integers(1, 16), min_size=1, max_size=3)
NODES = st.lists(CARDS, min_size=1, max_size=3)
RUNNING = st.lists(st.tuples(st.integers(1, 12), st.sampled_from([0, 0, 1])), max_size=5)
WANTED = st.tuples(st.integers(1, 16), st.booleans(), st.sampled_from([("gpu",), ("*/gpu0",)]))


def build(nodes: list[list[int]], running: list[tuple[int, int]], order: list[int]) -> Yard:
    """The nodes, told in this order, with what fits of the running models on them."""
    y = Yard()
    for n in order:
        y.node(f"n{n}", {f"gpu{c}": gib for c, gib in enumerate(nodes[n])})
    y.settle()
    for n, (gib, minimum) in enumerate(running):
        y.add(model(f"m{n}", gib, minimum=minimum, idle_s=0))
        if minimum == 0:
            y.request(f"m{n}", stream_s=0.1)
        y.advance(5, by=1)
        y.advance(11, by=11)
    for name in list(y.waiting):
        y.waiting[name].clear()
    return y


def verdict(y: Yard, entry: Model) -> Verdict:
    if entry.name not in y.world.models:
        y.add(entry)
    index = StepIndex()
    index.sync(y.world)
    live = y.live()
    scene = Scene(
        world=y.world,
        live=live,
        now=y.now,
        ids=counting_ids(),
        settings=y.settings,
        index=index,
    )
    return place(scene, Demand(model=entry, wanted_at=y.now - timedelta(seconds=60)))


def wanted(spec: tuple[int, bool, tuple[str, ...]]) -> Model:
    gib, exclusive, card = spec
    return model("new", profiles=[profile(gib=gib, exclusive=exclusive, card=card)])


@given(NODES, RUNNING, WANTED)
def test_what_is_placed_fits_and_what_is_drained_makes_it_fit(
    nodes: list[list[int]],
    running: list[tuple[int, int]],
    spec: tuple[int, bool, tuple[str, ...]],
) -> None:
    y = build(nodes, running, list(range(len(nodes))))
    entry = wanted(spec)
    answer = verdict(y, entry)
    if isinstance(answer, Placed):
        card = y.world.cards[(answer.node, answer.card)]
        used = sum(lease.memory_bytes for lease in card.leases)
        assert used + answer.memory_bytes <= card.memory_bytes
        assert not (spec[1] and card.leases), "an exclusive profile is alone"
        assert (answer.rank == 2) == (not card.leases)
    elif isinstance(answer, Wait) and answer.victims:
        [(node, id_)] = answer.claimed
        card = y.world.cards[(node, id_)]
        gone = {v.item.replica for v in answer.victims}
        left = sum(lease.memory_bytes for lease in card.leases if lease.holder not in gone)
        assert left + spec[0] * GIB <= card.memory_bytes
        for victim in answer.victims:
            assert y.world.models[victim.item.launch.model].scaling.min == 0
            assert y.world.replicas[victim.item.replica].phase == "ready"
    elif isinstance(answer, NoRoom):
        for (_, id_), card in y.world.cards.items():
            if spec[2] == ("gpu",) or id_ == "gpu0":
                assert spec[0] * GIB > card.memory_bytes
        assert answer.report.misses, "a no has its reasons"
        assert all(miss.reason for miss in answer.report.misses)


@given(NODES, RUNNING, WANTED, st.randoms(use_true_random=False))
def test_the_order_in_which_nodes_are_told_does_not_matter(
    nodes: list[list[int]],
    running: list[tuple[int, int]],
    spec: tuple[int, bool, tuple[str, ...]],
    random: object,
) -> None:
    order = list(range(len(nodes)))
    shuffled = list(order)
    random.shuffle(shuffled)  # type: ignore[attr-defined]
    one = verdict(build(nodes, running, order), wanted(spec))
    other = verdict(build(nodes, running, shuffled), wanted(spec))
    assert _what(one) == _what(other)


def _what(answer: Verdict) -> object:
    match answer:
        case Placed():
            return (answer.node, answer.card, answer.rank, answer.profile.name)
        case Wait():
            return (answer.claimed, [v.item.launch.model for v in answer.victims])
        case _:
            return type(answer)


@given(NODES, RUNNING, WANTED)
def test_a_free_card_more_never_turns_yes_into_no(
    nodes: list[list[int]],
    running: list[tuple[int, int]],
    spec: tuple[int, bool, tuple[str, ...]],
) -> None:
    y = build(nodes, running, list(range(len(nodes))))
    before = verdict(y, wanted(spec))
    y.node("more", {"gpu0": 16})
    # Joined by hand: a leader would give the card to those who wait already.
    y.append("nodestate", ("more",), NodeStateJoined(), NodeState(node="more", since=y.now))
    after = verdict(y, wanted(spec))
    ranking = {Placed: 0, Wait: 1, NoRoom: 2}
    assert ranking[type(after)] <= ranking[type(before)]
    assert isinstance(after, Placed), "16 GiB free are enough for any of these"


@given(NODES, RUNNING, WANTED)
def test_the_same_facts_give_the_same_answer(
    nodes: list[list[int]],
    running: list[tuple[int, int]],
    spec: tuple[int, bool, tuple[str, ...]],
) -> None:
    y = build(nodes, running, list(range(len(nodes))))
    assert verdict(y, wanted(spec)) == verdict(y, wanted(spec))


# -- yards in which anything may be on a card

STATES = st.sampled_from(
    ["", "", "", "vm", "claim", "pinned", "whole", "part", "batch", "line", "stowaway", "residue"]
)
PROFILES = st.lists(
    st.tuples(
        st.integers(1, 12),
        st.booleans(),
        st.sampled_from([("gpu",), ("*/gpu0",), ("n1/*", "n2/gpu1"), ("cpu", "gpu")]),
        st.sampled_from([1, 1, 1, 2]),
        st.sampled_from([1, 100]),
    ),
    min_size=1,
    max_size=2,
)
PARKED = st.lists(st.integers(0, 4), max_size=2)


class Drawn(Struct, frozen=True, kw_only=True):
    """A yard as hypothesis draws it."""

    nodes: list[list[int]]
    running: list[tuple[int, int]]
    states: list[str]
    parked: list[int]
    residents: bool
    busy: list[int]


DRAWN = st.builds(
    Drawn,
    nodes=NODES,
    running=RUNNING,
    states=st.lists(STATES, max_size=6),
    parked=PARKED,
    residents=st.booleans(),
    busy=st.lists(st.integers(0, 4), max_size=3),
)


def drawn(spec: Drawn, order: list[int], profiles: list[Profile]) -> Yard:
    """Models run, some of them and of the wanted one are parked, and cards get what was drawn for them."""
    y = build(spec.nodes, spec.running, order)
    wanted_one = model("new", profiles=profiles, maximum=9, idle_s=0)
    y.add(wanted_one)
    if spec.residents:
        y.request("new", stream_s=0.1)
        y.advance(5, by=1)
        y.waiting.clear()
    ready = sorted(r.id for r in y.world.replicas.values() if r.phase == "ready")
    for n in spec.parked:
        if n < len(ready):
            parked_at(y, ready[n])
    y.advance(12, by=12)
    for n in spec.busy:
        if n < len(ready) and y.world.replicas[ready[n]].phase == "ready":
            y.request(y.world.replicas[ready[n]].model, stream_s=900)
    for (node, id_), what in zip(sorted(y.world.cards), spec.states, strict=False):
        put(y, node, id_, what)
    return y


def parked_at(y: Yard, id_: str) -> None:
    """The replica is parked, as far as its plan and its card say."""
    replica = y.world.replicas[id_]
    plan = y.world.plans[replica.node]
    stop = Stop(decision="d", reason="idle", decided_at=y.now, park="may")
    items = tuple(replace(i, stop=stop) if i.replica == id_ else i for i in plan.items)
    y.append("plan", (replica.node,), PlanChanged(), Plan(node=replica.node, items=items))
    for card in replica.cards:
        state = y.world.cards[(replica.node, card)]
        leases = tuple(
            replace(lease, kind="parked", memory_bytes=GIB // 2) if lease.holder == id_ else lease
            for lease in state.leases
        )
        y._card(replace(state, rev=state.rev + 1, leases=leases), CardMeasured(used_bytes=0))
    y._tell(replace(replica, phase="parked", residual_bytes=GIB // 2), ReplicaParked())
    for (name, scope), activation in list(y.world.activations.items()):
        if name == replica.model:
            idle = replace(activation, phase="idle", replica=None)
            y.append("activation", (name, scope), ActivationIdle(cause="idle"), idle)


def put(y: Yard, node: str, id_: str, what: str) -> None:
    card = y.world.cards[(node, id_)]
    lease = Lease(
        holder=f"l-{node}-{id_}",
        memory_bytes=GIB,
        fence=1,
        since=y.now,
        kind="named",
        name=f"{node}-{id_}",
    )
    fields: dict[str, object] = {}
    match what:
        case "vm":
            fields = {"vm": Vm(name="w", since=y.now)}
        case "claim":
            fields = {"claims": (Claim(id="c", name="g", kind="game", since=y.now),)}
        case "pinned":
            fields = {"leases": (*card.leases, replace(lease, pinned=True))}
        case "whole":
            fields = {"leases": (*card.leases, replace(lease, exclusive=True))}
        case "part":
            fields = {"leases": (*card.leases, lease)}
        case "batch":
            fields = {"leases": (*card.leases, replace(lease, priority="batch"))}
        case "line":
            fields = {"waiters": (Waiter(id="l-w", since=y.now, memory_bytes=GIB),)}
        case "stowaway":
            stowaway = Stowaway(pid=1, name="x", memory_bytes=GIB, since=y.now)
            fields = {"stowaways": (stowaway,), "other_bytes": GIB}
        case "residue":
            kept = replace(lease, kind="parked", holder="r-gone", name="")
            fields = {"leases": (*card.leases, kept)}
        case _:
            return
    y._card(replace(card, rev=card.rev + 1, **fields), CardMeasured(used_bytes=0))


def profiles_of(specs: list[tuple[int, bool, tuple[str, ...], int, int]]) -> list[Profile]:
    return [
        profile(f"p{n}", gib, exclusive=alone, card=card, cards=cards, priority=priority)
        for n, (gib, alone, card, cards, priority) in enumerate(specs)
    ]


def scene_of(y: Yard) -> Scene:
    index = StepIndex()
    index.sync(y.world)
    live = y.live()
    return Scene(
        world=y.world,
        live=live,
        now=y.now,
        ids=counting_ids(),
        settings=y.settings,
        index=index,
    )


def judged(
    y: Yard, claimed: list[int], at_once: int = placement.JUDGED_AT_ONCE
) -> tuple[Verdict, tuple[Candidate, ...]]:
    scene = scene_of(y)
    cards = sorted(y.world.cards)
    claims = Claims(frozenset(cards[n] for n in claimed if n < len(cards)))
    demand = Demand(
        model=y.world.models["new"], wanted_at=y.now - timedelta(seconds=5), activation=None
    )
    before = placement.JUDGED_AT_ONCE
    placement.JUDGED_AT_ONCE = at_once  # type: ignore[misc]
    try:
        return place(scene, demand, claims), candidates(scene, demand, claims)
    finally:
        placement.JUDGED_AT_ONCE = before  # type: ignore[misc]


def outcome(answer: Verdict) -> object:
    """What a verdict means, without the report."""
    match answer:
        case Placed():
            back = answer.resume.item.replica if answer.resume is not None else ""
            place_ = (answer.node, answer.cards, answer.rank, answer.profile.name)
            return (*place_, back, answer.evict, answer.card_revs, answer.memory_bytes)
        case Wait():
            victims = [v.item.replica for v in answer.victims]
            return (answer.claimed, victims, answer.waiting_for, answer.kept, answer.look_at)
        case _:
            return type(answer)


@given(DRAWN, PROFILES, st.lists(st.integers(0, 8), max_size=2))
def test_what_is_placed_is_the_first_of_all_candidates(
    spec: Drawn, profiles: list[tuple[int, bool, tuple[str, ...], int, int]], claimed: list[int]
) -> None:
    y = drawn(spec, list(range(len(spec.nodes))), profiles_of(profiles))
    answer, all_of = judged(y, claimed)
    ranked = [c for c in all_of if c.rank is not None]
    assert [c.rank for c in ranked] == sorted(c.rank for c in ranked if c.rank is not None)
    assert all(c.reason for c in all_of)
    if isinstance(answer, Placed):
        first = all_of[0]
        assert (first.profile, first.node, first.cards, first.rank) == (
            answer.profile.name,
            answer.node,
            answer.cards,
            answer.rank,
        )
        assert (answer.resume.item.replica if answer.resume is not None else "") == first.resumes
    elif isinstance(answer, Wait):
        assert all_of[0].rank == (4 if answer.report.chosen is not None else 5)
        assert tuple(v.item.replica for v in answer.victims) == all_of[0].victims
        if answer.report.chosen is None:
            assert answer.waiting_for == all_of[0].waiting_for
    else:
        assert ranked == []


@given(DRAWN, PROFILES, st.lists(st.integers(0, 8), max_size=2))
def test_a_large_yard_is_searched_to_what_judging_all_of_it_would_find(
    spec: Drawn, profiles: list[tuple[int, bool, tuple[str, ...], int, int]], claimed: list[int]
) -> None:
    y = drawn(spec, list(range(len(spec.nodes))), profiles_of(profiles))
    searched, all_of = judged(y, claimed, 0)[0], judged(y, claimed, 10_000)[0]
    assert outcome(searched) == outcome(all_of)
    if isinstance(searched, NoRoom) or (isinstance(searched, Wait) and not searched.victims):
        assert not isinstance(all_of, Placed | NoNode)
        if searched.report.chosen is None:
            assert searched.report == all_of.report


@given(DRAWN, PROFILES)
def test_a_free_card_is_never_passed_over_for_a_drain(
    spec: Drawn, profiles: list[tuple[int, bool, tuple[str, ...], int, int]]
) -> None:
    y = drawn(spec, list(range(len(spec.nodes))), profiles_of(profiles))
    answer, all_of = judged(y, [])
    if any(c.rank == 2 for c in all_of):
        assert isinstance(answer, Placed)
        assert answer.rank <= 2


@given(DRAWN, PROFILES, st.randoms(use_true_random=False))
def test_whatever_is_on_the_cards_the_order_of_nodes_does_not_matter(
    spec: Drawn, profiles: list[tuple[int, bool, tuple[str, ...], int, int]], random: object
) -> None:
    order = list(range(len(spec.nodes)))
    y = drawn(spec, order, profiles_of(profiles))
    shuffled = list(order)
    random.shuffle(shuffled)  # type: ignore[attr-defined]
    other = retold(y, [f"n{n}" for n in shuffled])
    assert outcome(judged(y, [])[0]) == outcome(judged(other, [])[0])
    assert judged(y, [])[1] == judged(other, [])[1]


def retold(y: Yard, order: list[str]) -> Yard:
    """The same facts, told node by node in another order."""
    other = Yard(now=y.now, counts=y.counts, streams=y.streams, last_use=y.last_use)
    world = y.world
    for node in order:
        other.world.nodes[node] = world.nodes[node]
        other.world.nodestates[node] = world.nodestates[node]
        if node in world.plans:
            other.world.plans[node] = world.plans[node]
        for key, card in world.cards.items():
            if key[0] == node:
                other.world.cards[key] = card
        for id_, replica in world.replicas.items():
            if replica.node == node:
                other.world.replicas[id_] = replica
    other.world.heads.update(world.heads)
    other.world.models.update(world.models)
    other.world.records.update(world.records)
    other.world.activations.update(world.activations)
    return other
