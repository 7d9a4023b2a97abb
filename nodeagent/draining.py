"""Gathers what a drain is judged by, and has it judged: the gateways' beacons, the log, the engine's own counters.

It decides nothing, that is `domain/drains.py`, and carries no verdict out.
"""

import asyncio
from collections.abc import Awaitable, Callable
from datetime import datetime

from nodeagent.domain import drains
from nodeagent.domain.held import Held
from nodeagent.tools import Tools
from nodeagent.waking import pause, unless_woken
from schemas.beacons import EngineCounters
from schemas.plan import Stop

DRAIN_LOOK_S = 0.25


class Draining:
    """The drain of one replica. `wake` interrupts any wait of it."""

    def __init__(
        self,
        tools: Tools,
        replica: str,
        *,
        wake: asyncio.Event,
        counters: Callable[[], Awaitable[EngineCounters]],
    ) -> None:
        self._t = tools
        self._name = replica
        self._wake = wake
        self._counters = counters
        self._seq: int | None = None
        self._began: float | None = None

    def stored(self, seq: int) -> None:
        """The log has `replica.draining` at `seq`."""
        self._seq = seq

    def began(self) -> None:
        """It turned to draining, or to draining under another decision."""
        self._seq = None
        self._began = asyncio.get_running_loop().time()

    async def verdict(self, held: Held) -> drains.Verdict | None:
        """What is to be done now. After a wait, or when something changed meanwhile: nothing yet (None)."""
        if held.stop is None:  # adopted without its wish; the plan will tell
            await self._wake.wait()
            return None
        verdict = drains.judge(self._facts(held, held.stop, None))
        if isinstance(verdict, drains.AskEngine):
            told = await unless_woken(self._wake, self._ask())
            again = self._t.books.held[self._name]
            if told is None or again.ending or again.stop is None:
                return None
            if again.replica.phase != "draining":
                return None
            # Everything is looked at again: a request may have come while the engine was asked.
            verdict = drains.judge(self._facts(again, again.stop, told))
        if isinstance(verdict, drains.KeepWaiting | drains.AskEngine):
            await pause(self._wake, DRAIN_LOOK_S)
            return None
        return verdict

    async def _ask(self) -> EngineCounters:
        return await self._counters()

    def _facts(self, held: Held, stop: Stop, engine: EngineCounters | None) -> drains.DrainFacts:
        gateways = self._t.gateways
        loop = asyncio.get_running_loop()
        if self._began is None:  # adopted in the middle of a drain
            self._began = loop.time() - _age_s(held.replica.since, self._t.now())
        return drains.DrainFacts(
            stop=stop,
            sequence=self._seq,
            age_s=loop.time() - self._began,
            connected_s=gateways.connected_s(),
            gateways=gateways.about(self._name, held.replica.model),
            gateway_gone_s=self._t.gateway_gone_s,
            listen_s=self._t.listen_s,
            engine=engine,
        )


def _age_s(since: datetime, now: datetime) -> float:
    return max((now - since).total_seconds(), 0.0)
