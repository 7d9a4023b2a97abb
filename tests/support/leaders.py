"""A leader's loop on a log in memory, whose batches end as a test says."""

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Callable, Sequence
from typing import cast

from controlplane.candidate import Me
from controlplane.identifiers import new_ids
from controlplane.leader import LeaderLoop, NextDecision
from controlplane.metrics import Metrics
from controlplane.readiness import Finding, assess
from events.ids import utc_now
from events.log import Appended, Draft, EventLog, Fence, LogError
from events.memory import MemoryLog, MemoryWire
from events.memory_broker import MemoryBroker
from schemas.settings import ControlplaneSettings
from tests.support.aio import until
from tests.support.controlplanes import add_command, smallest_domain

SETTINGS = ControlplaneSettings(leader_silence_s=0.3)


class Faulty:
    """A log whose next batches end as told: an error instead of, or after, being stored."""

    def __init__(self, inner: MemoryLog) -> None:
        self._inner = inner
        self.faults: list[tuple[LogError, bool]] = []
        self.batches = 0

    def __getattr__(self, name: str) -> object:
        return getattr(self._inner, name)

    async def append_batch(
        self, drafts: Sequence[Draft], *, epoch: int, fence: Fence | None = None
    ) -> Appended:
        self.batches += 1
        if self.faults:
            error, stored = self.faults.pop(0)
            if stored:
                await self._inner.append_batch(drafts, epoch=epoch, fence=fence)
            raise error
        return await self._inner.append_batch(drafts, epoch=epoch, fence=fence)


class Yard:
    """One loop on one broker, and an operator's log beside it."""

    def __init__(self, decide: NextDecision = smallest_domain, schema: int = 1) -> None:
        self.broker = MemoryBroker(schema=schema)
        self.log = MemoryLog(self.broker)
        self.faulty = Faulty(self.log)
        self.admin = MemoryLog(self.broker, source="/ctl/anna")
        self.wire = MemoryWire(self.log.connection)
        self.others = MemoryWire(self.admin.connection)
        self.loop = self.another("cp-1", decide)

    def another(
        self, instance: str, decide: NextDecision = smallest_domain, log: EventLog | None = None
    ) -> LeaderLoop:
        return LeaderLoop(
            events=log or cast(EventLog, self.faulty),
            wire=self.wire,
            me=Me(instance=instance, host=f"host-of-{instance}", pid=1),
            settings=SETTINGS,
            make_decider=lambda: decide,
            ids=new_ids(),
            now=utc_now,
            monotonic=time.monotonic,
            metrics=Metrics(),
        )

    async def add(self, name: str) -> str:
        command = add_command(name)
        await self.admin.send("anna", command)
        return command.id

    def findings(self) -> list[Finding]:
        return list(assess(self.loop.facts()))


@contextlib.asynccontextmanager
async def started(loop: LeaderLoop, *, leading: bool = True) -> AsyncIterator[None]:
    task = asyncio.create_task(loop.run())
    try:
        if leading:
            await until(lambda: loop.term is not None or task.done(), "a term")
        yield
        if task.done():
            task.result()
    finally:
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task


def decided(yard: Yard, command_id: str) -> Callable[[], bool]:
    return lambda: command_id in yard.loop.world.outcomes
