"""The table of a replica's life."""

from typing import get_args

import pytest

from nodeagent.domain.lifecycle import TRANSITIONS, NotAllowed, next_phase
from schemas.replica import RUNNING_PHASES, TERMINAL_PHASES, ReplicaEvent, ReplicaPhase

TAGS = {str(event.__struct_config__.tag) for event in get_args(ReplicaEvent)}


def test_every_step_of_the_table_names_a_known_event_and_a_known_phase():
    for (before, tag), after in TRANSITIONS.items():
        assert tag in TAGS
        assert before is None or before in get_args(ReplicaPhase)
        assert after in get_args(ReplicaPhase)
        # One word, one meaning: an event leads to the phase it is named after.
        assert tag == f"replica.{after}"


def test_nothing_follows_a_terminal_phase():
    assert not [key for key in TRANSITIONS if key[0] in TERMINAL_PHASES]


def test_every_phase_can_be_reached_and_every_running_one_can_be_left_for_a_terminal_one():
    reached = set(TRANSITIONS.values())
    assert reached == set(get_args(ReplicaPhase))
    for phase in RUNNING_PHASES:
        ends = {after for (before, _), after in TRANSITIONS.items() if before == phase}
        assert ends & TERMINAL_PHASES, phase


def test_a_cold_start_and_its_idle_stop():
    phase = None
    for tag in ("starting", "ready", "ready", "draining", "ready", "draining", "stopped"):
        phase = next_phase(phase, f"replica.{tag}")
    assert phase == "stopped"


def test_a_parked_replica_comes_back_as_one_that_starts():
    phase = None
    story = "starting ready draining parked parked starting ready draining parked stopped"
    for step in story.split():
        phase = next_phase(phase, f"replica.{step}")
    assert phase == "stopped"


def test_inv_1_a_parked_replica_is_never_ready_without_having_started_again():
    """Ready means routed to, and what is parked answers nobody."""
    with pytest.raises(NotAllowed, match=r"replica\.ready cannot follow parked"):
        next_phase("parked", "replica.ready")
    with pytest.raises(NotAllowed, match=r"replica\.parked cannot follow ready"):
        next_phase("ready", "replica.parked")


def test_a_step_that_is_not_in_the_table_is_a_bug_that_says_so():
    with pytest.raises(NotAllowed, match=r"replica\.ready cannot follow stopped"):
        next_phase("stopped", "replica.ready")
    with pytest.raises(NotAllowed, match=r"replica\.ready cannot follow nothing"):
        next_phase(None, "replica.ready")
