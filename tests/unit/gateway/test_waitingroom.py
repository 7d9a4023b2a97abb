"""Who waits, who is let go, and that each leaves once."""

from typing import Any

from gateway.domain.waitingroom import Full, Joined, Key, Waiter, WaitingRoom

M: Key = ("m", "any")


def a_room(max_requests: int = 1000, max_bytes: int = 1000) -> WaitingRoom:
    return WaitingRoom(max_requests=max_requests, max_bytes=max_bytes)


def join(room: WaitingRoom, key: Key = M, **fields: Any) -> Waiter:
    defaults: dict[str, Any] = {
        "size_bytes": 10,
        "now_s": 0.0,
        "deadline_s": 45.0,
        "position": 0,
    }
    joined = room.join(key, **(defaults | fields))
    assert isinstance(joined, Joined)
    return joined.waiter


def test_release_lets_everybody_go_in_order_of_arrival_once() -> None:
    room = a_room()
    waiters = [join(room) for _ in range(3)]
    other = join(room, ("other", "any"))
    assert room.release(M) == tuple(waiters)
    assert room.release(M) == ()
    assert room.count(M) == 0
    assert room.release(("other", "any")) == (other,)
    assert len(room) == 0


def test_only_the_first_of_a_model_is_told_that_it_is() -> None:
    room = a_room()
    first = room.join(M, size_bytes=1, now_s=0, deadline_s=9, position=0)
    second = room.join(M, size_bytes=1, now_s=0, deadline_s=9, position=0)
    assert isinstance(first, Joined)
    assert isinstance(second, Joined)
    assert (first.first, second.first) == (True, False)


def test_a_full_room_refuses_and_changes_nothing() -> None:
    room = a_room(max_requests=2)
    join(room)
    join(room)
    assert room.join(M, size_bytes=1, now_s=0, deadline_s=9, position=0) == Full(
        what="requests", limit=2
    )
    assert room.count(M) == 2
    # Each model has its own bound.
    join(room, ("other", "any"))


def test_bytes_bound_a_room_but_one_large_body_may_wait_alone() -> None:
    room = a_room(max_bytes=100)
    large = join(room, size_bytes=500)
    assert room.join(M, size_bytes=1, now_s=0, deadline_s=9, position=0) == Full(
        what="bytes", limit=100
    )
    room.leave(large.ticket)
    join(room, size_bytes=60)
    assert isinstance(room.join(M, size_bytes=41, now_s=0, deadline_s=9, position=0), Full)
    join(room, size_bytes=40)
    assert room.held_bytes(M) == 100


def test_no_bound_turns_away_who_was_let_in_before() -> None:
    room = a_room(max_requests=1, max_bytes=100)
    join(room, size_bytes=100)
    join(room, size_bytes=60, accepted=True)
    assert room.count(M) == 2
    assert room.held_bytes(M) == 160
    assert isinstance(room.join(M, size_bytes=1, now_s=0, deadline_s=9, position=0), Full)


def test_a_client_that_leaves_is_not_answered_and_gives_its_place_back() -> None:
    room = a_room(max_requests=1)
    waiter = join(room)
    assert room.leave(waiter.ticket)
    assert not room.leave(waiter.ticket)
    join(room)
    assert len(room.release(M)) == 1


def test_a_refusal_answers_only_who_joined_before_it_was_decided() -> None:
    room = a_room()
    before = join(room, position=10)
    after = join(room, position=11)
    assert room.refuse(M, decided_at=11) == (before,)
    assert room.release(M) == (after,)


def test_giving_up_takes_only_those_who_waited_long_enough() -> None:
    room = a_room()
    early = join(room, now_s=0.0)
    late = join(room, now_s=3.0)
    assert room.give_up(M, joined_until_s=1.0) == (early,)
    assert room.oldest_joined_s(M) == 3.0
    assert room.release(M) == (late,)


def test_deadlines_come_in_order_and_skip_who_is_gone() -> None:
    room = a_room()
    third = join(room, deadline_s=30)
    first = join(room, deadline_s=10)
    gone = join(room, deadline_s=15)
    second = join(room, ("other", "any"), deadline_s=20)
    room.leave(gone.ticket)
    assert room.next_deadline_s() == 10
    assert room.expire(9.9) == ()
    assert room.expire(25) == (first, second)
    assert room.next_deadline_s() == 30
    assert room.expire(30) == (third,)
    assert room.next_deadline_s() is None


def test_req_a24_ten_thousand_abandoned_waits_leave_nothing_behind() -> None:
    room = a_room(max_requests=20_000, max_bytes=10**9)
    for _ in range(10_000):
        room.leave(join(room, deadline_s=45).ticket)
        assert room.timers < 64
    assert len(room) == 0
    assert room.waited_for() == ()
    assert room.held_bytes(M) == 0
    assert room.next_deadline_s() is None
    assert room.timers == 0


def test_counts_are_by_model_over_its_scopes() -> None:
    room = a_room()
    join(room)
    join(room, ("m", "n1~gpu0"))
    join(room, ("other", "any"))
    assert room.by_model() == {"m": 2, "other": 1}
