"""Which adapters' files a node wants before anybody asks, in which order, and what it has room for."""

from datetime import UTC, datetime
from typing import Any

import pytest
from msgspec.structs import replace

from nodeagent.domain import adapterfiles
from nodeagent.domain.adapterfiles import (
    again_s,
    contents_of,
    is_settled,
    may_serve,
    model_sets,
    plan,
    running_models,
    set_of,
    still_kept,
    wanted,
)
from nodeagent.domain.catalog import Catalog
from nodeagent.domain.files import Disk, Limits, Stays, StoredSet
from schemas.adapter import Adapter
from schemas.model import Model, Scaling
from schemas.node import CardInfo, EngineInfo
from schemas.settings import GIB
from tests.support.adapter_files import (
    a_base,
    a_batch,
    a_profile,
    adapter_set,
    an_adapter,
    gpu_node,
    names_of,
    told,
)
from tests.support.agent_yard import a_held, a_launch

BEGAN = datetime(2026, 1, 1, tzinfo=UTC)
NODE = gpu_node()


def a_catalog(*states: Model | Adapter) -> Catalog:
    catalog = Catalog()
    models = [told("model", s.name, s) for s in states if isinstance(s, Model)]
    adapters = [told("adapter", s.name, s) for s in states if isinstance(s, Adapter)]
    catalog.model_shelf.take(a_batch(*models))
    catalog.adapter_shelf.take(a_batch(*adapters))
    return catalog


# Whose adapters.


@pytest.mark.parametrize(
    ("profile", "may"),
    [
        ({}, True),
        ({"card": ("n1/gpu0",)}, True),
        ({"card": ("n*/gpu?",)}, True),
        ({"card": ("n2/*", "gpu")}, True),
        ({"card": ("n2/gpu0",)}, False),
        # Placement does not ask what cards the engine was built for.
        ({"card": ("cpu",)}, True),
        ({"card": ("tpu",)}, False),
        ({"cards": 2}, False),
        # Loads none, and is not there at all.
        ({"engine": "llamacpp", "card": ("cpu",)}, False),
        ({"engine": "command"}, False),
    ],
)
def test_req_b3_a_node_has_adapters_of_models_that_may_run_there(profile: Any, may: bool):
    assert may_serve(a_base(profiles=(a_profile(**profile),)), NODE) == may


def test_one_profile_of_several_is_enough():
    elsewhere, here = a_profile("a", card=("n2/gpu0",)), a_profile("b")
    assert may_serve(a_base(profiles=(elsewhere, here)), NODE)
    assert not may_serve(a_base(profiles=(elsewhere,)), NODE)


def test_a_model_that_loads_none_or_is_off_wants_no_files():
    assert not may_serve(a_base(max_loaded_adapters=0), NODE)
    assert not may_serve(a_base(scaling=Scaling()), NODE)
    assert may_serve(a_base(scaling=Scaling(min=0, max=3)), NODE)


def test_an_engine_that_cannot_load_adapters_wants_no_files():
    old = EngineInfo(name="vllm", version="0", card_kinds=("gpu",))
    assert not may_serve(a_base(), gpu_node(engines=(old,)))


def test_several_cards_are_counted_and_divided_ones_are_not():
    cards = tuple(CardInfo(id=f"gpu{n}", kind="gpu", memory_bytes=GIB) for n in range(2))
    pair = a_base(profiles=(a_profile(cards=2),))
    assert may_serve(pair, gpu_node(cards=cards))
    divided = (cards[0], replace(cards[1], mig=True))
    assert not may_serve(pair, gpu_node(cards=divided))


def test_commands_want_files_only_where_they_may_run():
    engine = EngineInfo(name="command", version="1", card_kinds=("gpu",), adapters=True)
    model = a_base(profiles=(a_profile(engine="command"),))
    assert not may_serve(model, gpu_node(engines=(engine,)))
    assert may_serve(model, gpu_node(engines=(engine,), allow_commands=True))


def test_running_models_come_first_then_pinned_ones_then_the_catalogs_order():
    catalog = a_catalog(
        a_base("m", order=1),
        a_base("busy", order=2),
        an_adapter("m-2", order=2),
        an_adapter("m-1b", order=1),
        an_adapter("m-1a", order=1),
        an_adapter("m-pinned", order=9, pinned=True),
        an_adapter("busy-1", base="busy"),
        an_adapter("busy-pinned", base="busy", pinned=True),
    )
    assert names_of(wanted(catalog, NODE, {"busy"})) == [
        "busy-pinned",
        "busy-1",
        "m-pinned",
        "m-1a",
        "m-1b",
        "m-2",
    ]
    assert names_of(wanted(catalog, NODE, frozenset()))[0] == "m-pinned"


