"""One replica's slots: what becomes of each ask, and of what was begun."""

from datetime import timedelta

from nodeagent.domain import listing, slots
from nodeagent.domain.badloads import Fault
from nodeagent.domain.evicting import Facts
from nodeagent.domain.slots import Hit, Join, Load, Refuse, State, Wait, occupied
from schemas import codes
from schemas.slots import BadAdapter, Slot, Slots
from tests.support.slotting import START, VERSION, a_place, a_state, ask, moment, pin

BROKEN = Fault(whose="adapter", code=codes.LOAD_REFUSED, text="no such module")


def fail(state: State, adapter: str, at: float, fault: Fault = BROKEN, others=(), strip=()):
    return slots.load_failed(state, pin(adapter), fault, others, strip, moment(at))


def done(state: State, adapter: str, at: float) -> State:
    name = pin(adapter)
    engine_side = state.places[name].engine_name
    return slots.loaded(state, name, moment(at), engine_name=engine_side)


def test_req_b35_an_ask_for_an_absent_adapter_reserves_its_place_in_the_same_step():
    state, verdict = ask(a_state(2), "a", 1.0)
    assert isinstance(verdict, Load)
    assert verdict.place.engine_name == "a@01234567"
    assert state.places[pin("a")].phase == "loading"
    assert ask(state, "a", 1.0)[1] == Join()


def test_req_b11_the_same_moment_gives_the_same_decision_and_no_clock_is_asked():
    state = a_state(1, a_place("x"), a_place("y"), room=2)
    assert ask(state, "a", 7.0) == ask(state, "a", 7.0)
    assert ask(state, "a", 7.0) != ask(state, "a", 8.0)


def test_req_b37_one_load_per_adapter_however_many_ask():
    state, first = ask(a_state(4), "a", 1.0)
    assert isinstance(first, Load)
    for n in range(10):
        state, verdict = ask(state, "a", 1.0 + n / 10)
        assert verdict == Join()
    state = done(state, "a", 3.0)
    assert ask(state, "a", 3.0)[1] == Hit(engine_name="a@01234567")


def test_scn_d5_ten_first_asks_at_once_are_one_load_and_nine_joins():
    state = a_state(4)
    verdicts = []
    for _ in range(10):
        state, verdict = ask(state, "a", 1.0)
        verdicts.append(type(verdict))
    assert verdicts == [Load, *[Join] * 9]


def test_req_b32_a_hit_counts_as_its_last_use():
    state, verdict = ask(a_state(2, a_place("a", 1.0)), "a", 9.0)
    assert isinstance(verdict, Hit)
    assert state.places[pin("a")].used_at == 9.0


def test_req_b34_an_ask_for_an_adapter_on_its_way_out_waits_for_the_end_of_that():
    state = a_state(2, a_place("a", phase="unloading"))
    state, verdict = ask(state, "a", 1.0)
    assert verdict == Wait(why="leaving")
    state = slots.unloaded(state, pin("a"), 2.0)
    assert isinstance(ask(state, "a", 2.0)[1], Load)


def test_req_b44_over_the_limit_only_as_far_as_the_engines_own_cache_goes():
    state = a_state(2, a_place("a"), a_place("b"), room=3)
    state, verdict = ask(state, "c", 1.0)
    assert isinstance(verdict, Load)
    state, verdict = ask(state, "d", 1.0)
    assert verdict == Wait(why="room")
    assert occupied(state) == 3


def test_an_engine_whose_cache_is_unknown_gets_no_more_than_the_limit():
    state = a_state(2, a_place("a"), a_place("b"), room=0)
    assert ask(state, "c", 1.0)[1] == Wait(why="room")


def test_what_others_loaded_takes_of_the_room_above_the_limit_only():
    assert slots.room_of(a_state(2, room=4, foreign=1)) == 3
    assert slots.room_of(a_state(2, room=4, foreign=9)) == 2
    assert slots.room_of(a_state(4, room=2, foreign=9)) == 2


def test_req_b45_a_limit_of_nothing_loads_nothing():
    _, verdict = ask(a_state(0, room=5), "a", 1.0)
    assert isinstance(verdict, Refuse)
    assert verdict.code == codes.NO_ADAPTERS


