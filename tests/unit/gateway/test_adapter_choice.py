"""Which replica a request for an adapter goes to."""

from datetime import timedelta
from typing import Any

import pytest

from gateway.domain.adapters import (
    ALIKE,
    BUSY,
    AdapterAtFault,
    Chosen,
    Known,
    NoneLeft,
    Shun,
    choose,
    rendezvous,
    said_twice,
)
from gateway.domain.adaptertable import places_of
from gateway.domain.pins import Pins
from schemas.adapternames import pin_name
from schemas.replica import Replica
from schemas.slots import Slots
from tests.support.gateway_world import (
    NOW,
    a_failure,
    a_replica,
    a_slot,
    an_adapter,
    some_slots,
)

POET = an_adapter()
PIN = pin_name(POET.name, POET.version)
FULL = ("one", "two", "three", "four")
IDS = ("r-1", "r-2", "r-3")


def replicas(*ids: str, **fields: Any) -> tuple[Replica, ...]:
    return tuple(a_replica(id, adapter_slots=4, **fields) for id in ids or IDS)


def pick(
    *slots: Slots,
    inflight: dict[str, int] | None = None,
    candidates: tuple[Replica, ...] = (),
    **fields: Any,
) -> Chosen | AdapterAtFault | NoneLeft:
    fields.setdefault("known", Known())
    return choose(
        candidates or replicas(),
        adapter=POET.name,
        pin=PIN,
        places={s.replica: places_of(s) for s in slots},
        inflight=inflight or {},
        now=NOW,
        **fields,
    )


def chosen(*slots: Slots, **fields: Any) -> str:
    found = pick(*slots, **fields)
    assert isinstance(found, Chosen)
    return found.replica.id


def nearest(*ids: str) -> str:
    return min(ids, key=lambda id: (rendezvous(POET.name, id), id))


def test_req_b12_a_replica_nothing_is_known_of_is_free_and_no_holder() -> None:
    found = pick(some_slots("r-1", *FULL), some_slots("r-3", *FULL))
    assert isinstance(found, Chosen)
    assert (found.replica.id, found.holds) == ("r-2", False)


@pytest.mark.parametrize("id", IDS)
def test_req_b13_who_has_it_comes_before_who_has_a_free_place(id: str) -> None:
    found = pick(some_slots(id, POET, "two", "three", "four"))
    assert isinstance(found, Chosen)
    assert (found.replica.id, found.holds) == (id, True)


@pytest.mark.parametrize("id", IDS)
def test_req_b13_who_is_loading_it_binds_like_who_has_it(id: str) -> None:
    assert chosen(known=Known(held=[id])) == id


def test_req_b13_a_holder_that_is_far_too_busy_binds_nobody() -> None:
    slots = some_slots("r-1", POET)
    # Loads are within the same step of eight, so that only the bound tells.
    assert chosen(slots, inflight={"r-1": BUSY}) == "r-1"
    assert chosen(slots, inflight={"r-1": BUSY + 1}) in ("r-2", "r-3")
    assert chosen(slots, inflight={"r-1": BUSY + 9, "r-2": 9, "r-3": 9}) == "r-1"
    # It takes it no better than one that had to make room, and is as good as those.
    crowd = [some_slots(id, *FULL) for id in ("r-2", "r-3")]
    assert chosen(slots, *crowd, inflight={"r-1": BUSY + 1}) in ("r-2", "r-3")


def test_req_b14_a_free_place_counts_what_is_loaded_and_what_is_being_loaded() -> None:
    slots = [
        some_slots("r-1", "one", "two", "three"),
        some_slots("r-2", *FULL),
        some_slots("r-3", *FULL),
    ]
    assert chosen(*slots) == "r-1"
    crowded = Known(besides=lambda id, _: 1 if id == "r-1" else 0)
    assert chosen(*slots, known=crowded) == nearest(*IDS)


def test_req_bugb2_an_adapter_that_is_told_and_asked_for_takes_one_place() -> None:
    slots = [
        some_slots("r-1", "one", "two", "three"),
        some_slots("r-2", *FULL),
        some_slots("r-3", *FULL),
    ]
    pins = Pins()
    three = an_adapter("three")
    question = pins.asking("n1", "r-1", pin_name("three", three.version), 0.0)
    assert chosen(*slots, known=Known(besides=pins.besides)) == "r-1"
    pins.asked(question, 1.0)
    # What its agent has said and the log does not tell yet has a place all the same.
    four = pins.asking("n1", "r-1", "four@00000004", 1.0)
    pins.granted(four, "four@00000004", 1.0)
    pins.asked(four, 2.0)
    assert chosen(*slots, known=Known(besides=pins.besides)) == nearest(*IDS)


def test_req_b14_a_place_above_the_limit_is_not_free() -> None:
    over = some_slots("r-1", *FULL, "five", room=5)
    assert chosen(over, some_slots("r-2", *FULL), some_slots("r-3", "one")) == "r-3"


def test_among_equals_all_gateways_choose_alike_and_not_one_replica_for_everything() -> None:
    assert chosen() == nearest(*IDS)
    assert chosen(candidates=tuple(reversed(replicas()))) == nearest(*IDS)
    first = {min(IDS, key=lambda id: rendezvous(f"a{n}", id)) for n in range(40)}
    assert first == set(IDS)


