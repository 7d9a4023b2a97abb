"""Puts one instance's mirror together: its store, its hands, its announcements, its door for readers.

Wiring of the mirror alone; what is fetched, kept and removed is decided by the leader.
"""

import asyncio
import logging
import os
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from controlplane.domain import needs
from controlplane.domain.files import copy_on
from controlplane.domain.reports import FileGone, Report
from controlplane.domain.world import World
from controlplane.hands import CONTROL, Hands
from controlplane.headers import Headers
from controlplane.mirror.fetching import Fetcher
from controlplane.mirror.serving import MirrorApp
from controlplane.mirror.store import Store
from controlplane.mirrors import Mirrors
from controlplane.registry.client import Registry
from events.log import Wire
from schemas.beacons import MirrorBeacon
from schemas.mirror import Manifest, ManifestFile
from schemas.progress import FileProgress
from schemas.settings import ControlplaneSettings

log = logging.getLogger(__name__)

WRITER = "control"
"""The user whose right it is to tell the progress of the mirrors."""

EVERY_ADDRESS = ("", "0.0.0.0", "::")  # noqa: S104 - compared, not bound


class Mirroring:
    """The mirror `name` in `folder`. `environment` holds the registry's address and token.

    `open` before anything else, `close` at the end, in the event loop.
    """

    def __init__(
        self,
        *,
        name: str,
        folder: Path,
        settings: ControlplaneSettings,
        wire: Wire,
        yard_secret: str,
        environment: Mapping[str, str] = os.environ,
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        self.name = name
        self.url = settings.mirror_url
        self._listen = settings.listen
        self._wire = wire
        self._yard_secret = yard_secret
        self.store = Store(folder, keep_free_bytes=settings.mirror_keep_free_bytes)
        self.registry = Registry.from_environment(environment)
        self.far = Headers()
        """The turns of all who read headers at the registry: jobs and plans."""
        self._fetcher = Fetcher(self.store, mirror=name, settings=settings, on_progress=self._tell)
        self._mirrors = Mirrors(wire, name=name, say=self._beacon, monotonic=monotonic)
        self.hands = Hands(
            mirror=name,
            registry=self.registry,
            far=self.far,
            store=self.store,
            fetcher=self._fetcher,
            others=self._mirrors.urls,
            yard_secret=yard_secret,
            smoke_timeout_s=settings.smoke_timeout_s,
            on_progress=self._tell,
            fetches=settings.mirror_fetches,
        )
        self.on_gone: Callable[[FileGone], None] = lambda _: None
        """Told of a file the log says is here and is not, when somebody asks for it."""
        self._telling: set[asyncio.Task[None]] = set()
        self._app: MirrorApp | None = None

    async def open(self) -> None:
        """Makes the store ready. Raises StoreError when its folder cannot be used."""
        for lost in await asyncio.to_thread(self.store.open):
            log.warning("the mirror lost something", extra={"what": lost})

    async def run(self, port: int) -> None:
        """Announces the mirror until cancelled: at the address it is served at, `port` as it turned out to be,
        unless the settings say where."""
        self.url = self.url or announced(self._listen, port)
        await self._mirrors.run()

    async def close(self) -> None:
        """Ends what is still being told and read."""
        if self._app is not None:
            self._app.close()
        for task in tuple(self._telling):
            task.cancel()
        await asyncio.gather(*self._telling, return_exceptions=True)
        await self._fetcher.settled()
        await self.registry.close()

    def others(self) -> tuple[str, ...]:
        """The other live mirrors, by name."""
        return tuple(self._mirrors.urls())

    def in_front_of(self, app: Any, world: Callable[[], World]) -> MirrorApp:
        """The door for readers before the API `app`."""
        self._app = MirrorApp(
            app,
            store=self.store,
            yard_secret=self._yard_secret,
            manifest_of=lambda key: self._manifest(world(), key),
            admit=lambda reader: may_read(world(), reader),
        )
        return self._app

    async def missing(self, world: World) -> Sequence[Report]:
        """What the log says is here and is not: somebody took it from the folder."""
        said = [
            file.key
            for file in world.files.values()
            if (copy := copy_on(file, self.name)) is not None and copy.phase == "present"
        ]
        gone = await asyncio.to_thread(lambda: [key for key in said if not self.store.has(key)])
        return [FileGone(key=key, mirror=self.name) for key in gone]

    def _manifest(self, world: World, key: str) -> Manifest | None:
        files: list[ManifestFile] = []
        for one in needs.keys_of_set(world, key):
            entry = self.store.entry(one)
            if entry is None:
                self._notice(world, one)
                return None
            name = entry.path.rpartition("/")[2]
            files.append(ManifestFile(key=one, name=name, bytes=entry.bytes, sha256=entry.sha256))
        return Manifest(key=key, files=tuple(files))

    def _notice(self, world: World, key: str) -> None:
        """Somebody removed or cut it under the running mirror: the leader has it fetched again."""
        file = world.files.get(key)
        mine = copy_on(file, self.name) if file is not None else None
        if mine is not None and mine.phase == "present":
            self.on_gone(FileGone(key=key, mirror=self.name))

    def _beacon(self, leaving: bool) -> MirrorBeacon:
        try:
            free_bytes = max(0, self.store.free_bytes())
        except OSError:
            # A disk that fails fails fetches, each with its sentence; it must not end the whole instance.
            free_bytes = 0
        return MirrorBeacon(mirror=self.name, url=self.url, free_bytes=free_bytes, leaving=leaving)

    def _tell(self, progress: FileProgress) -> None:
        task = asyncio.get_running_loop().create_task(
            self._wire.progress(WRITER, "file", progress.key, progress)
        )
        self._telling.add(task)
        task.add_done_callback(self._telling.discard)


def announced(listen: str, port: int) -> str:
    """Where readers find what listens at `listen`. Of every address only this host's own is known."""
    host = listen.rpartition(":")[0].strip("[]")
    if host in EVERY_ADDRESS:
        log.warning(
            "nodes on other machines cannot reach this mirror; set controlplane.mirror_url",
            extra={"listen": listen},
        )
        host = "127.0.0.1"
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def may_read(world: World, reader: str) -> bool:
    """Control planes may, and every node that was not removed."""
    state = world.nodestates.get(reader)
    return reader == CONTROL or state is None or state.admin != "removed"
