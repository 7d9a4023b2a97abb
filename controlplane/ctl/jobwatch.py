"""Follows one serve job from wherever it stands until it is over, and prints its course.

Leaving changes nothing: the job runs in the control plane. On a terminal the files' way is a bar below the
steps; on a pipe it is a line now and then.
"""

import asyncio
from contextlib import AsyncExitStack
from typing import Final

from rich.console import Console
from rich.text import Text

from controlplane.ctl import jobview
from controlplane.ctl.bars import bar_for
from controlplane.ctl.connect import Place, open_connection
from controlplane.ctl.failures import CtlError
from controlplane.ctl.jobview import Amount, Amounts
from controlplane.ctl.show import console
from events.log import Batch, EventLog, Recorded, Wire
from events.subjects import event_subject
from schemas.file import File
from schemas.job import Job
from schemas.progress import FileProgress

_COLOURS: Final = {"done": "green", "running": "yellow", "failed": "red", "skipped": "dim"}


class JobFailed(CtlError):
    """The job is over and did not succeed; what it was is said already."""

    def __init__(self, job: Job) -> None:
        super().__init__(*jobview.ending(job))


async def watch(place: Place, job: str) -> Job:
    """Prints until the job is over. Raises JobFailed, CtlError when there is no such job, Unreachable."""
    from events.jetstream import JetStreamLog, JetStreamWire

    async with open_connection(place) as connection:
        log = JetStreamLog(connection, source="/ctl")
        return await watch_on(log, JetStreamWire(connection), job, place.prefix, console())


async def watch_on(log: EventLog, wire: Wire, job: str, prefix: str, out: Console) -> Job:
    """As `watch`, on an open log and wire; follows a joined job into the one it became."""
    while True:
        last = await _Watch(log, wire, job, prefix, out).run()
        for line in jobview.ending(last) if last.state in ("done", "joined") else ():
            out.print(line, soft_wrap=True)
        if last.state == "joined" and last.joined:
            job = last.joined
            continue
        if last.state != "done":
            raise JobFailed(last)
        return last


class _Watch:
    def __init__(self, log: EventLog, wire: Wire, job: str, prefix: str, out: Console) -> None:
        self._log = log
        self._wire = wire
        self._id = job
        self._prefix = prefix
        self._out = out
        self._job: Job | None = None
        self._amounts = Amounts()
        self._bar = bar_for(out, jobview.INDENT)
        self._away = False

    async def run(self) -> Job:
        loop = asyncio.get_running_loop()
        async with AsyncExitStack() as at_the_end:
            at_the_end.callback(self._bar.close)
            for kind, hear in (("file", self._on_file), ("fetch", self._on_fetch)):
                heard = await self._wire.on_progress(kind, FileProgress, hear)
                at_the_end.push_async_callback(heard.close)
            follower = self._log.follow(
                [
                    event_subject("job", self._id, prefix=self._prefix),
                    f"{event_subject('file', prefix=self._prefix)}.*",
                ]
            )
            at_the_end.push_async_callback(follower.close)
            while True:
                self._apply(await follower.next())
                if self._job is not None and jobview.is_over(self._job):
                    return self._job
                self._show(loop.time())

    def _apply(self, batch: Batch) -> None:
        if not batch.connected:
            if not self._away:
                self._tell("NATS is away; the job goes on when it is back", "yellow")
            self._away = True
            return
        self._away = False
        for item in batch.items:
            if not isinstance(item, Recorded):
                continue
            if isinstance(item.state, Job):
                self._take(item.state)
            elif isinstance(item.state, File):
                self._amounts.files[item.state.key] = item.state
        if batch.synced and self._job is None:
            raise CtlError(f"there is no job {self._id!r}; yardctl job list shows what there is")

    def _take(self, job: Job) -> None:
        for line in jobview.news(self._job, job):
            self._tell(line.text(), _COLOURS.get(line.state, ""))
        # What is shown belongs to the step under way: with the step it goes, also when the next one runs already.
        if self._job is None or _under_way(self._job) != _under_way(job):
            self._bar.hide()
        self._job = job

    def _tell(self, text: str, style: str) -> None:
        self._bar.print(Text(text, style=style if self._out.is_terminal else ""))

    def _on_file(self, writer: str, key: str, told: FileProgress) -> None:
        del writer
        self._amounts.mirror[key] = told
        self._show(asyncio.get_running_loop().time())

    def _on_fetch(self, writer: str, replica: str, told: FileProgress) -> None:
        del replica
        if self._job is not None and told.model == self._job.model:
            self._amounts.node[writer] = told
            self._show(asyncio.get_running_loop().time())

    def _show(self, now_s: float) -> None:
        job = self._job
        if job is None or not job.steps or job.steps[-1].state != "running":
            return
        amount: Amount | None = None
        if job.steps[-1].name == "mirror" and job.file_set is not None:
            mine = Amounts(
                files={k: f for k, f in self._amounts.files.items() if jobview.belongs(f, job)},
                mirror=self._amounts.mirror,
            )
            amount = mine.of_mirror(job.file_set)
        elif job.steps[-1].name == "placement":
            amount = self._amounts.of_node()
        if amount is not None:
            self._bar.show(amount, now_s)


def _under_way(job: Job) -> tuple[int, int, bool]:
    """Attempt, step, and whether that runs."""
    return job.attempt, len(job.steps), bool(job.steps) and job.steps[-1].state == "running"
