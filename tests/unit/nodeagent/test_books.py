"""The agent's books: what is said of cards when engines come and go."""

import contextlib
from datetime import UTC, datetime

from msgspec.structs import replace

from events.memory import MemoryLog
from events.memory_broker import MemoryBroker
from nodeagent.cards.provider import Reading, Seen
from nodeagent.domain import leases
from nodeagent.journal import Journal, Memory
from nodeagent.reporter import Reporter
from schemas.card import Card, Claim, Lease, Vm
from schemas.messages import tag_of
from schemas.node import CardInfo
from schemas.replica import ReplicaStopped
from schemas.settings import GIB, MIB
from tests.support.agent_yard import a_held, some_books
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
        books = some_books(
            journal, memory, Reporter(log, journal, node="n1", actor="agent-n1"), lambda: NOW
        )
        books.say(books.held["r-1"], ReplicaStopped())
        books.release("r-1", freed_bytes=60 * MIB)
        assert books.cards["cpu"].used_bytes == 30 * MIB
        books.say(books.held["r-2"], ReplicaStopped())
        books.release("r-2", freed_bytes=200 * MIB)
        assert books.cards["cpu"].used_bytes == 0
        await journal.close()

    run(story())


@contextlib.asynccontextmanager
async def opened(tmp_path, memory: Memory):
    """Books on a journal, and the changes they tell of."""
    journal, _ = await Journal.open(tmp_path / "j")
    log = MemoryLog(MemoryBroker(), source="/agent/n1")
    books = some_books(
        journal, memory, Reporter(log, journal, node="n1", actor="agent-n1"), lambda: NOW
    )
    told: list[list[tuple[str, str]]] = []
    books.on_cards(
        lambda changes: told.append(
            [(c.card.id, tag_of(c.event)) for c in changes if c.event is not None]
        )
    )
    try:
        yield books, told
    finally:
        await journal.close()


def a_card(id: str, *held: Lease, **fields) -> Card:
    given = {"memory_bytes": 8 * GIB, "rev": 2, "leases": held, **fields}
    return Card(node="n1", id=id, kind="cpu" if id == "cpu" else "gpu", **given)


def a_lease(holder: str = "r-1", **fields) -> Lease:
    given = {"memory_bytes": 4 * GIB, "fence": 2, "since": NOW, **fields}
    return Lease(holder=holder, **given)


def cards(*given: Card) -> Memory:
    return Memory(cards={card.id: card for card in given})


def test_parked_an_engine_keeps_little_on_its_cards_and_its_ram_in_one_change(tmp_path):
    async def story():
        memory = cards(a_card("cpu"), a_card("gpu0", a_lease()), a_card("gpu1", a_lease()))
        async with opened(tmp_path, memory) as (books, told):
            assert books.reserve_ram("r-1", 3 * GIB)
            assert told == [[("cpu", "card.leased")]]
            books.park("r-1", residual_bytes=GIB, ram_bytes=2 * GIB)
            assert sorted(told[1]) == [(x, "card.parked") for x in ("cpu", "gpu0", "gpu1")]
            kept = {
                x.id: [(y.kind, y.memory_bytes) for y in x.leases] for x in books.cards.values()
            }
            assert kept == {
                "cpu": [("parked", 2 * GIB)],
                "gpu0": [("parked", GIB)],
                "gpu1": [("parked", GIB)],
            }
            assert books.fences("r-1") == {}
            # And back: what it keeps in RAM ends once it is on its cards again.
            granted = leases.reserve(books.cards, "r-1", ("gpu0", "gpu1"), 4 * GIB, NOW, {})
            assert isinstance(granted, leases.Granted)
            books.lease(granted.cards, "r-1")
            books.end_ram("r-1")
            books.end_ram("r-1")
            assert told[2:] == [
                [("gpu0", "card.leased"), ("gpu1", "card.leased")],
                [("cpu", "card.released")],
            ]
            assert books.cards["cpu"].leases == ()

    run(story())


def test_ram_for_a_parked_copy_is_reserved_only_where_there_is_room(tmp_path):
    async def story():
        async with opened(tmp_path, cards(a_card("cpu", a_lease("r-9")))) as (books, told):
            assert not books.reserve_ram("r-1", 5 * GIB)
            assert told == []
            assert books.reserve_ram("r-1", 4 * GIB)
            # Asked again it is the same room, not more.
            assert books.reserve_ram("r-1", 4 * GIB)
            assert not books.reserve_ram("r-2", 1)

    run(story())


def test_what_ends_on_several_cards_ends_in_one_change(tmp_path):
    async def story():
        memory = cards(a_card("gpu0", a_lease()), a_card("gpu1", a_lease()))
        async with opened(tmp_path, memory) as (books, told):
            books.release("r-1", freed_bytes=0)
            books.release("r-1", freed_bytes=0)
            assert told == [[("gpu0", "card.released"), ("gpu1", "card.released")]]

    run(story())


