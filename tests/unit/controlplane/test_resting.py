"""A model at rest is seen at a glance, and whatever deviates from that is left to the rules."""

from collections.abc import Callable
from datetime import timedelta

import pytest
from msgspec.structs import replace

from controlplane.domain import idle, resting
from controlplane.domain.index import StepIndex
from controlplane.domain.scene import Scene
from controlplane.domain.world import World
from schemas.node import NodeState
from schemas.plan import Stop
from schemas.record import Quarantine
from tests.support.worlds import SETTINGS, T0, Yard, counting_ids, model


def served() -> Yard:
    """A model that was asked for, is ready and has answered."""
    yard = Yard()
    yard.node("n0", {"gpu0": 8})
    yard.add(model("a", 1, idle_s=900))
    yard.turn()
    yard.request("a")
    yard.turn()
    yard.advance(5, by=1)
    return yard


def glance(yard: Yard) -> resting.Rest | None:
    index = StepIndex()
    index.sync(yard.world)
    scene = Scene(
        world=yard.world,
        live=yard.live(),
        now=yard.now,
        ids=counting_ids(),
        settings=SETTINGS,
        index=index,
    )
    rest = resting.at_rest(scene, "a")
    if rest is not None:
        assert rest.idle_at == idle.not_before(scene, "a")
    return rest


def test_a_model_that_serves_and_wants_nothing_rests_until_it_may_be_idle() -> None:
    yard = served()
    rest = glance(yard)
    assert rest is not None
    assert rest.idle_at is not None
    assert rest.idle_at > yard.now


def test_one_that_never_idles_rests_for_good() -> None:
    yard = served()
    entry = yard.world.models["a"]
    yard.world.models["a"] = replace(entry, scaling=replace(entry.scaling, idle_timeout_s=0.0))
    assert glance(yard) == resting.Rest(idle_at=None)


def scaled(**fields: int) -> Callable[[World], None]:
    def change(world: World) -> None:
        entry = world.models["a"]
        world.models["a"] = replace(entry, scaling=replace(entry.scaling, **fields))

    return change


def stopped(world: World) -> None:
    plan = world.plans["n0"]
    stop = Stop(decision="d", reason="idle", decided_at=T0)
    world.plans["n0"] = replace(plan, items=(replace(plan.items[0], stop=stop),))


def demanded(**fields: object) -> Callable[[World], None]:
    def change(world: World) -> None:
        key = ("a", "any")
        world.activations[key] = replace(world.activations[key], **fields)

    return change


def stands(**fields: object) -> Callable[[World], None]:
    def change(world: World) -> None:
        ((id_, replica),) = world.replicas.items()
        world.replicas[id_] = replace(replica, **fields)

    return change


def recorded(**fields: object) -> Callable[[World], None]:
    def change(world: World) -> None:
        world.records["a"] = replace(world.records["a"], **fields)

    return change


def silent(world: World) -> None:
    world.nodestates["n0"] = NodeState(node="n0", reach="unreachable", since=T0)


def edited(world: World) -> None:
    entry = world.models["a"]
    other = replace(entry.profiles[0], args=("--ctx-size", "9"))
    world.models["a"] = replace(entry, profiles=(other,))


def pinned(world: World) -> None:
    found = world.activations[("a", "any")]
    world.activations[("a", "n0~gpu0")] = replace(found, scope="n0~gpu0")


LIFTED = Quarantine(since=T0, until=T0 + timedelta(hours=1), reason="x")


@pytest.mark.parametrize(
    "change",
    [
        pytest.param(lambda world: world.models.pop("a"), id="no entry"),
        pytest.param(scaled(max=0), id="off"),
        pytest.param(scaled(min=2, max=2), id="wants two"),
        pytest.param(edited, id="another revision"),
        pytest.param(stopped, id="to be stopped"),
        pytest.param(pinned, id="asked for on a card"),
        pytest.param(silent, id="node unheard"),
        pytest.param(lambda world: world.plans.clear(), id="not planned"),
        pytest.param(lambda world: world.replicas.clear(), id="no answer of its agent"),
        pytest.param(stands(phase="starting"), id="starting"),
        pytest.param(stands(phase="draining"), id="draining"),
        pytest.param(stands(measured_memory_bytes=1 << 40), id="grew"),
        pytest.param(demanded(phase="loading"), id="demand loads"),
        pytest.param(demanded(phase="idle"), id="no demand"),
        pytest.param(demanded(answered=False), id="unanswered"),
        pytest.param(demanded(replica="r-other"), id="demand is elsewhere"),
        pytest.param(demanded(replicas=2), id="demand wants two"),
        pytest.param(demanded(incarnation="other"), id="demand of a former entry"),
        pytest.param(lambda world: world.records.pop("a"), id="unrecorded"),
        pytest.param(recorded(counted=()), id="load unrecorded"),
        pytest.param(recorded(quarantined=LIFTED), id="quarantined"),
    ],
)
def test_whatever_deviates_is_left_to_the_rules(change: Callable[[World], object]) -> None:
    yard = served()
    assert glance(yard) is not None
    change(yard.world)
    assert glance(yard) is None
