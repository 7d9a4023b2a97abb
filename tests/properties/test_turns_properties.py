"""Whose turn it is, against a model that keeps one plain list: nobody is forgotten, and no key has two turns while another waits."""

from collections import Counter

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from gateway.domain.turns import CLASSES, Turn, Turns
from gateway.domain.waitingroom import Full

MODELS = st.sampled_from(["m", "m", "m", "n"])
WHO = st.sampled_from(["", "a", "b"])
WANTS = st.sampled_from(["chat", "embed", "card"])
PRIORITIES = st.sampled_from(["normal", "normal", *CLASSES])


class TurnsMachine(RuleBasedStateMachine):
    """`passed` counts, for each pair of keys of a class, the turns one had while the other could have gone."""

    @initialize(most=st.integers(2, 12))
    def begin(self, most: int) -> None:
        self.most = most
        self.turns = Turns(max_requests=most, max_bytes=1000)
        self.waiting: list[Turn] = []
        self.passed: Counter[tuple[str, str, str, str]] = Counter()
        self.now_s = 0.0

    @rule(
        model=MODELS,
        who=WHO,
        want=WANTS,
        priority=PRIORITIES,
        size=st.integers(0, 400),
        accepted=st.booleans(),
    )
    def join(
        self, model: str, who: str, want: str, priority: str, size: int, accepted: bool
    ) -> None:
        here = [t for t in self.waiting if t.model == model]
        joined = self.turns.join(
            model,
            want,
            priority=priority,  # type: ignore[arg-type]
            who=who,
            size_bytes=size,
            now_s=self.now_s,
            accepted=accepted,
        )
        over_count = len(here) >= self.most
        over_bytes = bool(here) and sum(t.size_bytes for t in here) + size > 1000
        if isinstance(joined, Full):
            assert not accepted
            assert over_count if joined.what == "requests" else over_bytes
            return
        assert accepted or not (over_count or over_bytes)
        if not any(t.who == who and t.priority == priority for t in here):
            for pair in [p for p in self.passed if p[:3] == (model, priority, who)]:
                del self.passed[pair]
        self.waiting.append(joined)

    @rule(counts=st.lists(st.tuples(WHO, st.integers(1, 3)), min_size=2, max_size=3))
    def crowd(self, counts: list[tuple[str, int]]) -> None:
        """Several keys at once: what is rare otherwise."""
        for who, count in counts:
            for _ in range(count):
                self.join("m", who, "chat", "normal", 1, True)

    @rule(times=st.integers(2, 6))
    def go_on_and_on(self, times: int) -> None:
        for _ in range(times):
            self.go_on("m", set(), 0.5)

    @precondition(lambda self: self.waiting)
    @rule(data=st.data())
    def leave(self, data: st.DataObject) -> None:
        turn = data.draw(st.sampled_from(self.waiting))
        self.waiting.remove(turn)
        assert self.turns.leave(turn)
        assert not self.turns.leave(turn)

    @rule(
        model=MODELS,
        blocked=st.one_of(st.just(set[str]()), st.sets(WANTS, max_size=2)),
        after_s=st.floats(0, 10),
    )
    def go_on(self, model: str, blocked: set[str], after_s: float) -> None:
        self.now_s += after_s
        able = [t for t in self.waiting if t.model == model and t.want not in blocked]
        turn = self.turns.first(model, blocked)
        # Work conserving: somebody goes whenever somebody can.
        assert (turn is None) == (not able)
        if turn is None:
            return
        assert turn in able
        best = min(CLASSES.index(t.priority) for t in able)
        assert CLASSES.index(turn.priority) == best
        of_class = [t for t in able if t.priority == turn.priority]
        assert turn.ticket == min(t.ticket for t in of_class if t.who == turn.who)
        for other in {t.who for t in of_class} - {turn.who}:
            pair = (model, turn.priority, other, turn.who)
            self.passed[pair] += 1
            assert self.passed[pair] <= 1, f"{turn.who!r} had two turns while {other!r} waited"
        for pair in [p for p in self.passed if p[:3] == (model, turn.priority, turn.who)]:
            del self.passed[pair]
        self.turns.take(turn, self.now_s)
        self.waiting.remove(turn)
        # Whoever comes now waits no longer than somebody of the same key with a lower priority would.
        for who in (turn.who, "nobody else"):
            told = [
                self.turns.wait_s(model, priority=p, who=who, now_s=self.now_s) for p in CLASSES
            ]
            assert 0 <= told[0] <= told[1] <= told[2], told

    @invariant()
    def counts_are_right(self) -> None:
        if not hasattr(self, "turns"):
            return
        assert len(self.turns) == len(self.waiting)
        assert self.turns.by_model() == Counter(t.model for t in self.waiting)
        assert set(self.turns.models()) == {t.model for t in self.waiting}


TestTurns = TurnsMachine.TestCase
TestTurns.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