def test_req_bugb7_an_engine_without_the_routes_is_asked_nothing():
    _, verdict = ask(a_state(2, route_off=True), "a", 1.0)
    assert isinstance(verdict, Refuse)
    assert (verdict.code, verdict.whose) == (codes.ROUTE_OFF, "replica")


def test_who_waits_longest_gets_the_next_place_and_who_asks_no_more_has_no_turn():
    state = a_state(1, a_place("x"), room=1)
    state, _ = ask(state, "a", 1.0)
    state, _ = ask(state, "b", 1.5)
    state = slots.unloaded(state, pin("x"), 2.0)
    state, verdict = ask(state, "b", 2.0)
    assert verdict == Wait(why="room")
    taken, verdict = ask(state, "a", 2.0)
    assert isinstance(verdict, Load)
    assert [w.name for w in taken.queue] == [pin("b")]
    state, verdict = ask(state, "b", 1.0 + slots.ASKS_AGAIN_S + 0.1)
    assert isinstance(verdict, Load)


def test_req_b54_a_load_that_failed_is_not_loaded_and_its_place_is_free():
    state, _ = ask(a_state(2), "a", 1.0)
    state, bad, restored = fail(state, "a", 2.0)
    assert (bad.code, bad.reason, bad.whose, restored) == (
        codes.LOAD_REFUSED,
        "no such module",
        "adapter",
        (),
    )
    assert state.places == {}
    assert isinstance(ask(state, "b", 2.0)[1], Load)


def test_req_bugb4_a_bad_adapter_is_refused_from_memory_and_evicts_nobody():
    state = a_state(2, a_place("x"), a_place("y"))
    state, verdict = ask(state, "a", 1.0)
    assert isinstance(verdict, Load)
    state, bad, _ = fail(state, "a", 2.0)
    for at in (2.0, 10.0, 50.0):
        state, verdict = ask(state, "a", at)
        assert verdict == Refuse(
            code=bad.code, sentence=bad.reason, whose="adapter", until=bad.until
        )
        assert set(state.places) == {pin("x"), pin("y")}
        assert state.queue == ()
    after = (bad.until - START).total_seconds()
    state, verdict = ask(state, "a", after)
    assert isinstance(verdict, Load)
    _, again, _ = fail(state, "a", after + 1)
    assert again.until - moment(after + 1).now == 2 * (bad.until - moment(2.0).now)


def test_req_bugb4_what_made_way_for_a_load_that_failed_comes_back():
    """The engine has no room above the limit, so something had to leave first."""
    state = a_state(1, a_place("x", phase="unloading"), room=1)
    state, verdict = ask(state, "a", 1.0)
    assert verdict == Wait(why="room")
    state = slots.unloaded(state, pin("x"), 2.0)
    state, verdict = ask(state, "a", 2.0)
    assert isinstance(verdict, Load)
    state, _, restored = fail(state, "a", 3.0)
    assert [p.adapter for p in restored] == ["x"]
    assert state.places[pin("x")].phase == "loading"
    state, _, restored = fail(state, "x", 4.0)
    assert (restored, state.places) == ((), {})


def test_nothing_comes_back_for_a_load_that_worked_nor_into_a_place_somebody_waits_for():
    state = slots.unloaded(a_state(1, a_place("x", phase="unloading"), room=1), pin("x"), 1.0)
    state, _ = ask(state, "a", 1.0)
    state = done(state, "a", 2.0)
    assert state.displaced == ()
    state = slots.unloaded(a_state(1, a_place("x", phase="unloading"), room=1), pin("x"), 1.0)
    state, _ = ask(state, "a", 1.0)
    state, _ = ask(state, "b", 1.5)
    _, _, restored = fail(state, "a", 2.0)
    assert restored == ()


def test_what_comes_back_takes_nothing_from_another_that_made_way_meanwhile():
    x, y = a_place("x", phase="unloading"), a_place("y", phase="unloading")
    state = slots.unloaded(a_state(2, x, y, room=2), pin("y"), 1.0)
    state, _ = ask(state, "a", 1.0)
    state, _, restored = fail(state, "a", 2.0)
    assert [p.adapter for p in restored] == ["y"]
    state = slots.unloaded(state, pin("x"), 3.0)
    state = done(state, "y", 3.5)
    state, verdict = ask(state, "b", 3.6)
    assert isinstance(verdict, Load)
    _, _, restored = fail(state, "b", 4.0)
    assert [p.adapter for p in restored] == ["x"]


