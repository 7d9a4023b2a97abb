"""Keeps which replicas this gateway does not send to although the log says they are ready, and brings them back.

Two kinds: who does not answer (`refused`) comes back when a probe passes; who answers badly (gateway/domain/outliers.py)
when its time is over and a probe passes then. It does no I/O: probes are gateway/probe.py's.
"""

import asyncio
import logging
from collections.abc import Callable, Sequence

from gateway.clock import Clock
from gateway.domain.outliers import Outliers
from gateway.domain.routing import Loss
from schemas.replica import Replica

log = logging.getLogger("gateway")


class Ejections:
    """`on_probe(replica)` is called when one that answered badly may be tried again."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self.refused: dict[str, Loss | str] = {}
        self.refused_ids: frozenset[str] = frozenset()
        self.outliers = Outliers()
        self.on_probe: Callable[[Replica], None] = lambda replica: None
        self._timers: dict[str, asyncio.TimerHandle] = {}

    def refuse(self, replica: Replica, loss: Loss) -> None:
        """It did not answer, or as another launch."""
        if replica.id in self.refused:
            return
        self.refused[replica.id] = loss
        self.refused_ids = frozenset(self.refused)
        log.warning(
            "replica ejected",
            extra={"replica": replica.id, "model": replica.model, "loss": loss},
        )

    def judge(self, replica: Replica, ready: Sequence[Replica], *, good: bool) -> bool:
        """It answered a request, or failed it; `ready` are all of its model. True: it is left out from now on."""
        outliers = self.outliers
        if good:
            outliers.good(replica.id)
            return False
        now_s = self._clock.now_s()
        if not outliers.bad(replica.id, [r.id for r in ready], self.refused, now_s):
            return False
        until_s = outliers.until_s[replica.id]
        log.warning(
            "replica left out",
            extra={"replica": replica.id, "model": replica.model, "seconds": until_s - now_s},
        )
        self._cancel(replica.id)
        loop = asyncio.get_running_loop()
        self._timers[replica.id] = loop.call_at(until_s, self._time_is_over, replica)
        return True

    def passed(self, replica: str) -> bool:
        """A probe of it passed. True: it is asked again where it was not before."""
        back = self.refused.pop(replica, None) is not None
        if back:
            self.refused_ids = frozenset(self.refused)
        # One whose time is not over has its timer still.
        if self.outliers and replica not in self._timers:
            back = self._back(replica) or back
        return back

    def over(self, replica: str) -> bool:
        """The launch is over, or parked. True: it had been ejected."""
        self._cancel(replica)
        out = replica in self.outliers.until_s
        self.outliers.forget(replica)
        return self.passed(replica) or out

    def recheck(self, ready: Sequence[Replica]) -> None:
        """Other replicas of a model are ready than were."""
        if self.outliers:
            for replica in self.outliers.too_many({r.id for r in ready}):
                self._back(replica)

    def close(self) -> None:
        """Releases every timer."""
        for replica in list(self._timers):
            self._cancel(replica)

    def __len__(self) -> int:
        return len(self.refused.keys() | self.outliers.until_s.keys())

    def _back(self, replica: str) -> bool:
        self._cancel(replica)
        back = self.outliers.back(replica)
        if back:
            log.info("replica tried again", extra={"replica": replica})
        return back

    def _time_is_over(self, replica: Replica) -> None:
        del self._timers[replica.id]
        self.on_probe(replica)

    def _cancel(self, replica: str) -> None:
        timer = self._timers.pop(replica, None)
        if timer is not None:
            timer.cancel()
