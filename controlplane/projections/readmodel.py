"""Follows the log into sqlite and answers reads from it, always with the position they are true for.

It writes nothing but its own file, which may be deleted at any time. It decides nothing: the leader's
decisions are made on the World in memory.
"""

# ruff: noqa: S608 - the only names put into SQL text are the table names of this package

import asyncio
import contextlib
import logging
import sqlite3
from collections.abc import Callable, Sequence
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any

import msgspec
from msgspec import Raw, Struct

from controlplane.metrics import Metrics
from controlplane.projections.database import Checkpoint, Database, Unusable
from controlplane.projections.tables import BUILDING, LIVE, fold
from controlplane.readiness import ProjectionFacts
from events.log import Batch, EventLog, LogError, Recorded, StreamIdentity

log = logging.getLogger(__name__)

TOMBSTONE_TTL_S = 7 * 86_400
"""A checkpoint not caught up for longer may have missed endings: everything is read anew."""
OUTCOMES_KEPT_S = 7 * 86_400
RETRY_S = 1.0
REST_S = 0.1
"""Between two commits, unless somebody waits: reads that ask for no position may be older by this."""
HOUSEKEEPING_S = 3600.0


class NotSynced(Exception):
    """Nothing has been read yet: there is no state to show, not even an old one."""


class _OtherHistory(Exception):
    """The log does not hold the event that was folded last."""


class Entry(Struct, frozen=True, kw_only=True):
    """One aggregate and the event that made its state. `state` is JSON, None when none is known.

    `problem` says why the aggregate's last event could not be read; the state is then the one before.
    """

    name: str
    subject: str
    seq: int
    rev: int
    type: str
    event_id: str
    time: str
    actor: str
    reason: str
    causationid: str | None
    correlationid: str | None
    change: Raw | None
    state: Raw | None
    problem: str | None


