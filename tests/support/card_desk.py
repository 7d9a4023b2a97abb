"""A desk for tests: answers as it was told to, and remembers what it was asked."""

import asyncio
from collections.abc import AsyncIterator, Callable

from msgspec import Struct

from schemas.card import ProcessRef
from schemas.cardasks import CardAnswer, CardAsk, LeaseAcquire, VmAttach


class Asked(Struct, frozen=True, kw_only=True):
    ask: CardAsk
    by: str
    process: ProcessRef | None


def granted(ask: CardAsk) -> CardAnswer:
    return CardAnswer(
        status="granted",
        id=getattr(ask, "id", ""),
        fences=dict.fromkeys(getattr(ask, "cards", ()), 7),
        environment={"CUDA_VISIBLE_DEVICES": "GPU-1"},
    )


def waits(ask: CardAsk) -> CardAnswer:
    """Whoever may wait does; the rest is done."""
    if not isinstance(ask, LeaseAcquire | VmAttach):
        return CardAnswer(status="done", id=getattr(ask, "what", ""))
    return CardAnswer(status="waiting", id=getattr(ask, "id", ""), waiting_for=("r-holder",))


class FakeDesk:
    """`decide` gives the first answer; `tell` those that follow; `left` are the waiters that went away."""

    def __init__(self, decide: Callable[[CardAsk], CardAnswer] = granted) -> None:
        self.decide = decide
        self.asked: list[Asked] = []
        self.left: list[str] = []
        self.durables = 0
        self._told: dict[str, asyncio.Queue[CardAnswer]] = {}

    def ask(self, ask: CardAsk, *, by: str, process: ProcessRef | None = None) -> CardAnswer:
        self.asked.append(Asked(ask=ask, by=by, process=process))
        return self.decide(ask)

    async def answers(self, id: str, /) -> AsyncIterator[CardAnswer]:
        while True:
            answer = await self._queue(id).get()
            yield answer
            if answer.status != "waiting":
                return

    def tell(self, answer: CardAnswer) -> None:
        self._queue(answer.id).put_nowait(answer)

    def gone(self, id: str, /) -> None:
        self.left.append(id)

    async def durable(self) -> None:
        self.durables += 1

    def _queue(self, id: str) -> "asyncio.Queue[CardAnswer]":
        return self._told.setdefault(id, asyncio.Queue())
