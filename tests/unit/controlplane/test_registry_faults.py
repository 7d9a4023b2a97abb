"""What an answer of the registry means: status and headers in, code and sentence out."""

from datetime import UTC, datetime

import pytest
from hypothesis import given
from hypothesis import strategies as st

from controlplane.registry import faults
from controlplane.registry.faults import Asked

NOW = datetime(2026, 1, 1, tzinfo=UTC)
ASKED = Asked(
    endpoint="https://user:secret@hub.example/", repo="o/m", revision="c" * 40, path="m.gguf"
)


def asked(with_token: bool) -> Asked:
    return Asked(endpoint="https://hub.example", repo="o/m", with_token=with_token)


@pytest.mark.parametrize(
    ("status", "headers", "bare", "with_token"),
    [
        (401, {"X-Error-Code": "GatedRepo"}, "needs_token", "licence_not_accepted"),
        (403, {"x-error-code": "GatedRepo"}, "needs_token", "licence_not_accepted"),
        (404, {"X-Error-Code": "RepoNotFound"}, "repo_not_found", "repo_not_found"),
        (404, {}, "repo_not_found", "repo_not_found"),
        (410, {}, "repo_not_found", "repo_not_found"),
        (401, {}, "repo_not_found", "token_refused"),
        (401, {"X-Error-Code": "RepoNotFound"}, "repo_not_found", "token_refused"),
        (404, {"X-Error-Code": "RevisionNotFound"}, "revision_not_found", "revision_not_found"),
        (404, {"X-Error-Code": "EntryNotFound"}, "no_such_file", "no_such_file"),
        (403, {"X-Error-Message": faults.DISABLED}, "repo_disabled", "repo_disabled"),
        (403, {}, "needs_token", "token_refused"),
        (429, {}, "rate_limited", "rate_limited"),
        (408, {}, "registry_unreachable", "registry_unreachable"),
        (500, {}, "registry_unreachable", "registry_unreachable"),
        (599, {}, "registry_unreachable", "registry_unreachable"),
        (418, {}, "registry_answer", "registry_answer"),
        (304, {}, "registry_answer", "registry_answer"),
        (400, {}, "registry_answer", "registry_answer"),
    ],
)
def test_what_an_answer_means(
    status: int, headers: dict[str, str], bare: str, with_token: str
) -> None:
    assert faults.of_answer(asked(False), status, headers, NOW).code == bare
    assert faults.of_answer(asked(True), status, headers, NOW).code == with_token


@pytest.mark.parametrize(
    ("headers", "wait_s"),
    [
        ({}, None),
        ({"Retry-After": "12"}, 12.0),
        ({"retry-after": " 0 "}, 0.0),
        ({"Retry-After": "Thu, 01 Jan 2026 00:01:30 GMT"}, 90.0),
        ({"Retry-After": "Wed, 31 Dec 2025 00:00:00 GMT"}, 0.0),
        ({"Retry-After": "Thu, 01 Jan 2026 00:01:30 -0000"}, 90.0),
        ({"Retry-After": "soon"}, None),
        ({"Retry-After": "-5"}, None),
        ({"Retry-After": "9" * 400}, None),
        ({"RateLimit": '"api";r=0;t=55'}, 55.0),
        ({"ratelimit": '"api"; r=0; t=55'}, 55.0),
        ({"RateLimit": '"api";r=7;t=55'}, None),
        ({"Retry-After": "3", "RateLimit": '"api";r=0;t=55'}, 3.0),
    ],
)
def test_how_long_a_rate_limit_asks_to_wait(headers: dict[str, str], wait_s: float | None) -> None:
    fault = faults.of_answer(asked(True), 429, headers, NOW)
    assert (fault.wait_s, fault.transient) == (wait_s, True)
    assert ("it asks to wait" in fault.sentence) == (wait_s is not None)


def test_only_what_may_pass_is_transient() -> None:
    passing = {
        status for status in range(300, 600) if faults.of_answer(ASKED, status, {}, NOW).transient
    }
    assert passing == {408, 425, 429, *range(500, 600)}


def test_an_address_is_shown_without_its_password() -> None:
    for status in (401, 403, 404, 418, 429, 503):
        assert "secret" not in faults.of_answer(ASKED, status, {}, NOW).sentence
    for fault in (
        faults.needs_token(ASKED),
        faults.unreachable(ASKED, "x"),
        faults.no_endpoint("ftp://user:secret@hub.example"),
        faults.garbage(ASKED, "x"),
        faults.stored_elsewhere(ASKED, "cdn.example", "x"),
    ):
        assert "secret" not in fault.sentence


@given(
    status=st.integers(100, 999),
    headers=st.dictionaries(
        st.sampled_from(
            ["X-Error-Code", "X-Error-Message", "Retry-After", "RateLimit", "Location"]
        ),
        st.text(max_size=40),
    ),
    with_token=st.booleans(),
)
def test_any_answer_gives_one_printable_sentence(
    status: int, headers: dict[str, str], with_token: bool
) -> None:
    fault = faults.of_answer(asked(with_token), status, headers, NOW)
    assert fault.code
    assert fault.sentence.isprintable()
    assert len(fault.sentence) < 400
    # What the registry sent is never repeated: it might hold anything.
    for value in headers.values():
        if len(value) > 8 and not value.isascii():
            assert value not in fault.sentence
