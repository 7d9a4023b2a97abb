"""History where the audit is younger than the log, or is not there at all."""

import asyncio
from pathlib import Path

from tests.support import drafts
from tests.support.aio import run, until
from tests.support.logstages import JetStreamStage, jetstream_stage

ALL = ("yard.evt.>",)


async def history(stage: JetStreamStage) -> list[int]:
    follower = stage.log.history(ALL)
    found: list[int] = []
    try:
        while True:
            batch = await follower.next()
            found += [item.seq for item in batch.items]
            if batch.synced:
                return found
    finally:
        await follower.close()


async def delete_audit(stage: JetStreamStage) -> None:
    await stage.direct.request("$JS.API.STREAM.DELETE.YARD_AUDIT", b"", timeout_s=2)


def test_without_an_audit_history_is_what_the_log_holds(tmp_path: Path) -> None:
    async def scene() -> None:
        async with jetstream_stage(tmp_path) as stage:
            await delete_audit(stage)
            for n in range(3):
                await stage.other.append(drafts.model(f"m{n}", 0), epoch=1)
            assert await history(stage) == [1, 2, 3]

    run(scene(), timeout_s=40)


def test_what_the_audit_let_go_is_told_by_the_log(tmp_path: Path) -> None:
    async def scene() -> None:
        async with jetstream_stage(tmp_path) as stage:
            for n in range(6):
                await stage.other.append(drafts.model(f"m{n}", 0), epoch=1)
            loop = asyncio.get_running_loop()
            began = loop.time()
            await until(lambda: stage.other.audited(loop.time() - began), "the audit to catch up")
            purge = "$JS.API.STREAM.PURGE.YARD_AUDIT"
            await stage.direct.request(purge, b'{"seq": 4}', timeout_s=2)
            assert await history(stage) == [1, 2, 3, 4, 5, 6]

    run(scene(), timeout_s=40)
