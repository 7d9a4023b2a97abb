"""Runs beside the leader what its log says is due, and keeps each result until a decision has dealt with it.

It decides nothing: `domain/work.py` says what is due, the leader's decisions what a report means. Tasks that
are no longer due are cancelled, and so is everything when the term ends; nothing of it is remembered, because
the next leader finds the same work due.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Coroutine, Hashable, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any, Final

from controlplane.domain.reports import FileFault, Report, StepFailed
from controlplane.domain.work import Fetch, Remove, Task, Verify

log = logging.getLogger(__name__)

Do = Callable[[Task], Awaitable[Report]]
"""Does one task and tells what came of it; a refusal is a report, not an exception."""

AGAIN_AFTER_S: Final = 1.0
"""A task that is still due after its report was dealt with begins again, but not at once."""

OFFERED: Final = 16
"""Reports shown to one decision."""


@dataclass(slots=True)
class _Work:
    task: Task
    running: asyncio.Task[None] | None
    report: Report | None = None


class Workers:
    """The work of one instance while it leads. `mirror` is its name; `wake` says that a report came."""

    def __init__(self, mirror: str, do: Do, *, wake: Callable[[], None]) -> None:
        self.mirror = mirror
        self._do = do
        self._wake = wake
        self._work: dict[Hashable, _Work] = {}
        self._told: list[Report] = []
        self._looking: asyncio.Task[None] | None = None
        self._ending: set[asyncio.Task[None]] = set()

    def sync(self, due: Sequence[Task]) -> None:
        """Makes what runs equal to what is due. To be called on the event loop."""
        wanted = {_key(task): task for task in due}
        for key in [key for key in self._work if key not in wanted]:
            self._end(self._work.pop(key).running)
        for key, task in wanted.items():
            if key not in self._work:
                self._work[key] = work = _Work(task=task, running=None)
                work.running = asyncio.create_task(self._run(work, 0.0), name=f"work {key}")

    def look(self, found: Coroutine[Any, Any, Sequence[Report]]) -> None:
        """Offers what `found` reports, once, besides what the tasks do."""
        self._looking = asyncio.create_task(self._look(found), name="look")

    async def _look(self, found: Coroutine[Any, Any, Sequence[Report]]) -> None:
        self._told.extend(await found)
        self._wake()

    def offered(self) -> tuple[Report, ...]:
        """Reports no decision has dealt with yet, oldest work first."""
        found = (work.report for work in self._work.values() if work.report is not None)
        return tuple(
            report for _, report in zip(range(OFFERED), chain(self._told, found), strict=False)
        )

    def settle(self, report: Report) -> None:
        """A decision dealt with `report`. If its task is still due it begins again after a pause."""
        if report in self._told:
            self._told.remove(report)
            return
        for work in self._work.values():
            if work.report == report:
                work.report = None
                work.running = asyncio.create_task(self._run(work, AGAIN_AFTER_S))
                return

    def stop(self) -> None:
        """The term is over: everything ends, and reports of it are dropped."""
        for work in self._work.values():
            self._end(work.running)
        self._end(self._looking)
        self._work, self._told, self._looking = {}, [], None

    async def close(self) -> None:
        """Ends everything and waits until it has."""
        self.stop()
        while self._ending:
            await asyncio.wait(tuple(self._ending))

    def _end(self, running: asyncio.Task[None] | None) -> None:
        if running is not None and not running.done():
            running.cancel()
            self._ending.add(running)
            running.add_done_callback(self._ending.discard)

    async def _run(self, work: _Work, pause_s: float) -> None:
        await asyncio.sleep(pause_s)
        try:
            work.report = await self._do(work.task)
        except Exception as error:
            # A fault of ours ends this one piece of work, with a sentence, and nothing else.
            log.exception("work failed", extra={"task": type(work.task).__name__})
            work.report = self._fault(work.task, error)
        self._wake()

    def _fault(self, task: Task, error: Exception) -> Report:
        sentence = (
            f"the control plane failed at it ({type(error).__name__}); its log has the reason"
        )
        if isinstance(task, Fetch | Verify | Remove):
            return FileFault(key=task.key, mirror=self.mirror, code="internal", sentence=sentence)
        return StepFailed(
            job=task.job,
            attempt=task.attempt,
            index=task.index,
            code="internal",
            sentence=sentence,
        )


def _key(task: Task) -> Hashable:
    """What makes two tasks the same work: a fetch stays the same when another mirror gets a copy."""
    if isinstance(task, Fetch | Verify | Remove):
        return (type(task).__name__, task.key)
    return task
