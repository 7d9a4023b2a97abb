"""Timelines are kept for the last requests of each model, and no longer."""

from datetime import UTC, datetime

from gateway.domain.traces import Trace
from gateway.timeline import Timeline, Timelines, shown

TRACE = Trace(trace="1" * 32, span="2" * 16)


class FixedClock:
    """Monotonic second 100 is noon."""

    def now_s(self) -> float:
        return 100.0

    def now(self) -> datetime:
        return datetime(2026, 3, 1, 12, tzinfo=UTC)

    def wall_ms(self, at_s: float) -> float:
        return (self.now().timestamp() + at_s - 100.0) * 1000


def test_only_the_last_of_each_model_are_kept() -> None:
    kept = Timelines(per_model=2)
    for n in range(4):
        kept.keep(Timeline(f"a-{n}", 0.0, TRACE), "a")
    kept.keep(Timeline("b-0", 0.0, TRACE), "b")
    assert [kept.find(f"a-{n}") is not None for n in range(4)] == [False, False, True, True]
    assert kept.find("b-0") is not None
    kept.forget_model("a")
    assert len(kept) == 1


def test_a_repeated_id_finds_the_newest() -> None:
    kept = Timelines(per_model=2)
    first, second = Timeline("same", 0.0, TRACE), Timeline("same", 1.0, TRACE)
    kept.keep(first, "a")
    kept.keep(second, "a")
    kept.keep(Timeline("other", 2.0, TRACE), "a")
    assert kept.find("same") is second


def test_marks_are_shown_as_times() -> None:
    timeline = Timeline("id", 100.0, TRACE)
    timeline.model = "m"
    timeline.mark("written_to_engine", 100.25)
    timeline.first("joined", 100.1)
    timeline.first("joined", 100.9)
    told = shown(timeline, FixedClock())
    assert told["received"] == "2026-03-01T12:00:00.000000+00:00"
    assert told["written_to_engine"] == "2026-03-01T12:00:00.250000+00:00"
    marks = told["marks_ms"]
    assert isinstance(marks, dict)
    assert marks["joined"] - marks["received"] == 100.0
