"""What becomes of what an earlier agent left, by value."""

import pytest
from msgspec.structs import replace

from nodeagent.domain.adoption import fate, remembered
from schemas.plan import Plan
from tests.support.agent_yard import a_held as held
from tests.support.agent_yard import a_launch, a_stop, an_item

STARTING = held(phase="starting", launch=a_launch())


@pytest.mark.parametrize("phase", ["starting", "ready", "draining", "parked", "stop_failed"])
def test_req_x5_a_living_engine_of_a_known_launch_is_kept(phase):
    known = held(phase=phase)
    assert fate(known, None, "running") == "keep"
    assert fate(known, known.replica, "running") == "keep"


@pytest.mark.parametrize("phase", ["starting", "ready", "draining", "parked", "stop_failed"])
def test_an_engine_that_ended_meanwhile_is_declared_gone(phase):
    assert fate(held(phase=phase), None, "ended") == "gone"


def test_scn_a10_an_engine_nobody_knows_is_killed():
    assert fate(None, None, "running") == "kill"
    assert fate(held(phase="stopped"), None, "running") == "kill"


def test_an_engine_the_log_says_is_over_is_killed():
    over = held(phase="failed").replica
    assert fate(held(), over, "running") == "kill"
    assert fate(None, over, "running") == "kill"
    assert fate(held(), over, "ended") == "rest"


def test_a_start_that_never_had_a_process_is_begun_and_only_that():
    assert fate(STARTING, None, "nothing") == "launch"
    assert fate(held(phase="starting"), None, "nothing") == "gone"
    halted = held(phase="starting", launch=a_launch(), ending=True)
    assert fate(halted, None, "nothing") == "gone"
    assert fate(held(phase="ready", launch=a_launch()), None, "nothing") == "gone"


def test_inv_4_what_came_back_from_being_parked_is_no_start_to_be_begun():
    for again in (
        replace(STARTING, resuming=True),
        held(phase="starting", launch=a_launch(), park_way="sleep"),
    ):
        assert fate(again, None, "nothing") == "gone"


def test_a_fetch_is_gone_on_with_and_what_runs_in_its_place_is_not_believed():
    fetching = held(phase="fetching", launch=a_launch(source="mirror:k"))
    assert fate(fetching, None, "nothing") == "launch"
    assert fate(fetching, fetching.replica, "nothing") == "launch"
    # Told to end, or nobody knows any more what was to be fetched.
    assert fate(held(phase="fetching", launch=a_launch(), ending=True), None, "nothing") == "gone"
    assert fate(held(phase="fetching"), None, "nothing") == "gone"
    # Its start was not remembered: port and memory of that process are nobody's.
    assert fate(fetching, None, "running") == "gone"
    assert fate(fetching, None, "ended") == "gone"


def test_what_is_over_and_gone_needs_nothing():
    assert fate(None, None, "ended") == "rest"
    assert fate(held(phase="stopped"), None, "nothing") == "rest"


def test_inv_7_without_a_journal_log_and_plan_tell_how_to_go_on():
    told = held(phase="ready", endpoint="http://127.0.0.1:20007").replica
    item = an_item("r-1", stop=a_stop())
    again = remembered(told, 0, Plan(node="n1", items=(item,)))
    assert (again.port, again.launch, again.stop) == (20007, item.launch, None)
    draining = held(phase="draining").replica
    assert remembered(draining, 5, Plan(node="n1", items=(item,))).stop == item.stop
    assert remembered(draining, 5, None).port == 5
    assert remembered(held(phase="starting").replica, 0, None).port == 0


def test_one_that_stands_in_line_waits_on_and_was_never_started():
    waiting = held(phase="waiting", launch=a_launch())
    assert fate(waiting, None, "nothing") == "rest"
    assert fate(waiting, waiting.replica, "nothing") == "rest"
