"""What a key used in a minute, and what is told of it."""

import random

import pytest

from gateway.domain.ledger import Ledger
from gateway.domain.ratelimits import Reading, Refused, Window, limit_headers, refusal
from schemas.key import Key
from tests.support.gateway_keys import a_key


def test_a_window_counts_what_is_of_the_last_60_seconds_and_never_less() -> None:
    dice = random.Random(1)
    window, added, now_s = Window(), [], 5000.0
    for _ in range(3000):
        now_s += dice.choice((0.0, 0.01, 0.4, 1.0, 3.7, 61.0 if dice.random() < 0.02 else 0.1))
        window.move(int(now_s))
        exact = sum(n for at_s, n in added if at_s > now_s - 60.0)
        at_most = sum(n for at_s, n in added if at_s > now_s - 61.0)
        assert exact <= window.total <= at_most
        if dice.random() < 0.5:
            amount = dice.randint(0, 9)
            window.add(amount)
            added.append((now_s, amount))


def a_window() -> Window:
    window = Window()
    window.move(1000)
    window.add(3)
    window.move(1010)
    window.add(2)
    return window


def test_a_window_says_when_so_much_of_it_has_left() -> None:
    window = a_window()
    window.move(1030)
    assert [window.frees_s(n) for n in (1, 3, 4, 5, 6)] == [31, 31, 41, 41, 61]
    assert window.empties_s == 41
    for amount in (3, 4):
        at = 1030 + window.frees_s(amount)
        probe = a_window()
        probe.move(at - 1)
        assert 5 - probe.total < amount
        probe.move(at)
        assert 5 - probe.total >= amount
    window.move(2000)
    assert (window.total, window.empties_s) == (0, 0)


def test_the_headers_are_those_openai_clients_read() -> None:
    reading = Reading(requests=2, requests_reset_s=60, tokens=130, tokens_reset_s=7)
    assert limit_headers(a_key(rpm=5, tpm=100), reading) == [
        (b"x-ratelimit-limit-requests", b"5"),
        (b"x-ratelimit-remaining-requests", b"3"),
        (b"x-ratelimit-reset-requests", b"1m0s"),
        (b"x-ratelimit-limit-tokens", b"100"),
        (b"x-ratelimit-remaining-tokens", b"0"),
        (b"x-ratelimit-reset-tokens", b"7s"),
    ]
    assert len(limit_headers(a_key(tpm=100), reading)) == 3
    assert limit_headers(a_key(parallel=1), reading) == []


@pytest.mark.parametrize(
    ("refused", "sentence", "retry_s"),
    [
        (Refused(what="requests", limit=60, frees_s=12), "60 requests in 60 s; there is room", 12),
        (
            Refused(what="tokens", limit=500, wanted=120, frees_s=61),
            "500 tokens in 60 s, and this request may take 120",
            60,
        ),
        (Refused(what="requests", limit=1, frees_s=5), "1 request in 60 s; there is room", 5),
        (Refused(what="parallel", limit=4), "4 requests at once; there is room again when one", 1),
    ],
)
def test_a_refusal_says_which_limit_it_was_and_when_there_is_room(
    refused: Refused, sentence: str, retry_s: int
) -> None:
    answer = refusal(a_key(), refused)
    assert (answer.status, answer.code, answer.type) == (
        429,
        "rate_limit_exceeded",
        "rate_limit_error",
    )
    assert sentence in answer.message
    assert "'ci'" in answer.message
    assert (answer.retry_after_s, answer.should_retry) == (retry_s, True)


# One gateway -------------------------------------------------------------------------------------------


def admit(ledger: Ledger, key: Key, tokens: int, at_s: float) -> Refused | int:
    return ledger.admit(key, tokens, at_s)


def test_alone_a_limit_of_requests_is_exact() -> None:
    ledger, key = Ledger("g", "1"), a_key(rpm=3)
    assert [isinstance(admit(ledger, key, 0, 100.0 + i), int) for i in range(4)] == [
        True,
        True,
        True,
        False,
    ]
    refused = admit(ledger, key, 0, 130.0)
    assert isinstance(refused, Refused)
    assert refused.frees_s == 31
    assert isinstance(admit(ledger, key, 0, 161.0), int)
    assert isinstance(admit(ledger, key, 0, 161.0), Refused)


def test_tokens_are_held_while_a_request_runs_and_charged_by_what_it_used() -> None:
    ledger, key = Ledger("g", "1"), a_key(tpm=100)
    held = admit(ledger, key, 80, 100.0)
    assert held == 80
    refused = admit(ledger, key, 30, 100.0)
    assert isinstance(refused, Refused)
    assert (refused.what, refused.wanted, refused.frees_s) == ("tokens", 30, 1)
    ledger.end(key, 80, 10, 101.0)
    assert ledger.read(key, 101.0).tokens == 10
    assert admit(ledger, key, 30, 101.0) == 30


def test_what_may_take_more_than_the_whole_limit_goes_on_when_nothing_is_used() -> None:
    """Else it could never be served, and it may use far less than it may use."""
    ledger, key = Ledger("g", "1"), a_key(tpm=100)
    assert admit(ledger, key, 5000, 100.0) == 100
    ledger.end(key, 100, 20, 100.0)
    refused = admit(ledger, key, 5000, 101.0)
    assert isinstance(refused, Refused)
    assert refused.frees_s == 60
    assert admit(ledger, key, 5000, 161.0) == 100


def test_as_many_run_at_once_as_the_key_may() -> None:
    ledger, key = Ledger("g", "1"), a_key(parallel=2)
    assert admit(ledger, key, 0, 100.0) == 0
    assert admit(ledger, key, 0, 100.0) == 0
    refused = admit(ledger, key, 0, 500.0)
    assert isinstance(refused, Refused)
    assert (refused.what, refused.frees_s) == ("parallel", None)
    ledger.end(key, 0, 0, 500.0)
    assert admit(ledger, key, 0, 500.0) == 0


def test_a_refused_request_counts_for_nothing() -> None:
    ledger, key = Ledger("g", "1"), a_key(rpm=10, parallel=1)
    admit(ledger, key, 0, 100.0)
    for _ in range(50):
        assert isinstance(admit(ledger, key, 0, 100.0), Refused)
    assert ledger.read(key, 100.0).requests == 1


def test_books_of_keys_that_are_gone_are_dropped_once_nothing_counts_any_more() -> None:
    ledger, key = Ledger("g", "1"), a_key(rpm=10)
    admit(ledger, key, 0, 100.0)
    ledger.forget((), 200.0)
    assert ledger.read(key, 200.0).requests == 0
    ledger.end(key, 0, 0, 200.0)  # it ran: its book was kept
    ledger.forget((), 300.0)
    assert not ledger.tell(300.0, {}).keys
