"""Keeps, for each replica, the least of this gateway's requests there that some other gateway may still believe.

A model's `concurrency` is shared as a key's limit is (shares.py): what is used here counts against this gateway's own
part until everybody has heard of it. It must not do I/O or ask a clock.
"""

from collections import deque
from collections.abc import Mapping
from typing import Final

from gateway.domain.shares import fits

_MOST_TOLD: Final = 64
"""So many counts told and not heard yet are kept apart; older ones are taken for the least of them."""


class Seats:
    """What beacons told of each replica, oldest first: (number, requests). Everybody has heard the first, at least."""

    def __init__(self) -> None:
        self._told: dict[str, deque[tuple[int, int]]] = {}

    def tell(self, n: int, inflight: Mapping[str, int]) -> None:
        """Beacon `n` says that so many of ours run at each replica, and none at any other."""
        for replica, count in inflight.items():
            told = self._told.get(replica)
            if told is None:
                told = self._told[replica] = deque(((0, 0),))
            _append(told, n, count)
        for replica, told in self._told.items():
            if replica not in inflight:
                _append(told, n, 0)

    def heard_by_all(self, n: int) -> None:
        """Everybody has heard beacon `n`, or a later one."""
        over: list[str] = []
        for replica, told in self._told.items():
            while len(told) > 1 and told[1][0] <= n:
                told.popleft()
            if len(told) == 1 and told[0][1] == 0:
                over.append(replica)
        for replica in over:
            del self._told[replica]

    def believed(self, replica: str) -> int:
        """The least of ours that some other gateway may take to run there."""
        told = self._told.get(replica)
        return 0 if told is None else min(count for _, count in told)

    def is_free(
        self, replica: str, ours: int, others: int, limit: int, *, gateways: int, known: bool
    ) -> bool:
        """Whether one more of ours may run there, `ours` and `others` of at most `limit` running already."""
        if gateways == 1:
            return ours + others < limit
        unheard = ours - self.believed(replica)
        return fits(1, limit, ours + others, unheard, gateways, known)

    def __len__(self) -> int:
        return len(self._told)


def _append(told: deque[tuple[int, int]], n: int, count: int) -> None:
    if told[-1][1] == count:
        return
    told.append((n, count))
    if len(told) > _MOST_TOLD:
        _, oldest = told.popleft()
        at, second = told[0]
        told[0] = (at, min(oldest, second))
