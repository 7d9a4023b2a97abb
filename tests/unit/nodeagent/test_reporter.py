"""The reporter on a log in memory: in order, once, through every outage, and never over a newer agent's word."""

import asyncio
import contextlib
from datetime import UTC, datetime, timedelta

import pytest

from events.log import Draft
from events.memory import MemoryLog
from events.memory_broker import MemoryBroker
from events.retry import ServerError
from events.subjects import event_subject
from nodeagent.journal import Entry, Journal, Queue
from nodeagent.ownlog import read_own, read_subjects
from nodeagent.reporter import Deposed, Reporter
from schemas.card import Card, CardMeasured
from schemas.replica import ReplicaDeleted, ReplicaReady, ReplicaStarting
from tests.support.agent_yard import a_held
from tests.support.aio import run, until

NOW = datetime(2026, 1, 1, tzinfo=UTC)


def subject(name: str) -> str:
    return event_subject("replica", "n1", name)


def entry(n: int, name: str = "r-1", event=None) -> Entry:
    """Entry `n`, a second after the one before."""
    return Entry(
        n=n,
        subject=subject(name),
        event=event or ReplicaReady(),
        time=NOW + timedelta(seconds=n),
        replica=a_held(name, pid=n).replica,
    )


class Desk:
    """A reporter at work, with its log and broker."""

    def __init__(self, broker: MemoryBroker, journal: Journal) -> None:
        self.broker = broker
        self.journal = journal
        self.log = MemoryLog(broker, source="/agent/n1")
        self.reporter = Reporter(
            self.log, journal, node="n1", actor="agent-n1", retry_s=0.01, full_retry_s=0.01
        )
        self.stored: list[tuple[int, int]] = []
        self.reporter.on_stored(lambda e, seq: self.stored.append((e.n, seq)))

    async def read(self, subjects: str = "yard.evt.>"):
        """Every event of the stream, through another connection."""
        follower = MemoryLog(self.broker).follow([subjects], after=0)
        try:
            return (await follower.next()).items
        finally:
            await follower.close()


@contextlib.asynccontextmanager
async def desk(tmp_path, epoch: int = 7):
    journal, _ = await Journal.open(tmp_path / "j")
    made = Desk(MemoryBroker(), journal)
    tasks = [asyncio.create_task(journal.run()), asyncio.create_task(made.reporter.run())]
    if epoch:
        made.reporter.register(epoch, {})
    try:
        yield made, tasks[1]
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await journal.close()


def test_events_are_stored_in_order_with_their_own_times_and_the_epoch(tmp_path):
    async def story():
        async with desk(tmp_path) as (made, _):
            for n in range(1, 6):
                made.reporter.put(entry(n, f"r-{n % 2}"), None)
            await made.reporter.drained()
            items = await made.read()
            assert [i.state.pid for i in items] == [1, 2, 3, 4, 5]
            assert [i.time for i in items] == [NOW + timedelta(seconds=n) for n in range(1, 6)]
            assert {i.epoch for i in items} == {i.state.epoch for i in items} == {7}
            assert [i.rev for i in items] == [1, 1, 2, 2, 3]
            assert made.stored == [(n, n) for n in range(1, 6)]

    run(story())


def test_nothing_is_written_before_the_node_is_registered_nor_before_it_is_durable(tmp_path):
    async def story():
        async with desk(tmp_path, epoch=0) as (made, _):
            durable = asyncio.get_running_loop().create_future()
            made.reporter.put(entry(1), durable)
            await asyncio.sleep(0)
            assert made.broker.published == 0
            made.reporter.register(3, {})
            for _ in range(20):
                await asyncio.sleep(0)
            assert made.broker.published == 0
            durable.set_result(None)
            await made.reporter.drained()
            assert made.broker.published == 1

    run(story())


