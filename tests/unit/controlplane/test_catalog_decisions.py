"""What a command does to the catalog, by value: given models, when a command, then changes or a refusal."""

import itertools
from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any

from controlplane.domain import catalog, consequences
from controlplane.domain.decision import Change, Ids, Rejected
from controlplane.domain.revision import profile_revision
from schemas import codes
from schemas.activation import ActivationDeleted
from schemas.commands import CatalogApply, ModelAdd, ModelRemove, ModelScale
from schemas.model import Model, ModelAdded, ModelChanged, ModelDeleted, Scaling
from schemas.record import RecordDeleted
from schemas.replica import Replica

NOW = datetime(2026, 1, 1, tzinfo=UTC)


def ids() -> Ids:
    count = itertools.count(1)
    return Ids(
        replica=lambda: f"r-{next(count)}",
        decision=lambda: f"d-{next(count)}",
        incarnation=lambda: f"i-{next(count)}",
        job=lambda: f"j-{next(count)}",
    )


IDS = ids()


def entry(name: str, **over: Any) -> dict[str, Any]:
    return {
        "name": name,
        "scaling": {"min": 0, "max": 1},
        "profiles": [{"name": "any", "engine": "command", "command": "run", "memory": "1GiB"}],
    } | over


def decide(models: Mapping[str, Model], body: catalog.CatalogCommand, **more: Any) -> Any:
    return catalog.decide(models, body, actor="admin", ids=IDS, **more)


def after(models: Mapping[str, Model], body: catalog.CatalogCommand) -> dict[str, Model]:
    changes = decide(models, body)
    assert not isinstance(changes, Rejected), changes
    for change in changes:
        models = catalog.evolve(models, change)
    return dict(models)


def yard(*entries: dict[str, Any]) -> dict[str, Model]:
    return after(catalog.initial, CatalogApply(entries=list(entries)))


def refused(models: Mapping[str, Model], body: catalog.CatalogCommand) -> Rejected:
    found = decide(models, body)
    assert isinstance(found, Rejected), found
    return found


def test_an_added_entry_is_one_event_with_the_whole_state() -> None:
    (change,) = decide({}, ModelAdd(entry=entry("a", aliases=["b"])))
    assert change.noun == "model"
    assert change.key == ("a",)
    assert change.event == ModelAdded(by="admin")
    assert change.reason == "added by admin"
    assert change.state.aliases == ("b",)
    assert change.state.incarnation.startswith("i-")
    assert change.state.order == 0


def test_add_refuses_an_existing_name() -> None:
    rejected = refused(yard(entry("a")), ModelAdd(entry=entry("a")))
    assert rejected.code == codes.EXISTS
    assert "there is a model 'a' already" in rejected.sentence
    assert [p.path for p in rejected.problems] == ["[0].name"]


def test_add_refuses_a_wrong_entry_with_every_problem() -> None:
    rejected = refused({}, ModelAdd(entry={"name": "a", "memory": 1}))
    assert rejected.code == codes.INVALID
    assert [p.path for p in rejected.problems] == ["[0].profiles", "[0].memory"]
    assert rejected.sentence.startswith("[0].profiles: expected a list")
    assert rejected.sentence.endswith("(and 1 more)")


def test_a_source_that_needs_the_mirror_has_its_own_code() -> None:
    rejected = refused({}, ModelAdd(entry=entry("a", source="https://h/a.gguf")))
    assert rejected.code == codes.NEEDS_MIRROR


def test_one_namespace_holds_names_and_aliases() -> None:
    models = yard(entry("a", aliases=["x"]))
    taken = {
        "name is an alias": ModelAdd(entry=entry("x")),
        "alias is a name": ModelAdd(entry=entry("b", aliases=["a"])),
        "alias is an alias": ModelAdd(entry=entry("b", aliases=["y", "x"])),
    }
    found = {what: refused(models, body) for what, body in taken.items()}
    assert {r.code for r in found.values()} == {codes.EXISTS}
    assert [r.problems[0].path for r in found.values()] == [
        "[0].name",
        "[0].aliases[0]",
        "[0].aliases[1]",
    ]
    assert found["alias is an alias"].sentence == "[0].aliases[1]: 'x' is an alias of 'a' already"


def test_names_may_move_between_the_entries_of_one_file() -> None:
    models = yard(entry("a", aliases=["x"]), entry("b"))
    moved = after(models, CatalogApply(entries=[entry("a"), entry("b", aliases=["x"])]))
    assert moved["a"].aliases == ()
    assert moved["b"].aliases == ("x",)


