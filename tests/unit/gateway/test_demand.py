"""When a gateway asks the control plane to start a model, and when it gives up waiting for a decision."""

from datetime import timedelta
from typing import Any

import pytest

from gateway.domain.demand import (
    Asked,
    GiveUp,
    Hold,
    Send,
    decide,
    is_refused,
    message_id,
)
from gateway.domain.table import NO_ACTIVATION, ActivationEntry
from schemas.activation import ActivationPhase
from tests.support.gateway_world import NOW, an_activation


def entry(phase: ActivationPhase = "idle", rev: int = 3, **fields: Any) -> ActivationEntry:
    return ActivationEntry(activation=an_activation(phase, **fields), rev=rev, seq=10)


def look(
    head: ActivationEntry = NO_ACTIVATION, asked: Asked | None = None, **fields: Any
) -> Send | Hold | GiveUp:
    defaults: dict[str, Any] = {
        "model": "m",
        "scope": "any",
        "oldest_joined_s": 0.0,
        "refused": False,
        "reached": True,
        "now_s": 0.0,
        "now": NOW,
        "resend_s": 2.0,
        "no_decision_s": 5.0,
    }
    return decide(head, asked, **(defaults | fields))


def asked(rev: int = 0, since_s: float = 0.0, last_sent_s: float = 0.0) -> Asked:
    return Asked(
        rev=rev,
        message_id=message_id("m", "any", rev, NOW),
        since_s=since_s,
        last_sent_s=last_sent_s,
    )


def test_the_first_request_of_a_model_asks_for_it() -> None:
    sent = look()
    assert isinstance(sent, Send)
    window = int(NOW.timestamp()) // 30
    assert sent.message_id == f"activate-m-any-0-{window}"
    assert sent.asked.rev == 0


def test_nobody_who_waits_asks_for_nothing_and_the_open_wish_stands() -> None:
    assert look(asked=asked(), oldest_joined_s=None, now_s=100) == Hold(until_s=None, asked=asked())


@pytest.mark.parametrize("phase", ["wanted", "placing", "waiting", "loading"])
def test_req_a26_a_pending_activation_is_joined_and_nothing_is_sent(phase: ActivationPhase) -> None:
    assert look(entry(phase), now_s=1000.0) == Hold(until_s=None, asked=None)


def test_inv_11_one_wish_per_revision_however_many_ask() -> None:
    first = look()
    assert isinstance(first, Send)
    for _ in range(1000):
        again = look(asked=first.asked, now_s=1.0, oldest_joined_s=0.5)
        assert again == Hold(until_s=2.0, asked=first.asked)


def test_inv_11_a_standing_refusal_sends_nothing() -> None:
    refused = entry("refused", code="no_capacity", retry_at=NOW + timedelta(seconds=30))
    assert is_refused(refused, NOW)
    assert look(refused, refused=True) == Hold(until_s=None, asked=None)


def test_a_refusal_that_is_over_or_overtaken_stands_no_more() -> None:
    refused = entry("refused", code="no_capacity", retry_at=NOW + timedelta(seconds=30))
    assert not is_refused(refused, NOW + timedelta(seconds=30))
    # The entry was changed, or its record cleared, behind the refusal (sequence 10).
    assert not is_refused(refused, NOW, renewed_at_seq=11)
    assert is_refused(refused, NOW, renewed_at_seq=9)
    assert isinstance(look(refused), Send)
    assert not is_refused(entry("refused", code="no_capacity"), NOW)


def test_without_a_decision_the_same_message_goes_out_again() -> None:
    again = look(asked=asked(), now_s=2.0)
    assert isinstance(again, Send)
    assert again.message_id == asked().message_id
    assert again.asked == asked(last_sent_s=2.0)
    # Also across the border of a window: it is the same wish.
    later = look(asked=asked(), now_s=2.0, now=NOW + timedelta(seconds=29.9))
    assert isinstance(later, Send)
    assert later.message_id == again.message_id


def test_a_wish_older_than_its_window_becomes_a_new_message() -> None:
    later = NOW + timedelta(seconds=31)
    again = look(asked=asked(), now_s=31.0, oldest_joined_s=30.0, now=later)
    assert isinstance(again, Send)
    assert again.message_id == message_id("m", "any", 0, later)
    assert again.asked.since_s == 31.0


def test_five_seconds_without_a_decision_end_the_wait() -> None:
    assert look(asked=asked(last_sent_s=4.0), now_s=5.0) == GiveUp(joined_until_s=0.0)
    # Who came later gets its own five seconds.
    held = look(asked=asked(last_sent_s=4.0), now_s=5.0, oldest_joined_s=3.0)
    assert held == Hold(until_s=6.0, asked=asked(last_sent_s=4.0))


def test_a_new_revision_is_a_new_wish() -> None:
    sent = look(entry("idle", rev=4), asked(rev=0), now_s=1.0)
    assert isinstance(sent, Send)
    assert sent.asked.rev == 4
    assert "-4-" in sent.message_id


def test_a_ready_replica_out_of_reach_is_nothing_to_ask_for() -> None:
    assert look(entry("ready"), reached=False, now_s=1.0) == Hold(until_s=5.0, asked=None)
    assert look(entry("ready"), reached=False, now_s=5.0) == GiveUp(joined_until_s=0.0)


def test_a_model_whose_replica_is_gone_is_asked_for_again() -> None:
    assert isinstance(look(entry("ready")), Send)
