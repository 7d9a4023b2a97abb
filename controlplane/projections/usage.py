"""Follows YARD_USAGE into its sqlite file and answers what was used, by day, key, model and adapter.

It is accounting: nothing is decided by it, and a control plane whose log has no room for it is as ready as any other.
"""

import asyncio
import logging
import sqlite3
from collections.abc import Callable, Mapping
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Final

from controlplane.domain import keys
from controlplane.metrics import Metrics
from controlplane.projections.database import Unusable
from controlplane.projections.readmodel import NotSynced
from controlplane.projections.usagefile import (
    Position,
    UsageFile,
    Wanted,
    is_sane,
    keys_of,
)
from controlplane.readiness import ProjectionFacts
from events.log import EventLog, LogError, StreamIdentity, UsagePage
from events.streams import USAGE_KEPT_DAYS
from schemas.key import Key
from schemas.usage import UsageBatch, UsageTotal

log = logging.getLogger(__name__)

RETRY_S: Final = 1.0
REFUSED_RETRY_S: Final = 15.0
HOUSEKEEPING_S: Final = 3600.0


class UsageModel:
    """The totals of one control plane. `keys` tells those there are now, by id.

    `position` is committed, never ahead of the totals; `synced` once all there was had been added up.
    """

    def __init__(
        self,
        *,
        events: EventLog,
        path: Path,
        keys: Callable[[], Mapping[str, Key]],
        now: Callable[[], datetime],
        metrics: Metrics,
    ) -> None:
        self._events = events
        self._path = path
        self._keys = keys
        self._now = now
        self._metrics = metrics
        self._file: UsageFile | None = None
        self._mark: Position | None = None
        self._swept_at: datetime | None = None
        self._said = ""
        self._damaged = False
        self.synced = False
        self.stopped: str | None = None
        """What stopped it: accounts that could not be added up. What was goes on being told."""

    @property
    def position(self) -> int:
        return 0 if self._mark is None else self._mark.seq

    async def _open(self) -> None:
        """Opens the file, or a fresh one in place of one that is damaged or another version's."""
        try:
            if self._damaged:
                raise Unusable("damaged")
            self._file = await UsageFile.open(self._path)
        except Unusable as error:
            log.warning("the usage file is thrown away", extra={"why": str(error)})
            UsageFile.throw_away(self._path)
            self._damaged = False
            self._file = await UsageFile.open(self._path)
        self._mark = await self._file.position()

    async def close(self) -> None:
        """Lets go of the file; `run` would open it again."""
        file, self._file = self._file, None
        if file is not None:
            await file.close()

    def facts(self) -> ProjectionFacts:
        return ProjectionFacts(position=self.position, synced=self.synced, stopped=self.stopped)

    async def run(self) -> None:
        """Follows until cancelled, or stopped; whatever the file or the log refuses is tried again."""
        while self.stopped is None:
            pause_s = RETRY_S
            try:
                if self._file is None:
                    await self._open()
                await self._follow()
            except (sqlite3.OperationalError, OSError) as error:
                # Full, locked, not to be opened: what was committed stands, the rest is read again from there.
                self._say("usage cannot be written; trying again", error)
            except (sqlite3.DatabaseError, Unusable) as error:
                self._say("the usage file is damaged; adding up anew", error)
                self._damaged = True
                await self.close()
            except LogError as error:
                # As for a user whose rights are of a version before.
                self._say("usage cannot be read; trying again", error)
                pause_s = REFUSED_RETRY_S
            except Exception as error:
                # Our own bug: this projection stops and says where, the others go on.
                self.stopped = f"adding up usage behind {self.position} failed: {error!r}"
                log.critical("the usage projection stopped", exc_info=error)
                return
            self.synced = False
            await asyncio.sleep(pause_s)

    def _say(self, what: str, error: Exception) -> None:
        """Once, however often it is tried."""
        if str(error) != self._said:
            self._said = str(error)
            log.warning(what, extra={"why": self._said})

    async def _follow(self) -> None:
        assert self._file is not None
        self._mark = mark = await self._file.position()
        known = None
        if mark is not None:
            known = StreamIdentity(
                stream_id=mark.stream_id, created=mark.created, last_seq=mark.seq, schema=0
            )
        follower = self._events.follow_usage(after=self.position, identity=known)
        try:
            while True:
                await self._take(await follower.next())
        finally:
            await follower.close()

    async def _take(self, page: UsagePage) -> None:
        assert self._file is not None
        batches: list[UsageBatch] = []
        for item in page.items:
            if item.batch is None or not is_sane(item.batch):
                self._metrics.usage_unreadable.inc()
                log.warning(
                    "an account of usage cannot be read",
                    extra={"seq": item.seq, "why": item.problem or "its numbers cannot be"},
                )
            else:
                batches.append(item.batch)
        mark = Position(
            stream_id=page.identity.stream_id, created=page.identity.created, seq=page.position
        )
        if page.items or page.reset or self._mark is None:
            now = self._names()
            names = {id: now[id] for id in keys_of(batches) if id in now}
            await self._file.add(batches, mark, names, reset=page.reset)
            self._mark = mark
            self._said = ""
        self.synced = self.synced or page.synced
        await self._sweep()

    async def _sweep(self) -> None:
        """Forgets what the log forgets, so that totals do not depend on how old a file is, and learns the names that
        were not known before."""
        assert self._file is not None
        now = self._now()
        if self._swept_at is not None and (now - self._swept_at).total_seconds() < HOUSEKEEPING_S:
            return
        self._swept_at = now
        first = (now - timedelta(days=USAGE_KEPT_DAYS)).astimezone(UTC).date()
        await self._file.forget(first, self._names())

    async def totals(self, wanted: Wanted) -> tuple[list[UsageTotal], int]:
        """Sums with the names of their keys, and the position they are true for. Raises NotSynced."""
        if self._file is None or (self._mark is None and not self.synced):
            raise NotSynced("what was used has not been read yet")
        names = {**await self._file.names(), **self._names()}
        found = await self._file.totals(wanted)
        return [
            UsageTotal(day=day, row=row, key_name=names.get(row.key, "")) for day, row in found
        ], self.position

    async def key_id(self, said: str) -> str:
        """The id of the key of that id or name: as commands mean it, else of one that used something; else `said`."""
        there = keys.find(self._keys(), said, self._now())
        if there is not None:
            return there.id
        id = keys.id_of(said)
        ended = {} if self._file is None else await self._file.names()
        called = sorted(key for key, name in ended.items() if name == said)
        return id if id in ended or not called else called[-1]

    def _names(self) -> dict[str, str]:
        return {key.id: key.name for key in self._keys().values()}
