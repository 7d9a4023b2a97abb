"""What an engine's own list means: what changed since it was asked for is left as it is."""

from typing import Any

from nodeagent.domain import slots
from nodeagent.domain.badloads import Fault
from nodeagent.domain.evicting import Facts
from nodeagent.domain.listing import Drift, Seen, listed
from nodeagent.domain.pins import Use
from nodeagent.domain.slots import State
from schemas import codes
from tests.support.slotting import VERSION, a_place, a_state, ask, facts, moment, pin

A = "a@01234567"


def seen(*adapters: str, root: Any = "right", **fields: Any) -> tuple[Seen, ...]:
    return tuple(
        Seen(engine_name=f"{a}@01234567", adapter=a, version=VERSION, root=root, **fields)
        for a in adapters
    )


def read(
    state: State, what: tuple[Seen, ...], began: float = 50.0, known: Facts | None = None
) -> tuple[State, Drift]:
    return listed(state, what, began, known or facts(), moment(began + 1))


def test_req_b22_one_that_nobody_loaded_is_found_and_first_in_line_to_leave():
    state, drift = read(a_state(2, a_place("a", 1.0)), seen("a", "b"))
    assert drift == Drift(found=(pin("b"),))
    place = state.places[pin("b")]
    assert (place.how, place.used_at, place.phase) == ("found", slots.NEVER, "loaded")


def test_req_b23_one_that_is_not_listed_is_gone():
    state, drift = read(a_state(2, a_place("a", 1.0), a_place("b", 1.0)), seen("b"))
    assert drift == Drift(lost=(pin("a"),))
    assert set(state.places) == {pin("b")}


def test_req_b24_one_loaded_while_the_list_was_on_its_way_is_kept():
    for changed_at in (50.0, 50.5):
        state = a_state(2, a_place("a", changed_at))
        assert read(state, ()) == (state, Drift())


def test_req_b18_a_list_speaks_of_what_was_before_it_was_asked_for_and_of_nothing_later():
    state = a_state(3, a_place("a", 10.0), a_place("b", 30.0))
    assert read(state, (), began=20.0)[1].lost == (pin("a"),)
    assert read(state, (), began=31.0)[1].lost == (pin("a"), pin("b"))
    assert read(state, (), began=10.0)[1].lost == ()


def test_req_b24_one_in_use_is_kept():
    state = a_state(2, a_place("a", 1.0))
    assert not read(state, (), known=facts("a"))[1]
    silent = Facts(uses={pin("a"): Use(silent=1)})
    assert not read(state, (), known=silent)[1]
    assert read(state, (), known=facts(idle=("a",)))[1].lost == (pin("a"),)


def test_req_bugb1_one_that_is_being_unloaded_or_was_since_is_not_put_back():
    state = slots.forced(a_state(2, a_place("a", 1.0)), pin("a"), 49.0)
    assert read(state, seen("a"))[0].places[pin("a")].phase == "unloading"
    state = slots.unloaded(state, pin("a"), 50.2)
    after, drift = read(state, seen("a"), began=50.0)
    assert (dict(after.places), drift) == ({}, Drift())


def test_req_bugb2_one_that_is_loading_is_neither_counted_twice_nor_replaced():
    state, _ = ask(a_state(2), "a", 49.0)
    after, drift = read(state, seen("a"))
    assert (after.places, drift) == (state.places, Drift())
    assert slots.occupied(after) == 1


def test_req_b27_one_whose_load_failed_while_the_list_was_on_its_way_is_not_inserted():
    """The engine listed it before it had read it."""
    state, _ = ask(a_state(2), "a", 49.0)
    fault = Fault(whose="adapter", code=codes.LOAD_REFUSED, text="no")
    state, _, _ = slots.load_failed(state, pin("a"), fault, (), (), moment(50.5))
    after, drift = read(state, seen("a"))
    assert (dict(after.places), drift) == ({}, Drift())
    # One that a later list shows is there, and nothing was ever unloaded in vain.
    after, drift = read(after, seen("a"), began=52.0)
    assert (drift.found, after.places[pin("a")].tries) == ((pin("a"),), 0)


def test_req_b27_a_name_of_something_that_changed_since_is_not_inserted():
    """Loaded under the next name while the list, which still shows the first, was on its way."""
    state = a_state(2, a_place("a", 50.5, engine_name=f"{A}.1"))
    after, drift = read(state, seen("a"))
    assert (set(after.places), drift, after.foreign) == ({pin("a")}, Drift(), 1)


def test_scn_d2_a_name_of_ours_that_was_loaded_from_elsewhere_is_lost_and_not_taken_again():
    state, drift = read(a_state(2, a_place("a", 1.0)), seen("a", root="wrong"), known=facts("a"))
    assert drift == Drift(lost=(pin("a"),))
    assert (state.foreign, state.taken) == (1, frozenset({A}))
    _, verdict = ask(state, "a", 60.0)
    assert isinstance(verdict, slots.Load)
    assert verdict.place.engine_name == f"{A}.1"


def test_what_is_none_of_ours_is_counted_and_left_alone():
    state, drift = read(a_state(2), (Seen(engine_name="static"), Seen(engine_name="other")))
    assert (state.foreign, drift, dict(state.places)) == (2, Drift(), {})


def test_where_the_engine_does_not_tell_from_where_its_name_is_enough():
    state = a_state(2, a_place("a", 1.0))
    assert not read(state, seen("a", root="unknown"))[1]


def test_a_name_whose_unload_failed_is_found_again_and_rests_before_the_next_try():
    state = slots.forced(a_state(2, a_place("a", 1.0)), pin("a"), 10.0)
    state = slots.unload_failed(state, pin("a"), 40.0)
    assert read(state, seen("a"), began=39.0) == (state, Drift())
    state, drift = read(state, seen("a"))
    assert (drift.found, dict(state.strays)) == ((pin("a"),), {})
    assert state.places[pin("a")].rest_until == 51.0 + 5.0
    state = slots.forced(state, pin("a"), 60.0)
    state = slots.unloaded(state, pin("a"), 61.0)
    state, _ = read(state, seen("a"), began=62.0)
    assert state.places[pin("a")].rest_until == 63.0 + 10.0


def test_a_name_whose_unload_failed_and_that_is_not_listed_takes_no_room_any_more():
    state = slots.forced(a_state(2, a_place("a", 1.0)), pin("a"), 10.0)
    state = slots.unload_failed(state, pin("a"), 40.0)
    assert slots.occupied(read(state, (), began=39.0)[0]) == 1
    assert slots.occupied(read(state, ())[0]) == 0


def test_a_load_without_an_answer_takes_room_until_a_much_later_list():
    state = a_state(2, strays={A: 60.0 + slots.LATE_S})
    assert slots.occupied(read(state, (), began=61.0)[0]) == 1
    after, drift = read(state, seen("a"), began=61.0)
    assert (drift.found, dict(after.strays)) == ((pin("a"),), {})
    assert slots.occupied(read(state, (), began=61.0 + slots.LATE_S)[0]) == 0


def test_that_a_name_was_unloaded_is_forgotten_after_an_hour():
    state = slots.unloaded(a_state(2, a_place("a", phase="unloading")), pin("a"), 1.0)
    assert read(state, ())[0].gone
    assert not read(state, (), began=4000.0)[0].gone
