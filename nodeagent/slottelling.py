"""Tells the log what becomes of the adapters of one replica, no faster than `domain.pace` allows.

What a request's swap brought about waits for its turn and is told with the state of that moment; what a person
did, a failure and a difference to the engine's own list are told at once. It changes nothing about adapters.
"""

import asyncio
from collections.abc import Callable
from datetime import datetime
from typing import Protocol

from nodeagent.books import Books
from nodeagent.domain import pace, slots
from nodeagent.domain.pace import Pace
from nodeagent.domain.slots import Moment, State
from schemas.slots import Slots, SlotsEvent, SlotsEvicted, SlotsLoaded


class Tools(Protocol):
    """What it needs of `nodeagent.slots.SlotTools`."""

    @property
    def books(self) -> Books: ...

    @property
    def epoch(self) -> Callable[[], int]: ...

    @property
    def now(self) -> Callable[[], datetime]: ...

    @property
    def monotonic(self) -> Callable[[], float]: ...


class Telling:
    """The events of one replica's slots. `state` is asked for when one is told, and so is `model`, the model it
    serves: None when nothing is told of it any more."""

    def __init__(
        self,
        tools: Tools,
        replica: str,
        state: Callable[[], State],
        model: Callable[[], str | None],
    ) -> None:
        self._t = tools
        self._replica = replica
        self._state = state
        self._model = model
        self._pace = Pace(at=tools.monotonic())
        self._untold: tuple[SlotsEvent, str] | None = None
        self._passed_over = 0
        self._timer: asyncio.TimerHandle | None = None

    def say(self, event: SlotsEvent, *, reason: str = "", cause: str = "") -> None:
        """Tells it now, or the newest such in a while."""
        if _can_wait(event):
            self._pace, in_s = pace.take(self._pace, self._t.monotonic())
            if in_s > 0:
                self._passed_over += self._untold is not None
                self._untold = event, cause
                if self._timer is None:
                    self._timer = asyncio.get_running_loop().call_later(in_s, self._tell_newest)
                return
        # It holds the whole state: what waited is told with it.
        self._passed_over += self._untold is not None
        self._untold = None
        self._tell(event, reason, cause)

    def close(self) -> None:
        """The launch is over, or this agent is: what was not told yet the engine's list tells the next one."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        self._untold = None

    def _tell_newest(self) -> None:
        self._timer = None
        if self._untold is None:
            return
        self._pace, in_s = pace.take(self._pace, self._t.monotonic())
        if in_s > 0:  # a timer may fire a little early
            self._timer = asyncio.get_running_loop().call_later(in_s, self._tell_newest)
            return
        event, cause = self._untold
        self._untold = None
        self._tell(event, "", cause)

    def _tell(self, event: SlotsEvent, reason: str, cause: str) -> None:
        books, model = self._t.books, self._model()
        if model is None:
            return
        if self._passed_over:
            more = f"{self._passed_over} more loads and evictions since the last event"
            reason = f"{reason}; {more}" if reason else more
            self._passed_over = 0
        state, now = self._state(), self._t.now()
        before = books.slots.get(self._replica) or Slots(
            node=books.node,
            replica=self._replica,
            model=model,
            epoch=0,
            limit=state.limit,
            since=now,
        )
        moment = Moment(at=self._t.monotonic(), now=now)
        told = slots.told(state, before, moment, self._t.epoch())
        books.say_slots(told, event, reason=reason, cause=cause)


def _can_wait(event: SlotsEvent) -> bool:
    """Whether it is one of those clients can bring about as often as they like."""
    match event:
        case SlotsLoaded(how="loaded"):
            return True
        case SlotsEvicted(why="room"):
            return True
        case _:
            return False
