"""The desk at work on real books and a real journal: asks, lines, processes that end, times that pass, restarts."""

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
from datetime import UTC, datetime, timedelta
from types import SimpleNamespace
from typing import Any, cast

from events.memory import MemoryLog
from events.memory_broker import MemoryBroker
from nodeagent import processes
from nodeagent.beacons import Gateways
from nodeagent.books import Books
from nodeagent.desk import Desk
from nodeagent.domain import leases
from nodeagent.fleet import Fleet
from nodeagent.journal import Journal
from nodeagent.keeper import boot_id
from nodeagent.reporter import Reporter
from schemas import codes
from schemas.card import ProcessRef
from schemas.cardasks import ClaimStart, LeaseAcquire, LeaseRelease, VmAttach
from schemas.node import CardInfo
from schemas.plan import Plan, PlanItem
from schemas.replica import ReplicaWaiting
from schemas.settings import GIB, NodeagentSettings
from tests.support.agent_yard import a_held, a_stop, an_item, some_books
from tests.support.aio import run, until

SETTINGS = NodeagentSettings(lease_grace_s=0.2)
INFOS = (
    CardInfo(id="cpu", kind="cpu", memory_bytes=GIB),
    CardInfo(id="gpu0", kind="gpu", memory_bytes=8 * GIB),
    CardInfo(id="gpu1", kind="gpu", memory_bytes=8 * GIB),
)


class Place:
    """A desk with all that is behind it. Memory is back as soon as a lease is returning, unless `holds`."""

    def __init__(self, books: Books, fleet: Fleet, desk: Desk) -> None:
        self.books = books
        self.fleet = fleet
        self.desk = desk
        self.now = datetime(2026, 1, 1, tzinfo=UTC)
        self.holds = False
        books.on_cards(lambda _: asyncio.get_running_loop().call_soon(self.give_back))

    def give_back(self) -> None:
        for card in tuple(self.books.cards.values()):
            for lease in card.leases:
                if lease.returning and not self.holds:
                    self.books.release(lease.holder, freed_bytes=0)

    def holders(self, card: str = "gpu0") -> list[str]:
        return [lease.holder for lease in self.books.cards[card].leases]

    def line(self, card: str = "gpu0") -> list[str]:
        return [waiter.id for waiter in self.books.cards[card].waiters]

    def pass_time(self, seconds: float) -> None:
        """The clock on the wall goes on; its timer would look then."""
        self.now += timedelta(seconds=seconds)
        self.desk._wake.set()


@contextlib.asynccontextmanager
async def at_work(tmp_path, infos=INFOS):
    """A desk on the journal in `tmp_path`; leaving is like a kill: nothing is said or ended."""
    journal, memory = await Journal.open(tmp_path / "journal.sqlite")
    reporter = Reporter(
        MemoryLog(MemoryBroker(), source="/agent/n1"), journal, node="n1", actor="agent-n1"
    )
    place: list[Place] = []

    def now() -> datetime:
        return place[0].now if place else datetime(2026, 1, 1, tzinfo=UTC)

    books = some_books(journal, memory, reporter, now)
    gateways = Gateways(monotonic=lambda: 0.0, connected=lambda: False)
    tools = cast(Any, SimpleNamespace(books=books, gateways=gateways, drivers={}))
    fleet = Fleet(
        node="n1",
        books=books,
        reporter=reporter,
        tools=tools,
        allow_commands=True,
        port_is_free=lambda _: True,
        now=now,
        settings=SETTINGS,
    )
    desk = Desk(
        books=books,
        fleet=fleet,
        environment=lambda cards: {"CARDS": ",".join(cards)},
        settings=SETTINGS,
        now=now,
    )
    place.append(Place(books, fleet, desk))
    books.set_up_cards(infos)
    fleet.settling = True
    tasks = [asyncio.create_task(journal.run()), asyncio.create_task(desk.run())]
    try:
        yield place[0]
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await journal.close()


def acquire(id: str, *cards: str, **fields) -> LeaseAcquire:
    return LeaseAcquire(id=id, name=f"n-{id}", cards=cards or ("gpu0",), **fields)


