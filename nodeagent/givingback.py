"""Waits until the memory of a holder that ended is back, says what is missing, and ends the named leases it is back for.

A lease ends only after a reading taken after its holder's end shows nothing of it on any of its cards; the
leases of engines are ended by their supervisors, in the same way. Who has to leave is not decided here.
"""

import asyncio
import logging
from typing import Final

from nodeagent.cardbooks import CardBooks
from nodeagent.cards.provider import Meter
from nodeagent.domain.line import Change

LOG = logging.getLogger(__name__)

LOOK_S: Final = 0.1
LONGEST_LOOK_S: Final = 2.0
STUCK_AFTER_S: Final = 2.0
"""So long the memory may take to come back before anybody is told: kernel and driver need a moment for
much of it."""


async def until_back(books: CardBooks, meter: Meter, holder: str) -> None:
    """Returns when nothing of `holder` is left on the cards it has leases on.

    What is still there is said as soon as it takes long, and again whenever that changes.
    """
    loop = asyncio.get_running_loop()
    began = loop.time()
    rest_s = LOOK_S
    said = ""
    # Neither kernel nor driver has an event for memory that came back.
    while told := await _left(books, meter, holder):
        if loop.time() - began >= STUCK_AFTER_S and told != said:
            said = told
            books.stuck(holder, told)
            LOG.warning("memory is not back", extra={"holder": holder, "left": told})
        await asyncio.sleep(rest_s)
        rest_s = min(rest_s * 1.5, LONGEST_LOOK_S)


async def _left(books: CardBooks, meter: Meter, holder: str) -> str:
    """What is still taken on the cards it has leases on, in words; empty when nothing is."""
    cards = [
        name
        for name, card in sorted(books.cards.items())
        if any(lease.holder == holder for lease in card.leases)
    ]
    left = await meter.left_on(holder, cards)
    return "; ".join(left[card].told for card in cards if left[card].memory_bytes > 0)


class NamedEndings:
    """Ends every named lease that is on its way back. One owner, one event loop."""

    def __init__(self, books: CardBooks, meter: Meter) -> None:
        self._books = books
        self._meter = meter
        self._wake = asyncio.Event()
        self._wake.set()
        books.on_cards(self._changed)

    async def run(self) -> None:
        """Works until cancelled. What an agent before left on its way back is found at the start."""
        ending: dict[str, asyncio.Task[None]] = {}
        async with asyncio.TaskGroup() as group:
            while True:
                await self._wake.wait()
                self._wake.clear()
                ending = {holder: task for holder, task in ending.items() if not task.done()}
                for holder in self._returning() - ending.keys():
                    ending[holder] = group.create_task(self._end(holder))

    async def _end(self, holder: str) -> None:
        await until_back(self._books, self._meter, holder)
        self._books.release(holder, freed_bytes=0)
        self._meter.look_soon()

    def _returning(self) -> set[str]:
        return {
            lease.holder
            for card in self._books.cards.values()
            for lease in card.leases
            if lease.kind == "named" and lease.returning
        }

    def _changed(self, _changes: tuple[Change, ...]) -> None:
        self._wake.set()
