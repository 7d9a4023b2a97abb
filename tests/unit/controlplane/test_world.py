"""What the log said last, as the leader holds it."""

from controlplane.domain.world import World
from events.log import Recorded
from events.subjects import event_subject
from schemas.model import Model, ModelAdded
from tests.support.worlds import T0, model


def added(entry: Model, prefix: str) -> Recorded:
    return Recorded(
        seq=7,
        subject=event_subject("model", entry.name, prefix=prefix),
        noun="model",
        key=(entry.name,),
        id="e-7",
        type="model.added",
        time=T0,
        stored_at=T0,
        rev=3,
        epoch=1,
        actor="test",
        reason="",
        event=ModelAdded(by="test"),
        state=entry,
    )


def test_the_heads_of_a_yard_with_another_prefix_are_found() -> None:
    world = World(prefix="lab")
    world.apply(added(model("a"), "lab"))
    assert (world.head("model", "a").seq, world.head("model", "a").rev) == (7, 3)
    assert world.subject("model", "a.b") == "lab.evt.model.a%2Eb"
