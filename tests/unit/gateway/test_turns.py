"""The order of those who wait for a turn, and which priority a request has."""

import pytest

from gateway.domain.keytable import ANYBODY
from gateway.domain.turns import Turn, Turns, priority_of
from gateway.domain.waitingroom import Full
from schemas.key import Priority
from tests.support.gateway_keys import a_caller


def join(turns: Turns, who: str = "", priority: Priority = "normal", **fields: object) -> Turn:
    given = {"want": "chat", "size_bytes": 1, "now_s": 0.0} | fields
    joined = turns.join("m", who=who, priority=priority, **given)  # type: ignore[arg-type]
    assert isinstance(joined, Turn)
    return joined


def order(turns: Turns) -> list[Turn]:
    found: list[Turn] = []
    while (turn := turns.first("m")) is not None:
        turns.take(turn, 0.0)
        found.append(turn)
    return found


def test_the_keys_take_turns_and_each_keeps_its_order() -> None:
    turns = Turns(max_requests=100, max_bytes=100)
    many = [join(turns, "a") for _ in range(4)]
    few = [join(turns, "b") for _ in range(2)]
    one = join(turns, "c")
    assert order(turns) == [many[0], few[0], one, many[1], few[1], many[2], many[3]]
    assert len(turns) == 0


def test_a_higher_priority_goes_first_whenever_it_came() -> None:
    turns = Turns(max_requests=100, max_bytes=100)
    low, normal, high = (join(turns, "a", p) for p in ("low", "normal", "high"))
    again = join(turns, "b", "high")
    assert order(turns) == [high, again, normal, low]


def test_who_cannot_use_what_is_free_is_passed_and_keeps_its_turn() -> None:
    turns = Turns(max_requests=100, max_bytes=100)
    card = join(turns, "a", want="card")
    chat = join(turns, "b")
    assert turns.first("m", {"card"}) == chat
    turns.take(chat, 0.0)
    join(turns, "b")
    assert turns.first("m") == card
    assert turns.first("m", {"card", "chat"}) is None


def wait_s(turns: Turns, now_s: float, who: str = "", priority: Priority = "normal") -> float:
    return turns.wait_s("m", priority=priority, who=who, now_s=now_s)


def test_who_is_refused_hears_how_long_the_line_would_take_it_and_not_how_long_the_last_one_stood() -> (
    None
):
    turns = Turns(max_requests=100, max_bytes=1000)
    for _ in range(60):
        join(turns)
    for n in range(1, 41):  # one every two seconds
        turn = turns.first("m")
        assert turn is not None
        turns.take(turn, 2.0 * n)
    # The last one stood for 80 s; twenty wait now.
    assert wait_s(turns, 80.0) == pytest.approx(21 * 2.0)
    # A standstill is seen while it lasts.
    assert wait_s(turns, 144.0) == pytest.approx(21 * 4.0)


def test_the_wait_is_that_of_the_key_and_its_priority() -> None:
    turns = Turns(max_requests=100, max_bytes=1000)
    for _ in range(10):
        join(turns, "a")
    join(turns, "b")
    join(turns, "c", "high")
    first = join(turns, "c", "high")
    turns.take(first, 1.0)
    # One goes on a second: behind everybody of a higher priority, in turn with the other keys, behind its own.
    assert wait_s(turns, 1.0, "c", "high") == pytest.approx(2.0)
    assert wait_s(turns, 1.0, "new") == pytest.approx(1 + 2 + 1.0)
    assert wait_s(turns, 1.0, "b") == pytest.approx(1 + 1 + 2 + 1.0)
    assert wait_s(turns, 1.0, "a") == pytest.approx(1 + 10 + 1 + 1.0)
    assert wait_s(turns, 1.0, "new", "low") == pytest.approx(1 + 11 + 1.0)


def test_a_line_in_which_nobody_has_gone_on_is_as_slow_as_it_is_old() -> None:
    turns = Turns(max_requests=100, max_bytes=1000)
    only = join(turns, now_s=100.0)
    told = turns.wait_s("m", priority="normal", who="", now_s=145.0, besides=only)
    assert told == pytest.approx(45.0)
    turns.leave(only)
    assert wait_s(turns, 145.0) == 0.0


def test_the_line_is_bounded_but_not_for_who_was_let_in_before() -> None:
    turns = Turns(max_requests=2, max_bytes=100)
    join(turns, size_bytes=200)  # alone, or it could never be served
    full = turns.join("m", 1, priority="high", who="", size_bytes=1, now_s=0.0)
    assert full == Full(what="bytes", limit=100)
    join(turns, size_bytes=200, accepted=True)
    full = turns.join("m", 1, priority="high", who="", size_bytes=0, now_s=0.0)
    assert full == Full(what="requests", limit=2)
    join(turns, accepted=True)
    assert turns.by_model() == {"m": 3}


@pytest.mark.parametrize(
    ("own", "asked", "given"),
    [
        ("normal", None, "normal"),
        ("normal", b"low", "low"),
        ("normal", b" LOW ", "low"),
        ("normal", b"high", "normal"),
        ("high", b"normal", "normal"),
        ("high", b"low", "low"),
        ("low", b"normal", "low"),
        ("high", b"urgent", "high"),
    ],
)
def test_a_request_lowers_its_keys_priority_and_never_raises_it(
    own: Priority, asked: bytes | None, given: Priority
) -> None:
    assert priority_of(a_caller(priority=own), asked) == given


def test_who_has_no_key_is_normal() -> None:
    assert priority_of(ANYBODY, None) == "normal"
    assert priority_of(ANYBODY, b"high") == "normal"
    assert priority_of(ANYBODY, b"low") == "low"
