"""Keeps what the agent must not forget when it is killed: replicas, cards, slots, ports, its plan, unsent events.

One sqlite file, one writer task, many changes per transaction. It is a memory, not the truth: with the
file gone the agent rebuilds itself from the log and from the living engines. It decides nothing.
"""

import asyncio
import logging
import sqlite3
from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path

import aiosqlite
import msgspec
from msgspec import Struct

from nodeagent.domain.held import Held
from nodeagent.domain.ports import PortBook
from schemas.card import Card, CardEvent
from schemas.plan import Plan
from schemas.replica import Replica, ReplicaEvent
from schemas.slots import Slots, SlotsEvent

LOG = logging.getLogger(__name__)

LATER_S = 5.0
"""So long a change that nobody waits for may stay in memory alone."""

_TABLE = """
CREATE TABLE IF NOT EXISTS kept (
    kind TEXT NOT NULL, key TEXT NOT NULL, body BLOB NOT NULL, PRIMARY KEY (kind, key)
) WITHOUT ROWID
"""


class JournalFault(Exception):
    """The file cannot be written or opened for want of disk or rights; nothing in it is lost by that."""

    def __init__(self, error: sqlite3.Error) -> None:
        super().__init__(
            f"the agent's journal cannot be written ({error}): make room on its disk. Engines go on, and"
            " the agent takes them over again once it can write"
        )


class Entry(Struct, frozen=True, kw_only=True):
    """An event on its way to the log: `n` is its place in the order, `time` when it happened.

    Exactly one of `replica`, `card` and `slots` is the state after it; a tombstone has none. `batch` is the `n`
    of the first of those that are one change: the log gets all of them or none. 0: it stands alone.
    """

    n: int
    subject: str
    event: ReplicaEvent | CardEvent | SlotsEvent
    time: datetime
    replica: Replica | None = None
    card: Card | None = None
    slots: Slots | None = None
    reason: str = ""
    causationid: str | None = None
    batch: int = 0


class Used(Struct, frozen=True, kw_only=True):
    """An id that was held once. `ended_at` is when it ended, None once its subject was ended too."""

    ended_at: datetime | None = None


class KnownPlan(Struct, frozen=True, kw_only=True):
    """The last plan that was read and its sequence in the log."""

    plan: Plan
    seq: int


class PutHeld(Struct, frozen=True, kw_only=True):
    held: Held


class DropHeld(Struct, frozen=True, kw_only=True):
    """The replica is forgotten; its id stays known as used since `at`."""

    replica: str
    at: datetime


class DropEnded(Struct, frozen=True, kw_only=True):
    """The subject of a forgotten replica was ended; only the id is kept."""

    replica: str


class PutCard(Struct, frozen=True, kw_only=True):
    card: Card


class PutSlots(Struct, frozen=True, kw_only=True):
    slots: Slots


class DropSlots(Struct, frozen=True, kw_only=True):
    """The subject of a replica's slots was ended."""

    replica: str


class Queue(Struct, frozen=True, kw_only=True):
    entry: Entry


class Sent(Struct, frozen=True, kw_only=True):
    n: int


class PutPlan(Struct, frozen=True, kw_only=True):
    known: KnownPlan


class PutPorts(Struct, frozen=True, kw_only=True):
    book: PortBook


Change = (
    PutHeld
    | DropHeld
    | DropEnded
    | PutCard
    | PutSlots
    | DropSlots
    | Queue
    | Sent
    | PutPlan
    | PutPorts
)


@dataclass(slots=True)
class Memory:
    """Everything the journal held when it was opened.

    `ended` are forgotten replicas whose subjects still stand, with the time they ended.
    """

    held: dict[str, Held] = field(default_factory=dict)
    cards: dict[str, Card] = field(default_factory=dict)
    slots: dict[str, Slots] = field(default_factory=dict)
    unsent: list[Entry] = field(default_factory=list)
    used: set[str] = field(default_factory=set)
    ended: dict[str, datetime] = field(default_factory=dict)
    plan: KnownPlan | None = None
    ports: PortBook | None = None


_Row = tuple[str, str, Struct | None]
"""(kind, key, what is kept there from now on; None: nothing)."""


def _rows(change: Change) -> tuple[_Row, ...]:
    match change:
        case PutHeld(held=held):
            return (("held", held.replica.id, held),)
        case DropHeld(replica=replica, at=at):
            return (("held", replica, None), ("used", replica, Used(ended_at=at)))
        case DropEnded(replica=replica):
            return (("used", replica, Used()),)
        case PutCard(card=card):
            return (("card", card.id, card),)
        case PutSlots(slots=slots):
            return (("slots", slots.replica, slots),)
        case DropSlots(replica=replica):
            return (("slots", replica, None),)
        case Queue(entry=entry):
            return (("unsent", str(entry.n), entry),)
        case Sent(n=n):
            return (("unsent", str(n), None),)
        case PutPlan(known=known):
            return (("fact", "plan", known),)
        case PutPorts(book=book):
            return (("fact", "ports", book),)