def test_only_ready_adapters_of_the_present_model_are_wanted():
    catalog = a_catalog(
        a_base(),
        an_adapter("ready"),
        an_adapter("reading", phase="reading"),
        an_adapter("fetching", phase="fetching"),
        an_adapter("refused", phase="refused"),
        an_adapter("earlier", base_incarnation="i-before"),
        an_adapter("orphan", base="gone"),
        an_adapter("empty", files=()),
    )
    assert names_of(wanted(catalog, NODE, frozenset())) == ["ready"]


def test_a_model_runs_here_from_its_fetch_to_its_end():
    held = [
        a_held(f"r-{phase}", phase, model=phase)
        for phase in ("waiting", "fetching", "starting", "ready", "draining", "parked", "stopped")
    ]
    assert running_models(held) == {"fetching", "starting", "ready", "draining", "parked"}


def test_models_sets_are_those_on_mirrors():
    catalog = a_catalog(a_base("m", source="mirror:k1"), a_base("n", source="/models/n"))
    assert model_sets(catalog) == {"k1"}


def test_contents_are_known_all_or_not_at_all():
    adapter = an_adapter("a")
    assert set(contents_of(adapter)) == {"adapter_model.safetensors", "adapter_config.json"}
    half = replace(adapter, files=(adapter.files[0], replace(adapter.files[1], sha256="")))
    assert contents_of(half) == {}
    assert (set_of(half), set_of(replace(half, files=()))) == (adapter.files[0].key, "")


# Room.

ONE = an_adapter("one", adapter_set("one", 1000)[0])
TWO = an_adapter("two", adapter_set("two", 2000)[0])
THREE = an_adapter("three", adapter_set("three", 3000)[0])


def stored(adapter: Adapter, **fields: Any) -> StoredSet:
    contents = tuple(file.sha256 for file in adapter.files)
    return StoredSet(key=set_of(adapter), used_at=BEGAN, contents=contents, adapter=True, **fields)


def a_disk(*adapters: Adapter, free: int = 1 << 40, **others: int) -> Disk:
    """A disk with these adapters, and with sets that consist of one content of their own name."""
    held = {file.sha256: file.bytes for a in adapters for file in a.files}
    return Disk(
        sets=(
            *(stored(a) for a in adapters),
            *(StoredSet(key=f"k-{n}", used_at=BEGAN, contents=(n,)) for n in others),
        ),
        held_bytes={**held, **others},
        promised_bytes={},
        free_bytes=free,
    )


def planned(*wishes: Adapter, disk: Disk | None = None, **fields: Any) -> adapterfiles.Ahead:
    disk = disk or a_disk()
    given: dict[str, Any] = {
        "here": frozenset(s.key for s in disk.sets),
        "beside": frozenset(),
        "spared": frozenset(),
        "limits": Limits(budget_bytes=0, keep_free_bytes=0),
        **fields,
    }
    return plan(wishes, disk, **given)


def test_with_room_for_all_everything_missing_is_fetched_in_order():
    ahead = planned(THREE, ONE, TWO, disk=a_disk(ONE))
    assert names_of(ahead.fetch) == ["three", "two"]
    assert ahead.spare == {set_of(a) for a in (ONE, TWO, THREE)}
    assert (ahead.left, ahead.left_bytes) == ((), 0)


def test_a_budget_takes_the_most_wanted_and_what_still_fits_besides():
    limits = Limits(budget_bytes=ONE.bytes + TWO.bytes, keep_free_bytes=0)
    ahead = planned(TWO, THREE, ONE, limits=limits)
    assert names_of(ahead.fetch) == ["two", "one"]
    assert (names_of(ahead.left), ahead.left_bytes) == (["three"], THREE.bytes)
    assert set_of(THREE) not in ahead.spare


