"""Keeps what was used in one sqlite file: totals for each day, key, model and adapter, and the position they are true for.

A page of accounts and the position behind it are one transaction, so nothing is added twice. It knows nothing of NATS,
and the file may be deleted at any time: what the log still holds is then added up anew.
"""

# ruff: noqa: S608 - names put into SQL text are those of this file and of the struct's fields

import asyncio
import contextlib
import sqlite3
from collections.abc import AsyncIterator, Iterable, Sequence
from contextlib import asynccontextmanager
from datetime import UTC, date
from pathlib import Path
from typing import Any, Final

import aiosqlite
from msgspec import Struct

from controlplane.projections.database import BUSY_S, Database, Unusable
from schemas.usage import UsageBatch, UsageRow

VERSION: Final = 1
DIMENSIONS: Final = ("day", "key", "model", "adapter")
SUMS: Final = (
    "requests",
    "failed",
    "prompt_tokens",
    "cached_tokens",
    "completion_tokens",
    "estimated",
    "first_token_ms",
    "first_tokens",
    "duration_ms",
    "waited_ms",
)
MOST: Final = 1 << 40
"""No row tells more of anything within a second, and sums of what is below stay whole numbers."""

_TABLES: Final = (
    f"""CREATE TABLE IF NOT EXISTS totals (
        {", ".join(f"{name} TEXT NOT NULL" for name in DIMENSIONS)},
        {", ".join(f"{name} INTEGER NOT NULL" for name in SUMS)},
        PRIMARY KEY ({", ".join(DIMENSIONS)})
    ) WITHOUT ROWID""",
    """CREATE TABLE IF NOT EXISTS told (
        gateway TEXT NOT NULL, incarnation TEXT NOT NULL, n INTEGER NOT NULL, day TEXT NOT NULL,
        PRIMARY KEY (gateway, incarnation)
    ) WITHOUT ROWID""",
    "CREATE TABLE IF NOT EXISTS names (key TEXT PRIMARY KEY, name TEXT NOT NULL) WITHOUT ROWID",
    """CREATE TABLE IF NOT EXISTS position (
        one INTEGER PRIMARY KEY CHECK (one = 1),
        stream_id TEXT NOT NULL, created TEXT NOT NULL, seq INTEGER NOT NULL
    )""",
)
_ADD: Final = (
    f"INSERT INTO totals VALUES ({', '.join('?' * (len(DIMENSIONS) + len(SUMS)))})"
    f" ON CONFLICT ({', '.join(DIMENSIONS)}) DO UPDATE SET "
    + ", ".join(f"{name} = {name} + excluded.{name}" for name in SUMS)
)


class Position(Struct, frozen=True, kw_only=True):
    """How far which stream is added up."""

    stream_id: str
    created: str
    seq: int


class Wanted(Struct, frozen=True, kw_only=True):
    """Which totals: days from `since` to `until`, both included, of one key and one model, or all; summed up over
    what is not in `by`."""

    since: date
    until: date
    by: tuple[str, ...] = DIMENSIONS
    key: str | None = None
    model: str | None = None


