"""The journal: what was written is there at the next start, in order, and a broken file costs nothing but itself."""

import asyncio
import contextlib
import json
from datetime import UTC, datetime

import pytest

from nodeagent import journal as kept
from nodeagent.domain.ports import PortBook
from nodeagent.journal import (
    DropEnded,
    DropHeld,
    Entry,
    Journal,
    JournalFault,
    KnownPlan,
    PutCard,
    PutHeld,
    PutPlan,
    PutPorts,
    Queue,
    Sent,
)
from schemas.card import Card, CardMeasured
from schemas.plan import Plan
from schemas.replica import ReplicaReady
from tests.support.agent_yard import a_held, a_launch, a_stop, an_item
from tests.support.aio import run, until

NOW = datetime(2026, 1, 1, tzinfo=UTC)
CARD = Card(node="n1", id="cpu", kind="cpu", memory_bytes=10, rev=3)


def entry(n: int) -> Entry:
    held = a_held()
    return Entry(n=n, subject="s", event=ReplicaReady(), time=NOW, replica=held.replica)


@contextlib.asynccontextmanager
async def opened(path):
    journal, memory = await Journal.open(path)
    writing = asyncio.create_task(journal.run())
    try:
        yield journal, memory
    finally:
        writing.cancel()
        await asyncio.gather(writing, return_exceptions=True)
        await journal.close()


def test_everything_written_is_there_again(tmp_path):
    async def story():
        held = a_held(launch=a_launch(), stop=a_stop(), port=20001, cause="e")
        book = PortBook(first=1, last=2, rest_s=3.0, cursor=2, given={1: NOW})
        plan = KnownPlan(plan=Plan(node="n1", items=(an_item("r-1"),)), seq=9)
        card_entry = Entry(n=12, subject="c", event=CardMeasured(used_bytes=1), time=NOW, card=CARD)
        async with opened(tmp_path / "j") as (journal, memory):
            assert memory.held == {}
            await journal.write(PutHeld(held=held), PutCard(card=CARD), PutPorts(book=book))
            await journal.write(
                PutPlan(known=plan), Queue(entry=card_entry), Queue(entry=entry(11))
            )
        async with opened(tmp_path / "j") as (_, memory):
            assert memory.held == {"r-1": held}
            assert memory.cards == {"cpu": CARD}
            assert memory.ports == book
            assert memory.plan == plan
            assert memory.unsent == [entry(11), card_entry]

    run(story())


def test_events_wait_in_the_order_they_happened_until_each_is_sent(tmp_path):
    async def story():
        async with opened(tmp_path / "j") as (journal, _):
            for n in (9, 10, 11, 100):
                journal.write(Queue(entry=entry(n)))
            await journal.write(Sent(n=10))
        async with opened(tmp_path / "j") as (_, memory):
            assert [e.n for e in memory.unsent] == [9, 11, 100]

    run(story())


def test_an_id_stays_used_after_its_replica_and_its_subject_are_gone(tmp_path):
    async def story():
        async with opened(tmp_path / "j") as (journal, _):
            journal.write(PutHeld(held=a_held()))
            await journal.write(DropHeld(replica="r-1", at=NOW))
        async with opened(tmp_path / "j") as (journal, memory):
            assert (memory.held, memory.used, memory.ended) == ({}, {"r-1"}, {"r-1": NOW})
            await journal.write(DropEnded(replica="r-1"))
        async with opened(tmp_path / "j") as (_, memory):
            assert (memory.used, memory.ended) == ({"r-1"}, {})

    run(story())


def test_what_is_not_awaited_is_written_before_what_comes_later_and_at_the_close(tmp_path):
    async def story():
        async with opened(tmp_path / "j") as (journal, _):
            for n in range(200):
                journal.write(PutHeld(held=a_held(f"r-{n}")))
            journal.write(PutHeld(held=a_held("r-0", "stopped")))
        async with opened(tmp_path / "j") as (_, memory):
            assert len(memory.held) == 200
            assert memory.held["r-0"].replica.phase == "stopped"

    run(story())


