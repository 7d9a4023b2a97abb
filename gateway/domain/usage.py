"""Counts what this gateway has in use: requests running by replica and model, and each model's last byte.

The counts are what a drain waits for and what the idle clock is made of, so choosing a replica and
counting the request on it is one call. No I/O, no clock: times are seconds of the gateway's own.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(slots=True)
class Usage:
    """`begin` and `end` say whether they crossed 0->1 or 1->0 of a replica or a model (an edge)."""

    _by_replica: dict[str, int] = field(default_factory=dict)
    _by_model: dict[str, int] = field(default_factory=dict)
    _last_use_s: dict[str, float] = field(default_factory=dict)

    @property
    def by_replica(self) -> Mapping[str, int]:
        return self._by_replica

    def begin(self, model: str, replica: str) -> bool:
        of_replica = self._by_replica.get(replica, 0)
        of_model = self._by_model.get(model, 0)
        self._by_replica[replica] = of_replica + 1
        self._by_model[model] = of_model + 1
        return not (of_replica and of_model)

    def end(self, model: str, replica: str, now_s: float, *, used: bool) -> bool:
        """`used`: an answer went to the client; a request that moved on says nothing about use."""
        if used:
            self._last_use_s[model] = now_s
        last_of_replica = _subtract(self._by_replica, replica)
        return _subtract(self._by_model, model) or last_of_replica

    def last_use_age_s(self, now_s: float) -> dict[str, float]:
        """By model, seconds since the last byte; 0 while something of it runs."""
        return {
            model: 0.0 if model in self._by_model else max(0.0, now_s - at_s)
            for model, at_s in self._last_use_s.items()
        }

    def forget_model(self, model: str) -> None:
        """The catalog has it no more."""
        self._last_use_s.pop(model, None)


def _subtract(counts: dict[str, int], key: str) -> bool:
    left = counts[key] - 1
    if left:
        counts[key] = left
        return False
    del counts[key]
    return True
