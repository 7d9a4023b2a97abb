"""Takes over what an earlier agent left: engines, leases, and what the log tells that the journal forgot.

First from the journal alone, so that engines are looked after while NATS is away; then with the log.
What becomes of each replica is decided by `domain/adoption.py`; this carries it out.
"""

import asyncio
import logging
from collections.abc import Iterable
from typing import Protocol

from msgspec.structs import replace

from nodeagent.books import Books
from nodeagent.domain.adoption import Found, fate, port_of, remembered
from nodeagent.domain.held import Held
from nodeagent.fleet import Fleet
from nodeagent.givingback import until_back
from nodeagent.launching import Ended, Running, StopResult
from nodeagent.ownlog import OwnSubjects
from nodeagent.supervisor import Supervisor
from nodeagent.tools import Tools
from schemas.node import CardInfo
from schemas.replica import TERMINAL_PHASES, Replica
from schemas.slots import SlotsDrifted

LOG = logging.getLogger(__name__)


class Adopting(Protocol):
    """What it needs of `nodeagent.launching.Launcher`."""

    def found(self) -> tuple[str, ...]: ...

    async def adopt(self, replica: str) -> Running | Ended | None: ...

    async def stop(self, replica: str, grace_s: float) -> StopResult: ...

    def forget(self, replica: str) -> None: ...