@pytest.mark.parametrize("content", [b"no database at all" * 99, b""])
def test_a_file_that_cannot_be_read_is_put_aside(tmp_path, content):
    async def story():
        path = tmp_path / "j"
        path.write_bytes(content)
        async with opened(path) as (journal, memory):
            assert memory.held == {}
            await journal.write(PutCard(card=CARD))
        async with opened(path) as (_, memory):
            assert memory.cards == {"cpu": CARD}
        if content:
            assert (tmp_path / "j.broken").read_bytes() == content

    run(story())


def test_a_record_of_a_newer_version_puts_the_journal_aside_instead_of_guessing(tmp_path):
    async def story():
        async with opened(tmp_path / "j") as (journal, _):
            await journal._database.execute("INSERT INTO kept VALUES ('future', 'x', '{}')")
            await journal._database.commit()
        async with opened(tmp_path / "j") as (_, memory):
            assert memory.held == {}
        assert (tmp_path / "j.broken").exists()

    run(story())


def test_req_x1_a_full_disk_is_told_in_a_sentence_to_all_who_wait(tmp_path):
    async def story():
        path = tmp_path / "journal.sqlite"
        journal, _ = await Journal.open(path)
        await journal._database.execute("PRAGMA max_page_count=2")
        writing = asyncio.create_task(journal.run())
        many = journal.write(*(Queue(entry=entry(n)) for n in range(200)))
        with pytest.raises(JournalFault, match="make room on its disk"):
            await many
        with pytest.raises(JournalFault):
            await writing
        await journal._database.close()

    run(story())


def test_req_x5_a_file_that_cannot_be_opened_now_is_not_put_aside(tmp_path):
    async def story():
        path = tmp_path / "journal.sqlite"
        path.mkdir()
        with pytest.raises(JournalFault):
            await Journal.open(path)
        assert path.is_dir()
        assert [p.name for p in tmp_path.iterdir()] == ["journal.sqlite"]

    run(story())


async def unsent(path):
    """What a start would find now."""
    found, memory = await Journal.open(path)
    await found.close()
    return [e.n for e in memory.unsent]


def test_what_nobody_waits_for_is_written_with_the_next_change_in_order(tmp_path):
    """An event counts as sent no later than anything journalled after it was."""

    async def story():
        async with opened(tmp_path / "j") as (journal, _):
            await journal.write(Queue(entry=entry(1)))
            journal.later(Sent(n=1))
            assert await unsent(tmp_path / "j") == [1]
            await journal.write(Queue(entry=entry(2)))
            assert await unsent(tmp_path / "j") == [2]
            journal.later(Sent(n=2))
        assert await unsent(tmp_path / "j") == []

    run(story())


def test_what_nobody_waits_for_is_written_after_a_while_by_itself(tmp_path, monkeypatch):
    monkeypatch.setattr(kept, "LATER_S", 0.01)

    async def story():
        async with opened(tmp_path / "j") as (journal, _):
            await journal.write(Queue(entry=entry(1)))
            journal.later(Sent(n=1))

            async def gone():
                return await unsent(tmp_path / "j") == []

            await until(gone, "the mark of a sent event")

    run(story())


def test_a_journal_of_an_earlier_version_is_read(tmp_path):
    """What it holds knows nothing of lines, claims and changes of several cards."""

    async def story():
        path = tmp_path / "j"
        card = {"node": "n1", "id": "cpu", "kind": "cpu", "memory_bytes": 10, "rev": 3}
        card["leases"] = [
            {"holder": "r-1", "memory_bytes": 4, "fence": 2, "since": "2026-01-01T00:00:00Z"}
        ]
        old = {
            "n": 7,
            "subject": "s",
            "event": {"type": "card.leased", "holder": "r-1", "memory_bytes": 4, "fence": 2},
            "time": "2026-01-01T00:00:00Z",
            "card": card,
        }
        async with opened(path) as (journal, _):
            rows = [("card", "cpu", card), ("unsent", "7", old)]
            for kind, key, body in rows:
                await journal._database.execute(
                    "INSERT INTO kept VALUES (?, ?, ?)", (kind, key, json.dumps(body).encode())
                )
            await journal._database.commit()
        async with opened(path) as (_, memory):
            (lease,) = memory.cards["cpu"].leases
            assert (lease.kind, lease.pinned, lease.process) == ("replica", False, None)
            assert memory.cards["cpu"].waiters == ()
            assert [(e.n, e.batch) for e in memory.unsent] == [(7, 0)]

    run(story())