def test_a_name_given_twice_in_one_file_is_refused_with_both_places() -> None:
    rejected = refused({}, CatalogApply(entries=[entry("a"), entry("b", aliases=["a"])]))
    assert [p.path for p in rejected.problems] == ["[1].aliases[0]"]
    assert "'a' is given at [0].name already" in rejected.sentence


def test_a_pruned_name_is_free_for_the_same_file() -> None:
    models = yard(entry("a", aliases=["x"]))
    body = CatalogApply(entries=[entry("x")], prune=True)
    assert set(after(models, body)) == {"x"}
    assert refused(models, CatalogApply(entries=[entry("x")])).code == codes.EXISTS


def test_apply_changes_what_it_names_and_leaves_others_alone() -> None:
    models = yard(entry("a"), entry("b"))
    changed = after(models, CatalogApply(entries=[entry("b", description="new"), entry("c")]))
    assert changed["a"] == models["a"]
    assert changed["b"].description == "new"
    assert changed["b"].incarnation == models["b"].incarnation
    assert [changed[name].order for name in "abc"] == [0, 1, 2]


def test_a_change_names_the_fields_that_changed() -> None:
    models = yard(entry("a"))
    (change,) = decide(models, CatalogApply(entries=[entry("a", description="d", aliases=["z"])]))
    assert change.event == ModelChanged(by="admin", fields=("aliases", "description"))
    assert change.reason == "aliases, description changed by admin"


def test_an_entry_that_is_so_already_makes_no_event() -> None:
    entries = [entry("a"), entry("b")]
    assert decide(yard(*entries), CatalogApply(entries=entries, prune=True)) == ()


def test_req_a01_a_catalog_of_any_size_takes_no_memory_by_itself() -> None:
    many = [entry(f"m{n}") for n in range(500)]
    changes = decide({}, CatalogApply(entries=many))
    assert len(changes) == 500
    assert {change.noun for change in changes} == {"model"}


def test_req_x7_models_keep_the_order_in_which_they_were_configured() -> None:
    models = yard(entry("z"), entry("a"))
    models = after(models, CatalogApply(entries=[entry("a", description="x"), entry("m")]))
    assert sorted(models, key=lambda name: models[name].order) == ["z", "a", "m"]


def test_apply_is_all_or_nothing() -> None:
    rejected = refused({}, CatalogApply(entries=[entry("a"), entry("b", extra=1)]))
    assert [p.path for p in rejected.problems] == ["[1].extra"]


def test_prune_removes_what_the_file_does_not_name() -> None:
    models = yard(entry("b"), entry("a"), entry("c"))
    changes = decide(models, CatalogApply(entries=[entry("c")], prune=True))
    assert [(c.key, type(c.event)) for c in changes] == [
        (("a",), ModelDeleted),
        (("b",), ModelDeleted),
    ]


def test_remove_ends_model_activations_and_record_in_one_batch() -> None:
    changes = decide(
        yard(entry("a")),
        ModelRemove(model="a"),
        activations=[("b", "any"), ("a", "n~cpu"), ("a", "any")],
        records={"a", "b"},
    )
    assert [(c.noun, c.key, type(c.event), c.state) for c in changes] == [
        ("model", ("a",), ModelDeleted, None),
        ("activation", ("a", "any"), ActivationDeleted, None),
        ("activation", ("a", "n~cpu"), ActivationDeleted, None),
        ("record", ("a",), RecordDeleted, None),
    ]
    assert {(c.reason, c.ttl_s) for c in changes} == {("removed by admin", 604_800)}


def test_remove_of_an_unknown_name_says_what_was_meant() -> None:
    models = yard(entry("qwen", aliases=["q"]))
    assert refused(models, ModelRemove(model="qwem")).sentence == (
        "there is no model 'qwem'; did you mean 'qwen'?"
    )
    assert refused(models, ModelRemove(model="q")).sentence == (
        "'q' is an alias; the model is called 'qwen'"
    )
    assert refused(models, ModelRemove(model="zzz")).code == codes.NOT_FOUND


def test_a_name_added_again_is_a_new_incarnation() -> None:
    models = yard(entry("a"))
    again = after(after(models, ModelRemove(model="a")), ModelAdd(entry=entry("a")))
    assert again["a"].incarnation != models["a"].incarnation


def test_scale_changes_the_limits_and_keeps_the_rest() -> None:
    models = yard(entry("a", scaling={"max": 1, "idle_timeout": "5s"}))
    scaled = after(models, ModelScale(model="a", min=1, max=2))
    assert scaled["a"].scaling == Scaling(min=1, max=2, idle_timeout_s=5.0)
    assert decide(scaled, ModelScale(model="a", min=1, max=2)) == ()