class Inheritance:
    """What this agent found when it started. Used once per start, and once more per replaced log."""

    def __init__(
        self,
        *,
        books: Books,
        fleet: Fleet,
        tools: Tools,
        launches: Adopting,
        infos: tuple[CardInfo, ...],
    ) -> None:
        self._books = books
        self._fleet = fleet
        self._tools = tools
        self._launches = launches
        self._infos = infos
        self._processes: dict[str, Running | Ended | None] = {}
        self._unclaimed: set[str] = set()
        self._kept: set[str] = set()

    @property
    def adopted(self) -> tuple[str, ...]:
        """Replicas an earlier agent left that live on here, by id."""
        return tuple(name for name in self._fleet.alive() if name in self._kept)

    async def from_journal(self) -> None:
        """Looks at every launch that left a trace, and settles those the journal knows."""
        self._books.set_up_cards(self._infos)
        names = sorted({*self._launches.found(), *self._alive(self._books.held.values())})
        seen = await asyncio.gather(*(self._launches.adopt(name) for name in names))
        self._processes = dict(zip(names, seen, strict=True))
        self._unclaimed = {
            name
            for name, process in self._processes.items()
            if isinstance(process, Running) and name not in self._books.held
        }
        for name in names:
            if name in self._books.held:
                self._settle(name, self._books.held[name], None)
        self._end_stray_leases()

    def from_log(self, own: OwnSubjects) -> None:
        """Settles what only the log knows, and kills what nobody knows."""
        known = self._books.known
        self._books.cards_told(own.cards)
        self._books.slots_told(own.slots)
        self._books.set_up_cards(self._infos)
        for name, told in sorted(own.replicas.items()):
            if not self._books.knows_ports:
                # Ports given before the journal was lost must not be given again soon.
                self._books.rest_port(own.ports.get(name, 0) or port_of(told.endpoint))
            held = self._books.held.get(name)
            if told.phase in TERMINAL_PHASES:
                if held is None:
                    self._books.remember_ended(told)
                elif held.replica.phase not in TERMINAL_PHASES and not self._fleet.unsaid(name):
                    # Somebody else declared it over; nobody would ever send it a request.
                    self._fleet.end(name)
            elif held is None:
                plan = known.plan if known is not None else None
                self._settle(name, remembered(told, own.ports.get(name, 0), plan), told)
            if name in self._books.held:
                self._unclaimed.discard(name)
        for name in sorted(self._unclaimed):
            self._refuse(name)
            self._kill(name)
        self._claim_leases()
        self._end_stray_leases()
        # Whoever asks again later, after the log was replaced, must not believe these.
        self._unclaimed.clear()
        self._processes.clear()

    def repeat(self, own: OwnSubjects, *, all_of_it: bool) -> None:
        """Says again, under the new epoch, how things stand that the log may not know so.

        `all_of_it`: the log was replaced, so also what was said since this agent started.
        """
        for name in self._fleet.alive() if all_of_it else self.adopted:
            self._books.repeat(name)
        for name, held in sorted(self._books.held.items()):
            told = own.replicas.get(name)
            over = held.replica.phase in TERMINAL_PHASES
            behind = told is None or told.phase != held.replica.phase
            if over and behind and not self._fleet.unsaid(name):
                self._books.repeat(name)
        for card in sorted(self._books.cards):
            self._books.repeat_card(card)
        for name, slots in sorted(self._books.slots.items()):
            known = name in self._books.held or name in self._books.ended
            if not known and name not in own.replicas:
                # Its replica's subject was ended by an agent that did not live to end this one.
                self._books.end_slots(name)
            elif all_of_it or own.slots.get(name) is None:
                self._books.say_slots(slots, SlotsDrifted(), reason="said again by its agent")

    def _settle(self, name: str, held: Held, told: Replica | None) -> None:
        process = self._processes.get(name)
        # An id that was held once is over, whatever an older log says.
        found = "ended" if name in self._books.used else _found(process)
        match fate(held, told, found):
            case "keep":
                assert isinstance(process, Running)
                self._kept.add(name)
                # The agent before may have died before it knew the pid.
                replica = replace(held.replica, pid=process.pid)
                self._books.note(replace(held, replica=replica))
                LOG.info("replica adopted", extra={"replica": name, "pid": process.pid})
                self._fleet.supervise(Supervisor(self._tools, name, running=process))
            case "launch":
                durable = self._books.note(held)
                LOG.info("replica begun again", extra={"replica": name})
                self._fleet.supervise(Supervisor(self._tools, name, durable=durable))
            case "gone":
                self._books.note(held)
                ended = process if isinstance(process, Ended) else _lost(name)
                self._fleet.supervise(Supervisor(self._tools, name, ended=ended))
            case "kill":
                self._kill(name)
            case "rest" if held.replica.phase == "waiting":
                # Known from the log alone maybe, and somebody has to say how that ends.
                self._books.note(held)
            case "rest":
                pass

    def _refuse(self, name: str) -> None:
        """Answers the plan for an id whose engine is about to be killed: an id is started once, and its
        lease is needed until that engine's memory is back."""
        known = self._books.known
        items = known.plan.items if known is not None else ()
        item = next((item for item in items if item.replica == name), None)
        if item is not None:
            reason = "an engine of this id ran here that no event told of; it is ended"
            self._fleet.refuse(item, reason, {})

    def _kill(self, name: str) -> None:
        """Ends an engine without an owner."""
        LOG.warning("engine without an owner is ended", extra={"replica": name})

        async def end() -> None:
            await self._launches.stop(name, self._tools.grace_s)
            await self._give_back(name)

        self._fleet.also(end())

    async def _give_back(self, holder: str) -> None:
        self._books.returning(holder)
        await until_back(self._books, self._tools.meter, holder)
        self._books.release(holder, freed_bytes=0)

    def _claim_leases(self) -> None:
        for name in self._fleet.alive():
            replica = self._books.held[name].replica
            if replica.phase == "waiting":  # in line, or about to be: it has nothing yet
                continue
            self._books.claim(name, replica.cards, replica.memory_bytes)

    def _end_stray_leases(self) -> None:
        """Ends leases whose holder is over and has nobody left to end them.

        Not those of engines without an owner: they are ended when the engine is. Nor named ones: their
        process, their time or a person ends them, and whoever reads the memory back.
        """
        holders = {
            lease.holder
            for card in self._books.cards.values()
            for lease in card.leases
            if lease.kind != "named"
        }
        alive = {*self._fleet.alive(), *self._unclaimed}
        begun = {*self._launches.found(), *self._books.held, *self._books.used}
        for holder in sorted(holders - alive):
            process = self._processes.get(holder)
            if self._fleet.supervised(holder) or isinstance(process, Running):
                continue
            if holder not in begun:
                # No process ever had this memory. At once, for the plan may start this very id next.
                self._books.release(holder, freed_bytes=0)
            else:
                # The agent before may have died waiting for this memory.
                self._fleet.also(self._give_back(holder))

    @staticmethod
    def _alive(held: Iterable[Held]) -> set[str]:
        return {h.replica.id for h in held if h.replica.phase not in TERMINAL_PHASES}


def _found(process: Running | Ended | None) -> Found:
    if process is None:
        return "nothing"
    return "running" if isinstance(process, Running) else "ended"


def _lost(name: str) -> Ended:
    return Ended(replica=name, exit_status=None, last_line="", code="lost")
