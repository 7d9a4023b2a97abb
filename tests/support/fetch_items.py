"""Plan items whose engine's files lie on a mirror, and mirrors that announce themselves, for tests of an agent."""

import asyncio
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import psutil
from msgspec.structs import replace

from events.log import Wire
from schemas.beacons import MirrorBeacon
from schemas.mirror import Manifest
from schemas.plan import PlanItem
from tests.support.agent_yard import SCRIPTED, Hand, an_item, beside
from tests.support.scripted_mirror import Mirror

RUN = (sys.executable, "-I", "-S", str(SCRIPTED), "--port", "${PORT}", "--model", "${SOURCE}")


def an_item_of(replica: str, manifest: Manifest, **fields: Any) -> PlanItem:
    """A replica of a scripted engine whose source is this set; it is told the path as its model."""
    item = an_item(replica, **fields)
    launch = replace(item.launch, source=f"mirror:{manifest.key}", command=RUN)
    return replace(item, launch=launch)


@asynccontextmanager
async def announced(wire: Wire, *mirrors: Mirror) -> AsyncIterator[None]:
    """These mirrors announce themselves, as real ones do."""

    async def beat() -> None:
        while True:
            for n, mirror in enumerate(mirrors):
                name = f"cp{n}"
                await wire.beacon("mirror", name, MirrorBeacon(mirror=name, url=mirror.url))
            await asyncio.sleep(0.05)

    async with beside(beat()):
        yield


async def started(hand: Hand, replica: str, timeout_s: float = 10.0) -> Path:
    """The path its ready engine was given."""
    await hand.phase(replica, "ready", timeout_s)
    await hand.expect(lambda: (r := hand.replica(replica)) and r.pid, "its pid", timeout_s)
    found = hand.replica(replica)
    assert found is not None
    (path,) = [part for part in psutil.Process(found.pid).cmdline() if part.endswith(".gguf")]
    return Path(path)
