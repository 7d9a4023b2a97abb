"""Runs beside the leader what its log says is due, and keeps each result until a decision has dealt with it.

It decides nothing: `domain/work.py` says what is due, the leader's decisions what a report means. Tasks that
are no longer due are cancelled, and so is everything when the term ends; nothing of it is remembered, because
the next leader finds the same work due.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Hashable, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Final

from controlplane.domain.reports import AdapterUnreadable, FileFault, Report, StepFailed
from controlplane.domain.work import Fetch, ReadAdapter, Remove, Task, Verify, due
from controlplane.domain.world import World

log = logging.getLogger(__name__)

Do = Callable[[Task], Awaitable[Report]]
"""Does one task and tells what came of it; a refusal is a report, not an exception."""

Find = Callable[[], Awaitable[Sequence[Report]]]

AGAIN_AFTER_S: Final = 1.0
AGAIN_MOST_S: Final = 60.0
"""A task that is still due after its report was dealt with begins again, but not at once, and later each time:
a registry or a disk is not asked every second for what comes to nothing."""

WORK_NOUNS: Final = frozenset({"job", "file", "replica", "model", "adapter"})
"""What tasks follow from."""

OFFERED: Final = 16
"""Reports shown to one decision."""


@dataclass(slots=True)
class _Work:
    task: Task
    running: asyncio.Task[None] | None
    report: Report | None = None
    settled: int = 0
    """How many of its reports were dealt with while it stayed due."""


class Workers:
    """The work of one instance while it leads. `mirror` is its name; `wake` says that a report came."""

    def __init__(self, mirror: str, do: Do, *, wake: Callable[[], None]) -> None:
        self.mirror = mirror
        self._do = do
        self._wake = wake
        self._work: dict[Hashable, _Work] = {}
        self._told: list[Report] = []
        self._looking: asyncio.Task[None] | None = None
        self._seen: tuple[int, int] | None = None
        """Up to where of the world the tasks were looked up: generation and folds."""
        self._ending: set[asyncio.Task[None]] = set()

    @property
    def begins(self) -> bool:
        """Whether nothing was looked up yet in this term."""
        return self._seen is None

    def keep_up(self, world: World, generation: int) -> None:
        """Syncs with what `world` says is due, if it may say something else than at the last call.

        `generation` counts how often the world's whole history was replaced.
        """
        now = (generation, world.touched_from + len(world.touched))
        last, self._seen = self._seen, now
        if last == now:
            return
        if last is not None and last[0] == generation and last[1] >= world.touched_from:
            news = world.touched[last[1] - world.touched_from :]
            if not any(noun in WORK_NOUNS for noun, _ in news):
                return
        self.sync(due(world, self.mirror))

    def sync(self, tasks: Sequence[Task]) -> None:
        """Makes what runs equal to `tasks`. To be called on the event loop."""
        wanted = {_key(task): task for task in tasks}
        for key in [key for key in self._work if key not in wanted]:
            self._end(self._work.pop(key).running)
        for key, task in wanted.items():
            work = self._work.get(key)
            if work is None:
                self._work[key] = work = _Work(task=task, running=None)
                self._begin(work, 0.0)
            else:
                # The same work may know more by now: which other mirrors have the file. It is for the next try.
                work.task = task

    def tell(self, report: Report) -> None:
        """Offers a report that no task made; while one of the same is offered it is not again."""
        if report not in self._told:
            self._told.append(report)
            self._wake()

    def look(self, find: Find) -> None:
        """Offers what `find` reports, once, besides what the tasks do."""
        self._end(self._looking)
        self._looking = asyncio.create_task(self._look(find), name="look")

    async def _look(self, find: Find) -> None:
        try:
            self._told.extend(await find())
        except Exception:
            # What is gone is found again: by a verification, or by the next term.
            log.exception("what is missing could not be found out")
            return
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
        work = self._work_of(report)
        if work is not None:
            work.report = None
            pause_s = min(AGAIN_MOST_S, AGAIN_AFTER_S * 2.0 ** min(work.settled, 16))
            work.settled += 1
            self._begin(work, pause_s)

    def spoil(self, report: Report) -> None:
        """No decision about `report` can be made or stored: a fault of its task takes its place, so that
        whoever waits for it is told. A fault nobody can decide about is settled."""
        work = None if report in self._told else self._work_of(report)
        if work is None:
            self.settle(report)
            return
        fault = self._fault(work.task, "the control plane failed to decide what came of it")
        if fault == report:
            self.settle(report)
            return
        work.report = fault
        self._wake()

    def _work_of(self, report: Report) -> _Work | None:
        return next((work for work in self._work.values() if work.report == report), None)

    def stop(self) -> None:
        """The term is over: everything ends, and reports of it are dropped."""
        for work in self._work.values():
            self._end(work.running)
        self._end(self._looking)
        self._work, self._told, self._looking, self._seen = {}, [], None, None

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

    def _begin(self, work: _Work, pause_s: float) -> None:
        work.running = asyncio.create_task(self._run(work, pause_s), name=f"work {_key(work.task)}")

    async def _run(self, work: _Work, pause_s: float) -> None:
        await asyncio.sleep(pause_s)
        task = work.task
        try:
            work.report = await self._do(task)
        except Exception as error:
            # A fault of ours ends this one piece of work, with a sentence, and nothing else.
            log.exception("work failed", extra={"task": type(task).__name__})
            work.report = self._fault(
                task, f"the control plane failed at it ({type(error).__name__})"
            )
        self._wake()

    def _fault(self, task: Task, what: str) -> Report:
        sentence = f"{what}; its log has the reason"
        if isinstance(task, Fetch | Verify | Remove):
            return FileFault(
                key=task.key,
                mirror=self.mirror,
                code="internal",
                sentence=sentence,
                removal=isinstance(task, Remove),
            )
        if isinstance(task, ReadAdapter):
            return AdapterUnreadable(
                adapter=task.adapter,
                incarnation=task.incarnation,
                code="internal",
                sentence=sentence,
            )
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