def test_scn_d6_a_failure_of_the_replica_is_remembered_there_with_an_expiry():
    fault = Fault(whose="replica", code=codes.LOAD_FAILED, text="worker died")
    state, _ = ask(a_state(2), "a", 1.0)
    state, bad, _ = fail(state, "a", 2.0, fault)
    assert bad.whose == "replica"
    assert bad.until == moment(2.0).now + timedelta(seconds=15)
    _, verdict = ask(state, "a", 16.9)
    assert isinstance(verdict, Refuse)
    assert verdict.whose == "replica"
    assert isinstance(ask(a_state(2), "a", 2.0)[1], Load)
    assert isinstance(ask(state, "a", 17.0)[1], Load)


def test_req_b59_a_load_without_an_answer_is_the_replicas_fault_and_its_room_counts():
    late = Fault(whose="replica", code=codes.LOAD_TIMEOUT, text="no answer", late=True)
    state, _ = ask(a_state(1, room=1), "a", 1.0)
    state, bad, _ = fail(state, "a", 121.0, late)
    assert (bad.whose, occupied(state)) == ("replica", 1)
    assert ask(state, "b", 121.0)[1] == Wait(why="room")
    # Under its own name it needs no other room than it may have already.
    again = bad.until - START
    assert isinstance(ask(state, "a", again.total_seconds())[1], Load)


def test_req_bugb6_the_same_words_count_as_the_same_also_behind_a_restart():
    words = Fault(
        whose="replica", code=codes.LOAD_FAILED, text="Loading a@01234567: odd", known=False
    )
    state, _ = ask(a_state(2), "a", 1.0)
    state, _, _ = fail(state, "a", 2.0, words)
    before = Slots(node="n1", replica="r-1", model="m", epoch=1, limit=2, since=START)
    remembered = slots.adopt(2, 3, slots.told(state, before, moment(2.0), 1), moment(3.0))
    other, _ = ask(a_state(2), "a", 3.0)
    _, bad, _ = fail(other, "a", 4.0, words, others=(remembered.bads,))
    assert bad.whose == "adapter"


def test_a_person_may_have_a_bad_one_tried():
    state, _ = ask(a_state(2), "a", 1.0)
    state, _, _ = fail(state, "a", 2.0)
    assert isinstance(ask(state, "a", 3.0, how="person")[1], Load)


def test_req_b53_a_load_that_worked_is_held_and_a_failure_before_it_forgotten():
    state, _ = ask(a_state(2), "a", 1.0)
    state, _, _ = fail(state, "a", 2.0)
    state, _ = ask(state, "a", 3.0, how="person")
    state = done(state, "a", 5.0)
    place = state.places[pin("a")]
    assert (place.phase, place.used_at, place.since) == ("loaded", 5.0, moment(5.0).now)
    assert state.bads == {}


def test_scn_d4_one_that_the_engine_does_not_know_any_more_is_loaded_again_once():
    state = a_state(2, a_place("a", 1.0))
    state, verdict = ask(state, "a", 5.0, gone="a@01234567")
    assert isinstance(verdict, Load)
    assert verdict.place.again
    assert ask(state, "a", 5.1, gone="a@01234567")[1] == Join()
    state = done(state, "a", 6.0)
    assert not state.places[pin("a")].again


def test_one_that_could_not_be_loaded_again_may_be_there_still_and_its_room_counts():
    state = a_state(1, a_place("a", 1.0), room=1)
    state, _ = ask(state, "a", 5.0, gone="a@01234567")
    files = Fault(whose="replica", code=codes.FILES_MISSING, text="no room on the disk")
    state, _, _ = fail(state, "a", 6.0, files)
    assert occupied(state) == 1
    assert ask(state, "b", 6.0)[1] == Wait(why="room")
    state, _ = listing.listed(state, (), 7.0, Facts(), moment(7.1))
    assert occupied(state) == 0


