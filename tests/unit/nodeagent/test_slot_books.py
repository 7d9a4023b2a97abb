"""What the agent says of a replica's slots: journalled, reported, read again, and ended with the replica."""

import asyncio
import contextlib
from datetime import UTC, datetime

from events.memory import MemoryLog
from events.memory_broker import MemoryBroker
from nodeagent.books import Books
from nodeagent.journal import Journal, Memory
from nodeagent.ownlog import read_own, read_subjects
from nodeagent.reporter import Reporter
from schemas.messages import tag_of
from schemas.replica import ReplicaStopped
from schemas.slots import Slot, Slots, SlotsLoaded
from tests.support.agent_yard import a_held, some_books
from tests.support.aio import run

NOW = datetime(2026, 1, 1, tzinfo=UTC)
VERSION = "0123456789ab"


def some_slots(*adapters: str) -> Slots:
    return Slots(
        node="n1",
        replica="r-1",
        model="m",
        epoch=0,
        limit=2,
        since=NOW,
        loaded=tuple(Slot(adapter=a, version=VERSION, since=NOW) for a in adapters),
    )


class Desk:
    def __init__(self, books: Books, reporter: Reporter, log: MemoryLog) -> None:
        self.books = books
        self.reporter = reporter
        self.log = log


@contextlib.asynccontextmanager
async def opened(tmp_path, broker: MemoryBroker, memory: Memory | None = None):
    journal, remembered = await Journal.open(tmp_path / "j")
    log = MemoryLog(broker, source="/agent/n1")
    reporter = Reporter(log, journal, node="n1", actor="agent-n1", retry_s=0.01)
    books = some_books(journal, memory or remembered, reporter, lambda: NOW)
    tasks = [asyncio.create_task(journal.run()), asyncio.create_task(reporter.run())]
    try:
        yield Desk(books, reporter, log)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await journal.close()


def test_req_b9_a_replicas_slots_are_told_with_the_epoch_and_read_at_the_next_start(tmp_path):
    async def story():
        broker = MemoryBroker()
        async with opened(tmp_path, broker) as desk:
            desk.reporter.register(7, {})
            event = SlotsLoaded(adapter="a", version=VERSION)
            desk.books.say_slots(some_slots("a"), event, cause="q-1")
            assert desk.reporter.unreported() == frozenset()
            await desk.reporter.drained()
            own = await read_own(desk.log, "n1", "yard")
            told = own.slots["r-1"]
            assert (told.epoch, [slot.adapter for slot in told.loaded]) == (7, ["a"])
            (item,) = await read_subjects(desk.log, "yard.evt.slots.n1.*")
            assert item.causationid == "q-1"
        async with opened(tmp_path, broker) as desk:
            assert desk.books.slots["r-1"].loaded == some_slots("a").loaded

    run(story())


def test_log_05_slots_that_could_not_be_told_are_told_by_the_next_agent(tmp_path):
    async def story():
        broker = MemoryBroker()
        async with opened(tmp_path, broker) as desk:
            desk.books.say_slots(some_slots("a"), SlotsLoaded(adapter="a", version=VERSION))
        async with opened(tmp_path, broker) as desk:
            desk.reporter.register(8, {})
            await desk.reporter.drained()
            own = await read_own(desk.log, "n1", "yard")
            assert own.slots["r-1"].epoch == 8

    run(story())


def test_what_only_the_log_knew_is_taken_over_and_what_the_journal_knew_stays(tmp_path):
    async def story():
        async with opened(tmp_path, MemoryBroker()) as desk:
            desk.books.slots_told({"r-1": some_slots("a")})
            desk.books.slots_told({"r-1": some_slots("b")})
            assert desk.books.slots["r-1"] == some_slots("a")

    run(story())


def test_the_subject_of_its_slots_ends_with_the_replicas(tmp_path):
    async def story():
        broker = MemoryBroker()
        memory = Memory(held={"r-1": a_held("r-1", "ready")})
        async with opened(tmp_path, broker, memory) as desk:
            desk.reporter.register(7, {})
            desk.books.say_slots(some_slots("a"), SlotsLoaded(adapter="a", version=VERSION))
            desk.books.say(desk.books.held["r-1"], ReplicaStopped())
            desk.books.forget("r-1")
            desk.books.end_subject("r-1")
            await desk.reporter.drained()
            seen = []
            for subject in ("yard.evt.slots.>", "yard.evt.replica.>"):
                seen += [tag_of(i.event) for i in await read_subjects(desk.log, subject)]
            assert seen == ["slots.deleted", "replica.deleted"]
            assert desk.books.slots == {}
            desk.books.end_slots("r-1")
            assert desk.reporter.backlog == 0
        async with opened(tmp_path, broker) as desk:
            assert desk.books.slots == {}

    run(story())