@contextlib.contextmanager
def a_process(code: str = "import time; time.sleep(60)"):
    """A process of its own and how to name it."""
    process = subprocess.Popen([sys.executable, "-I", "-S", "-c", code], stdout=subprocess.PIPE)
    try:
        if "print" in code:
            assert process.stdout is not None
            process.stdout.readline()
        found = processes.look(process.pid)
        assert found is not None
        yield process, ProcessRef(pid=process.pid, started=found.start_time, boot=boot_id())
    finally:
        process.kill()
        process.wait()
        if process.stdout is not None:
            process.stdout.close()


def test_a_grant_says_what_a_process_under_it_needs_to_see(tmp_path):
    async def story():
        async with at_work(tmp_path) as place:
            answer = place.desk.ask(acquire("l-1", "gpu1", "gpu0"), by="ana")
            assert answer.status == "granted"
            assert answer.environment == {"CARDS": "gpu0,gpu1"}
            await place.desk.durable()

    run(story())


def test_inv_6_a_lease_whose_grant_was_answered_is_there_after_a_kill(tmp_path):
    async def story():
        async with at_work(tmp_path) as place:
            first = place.desk.ask(acquire("l-1", pinned=True), by="ana")
            await place.desk.durable()
            # What a start would find at this very moment, with nothing closed.
            found, memory = await Journal.open(tmp_path / "journal.sqlite")
            await found.close()
            assert [x.holder for x in memory.cards["gpu0"].leases] == ["l-1"]
        async with at_work(tmp_path) as place:
            assert place.desk.ask(acquire("l-1", pinned=True), by="ana") == first
            other = place.desk.ask(acquire("l-2"), by="bob")
            assert (other.status, other.code) == ("refused", codes.CARD_KEPT)

    run(story())


def test_req_x6_a_waiter_is_told_of_each_change_and_of_its_grant(tmp_path):
    async def story():
        async with at_work(tmp_path) as place:
            place.holds = True
            for id in ("l-1", "l-2"):
                place.desk.ask(acquire(id, memory_bytes=GIB), by="ana")
            answer = place.desk.ask(acquire("l-3", wait_s=60.0), by="bob")
            assert (answer.status, answer.waiting_for) == ("waiting", ("l-1", "l-2"))
            answers = place.desk.answers("l-3")
            place.books.release("l-1", freed_bytes=0)
            changed = await anext(answers)
            assert (changed.status, changed.waiting_for) == ("waiting", ("l-2",))
            place.books.release("l-2", freed_bytes=0)
            granted = await anext(answers)
            assert (granted.status, granted.fences) == (
                "granted",
                {"gpu0": place.books.cards["gpu0"].rev},
            )
            assert granted.environment == {"CARDS": "gpu0"}
            assert [x async for x in answers] == []

    run(story())


def test_an_asker_that_came_back_over_another_connection_is_told_too_and_keeps_its_place(tmp_path):
    async def story():
        async with at_work(tmp_path) as place:
            place.desk.ask(acquire("l-1", pinned=True), by="ana")
            ask = acquire("l-2", wait_s=60.0)
            followers = []
            for _ in range(2):
                assert place.desk.ask(ask, by="bob").status == "waiting"
                follower = asyncio.ensure_future(anext(place.desk.answers("l-2")))
                followers.append(follower)
                await asyncio.sleep(0)
            followers[0].cancel()
            await asyncio.gather(followers[0], return_exceptions=True)
            place.desk.gone("l-2")
            assert place.line() == ["l-2"]
            place.desk.ask(LeaseRelease(what="l-1"), by="ana")
            assert (await followers[1]).status == "granted"

    run(story())


def test_req_d18_a_wait_is_bounded_and_says_that_it_was(tmp_path):
    async def story():
        async with at_work(tmp_path) as place:
            place.desk.ask(acquire("l-1", pinned=True), by="ana")
            assert place.desk.ask(acquire("l-2", wait_s=60.0), by="bob").status == "waiting"
            answers = place.desk.answers("l-2")
            place.pass_time(60)
            (last,) = [x async for x in answers]
            assert (last.status, last.code) == ("refused", codes.TIMED_OUT)
            assert place.line() == []

    run(story())


def test_a_lease_ends_by_its_time_and_the_next_in_line_has_it(tmp_path):
    async def story():
        async with at_work(tmp_path) as place:
            place.desk.ask(acquire("l-1", pinned=True, ttl_s=30.0), by="ana")
            place.desk.ask(acquire("l-2", wait_s=60.0), by="bob")
            place.pass_time(30)
            await until(lambda: place.holders() == ["l-2"], "the lease of the next")

    run(story())


