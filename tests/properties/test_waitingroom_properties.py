"""The waiting room as sentences: each request gets exactly one answer; what it counts is who is in it."""

from collections import Counter

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    Bundle,
    RuleBasedStateMachine,
    consumes,
    invariant,
    multiple,
    rule,
)

from gateway.domain.waitingroom import Full, Joined, Key, Waiter, WaitingRoom

KEYS: list[Key] = [("a", "any"), ("a", "n1~gpu0"), ("b", "any")]


class RoomMachine(RuleBasedStateMachine):
    """Requests come, leave, time out, are released and refused, in any order."""

    tickets = Bundle("tickets")

    def __init__(self) -> None:
        super().__init__()
        self.room = WaitingRoom(max_requests=4, max_bytes=100)
        self.now_s = 0.0
        self.position = 0
        self.waiting: dict[int, Waiter] = {}
        self.answered: set[int] = set()
        self.everybody: set[int] = set()

    @rule(
        target=tickets,
        key=st.sampled_from(KEYS),
        size=st.integers(0, 60),
        wait_s=st.sampled_from([1.0, 5.0, 45.0]),
    )
    def join(self, key: Key, size: int, wait_s: float) -> int:
        held = [w for w in self.waiting.values() if w.key == key]
        full = len(held) >= 4 or (held and sum(w.size_bytes for w in held) + size > 100)
        found = self.room.join(
            key,
            size_bytes=size,
            now_s=self.now_s,
            deadline_s=self.now_s + wait_s,
            position=self.position,
        )
        if full:
            assert isinstance(found, Full)
            return multiple()  # type: ignore[return-value]
        assert isinstance(found, Joined)
        assert found.first == (not held)
        ticket = found.waiter.ticket
        assert ticket not in self.everybody, "a ticket is never given twice"
        self.everybody.add(ticket)
        self.waiting[ticket] = found.waiter
        return ticket

    def _answer(self, taken: tuple[Waiter, ...]) -> None:
        for waiter in taken:
            assert waiter.ticket not in self.answered, "exactly one answer"
            assert self.waiting.pop(waiter.ticket) == waiter
            self.answered.add(waiter.ticket)

    @rule(key=st.sampled_from(KEYS))
    def ready(self, key: Key) -> None:
        expected = [t for t, w in self.waiting.items() if w.key == key]
        taken = self.room.release(key)
        assert [w.ticket for w in taken] == expected, "in order of arrival, all of them"
        self._answer(taken)

    @rule(key=st.sampled_from(KEYS))
    def refused(self, key: Key) -> None:
        self.position += 1
        self._answer(self.room.refuse(key, decided_at=self.position))
        assert self.room.count(key) == 0

    @rule(key=st.sampled_from(KEYS), behind=st.integers(0, 3))
    def refused_earlier(self, key: Key, behind: int) -> None:
        decided_at = self.position - behind
        taken = self.room.refuse(key, decided_at=decided_at)
        assert all(w.position < decided_at for w in taken)
        self._answer(taken)

    @rule(key=st.sampled_from(KEYS), ago_s=st.floats(0, 10))
    def nobody_decided(self, key: Key, ago_s: float) -> None:
        taken = self.room.give_up(key, joined_until_s=self.now_s - ago_s)
        assert all(w.joined_s <= self.now_s - ago_s for w in taken)
        self._answer(taken)

    @rule(step_s=st.sampled_from([0.5, 2.0, 10.0, 60.0]))
    def time_passes(self, step_s: float) -> None:
        self.now_s += step_s
        due = {t for t, w in self.waiting.items() if w.deadline_s <= self.now_s}
        taken = self.room.expire(self.now_s)
        assert {w.ticket for w in taken} == due
        self._answer(taken)

    @rule(ticket=consumes(tickets))
    def client_leaves(self, ticket: int) -> None:
        assert self.room.leave(ticket) == (ticket in self.waiting)
        self.waiting.pop(ticket, None)

    @rule()
    def an_event_is_applied(self) -> None:
        self.position += 1

    @invariant()
    def counts_are_who_is_in_it(self) -> None:
        assert len(self.room) == len(self.waiting)
        for key in KEYS:
            held = [w for w in self.waiting.values() if w.key == key]
            assert self.room.count(key) == len(held)
            assert self.room.held_bytes(key) == sum(w.size_bytes for w in held)
            assert self.room.oldest_joined_s(key) == (held[0].joined_s if held else None)

    @invariant()
    def a_beacon_tells_by_model_over_all_scopes(self) -> None:
        waiting = [w.key for w in self.waiting.values()]
        assert self.room.by_model() == Counter(model for model, _ in waiting)
        assert self.room.by_scope() == Counter(scope for _, scope in waiting)
        on_card = Counter(model for model, scope in waiting if scope == "n1~gpu0")
        assert self.room.by_model("n1~gpu0") == on_card

    @invariant()
    def nobody_waits_without_a_deadline(self) -> None:
        deadlines = [w.deadline_s for w in self.waiting.values()]
        assert self.room.next_deadline_s() == (min(deadlines) if deadlines else None)

    @invariant()
    def gone_requests_leave_few_timers(self) -> None:
        assert self.room.timers <= 2 * len(self.waiting) + 16 + 4


TestRoom = RoomMachine.TestCase
TestRoom.settings = settings(deadline=None, max_examples=60, stateful_step_count=40)
