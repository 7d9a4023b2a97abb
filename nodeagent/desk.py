"""The desk where leases, claims and VMs are asked for: answers at once, keeps the line informed, watches the clock.

Every ask is decided and reserved in one synchronous step (`domain/answering.py`). Processes are watched by
pidfd and times by a timer; that they are over is said to the fleet, which settles the cards. It talks to no
socket and to no log.
"""

import asyncio
import logging
import signal
from collections.abc import AsyncIterator, Callable
from datetime import datetime
from typing import Final

from msgspec.structs import replace

from nodeagent.books import Books
from nodeagent.domain.answering import Asker, decide, standing
from nodeagent.domain.line import Change, dequeue, detach, due_at, vm_id
from nodeagent.fleet import Fleet
from nodeagent.waking import pause
from nodeagent.watching import Watching
from schemas import codes
from schemas.card import CardDequeued, CardVmDetached, ProcessRef
from schemas.cardasks import CardAnswer, CardAsk
from schemas.settings import NodeagentSettings

LOG = logging.getLogger(__name__)

REMEMBERED: Final = 1000
"""So many ends of waiters are known, for whoever asks again what became of his."""

LONGEST_S: Final = 60.0
"""So late at most a time is seen to have passed on a clock that was set, or a machine that slept."""

Environment = Callable[[tuple[str, ...]], dict[str, str]]


