"""Decides which replicas are left out because of how they answer, for how long, and which are not whatever they do.

Replicas at which nobody answers are another matter (gateway.suspect): those can serve nobody, so all of them may be
left out. One that answers badly still is better than none: of a model's ready replicas never more than half are left
out for that, never the last. It must not do I/O or ask a clock; times are seconds of the gateway's own.
"""

from collections.abc import Collection, Container, Sequence
from dataclasses import dataclass, field
from typing import Final

from schemas.replica import Replica

IN_A_ROW: Final = 5
"""So many failures without a good answer between leave a replica out. One bad request, however often it is repeated
among good ones, leaves nobody out."""

FIRST_S: Final = 5.0
"""How long it is left out the first time; each further time twice as long."""

LONGEST_S: Final = 80.0

FORGIVEN_S: Final = 300.0
"""After so long without being left out it begins with the first time again."""

NOT_SUPPORTED: Final = 501
"""An engine that says it lacks something answers as it should."""


def is_good(status: int, *, complete: bool) -> bool:
    """Whether an answer speaks for its engine: it came to its end, and is no failure of the engine's own."""
    return complete and (status < 500 or status == NOT_SUPPORTED)


@dataclass(slots=True)
class _Past:
    """How often it was left out lately, and until when the last time."""

    times: int
    until_s: float


@dataclass(slots=True)
class Outliers:
    """`until_s` has the replicas left out now, the longest first; a replica that is back is on trial: one more
    failure is enough, and one good answer ends that."""

    until_s: dict[str, float] = field(default_factory=dict)
    _in_a_row: dict[str, int] = field(default_factory=dict)
    _past: dict[str, _Past] = field(default_factory=dict)

    def good(self, replica: str) -> None:
        """It gave a good answer."""
        if self._in_a_row:
            self._in_a_row.pop(replica, None)

    def bad(
        self, replica: str, ready: Sequence[str], refused: Container[str], now_s: float
    ) -> bool:
        """It failed a request. True: it is left out from now on.

        1. it is already, or has not failed often enough in a row
        2. it would be more than half of those `ready` for its model, or the last that answers at all (`refused` do
           not): it stays
        """
        count = self._in_a_row[replica] = self._in_a_row.get(replica, 0) + 1
        if replica in self.until_s or count < IN_A_ROW:  # 1
            return False
        out = sum(r in self.until_s for r in ready)
        left = [r for r in ready if r != replica and r not in self.until_s and r not in refused]
        if out + 1 > len(ready) // 2 or not left:  # 2
            return False
        past = self._past.get(replica)
        times = 0 if past is None or now_s - past.until_s > FORGIVEN_S else past.times
        until_s = now_s + min(FIRST_S * 2**times, LONGEST_S)
        self._past[replica] = _Past(times + 1, until_s)
        self.until_s[replica] = until_s
        return True

    def back(self, replica: str) -> bool:
        """It is asked again, on trial. False: it was not left out."""
        if self.until_s.pop(replica, None) is None:
            return False
        self._in_a_row[replica] = IN_A_ROW - 1
        return True

    def forget(self, replica: str) -> None:
        """The launch is over, or parked."""
        self.until_s.pop(replica, None)
        self._in_a_row.pop(replica, None)
        self._past.pop(replica, None)

    def too_many(self, ready: Collection[str]) -> list[str]:
        """Those that come back before their time, because fewer replicas are ready than were: the first left out first."""
        out = [r for r in self.until_s if r in ready]
        return out[: max(0, len(out) - len(ready) // 2)]

    def without(self, candidates: tuple[Replica, ...]) -> tuple[Replica, ...]:
        """Those a request may go to: where all who could serve it are left out, all of them."""
        if not self.until_s:
            return candidates
        left = tuple([r for r in candidates if r.id not in self.until_s])
        return left or candidates

    def __len__(self) -> int:
        return len(self.until_s)
