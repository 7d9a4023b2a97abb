"""The order of victims, kept from beacon to beacon, is the one that would be made afresh."""

from datetime import timedelta

from hypothesis import given
from hypothesis import strategies as st

from controlplane.domain.decision import AgentLive, GatewayLive, Live, ReplicaLive
from controlplane.domain.index import StepIndex
from controlplane.domain.rooms import CardKey
from controlplane.domain.scene import Scene
from controlplane.domain.searching import Drains
from schemas.beacons import EngineCounters
from schemas.card import CardMeasured
from tests.support.worlds import Yard, counting_ids, model

MODELS = 5

HEARD = st.fixed_dictionaries(
    {
        "uses": st.lists(
            st.dictionaries(st.integers(0, MODELS - 1), st.integers(-40, 40)),
            min_size=1,
            max_size=2,
        ),
        "busy": st.sets(st.integers(0, MODELS - 1)),
        "counted": st.sets(st.integers(0, MODELS - 1)),
        "ages": st.booleans(),
        "seconds": st.integers(0, 2),
        "changed": st.sets(st.integers(0, MODELS - 1)),
        "asked": st.integers(0, MODELS),
    }
)


def yard() -> Yard:
    """Two models share the first card, the others have one each."""
    y = Yard()
    y.node("n0", {"gpu0": 20, "gpu1": 10})
    y.node("n1", {"gpu0": 10, "gpu1": 10})
    y.settle()
    for n in range(MODELS):
        y.add(model(f"m{n}", 9, idle_s=0))
        y.request(f"m{n}", stream_s=0.1)
        y.advance(5, by=1)
        y.waiting.clear()
    assert sum(r.phase == "ready" for r in y.world.replicas.values()) == MODELS
    return y


def live_of(y: Yard, heard: dict) -> Live:
    ids = {r.model: r for r in y.world.replicas.values()}
    base_s = y.now.timestamp()
    gateways = []
    for n, uses in enumerate(heard["uses"]):
        at_s = {f"m{m}": base_s + float(second) for m, second in uses.items()}
        busy = {ids[f"m{m}"].id: 1 for m in heard["busy"]} if n == 0 else {}
        gateways.append(
            GatewayLive(
                gateway=f"g{n}",
                incarnation="1",
                age_s=0.0,
                position=1,
                inflight=busy,
                last_use_age_s={m: base_s - s for m, s in at_s.items()} if heard["ages"] else {},
                last_use_at_s=None if heard["ages"] else at_s,
            )
        )
    agents = []
    for node in sorted(y.world.nodes):
        told = {
            ids[f"m{m}"].id: ReplicaLive(counters=EngineCounters(inflight=1))
            for m in heard["counted"]
            if ids[f"m{m}"].node == node
        }
        agents.append(
            AgentLive(node=node, epoch=1, age_s=0.0, heard=9, heard_for_s=90.0, replicas=told)
        )
    return Live(leading_for_s=900.0, gateways=tuple(gateways), agents=tuple(agents))


def scene_of(y: Yard, live: Live, index: StepIndex) -> Scene:
    index.sync(y.world)
    return Scene(
        world=y.world,
        live=live,
        now=y.now,
        ids=counting_ids(),
        settings=y.settings,
        index=index,
    )


def told(drains: Drains, scene: Scene, count: int) -> list[CardKey]:
    found: list[CardKey] = []
    for _, room in drains.in_order(scene):
        found.append(room.where)
        if len(found) >= count:
            break
    return found


@given(st.lists(HEARD, min_size=2, max_size=6))
def test_a_kept_order_of_victims_is_the_one_made_afresh(story: list[dict]) -> None:
    y = yard()
    index = StepIndex()
    kept: Drains | None = None
    for heard in story:
        y.now += timedelta(seconds=heard["seconds"])
        live = live_of(y, heard)
        cards = sorted(y.world.cards)
        for n in heard["changed"]:
            if n < len(cards):
                card = y.world.cards[cards[n]]
                y._card(card, CardMeasured(used_bytes=0))
        scene = scene_of(y, live, index)
        kept = kept if kept is not None else Drains(scene)
        count = heard["asked"]
        assert told(kept, scene, count) == told(Drains(scene), scene, count)
        # Asked again, as for a second profile, it says the same from the start.
        assert told(kept, scene, MODELS) == told(Drains(scene), scene, MODELS)
