"""Answers asks for adapters that come by request/reply: gateways' for requests, and people's.

They come by different subjects, because a gateway may load and never unload. It decides nothing: the desk does.
"""

import asyncio
import contextlib
from typing import Final

from events.log import Wire
from nodeagent.slotdesk import SlotDesk
from schemas.adapterasks import Ensure, SlotsRequest

ADAPTERS: Final = "adapters"
SLOTS: Final = "slots"


async def serve_slots(wire: Wire, desk: SlotDesk, node: str) -> None:
    """Answers until cancelled."""
    async with contextlib.AsyncExitStack() as servings:
        for_gateways = await wire.serve(ADAPTERS, node, Ensure, desk.ensure)
        servings.push_async_callback(for_gateways.close)
        for_people = await wire.serve(SLOTS, node, SlotsRequest, desk.ask)
        servings.push_async_callback(for_people.close)
        await asyncio.Event().wait()
