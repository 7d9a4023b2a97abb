"""Keeps the read model's rows and its checkpoint in one sqlite file, each change in one transaction.

The only file with a database connection in it. It knows nothing of NATS and never advances the checkpoint
without the rows that go with it.
"""

import asyncio
import contextlib
import itertools
import sqlite3
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiosqlite
from msgspec import Struct

from controlplane.projections.tables import (
    BUILDING,
    CREATE_CHECKPOINT,
    LIVE,
    SCHEMA_VERSION,
    Statement,
    create_rows,
)

BUSY_S = 5.0


class Unusable(Exception):
    """The file is no database, is damaged or was made by another version: throw it away."""


class Checkpoint(Struct, frozen=True, kw_only=True):
    """How far the rows go and on which log. `event_*` name the last event folded; `caught_up_at` is epoch
    seconds of the last moment nothing more was pending."""

    stream_id: str
    stream_created: str
    applied_seq: int
    event_seq: int
    event_subject: str
    event_id: str
    caught_up_at: float


class Database:
    """One writer connection and one reader connection on one file in WAL mode."""

    def __init__(self, path: Path, writer: aiosqlite.Connection, reader: aiosqlite.Connection):
        self.path = path
        self._writer = writer
        self._reader = reader
        self._reading = asyncio.Lock()
        self._writing = asyncio.Lock()

    @classmethod
    async def open(cls, path: Path) -> "Database":
        """Opens or creates the file and checks it. Raises Unusable, OSError and sqlite3.OperationalError."""
        path.parent.mkdir(parents=True, exist_ok=True)
        writer = await aiosqlite.connect(path, isolation_level=None, timeout=BUSY_S)
        try:
            await _prepare(writer)
            reader = await aiosqlite.connect(path, isolation_level=None, timeout=BUSY_S)
        except BaseException:
            await writer.close()
            raise
        database = cls(path, writer, reader)
        try:
            await reader.execute("PRAGMA query_only = ON")
        except BaseException:
            await database.close()
            raise
        return database

    @staticmethod
    def throw_away(path: Path) -> None:
        """Removes the file and its companions; missing ones are fine."""
        for suffix in ("", "-wal", "-shm", "-journal"):
            path.with_name(path.name + suffix).unlink(missing_ok=True)

    async def close(self) -> None:
        await self._reader.close()
        await self._writer.close()

    @asynccontextmanager
    async def _transaction(self) -> AsyncIterator[aiosqlite.Connection]:
        async with self._writing:
            await self._writer.execute("BEGIN IMMEDIATE")
            try:
                yield self._writer
                await self._writer.execute("COMMIT")
            except BaseException:
                await _roll_back(self._writer)
                raise

    async def commit(self, statements: Sequence[Statement], checkpoint: Checkpoint) -> None:
        """Rows and checkpoint together, or neither."""
        async with self._transaction() as connection:
            await _execute(connection, statements)
            await _put_checkpoint(connection, checkpoint)

    async def begin_rebuild(self) -> None:
        """An empty second table set; readers go on with the first."""
        async with self._transaction() as connection:
            await connection.execute(f"DROP TABLE IF EXISTS {BUILDING}")
            await connection.execute(create_rows(BUILDING))

    async def build(self, statements: Sequence[Statement]) -> None:
        """Rows of the second set; no checkpoint goes with them, so a crash begins the rebuild anew."""
        async with self._transaction() as connection:
            await _execute(connection, statements)

    async def swap(self, checkpoint: Checkpoint) -> None:
        """The second set takes the place of the first, and the checkpoint becomes its own."""
        async with self._transaction() as connection:
            await connection.execute(f"DROP TABLE {LIVE}")
            await connection.execute(f"ALTER TABLE {BUILDING} RENAME TO {LIVE}")
            await connection.execute("DROP INDEX IF EXISTS by_name")
            await connection.execute(_INDEX)
            await _put_checkpoint(connection, checkpoint)

    async def checkpoint(self) -> Checkpoint | None:
        found = await self.read("SELECT 1 WHERE FALSE", ())
        return found[1]

    async def read(
        self, sql: str, values: Sequence[object]
    ) -> tuple[list[tuple[Any, ...]], Checkpoint | None]:
        """Rows, and the checkpoint they belong to: both from one snapshot of the file."""
        async with self._reading:
            await self._reader.execute("BEGIN")
            try:
                rows = await self._reader.execute_fetchall(sql, values)
                marks = await self._reader.execute_fetchall(
                    "SELECT stream_id, stream_created, applied_seq, event_seq, event_subject,"
                    " event_id, caught_up_at FROM checkpoint"
                )
            finally:
                await _roll_back(self._reader)
        mark = next(iter(marks), None)
        checkpoint = None
        if mark is not None:
            checkpoint = Checkpoint(
                stream_id=mark[0],
                stream_created=mark[1],
                applied_seq=mark[2],
                event_seq=mark[3],
                event_subject=mark[4],
                event_id=mark[5],
                caught_up_at=mark[6],
            )
        return [tuple(row) for row in rows], checkpoint


_INDEX = f"CREATE INDEX IF NOT EXISTS by_name ON {LIVE} (noun, name)"


async def _prepare(writer: aiosqlite.Connection) -> None:
    """Pragmas, checks and tables of a fresh or existing file."""
    try:
        # WAL with NORMAL may lose the last transactions at a power loss but never tears one: the
        # checkpoint goes back together with its rows.
        await writer.execute("PRAGMA journal_mode = WAL")
        await writer.execute("PRAGMA synchronous = NORMAL")
        version = next(iter(await writer.execute_fetchall("PRAGMA user_version")))[0]
        verdict = next(iter(await writer.execute_fetchall("PRAGMA quick_check(1)")))[0]
        if verdict != "ok":
            raise Unusable(f"damaged: {verdict}")
        if version not in (0, SCHEMA_VERSION):
            raise Unusable(f"made by another version ({version}, this is {SCHEMA_VERSION})")
        await writer.execute(create_rows(LIVE))
        await writer.execute(_INDEX)
        await writer.execute(CREATE_CHECKPOINT)
        await writer.execute(f"PRAGMA user_version = {SCHEMA_VERSION}")
    except sqlite3.OperationalError:
        raise  # locked, full, unreadable: throwing the file away would not help
    except sqlite3.DatabaseError as error:
        raise Unusable(f"damaged: {error}") from error


async def _roll_back(connection: aiosqlite.Connection) -> None:
    """Ends the transaction if there is one.

    Whether there is cannot be asked beforehand: a task cancelled during COMMIT leaves that statement to
    the connection's thread, which may be through with it before this one comes.
    """
    with contextlib.suppress(sqlite3.OperationalError):
        await connection.execute("ROLLBACK")


async def _execute(connection: aiosqlite.Connection, statements: Sequence[Statement]) -> None:
    """In order; neighbours with the same text go as one call, which is what makes replay fast."""
    for sql, group in itertools.groupby(statements, key=lambda statement: statement[0]):
        await connection.executemany(sql, [values for _, values in group])


async def _put_checkpoint(connection: aiosqlite.Connection, checkpoint: Checkpoint) -> None:
    await connection.execute(
        "INSERT OR REPLACE INTO checkpoint VALUES (1, ?, ?, ?, ?, ?, ?, ?)",
        (
            checkpoint.stream_id,
            checkpoint.stream_created,
            checkpoint.applied_seq,
            checkpoint.event_seq,
            checkpoint.event_subject,
            checkpoint.event_id,
            checkpoint.caught_up_at,
        ),
    )