def test_who_leaves_while_he_waits_leaves_the_line_and_who_was_granted_keeps_it(tmp_path):
    async def story():
        async with at_work(tmp_path) as place:
            place.desk.ask(acquire("l-1", pinned=True), by="ana")
            place.desk.ask(acquire("l-2", wait_s=60.0), by="bob")
            place.desk.gone("l-2")
            assert place.line() == []
            place.desk.gone("l-1")
            assert place.holders() == ["l-1"]
            # A VM that was still waiting does without.
            place.desk.ask(LeaseRelease(what="l-1"), by="ana")
            place.holds = True
            place.desk.ask(acquire("l-3", "gpu1"), by="ana")
            answer = place.desk.ask(VmAttach(name="win", card="gpu1", wait_s=9.0), by="bob")
            assert answer.status == "waiting"
            place.desk.gone(answer.id)
            assert place.books.cards["gpu1"].vm is None

    run(story())


def test_a_lease_and_a_claim_end_with_their_process(tmp_path):
    async def story():
        async with at_work(tmp_path) as place:
            with a_process() as (process, ref):
                place.desk.ask(acquire("l-1"), by="ana", process=ref)
                claim = ClaimStart(id="c-1", name="doom", card="gpu1")
                place.desk.ask(claim, by="ana", process=ref)
                waiting = acquire("l-2", "gpu0", wait_s=60.0, priority="batch")
                place.desk.ask(waiting, by="ana", process=ref)
                assert (place.holders(), place.line()) == (["l-1"], ["l-2"])
                process.kill()
                await until(lambda: place.holders() == [], "the lease to end")
                await until(lambda: not place.books.cards["gpu1"].claims, "the claim to end")
                assert place.line() == []

    run(story())


def test_a_process_that_is_gone_already_or_is_another_gets_nothing(tmp_path):
    async def story():
        async with at_work(tmp_path) as place:
            with a_process() as (process, ref):
                other = ProcessRef(pid=ref.pid, started=ref.started + 1, boot=ref.boot)
                before = ProcessRef(pid=ref.pid, started=ref.started, boot="another boot")
                for n, wrong in enumerate((other, before)):
                    answer = place.desk.ask(acquire(f"l-{n}"), by="ana", process=wrong)
                    assert answer.status == "refused"
                    await until(lambda: place.holders() == [], "no lease")
                assert process.poll() is None
                process.kill()
                # Dead, and nobody has asked how it ended: it holds nothing any more.
                await until(lambda: not processes.is_same(ref.pid, ref.started), "its end")
                assert place.desk.ask(acquire("l-9"), by="ana", process=ref).status == "refused"
                await until(lambda: place.holders() == [], "no lease")

    run(story())


def test_a_clock_that_is_set_back_lets_nobody_overtake(tmp_path):
    async def story():
        async with at_work(tmp_path) as place:
            place.holds = True
            for id in ("l-1", "l-2", "l-3"):
                place.desk.ask(acquire(id, pinned=True, wait_s=7200.0), by="ana")
                place.pass_time(-1800)
            place.desk.ask(acquire("l-4", "gpu0", "gpu1", wait_s=7200.0), by="ana")
            place.holds = False
            place.desk.ask(LeaseRelease(what="l-1"), by="ana")
            await until(lambda: place.holders() == ["l-2"], "the next in line")
            assert place.line() == ["l-3", "l-4"]
            assert place.line("gpu1") == ["l-4"]

    run(story())


def test_req_x5_a_lease_whose_process_ended_while_the_agent_was_away_ends_at_the_start(tmp_path):
    async def story():
        with a_process() as (gone, dead), a_process() as (_, alive):
            async with at_work(tmp_path) as place:
                place.desk.ask(acquire("l-1", memory_bytes=GIB), by="ana", process=dead)
                place.desk.ask(acquire("l-2", memory_bytes=GIB), by="bob", process=alive)
                await place.desk.durable()
            gone.kill()
            gone.wait()
            async with at_work(tmp_path) as place:
                await until(lambda: place.holders() == ["l-2"], "the dead one's lease to end")

    run(story())