class UsageFile:
    """One connection. `open` raises Unusable, OSError and sqlite3.OperationalError as Database does."""

    def __init__(self, connection: aiosqlite.Connection) -> None:
        self._connection = connection
        self._one_at_a_time = asyncio.Lock()

    @classmethod
    async def open(cls, path: Path) -> "UsageFile":
        """Opens or creates the file."""
        path.parent.mkdir(parents=True, exist_ok=True)
        connection = await aiosqlite.connect(path, isolation_level=None, timeout=BUSY_S)
        try:
            await _prepare(connection)
        except BaseException:
            await connection.close()
            raise
        return cls(connection)

    @staticmethod
    def throw_away(path: Path) -> None:
        """Removes the file and its companions."""
        Database.throw_away(path)

    async def close(self) -> None:
        await self._connection.close()

    @asynccontextmanager
    async def _transaction(self) -> AsyncIterator[aiosqlite.Connection]:
        async with self._one_at_a_time:
            await self._connection.execute("BEGIN IMMEDIATE")
            try:
                yield self._connection
                await self._connection.execute("COMMIT")
            except BaseException:
                with contextlib.suppress(sqlite3.OperationalError):
                    await self._connection.execute("ROLLBACK")
                raise

    async def position(self) -> Position | None:
        rows = await self._read("SELECT stream_id, created, seq FROM position", ())
        if not rows:
            return None
        stream_id, created, seq = rows[0]
        return Position(stream_id=stream_id, created=created, seq=seq)

    async def add(
        self,
        batches: Sequence[UsageBatch],
        position: Position,
        names: dict[str, str],
        *,
        reset: bool = False,
    ) -> None:
        """Adds accounts up and moves the position, or neither. `reset`: what was added before is of another stream.

        A gateway tells its batches one after the other, so one whose number is no higher than the last was added.
        """
        async with self._transaction() as connection:
            if reset:
                await connection.execute("DELETE FROM totals")
                await connection.execute("DELETE FROM told")
            for batch in batches:
                day = _day_of(batch)
                cursor = await connection.execute(
                    "INSERT INTO told VALUES (?, ?, ?, ?) ON CONFLICT (gateway, incarnation)"
                    " DO UPDATE SET n = excluded.n, day = excluded.day WHERE excluded.n > told.n",
                    (batch.gateway, batch.incarnation, batch.n, day),
                )
                if cursor.rowcount:
                    await connection.executemany(_ADD, [_values(day, row) for row in batch.rows])
            await _put_names(connection, names)
            await connection.execute(
                "INSERT OR REPLACE INTO position VALUES (1, ?, ?, ?)",
                (position.stream_id, position.created, position.seq),
            )

    async def forget(self, before: date, names: dict[str, str]) -> None:
        """Days that the log does not hold any more: they must not depend on the age of a file. `names` are those of
        the keys there are: of some it may not have been known when their accounts came."""
        async with self._transaction() as connection:
            await _put_names(connection, names)
            await connection.execute("DELETE FROM totals WHERE day < ?", (before.isoformat(),))
            await connection.execute("DELETE FROM told WHERE day < ?", (before.isoformat(),))
            await connection.execute(
                "DELETE FROM names WHERE key NOT IN (SELECT DISTINCT key FROM totals)"
            )

    async def totals(self, wanted: Wanted) -> list[tuple[str, UsageRow]]:
        """Day and sums, in order of the dimensions; a dimension that is summed over is empty."""
        shown = [name for name in DIMENSIONS if name in wanted.by]
        where, values = (
            "day >= ? AND day <= ?",
            [wanted.since.isoformat(), wanted.until.isoformat()],
        )
        for name, value in (("key", wanted.key), ("model", wanted.model)):
            if value is not None:
                where += f" AND {name} = ?"
                values.append(value)
        columns = [name if name in shown else "''" for name in DIMENSIONS]
        grouped = f" GROUP BY {', '.join(shown)} ORDER BY {', '.join(shown)}" if shown else ""
        rows = await self._read(
            f"SELECT {', '.join((*columns, *(f'SUM({name})' for name in SUMS)))}"
            f" FROM totals WHERE {where}{grouped}",
            values,
        )
        # Without a group there is one row always, of nothing if need be.
        return [
            (
                row[0],
                UsageRow(
                    key=row[1],
                    model=row[2],
                    adapter=row[3],
                    **dict(zip(SUMS, row[4:], strict=True)),
                ),
            )
            for row in rows
            if row[4] is not None
        ]

    async def names(self) -> dict[str, str]:
        """Keys' names as last known."""
        return dict(await self._read("SELECT key, name FROM names", ()))

    async def _read(self, sql: str, values: Sequence[object]) -> list[tuple[Any, ...]]:
        async with self._one_at_a_time:
            return [tuple(row) for row in await self._connection.execute_fetchall(sql, values)]


def is_sane(batch: UsageBatch) -> bool:
    """Whether its numbers and its day can be: who tells others would spoil every sum they go into, or have the file
    refuse what it can never take."""
    try:
        _day_of(batch)
    except OverflowError:
        return False
    return 0 <= batch.n < MOST and all(
        0 <= getattr(row, name) < MOST for row in batch.rows for name in SUMS
    )


def keys_of(batches: Iterable[UsageBatch]) -> set[str]:
    return {row.key for batch in batches for row in batch.rows if row.key}


def _day_of(batch: UsageBatch) -> str:
    """The day of UTC it is counted on. Raises OverflowError for a moment before or behind all days."""
    return batch.began.astimezone(UTC).date().isoformat()


def _values(day: str, row: UsageRow) -> tuple[Any, ...]:
    return (day, row.key, row.model, row.adapter, *(getattr(row, name) for name in SUMS))


async def _put_names(connection: aiosqlite.Connection, names: dict[str, str]) -> None:
    await connection.executemany("INSERT OR REPLACE INTO names VALUES (?, ?)", list(names.items()))


async def _prepare(connection: aiosqlite.Connection) -> None:
    try:
        await connection.execute("PRAGMA journal_mode = WAL")
        await connection.execute("PRAGMA synchronous = NORMAL")
        version = next(iter(await connection.execute_fetchall("PRAGMA user_version")))[0]
        verdict = next(iter(await connection.execute_fetchall("PRAGMA quick_check(1)")))[0]
        if verdict != "ok":
            raise Unusable(f"damaged: {verdict}")
        if version not in (0, VERSION):
            raise Unusable(f"made by another version ({version}, this is {VERSION})")
        for statement in _TABLES:
            await connection.execute(statement)
        await connection.execute(f"PRAGMA user_version = {VERSION}")
    except sqlite3.OperationalError:
        raise  # locked, full, unreadable: throwing the file away would not help
    except sqlite3.DatabaseError as error:
        raise Unusable(f"damaged: {error}") from error
