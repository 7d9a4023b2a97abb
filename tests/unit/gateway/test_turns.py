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
