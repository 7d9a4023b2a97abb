"""Runs one piece of work per name however many want its result, and ends it when nobody does any more.

It knows nothing of files. Whoever joins while the last one's work is being ended waits for that end first,
so that two never work on one thing.
"""

import asyncio
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

T = TypeVar("T")


@dataclass(slots=True)
class _Flight(Generic[T]):
    task: "asyncio.Task[T]"
    waiting: int = 0
    leaving: bool = False


class Flights(Generic[T]):
    """The work under way, by name. One event loop owns it."""

    def __init__(self) -> None:
        self._flights: dict[str, _Flight[T]] = {}

    def names(self) -> frozenset[str]:
        """What is being worked on."""
        return frozenset(self._flights)

    async def join(self, name: str, work: Callable[[], Coroutine[Any, Any, T]]) -> T:
        """The result of the work of this name, which is begun with `work` if nobody did.

        Raises what the work raises, in everybody who waits for it. Cancelling the last one who waits
        cancels the work, and returns when it has ended.
        """
        while (flight := self._flights.get(name)) is not None and flight.leaving:
            await asyncio.wait({flight.task})
        if flight is None:
            flight = _Flight(task=asyncio.get_running_loop().create_task(work()))
            self._flights[name] = flight
            flight.task.add_done_callback(lambda _: self._ended(name))
        flight.waiting += 1
        try:
            return await asyncio.shield(flight.task)
        finally:
            flight.waiting -= 1
            if not flight.waiting and not flight.task.done():
                flight.leaving = True
                flight.task.cancel()
                await asyncio.wait({flight.task})
            if flight.task.done() and not flight.task.cancelled():
                flight.task.exception()  # somebody left just before it failed: nobody must be warned

    def _ended(self, name: str) -> None:
        del self._flights[name]
