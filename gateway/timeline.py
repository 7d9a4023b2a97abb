"""Remembers for the last requests of each model when each step of theirs happened.

For people who want to see where the time of one request went; nothing decides by it.
"""

from collections import deque
from datetime import UTC, datetime
from typing import Literal

from gateway.clock import Clock
from gateway.domain.traces import Trace

Mark = Literal[
    "received",
    "joined",
    "activate_sent",
    "woken",
    "adapter_there",
    "written_to_engine",
    "first_byte",
    "last_byte",
]


class Timeline:
    """The marks of one request, in seconds of the gateway's clock; each keeps its last time."""

    __slots__ = ("marks", "model", "request_id", "scope", "trace")

    def __init__(self, request_id: str, received_s: float, trace: Trace) -> None:
        self.request_id = request_id
        self.trace = trace
        self.model = ""
        self.scope = ""
        self.marks: dict[Mark, float] = {"received": received_s}

    def mark(self, mark: Mark, at_s: float) -> None:
        self.marks[mark] = at_s

    def first(self, mark: Mark, at_s: float) -> None:
        """Like `mark`, but an earlier time stays."""
        self.marks.setdefault(mark, at_s)


class Timelines:
    """The last `per_model` timelines of each model, found by request id."""

    def __init__(self, per_model: int = 64) -> None:
        self._per_model = per_model
        self._by_model: dict[str, deque[Timeline]] = {}

    def keep(self, timeline: Timeline, model: str) -> None:
        """From now on the timeline can be found, until `per_model` later ones of the model came."""
        timeline.model = model
        of_model = self._by_model.get(model)
        if of_model is None:
            of_model = self._by_model[model] = deque(maxlen=self._per_model)
        of_model.append(timeline)

    def find(self, request_id: str) -> Timeline | None:
        """The latest with this id. It looks at all of them: every request keeps one, and hardly any is looked for."""
        found = [t for kept in self._by_model.values() for t in kept if t.request_id == request_id]
        return max(found, key=lambda t: t.marks["received"], default=None)

    def forget_model(self, model: str) -> None:
        """The catalog has it no more: bounded by the catalog, not by its history."""
        self._by_model.pop(model, None)

    def __len__(self) -> int:
        return sum(map(len, self._by_model.values()))


def shown(timeline: Timeline, clock: Clock) -> dict[str, object]:
    """The timeline for people and scripts: each mark as a UTC time, and in milliseconds since 1970."""
    ms = {mark: clock.wall_ms(at_s) for mark, at_s in timeline.marks.items()}
    times = {
        mark: datetime.fromtimestamp(at_ms / 1000, UTC).isoformat(timespec="microseconds")
        for mark, at_ms in ms.items()
    }
    return {
        "request": timeline.request_id,
        "model": timeline.model,
        "scope": timeline.scope,
        **times,
        "marks_ms": {mark: round(at_ms, 3) for mark, at_ms in ms.items()},
    }
