"""Parks vLLM by its own sleep, level 1: weights to RAM, cache dropped, woken by /wake_up.

An answer of 200 proves nothing: it may come before the sleep is done, or from an engine that is dying. So
`is_sleeping` is asked until it agrees, and the caller reads the card. It must not be used before a drain:
`mode=wait` lets running requests finish, and is the second net only.
"""

import asyncio
from typing import Final

import msgspec

from nodeagent.drivers import asking
from nodeagent.drivers.parkways import Parkable, ParkFault
from schemas.model import ParkWay

LOOK_S: Final = 0.1
_TOLD = 200
"""So many characters of an engine's complaint are passed on."""


class SleepWay:
    """`sleep`: POST /sleep?level=1&mode=wait and POST /wake_up, both followed by GET /is_sleeping."""

    name: ParkWay = "sleep"

    async def park(self, engine: Parkable) -> None:
        await self._tell(engine, "/sleep?level=1&mode=wait")
        await self._until(engine, sleeping=True)

    async def resume(self, engine: Parkable) -> None:
        await self._tell(engine, "/wake_up")
        await self._until(engine, sleeping=False)

    async def _tell(self, engine: Parkable, path: str) -> None:
        bound_s = engine.parking.timeout_s
        answer = await asking.post(engine.endpoint, path, engine.key, timeout_s=bound_s)
        route = path.partition("?")[0]
        if answer is None:
            raise ParkFault(f"no answer to {route} within {bound_s:g} s")
        if answer.status != 200:
            told = answer.body.decode(errors="replace").strip()[:_TOLD]
            raise ParkFault(f"{route} was answered {answer.status}" + (f": {told}" if told else ""))

    async def _until(self, engine: Parkable, *, sleeping: bool) -> None:
        """Asks until it says so. Whether that takes too long, or its process is gone, the caller knows."""
        while await _is_sleeping(engine) is not sleeping:  # noqa: ASYNC110 - it tells no other way
            await asyncio.sleep(LOOK_S)


async def _is_sleeping(engine: Parkable) -> bool | None:
    """What the engine says; None when it says nothing that makes sense."""
    answer = await asking.get(engine.endpoint, "/is_sleeping", engine.key)
    if answer is None or answer.status != 200:
        return None
    try:
        told = msgspec.json.decode(answer.body, type=dict[str, bool])
    except msgspec.DecodeError:
        return None
    return told.get("is_sleeping")