class ReadModel:
    """The sqlite projection of one control plane.

    `position` is committed, never ahead of the rows. `stopped` names what stopped it; reads go on.
    """

    def __init__(
        self,
        *,
        events: EventLog,
        path: Path,
        prefix: str,
        now: Callable[[], datetime],
        monotonic: Callable[[], float],
        metrics: Metrics,
    ) -> None:
        self._events = events
        self._path = path
        self._filter = f"{prefix}.evt.>"
        self._now = now
        self._monotonic = monotonic
        self._metrics = metrics
        self._database: Database | None = None
        self._identity: StreamIdentity | None = None
        self._building = False
        self._last: Recorded | None = None
        self._expected: tuple[int, str] | None = None
        self._mark: Checkpoint | None = None
        self._waiters: list[tuple[int, asyncio.Future[None]]] = []
        self._wanted = asyncio.Event()
        self._housekept_at = monotonic()
        self.position = 0
        self.synced = False
        self.connected = False
        self.stopped: str | None = None

    def facts(self) -> ProjectionFacts:
        return ProjectionFacts(position=self.position, synced=self.synced, stopped=self.stopped)

    async def open(self) -> None:
        """Opens the file, or a fresh one in its place; after this, reads answer what it holds."""
        try:
            self._database = await Database.open(self._path)
        except Unusable as error:
            log.warning("the projection file is thrown away", extra={"why": str(error)})
            self._metrics.rebuilds.labels("file").inc()
            Database.throw_away(self._path)
            self._database = await Database.open(self._path)
        self._mark = await self._database.checkpoint()
        self.position = self._mark.applied_seq if self._mark is not None else 0

    async def close(self) -> None:
        if self._database is not None:
            await self._database.close()
            self._database = None

    async def run(self) -> None:
        """Follows until cancelled. A damaged file is replaced and read anew; a fold that raises ends it."""
        while True:
            try:
                await self._follow()
                return
            except _OtherHistory:
                log.warning("the log holds another event at the checkpoint; reading anew")
                self._mark = self._mark and msgspec.structs.replace(self._mark, stream_id="")
            except sqlite3.OperationalError as error:
                # Full or locked: what was committed stands, the rest is read again from there.
                self.synced = False
                log.error("the projection cannot write; trying again: %s", error)
                await asyncio.sleep(RETRY_S)
                self._mark = None if self._database is None else await self._checkpoint_or_none()
            except (sqlite3.DatabaseError, Unusable) as error:
                log.error("the projection file is damaged; reading anew: %s", error)
                self.synced = False
                await self.close()
                Database.throw_away(self._path)
                self._metrics.rebuilds.labels("file").inc()
                await self.open()

    async def _checkpoint_or_none(self) -> Checkpoint | None:
        assert self._database is not None
        try:
            return await self._database.checkpoint()
        except sqlite3.OperationalError:
            return self._mark

    async def _follow(self) -> None:
        """One run of the follower, from the checkpoint when it may be trusted. Returns when stopped."""
        assert self._database is not None
        self._identity = await self._identity_of_log()
        mark = self._mark
        self._expected = None
        if mark is not None and self._trusted(mark, self._identity):
            self._building = False
            # The last event folded is read once more: if another one stands there, the log was put
            # back to an earlier state and has gone on differently since.
            if mark.event_seq:
                self._expected = (mark.event_seq, mark.event_id)
            follower = self._events.follow(
                [self._filter],
                after=mark.event_seq - 1 if mark.event_seq else mark.applied_seq,
                identity=self._identity,
            )
        else:
            self._metrics.rebuilds.labels("checkpoint" if mark else "empty").inc()
            await self._begin_rebuild()
            follower = self._events.follow([self._filter])
        try:
            while self.stopped is None:
                batch = await follower.next()
                await self._take(batch)
                if batch.connected and batch.synced:
                    await self._rest()
        finally:
            await follower.close()

    async def _rest(self) -> None:
        """Lets events gather for one commit, while nobody waits for them.

        A commit costs more than what it holds, and just when a model is loaded there would be many.
        """
        if self._waiters:
            return
        self._wanted.clear()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(REST_S):
                await self._wanted.wait()

    async def _identity_of_log(self) -> StreamIdentity:
        while True:
            try:
                return await self._events.identity()
            except LogError:
                await asyncio.sleep(RETRY_S)

    def _trusted(self, mark: Checkpoint, identity: StreamIdentity) -> bool:
        """Whether the checkpoint still belongs to the log; else everything is read anew.

        1 the same stream  2 the log still holds what was applied  3 it was caught up less than a
        tombstone's life ago. That the last event is the same is seen when it is read again.
        """
        return (
            (mark.stream_id, mark.stream_created) == (identity.stream_id, identity.created)  # 1
            and identity.last_seq >= mark.applied_seq  # 2
            and self._now().timestamp() - mark.caught_up_at <= TOMBSTONE_TTL_S  # 3
        )

    def _is_expected(self, batch: Batch) -> bool:
        """Whether the event at the checkpoint is the one folded. One that was removed says nothing."""
        if self._expected is None or not batch.items:
            return True
        seq, event_id = self._expected
        self._expected = None
        first = batch.items[0]
        return first.seq != seq or (isinstance(first, Recorded) and first.id == event_id)

    async def _begin_rebuild(self) -> None:
        assert self._database is not None
        self._building = True
        self._last = None
        self.synced = False
        await self._database.begin_rebuild()

    async def _take(self, batch: Batch) -> None:
        assert self._database is not None
        self.connected = batch.connected
        if batch.reset:
            log.warning("the history was replaced; the projection is read anew")
            self._metrics.rebuilds.labels("history").inc()
            self._identity = await self._identity_of_log()
            await self._begin_rebuild()
        if not batch.connected:
            return
        if not self._is_expected(batch):
            raise _OtherHistory
        try:
            table = BUILDING if self._building else LIVE
            statements = [s for item in batch.items for s in fold(table, item)]
        except Exception as error:
            # Our own bug: this projection stops and names the events, the others go on.
            seqs = f"{batch.items[0].seq}..{batch.items[-1].seq}"
            self.stopped = f"folding events {seqs} failed: {error!r}"
            log.critical("the sqlite projection stopped", exc_info=error, extra={"seqs": seqs})
            return
        self._last = next(
            (item for item in reversed(batch.items) if isinstance(item, Recorded)), self._last
        )
        mark = self._mark_at(batch)
        if not self._building:
            if batch.items or batch.synced != self.synced:
                await self._database.commit(statements, mark)
        else:
            await self._database.build(statements)
            if not batch.synced:
                return
            await self._database.swap(mark)
            self._building = False
        self._mark = mark
        self.position = mark.applied_seq
        self.synced = self.synced or batch.synced
        self._tell()
        await self._housekeep()

    def _mark_at(self, batch: Batch) -> Checkpoint:
        assert self._identity is not None
        before = self._mark if not self._building else None
        caught_up_at = self._now().timestamp()
        if not batch.synced and before is not None:
            caught_up_at = before.caught_up_at
        last = self._last
        return Checkpoint(
            stream_id=self._identity.stream_id,
            stream_created=self._identity.created,
            applied_seq=max(batch.position, before.applied_seq if before else 0),
            event_seq=last.seq if last else (before.event_seq if before else 0),
            event_subject=last.subject if last else (before.event_subject if before else ""),
            event_id=last.id if last else (before.event_id if before else ""),
            caught_up_at=caught_up_at,
        )

    async def _housekeep(self) -> None:
        """Drops outcomes that the server has let go; tombstones left no row."""
        if self._monotonic() - self._housekept_at < HOUSEKEEPING_S or self._mark is None:
            return
        assert self._database is not None
        self._housekept_at = self._monotonic()
        before = (self._now() - timedelta(seconds=OUTCOMES_KEPT_S)).isoformat()
        await self._database.commit(
            [(f"DELETE FROM {LIVE} WHERE noun = 'command' AND time < ?", (before,))], self._mark
        )

    # Reading

    def _tell(self) -> None:
        due = [future for seq, future in self._waiters if seq <= self.position]
        self._waiters = [(s, f) for s, f in self._waiters if s > self.position and not f.done()]
        for future in due:
            if not future.done():
                future.set_result(None)

    async def reached(self, seq: int, timeout_s: float) -> bool:
        """Waits until everything up to `seq` is committed; False when the time is up."""
        if self.position >= seq:
            return True
        future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiters.append((seq, future))
        self._wanted.set()
        try:
            async with asyncio.timeout(timeout_s):
                await future
        except TimeoutError:
            return False
        finally:
            self._waiters = [(s, f) for s, f in self._waiters if f is not future]
        return True

    async def entries(self, noun: str) -> tuple[list[Entry], int]:
        """All aggregates of a noun by name, and the position they are true for. Raises NotSynced."""
        return await self._select("noun = ? ORDER BY name, subject", (noun,))

    async def entry(self, noun: str, name: str) -> tuple[Entry | None, int]:
        """One aggregate by name. Raises NotSynced."""
        found, position = await self._select("noun = ? AND name = ?", (noun, name))
        return (found[0] if found else None), position

    async def problems(self) -> tuple[list[Entry], int]:
        """Aggregates whose last event could not be read. Raises NotSynced."""
        return await self._select("problem IS NOT NULL ORDER BY subject", ())

    async def _select(self, where: str, values: Sequence[object]) -> tuple[list[Entry], int]:
        if self._database is None:
            raise NotSynced("the projection is not open")
        rows, mark = await self._database.read(
            "SELECT name, subject, seq, rev, type, event_id, time, actor, reason, causationid,"
            f" correlationid, change, body, problem FROM {LIVE} WHERE {where}",
            values,
        )
        if mark is None:
            raise NotSynced("the log has not been read yet")
        return [_entry(row) for row in rows], mark.applied_seq


def _entry(row: tuple[Any, ...]) -> Entry:
    return Entry(
        name=row[0],
        subject=row[1],
        seq=row[2],
        rev=row[3],
        type=row[4],
        event_id=row[5],
        time=row[6],
        actor=row[7],
        reason=row[8],
        causationid=row[9],
        correlationid=row[10],
        change=None if row[11] is None else Raw(row[11]),
        state=None if row[12] is None else Raw(row[12]),
        problem=row[13],
    )
