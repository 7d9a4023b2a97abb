"""Properties of a catalog with adapters, each a sentence, over random wishes, readings and failures."""

from collections import Counter
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from controlplane.domain import preflight
from controlplane.domain.world import World
from schemas import codes, vllm_flags
from schemas.commands import (
    AdapterAdd,
    AdapterPin,
    AdapterRemove,
    CatalogApply,
    CommandBody,
    ModelAdd,
    ModelRemove,
)
from tests.support.adapter_yard import AdapterYard, Found, adapter_yard, base_model, config

NAMES = st.sampled_from(["a", "b", "c", "a:b", "b:c", "a:b:c", "x"])
BASES = st.sampled_from(["a", "b", "a:b"])
RANKS = st.sampled_from([8, 16, 40, 64])
ARGS = st.sampled_from([(), ("--max-lora-rank", "32"), ("--lora-target-modules", "q_proj")])


@st.composite
def model_entries(draw: st.DrawFn) -> dict[str, Any]:
    entry: dict[str, Any] = {
        "name": draw(BASES),
        "aliases": draw(st.lists(NAMES, max_size=2)),
        "source": "/models/llama",
        "profiles": [{"name": "gpu", "engine": "vllm", "memory": "1GiB", "args": list(draw(ARGS))}],
    }
    limit = draw(st.sampled_from([None, 1, 2, 4]))
    if limit is not None:
        entry["max_loaded_adapters"] = limit
    return entry


@st.composite
def findings(draw: st.DrawFn) -> Found:
    if draw(st.integers(0, 5)) == 0:
        return codes.NOT_AN_ADAPTER, "there is nothing"
    return config(
        r=draw(RANKS),
        use_dora=draw(st.integers(0, 7)) == 0,
        target_modules=draw(st.sampled_from([("q_proj",), ("q_proj", "v_proj")])),
    )


SOURCES = st.sampled_from(["x/one", "x/two", "/data/three"])
WISHES = st.one_of(
    st.builds(
        AdapterAdd,
        name=NAMES,
        base=BASES,
        source=SOURCES,
        pinned=st.booleans(),
        aliases=st.lists(NAMES, max_size=1),
    ),
    st.builds(AdapterRemove, adapter=NAMES),
    st.builds(AdapterPin, adapter=NAMES, pinned=st.booleans()),
    model_entries().map(lambda entry: ModelAdd(entry=entry)),
    st.builds(CatalogApply, entries=st.lists(model_entries(), max_size=2), prune=st.booleans()),
    st.builds(ModelRemove, model=BASES),
)
STEPS = st.lists(
    st.tuples(WISHES, st.sampled_from(["read", "fail", "wait"]), SOURCES, findings()), max_size=10
)


def play(steps: list[tuple[CommandBody, str, str, Found]]) -> AdapterYard:
    """Everything asked for, one after another, with the invariants looked at after each."""
    yard = adapter_yard(base_model("a"), gib=0)
    for wish, then, source, found in steps:
        yard.sources[source] = found
        yard.do(wish)
        if then == "fail":
            yard.fails["Fetch"] = (codes.CHECKSUM_MISMATCH, "other bytes")
        if then != "wait":
            yard.run_workers()
        yard.fails.clear()
        holds(yard.world)
    return yard


def holds(world: World) -> None:
    names = Counter(
        name
        for one in (*world.models.values(), *world.adapters.values())
        for name in (one.name, *one.aliases)
    )
    assert not names or max(names.values()) == 1, f"a name stands for two things: {names}"
    pairs: dict[str, str] = {}
    for adapter in world.adapters.values():
        base = world.models.get(adapter.base)
        assert base is not None, f"{adapter.name} has no base"
        assert base.incarnation == adapter.base_incarnation
        for first in (base.name, *base.aliases):
            for second in (adapter.name, *adapter.aliases):
                pair = f"{first}:{second}"
                assert pairs.setdefault(pair, adapter.name) == adapter.name, f"{pair} means two"
    for pair, adapter_name in pairs.items():
        own = world.adapters[adapter_name]
        assert pair not in names or pair in (own.name, *own.aliases), f"{pair} is a name too"
    for adapter in world.adapters.values():
        base = world.models[adapter.base]
        if adapter.phase in ("fetching", "ready"):
            assert preflight.misfit(adapter, base) is None, f"{adapter.name} does not fit"
            for profile in base.profiles:
                started = vllm_flags.lora_rank(profile.args, base.lora_rank)
                assert adapter.rank <= started, f"{adapter.name} is above what engines start for"
    for base in world.models.values():
        pinned = [
            one
            for one in world.adapters.values()
            if one.base == base.name and one.pinned and one.phase != "refused"
        ]
        assert len(pinned) <= base.max_loaded_adapters, "pinned adapters leave no place"


@given(STEPS)
@settings(deadline=None)
def test_every_name_has_one_meaning_and_every_adapter_fits_its_base(
    steps: list[tuple[CommandBody, str, str, Found]],
) -> None:
    play(steps)


@given(STEPS)
@settings(deadline=None)
def test_a_world_read_anew_decides_the_same(
    steps: list[tuple[CommandBody, str, str, Found]],
) -> None:
    yard = play(steps)
    again = World()
    for item in yard.log:
        again.apply(item)
    assert again.adapters == yard.world.adapters
    assert again.unread_adapters == yard.world.unread_adapters
    assert yard.step_afresh().decision == yard.step().decision
