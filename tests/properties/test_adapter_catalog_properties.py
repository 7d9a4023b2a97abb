"""Properties of a catalog with adapters, each a sentence, over random wishes, readings and failures."""

from collections import Counter
from typing import Any

from hypothesis import given
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

NAMES = st.sampled_from(["x", "y", "y:x", "b:x", "a:x", "a:b:x"])
BASES = st.sampled_from(["a", "a:b"])
"""Whatever is called so, its pairs are likely to be names, or each other."""
RANKS = st.sampled_from([8, 16, 40, 64])
ARGS = st.sampled_from([(), ("--max-lora-rank", "32"), ("--lora-target-modules", "q_proj")])


@st.composite
def model_entries(draw: st.DrawFn) -> dict[str, Any]:
    entry: dict[str, Any] = {
        "name": draw(BASES),
        "aliases": draw(st.lists(st.one_of(NAMES, BASES), max_size=1)),
        "source": "/models/llama",
        "profiles": [{"name": "gpu", "engine": "vllm", "memory": "1GiB", "args": list(draw(ARGS))}],
    }
    limit = draw(st.sampled_from([None, 1, 2, 4]))
    if limit is not None:
        entry["max_loaded_adapters"] = limit
    return entry


@st.composite
def findings(draw: st.DrawFn) -> Found:
    if draw(st.integers(0, 9)) == 9:
        return codes.NOT_AN_ADAPTER, "there is nothing"
    return config(
        base_model_name_or_path="",
        r=draw(RANKS),
        use_dora=draw(st.integers(0, 9)) == 9,
        target_modules=draw(st.sampled_from([("q_proj",), ("q_proj", "v_proj")])),
    )


SOURCES = st.sampled_from(["x/one", "x/two", "/data/three"])
ADDS = st.builds(
    AdapterAdd,
    name=NAMES,
    base=BASES,
    source=SOURCES,
    pinned=st.booleans(),
    aliases=st.one_of(st.just([]), st.lists(NAMES, max_size=1)),
)
WISHES = st.one_of(
    *(ADDS,) * 6,
    st.builds(AdapterRemove, adapter=NAMES),
    *(st.builds(AdapterPin, adapter=NAMES, pinned=st.sampled_from([True, True, False])),) * 2,
    model_entries().map(lambda entry: ModelAdd(entry=entry)),
    *(
        st.builds(
            CatalogApply,
            entries=st.lists(
                model_entries(), min_size=1, max_size=2, unique_by=lambda e: e["name"]
            ),
            prune=st.integers(0, 3).map(lambda n: n == 3),
        ),
    )
    * 3,
    st.builds(ModelRemove, model=BASES),
)
THEN = st.sampled_from(["read", "read", "read", "fail", "wait"])
STEPS = st.lists(st.tuples(WISHES, THEN, SOURCES, findings()), min_size=4, max_size=12)


def play(steps: list[tuple[CommandBody, str, str, Found]]) -> AdapterYard:
    """Everything asked for, one after another, with the invariants looked at after each."""
    yard = adapter_yard(
        base_model("a", max_loaded_adapters=1), base_model("a:b", max_loaded_adapters=1), gib=0
    )
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
def test_every_name_has_one_meaning_and_every_adapter_fits_its_base(
    steps: list[tuple[CommandBody, str, str, Found]],
) -> None:
    play(steps)


@given(STEPS)
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
