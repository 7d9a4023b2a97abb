"""Properties of catalog decisions, each a sentence, over random entries and commands."""

import itertools
from typing import Any

import msgspec
from hypothesis import given
from hypothesis import strategies as st

from controlplane.domain import catalog, entries
from controlplane.domain.decision import Ids, Rejected
from controlplane.domain.entries import ParsedEntry
from schemas.commands import CatalogApply, ModelAdd, ModelRemove, ModelScale, Problem
from schemas.model import Model

NAMES = st.sampled_from(["a", "b", "c", "d"])
SCALING = st.one_of(
    st.none(),
    st.fixed_dictionaries({"min": st.integers(0, 2), "max": st.integers(0, 2)}),
)


@st.composite
def raw_entries(draw: st.DrawFn) -> dict[str, Any]:
    entry: dict[str, Any] = {
        "name": draw(NAMES),
        "aliases": draw(st.lists(NAMES, max_size=2)),
        "description": draw(st.sampled_from(["", "one", "two"])),
        "profiles": [{"name": "p", "engine": "command", "command": "x", "memory": "1GiB"}],
    }
    scaling = draw(SCALING)
    if scaling is not None:
        entry["scaling"] = scaling
    return entry


COMMANDS = st.one_of(
    raw_entries().map(lambda entry: ModelAdd(entry=entry)),
    st.builds(CatalogApply, entries=st.lists(raw_entries(), max_size=3), prune=st.booleans()),
    st.builds(ModelRemove, model=NAMES),
    st.builds(ModelScale, model=NAMES, min=st.integers(-1, 2), max=st.integers(-1, 2)),
)

ANYTHING = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=5),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(
            st.sampled_from(
                ["name", "profiles", "scaling", "min", "max", "engine", "args", "env", "memory"]
            ),
            inner,
            max_size=4,
        )
    ),
    max_leaves=12,
)


def counting() -> Ids:
    count = itertools.count(1)
    return Ids(
        replica=lambda: f"r-{next(count)}",
        decision=lambda: f"d-{next(count)}",
        incarnation=lambda: f"i-{next(count)}",
        job=lambda: f"j-{next(count)}",
    )


def run(models: dict[str, Model], command: catalog.CatalogCommand, ids: Ids) -> dict[str, Model]:
    answer = catalog.decide(models, command, actor="admin", ids=ids)
    if isinstance(answer, Rejected):
        return models
    folded = models
    for change in answer:
        folded = dict(catalog.evolve(folded, change))
    return folded


@given(st.lists(COMMANDS, max_size=8))
def test_no_name_ever_stands_for_two_models(commands: list[catalog.CatalogCommand]) -> None:
    ids, models = counting(), dict[str, Model]()
    for command in commands:
        models = run(models, command, ids)
        names = [name for model in models.values() for name in (model.name, *model.aliases)]
        assert len(names) == len(set(names))


@given(st.lists(COMMANDS, max_size=8))
def test_no_model_is_ever_kept_above_its_max(commands: list[catalog.CatalogCommand]) -> None:
    ids, models = counting(), dict[str, Model]()
    for command in commands:
        models = run(models, command, ids)
        assert all(0 <= m.scaling.min <= m.scaling.max for m in models.values())


@given(st.lists(COMMANDS, max_size=6), st.lists(raw_entries(), max_size=3), st.booleans())
def test_applying_a_file_twice_changes_nothing_the_second_time(
    commands: list[catalog.CatalogCommand], file: list[dict[str, Any]], prune: bool
) -> None:
    ids, models = counting(), dict[str, Model]()
    for command in commands:
        models = run(models, command, ids)
    body = CatalogApply(entries=file, prune=prune)
    first = catalog.decide(models, body, actor="admin", ids=ids)
    if isinstance(first, Rejected):
        return
    models = run(models, body, ids)
    assert catalog.decide(models, body, actor="admin", ids=ids) == ()
    assert not prune or set(models) == {entry["name"] for entry in file}


@given(st.lists(COMMANDS, max_size=10))
def test_a_models_incarnation_lives_as_long_as_its_name(
    commands: list[catalog.CatalogCommand],
) -> None:
    ids, models = counting(), dict[str, Model]()
    seen: set[str] = set()
    for command in commands:
        before, models = models, run(models, command, ids)
        for name, model in models.items():
            if name in before:
                assert model.incarnation == before[name].incarnation
                assert model.order == before[name].order
            else:
                assert model.incarnation not in seen
            seen.add(model.incarnation)


@given(ANYTHING)
def test_whatever_is_given_is_an_entry_or_problems_with_paths(raw: object) -> None:
    found = entries.parse(raw, "[0]")
    if isinstance(found, ParsedEntry):
        return
    assert found
    for problem in found:
        assert isinstance(problem, Problem)
        assert problem.path.startswith("[0]")
        assert problem.sentence


@given(raw_entries())
def test_a_model_survives_the_way_through_the_log(raw: dict[str, Any]) -> None:
    entry = entries.parse(raw, "[0]")
    if isinstance(entry, ParsedEntry):
        model = entry.as_model(incarnation="i", order=0)
        assert msgspec.json.decode(msgspec.json.encode(model), type=Model) == model
