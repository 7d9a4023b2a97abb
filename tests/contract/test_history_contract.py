"""What history tells, from the audit and the log together, on the memory twin and on a real nats-server."""

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

from events.log import Broken, EventLog, Follower, Recorded, Unavailable
from schemas.commands import Command, ModelRemove
from schemas.model import Model
from tests.support import drafts
from tests.support.aio import run, until
from tests.support.logstages import Stage, jetstream_stage, memory_stage

Scene = Callable[[Stage], Awaitable[None]]
Play = Callable[[Scene], None]
ALL = ("yard.evt.>",)


@pytest.fixture(params=["memory", "jetstream"])
def play(request: pytest.FixtureRequest, tmp_path: Path) -> Play:
    """Runs a scene on a fresh stage."""

    def on_stage(scene: Scene) -> None:
        async def main() -> None:
            stage: Any = memory_stage() if request.param == "memory" else jetstream_stage(tmp_path)
            async with stage as set_up:
                await scene(set_up)

        run(main(), timeout_s=40)

    return on_stage


async def grow(log: EventLog, name: str, count: int, *, expected: int = 0, rev: int = 1) -> int:
    """So many events of one model; the sequence of the last."""
    for n in range(count):
        done = await log.append(drafts.model(name, expected, rev + n), epoch=1)
        expected = done.seqs[-1]
    return expected


async def audited(log: EventLog) -> None:
    loop = asyncio.get_running_loop()
    began = loop.time()
    await until(lambda: log.audited(loop.time() - began), "the audit to catch up")


async def told(follower: Follower) -> list[Recorded | Broken]:
    """Everything up to where the follower is synced."""
    items: list[Recorded | Broken] = []
    while True:
        batch = await asyncio.wait_for(follower.next(), 10)
        items += batch.items
        if batch.synced:
            return items


async def history(log: EventLog, *filters: str, **arguments: Any) -> list[int]:
    follower = log.history(filters or ALL, **arguments)
    try:
        return [item.seq for item in await told(follower)]
    finally:
        await follower.close()


def test_history_tells_what_the_log_trimmed_and_goes_on(play: Play) -> None:
    async def scene(stage: Stage) -> None:
        last = await grow(stage.other, "m", 60)
        await audited(stage.other)
        await grow(stage.other, "m", 40, expected=last, rev=61)
        await audited(stage.other)
        follower = stage.log.history(ALL)
        items = await told(follower)
        assert [item.seq for item in items] == list(range(1, 101))
        assert all(isinstance(item, Recorded) and item.noun == "model" for item in items)
        await grow(stage.other, "n", 1)
        batch = await asyncio.wait_for(follower.next(), 10)
        assert [item.seq for item in batch.items] == [101]
        await follower.close()

    play(scene)


def test_history_tells_of_a_subject_that_ended(play: Play) -> None:
    async def scene(stage: Stage) -> None:
        last = await grow(stage.other, "m", 3)
        await grow(stage.other, "n", 2)
        await audited(stage.other)
        await stage.other.append(drafts.model_deleted("m", last, 4), epoch=1)
        await audited(stage.other)
        follower = stage.log.history((drafts.model_subject("m"),))
        items = await told(follower)
        await follower.close()
        assert [item.seq for item in items] == [1, 2, 3, 6]
        states = [isinstance(item, Recorded) and isinstance(item.state, Model) for item in items]
        assert states == [True, True, True, False]

    play(scene)


@pytest.mark.parametrize("after", [0, 1, 30, 89, 90, 95])
def test_history_begins_behind_a_sequence(play: Play, after: int) -> None:
    async def scene(stage: Stage) -> None:
        last = await grow(stage.other, "m", 60)
        await audited(stage.other)
        # Commands are in the audit too, so its sequences are not the log's.
        for n in range(7):
            body = ModelRemove(model=f"x{n}")
            await stage.other.send("admin", Command(id=f"c-{n}", body=body))
        await grow(stage.other, "m", 30, expected=last, rev=61)
        await audited(stage.other)
        last = await grow(stage.other, "n", 5)
        assert await history(stage.log, after=after) == list(range(after + 1, last + 1))

    play(scene)


def test_history_begins_at_a_time_of_the_server(play: Play) -> None:
    async def scene(stage: Stage) -> None:
        last = await grow(stage.other, "m", 5)
        await audited(stage.other)
        follower = stage.log.history(ALL)
        items = [item for item in await told(follower) if isinstance(item, Recorded)]
        await follower.close()
        since = items[2].stored_at
        await grow(stage.other, "m", 2, expected=last, rev=6)
        expected = [item.seq for item in items if item.stored_at >= since] + [6, 7]
        assert await history(stage.log, since=since) == expected

    play(scene)


def test_history_of_an_empty_log_is_empty(play: Play) -> None:
    async def scene(stage: Stage) -> None:
        assert await history(stage.log) == []

    play(scene)


def test_a_connection_that_is_lost_is_told_and_history_goes_on(play: Play) -> None:
    async def scene(stage: Stage) -> None:
        await grow(stage.other, "m", 3)
        await audited(stage.other)
        follower = stage.log.history(ALL)
        await stage.cut()
        batch = await asyncio.wait_for(follower.next(), 10)
        assert (batch.items, batch.connected) == ((), False)
        await stage.restore()
        assert [item.seq for item in await told(follower)] == [1, 2, 3]
        await follower.close()

    play(scene)


def test_an_audit_that_caught_up_says_so(play: Play) -> None:
    async def scene(stage: Stage) -> None:
        await grow(stage.other, "m", 3)
        await audited(stage.log)
        await stage.cut()
        with pytest.raises(Unavailable):
            await stage.log.audited(60)

    play(scene)
