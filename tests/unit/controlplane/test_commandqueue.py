"""Commands read and not yet settled: their order, the position, and the bound on memory."""

import asyncio
from collections.abc import Sequence
from datetime import UTC, datetime

from controlplane.commandqueue import OFFERED, WAITING_COMMANDS, CommandQueue
from events.log import StoredCommand
from events.memory import MemoryLog
from events.memory_broker import MemoryBroker
from tests.support.aio import run, until
from tests.support.controlplanes import add_command


def nothing() -> None:
    """Nobody waits."""


async def filled(count: int, after: int = 0) -> tuple[CommandQueue, "asyncio.Task[None]"]:
    log = MemoryLog(MemoryBroker())
    for n in range(count):
        await log.send("anna", add_command(f"m{n}"))
    queue = CommandQueue(log, after=after, wake=nothing)
    return queue, asyncio.create_task(queue.run())


def seqs(commands: Sequence[StoredCommand]) -> list[int]:
    return [c.seq for c in commands]


async def ended(task: "asyncio.Task[None]") -> None:
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)


def test_the_position_is_below_the_oldest_command_not_settled() -> None:
    async def story() -> None:
        queue, task = await filled(4, after=1)
        await until(lambda: len(queue.offered()) == 3, "three commands")
        first, second, third = queue.offered()
        assert seqs((first, second, third)) == [2, 3, 4]
        assert queue.position() == 1
        assert queue.position(first) == 2
        assert queue.position(second) == 1
        queue.settle(second)
        assert queue.position(first) == 3
        queue.settle(first)
        queue.settle(first)
        queue.settle(third)
        assert (queue.position(), queue.offered()) == (4, ())
        await ended(task)

    run(story())


def test_memory_holds_a_bounded_number_and_goes_on_when_there_is_room() -> None:
    async def story() -> None:
        queue, task = await filled(WAITING_COMMANDS + 5)
        await until(lambda: len(queue.offered()) == OFFERED, "commands to decide")
        assert queue.position() == 0
        settled = 0
        while settled < WAITING_COMMANDS + 5:
            await until(lambda: bool(queue.offered()), "the next commands")
            for command in queue.offered():
                queue.settle(command)
                settled += 1
                assert command.seq == settled
        assert queue.position() == WAITING_COMMANDS + 5
        await ended(task)

    run(story())


def test_an_undecodable_command_is_offered_too() -> None:
    async def story() -> None:
        log = MemoryLog(MemoryBroker())
        log.broker.commands.store("yard.cmd.anna.model.add", b"junk", {}, datetime.now(UTC))
        queue = CommandQueue(log, after=0, wake=nothing)
        task = asyncio.create_task(queue.run())
        await until(lambda: bool(queue.offered()), "the junk")
        (junk,) = queue.offered()
        assert junk.command is None
        assert junk.problem is not None
        await ended(task)

    run(story())
