"""Knows the mirrors that announced themselves, and wakes who waits for one.

A mirror stays known while NATS is away: its files are read over HTTP all the same. It asks them nothing.
"""

import asyncio
from collections.abc import Callable
from typing import Final

from nodeagent.waking import pause
from schemas.beacons import MirrorBeacon

FORGET_S: Final = 3600.0


class Mirrors:
    """The last beacon of every mirror."""

    def __init__(self, monotonic: Callable[[], float]) -> None:
        self._monotonic = monotonic
        self._heard: dict[str, tuple[str, float]] = {}
        self._new = asyncio.Event()

    def hear(self, name: str, beacon: MirrorBeacon) -> None:
        """Takes one beacon; an address not known before wakes who waits."""
        known = self._heard.pop(name, None)
        if beacon.leaving:
            return
        self._heard[name] = (beacon.url, self._monotonic())
        if known is None or known[0] != beacon.url:
            self._new.set()

    def urls(self) -> tuple[str, ...]:
        """Where to ask, by the mirrors' names; each address once."""
        oldest = self._monotonic() - FORGET_S
        urls = [url for _, (url, at) in sorted(self._heard.items()) if at >= oldest]
        return tuple(dict.fromkeys(urls))

    async def new_one(self, seconds: float) -> None:
        """Waits that long, or until a mirror announces an address not known before."""
        self._new.clear()
        await pause(self._new, seconds)
