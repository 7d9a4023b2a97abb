"""A world is its log: read again, in one go or from each subject's last event, it decides the same."""

from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

from controlplane.domain import step
from controlplane.domain.decision import Step
from controlplane.domain.world import World
from events.log import Recorded
from schemas.commands import ModelLoad, ModelScale, ModelUnload
from tests.support.worlds import Yard, counting_ids, model

DEEDS = st.lists(
    st.tuples(
        st.sampled_from(["request", "wait", "load", "unload", "scale", "crash", "fail"]),
        st.sampled_from(["a", "b"]),
        st.integers(1, 30),
    ),
    max_size=14,
)


def story(deeds: list[tuple[str, str, int]]) -> Yard:
    y = Yard().node("n1", {"gpu0": 8, "gpu1": 4})
    y.add(model("a", 6, idle_s=20), model("b", 3, idle_s=20, maximum=2))
    y.turn()
    for deed, name, number in deeds:
        match deed:
            case "request":
                y.request(name)
            case "wait":
                y.advance(number, by=1)
            case "load":
                y.do(ModelLoad(model=name))
            case "unload":
                y.do(ModelUnload(model=name))
            case "scale":
                y.do(ModelScale(model=name, min=number % 2, max=1))
            case "crash":
                for id_ in y.ready(name)[:1]:
                    y.fail(id_)
            case _:
                y.engine(name).fails = 1
        if number % 3:
            y.act()
    return y


def read(items: list[Recorded]) -> World:
    world = World()
    for item in items:
        world.apply(item)
    return world


def decide(y: Yard, world: World) -> Step:
    return step.next_decision(world, y.live(), (), y.now, counting_ids(), y.settings)


@hypothesis_settings(max_examples=30)
@given(DEEDS, st.integers(0, 100))
def test_replay_gives_the_same_world_and_the_same_next_decision(
    deeds: list[tuple[str, str, int]], part: int
) -> None:
    y = story(deeds)
    whole = read(y.log)
    cut = len(y.log) * part // 100
    in_two = read(y.log[:cut])
    for item in y.log[cut:]:
        in_two.apply(item)
    last = {item.subject: item for item in y.log}
    per_subject = read(sorted(last.values(), key=lambda item: item.seq))
    twice = read([*y.log, *y.log])
    expected = decide(y, y.world)
    for world in (whole, in_two, per_subject, twice):
        assert world.heads == y.world.heads
        assert world.activations == y.world.activations
        assert world.plans == y.world.plans
        assert world.records == y.world.records
        assert decide(y, world) == expected
