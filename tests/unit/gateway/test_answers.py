"""The code table of refusals: status, Retry-After, x-should-retry, and the envelope, row by row."""

import json
from datetime import datetime, timedelta
from typing import Any

import pytest

from gateway.domain.answers import (
    CODES,
    Code,
    answer,
    backoff_left_s,
    clamp_retry_s,
    load_left_s,
    measured_load_s,
    no_room_at_all,
)
from schemas.record import Failures, Measured, Record
from tests.support.gateway_world import NOW, an_activation


@pytest.mark.parametrize(
    ("code", "status", "retry_after", "should_retry"),
    [
        ("model_not_found", 404, None, "false"),
        ("model_off", 503, None, "false"),
        ("model_loading", 503, "7", "true"),
        ("no_capacity", 503, "7", "true"),
        ("start_failed", 503, "7", "true"),
        ("model_quarantined", 503, "60", "false"),
        ("queue_full", 503, "7", "true"),
        ("model_busy", 503, "7", "true"),
        ("card_kept", 503, "60", "true"),
        ("draining", 503, "1", "true"),
        ("yard_unavailable", 503, "5", "true"),
        ("engine_error", 502, None, "true"),
        ("route_not_forwarded", 403, None, "false"),
        ("endpoint_not_supported", 501, None, "false"),
        ("response_not_found", 404, None, "false"),
        ("invalid_request", 400, None, "false"),
        ("request_too_large", 413, None, "false"),
        ("unsupported_media_type", 415, None, "false"),
    ],
)
def test_req_x6_each_code_says_whether_and_when_to_come_back(
    code: Code, status: int, retry_after: str | None, should_retry: str
) -> None:
    told = answer(code, "why", retry_s=6.2)
    headers = {k.decode(): v.decode() for k, v in told.headers()}
    assert told.status == status
    assert headers.get("retry-after") == retry_after
    assert headers.get("x-should-retry") == should_retry


def test_the_refusal_at_once_for_want_of_room_is_not_to_be_repeated() -> None:
    told = no_room_at_all("too large")
    assert (told.status, told.code, told.retry_after_s, told.should_retry) == (
        503,
        "no_capacity",
        60,
        False,
    )


def test_the_body_is_openais_envelope() -> None:
    told = answer("model_not_found", "The model 'x' does not exist.", param="model")
    assert json.loads(told.body()) == {
        "error": {
            "message": "The model 'x' does not exist.",
            "type": "invalid_request_error",
            "param": "model",
            "code": "model_not_found",
        }
    }


def test_req_a13_every_code_has_one_meaning_of_its_own() -> None:
    assert CODES["model_loading"] != CODES["model_not_found"]
    assert {c for c, row in CODES.items() if row.status == 404} == {
        "model_not_found",
        "card_not_found",
        "response_not_found",
        "not_found",
    }


@pytest.mark.parametrize(
    ("seconds", "told"), [(-5, 1), (0, 1), (0.2, 1), (1.01, 2), (59.2, 60), (900, 60)]
)
def test_req_a25_retry_after_is_whole_seconds_from_1_to_60(seconds: float, told: int) -> None:
    assert clamp_retry_s(seconds) == told


def at(seconds: float) -> datetime:
    return NOW + timedelta(seconds=seconds)


def a_record(*load_s: float, **fields: Any) -> Record:
    measured = (Measured(profile="cpu", card_kind="cpu", memory_bytes=1, load_s=load_s),)
    return Record(model="m", incarnation="inc-m", measured=measured, **fields)


def test_req_a25_the_time_left_of_a_load_comes_from_what_was_measured() -> None:
    loading = an_activation("loading", expected_ready_at=at(20))
    assert load_left_s(loading, None, NOW) == 20
    assert load_left_s(loading, None, at(12)) == 8
    assert load_left_s(loading, None, at(19.9)) == 1


def test_req_a25_a_load_not_begun_counts_whole_and_an_overdue_one_a_quarter_more() -> None:
    placing = an_activation("placing")
    assert load_left_s(placing, a_record(10, 12, 8), at(2)) == 10
    assert load_left_s(placing, a_record(10, 12, 8), at(40)) == 10
    overdue = an_activation("loading", expected_ready_at=at(20))
    assert load_left_s(overdue, None, at(80)) == 20
    # Nothing was ever measured.
    assert load_left_s(placing, None, at(8)) == 2
    assert load_left_s(placing, None, NOW) == 1
    assert load_left_s(None, None, NOW) == 1


def test_the_longest_of_the_last_loads_counts() -> None:
    assert measured_load_s(a_record(10, 12, 8), "cpu") == 12
    assert measured_load_s(a_record(10, 12, 8), "gpu") is None
    assert measured_load_s(a_record(10, 12, 8), None) == 12
    assert measured_load_s(None, "cpu") is None


def test_a_backoff_ends_with_the_next_allowed_start() -> None:
    refused = an_activation("refused", code="start_failed", retry_at=at(15))
    assert backoff_left_s(refused, None, at(5)) == 10
    failures = tuple(
        Failures(
            profile="cpu",
            node="n1",
            card=card,
            revision="v1",
            count=1,
            last_at=NOW,
            next_allowed_at=at(next_s),
        )
        for card, next_s in (("gpu0", 30.0), ("gpu1", 20.0), ("gpu2", -1.0))
    )
    assert backoff_left_s(None, a_record(failures=failures), NOW) == 20
    assert backoff_left_s(refused, None, at(16)) == 1
