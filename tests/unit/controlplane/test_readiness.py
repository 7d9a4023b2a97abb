"""Readiness: what turns it red, and that the sentence names it."""

from typing import Any

import pytest

from controlplane.readiness import Facts, ProjectionFacts, assess

GOOD = ProjectionFacts(position=7, synced=True)


def facts(**given: Any) -> Facts:
    return Facts(**{"connected": True, "projections": {"world": GOOD, "sqlite": GOOD}, **given})


def test_nothing_wrong_is_ready() -> None:
    assert assess(facts(stuck={"m": 1.0}, turn_s=0.2, conflicts=3)) == ()


@pytest.mark.parametrize(
    ("given", "code", "named"),
    [
        ({"connected": False}, "nats_unavailable", "NATS"),
        (
            {
                "projections": {
                    "sqlite": ProjectionFacts(position=7, synced=True, stopped="event 8")
                }
            },
            "projection_stopped",
            "sqlite stopped: event 8",
        ),
        (
            {"projections": {"world": ProjectionFacts(position=7, synced=False)}},
            "not_synced",
            "world has not caught up (at 7)",
        ),
        ({"turn_s": 21.0}, "loop_stuck", "21 s"),
        ({"conflicts": 20}, "loop_stuck", "20 decisions"),
        ({"stuck": {"activation qwen": 6.0}}, "demand_stuck", "activation qwen"),
        ({"alarms": {"log_full": "the log is full"}}, "log_full", "the log is full"),
    ],
)
def test_each_fault_is_named(given: dict[str, Any], code: str, named: str) -> None:
    (finding,) = assess(facts(**given))
    assert finding.code == code
    assert named in finding.sentence


def test_a_stopped_projection_comes_first_and_is_not_also_behind() -> None:
    stopped = ProjectionFacts(position=7, synced=False, stopped="event 8")
    found = assess(facts(connected=False, projections={"sqlite": stopped, "world": GOOD}))
    assert [f.code for f in found] == ["projection_stopped", "nats_unavailable"]