def test_log_01_an_event_stored_by_an_agent_that_was_killed_then_is_not_stored_twice(tmp_path):
    """Its successor finds it in the journal as not sent, and in the log as the last of its subject."""

    async def story():
        async with desk(tmp_path) as (made, _):
            made.reporter.put(entry(1), None)
            await made.reporter.drained()
            own = await read_own(made.log, "n1", "yard")
            made.reporter.register(8, own.heads)
            made.reporter.put(entry(1), None)
            made.reporter.put(entry(2), None)
            await made.reporter.drained()
            items = await made.read()
            assert [(i.state.pid, i.rev, i.epoch) for i in items] == [(1, 1, 7), (2, 2, 8)]
            assert made.stored == [(1, 1), (1, 1), (2, 2)]

    run(story())


def test_log_01_only_the_last_stored_event_may_still_count_as_unsent(tmp_path):
    """Its mark may be late, for it is found where it was put; all before it must be marked."""

    async def story():
        async with desk(tmp_path) as (made, _):
            journal = made.journal
            both = [(n, journal.write(Queue(entry=entry(n)))) for n in (1, 2)]
            for n, durable in both:
                made.reporter.put(entry(n), durable)
            await made.reporter.drained()
            await journal.write()
            found, memory = await Journal.open(tmp_path / "j")
            await found.close()
            assert memory.unsent == []
            made.reporter.put(entry(3), journal.write(Queue(entry=entry(3))))
            await made.reporter.drained()
            found, memory = await Journal.open(tmp_path / "j")
            await found.close()
            assert [e.n for e in memory.unsent] == [3]
            await journal.write(Queue(entry=entry(4)))
            found, memory = await Journal.open(tmp_path / "j")
            await found.close()
            assert [e.n for e in memory.unsent] == [4]

    run(story())


def test_log_01_of_a_backlog_nothing_is_appended_before_what_went_before_is_marked(tmp_path):
    """Else an agent killed then would leave two that count as unsent, and its successor tell the first again."""

    async def story():
        async with desk(tmp_path, epoch=0) as (made, _):
            journal = made.journal
            for n in (1, 2, 3):
                made.reporter.put(entry(n), journal.write(Queue(entry=entry(n))))
            await journal.write()
            async with journal._writing:  # the disk is slow
                made.reporter.register(7, {})
                for _ in range(50):
                    await asyncio.sleep(0)
                assert made.broker.published == 1
            await made.reporter.drained()
            assert [i.state.pid for i in await made.read()] == [1, 2, 3]

    run(story())


def test_log_18_what_happened_during_an_outage_follows_in_order(tmp_path):
    async def story():
        async with desk(tmp_path) as (made, _):
            made.log.connection.disconnect()
            for n in range(1, 30):
                made.reporter.put(entry(n, f"r-{n % 3}"), None)
            assert made.reporter.unreported() == {"r-0", "r-1", "r-2"}
            made.log.connection.reconnect()
            await made.reporter.drained()
            assert [i.state.pid for i in await made.read()] == list(range(1, 30))
            assert made.reporter.unreported() == frozenset()

    run(story())


def test_log_05_a_lost_answer_stores_nothing_twice(tmp_path):
    async def story():
        async with desk(tmp_path) as (made, _):
            made.broker.lose_acks = 2
            made.reporter.put(entry(1), None)
            made.reporter.put(entry(2), None)
            await made.reporter.drained()
            assert [i.state.pid for i in await made.read()] == [1, 2]

    run(story())


def test_log_15_a_full_log_is_waited_out(tmp_path):
    async def story():
        async with desk(tmp_path) as (made, _):
            full = ServerError(code=503, err_code=10077, description="maximum bytes exceeded")
            made.broker.refusals.extend([full] * 4)
            made.reporter.put(entry(1), None)
            made.reporter.put(entry(2), None)
            await made.reporter.drained()
            assert [i.state.pid for i in await made.read()] == [1, 2]

    run(story())


async def another_word(made: Desk, epoch: int, expected: int, rev: int) -> int:
    stored = await MemoryLog(made.broker, source="/agent/n1").append(
        Draft(
            subject=subject("r-1"),
            event=ReplicaStarting(port=1),
            state=a_held("r-1", "starting", pid=99).replica,
            expected_seq=expected,
            rev=rev,
        ),
        epoch=epoch,
    )
    return stored.seqs[0]


