"""The agent's books: what is said of cards when engines come and go."""

from datetime import UTC, datetime

from msgspec.structs import replace

from events.memory import MemoryLog
from events.memory_broker import MemoryBroker
from nodeagent.books import Books
from nodeagent.domain.ports import PortBook
from nodeagent.journal import Journal, Memory
from nodeagent.reporter import Reporter
from schemas.card import Card, Lease
from schemas.replica import ReplicaStopped
from schemas.settings import GIB, MIB
from tests.support.agent_yard import a_held
from tests.support.aio import run

NOW = datetime(2026, 1, 1, tzinfo=UTC)


def held(name: str, measured_bytes: int):
    return a_held(name, "ready", cards=("cpu",), measured_memory_bytes=measured_bytes)


def test_a_stopped_engine_leaves_no_use_behind_whatever_its_last_reading_was(tmp_path):
    """PSS moves: the reading at the stop is another than the one the card's use was made of."""

    async def story():
        journal, _ = await Journal.open(tmp_path / "j")
        log = MemoryLog(MemoryBroker(), source="/agent/n1")
        holders = ("r-1", "r-2")
        leases = tuple(Lease(holder=h, memory_bytes=GIB, fence=1, since=NOW) for h in holders)
        card = Card(node="n1", id="cpu", kind="cpu", memory_bytes=4 * GIB, rev=2, leases=leases)
        memory = Memory(
            held={"r-1": held("r-1", 100 * MIB), "r-2": held("r-2", 30 * MIB)},
            cards={"cpu": replace(card, used_bytes=130 * MIB)},
        )
        books = Books(
            node="n1",
            prefix="yard",
            memory=memory,
            book=PortBook(first=20000, last=20010, rest_s=600.0),
            journal=journal,
            reporter=Reporter(log, journal, node="n1", actor="agent-n1"),
            now=lambda: NOW,
        )
        books.say(books.held["r-1"], ReplicaStopped())
        books.release("r-1", freed_bytes=60 * MIB)
        assert books.cards["cpu"].used_bytes == 30 * MIB
        books.say(books.held["r-2"], ReplicaStopped())
        books.release("r-2", freed_bytes=200 * MIB)
        assert books.cards["cpu"].used_bytes == 0
        await journal.close()

    run(story())
