"""What the head of an answer means for a fetch: taken, begun anew, tried later, refused."""

from datetime import UTC, datetime
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from controlplane.mirror.domain.answers import (
    Anew,
    Asked,
    Later,
    Refused,
    Take,
    Verdict,
    judge,
)
from controlplane.registry import faults
from schemas import codes

NOW = datetime(2026, 5, 4, 12, 0, tzinfo=UTC)
ASKED = Asked(
    path="m.gguf", repo="owner/repo", total=100, offset=0, origin="registry", place="hub.test"
)
REST = msgspec.structs.replace(ASKED, offset=40)


def judged(status: int, asked: Asked = ASKED, **headers: str) -> Verdict:
    return judge(
        status, {name.replace("_", "-"): text for name, text in headers.items()}, asked, NOW
    )


def changed(asked: Asked, **changes: Any) -> Asked:
    return msgspec.structs.replace(asked, **changes)


def test_a_whole_file_is_taken_from_its_first_byte() -> None:
    assert judged(200, content_length="100", etag='"v"') == Take(offset=0, length=100, etag='"v"')
    assert judged(200) == Take(offset=0, length=None, etag="")
    assert judged(200, etag='W/"v"') == Take(offset=0, length=None, etag="")


def test_a_200_to_a_range_is_the_whole_file_again() -> None:
    assert judged(200, REST, content_length="100") == Take(offset=0, length=100, etag="")


def test_the_rest_is_taken_when_it_is_the_rest() -> None:
    assert judged(206, REST, content_range="bytes 40-99/100", content_length="60") == Take(
        offset=40, length=60, etag=""
    )


@pytest.mark.parametrize(
    "headers",
    [
        {},
        {"content_type": "multipart/byteranges"},
        {"content_range": "bytes 0-99/100"},
        {"content_range": "bytes 41-99/100"},
        {"content_range": "bytes 40-120/*"},
        {"content_range": "bytes 40-99/100", "content_length": "59"},
    ],
)
def test_a_part_that_is_not_surely_the_rest_is_never_appended(headers: dict[str, str]) -> None:
    assert isinstance(judged(206, REST, **headers), Anew)


def test_a_part_of_a_file_of_another_size_is_refused_with_both() -> None:
    refused = judged(206, REST, content_range="bytes 40-98/99")
    assert isinstance(refused, Refused)
    assert refused.code == codes.SIZE_MISMATCH
    assert "99 bytes" in refused.sentence
    assert "100" in refused.sentence


def test_another_version_is_begun_anew_when_no_sha256_would_tell() -> None:
    mine = changed(REST, etag='"v1"')
    headers = {"content_range": "bytes 40-99/100"}
    assert isinstance(judged(206, mine, etag='"v2"', **headers), Anew)
    assert isinstance(judged(206, mine, **headers), Anew)
    assert isinstance(judged(206, mine, etag='"v1"', **headers), Take)
    assert isinstance(judged(206, changed(mine, checked=True), etag='"v2"', **headers), Take)


def test_a_416_begins_anew_or_tells_the_true_size() -> None:
    assert isinstance(judged(416, REST), Anew)
    assert isinstance(judged(416, REST, content_range="bytes */100"), Anew)
    refused = judged(416, REST, content_range="bytes */30")
    assert isinstance(refused, Refused)
    assert refused.code == codes.SIZE_MISMATCH
    assert isinstance(judged(416), Refused)


@pytest.mark.parametrize("status", [408, 425, 429, 500, 502, 503, 504, 599])
def test_what_passes_is_tried_again(status: int) -> None:
    later = judged(status, retry_after="9")
    assert isinstance(later, Later)
    assert later.retry_after_s == 9.0
    assert str(status) in later.sentence or later.code == codes.RATE_LIMITED


def test_too_many_requests_has_its_code() -> None:
    later = judged(429)
    assert isinstance(later, Later)
    assert later.code == codes.RATE_LIMITED


