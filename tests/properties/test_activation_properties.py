"""The table of an activation's moves: complete for a new demand, and closed."""

from typing import get_args

import pytest
from hypothesis import given
from hypothesis import strategies as st

from controlplane.domain.activation import TRANSITIONS, NoSuchMove, move, opened
from schemas.activation import (
    LIVE_PHASES,
    PENDING_PHASES,
    Activation,
    ActivationDeleted,
    ActivationEvent,
    ActivationIdle,
    ActivationLoading,
    ActivationPhase,
    ActivationPlacing,
    ActivationReady,
    ActivationRefused,
    ActivationWaiting,
    ActivationWanted,
)
from schemas.messages import tag_of
from tests.support.worlds import T0

PHASES = get_args(ActivationPhase)
EVENTS: tuple[ActivationEvent, ...] = (
    ActivationWanted(by="t"),
    ActivationPlacing(replica="r"),
    ActivationWaiting(waiting_for=("r",)),
    ActivationLoading(replica="r"),
    ActivationReady(replica="r"),
    ActivationRefused(code="no_capacity"),
    ActivationIdle(cause="t"),
)


def test_every_event_leads_to_the_phase_it_is_named_after() -> None:
    for (_, tag), phase in TRANSITIONS.items():
        assert tag == f"activation.{phase}"


def test_every_phase_can_be_left_and_reached() -> None:
    left = {before for before, _ in TRANSITIONS}
    assert left == {None, *PHASES}
    assert set(TRANSITIONS.values()) == set(PHASES)
    assert PENDING_PHASES < LIVE_PHASES < set(PHASES)


def test_a_demand_that_ended_can_begin_again_in_any_live_phase() -> None:
    for before in (None, "idle", "refused"):
        reached = {after for (b, _), after in TRANSITIONS.items() if b == before}
        assert reached >= LIVE_PHASES


def test_a_pending_demand_is_always_answered_or_given_up() -> None:
    for before in PENDING_PHASES:
        reached = {after for (b, _), after in TRANSITIONS.items() if b == before}
        assert {"ready", "refused", "idle"} <= reached


@given(st.sampled_from(PHASES), st.lists(st.sampled_from(EVENTS), max_size=6))
def test_a_move_follows_the_table_or_is_refused(
    phase: ActivationPhase, events: list[ActivationEvent]
) -> None:
    state = Activation(model="m", incarnation="i", phase=phase, wanted_at=T0, since=T0)
    for event in events:
        expected = TRANSITIONS.get((state.phase, tag_of(event)))
        if expected is None:
            with pytest.raises(NoSuchMove):
                move(state, event, T0, "t")
            return
        change = move(state, event, T0, "t")
        assert isinstance(change.state, Activation)
        assert change.state.phase == expected
        state = change.state


@given(st.sampled_from(EVENTS[:-1]))
def test_a_new_demand_forgets_what_the_last_one_was_told(event: ActivationEvent) -> None:
    refused = Activation(
        model="m",
        incarnation="old",
        phase="refused",
        wanted_at=T0,
        since=T0,
        code="start_failed",
        retry_at=T0,
        replica="r-9",
        replicas=3,
        hold_until=T0,
    )
    change = move(opened("m", "new", "any", T0, refused), event, T0, "t")
    assert isinstance(change.state, Activation)
    assert (change.state.code, change.state.retry_at, change.state.replica) == (None, None, None)
    assert (change.state.replicas, change.state.hold_until) == (1, None)
    assert change.state.incarnation == "new"


def test_a_tombstone_is_no_move() -> None:
    assert all(tag != tag_of(ActivationDeleted()) for _, tag in TRANSITIONS)
