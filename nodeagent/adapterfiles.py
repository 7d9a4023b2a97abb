"""Has adapters' files on this node before an engine is asked to load them, and keeps those of loaded ones.

It follows the catalog through outages, fetches ahead of time what may be asked for here, and gives a folder to
whoever loads. What is wanted and what it may cost is decided in `domain/adapterfiles.py`; it asks no engine.
"""

import asyncio
import logging
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Final

from msgspec import Struct

from events.log import Batch, EventLog, Misconfigured
from nodeagent.domain import adapterfiles as domain
from nodeagent.domain.catalog import Catalog, Shelf
from nodeagent.domain.files import FETCH_FAILED, MIRROR
from nodeagent.domain.held import Held
from nodeagent.files.fetches import FetchFailed, Files
from nodeagent.waking import pause
from schemas.adapter import Adapter
from schemas.node import Node

LOG = logging.getLogger(__name__)

LOOK_S: Final = 300.0
"""What is on the disk is compared with what is wanted at least so often: others evict, and room comes back."""

DISK_AGAIN_S: Final = 60.0
READ_AGAIN_S: Final = 60.0


class Failure(Struct, frozen=True, kw_only=True):
    """A set that could not be fetched ahead: how often in a row, and when it is tried again (monotonic)."""

    count: int
    again_at: float


