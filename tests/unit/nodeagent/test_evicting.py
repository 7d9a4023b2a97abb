"""Who leaves a replica: least recently used among those nobody uses, asked back first, and only when there is need."""

import pytest

from nodeagent.domain import slots
from nodeagent.domain.badloads import Fault
from nodeagent.domain.evicting import RECALL_S, Facts, settle
from nodeagent.domain.pins import Use
from nodeagent.domain.slots import Load, State
from schemas import codes
from tests.support.slotting import a_place, a_state, ask, facts, moment, pin


def gone(state: State, known: Facts, at: float = 100.0) -> list[str]:
    """The adapters that are chosen to leave."""
    return [evict.place.adapter for evict in settle(state, known, at)[1].evict]


def full(*adapters: str, limit: int = 2, room: int | None = None, queue: str = "") -> State:
    """Adapters used in this order; `queue` are adapters that wait for a place."""
    places = [a_place(name, float(n)) for n, name in enumerate(adapters)]
    state = a_state(limit, *places, room=room)
    for name in queue:
        state, verdict = ask(state, name, 100.0)
        assert not isinstance(verdict, Load)
    return state


def test_req_b40_the_least_recently_used_leaves():
    assert gone(full("a", "b", "c"), facts()) == ["a"]
    state = slots.used(full("a", "b", "c"), {pin("a"): 50.0})
    assert gone(state, facts()) == ["b"]


def test_req_b40_what_gateways_tell_of_a_use_counts():
    known = Facts(uses={pin("a"): Use(used_at=70.0), pin("b"): Use(used_at=60.0)})
    assert gone(full("a", "b", "c"), known) == ["c"]


def test_req_b42_a_tie_goes_to_the_smaller_name():
    state = a_state(1, a_place("b", 5.0), a_place("a", 5.0), a_place("c", 5.0))
    assert gone(state, facts()) == ["a", "b"]


def test_req_b43_as_many_as_it_takes_to_be_within_the_limit_again():
    assert gone(full("a", "b", "c", "d", "e"), facts()) == ["a", "b", "c"]
    assert gone(full("a", "b"), facts()) == []


def test_req_b31_one_that_a_request_runs_on_never_leaves():
    assert gone(full("a", "b", "c"), facts("a", "b")) == ["c"]
    state, settled = settle(full("a", "b", "c"), facts("a", "b", "c"), 100.0)
    assert (settled.evict, settled.recall) == ((), ())
    assert len(state.places) == 3


def test_req_b41_what_was_chosen_is_chosen_once_and_never_the_one_that_is_loading():
    state, settled = settle(full("a", "b", "c"), facts(), 100.0)
    assert [e.place.adapter for e in settled.evict] == ["a"]
    assert state.places[pin("a")].phase == "unloading"
    assert gone(state, facts(), 101.0) == []
    state, verdict = ask(full("a", "b", limit=1, room=3), "c", 100.0)
    assert isinstance(verdict, Load)
    assert gone(state, facts("a")) == ["b"]


def test_req_bugb4_a_load_that_is_under_way_makes_nobody_leave_before_it_worked():
    state, verdict = ask(full("a", "b"), "c", 100.0)
    assert isinstance(verdict, Load)
    assert gone(state, facts(), 101.0) == []
    bad = Fault(whose="adapter", code=codes.RANK_TOO_HIGH, text="64 > 16")
    failed, _, _ = slots.load_failed(state, pin("c"), bad, (), (), moment(102.0))
    assert gone(failed, facts(), 102.0) == []
    done = slots.loaded(state, pin("c"), moment(102.0), engine_name="c@01234567")
    assert gone(done, facts(), 102.0) == ["a"]


def test_an_ask_that_waits_for_a_place_makes_one_leave_and_no_more():
    state = full("a", "b", "c", queue="d")
    settled_state, settled = settle(state, facts(), 100.0)
    assert [e.place.adapter for e in settled.evict] == ["a"]
    assert gone(settled_state, facts(), 100.1) == []
    assert gone(full("a", "b", "c", queue="de"), facts()) == ["a", "b"]


def test_an_ask_that_is_not_repeated_makes_nobody_leave():
    state = full("a", "b", limit=2, room=2, queue="c")
    assert gone(state, facts(), 100.0) == ["a"]
    assert gone(state, facts(), 100.0 + slots.ASKS_AGAIN_S + 0.1) == []