def test_scale_refuses_what_an_entry_may_not_say() -> None:
    models = yard(entry("a"))
    assert refused(models, ModelScale(model="a", min=2, max=1)).code == codes.INVALID
    assert refused(models, ModelScale(model="a", min=-1, max=1)).code == codes.INVALID
    assert refused(models, ModelScale(model="b", min=0, max=1)).code == codes.NOT_FOUND


# Revisions and consequences -------------------------------------------------------------------------


def only(models: Mapping[str, Model]) -> Model:
    (model,) = models.values()
    return model


def revision(**over: Any) -> str:
    profile = entry("a")["profiles"][0] | over.pop("profile", {})
    model = only(yard(entry("a", profiles=[profile], **over)))
    return profile_revision(model, model.profiles[0])


def test_scn_a15_an_entry_from_before_there_was_parking_keeps_its_revision() -> None:
    assert revision() == "ee41504fc9b3"
    assert revision(profile={"parking": "checkpoint"}) != revision()


def test_scn_a15_a_revision_changes_with_what_the_engine_depends_on() -> None:
    same = revision()
    assert len(same) == 12
    for over in (
        {"profile": {"weight": 7}},
        {"profile": {"priority": 7}},
        {"profile": {"start_timeout": "1h"}},
        {"aliases": ["z"]},
        {"description": "d"},
        {"scaling": {"min": 2}},
        {"max_output": 5},
    ):
        assert revision(**over) == same, over
    others = [
        revision(**over)
        for over in (
            {"profile": {"command": "run --fast"}},
            {"profile": {"env": {"A": "1"}}},
            {"profile": {"env": {"A": {"secret": "1"}}}},
            {"profile": {"memory": "2GiB"}},
            {"profile": {"card": "gpu"}},
            {"profile": {"key_env": "K"}},
            {"profile": {"name": "other"}},
            {"source": "/b"},
        )
    ]
    assert len({same, *others}) == len(others) + 1


def test_the_order_of_the_environment_does_not_matter() -> None:
    assert revision(profile={"env": {"A": "1", "B": "2"}}) == revision(
        profile={"env": {"B": "2", "A": "1"}}
    )


def replica(number: int, model: Model, **over: Any) -> Replica:
    return Replica(
        **{
            "id": f"r-{number}",
            "node": "n",
            "model": model.name,
            "incarnation": model.incarnation,
            "profile": model.profiles[0].name,
            "revision": profile_revision(model, model.profiles[0]),
            "engine": "command",
            "phase": "ready",
            "since": NOW,
            "epoch": 1,
        }
        | over
    )


def lines(
    models: Mapping[str, Model], body: catalog.CatalogCommand, *replicas: Replica
) -> list[str]:
    changes = decide(models, body)
    assert not isinstance(changes, Rejected)
    return list(consequences.describe(models, changes, replicas))


def test_a_dry_run_tells_what_would_start_drain_and_stop() -> None:
    models = yard(entry("a"), entry("b"), entry("c", scaling={"min": 2}))
    a, b, c = models.values()
    running = [replica(1, a), replica(2, b), replica(3, c), replica(4, c, phase="stopped")]
    other = [{"name": "any", "engine": "command", "command": "other", "memory": "1GiB"}]
    body = CatalogApply(
        entries=[
            entry("a", profiles=other),
            entry("c", scaling={"min": 0, "max": 0}),
            entry("d", scaling={"min": 1, "max": 3, "idle_timeout": "1h"}),
        ],
        prune=True,
        dry_run=True,
    )
    assert lines(models, body, *running) == [
        "a: changed (profiles)",
        "  r-1 on n drains and stops: its profile changed",
        "c: changed (scaling)",
        "  1 of 1 replicas drain and stop: max is 0",
        "  now off",
        "d: added, 1 kept running, up to 3, given back after 1 h without use",
        "  1 to start",
        "b: removed",
        "  r-2 on n drains and stops",
    ]


def test_nothing_to_change_says_so() -> None:
    entries = [entry("a")]
    assert lines(yard(*entries), CatalogApply(entries=entries)) == ["nothing changes"]


def test_modes_in_words() -> None:
    assert consequences.mode(Scaling(min=0, max=0)) == "off"
    assert consequences.mode(Scaling(min=0, max=2, idle_timeout_s=0)) == (
        "on demand, up to 2, never given back"
    )
    assert consequences.mode(Scaling(min=0, max=1, idle_timeout_s=900)) == (
        "on demand, up to 1, given back after 15 min without use"
    )
    assert consequences.mode(Scaling(min=3, max=3)) == "3 kept running"


def test_changes_of_other_nouns_leave_the_catalog_alone() -> None:
    models = yard(entry("a"))
    other = Change(noun="record", key=("a",), event=RecordDeleted(), state=None)
    assert catalog.evolve(models, other) == models