class Desk:
    """One owner, one event loop; `run` must be a live task for anything to end by itself."""

    def __init__(
        self,
        *,
        books: Books,
        fleet: Fleet,
        environment: Environment,
        settings: NodeagentSettings,
        now: Callable[[], datetime],
    ) -> None:
        self._books = books
        self._fleet = fleet
        self._environment = environment
        self._settings = settings
        self._now = now
        self._wake = asyncio.Event()
        self._watching = Watching(self._wake.set)
        self._followers: dict[str, set[asyncio.Event]] = {}
        self._said: dict[str, CardAnswer] = {}
        self._ends: dict[str, CardAnswer] = {}
        self._kill_at: dict[ProcessRef, float] = {}
        fleet.ended = lambda: self._watching.ended
        books.on_cards(self._changed)

    # Asking. None of these waits.

    def ask(self, ask: CardAsk, *, by: str, process: ProcessRef | None = None) -> CardAnswer:
        """Decides and reserves in one step; await `durable` before the answer goes out."""
        if not self._fleet.settling:
            sentence = (
                "this agent does not know its cards yet, or is leaving; ask again in a moment"
            )
            return CardAnswer(status="refused", code="yard_unavailable", sentence=sentence)
        books = self._books
        decided = decide(
            ask,
            Asker(by=by, process=process),
            books.cards,
            books.held,
            self._fleet.facts(),
            self._now(),
        )
        if decided.changes:
            LOG.info("cards asked", extra={"ask": type(ask).__name__, "id": decided.id, "by": by})
            self._ends.pop(decided.id, None)
            books.change(*decided.changes)
            self._watch()
            self._fleet.act()
        answer = decided.answer or self._stands(decided.id)
        if answer.status == "granted":
            answer = self._with_environment(answer)
        if answer.status == "waiting":
            _remember(self._said, answer.id, answer)
        return answer

    async def answers(self, id: str) -> AsyncIterator[CardAnswer]:
        """What becomes of a waiter whose first answer was `waiting`: each change of who it waits for, then
        how it ended."""
        changed = asyncio.Event()
        self._followers.setdefault(id, set()).add(changed)
        last = self._said.pop(id, None)
        try:
            while True:
                changed.clear()
                answer = self._stands(id)
                if answer != last:
                    last = answer
                    yield self._with_environment(answer)
                if answer.status != "waiting":
                    return
                await changed.wait()
        finally:
            self._followers[id].discard(changed)
            if not self._followers[id]:
                del self._followers[id]

    def gone(self, id: str) -> None:
        """The asker left while it waited: its place in line ends, or its VM does without. Not while another
        connection follows it: then the asker has come back. A lease that was granted meanwhile stays; its
        process, its time or a release ends it."""
        if self._followers.get(id):
            return
        changes = list(dequeue(self._books.cards, id, "withdrawn"))
        for card in self._books.cards.values():
            vm = card.vm
            if vm is not None and not vm.attached and vm_id(card.id, vm.name) == id:
                changes.append(detach(card, "withdrawn"))
        if changes:
            self._books.change(*changes)
            self._fleet.act()

    def durable(self) -> "asyncio.Future[None]":
        """Done when everything answered so far would survive a kill of this agent."""
        return self._books.durable()

    # What ends by itself.

    async def run(self) -> None:
        """Watches processes and times until cancelled."""
        try:
            while True:
                self._wake.clear()
                self._watch()
                self._fleet.act()
                self._hurry()
                if not self._wake.is_set():
                    await pause(self._wake, self._rest_s())
        finally:
            self._watching.close()

    def _watch(self) -> None:
        """Watches exactly the processes that leases, claims and waiters stand for."""
        wanted: set[ProcessRef | None] = set()
        for card in self._books.cards.values():
            wanted.update(x.process for x in card.leases if not x.returning)
            wanted.update(x.process for x in card.claims)
            wanted.update(x.process for x in card.waiters)
        self._watching.only({ref for ref in wanted if ref is not None})

    def _hurry(self) -> None:
        """Signals the processes of leases that were asked to leave: politely, and hard after the grace."""
        loop = asyncio.get_running_loop()
        leaving = {
            x.process: x
            for card in self._books.cards.values()
            for x in card.leases
            if x.process is not None and x.leaving and not x.returning
        }
        for ref in self._kill_at.keys() - leaving.keys():
            del self._kill_at[ref]
        for ref, lease in leaving.items():
            kill_at = self._kill_at.get(ref)
            if kill_at is None:
                LOG.info("process asked to leave", extra={"pid": ref.pid, "lease": lease.holder})
                self._watching.signal(ref, signal.SIGTERM)
            elif loop.time() >= kill_at:
                LOG.warning("process killed", extra={"pid": ref.pid, "lease": lease.holder})
                self._watching.signal(ref, signal.SIGKILL)
            else:
                continue
            self._kill_at[ref] = loop.time() + self._settings.lease_grace_s

    def _rest_s(self) -> float:
        """Until something ends by time alone."""
        rests = [at - asyncio.get_running_loop().time() for at in self._kill_at.values()]
        due = due_at(self._books.cards)
        if due is not None:
            rests.append((due - self._now()).total_seconds())
        # The timer and the wall clock need not agree; a look too many is harmless.
        return min(max(min(rests, default=LONGEST_S), 0.001), LONGEST_S)

    def _changed(self, changes: tuple[Change, ...]) -> None:
        for change in changes:
            match change.event:
                case CardDequeued(waiter=id, why=why):
                    _remember(self._ends, id, _end_of(id, why))
                case CardVmDetached(name=name):
                    id = vm_id(change.card.id, name)
                    _remember(self._ends, id, _end_of(id, change.reason))
                case _:
                    pass
        for followers in self._followers.values():
            for changed in followers:
                changed.set()
        self._wake.set()

    def _stands(self, id: str) -> CardAnswer:
        found = standing(self._books.cards, id) or self._ends.get(id)
        if found is not None:
            return found
        sentence = f"{id} has ended already"
        return CardAnswer(status="refused", id=id, code=codes.CONFLICT, sentence=sentence)

    def _with_environment(self, answer: CardAnswer) -> CardAnswer:
        if answer.status != "granted" or not answer.fences:
            return answer
        cards = tuple(sorted(answer.fences))
        return replace(answer, environment=self._environment(cards))


def _remember(answers: dict[str, CardAnswer], id: str, answer: CardAnswer) -> None:
    """Puts an answer down and forgets the oldest when there are too many."""
    answers.pop(id, None)
    answers[id] = answer
    while len(answers) > REMEMBERED:
        del answers[next(iter(answers))]


def _end_of(id: str, why: str) -> CardAnswer:
    """The final answer to a waiter that left the line, or a VM that did without, with nothing."""
    code, sentence = codes.CONFLICT, f"{id} is out of line: {why}"
    if why == "expired":
        code = codes.TIMED_OUT
        sentence = f"{id} waited as long as it was told to, and the card did not become free"
    elif why == "process ended":
        sentence = f"the process {id} was for has ended"
    elif why == "withdrawn":
        sentence = f"{id} was taken out of line"
    return CardAnswer(status="refused", id=id, code=code, sentence=sentence)
