"""Follows one adapter from wherever it stands until it is ready or refused, and prints its course.

Leaving changes nothing: it is read and fetched by the control plane. On a terminal the files' way is a bar
below the lines; on a pipe it is a line now and then.
"""

import asyncio
from contextlib import AsyncExitStack

from rich.console import Console
from rich.text import Text

from controlplane.ctl import adapterview
from controlplane.ctl.bars import bar_for
from controlplane.ctl.failures import CtlError, NotKnownYet
from events.log import Batch, EventLog, Recorded, Wire
from events.subjects import event_subject
from schemas.adapter import Adapter, AdapterChecked
from schemas.file import File
from schemas.progress import FileProgress


class AdapterRefused(CtlError):
    """It cannot be served; its state says why."""

    def __init__(self, adapter: Adapter) -> None:
        super().__init__(*adapterview.ending(adapter))


async def watch_on(
    log: EventLog, wire: Wire, name: str, out: Console, *, prefix: str, timeout_s: float
) -> Adapter:
    """Prints until it is ready, and returns it.

    Raises AdapterRefused, CtlError when it is not there or was removed, NotKnownYet after `timeout_s`.
    """
    try:
        async with asyncio.timeout(timeout_s):
            return await _Watch(log, wire, name, out, prefix).run()
    except TimeoutError:
        raise NotKnownYet(
            f"{name}: not ready after {timeout_s:g} s; it goes on: yardctl adapter show {name}"
        ) from None


class _Watch:
    def __init__(self, log: EventLog, wire: Wire, name: str, out: Console, prefix: str) -> None:
        self._log = log
        self._wire = wire
        self._name = name
        self._prefix = prefix
        self._bar = bar_for(out, adapterview.INDENT)
        self._adapter: Adapter | None = None
        self._gone = False
        self._away = False
        self._files: dict[str, File] = {}
        self._progress: dict[str, FileProgress] = {}
        self._troubles: dict[str, str] = {}

    async def run(self) -> Adapter:
        async with AsyncExitStack() as at_the_end:
            at_the_end.callback(self._bar.close)
            heard = await self._wire.on_progress("file", FileProgress, self._on_file)
            at_the_end.push_async_callback(heard.close)
            follower = self._log.follow(
                [
                    event_subject("adapter", self._name, prefix=self._prefix),
                    f"{event_subject('file', prefix=self._prefix)}.*",
                ]
            )
            at_the_end.push_async_callback(follower.close)
            while True:
                self._apply(await follower.next())
                found = self._adapter
                if found is not None and found.phase == "ready":
                    return found
                if found is not None and found.phase == "refused":
                    raise AdapterRefused(found)
                self._show()

    def _apply(self, batch: Batch) -> None:
        if not batch.connected:
            if not self._away:
                self._tell("NATS is away; it goes on when it is back")
            self._away = True
            return
        self._away = False
        for item in batch.items:
            if not isinstance(item, Recorded):
                continue
            if item.noun == "adapter":
                self._take(item)
            elif isinstance(item.state, File):
                self._files[item.state.key] = item.state
        self._tell_troubles()
        if batch.synced and self._adapter is None:
            raise CtlError(f"there is no adapter {self._name!r}; yardctl adapter list shows them")

    def _take(self, item: Recorded) -> None:
        found, before = item.state, self._adapter
        if not isinstance(found, Adapter):
            if before is not None:
                raise CtlError(f"{self._name}: it was removed meanwhile")
            return
        if before is not None and before.incarnation != found.incarnation:
            raise CtlError(f"{self._name}: it was added anew meanwhile, by {found.by or 'another'}")
        checked = item.reason if isinstance(item.event, AdapterChecked) else ""
        for told in adapterview.news(before, found, checked):
            self._tell(told)
        if before is None or before.phase != found.phase:
            self._bar.hide()
        self._adapter = found

    def _tell_troubles(self) -> None:
        """Each trouble of a file once, until it is another one."""
        for one in () if self._adapter is None else self._adapter.files:
            file = self._files.get(one.key)
            told = None if file is None else adapterview.trouble(file)
            if told is None:
                self._troubles.pop(one.key, None)
            elif self._troubles.get(one.key) != told:
                self._troubles[one.key] = told
                self._tell(adapterview.line("", told))

    def _tell(self, text: str) -> None:
        self._bar.print(Text(text))

    def _on_file(self, writer: str, key: str, told: FileProgress) -> None:
        del writer
        self._progress[key] = told
        self._show()

    def _show(self) -> None:
        if self._adapter is None or self._adapter.phase != "fetching":
            return
        amount = adapterview.amount(self._adapter, self._files, self._progress)
        if amount is not None:
            self._bar.show(amount, asyncio.get_running_loop().time())