class Journal:
    """The open journal. `write` is ordered and does not block; `run` must be a live task."""

    def __init__(self, database: aiosqlite.Connection) -> None:
        self._database = database
        self._pending: list[tuple[Sequence[Change], asyncio.Future[None]]] = []
        self._wake = asyncio.Event()
        self._writing = asyncio.Lock()
        self._late: asyncio.TimerHandle | None = None

    @classmethod
    async def open(cls, path: Path) -> tuple["Journal", Memory]:
        """Opens or makes the file and reads it whole.

        A file that sqlite or this version cannot read is put aside as `<name>.broken`: the log and
        the engines know the rest. Raises JournalFault when the disk is full or the file may not be
        written: then it is kept as it is, for it may hold events nobody else has.
        """
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            return await cls._open(path)
        except sqlite3.OperationalError as error:
            raise JournalFault(error) from error
        except (sqlite3.DatabaseError, msgspec.MsgspecError, ValueError) as error:
            LOG.error("journal put aside", extra={"path": str(path), "problem": str(error)})
            for suffix in ("", "-wal", "-shm"):
                part = path.with_name(path.name + suffix)
                if part.exists():
                    part.replace(path.with_name(path.name + suffix + ".broken"))
            return await cls._open(path)

    @classmethod
    async def _open(cls, path: Path) -> tuple["Journal", Memory]:
        database = aiosqlite.connect(path)
        try:
            await database
        except BaseException:
            # Its thread has one more word for this loop, which may close as soon as we are gone.
            await asyncio.to_thread(database._thread.join)
            raise
        try:
            # WAL without a flush per commit outlives a killed agent, which is what it is for. After a
            # power cut no engine lives, and the log tells what was acknowledged.
            await database.execute("PRAGMA journal_mode=WAL")
            await database.execute("PRAGMA synchronous=NORMAL")
            await database.execute(_TABLE)
            return cls(database), await _read(database)
        except BaseException:
            await database.close()
            raise

    def write(self, *changes: Change) -> "asyncio.Future[None]":
        """Queues changes that become durable together, after all earlier ones; the future tells when."""
        done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._pending.append((changes, done))
        self._wake.set()
        return done

    def later(self, *changes: Change) -> None:
        """Queues changes nobody waits for: they are written with the next others, or after `LATER_S`."""
        done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._pending.append((changes, done))
        if self._late is None:
            self._late = asyncio.get_running_loop().call_later(LATER_S, self._wake.set)

    async def run(self) -> None:
        """Writes until cancelled. An error of the disk ends it, and with it the agent."""
        while True:
            await self._wake.wait()
            # A transaction that began is finished whatever happens to this task.
            await asyncio.shield(asyncio.ensure_future(self.flush()))

    async def flush(self) -> None:
        """Writes what is pending now, in one transaction. Raises JournalFault."""
        async with self._writing:
            await self._flush()

    async def _flush(self) -> None:
        self._wake.clear()
        if self._late is not None:
            self._late.cancel()
            self._late = None
        taken, self._pending = self._pending, []
        if not taken:
            return
        latest: dict[tuple[str, str], Struct | None] = {}
        for changes, _ in taken:
            for change in changes:
                latest.update({(kind, key): body for kind, key, body in _rows(change)})
        puts = [(*where, _pack(body)) for where, body in latest.items() if body is not None]
        drops = [where for where, body in latest.items() if body is None]
        try:
            # One trip to sqlite's thread, not one a statement: a start waits for it.
            await self._database._execute(_store, self._database._conn, puts, drops)
        except sqlite3.Error as error:
            fault = JournalFault(error)
            for _, done in taken:
                if not done.done():
                    done.set_exception(fault)
                    done.exception()  # whoever awaits it is told; nobody else must be warned
            raise fault from error
        for _, done in taken:
            if not done.done():
                done.set_result(None)

    async def close(self) -> None:
        """Writes the rest and closes the file; no task may run `run` any more."""
        try:
            await self.flush()
        finally:
            await self._database.close()


_pack = msgspec.json.Encoder().encode


def _store(
    connection: sqlite3.Connection,
    puts: Sequence[tuple[str, str, bytes]],
    drops: Sequence[tuple[str, str]],
) -> None:
    """One transaction; runs in the thread that owns the connection."""
    if puts:
        connection.executemany("REPLACE INTO kept VALUES (?, ?, ?)", puts)
    if drops:
        connection.executemany("DELETE FROM kept WHERE kind = ? AND key = ?", drops)
    connection.commit()


async def _read(database: aiosqlite.Connection) -> Memory:
    memory = Memory()
    unpack = msgspec.json.decode
    for kind, key, body in await database.execute_fetchall("SELECT kind, key, body FROM kept"):
        match kind:
            case "held":
                memory.held[key] = unpack(body, type=Held)
            case "card":
                memory.cards[key] = unpack(body, type=Card)
            case "slots":
                memory.slots[key] = unpack(body, type=Slots)
            case "unsent":
                memory.unsent.append(unpack(body, type=Entry))
            case "used":
                memory.used.add(key)
                ended_at = unpack(body, type=Used).ended_at
                if ended_at is not None:
                    memory.ended[key] = ended_at
            case "fact" if key == "plan":
                memory.plan = unpack(body, type=KnownPlan)
            case "fact" if key == "ports":
                memory.ports = unpack(body, type=PortBook)
            case _:
                raise ValueError(f"a kind of record this version does not know: {kind}/{key}")
    memory.unsent.sort(key=lambda entry: entry.n)
    return memory