@pytest.mark.parametrize(
    ("status", "with_token", "error", "code"),
    [
        (401, False, "GatedRepo", codes.NEEDS_TOKEN),
        (401, False, "", codes.REPO_NOT_FOUND),
        (403, False, "", codes.NEEDS_TOKEN),
        (403, True, "GatedRepo", codes.LICENCE_NOT_ACCEPTED),
        (403, True, "", codes.TOKEN_REFUSED),
        (401, True, "", codes.TOKEN_REFUSED),
        (401, False, "RepoNotFound", codes.REPO_NOT_FOUND),
        (404, True, "RepoNotFound", codes.REPO_NOT_FOUND),
        (404, True, "RevisionNotFound", codes.REVISION_NOT_FOUND),
        (404, True, "EntryNotFound", codes.NO_SUCH_FILE),
        (404, False, "", codes.NO_SUCH_FILE),
        (410, False, "", codes.NO_SUCH_FILE),
        (418, False, "", codes.REGISTRY_ANSWER),
    ],
)
def test_scn_c8_every_refusal_has_its_own_code_and_sentence(
    status: int, with_token: bool, error: str, code: str
) -> None:
    refused = judged(status, changed(ASKED, with_token=with_token), x_error_code=error)
    assert isinstance(refused, Refused)
    assert refused.code == code
    assert "owner/repo" in refused.sentence or "hub.test" in refused.sentence


def test_scn_c8_without_a_token_and_without_the_licence_are_two_sentences() -> None:
    without = judged(401, x_error_code="GatedRepo")
    unlicensed = judged(403, changed(ASKED, with_token=True), x_error_code="GatedRepo")
    assert isinstance(without, Refused)
    assert isinstance(unlicensed, Refused)
    assert "needs a token" in without.sentence
    assert "licence" in unlicensed.sentence
    for refused in (without, unlicensed):
        assert "not found" not in refused.sentence
        assert "no file" not in refused.sentence


@pytest.mark.parametrize("status", [401, 403, 404, 429, 503])
def test_what_a_registry_wrote_is_never_repeated(status: int) -> None:
    """It may hold anything: the token it was just shown, for one. The sentence becomes an event."""
    asked = changed(ASKED, with_token=True)
    verdict = judged(status, asked, x_error_message="your token hf_secret is not welcome")
    assert isinstance(verdict, Refused | Later)
    assert "hf_secret" not in verdict.sentence


@pytest.mark.parametrize("with_token", [False, True])
@pytest.mark.parametrize("error", ["", "GatedRepo", "RepoNotFound", "EntryNotFound"])
@pytest.mark.parametrize("status", [400, 401, 403, 404, 410, 418, 425, 429, 500])
def test_a_listing_and_a_fetch_say_the_same_of_an_answer(
    status: int, error: str, with_token: bool
) -> None:
    verdict = judged(status, changed(ASKED, with_token=with_token), x_error_code=error)
    question = faults.Asked(
        endpoint="https://hub.test", repo="owner/repo", path="m.gguf", with_token=with_token
    )
    fault = faults.of_answer(question, status, {"x-error-code": error}, NOW)
    assert isinstance(verdict, Refused | Later)
    assert (verdict.code, verdict.sentence) == (fault.code, fault.sentence)


def test_an_address_we_were_sent_to_may_have_expired() -> None:
    for status in (400, 401, 403, 404, 410):
        assert isinstance(judged(status, changed(ASKED, redirected=True)), Later)


def test_what_another_mirror_refuses_is_asked_elsewhere() -> None:
    asked = changed(ASKED, origin="mirror", place="mirror cp-2", with_token=True)
    for status in (401, 403, 404, 405):
        refused = judged(status, asked)
        assert isinstance(refused, Refused)
        assert refused.sentence == f"mirror cp-2 answers {status} for m.gguf"


def test_encoded_bytes_are_not_the_file() -> None:
    assert isinstance(judged(200, content_encoding="gzip"), Refused)
    assert isinstance(judged(200, content_encoding="identity"), Take)


@given(
    st.integers(100, 599),
    st.dictionaries(
        st.sampled_from(["content-range", "content-length", "etag", "retry-after", "x-error-code"]),
        st.text(max_size=30),
    ),
    st.integers(0, 99),
    st.booleans(),
)
def test_no_answer_makes_bytes_go_to_a_wrong_place(
    status: int, headers: dict[str, str], offset: int, checked: bool
) -> None:
    verdict = judge(status, headers, changed(ASKED, offset=offset, checked=checked), NOW)
    if isinstance(verdict, Take):
        assert verdict.offset in (0, offset)
        assert status in (200, 206)
