"""Which replica a request goes to, and what happens to one that lost its own."""

from collections import Counter
from datetime import timedelta
from typing import get_args
from urllib.parse import unquote

import pytest

from gateway.domain.http_rules import check_header
from gateway.domain.reasons import reason_headers
from gateway.domain.routing import (
    Loss,
    after_loss,
    choose,
    end_of_answers,
    end_of_drain,
    loss_by_log,
)
from schemas.plan import StopReason
from schemas.replica import Replica, ReplicaPhase
from tests.support.gateway_world import NOW, a_replica


def chosen_id(replicas: list[Replica], key: str) -> str | None:
    chosen = choose(replicas, {}, key=key)
    return chosen.id if chosen is not None else None


def test_no_candidate_is_no_choice_and_one_is_that() -> None:
    assert choose([], {}, key="gw") is None
    one = a_replica("r-1")
    assert choose([one], {"r-1": 99}, key="gw") == one


def test_the_least_busy_for_its_weight_is_chosen() -> None:
    light, heavy = a_replica("r-1", weight=1), a_replica("r-2", weight=3)
    assert choose([light, heavy], {}, key="gw") == heavy
    assert choose([light, heavy], {"r-2": 2}, key="gw") in (light, heavy)
    assert choose([light, heavy], {"r-2": 3}, key="gw") == light


def test_weights_are_shares_of_what_runs() -> None:
    replicas = [a_replica("r-1", weight=1), a_replica("r-2", weight=3)]
    inflight: Counter[str] = Counter()
    for _ in range(400):
        chosen = choose(replicas, inflight, key="gw")
        assert chosen is not None
        inflight[chosen.id] += 1
    assert inflight == {"r-1": 100, "r-2": 300}


def test_a_replica_of_weight_zero_counts_as_one() -> None:
    replicas = [a_replica("r-1", weight=0), a_replica("r-2", weight=1)]
    assert choose(replicas, {"r-2": 1}, key="gw") == replicas[0]


def test_ties_are_total_and_do_not_depend_on_the_order() -> None:
    replicas = [a_replica(f"r-{n}") for n in range(6)]
    chosen = {chosen_id(order, "gw-1") for order in (replicas, replicas[::-1])}
    assert len(chosen) == 1
    # Gateways spread over equals.
    spread = {chosen_id(replicas, f"gw-{n}") for n in range(64)}
    assert len(spread) > 3


@pytest.mark.parametrize("loss", ["refused_connection", "broke", "not_this_launch", "crashed"])
def test_an_unplanned_loss_goes_back_once(loss: Loss) -> None:
    assert after_loss(loss, unplanned_before=0, planned_before=5) == "again"
    assert after_loss(loss, unplanned_before=1, planned_before=0) == "engine_error"


def test_inv_1_a_planned_stop_never_uses_up_the_retry() -> None:
    assert after_loss("stopped", unplanned_before=1, planned_before=0) == "again"
    assert after_loss("stopped", unplanned_before=0, planned_before=3) == "again"
    assert after_loss("stopped", unplanned_before=0, planned_before=8) == "engine_error"


@pytest.mark.parametrize(
    ("phase", "loss"),
    [
        ("ready", None),
        ("draining", None),
        ("stopped", "stopped"),
        ("parked", "stopped"),
        ("stop_failed", "stopped"),
        # Ready once, and starting again under its id: it was parked in between.
        ("starting", "stopped"),
        ("failed", "crashed"),
    ],
)
def test_what_the_log_says_of_a_replica_ends_requests_there_or_not(
    phase: ReplicaPhase, loss: Loss | None
) -> None:
    assert loss_by_log(a_replica(phase=phase), a_replica()) == loss


def test_another_launch_under_the_same_id_ends_them_too() -> None:
    assert loss_by_log(a_replica(pid=7), a_replica(pid=6)) == "not_this_launch"
    assert loss_by_log(a_replica(endpoint="http://x:1"), a_replica()) == "not_this_launch"
    assert loss_by_log(None, a_replica()) == "stopped"


