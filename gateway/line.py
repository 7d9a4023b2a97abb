"""Holds the requests that wait for a turn at a model whose replicas run as many as they may, and lets them go on.

The order is gateway/domain/turns.py's. Whoever goes on is counted at its replica in the same step, so what became free
is never given twice. It does no I/O; whether a request can go on now it asks the gateway.
"""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field

from gateway.clock import Clock
from gateway.domain.answers import Answer, answer
from gateway.domain.turns import Busy, Turn, Turns, Want, priority_of
from gateway.domain.waitingroom import Full
from gateway.inhand import Asked, Run
from schemas.model import Model

Attempt = Callable[[Asked], Run | Answer | Busy | None]
"""Begins a run for a request whose turn it is. Busy: it waits on; None: it has to look again what its model does."""


@dataclass(slots=True)
class InLine:
    """A place in line. `outcome` comes exactly once: its run, the answer, or None (look again)."""

    turn: Turn
    asked: Asked
    outcome: "asyncio.Future[Run | Answer | None]" = field(repr=False)
    deadline: asyncio.TimerHandle = field(repr=False)


class Line:
    """The lines of one gateway at all models."""

    def __init__(
        self, clock: Clock, attempt: Attempt, *, max_requests: int, max_bytes: int
    ) -> None:
        self._clock = clock
        self._attempt = attempt
        self._turns = Turns(max_requests=max_requests, max_bytes=max_bytes)
        self._places: dict[int, InLine] = {}

    def join(
        self, model: Model, asked: Asked, *, size_bytes: int, deadline_s: float, accepted: bool
    ) -> InLine | Answer:
        """Puts a request in line at `model`; it may be its turn at once. `accepted`: it was let in before, and is not
        turned away now."""
        now_s = self._clock.now_s()
        priority = priority_of(asked.caller, asked.priority)
        turn = self._turns.join(
            model.name,
            asked.want,
            priority=priority,
            who=asked.caller.id,
            size_bytes=size_bytes,
            now_s=now_s,
            accepted=accepted,
        )
        if isinstance(turn, Full):
            wait_s = self._turns.wait_s(
                model.name, priority=priority, who=asked.caller.id, now_s=now_s
            )
            return _full(model, turn, wait_s)
        loop = asyncio.get_running_loop()
        place = InLine(
            turn=turn,
            asked=asked,
            outcome=loop.create_future(),
            deadline=loop.call_at(deadline_s, self._expire, turn.ticket),
        )
        self._places[turn.ticket] = place
        self.look(model.name)
        return place

    def leave(self, place: InLine) -> Run | None:
        """The client is gone. Returns the run that was begun for it and that it never saw: it has to be ended."""
        self._places.pop(place.turn.ticket, None)
        place.deadline.cancel()
        outcome = place.outcome
        if outcome.done() and not outcome.cancelled():
            run = outcome.result()
            if isinstance(run, Run):
                return run
        self._turns.leave(place.turn)
        return None

    def look(self, model: str, *, changed: bool = True) -> None:
        """Something became free, or `changed`, at this model: whoever can go on does, in turn. Without a change nobody
        else is asked once all its replicas are full, however much else they want."""
        turns = self._turns
        busy: set[Want] = set()
        while (turn := turns.first(model, busy)) is not None:
            place = self._places[turn.ticket]
            if place.outcome.done():
                # Its client has left a moment ago and is about to say so.
                turns.leave(turn)
                continue
            outcome = self._attempt(place.asked)
            if isinstance(outcome, Busy):
                if outcome.full and not changed:
                    return
                busy.add(turn.want)
                continue
            turns.take(turn, self._clock.now_s())
            self._end(place, outcome)

    def look_all(self, *, changed: bool = True) -> None:
        """As `look`, at every model with a line."""
        for model in self._turns.models():
            self.look(model, changed=changed)

    def dismiss_all(self, reply: Answer) -> None:
        """This gateway ends: whoever still waits hears `reply`."""
        for place in list(self._places.values()):
            self._turns.leave(place.turn)
            self._end(place, reply)

    def has(self, model: str) -> bool:
        """Whether anybody waits for a turn at this model."""
        return self._turns.has(model)

    def by_model(self) -> dict[str, int]:
        """How many wait for a turn at each model."""
        return self._turns.by_model()

    def __len__(self) -> int:
        return len(self._places)

    def __bool__(self) -> bool:
        return bool(self._places)

    def _expire(self, ticket: int) -> None:
        place = self._places.get(ticket)
        if place is None:
            return
        turn = place.turn
        now_s = self._clock.now_s()
        wait_s = self._turns.wait_s(
            turn.model, priority=turn.priority, who=turn.who, now_s=now_s, besides=turn
        )
        self._turns.leave(turn)
        waited_s = now_s - turn.joined_s
        reply = answer(
            "model_busy",
            f"The model {turn.model!r} is busy: every replica runs as many requests as it may, and "
            f"after {waited_s:.0f} s it was not this one's turn; try again later.",
            retry_s=wait_s,
        )
        self._end(place, reply)

    def _end(self, place: InLine, outcome: Run | Answer | None) -> None:
        del self._places[place.turn.ticket]
        place.deadline.cancel()
        if not place.outcome.done():
            place.outcome.set_result(outcome)


def _full(model: Model, full: Full, wait_s: float) -> Answer:
    return answer(
        "queue_full",
        f"As many requests wait for their turn at the model {model.name!r} as may "
        f"(limit: {full.limit} {full.what}); every replica runs as many as it may.",
        retry_s=wait_s,
    )
