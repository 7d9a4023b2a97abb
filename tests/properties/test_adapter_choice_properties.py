"""Choosing a replica for an adapter as sentences: every gateway chooses alike, and the short way is the long way."""

from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from gateway.domain.adapters import BUSY, Chosen, Known, Shun, choose, only_holder
from gateway.domain.adaptertable import places_of
from gateway.domain.pins import Held
from schemas.adapternames import pin_name
from tests.support.gateway_world import NOW, a_failure, a_replica, a_slot, an_adapter, some_slots

POET = an_adapter()
PIN = pin_name(POET.name, POET.version)
IDS = ("r-1", "r-2", "r-3", "r-4")
OTHERS = ("one", "two", "three", "four")

SLOTS = st.fixed_dictionaries(
    {
        "poet": st.sampled_from([None, "loaded", "leaving", "failed", "its own fault"]),
        "others": st.integers(0, 4),
    }
)
LOADS = st.dictionaries(st.sampled_from(IDS), st.sampled_from([1, 7, 8, 30, BUSY, BUSY + 1, 60]))
SUBSETS = st.sets(st.sampled_from(IDS))


def facts(draw: Any) -> dict[str, Any]:
    places = {}
    for id, wish in draw["slots"].items():
        loaded = [a_slot(name) for name in OTHERS[: wish["others"]]]
        bad = ()
        if wish["poet"] in ("loaded", "leaving"):
            loaded.append(a_slot(POET, leaving=wish["poet"] == "leaving"))
        elif wish["poet"] is not None:
            whose = "adapter" if wish["poet"] == "its own fault" else "replica"
            bad = (a_failure(POET, whose=whose),)
        places[id] = places_of(some_slots(id, *loaded, bad=bad))
    return {"places": places, "inflight": draw["loads"]}


WORLDS = st.fixed_dictionaries(
    {"slots": st.dictionaries(st.sampled_from(IDS), SLOTS), "loads": LOADS}
).map(facts)

REPLICAS = tuple(a_replica(id, adapter_slots=4) for id in IDS)


def chosen(world: dict[str, Any], candidates: Any = REPLICAS, **fields: Any) -> Any:
    fields.setdefault("known", Known())
    return choose(candidates, adapter=POET.name, pin=PIN, now=NOW, **world, **fields)


@given(WORLDS, st.permutations(REPLICAS))
def test_the_order_of_the_candidates_does_not_matter(world: dict[str, Any], other: Any) -> None:
    assert chosen(world) == chosen(world, tuple(other))


@given(WORLDS, SUBSETS, SUBSETS)
def test_who_refused_is_never_chosen_and_who_was_put_off_only_when_nobody_else_is_left(
    world: dict[str, Any], refused: set[str], later: set[str]
) -> None:
    shun = Shun(refused={id: a_failure(POET) for id in refused}, later=later)
    found = chosen(world, shun=shun)
    if not isinstance(found, Chosen):
        return
    assert found.replica.id not in refused
    if found.replica.id in later and found.others:
        without = chosen(world, tuple(r for r in REPLICAS if r.id not in later), shun=shun)
        assert not isinstance(without, Chosen)


@given(WORLDS)
def test_while_a_holder_is_not_too_busy_nobody_loads_it_again(world: dict[str, Any]) -> None:
    found = chosen(world)
    if not isinstance(found, Chosen):
        return
    least = min(world["inflight"].get(r.id, 0) for r in REPLICAS)
    for id, places in world["places"].items():
        if places.serves(PIN) and world["inflight"].get(id, 0) - least <= BUSY:
            assert found.holds


@given(WORLDS, SUBSETS, SUBSETS, st.booleans())
def test_the_short_way_to_the_only_holder_is_what_the_long_way_says(
    world: dict[str, Any], pinned: set[str], more: set[str], loaded: bool
) -> None:
    held = pinned | more
    name = "poet@1" if loaded else ""
    ours = [
        Held(
            "n", id, PIN, 0.0, 0, 1, "poet@1" if id in pinned else name, float(id in pinned) or None
        )
        if id in held
        else None
        for id in (r.id for r in REPLICAS)
    ]
    short = only_holder(REPLICAS, ours, pin=PIN, places=world["places"], now_s=1.0)
    if short is not None and world["inflight"].get(short[0].id, 0) <= BUSY:
        found = chosen(world, known=Known(pinned=pinned, held=held))
        assert isinstance(found, Chosen)
        assert (found.replica, found.holds) == (short[0], True)
        assert short[1] in ours