def test_a_few_requests_more_tip_no_choice_many_do() -> None:
    best = nearest(*IDS)
    assert chosen(inflight={best: ALIKE - 2}) == best
    assert chosen(inflight={best: ALIKE - 1}) == nearest(*(id for id in IDS if id != best))


def test_weight_divides_load() -> None:
    heavy = (*replicas("r-1", weight=4), *replicas("r-2", "r-3"))
    loads = {"r-1": 3 * ALIKE, "r-2": ALIKE, "r-3": ALIKE}
    assert chosen(candidates=heavy, inflight=loads) == "r-1"


def test_of_several_holders_one_that_need_not_be_asked() -> None:
    slots = [some_slots(id, POET) for id in IDS]
    for id in IDS:
        assert chosen(*slots, known=Known(pinned=[id], held=[id])) == id
    # Load comes first: a pin is no reason to send everybody to one of four.
    assert chosen(*slots, known=Known(pinned=["r-1"]), inflight={"r-1": ALIKE}) != "r-1"


def test_another_version_is_no_holder_and_its_failure_says_nothing() -> None:
    old = an_adapter(version="ffffffffffff")
    found = pick(some_slots("r-1", old, bad=(a_failure(old),)), candidates=replicas("r-1"))
    assert isinstance(found, Chosen)
    assert not found.holds


def test_scn_d8_what_a_person_has_unloaded_gets_nothing_new_where_another_can_take_it() -> None:
    leaving = some_slots("r-1", a_slot(POET, leaving=True))
    assert chosen(leaving) in ("r-2", "r-3")
    assert chosen(leaving, known=Known(held=["r-1"], pinned=["r-1"])) in ("r-2", "r-3")
    found = pick(leaving, candidates=replicas("r-1"))
    assert isinstance(found, Chosen)
    assert not found.holds  # so its agent is asked


def test_scn_d6_a_replica_where_it_failed_is_avoided_until_that_expires() -> None:
    failed = [some_slots(id, bad=(a_failure(POET),)) for id in ("r-1", "r-2")]
    assert chosen(*failed) == "r-3"
    expired = some_slots("r-1", bad=(a_failure(POET, until=NOW),))
    assert chosen(expired, candidates=replicas("r-1")) == "r-1"
    # What is loaded by now did not stay failed.
    loaded = some_slots("r-1", POET, bad=(a_failure(POET),))
    assert chosen(loaded, candidates=replicas("r-1")) == "r-1"
    known = Known(held=["r-1"])
    assert chosen(*failed, candidates=replicas("r-1"), known=known) == "r-1"


def test_a_replica_that_refused_this_request_is_none_any_more_and_the_first_to_try_again_speaks() -> (
    None
):
    later = a_failure(POET, until=NOW + timedelta(seconds=90))
    sooner = a_failure(POET, until=NOW + timedelta(seconds=30))
    assert chosen(shun=Shun(refused={"r-1": later, "r-2": sooner})) == "r-3"
    found = pick(
        some_slots("r-3", bad=(a_failure(POET),)),
        shun=Shun(refused={"r-1": later, "r-2": sooner}),
    )
    assert found == NoneLeft(bad=sooner)
    assert pick(candidates=()) != NoneLeft()
    assert choose(
        (), adapter="poet", pin=PIN, places={}, known=Known(), inflight={}, now=NOW
    ) == NoneLeft(bad=None)


def test_req_b58_a_failure_of_the_adapters_own_ends_the_matter_unless_somebody_holds_it() -> None:
    own = a_failure(POET, whose="adapter", reason="LoRA rank 64 is greater than max_lora_rank 16.")
    slots = some_slots("r-1", bad=(own,))
    assert pick(slots) == AdapterAtFault(bad=own)
    assert chosen(slots, some_slots("r-2", POET)) == "r-2"


def test_req_bugb6_the_same_unknown_words_of_two_replicas_are_the_adapters_fault() -> None:
    odd = a_failure(POET, reason="worker failed with error 7", known=False)
    other = a_failure(POET, reason="worker failed with error 8", known=False)
    usual = a_failure(POET, reason="out of memory")
    two = [some_slots("r-1", bad=(odd,)), some_slots("r-2", bad=(odd,))]
    assert pick(*two) == AdapterAtFault(bad=odd)
    # Told to this request, or by the log: the same.
    assert pick(two[0], shun=Shun(refused={"r-2": odd})) == AdapterAtFault(bad=odd)
    assert chosen(two[0], some_slots("r-2", bad=(other,))) == "r-3"
    assert chosen(*(some_slots(id, bad=(usual,)) for id in ("r-1", "r-2"))) == "r-3"
    assert said_twice([odd, usual, usual, other]) is None


def test_who_was_put_off_comes_last_but_before_nobody() -> None:
    holder = some_slots("r-1", POET)
    assert chosen(holder, shun=Shun(later={"r-1"})) in ("r-2", "r-3")
    assert chosen(holder, shun=Shun(later=set(IDS))) == "r-1"