def test_an_idle_pin_is_asked_back_and_its_adapter_leaves_once_it_is_given_up():
    state, settled = settle(full("a", "b", "c"), facts(idle=("a", "b", "c")), 100.0)
    assert (settled.evict, settled.recall) == ((), (pin("a"),))
    assert settled.look_at == 100.0 + RECALL_S
    state, settled = settle(state, facts(idle=("b", "c")), 100.1)
    assert [e.place.adapter for e in settled.evict] == ["a"]
    assert settled.recall == ()


def test_when_a_recall_is_not_answered_the_next_in_line_is_asked_back_too():
    idle = facts(idle=("a", "b", "c"))
    state, settled = settle(full("a", "b", "c"), idle, 100.0)
    state, settled = settle(state, idle, 100.0 + RECALL_S)
    assert settled.recall == (pin("a"), pin("b"))
    state, settled = settle(state, facts(idle=("a", "c")), 101.1)
    assert [e.place.adapter for e in settled.evict] == ["b"]


def test_a_recalled_one_that_is_used_meanwhile_is_not_asked_for_any_more():
    state, _ = settle(full("a", "b", "c"), facts(idle=("a", "b", "c")), 100.0)
    _, settled = settle(state, facts("a", idle=("b", "c")), 100.2)
    assert (settled.evict, settled.recall) == ((), (pin("b"),))


def test_one_that_a_person_pinned_never_leaves_for_others_and_does_for_a_person():
    kept = facts(kept=frozenset({pin("a")}))
    assert gone(full("a", "b", "c"), kept) == ["b"]
    assert gone(slots.leaving(full("a", "b"), pin("a")), kept) == ["a"]


def test_scn_d8_what_a_person_wants_unloaded_leaves_once_nobody_uses_it():
    state = slots.leaving(full("a", "b"), pin("b"))
    assert gone(state, facts("b")) == []
    state, settled = settle(state, facts(idle=("b",)), 100.0)
    assert settled.recall == (pin("b"),)
    state, settled = settle(state, facts(), 100.5)
    assert [(e.place.adapter, e.place.why) for e in settled.evict] == [("b", "person")]


@pytest.mark.parametrize("why", ["removed", "version"])
def test_what_the_catalog_has_no_more_leaves_once_nobody_uses_it(why):
    stale = {pin("b"): why}
    assert gone(full("a", "b"), facts("b", stale=stale)) == []
    _, settled = settle(full("a", "b"), facts(stale=stale), 100.0)
    assert [(e.place.adapter, e.place.why) for e in settled.evict] == [("b", why)]


def test_one_that_leaves_anyway_is_one_that_makes_room():
    state = full("a", "b", "c")
    assert gone(state, facts(stale={pin("c"): "removed"})) == ["c"]
    state, settled = settle(state, facts(idle=("a", "b", "c"), stale={pin("c"): "removed"}), 100.0)
    assert settled.recall == (pin("c"),)


def test_nothing_leaves_while_not_every_pin_is_known():
    for state in (full("a", "b", "c"), slots.leaving(full("a", "b"), pin("a"))):
        _, settled = settle(state, facts(calm=False), 100.0)
        assert (settled.evict, settled.recall, settled.look_at) == ((), (), None)


def test_only_the_engine_knows_what_runs_for_a_gateway_that_fell_silent():
    known = Facts(uses={pin("a"): Use(silent=1, used_at=0.0)})
    _, settled = settle(full("a", "b", "c"), known, 100.0)
    assert [(e.place.adapter, e.must_know) for e in settled.evict] == [("a", True)]
    _, settled = settle(full("a", "b", "c"), facts(), 100.0)
    assert not settled.evict[0].must_know


def test_one_that_did_not_leave_is_left_alone_for_a_while_and_the_next_goes():
    state = slots.forced(full("a", "b", "c"), pin("a"), 99.0)
    state = slots.spared(state, pin("a"), 100.0, rest_s=30.0)
    state = slots.used(state, {pin("b"): 101.0, pin("c"): 102.0})
    _, settled = settle(state, facts(), 110.0)
    assert [e.place.adapter for e in settled.evict] == ["b"]
    assert settled.look_at == 130.0
    assert gone(state, facts(), 130.0) == ["a"]


def test_scn_d7_with_all_in_use_nobody_leaves_and_asks_wait():
    state = full("a", "b", "c", queue="d")
    after, settled = settle(state, facts("a", "b", "c"), 100.0)
    assert (settled.evict, settled.recall) == ((), ())
    assert ask(after, "d", 101.0)[1] == slots.Wait(why="room")