def test_inv_6_a_waiter_survives_its_agent_and_is_told_when_its_asker_asks_again(tmp_path):
    async def story():
        async with at_work(tmp_path) as place:
            place.desk.ask(acquire("l-1", pinned=True), by="ana")
            ask = acquire("l-2", wait_s=60.0)
            assert place.desk.ask(ask, by="bob").status == "waiting"
            await place.desk.durable()
        async with at_work(tmp_path) as place:
            assert place.desk.ask(ask, by="bob").status == "waiting"
            answers = place.desk.answers("l-2")
            place.desk.ask(LeaseRelease(what="l-1"), by="ana")
            assert [x.status async for x in answers] == ["granted"]

    run(story())


def test_a_process_that_is_asked_to_leave_is_asked_politely_and_then_killed(tmp_path):
    stubborn = (
        "import signal, time\n"
        "signal.signal(signal.SIGTERM, lambda *a: None)\n"
        "print('on', flush=True)\n"
        "while True: time.sleep(60)"
    )

    async def story():
        async with at_work(tmp_path) as place:
            with a_process() as (polite, first), a_process(stubborn) as (stubborn_one, second):
                place.desk.ask(acquire("l-1", memory_bytes=GIB), by="ana", process=first)
                place.desk.ask(acquire("l-2", memory_bytes=GIB), by="ana", process=second)
                answer = place.desk.ask(acquire("l-3", wait_s=60.0), by="bob")
                assert answer.waiting_for == ("l-1", "l-2")
                await until(lambda: place.holders() == ["l-3"], "the card")
                assert polite.wait() == -signal.SIGTERM
                assert stubborn_one.wait() == -signal.SIGKILL

    run(story())


def handles() -> int:
    """Handles on processes that this one holds."""
    found = 0
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            found += "pidfd" in os.readlink(f"/proc/self/fd/{name}")
    return found


def test_a_process_is_watched_once_and_no_longer_than_it_is_needed(tmp_path):
    async def story():
        with a_process() as (_, ref):
            async with at_work(tmp_path) as place:
                for n in range(3):
                    place.desk.ask(acquire(f"l-{n}", memory_bytes=1), by="ana", process=ref)
                await place.desk.durable()
                assert handles() == 1
                for n in range(3):
                    place.desk.ask(LeaseRelease(what=f"l-{n}"), by="ana")
                await until(lambda: handles() == 0, "nothing to be watched")
                place.desk.ask(acquire("l-9", memory_bytes=1), by="ana", process=ref)
            assert handles() == 0

    run(story())


def test_before_its_cards_are_known_it_says_so(tmp_path):
    async def story():
        async with at_work(tmp_path) as place:
            place.fleet.settling = False
            answer = place.desk.ask(acquire("l-1"), by="ana")
            assert answer.status == "refused"
            assert "ask again in a moment" in answer.sentence
            assert place.holders() == []

    run(story())


def given(place: Place, item: PlanItem) -> None:
    """The card of an item is its own from now on, as by the line."""
    found = leases.reserve(place.books.cards, item.replica, item.cards, GIB, place.now, {})
    assert isinstance(found, leases.Granted)
    place.books.lease(found.cards, item.replica)


def test_an_engine_that_was_given_its_card_and_cannot_start_gives_it_back(tmp_path):
    """It stood in line; the agent that serves it has no such engine any more."""

    async def story():
        async with at_work(tmp_path) as place:
            item = an_item("r-1", cards=("gpu0",))
            held = a_held("r-1", "waiting", cards=("gpu0",), launch=item.launch)
            place.books.say(held, ReplicaWaiting(waiting_for="l-1"))
            given(place, item)
            place.books.plan_read(Plan(node="n1", items=(item,)), 1)
            place.fleet.acting = True
            place.fleet.act()
            assert place.books.held["r-1"].replica.phase == "refused"
            assert place.holders() == []

    run(story())


def test_a_parked_engine_that_was_given_its_card_and_is_to_stay_has_what_a_parked_one_has(tmp_path):
    async def story():
        async with at_work(tmp_path) as place:
            item = an_item("r-1", cards=("gpu0",), stop=a_stop(park="may"))
            sizes = {"residual_bytes": 5, "ram_bytes": 7}
            place.books.held["r-1"] = a_held("r-1", "parked", cards=("gpu0",), **sizes)
            given(place, item)
            place.books.plan_read(Plan(node="n1", items=(item,)), 1)
            place.fleet.acting = True
            place.fleet.act()
            for name, memory_bytes in (("gpu0", 5), ("cpu", 7)):
                (lease,) = place.books.cards[name].leases
                assert (lease.kind, lease.memory_bytes) == ("parked", memory_bytes)

    run(story())