def test_log_20_a_newer_agents_word_deposes(tmp_path):
    async def story():
        async with desk(tmp_path) as (made, task):
            made.reporter.put(entry(1), None)
            await made.reporter.drained()
            await another_word(made, epoch=8, expected=1, rev=2)
            made.reporter.put(entry(2), None)
            with pytest.raises(Deposed, match="since epoch 8"):
                await task
            assert [i.epoch for i in await made.read()] == [7, 8]

    run(story())


def test_an_older_agents_late_word_is_written_over(tmp_path):
    async def story():
        async with desk(tmp_path) as (made, _):
            made.reporter.put(entry(1), None)
            await made.reporter.drained()
            await another_word(made, epoch=5, expected=1, rev=2)
            made.reporter.put(entry(2), None)
            await made.reporter.drained()
            last = (await read_subjects(made.log, subject("r-1")))[-1]
            assert (last.state.pid, last.rev, last.epoch) == (2, 3, 7)

    run(story())


def test_log_22_nobody_writes_over_what_he_cannot_read(tmp_path):
    async def story():
        async with desk(tmp_path) as (made, _):
            made.broker.put(subject("r-1"), b"junk")
            made.reporter.put(entry(1), None)
            made.reporter.put(entry(2, "r-2"), None)
            await made.reporter.drained()
            assert made.broker.events.subjects[subject("r-1")] == [1]
            (good,) = await read_subjects(made.log, subject("r-2"))
            assert good.state.pid == 2

    run(story())


def test_suspended_it_writes_nothing_until_it_is_registered_anew(tmp_path):
    async def story():
        async with desk(tmp_path) as (made, _):
            made.reporter.put(entry(1), None)
            await made.reporter.drained()
            made.reporter.suspend()
            made.broker.replace_events()
            made.reporter.put(entry(2), None)
            for _ in range(20):
                await asyncio.sleep(0)
            assert made.reporter.backlog == 1
            made.reporter.register(11, {})
            await made.reporter.drained()
            (item,) = await made.read()
            assert (item.state.pid, item.epoch, item.rev) == (2, 11, 1)

    run(story())


def test_log_29_a_tombstone_ends_the_subject(tmp_path):
    async def story():
        async with desk(tmp_path) as (made, _):
            made.reporter.put(entry(1), None)
            gone = Entry(n=2, subject=subject("r-1"), event=ReplicaDeleted(), time=NOW)
            made.reporter.put(gone, None)
            assert made.reporter.unreported() == {"r-1"}
            await made.reporter.drained()
            (item,) = await read_subjects(made.log, subject("r-1"))
            assert (item.type, item.state) == ("replica.deleted", None)

    run(story())


def test_heads_read_at_the_start_are_written_onto(tmp_path):
    async def story():
        async with desk(tmp_path, epoch=0) as (made, _):
            await another_word(made, epoch=2, expected=0, rev=1)
            own = await read_own(made.log, "n1", "yard")
            head = own.heads[subject("r-1")]
            assert (head.seq, head.rev, head.writable) == (1, 1, True)
            assert own.ports == {"r-1": 1}
            assert own.replicas["r-1"].pid == 99
            made.reporter.register(3, own.heads)
            published = made.broker.published
            made.reporter.put(entry(1), None)
            card = Card(node="n1", id="cpu", kind="cpu", memory_bytes=1, rev=0)
            made.reporter.put(
                Entry(
                    n=2,
                    subject=event_subject("card", "n1", "cpu"),
                    event=CardMeasured(used_bytes=0),
                    time=NOW,
                    card=card,
                ),
                None,
            )
            await until(lambda: made.reporter.backlog == 0, "both events")
            assert made.broker.published == published + 2, "no conflict on the way"

    run(story())


