"""A process that folds into a projection and kills itself just before a commit: run by a test.

Arguments: the sqlite file, how many commits to let through. The log is one in memory with 3,000 models.
"""

import asyncio
import os
import signal
import sys
import time
from pathlib import Path

import aiosqlite

from controlplane.metrics import Metrics
from controlplane.projections.readmodel import ReadModel
from events.ids import utc_now
from events.log import Draft
from events.memory import MemoryLog
from events.memory_broker import MemoryBroker
from schemas.model import Model, ModelAdded


async def fill(log: MemoryLog, count: int) -> None:
    """The same models each time, so that two processes hold the same states."""
    for n in range(count):
        await log.append(
            Draft(
                subject=f"yard.evt.model.m{n:05}",
                event=ModelAdded(by="x"),
                state=Model(name=f"m{n:05}", incarnation="i"),
                expected_seq=0,
                rev=1,
            ),
            epoch=1,
        )


def read_model(log: MemoryLog, path: Path) -> ReadModel:
    return ReadModel(
        events=log,
        path=path,
        prefix="yard",
        now=utc_now,
        monotonic=time.monotonic,
        metrics=Metrics(),
    )


async def main(path: Path, commits: int, live: bool) -> None:
    log = MemoryLog(MemoryBroker(mint=lambda: "the-stream"))
    await fill(log, 3000 if not live else 1)
    seen = 0
    original = aiosqlite.Connection.execute

    async def execute(self: aiosqlite.Connection, sql: str, *given: object) -> object:
        nonlocal seen
        if sql == "COMMIT":
            seen += 1
            if seen > commits:
                os.kill(os.getpid(), signal.SIGKILL)
        return await original(self, sql, *given)  # type: ignore[arg-type]

    aiosqlite.Connection.execute = execute  # type: ignore[method-assign,assignment]
    model = read_model(log, path)
    await model.open()
    task = asyncio.create_task(model.run())
    if live:
        await model.reached(1, 10)
        for n in range(1, 3000):
            await log.append(
                Draft(
                    subject=f"yard.evt.model.m{n:05}",
                    event=ModelAdded(by="x"),
                    state=Model(name=f"m{n:05}", incarnation="i"),
                    expected_seq=0,
                    rev=1,
                ),
                epoch=1,
            )
            if n % 50 == 0:
                # However slow the machine is, no one commit takes in all of it.
                await model.reached(n + 1, 10)
    await task


if __name__ == "__main__":
    asyncio.run(main(Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3] == "live"))
