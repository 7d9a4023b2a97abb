"""A placement fits, depends on nothing but the facts, and only gets better with more room."""

from datetime import timedelta

from hypothesis import given
from hypothesis import strategies as st

from controlplane.domain.index import StepIndex
from controlplane.domain.placement import Demand, NoRoom, Placed, Verdict, Wait, place
from controlplane.domain.scene import Scene
from schemas.model import Model
from schemas.node import NodeState, NodeStateJoined
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
        agents={a.node: a for a in live.agents},
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
