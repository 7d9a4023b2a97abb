"""Asks agents where adapters are loaded, and has them load and unload some: request/reply, all nodes at once.

An agent answers within seconds whatever happens; what takes longer is asked again until the time is over, and
goes on after that. Nothing is decided here: the agent alone loads and evicts.
"""

import asyncio
from collections.abc import Callable, Sequence
from typing import Final, Literal

from msgspec import Struct

from controlplane.ctl.adapterview import Held
from events.log import LogError, Wire
from schemas import codes
from schemas.adapterasks import (
    AdapterHolders,
    LoadAdapter,
    SlotsAnswer,
    SlotsRequest,
    UnloadAdapter,
)

WHAT: Final = "slots"
WAIT_S: Final = 5.0
"""How long an agent may hold one answer."""
LATE_S: Final = 5.0
"""So much later its answer is not awaited any more: it is not there."""
PAUSE_S: Final = 0.25
"""Between two asks, should an agent answer at once."""

_GOING_ON: Final = {
    ("loading", False): "it is being loaded",
    ("loading", True): "it is being loaded, and then unloaded",
    ("waiting", False): "it waits for a place",
    ("waiting", True): "it is unloaded once nobody uses it",
}
"""What is said when the agent says no more than that; True: of an unload."""

Change = LoadAdapter | UnloadAdapter
Tell = Callable[["Fate"], None]


class Fate(Struct, frozen=True, kw_only=True):
    """What became of a load or an unload in one replica.

    done; refused (`code`, `sentence`); going on (`sentence`) when the time was over; silent: its agent did not
    answer, and whether it heard is not known.
    """

    node: str
    replica: str
    state: Literal["done", "refused", "going on", "silent"]
    code: str = ""
    sentence: str = ""


class Found(Struct, frozen=True, kw_only=True):
    """Who holds what, and the nodes that did not say."""

    held: tuple[Held, ...]
    silent: tuple[str, ...] = ()


async def holders(wire: Wire, nodes: Sequence[str], adapter: str) -> Found:
    """Where `adapter` is (empty: every adapter), asked of all nodes at once."""
    ask = AdapterHolders(adapter=adapter)
    answers = await asyncio.gather(*(_ask(wire, node, ask, WAIT_S) for node in nodes))
    held = [
        Held(node=node, holder=holder)
        for node, answer in zip(nodes, answers, strict=True)
        if answer is not None
        for holder in answer.holders
    ]
    silent = [node for node, answer in zip(nodes, answers, strict=True) if answer is None]
    return Found(held=tuple(sorted(held, key=lambda h: h.order)), silent=tuple(sorted(silent)))


async def change(
    wire: Wire, asks: Sequence[tuple[str, Change]], tell: Tell, *, timeout_s: float
) -> tuple[Fate, ...]:
    """Has each (node, ask) done, all at once; `tell` hears what one waits for, each time it changes."""
    return tuple(
        await asyncio.gather(*(_until_done(wire, node, ask, tell, timeout_s) for node, ask in asks))
    )


async def _until_done(wire: Wire, node: str, ask: Change, tell: Tell, timeout_s: float) -> Fate:
    """Asks until there is an end: an agent answers `loading` or `waiting` when it held the ask for as long as it may."""
    loop = asyncio.get_running_loop()
    end = loop.time() + timeout_s
    told = ""
    while True:
        began = loop.time()
        answer = await _ask(wire, node, ask, min(WAIT_S, max(0.0, end - began)))
        fate = _fate(node, ask, answer, is_repeated=bool(told))
        if fate.state != "going on" or loop.time() + PAUSE_S >= end:
            return fate
        if fate.sentence != told:
            told = fate.sentence
            tell(fate)
        if loop.time() - began < PAUSE_S:
            # Else it is asked again at once: what ends meanwhile would end unheard, and be tried anew.
            await asyncio.sleep(PAUSE_S)


def _fate(node: str, ask: Change, answer: SlotsAnswer | None, *, is_repeated: bool) -> Fate:
    """What one answer says. An unload that ended between two asks is not there any more at the second: done."""
    if answer is None:
        return Fate(node=node, replica=ask.replica, state="silent")
    match answer.status:
        case "done":
            return Fate(node=node, replica=ask.replica, state="done", sentence=answer.sentence)
        case "refused":
            gone = isinstance(ask, UnloadAdapter) and answer.code == codes.NOT_FOUND
            if gone and is_repeated:
                return Fate(node=node, replica=ask.replica, state="done")
            return Fate(
                node=node,
                replica=ask.replica,
                state="refused",
                code=answer.code,
                sentence=answer.sentence,
            )
        case "loading" | "waiting":
            said = answer.sentence or _GOING_ON[answer.status, isinstance(ask, UnloadAdapter)]
            return Fate(node=node, replica=ask.replica, state="going on", sentence=said)


async def _ask(
    wire: Wire, node: str, ask: Change | AdapterHolders, wait_s: float
) -> SlotsAnswer | None:
    """None when the agent does not answer."""
    request = SlotsRequest(ask=ask, wait_s=wait_s)
    try:
        return await wire.request(WHAT, node, request, SlotsAnswer, timeout_s=wait_s + LATE_S)
    except LogError:
        return None
