"""Says how one stored event changes the rows of the read model, as SQL with its values.

Pure: it opens no database. A row is the last valid state of one subject and the event that made it.
"""

# ruff: noqa: S608 - the only names put into SQL text are the table names of this package

from functools import cache
from typing import Final

import msgspec

from events.log import Broken, Recorded

SCHEMA_VERSION: Final = 2
"""Raised with every change of the tables: a file of another version is thrown away and read anew."""

LIVE: Final = "agg"
BUILDING: Final = "agg_building"

Statement = tuple[str, tuple[object, ...]]


def create_rows(table: str) -> str:
    """The table of aggregates; `name` is how a person asks for one within its noun.

    `change` is what the event itself says happened. `body` is NULL when no valid state is known. `problem`
    says why the last event was not folded.
    """
    return f"""
        CREATE TABLE IF NOT EXISTS {table} (
            subject TEXT PRIMARY KEY,
            noun TEXT NOT NULL,
            name TEXT NOT NULL,
            seq INTEGER NOT NULL,
            rev INTEGER NOT NULL,
            type TEXT NOT NULL,
            event_id TEXT NOT NULL,
            time TEXT NOT NULL,
            actor TEXT NOT NULL,
            reason TEXT NOT NULL,
            causationid TEXT,
            correlationid TEXT,
            change BLOB,
            body BLOB,
            problem TEXT
        ) WITHOUT ROWID
    """


CREATE_CHECKPOINT: Final = """
    CREATE TABLE IF NOT EXISTS checkpoint (
        one INTEGER PRIMARY KEY CHECK (one = 1),
        stream_id TEXT NOT NULL,
        stream_created TEXT NOT NULL,
        applied_seq INTEGER NOT NULL,
        event_seq INTEGER NOT NULL,
        event_subject TEXT NOT NULL,
        event_id TEXT NOT NULL,
        caught_up_at REAL NOT NULL
    )
"""


def name_of(noun: str, key: tuple[str, ...]) -> str:
    """How a person names it: a replica by its own id, others by their key joined with slashes."""
    return key[-1] if noun == "replica" else "/".join(key)


def fold(table: str, item: Recorded | Broken) -> tuple[Statement, ...]:
    """The statements for one event; one that is not newer than its row changes nothing.

    1. A valid event replaces the row. 2. A tombstone removes it. 3. An event of a newer version keeps
    the state and marks it. 4. A broken one too, after the previous valid event if it brings one.
    """
    if isinstance(item, Broken):
        before = () if item.previous is None else fold(table, item.previous)
        return (*before, _mark(table, item.subject, item.seq, item.why))  # 4
    if item.problem is not None:
        return _mark_unknown(table, item)  # 3
    if item.type.endswith(".deleted"):
        return (
            (f"DELETE FROM {table} WHERE subject = ? AND seq < ?", (item.subject, item.seq)),
        )  # 2
    return (
        _put(table, item, None if item.state is None else msgspec.json.encode(item.state)),
    )  # 1


@cache
def _put_text(table: str) -> str:
    """Made once for each table: a replay puts a hundred thousand rows."""
    return f"""INSERT INTO {table} VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?)
        ON CONFLICT (subject) DO UPDATE SET
            seq = excluded.seq, rev = excluded.rev, type = excluded.type,
            event_id = excluded.event_id, time = excluded.time, actor = excluded.actor,
            reason = excluded.reason, causationid = excluded.causationid,
            correlationid = excluded.correlationid, change = excluded.change, body = excluded.body,
            problem = excluded.problem
        WHERE excluded.seq > {table}.seq"""


def _put(table: str, item: Recorded, body: bytes | None) -> Statement:
    return (
        _put_text(table),
        (
            item.subject,
            item.noun,
            name_of(item.noun, item.key),
            item.seq,
            item.rev,
            item.type,
            item.id,
            item.time.isoformat(),
            item.actor,
            item.reason,
            item.causationid,
            item.correlationid,
            None if item.event is None else msgspec.json.encode(item.event),
            body,
            item.problem,
        ),
    )


def _mark(table: str, subject: str, seq: int, problem: str) -> Statement:
    """Keeps the state; only the position of the subject and the problem move."""
    return (
        f"UPDATE {table} SET seq = ?, problem = ? WHERE subject = ? AND seq < ?",
        (seq, problem, subject, seq),
    )


def _mark_unknown(table: str, item: Recorded) -> tuple[Statement, ...]:
    # Without a row there is no state to keep: the row says so, and what kind of thing it is.
    sql, values = _put(table, item, None)
    head = sql.partition("DO UPDATE SET")[0]
    return (
        (f"{head}DO NOTHING", values),
        _mark(table, item.subject, item.seq, item.problem or ""),
    )