class AdapterFiles:
    """The adapters of one node, as far as files go. One event loop owns it.

    `root` is the folder below which all their folders lie, and nothing else an engine must not read.
    `on_change` is called with the names of adapters that the log told something new of (another version, a pin,
    an end), and once, with all of them, when the catalog was read. What they are now `adapter` tells.
    """

    def __init__(
        self,
        *,
        log: EventLog,
        files: Files,
        node: Node,
        prefix: str,
        held: Callable[[], Mapping[str, Held]],
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        """`held` are the replicas of this node by id."""
        self._log = log
        self._files = files
        self._node = node
        self._prefix = prefix
        self._held = held
        self._monotonic = monotonic
        self._kept: dict[str, frozenset[str]] = {}
        self._failures: dict[str, Failure] = {}
        self._said = ""
        self._wake = asyncio.Event()
        self._begun = asyncio.Event()
        self.left: frozenset[str] = frozenset()
        """Keys of the sets that are wanted here and found no room at the last look."""
        self.catalog = Catalog()
        self.root = files.sets
        self.on_change: Callable[[frozenset[str]], None] = lambda _: None

    # What there is.

    @property
    def synced(self) -> bool:
        """Whether the catalog was read: until then an adapter that is missing may only be unread."""
        return self.catalog.synced

    def adapter(self, name: str) -> Adapter | None:
        """The adapter of this name (no alias), whatever its phase; None when the catalog has none."""
        return self.catalog.adapters.get(name)

    def folder(self, adapter: Adapter) -> Path:
        """Where its files lie once they are here: what an engine is given, and lists as `root`."""
        return self.root / domain.set_of(adapter)

    def path(self, adapter: Adapter) -> Path | None:
        """Its folder when all of its files are in it now. Quick."""
        key = domain.set_of(adapter)
        if not key or self._files.whole(key, domain.contents_of(adapter)) is None:
            return None
        return self.folder(adapter)

    async def obtain(self, adapter: Adapter) -> Path:
        """Makes its files be here, before anything that nobody waits for; the folder.

        Needs nobody when they are. Name its set in `keep` before, or what was obtained may be evicted again
        before it is used. Raises FetchFailed. Cancelled, it leaves what came.
        """
        key = domain.set_of(adapter)
        if not key:
            raise FetchFailed(FETCH_FAILED, f"the files of {adapter.name} are not known yet")
        known = domain.contents_of(adapter)
        if self._files.take(key, known) is None:
            try:
                await self._files.obtain_set(key, known)
            finally:
                self._wake.set()  # it may have taken the room of what was fetched ahead
            self._failures.pop(key, None)
        return self.folder(adapter)

    # What stays.

    def keep(self, replica: str, sets: frozenset[str]) -> None:
        """From now on these sets (by `set_of`) are needed by this replica, and no others of adapters.

        Say it once for every engine found running, also when it has none loaded: until then no adapter's
        files are evicted on this node.
        """
        before = self._kept.get(replica, frozenset())
        self._kept[replica] = sets
        self._used(before - sets)

    def give_back(self, replica: str) -> None:
        """The replica is gone; it needs nothing any more."""
        self._used(self._kept.pop(replica, frozenset()))

    def kept(self) -> frozenset[str]:
        """The keys of the sets that loaded adapters here need."""
        return domain.still_kept(self._kept, self._held())

    def settled(self) -> bool:
        """Whether it is known of every engine here what it has loaded."""
        return domain.is_settled(self._held().values(), self._kept)

    def _used(self, sets: frozenset[str]) -> None:
        for key in sets:
            self._files.used(f"{MIRROR}{key}")

    # The catalog.

    async def run(self) -> None:
        """Follows and fetches until cancelled."""
        if any(engine.adapters for engine in self._node.engines):
            # An engine that is told where it may read wants the folder to be there when it starts.
            self.root.mkdir(mode=0o700, parents=True, exist_ok=True)
        async with asyncio.TaskGroup() as group:
            # One follower each: this node's user may follow single filters only.
            group.create_task(self._follow("model", self.catalog.model_shelf))
            group.create_task(self._follow("adapter", self.catalog.adapter_shelf))
            group.create_task(self._fetch_ahead())

    async def _follow(self, noun: str, shelf: Shelf[Any]) -> None:
        """Keeps one shelf as the log tells it. Without the right to read it there are no adapters here, and
        everything else goes on: the users of a yard may be older than its agents."""
        told = False
        while True:
            shelf.read_anew()
            try:
                await self._read(noun, shelf)
            except Misconfigured as error:
                if not told:
                    LOG.error(
                        "the catalog cannot be read: no adapters here until it can",
                        extra={"noun": noun, "problem": str(error)},
                    )
                told = True
            await asyncio.sleep(READ_AGAIN_S)

    async def _read(self, noun: str, shelf: Shelf[Any]) -> None:
        follower = self._log.follow([f"{self._prefix}.evt.{noun}.>"])
        try:
            while True:
                self._take(shelf, await follower.next())
        finally:
            await follower.close()

    def _take(self, shelf: Shelf[Any], batch: Batch) -> None:
        was_synced = self.synced
        changed = shelf.take(batch)
        if changed:
            self._wake.set()
        if self.synced and not was_synced:
            self.on_change(frozenset(self.catalog.adapters))
        elif changed and shelf is self.catalog.adapter_shelf:
            self.on_change(changed)

    # Ahead of time.

    def begin(self) -> None:
        """It is known which replicas this node has, and so what must not go for what is fetched ahead."""
        self._begun.set()

    async def _fetch_ahead(self) -> None:
        await self._begun.wait()
        while True:
            await self._files.idle()
            self._wake.clear()
            try:
                rest_s = await self._round()
            except OSError as error:
                rest_s = DISK_AGAIN_S
                LOG.warning("adapters' files not looked at", extra={"problem": str(error)})
            await pause(self._wake, rest_s)

    async def _round(self) -> float:
        """Fetches what is missing until there is something new to look at; seconds until the next look."""
        if not self.synced:
            return LOOK_S
        running = self._running()
        wishes = domain.wanted(self.catalog, self._node, running)
        if not wishes:
            return LOOK_S
        wished = {domain.set_of(adapter) for adapter in wishes}
        self._failures = {k: failure for k, failure in self._failures.items() if k in wished}
        plan = await self._plan(wishes)
        now = self._monotonic()
        next_s = LOOK_S
        for adapter in plan.fetch:
            key = domain.set_of(adapter)
            failure = self._failures.get(key)
            if failure is not None and failure.again_at > now:
                next_s = min(next_s, failure.again_at - now)
                continue
            if not await self._fetch_one(adapter, key, plan.spare):
                return 0.0
            if self._wake.is_set() or self._running() != running:
                return 0.0  # what is wanted most may be another one now
            failure = self._failures.get(key)
            if failure is not None:
                next_s = min(next_s, failure.again_at - self._monotonic())
        return max(next_s, 0.0)

    def _running(self) -> frozenset[str]:
        return domain.running_models(self._held().values())

    async def _plan(self, wishes: tuple[Adapter, ...]) -> domain.Ahead:
        survey = await self._files.survey(
            {domain.set_of(a): domain.contents_of(a) for a in wishes},
            {file.sha256: file.bytes for a in wishes for file in a.files if file.sha256},
        )
        plan = domain.plan(
            wishes,
            survey.disk,
            here=survey.here,
            beside=survey.beside,
            spared=self._files.needed(survey.disk) | domain.model_sets(self.catalog),
            limits=self._files.limits,
        )
        left = frozenset(domain.set_of(a) for a in plan.left)
        if left and left != self.left:
            LOG.warning(
                "no room to have all adapters here",
                extra={"left": len(left), "bytes": plan.left_bytes, "of": len(wishes)},
            )
        self.left = left
        return plan

    async def _fetch_one(self, adapter: Adapter, key: str, spare: frozenset[str]) -> bool:
        """Fetches one set; False when it gave way to what somebody waits for."""
        try:
            path = await self._files.fetch_ahead(key, domain.contents_of(adapter), spare)
        except FetchFailed as failed:
            before = self._failures.get(key)
            count = before.count + 1 if before is not None else 1
            again_s = domain.again_s(count)
            self._failures[key] = Failure(count=count, again_at=self._monotonic() + again_s)
            # Once for each, and what is wrong with a mirror or the disk once for all of them.
            if before is None and failed.sentence != self._said:
                self._said = failed.sentence
                LOG.warning(
                    "adapter not fetched yet",
                    extra={
                        "adapter": adapter.name,
                        "code": failed.code,
                        "problem": failed.sentence,
                        "again_s": again_s,
                    },
                )
            return True
        if path is None:
            return False
        self._failures.pop(key, None)
        self._said = ""
        LOG.info("adapter fetched", extra={"adapter": adapter.name, "version": adapter.version})
        return True