def test_a_start_is_fenced_by_the_very_lease_it_was_granted(tmp_path):
    async def story():
        async with opened(tmp_path, cards(a_card("gpu0"), a_card("gpu1"))) as (books, _):
            granted = leases.reserve(books.cards, "r-1", ("gpu0", "gpu1"), GIB, NOW, {})
            assert isinstance(granted, leases.Granted)
            books.lease(granted.cards, "r-1")
            fences = books.fences("r-1")
            assert fences == {"gpu0": 3, "gpu1": 3}
            assert books.still_leased("r-1", fences)
            assert not books.still_leased("r-1", {"gpu0": 2, "gpu1": 3})
            assert not books.still_leased("r-2", fences)
            assert not books.still_leased("r-1", {})
            books.returning("r-1")
            assert not books.still_leased("r-1", fences)
            books.release("r-1", freed_bytes=0)
            again = leases.reserve(books.cards, "r-1", ("gpu0", "gpu1"), GIB, NOW, {})
            assert isinstance(again, leases.Granted)
            books.lease(again.cards, "r-1")
            assert not books.still_leased("r-1", fences)

    run(story())


def test_what_is_stuck_is_said_once_for_each_reason_and_keeps_its_lease(tmp_path):
    async def story():
        async with opened(tmp_path, cards(a_card("gpu0", a_lease(returning=True)))) as (
            books,
            told,
        ):
            for why in ("1 GiB left", "1 GiB left", "2 MiB left"):
                books.stuck("r-1", why)
            assert told == [[("gpu0", "card.stuck")]] * 2
            (lease,) = books.cards["gpu0"].leases
            assert (lease.returning, lease.stuck) == (True, "2 MiB left")

    run(story())


def test_a_reading_tells_who_came_and_went_without_a_lease_and_what_moved(tmp_path):
    async def story():
        async with opened(tmp_path, cards(a_card("gpu0"))) as (books, told):
            blender = Seen(pid=9, name="blender", memory_bytes=GIB)
            reading = Reading(card="gpu0", used_bytes=GIB, other_bytes=GIB, strangers=(blender,))
            books.reading(reading, NOW)
            assert told == [[("gpu0", "card.stowaway_seen")], [("gpu0", "card.measured")]]
            card = books.cards["gpu0"]
            assert [(x.pid, x.name) for x in card.stowaways] == [(9, "blender")]
            assert (card.used_bytes, card.other_bytes) == (GIB, GIB)
            # Both change what may be given, so who was refused may ask again.
            assert card.rev == 4
            books.reading(reading, NOW)
            books.reading(replace(reading, used_bytes=GIB + MIB), NOW)
            assert len(told) == 2, "what trembles is not told"
            books.reading(Reading(card="gpu0", used_bytes=0), NOW)
            assert told[2:] == [[("gpu0", "card.stowaway_gone")], [("gpu0", "card.measured")]]
            books.reading(Reading(card="gpu7", used_bytes=5), NOW)

    run(story())


def test_an_inventory_without_a_card_keeps_what_somebody_has_of_it(tmp_path):
    async def story():
        claim = Claim(id="c-1", name="doom", kind="game", since=NOW)
        memory = cards(
            a_card("gpu0", a_lease()),
            a_card("gpu1"),
            a_card("gpu2", vm=Vm(name="win", since=NOW, attached=True)),
            a_card("gpu3", claims=(claim,)),
        )
        async with opened(tmp_path, memory) as (books, _):
            books.set_up_cards((CardInfo(id="cpu", kind="cpu", memory_bytes=GIB),))
            sizes = {name: card.memory_bytes for name, card in books.cards.items()}
            # A card that a VM has is not seen by this machine, and comes back as it was.
            assert sizes == {"cpu": GIB, "gpu0": 0, "gpu2": 8 * GIB, "gpu3": 0}

    run(story())


def test_req_x5_what_an_adopted_engine_holds_is_known_even_without_a_journal(tmp_path):
    async def story():
        parked = a_held("r-1", "parked", cards=("gpu0",), ram_bytes=GIB, residual_bytes=MIB)
        memory = replace_held(cards(a_card("cpu"), a_card("gpu0")), parked)
        async with opened(tmp_path, memory) as (books, _):
            books.claim("r-1", ("gpu0",), 4 * GIB)
            found = [
                (card.id, x.kind, x.memory_bytes)
                for card in books.cards.values()
                for x in card.leases
            ]
            assert found == [("cpu", "parked", GIB), ("gpu0", "parked", MIB)]
            books.claim("r-2", ("gpu0",), 4 * GIB)
            assert books.cards["gpu0"].leases[-1].kind == "replica"

    run(story())


def replace_held(memory: Memory, *helds) -> Memory:
    memory.held = {one.replica.id: one for one in helds}
    return memory
