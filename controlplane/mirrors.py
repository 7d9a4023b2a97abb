"""Announces this instance's mirror on core NATS and remembers which others announced themselves.

Who has a copy of what is in the log; here is only who lives and where. It decides nothing.
"""

import asyncio
from collections.abc import Callable
from typing import Final

from events.log import Wire
from schemas.beacons import MirrorBeacon

BEACON_S: Final = 2.0
GONE_S: Final = 10.0
"""A mirror silent for longer is not asked."""


class Mirrors:
    """The live mirrors. `monotonic` are seconds; `say` is what this instance announces, as of now."""

    def __init__(
        self,
        wire: Wire,
        *,
        name: str,
        say: Callable[[bool], MirrorBeacon],
        monotonic: Callable[[], float],
    ) -> None:
        self._wire = wire
        self._name = name
        self._say = say
        self._monotonic = monotonic
        self._heard: dict[str, tuple[float, str]] = {}

    def urls(self) -> dict[str, str]:
        """Where the other live mirrors are read, by name in order."""
        now = self._monotonic()
        self._heard = {n: h for n, h in self._heard.items() if now - h[0] <= GONE_S}
        return {name: self._heard[name][1] for name in sorted(self._heard)}

    async def run(self) -> None:
        """Listens and announces until cancelled; says goodbye at the end."""
        heard = await self._wire.on_beacon("mirror", MirrorBeacon, self._on_mirror)
        try:
            while True:
                await self._wire.beacon("mirror", self._name, self._say(False))
                await asyncio.sleep(BEACON_S)
        finally:
            await heard.close()
            await self._wire.beacon("mirror", self._name, self._say(True))

    def _on_mirror(self, name: str, beacon: MirrorBeacon) -> None:
        if name != beacon.mirror or name == self._name:
            return
        if beacon.leaving:
            self._heard.pop(name, None)
        else:
            self._heard[name] = (self._monotonic(), beacon.url)