def test_bytes_that_are_kept_free_stay_free():
    limits = Limits(budget_bytes=0, keep_free_bytes=5000)
    disk = a_disk(free=5000 + ONE.bytes)
    assert names_of(planned(ONE, TWO, disk=disk, limits=limits).fetch) == ["one"]
    # Already below them nothing is added, and what is here stays.
    below = a_disk(TWO, free=100)
    ahead = planned(TWO, ONE, disk=below, limits=limits)
    assert names_of(ahead.fetch) == []


def test_what_a_replica_needs_and_what_others_were_promised_is_not_to_be_had():
    limits = Limits(budget_bytes=5000, keep_free_bytes=0)
    disk = a_disk(model=4000)
    assert planned(ONE, disk=disk, limits=limits).fetch == (ONE,)
    needed = planned(ONE, disk=disk, limits=limits, spared=frozenset({"k-model"}))
    assert (needed.fetch, needed.left) == ((), (ONE,))
    assert "k-model" in needed.spare
    promised = replace(a_disk(), promised_bytes={"coming": 4500})
    assert planned(ONE, disk=promised, limits=limits).left == (ONE,)


def test_a_less_wanted_one_that_is_here_makes_room_for_a_more_wanted_one():
    limits = Limits(budget_bytes=TWO.bytes, keep_free_bytes=0)
    ahead = planned(TWO, ONE, disk=a_disk(ONE), limits=limits)
    assert (ahead.fetch, ahead.left) == ((TWO,), (ONE,))
    assert ahead.spare == {set_of(TWO)}
    # And not the other way round.
    ahead = planned(TWO, ONE, disk=a_disk(TWO), limits=limits)
    assert (ahead.fetch, ahead.left) == ((), (ONE,))


def test_what_is_a_link_away_costs_nothing():
    limits = Limits(budget_bytes=1, keep_free_bytes=0)
    assert planned(ONE, limits=limits).left == (ONE,)
    beside = frozenset(file.sha256 for file in ONE.files)
    assert planned(ONE, limits=limits, beside=beside).fetch == (ONE,)


def test_contents_that_two_share_are_counted_once():
    shared = replace(TWO, name="twin", files=(ONE.files[0], TWO.files[1]))
    limits = Limits(budget_bytes=ONE.bytes + TWO.files[1].bytes, keep_free_bytes=0)
    ahead = planned(ONE, shared, limits=limits)
    assert names_of(ahead.fetch) == ["one", "twin"]


def test_contents_whose_sum_nobody_knows_count_whole():
    unknown = replace(ONE, files=tuple(replace(f, sha256="") for f in ONE.files))
    assert planned(unknown, limits=Limits(budget_bytes=ONE.bytes, keep_free_bytes=0)).fetch
    assert planned(unknown, limits=Limits(budget_bytes=ONE.bytes - 1, keep_free_bytes=0)).left


def test_a_set_that_fails_is_tried_less_and_less_often():
    assert [again_s(n) for n in (0, 1, 2, 3, 4, 99)] == [15.0, 15.0, 30.0, 60.0, 120.0, 120.0]


# What stays.


def test_sets_of_loaded_adapters_stay_until_given_back_or_the_replica_is_over():
    held = {
        h.replica.id: h for h in (a_held("r-1"), a_held("r-2", "parked"), a_held("r-3", "stopped"))
    }
    kept = {n: frozenset({f"k-{n}"}) for n in ("r-1", "r-2", "r-3", "r-unknown")}
    assert still_kept(kept, held) == {"k-r-1", "k-r-2"}


def test_any_adapter_may_be_in_use_until_every_engine_was_told_of():
    launch = a_launch(adapters=4)
    ready, parked = a_held("r-1", launch=launch), a_held("r-2", "parked", launch=launch)
    starting, plain = a_held("r-3", "starting", launch=launch), a_held("r-4", launch=a_launch())
    held = (ready, parked, starting, plain, a_held("r-5", "failed", launch=launch))
    assert not is_settled(held, ())
    assert not is_settled(held, {"r-1"})
    assert is_settled(held, {"r-1", "r-2"})
    # One that only the log knows tells of its slots itself.
    assert not is_settled((a_held("r-6", adapter_slots=4),), ())
    assert is_settled((), ())


def test_unsettled_no_adapters_set_may_go():
    disk = a_disk(ONE, model=5)
    assert Stays(keys=frozenset({"x"}), every_adapter=True).among(disk) == {"x", set_of(ONE)}
    assert Stays(keys=frozenset({"x"})).also({"y"}).among(disk) == {"x", "y"}