def test_a_replica_that_is_ready_for_a_second_time_was_parked_in_between() -> None:
    before = a_replica(ready_at=NOW)
    again = a_replica(ready_at=NOW + timedelta(minutes=5))
    assert loss_by_log(again, before) == "stopped"
    # An idle stop that was taken back is the same readiness.
    assert loss_by_log(a_replica(ready_at=NOW, taken_back="d-1"), before) is None


@pytest.mark.parametrize(
    ("phase", "told"),
    [
        ("ready", None),
        ("draining", None),
        ("stopped", "the engine r-1 was stopped: claim doom"),
        ("stop_failed", "the engine r-1 was stopped: claim doom"),
        ("parked", "the engine r-1 was parked: claim doom"),
        ("failed", "the engine r-1 failed: claim doom"),
    ],
)
def test_an_answer_that_has_begun_ends_with_its_engine_and_says_why(
    phase: ReplicaPhase, told: str | None
) -> None:
    assert end_of_answers(a_replica(phase=phase, reason="claim doom"), "r-1") == told


NOT_ALONE = ("park", "lease", "claim", "vm", "ram")
"""Reasons that are told with what the replica makes way for, or after which it lives on."""


@pytest.mark.parametrize("word", sorted(set(get_args(StopReason)) - set(NOT_ALONE)))
def test_a_word_of_the_log_is_told_as_what_it_means(word: str) -> None:
    told = end_of_answers(a_replica(phase="stopped", reason=word), "r-1")
    assert told is not None
    assert len(told.split(": ", 1)[1].split()) > 2, told


def test_inv_1_a_forced_drain_ends_what_runs_there_before_the_engine_is_gone() -> None:
    """A game does not wait until an engine has taken the polite signal."""
    forced = a_replica(phase="draining", forced=True, reason="claim doom")
    assert loss_by_log(forced, a_replica()) == "stopped"
    assert end_of_answers(forced, "r-1") == "the engine r-1 was stopped: claim doom"
    # Called off: it is ready again, and what the drain was like is of no matter.
    back = a_replica(phase="ready", forced=True)
    assert loss_by_log(back, a_replica()) is None
    assert end_of_answers(back, "r-1") is None


def test_a_connection_that_breaks_in_a_drain_tells_for_whom_the_engine_left() -> None:
    """The bound of a drain ends the engine, and its connections break before the event arrives."""
    leaving = a_replica(phase="draining", reason="makes way for claim c-1")
    assert end_of_answers(leaving, "r-1") is None
    told = "the engine r-1 was stopped: makes way for claim c-1"
    assert end_of_drain(leaving, "r-1") == told
    assert end_of_drain(a_replica(phase="ready"), "r-1") is None
    assert end_of_drain(None, "r-1") is None


def test_an_engine_that_left_no_word_is_gone() -> None:
    assert end_of_answers(None, "r-1") == "the engine r-1 is gone"


def test_what_other_gateways_have_running_counts_like_our_own() -> None:
    replicas = [a_replica("r-1"), a_replica("r-2")]
    assert choose(replicas, {"r-1": 1}, key="gw", others={"r-2": 3}) == replicas[0]
    assert choose(replicas, {"r-1": 4}, key="gw", others={"r-2": 3}) == replicas[1]
    # What is told of a replica that is no candidate changes nothing.
    assert choose(replicas, {"r-1": 1}, key="gw", others={"r-9": 9}) == replicas[1]


def test_reasons_are_headers_whatever_the_name() -> None:
    found = dict(reason_headers("größe/klein: v1\r\nx", "r-1", "least-loaded"))
    assert found[b"x-yard-replica"] == b"r-1"
    assert found[b"x-yard-why"] == b"least-loaded"
    name = found[b"x-yard-model"]
    assert unquote(name.decode()) == "größe/klein: v1\r\nx"
    assert name.startswith(b"gr%C3%B6%C3%9Fe/klein:%20v1")
    for header in found.items():
        check_header(*header)
