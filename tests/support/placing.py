"""Puts things on the cards of a `Yard`, and asks where a model would be placed."""

from collections.abc import Sequence
from typing import Any

from msgspec.structs import replace

from controlplane.domain.index import StepIndex
from controlplane.domain.placement import Claims, Demand, Placed, Verdict, candidates, place
from controlplane.domain.scene import ANY, Scene
from schemas.activation import ActivationIdle
from schemas.card import CardMeasured, Claim, Vm
from schemas.model import Model
from schemas.placement import Candidate
from schemas.plan import Plan, PlanChanged, PlanItem, Stop
from schemas.replica import ReplicaParked
from tests.support.worlds import GIB, T0, Yard, counting_ids, model, profile

GAME = Claim(id="c-1", name="doom", kind="game", since=T0)

VM = Vm(name="windows", since=T0)


def on(y: Yard, card: str, node: str = "n1", **fields: Any) -> Yard:
    """The card becomes so, in its agent's words."""
    state = y.world.cards[(node, card)]
    y._card(replace(state, rev=state.rev + 1, **fields), CardMeasured(used_bytes=0))
    return y


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


def two(name: str = "m", gib: float = 4, **fields: object) -> Model:
    """One entry for each of two cards, gpu0 first."""
    return model(
        name,
        profiles=[
            profile("on-gpu0", gib, card=("n1/gpu0",), **fields),
            profile("on-gpu1", gib, card=("n1/gpu1",), **fields),
        ],
    )


def verdict(y: Yard, entry: Model, scope: str = ANY, claimed: Sequence[str] = ()) -> Verdict:
    if entry.name not in y.world.models:
        y.add(entry)
    claims = Claims(frozenset(("n1", card) for card in claimed))
    demand = Demand(model=y.world.models[entry.name], wanted_at=y.now, scope=scope)
    return place(scene_of(y), demand, claims)


def all_of(y: Yard, entry: Model, scope: str = ANY) -> tuple[Candidate, ...]:
    if entry.name not in y.world.models:
        y.add(entry)
    demand = Demand(model=y.world.models[entry.name], wanted_at=y.now, scope=scope)
    return candidates(scene_of(y), demand)


def running(y: Yard, name: str, card: str, gib: float = 4, **fields: Any) -> str:
    """A model that runs on this card, was answered, and is past its residency; its replica."""
    y.add(model(name, profiles=[profile(gib=gib, card=(f"n1/{card}",), **fields)], idle_s=0))
    y.request(name)
    y.until(lambda: y.ready(name), 20)
    y.advance(12)
    return y.ready(name)[0]


def park(y: Yard, id_: str, residual_gib: float = 0.0, ram_gib: float = 4.0) -> str:
    """The replica was drained and parked: what it keeps is on its cards, its weights are in RAM."""
    replica = y.world.replicas[id_]
    plan = y.world.plans[replica.node]
    items: list[PlanItem] = []
    for item in plan.items:
        if item.replica == id_:
            stop = Stop(decision="d-idle", reason="idle", decided_at=y.now, park="may")
            items.append(replace(item, stop=stop))
        else:
            items.append(item)
    y.append(
        "plan",
        (replica.node,),
        PlanChanged(stopping=(id_,)),
        Plan(node=replica.node, items=tuple(items)),
    )
    residual = int(residual_gib * GIB)
    activation = y.world.activations[(replica.model, ANY)]
    idle = replace(activation, phase="idle", replica=None, node=None)
    y.append("activation", (replica.model, ANY), ActivationIdle(cause="idle"), idle)
    for card in replica.cards:
        state = y.world.cards[(replica.node, card)]
        leases = tuple(
            replace(lease, kind="parked", memory_bytes=residual) if lease.holder == id_ else lease
            for lease in state.leases
        )
        on(y, card, replica.node, leases=leases)
    y._tell(
        replace(
            replica,
            phase="parked",
            endpoint=None,
            park_way="sleep",
            parked_at=y.now,
            residual_bytes=residual,
            ram_bytes=int(ram_gib * GIB),
        ),
        ReplicaParked(way="sleep"),
    )
    return id_


def chosen(found: Verdict) -> tuple[str, int]:
    assert isinstance(found, Placed), found
    return found.card, found.rank


def parked_on_gpu1(y: Yard, residual_gib: float = 0.0) -> str:
    """The model ran on gpu1 while gpu0 was taken, and was parked."""
    on(y, "gpu0", claims=(GAME,))
    y.add(two())
    y.request("m")
    y.until(lambda: y.ready("m"), 20)
    y.advance(12)
    [id_] = y.ready("m")
    park(y, id_, residual_gib)
    on(y, "gpu0", claims=())
    return id_
