"""What a gateway knows after a story of events."""

from gateway.domain.table import NO_ACTIVATION, NodeTouched, ReplicaChanged, Table
from schemas.model import Scaling
from schemas.plan import Plan, PlanChanged
from tests.support.gateway_world import Story, changes, folded


def ids(table: Table, model: str = "m") -> list[str]:
    return [r.id for r in table.routable(model)]


def test_a_name_and_its_aliases_find_one_model() -> None:
    story = Story()
    table = folded(story.model("a", aliases=("x", "y")), story.model("b"))
    assert [getattr(table.model(n), "name", None) for n in ("a", "x", "y", "b", "z")] == [
        "a",
        "a",
        "a",
        "b",
        None,
    ]


def test_an_alias_that_moves_to_another_model_stays_there() -> None:
    story = Story()
    table = folded(story.model("a", aliases=("x",)), story.model("b", aliases=("x",)))
    # The batch that moved it wrote the new owner first, the old one after.
    table.apply(story.model("a"))
    model = table.model("x")
    assert model is not None
    assert model.name == "b"


def test_a_removed_model_takes_its_aliases_with_it() -> None:
    story = Story()
    table = folded(story.model("a", aliases=("x",)), story.model_gone("a"))
    assert table.model("a") is None
    assert table.model("x") is None


def test_only_ready_replicas_are_routable_and_in_order_of_id() -> None:
    story = Story()
    table = folded(story.model())
    for id, phase in (("r-2", "ready"), ("r-1", "ready"), ("r-3", "starting"), ("r-4", "draining")):
        table.apply(story.replica(id, phase))
    assert ids(table) == ["r-1", "r-2"]
    table.apply(story.replica("r-1", "draining"))
    assert ids(table) == ["r-2"]
    # An idle stop was taken back.
    table.apply(story.replica("r-1", "ready"))
    assert ids(table) == ["r-1", "r-2"]


def test_a_replica_that_is_over_leaves_no_trace() -> None:
    story = Story()
    table = folded(story.model(), story.replica("r-1"), story.replica("r-1", "stopped"))
    assert table.replicas == {}
    assert list(table.replicas_of("m")) == []
    assert ids(table) == []


def test_a_replica_of_an_earlier_incarnation_is_not_routed_to() -> None:
    story = Story()
    table = folded(
        story.model(), story.replica(), story.model_gone(), story.model(incarnation="inc-second")
    )
    assert ids(table) == []


def test_replicas_of_a_lost_or_removed_node_are_masked_an_unreachable_one_is_only_marked() -> None:
    story = Story()
    table = folded(story.model(), story.replica())
    assert changes(table, story.node(reach="unreachable")) == [NodeTouched(seq=3, node="n1")]
    assert ids(table) == ["r-1"]
    assert table.unreachable(table.replicas["r-1"])
    table.apply(story.node(reach="lost"))
    assert ids(table) == []
    table.apply(story.node())
    assert ids(table) == ["r-1"]
    table.apply(story.node(admin="removed"))
    assert ids(table) == []


def test_a_change_says_what_was_before_and_after() -> None:
    story = Story()
    table = folded(story.model(), story.replica("r-1", "starting"))
    (change,) = changes(table, story.replica("r-1", "ready"))
    assert isinstance(change, ReplicaChanged)
    assert change.before is not None
    assert change.after is not None
    assert (change.before.phase, change.after.phase) == ("starting", "ready")


def test_an_event_seen_already_changes_nothing() -> None:
    story = Story()
    ready = story.replica()
    table = folded(story.model(), ready, story.replica("r-1", "draining"))
    assert changes(table, ready) == []
    assert ids(table) == []


def test_an_activation_keeps_its_revision_over_its_end() -> None:
    story = Story()
    table = folded(story.model(), story.activation("loading"), story.activation_gone())
    entry = table.activation("m")
    assert entry.activation is None
    assert entry.rev == 2
    assert table.activation("other") == NO_ACTIVATION


def test_log_22_a_broken_last_event_keeps_the_state_before_and_is_marked() -> None:
    story = Story()
    table = folded(story.model(), story.replica())
    assert changes(table, story.broken("replica", "n1", "r-1")) == []
    assert ids(table) == ["r-1"]
    assert table.broken == {"yard.evt.replica.n1.r-1": "not JSON"}
    # The next readable event heals the subject.
    table.apply(story.replica("r-1", "draining"))
    assert table.broken == {}


def test_log_22_a_first_pass_takes_the_state_before_a_broken_last_event() -> None:
    story = Story()
    before = story.model()
    table = folded(story.broken("model", "m", previous=before))
    assert table.model("m") is not None
    assert table.position == 2
    # A newer valid state we already had is not undone by an older one.
    table.apply(story.model(scaling=Scaling(max=3)))
    table.apply(story.broken("model", "m", previous=before))
    model = table.model("m")
    assert model is not None
    assert model.scaling.max == 3


def test_an_event_of_a_newer_program_is_counted_and_folds_nothing() -> None:
    story = Story()
    table = folded(story.model(), story.replica())
    newer = story.event(
        "replica",
        ("n1", "r-1"),
        PlanChanged(),
        None,
        problem="version 9 of replica",
    )
    assert changes(table, newer) == []
    assert ids(table) == ["r-1"]
    assert table.unknown_events == 1
    assert table.position == newer.seq


def test_nouns_it_has_no_use_for_only_move_the_position() -> None:
    story = Story()
    plan = story.event("plan", ("n1",), PlanChanged(), Plan(node="n1"))
    table = folded(plan)
    assert table.position == 1
    assert table.unknown_events == 0
    stranger = story.event("hologram", ("n1",), PlanChanged(), Plan(node="n1"))
    table.apply(stranger)
    assert table.unknown_events == 1


def test_created_is_when_the_name_was_added_not_when_it_was_changed() -> None:
    story = Story()
    table = folded(story.model())
    first = table.models["m"].created
    table.apply(story.model(scaling=Scaling(max=2)))
    assert table.models["m"].created == first
    table.apply(story.model(incarnation="another"))
    assert table.models["m"].created > first


def test_when_a_record_was_cleared_is_remembered() -> None:
    story = Story()
    table = folded(story.model(), story.record())
    assert table.records["m"].cleared_seq == 0
    table.apply(story.cleared())
    table.apply(story.record())
    assert table.records["m"].cleared_seq == 3


def test_an_alias_two_models_claimed_goes_back_to_the_one_that_is_left() -> None:
    story = Story()
    table = folded(
        story.model("a", aliases=("x",)), story.model("b", aliases=("x",)), story.model_gone("b")
    )
    model = table.model("x")
    assert model is not None
    assert model.name == "a"
