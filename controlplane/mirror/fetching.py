"""Runs transfers for the workers: each in a thread, ended with its task, written through to the disk at the end.

It chooses nothing: which files, how many at once and when to try a failed one again is the leader's affair.
"""

import asyncio
import logging
import random
import threading
import time
from collections.abc import Callable, Sequence
from typing import Final

from controlplane.domain.reports import FileFault, FileStored
from controlplane.domain.work import Fetch
from controlplane.mirror.connecting import Stopped
from controlplane.mirror.domain.sources import Source
from controlplane.mirror.limiting import Limiter
from controlplane.mirror.store import Store
from controlplane.mirror.telling import in_loop
from controlplane.mirror.transfer import Transfer
from events.ids import utc_now
from schemas.progress import FileProgress
from schemas.settings import ControlplaneSettings

log = logging.getLogger(__name__)

STOP_WAIT_S: Final = 5.0
"""How long a cancelled fetch waits for its thread. Only a name lookup and the disk of an adapter's folder can hold
one for longer, and that touches nothing any more when it returns."""

LOOK_S: Final = 0.5
"""No more often it is looked whether a thread stands still, however short the bound is."""

SETTLE_S: Final = 30.0
"""How long an end waits for the disk and for such a thread."""


class Fetcher:
    """The fetches of one control plane; they share its bandwidth limit."""

    def __init__(
        self,
        store: Store,
        *,
        mirror: str,
        settings: ControlplaneSettings,
        on_progress: Callable[[FileProgress], None] = lambda _: None,
    ) -> None:
        self._store = store
        self._mirror = mirror
        self._no_progress_s = settings.mirror_no_progress_s
        self._limiter = Limiter(settings.mirror_bandwidth_bytes)
        self._on_progress = on_progress
        self._threads: set[threading.Thread] = set()

    async def fetch(self, task: Fetch, *, sources: Sequence[Source]) -> FileStored | FileFault:
        """Brings the file here, from the first of `sources` that gives it. Calls `on_progress` in this loop.

        Cancelled, it ends its thread and leaves the beginning of the file for the next time. The blob is
        written through to the disk after the answer; `settled` waits for that.
        """
        loop = asyncio.get_running_loop()
        done: asyncio.Future[FileStored | FileFault | None] = loop.create_future()

        def resolve(result: FileStored | FileFault | None) -> None:
            if not done.done():
                done.set_result(result)

        transfer = Transfer(
            task,
            sources,
            store=self._store,
            mirror=self._mirror,
            limiter=self._limiter,
            no_progress_s=self._no_progress_s,
            say=in_loop(loop, self._on_progress),
            now=utc_now,
            chance=random.random,
        )

        answer = in_loop(loop, resolve)

        def work() -> None:
            try:
                result = transfer.run()
            except Stopped:
                result = None
            answer(result)
            if isinstance(result, FileStored):
                self._settle(result)

        thread = threading.Thread(target=work, name=f"fetch {task.key[:12]}", daemon=True)
        self._threads = {other for other in self._threads if other.is_alive()} | {thread}
        thread.start()
        try:
            look_s = max(self._no_progress_s, LOOK_S)
            while not (await asyncio.wait({done}, timeout=look_s))[0]:
                if (fault := transfer.stuck()) is not None:
                    transfer.line.stop()
                    return fault
        except asyncio.CancelledError:
            transfer.line.stop()
            await asyncio.wait({done}, timeout=STOP_WAIT_S)
            raise
        result = done.result()
        assert result is not None, "only a cancelled fetch is stopped"
        return result

    async def settled(self, within_s: float = SETTLE_S) -> None:
        """Waits until everything that was fetched is written through to the disk, or that long: what was
        not is hashed again at the next opening."""
        until = time.monotonic() + within_s
        for thread in tuple(self._threads):
            await asyncio.to_thread(thread.join, max(0.0, until - time.monotonic()))

    def _settle(self, stored: FileStored) -> None:
        try:
            self._store.settle(stored.sha256)
        except OSError:
            # It counts as unsettled: the next opening of the store hashes it again.
            log.exception("a file could not be written through", extra={"file": stored.key})