def test_req_b29_who_was_told_of_a_name_it_has_no_more_joins_what_it_has_now():
    state = a_state(2, a_place("a", engine_name="a@01234567.1"))
    assert ask(state, "a", 5.0, gone="a@01234567")[1] == Hit(engine_name="a@01234567.1")
    assert isinstance(ask(a_state(2), "a", 5.0, gone="a@01234567")[1], Load)


def test_scn_d2_a_name_that_stands_for_something_else_is_left_and_the_next_one_taken():
    state, verdict = ask(a_state(2), "a", 1.0)
    state = slots.renamed(state, pin("a"))
    assert state.places[pin("a")].engine_name == "a@01234567.1"
    state = slots.renamed(state, pin("a"))
    assert state.places[pin("a")].engine_name == "a@01234567.2"
    taken = a_state(2, taken=frozenset({"a@01234567"}))
    _, verdict = ask(taken, "a", 1.0)
    assert isinstance(verdict, Load)
    assert verdict.place.engine_name == "a@01234567.1"


def test_scn_d8_one_that_is_leaving_is_waited_for_and_stays_when_a_person_wants_it_loaded():
    state = slots.leaving(a_state(2, a_place("a")), pin("a"))
    assert ask(state, "a", 1.0)[1] == Wait(why="leaving")
    state, verdict = ask(state, "a", 1.0, how="person")
    assert isinstance(verdict, Hit)
    assert not state.places[pin("a")].leaving


def test_req_b50_an_unload_that_failed_leaves_its_room_unknown_and_nobody_is_sent_there():
    state = a_state(1, a_place("a", phase="unloading"), room=1)
    state = slots.unload_failed(state, pin("a"), 3.0)
    assert (dict(state.places), occupied(state)) == ({}, 1)
    assert ask(state, "b", 3.0)[1] == Wait(why="room")


def test_req_b56_the_end_of_a_use_counts_too_and_an_older_one_changes_nothing():
    state = slots.used(a_state(2, a_place("a", 4.0)), {pin("a"): 9.0, pin("b"): 9.0})
    assert state.places[pin("a")].used_at == 9.0
    state = slots.used(state, {pin("a"): 2.0})
    assert state.places[pin("a")].used_at == 9.0


def test_a_spared_one_stays_and_is_left_alone_for_a_while():
    state = slots.spared(a_state(1, a_place("a", phase="unloading")), pin("a"), 5.0, rest_s=2.0)
    place = state.places[pin("a")]
    assert (place.phase, place.used_at, place.rest_until) == ("loaded", 5.0, 7.0)


def test_what_is_told_holds_what_is_loaded_and_what_is_bad_and_is_taken_over_from():
    state = a_state(3, a_place("a"), a_place("b", engine_name="b@01234567.1", leaving=True))
    state = slots.forced(
        a_state(3, *state.places.values(), a_place("c"), room=5, foreign=1), pin("c"), 1.0
    )
    state, _ = ask(state, "d", 1.0)
    state, bad, _ = fail(state, "d", 2.0)
    before = Slots(node="n1", replica="r-1", model="m", epoch=3, limit=3, since=START)
    told = slots.told(state, before, moment(2.0), 7)
    assert told.loaded == (
        Slot(adapter="a", version=VERSION, since=START),
        Slot(
            adapter="b",
            version=VERSION,
            since=START,
            engine_name="b@01234567.1",
            leaving=True,
        ),
    )
    assert told.bad == (
        BadAdapter(
            adapter="d",
            version=VERSION,
            code=bad.code,
            reason=bad.reason,
            until=bad.until,
            whose="adapter",
        ),
    )
    assert (told.epoch, told.limit, told.room, told.foreign) == (7, 3, 5, 1)
    again = slots.adopt(3, 4, told, moment(10.0))
    assert {n: (p.engine_name, p.leaving) for n, p in again.places.items()} == {
        pin("a"): ("a@01234567", False),
        pin("b"): ("b@01234567.1", True),
    }
    assert isinstance(ask(again, "d", 10.0)[1], Refuse)
    assert slots.adopt(3, 4, None, moment(10.0)) == State(limit=3, room=4)
