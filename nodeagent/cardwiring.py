"""Wires what an agent has for its cards: the meter, the desk and its two doors, the ends of named leases.

It holds no policy at all; what of it works beside the agent ends with the agent.
"""

import asyncio
from collections.abc import Callable, Coroutine
from functools import partial
from pathlib import Path
from typing import Any

from events.ids import utc_now
from events.log import Wire
from nodeagent.books import Books
from nodeagent.cards.meter import CardMeter, counted_on
from nodeagent.cards.provider import Provider
from nodeagent.cards.static import Static
from nodeagent.cards_rpc import WHAT, CardsRpc
from nodeagent.desk import Desk
from nodeagent.domain.line import Change
from nodeagent.door import Door
from nodeagent.fleet import Fleet
from nodeagent.givingback import NamedEndings
from nodeagent.launching import Launcher
from schemas.card import CardVmAttached, CardVmDetached
from schemas.cardasks import CardRequest
from schemas.node import Node
from schemas.settings import NodeagentSettings


def meter_of(
    node: Node, books: Books, launcher: Launcher, gpus: Provider | None, look_s: float
) -> CardMeter:
    """The meter over all cards of the node."""
    own = Static(
        [info for info in node.cards if info.provider != "nvml"],
        lambda: counted_on(dict(books.cards)),
    )
    return CardMeter(
        infos=node.cards,
        providers=(own,) if gpus is None else (own, gpus),
        census=launcher.census,
        cards=lambda: books.cards,
        tell=lambda reading: books.reading(reading, utc_now()),
        look_s=look_s,
    )


def beside(
    node: str,
    folder: Path,
    *,
    wire: Wire,
    books: Books,
    fleet: Fleet,
    meter: CardMeter,
    settings: NodeagentSettings,
) -> tuple[Callable[[], Coroutine[Any, Any, None]], ...]:
    """What works as long as the agent does. `folder` is the agent's own, where the socket is."""
    desk = Desk(
        books=books, fleet=fleet, environment=meter.environment, settings=settings, now=utc_now
    )
    named = NamedEndings(books, meter)
    books.on_cards(partial(look_at_vms, meter))
    return (
        meter.run,
        named.run,
        desk.run,
        partial(keep_open, Door(desk, folder, node)),
        partial(serve_cards, wire, desk, node),
    )


def look_at_vms(meter: CardMeter, changes: tuple[Change, ...]) -> None:
    """A card that is handed to a VM is let go at once: a machine that has it open cannot give it away."""
    if any(isinstance(change.event, CardVmAttached | CardVmDetached) for change in changes):
        meter.look_soon()


async def keep_open(door: Door) -> None:
    """Answers asks on this machine until cancelled."""
    await door.open()
    try:
        await asyncio.Event().wait()
    finally:
        await door.close()


async def serve_cards(wire: Wire, desk: Desk, node: str) -> None:
    """Answers asks from other machines until cancelled."""
    serving = await wire.serve(WHAT, node, CardRequest, CardsRpc(desk, node).answer)
    try:
        await asyncio.Event().wait()
    finally:
        await serving.close()