def a_batch(first: int, *cards: str) -> list[Entry]:
    """One change on these cards."""
    return [
        Entry(
            n=first + n,
            subject=event_subject("card", "n1", name),
            event=CardMeasured(used_bytes=first),
            time=NOW + timedelta(seconds=first),
            card=Card(node="n1", id=name, kind="gpu", memory_bytes=1, rev=first, used_bytes=first),
            batch=first,
        )
        for n, name in enumerate(cards)
    ]


def test_what_is_one_change_is_stored_together_with_its_own_time(tmp_path):
    async def story():
        async with desk(tmp_path) as (made, _):
            made.reporter.put(entry(1), None)
            for one in (*a_batch(2, "gpu0", "gpu1"), *a_batch(4, "gpu1", "gpu0")):
                made.reporter.put(one, None)
            made.reporter.put(entry(6), None)
            await made.reporter.drained()
            items = await made.read()
            assert [i.key[1] for i in items] == ["r-1", "gpu0", "gpu1", "gpu1", "gpu0", "r-1"]
            assert [i.rev for i in items] == [1, 1, 1, 2, 2, 2]
            assert [(i.time - NOW).seconds for i in items] == [1, 2, 2, 4, 4, 6]
            assert made.stored == [(n, n) for n in range(1, 7)]

    run(story())


def test_log_05_a_change_of_several_cards_whose_answer_was_lost_is_stored_once(tmp_path):
    async def story():
        async with desk(tmp_path) as (made, _):
            made.broker.lose_acks = 4
            for one in (*a_batch(1, "gpu0", "gpu1"), *a_batch(3, "gpu0", "gpu1")):
                made.reporter.put(one, None)
            await made.reporter.drained()
            items = await made.read()
            assert [(i.key[1], i.state.used_bytes) for i in items] == [
                ("gpu0", 1),
                ("gpu1", 1),
                ("gpu0", 3),
                ("gpu1", 3),
            ]

    run(story())


def test_log_01_a_change_stored_by_an_agent_that_was_killed_then_is_not_stored_twice(tmp_path):
    async def story():
        async with desk(tmp_path) as (made, _):
            first = a_batch(1, "gpu0", "gpu1")
            for one in first:
                made.reporter.put(one, made.journal.write(Queue(entry=one)))
            await made.reporter.drained()
            found, memory = await Journal.open(tmp_path / "j")
            await found.close()
            assert memory.unsent == first, "its mark may be late, for all of it"
            own = await read_own(made.log, "n1", "yard")
            made.reporter.register(8, own.heads)
            for one in (*memory.unsent, *a_batch(3, "gpu0", "gpu1")):
                made.reporter.put(one, None)
            await made.reporter.drained()
            assert [(i.rev, i.epoch) for i in await made.read()] == [(1, 7), (1, 7), (2, 8), (2, 8)]

    run(story())


def test_log_22_of_one_change_the_cards_that_can_be_written_are(tmp_path):
    async def story():
        async with desk(tmp_path) as (made, _):
            made.broker.put(event_subject("card", "n1", "gpu0"), b"junk")
            for one in a_batch(1, "gpu0", "gpu1"):
                made.reporter.put(one, None)
            await made.reporter.drained()
            (good,) = await read_subjects(made.log, event_subject("card", "n1", "gpu1"))
            assert good.state.used_bytes == 1
            assert len(made.stored) == 2

    run(story())


def test_an_older_agents_late_word_does_not_split_a_change(tmp_path):
    async def story():
        async with desk(tmp_path) as (made, _):
            late = Draft(
                subject=event_subject("card", "n1", "gpu1"),
                event=CardMeasured(used_bytes=0),
                state=Card(node="n1", id="gpu1", kind="gpu", memory_bytes=1, rev=0),
                expected_seq=0,
                rev=1,
            )
            await MemoryLog(made.broker, source="/agent/n1").append(late, epoch=3)
            for one in a_batch(1, "gpu0", "gpu1"):
                made.reporter.put(one, None)
            await made.reporter.drained()
            items = await made.read()
            assert [(i.seq, i.key[1], i.epoch) for i in items[1:]] == [
                (2, "gpu0", 7),
                (3, "gpu1", 7),
            ]

    run(story())
