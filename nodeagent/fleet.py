"""Settles the cards and carries out the plan: one synchronous step per change, one supervisor per started replica.

Deciding and reserving happen without an await between them, so two plans (or a plan and a person) cannot both
be granted the last gigabyte. It waits for nothing itself and decides nothing that `domain/` decides.
"""

import asyncio
import logging
from collections.abc import Callable, Coroutine
from collections.abc import Set as AbstractSet
from datetime import datetime
from typing import Any, Final

from msgspec.structs import replace

from nodeagent.books import Books
from nodeagent.domain import assignments, granting
from nodeagent.domain.drains import OWN
from nodeagent.domain.held import Held
from nodeagent.domain.line import Change, dequeue, queue
from nodeagent.domain.ports import NoPort
from nodeagent.journal import Entry
from nodeagent.launching import LaunchEvent, LaunchReady
from nodeagent.reporter import Reporter
from nodeagent.supervisor import Supervisor
from nodeagent.tools import Tools
from schemas.beacons import EngineCounters
from schemas.card import Card, ProcessRef
from schemas.plan import PlanItem, Stop
from schemas.replica import (
    TERMINAL_PHASES,
    Replica,
    ReplicaDraining,
    ReplicaFetching,
    ReplicaParked,
    ReplicaReady,
    ReplicaRefused,
    ReplicaStarting,
    ReplicaWaiting,
    ReplicaWithdrawn,
)
from schemas.settings import NodeagentSettings

LOG = logging.getLogger(__name__)

ROUNDS: Final = 100
"""What one round changes the next one sees; more than a few only a mistake would take."""


class Fleet:
    """The replicas of one node and their supervisors.

    `settling` is False until the cards are known and again when the agent leaves; `acting` also until the
    plan is. `ended` tells which watched processes are gone.
    """

    def __init__(
        self,
        *,
        node: str,
        books: Books,
        reporter: Reporter,
        tools: Tools,
        allow_commands: bool,
        port_is_free: Callable[[int], bool],
        now: Callable[[], datetime],
        settings: NodeagentSettings | None = None,
    ) -> None:
        self._node = node
        self._books = books
        self._reporter = reporter
        self._tools = tools
        self._allow_commands = allow_commands
        self._port_is_free = port_is_free
        self._now = now
        self._supervisors: dict[str, Supervisor] = {}
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._others: set[asyncio.Task[None]] = set()
        self._unheard: dict[str, list[LaunchEvent]] = {}
        self._group: asyncio.TaskGroup | None = None
        self._settings = settings or NodeagentSettings()
        self._used_at: dict[str, datetime] = {}
        self._in_act = False
        self._soon: asyncio.Handle | None = None
        self.acting = False
        self.settling = False
        self.ended: Callable[[], AbstractSet[ProcessRef]] = frozenset[ProcessRef]
        books.on_cards(self._cards_changed)

    def open(self, group: asyncio.TaskGroup) -> None:
        """Supervisors are tasks of this group."""
        self._group = group

    def supervised(self, name: str) -> bool:
        """Whether a supervisor still works on this replica."""
        task = self._tasks.get(name)
        return task is not None and not task.done()

    def unsaid(self, name: str) -> bool:
        """Whether the log lacks an event of this replica."""
        return name in self._reporter.unreported()

    def also(self, work: Coroutine[Any, Any, None]) -> None:
        """Runs something beside the supervisors; its failure is the agent's."""
        assert self._group is not None
        task = self._group.create_task(work)
        self._others.add(task)
        task.add_done_callback(self._others.discard)

    def alive(self) -> tuple[str, ...]:
        """Replicas that are not over, by id."""
        return tuple(
            name
            for name, held in sorted(self._books.held.items())
            if held.replica.phase not in TERMINAL_PHASES
        )

    def stop_all(self, stop: Stop) -> None:
        """Tells every replica to end."""
        for action in assignments.stop_all(self._observed(), stop):
            self._carry_out(action)

    def end(self, name: str) -> None:
        """Ends a replica nobody may use any more."""
        self._books.note(replace(self._books.held[name], ending=True))
        self._wake(name)

    def refuse(self, item: PlanItem, reason: str, card_revs: dict[str, int]) -> None:
        """Answers for an id of the plan that will not start here, and leaves its leases as they are."""
        LOG.info("replica refused", extra={"replica": item.replica, "reason": reason})
        held = self._fresh(item)
        held = replace(held, replica=replace(held.replica, card_revs=card_revs))
        self._books.say(held, ReplicaRefused(card_revs=card_revs), reason=reason)

    async def all_done(self) -> None:
        """Returns when no supervisor works any more."""
        while working := [
            task for task in (*self._tasks.values(), *self._others) if not task.done()
        ]:
            await asyncio.wait(working)

    def leave(self) -> None:
        """Ends the supervisors and leaves the engines as they are."""
        for task in (*self._tasks.values(), *self._others):
            task.cancel()

    async def counters(self) -> dict[str, EngineCounters]:
        """What every serving engine says of its own work."""
        asked = [
            name
            for name, held in sorted(self._books.held.items())
            if held.replica.phase in ("ready", "draining") and name in self._supervisors
        ]
        told = await asyncio.gather(*(self._supervisors[name].counters() for name in asked))
        return dict(zip(asked, told, strict=True))

    def launch_event(self, event: LaunchEvent) -> None:
        """Passes on what a launcher told, or keeps it for a supervisor still to come: an engine that
        only the log knows has none until the log was read, and is told of only once."""
        supervisor = self._supervisors.get(event.replica)
        if supervisor is None:
            self._unheard.setdefault(event.replica, []).append(event)
            return
        if isinstance(event, LaunchReady):
            supervisor.became_ready(event.load_s)
        else:
            supervisor.process_ended(event)

    def act(self) -> None:
        """Settles the cards, plans and carries out, until nothing changes any more."""
        if self._in_act:
            return
        self._in_act = True
        try:
            for _ in range(ROUNDS):
                if not self._round():
                    return
            LOG.error("the node does not settle", extra={"node": self._node})
        finally:
            self._in_act = False

    def _round(self) -> bool:
        """One look at everything; whether it changed anything."""
        if not self.settling:
            return False
        settled = granting.settle(self._books.cards, self._books.held, self.facts(), self._now())
        for batch in settled.batches:
            self._books.change(*batch)
        if not self.acting or self._books.known is None:
            return bool(settled.batches)
        observed = self._observed(settled)
        actions = assignments.plan(self._books.known.plan, observed, self._now())
        for action in actions:
            self._carry_out(action)
        return bool(settled.batches or actions)

    def facts(self) -> granting.Facts:
        """What is known beside cards and replicas when the cards are settled."""
        requests: dict[str, int] = {}
        for name, held in self._books.held.items():
            if held.replica.phase in ("ready", "draining"):
                heard = self._tools.gateways.about(name, held.replica.model)
                requests[name] = sum(gateway.inflight for gateway in heard)
                if requests[name]:
                    self._used_at[name] = self._now()
        return granting.Facts(
            settings=self._settings,
            requests=requests,
            used_at=self._used_at,
            measured=self._books.measured_use(),
            ended=self.ended(),
        )

    def _cards_changed(self, _changes: tuple[Change, ...]) -> None:
        """Whoever changed a card may have made room; he must not have to know for whom."""
        if self._in_act or self._soon is not None or not self.settling:
            return
        self._soon = asyncio.get_running_loop().call_soon(self._act_soon)

    def _act_soon(self) -> None:
        self._soon = None
        self.act()

    def _observed(self, settled: granting.Settled | None = None) -> assignments.Observed:
        return self._books.observed(
            frozenset(self._tools.drivers),
            self._allow_commands,
            settled.wishes if settled is not None else None,
        )

    def _carry_out(self, action: assignments.Action) -> None:
        match action:
            case assignments.Start(item=item):
                self._start(action)
            case assignments.Refuse(item=item, reason=reason, card_revs=revs):
                self.refuse(item, reason, revs)
                # One that stood in line may have its lease already, and not be startable any more.
                self._leave_line(item.replica)
                self._books.release(item.replica, freed_bytes=0, why="refused")
            case assignments.Wait():
                self._wait(action)
            case assignments.Unpark(replica=name, cards=cards):
                self._unpark(name, cards)
            case assignments.StayParked(replica=name, reason=reason, card_revs=revs):
                held = self._books.held[name]
                LOG.info("replica stays parked", extra={"replica": name, "reason": reason})
                replica = replace(held.replica, card_revs=revs)
                event = ReplicaParked(
                    way=replica.park_way,
                    ram_bytes=replica.ram_bytes,
                    residual_bytes=replica.residual_bytes,
                    refused=True,
                )
                self._books.say(replace(held, replica=replica), event, reason=reason)
            case assignments.LeaveLine(replica=name):
                self._leave_line(name)
            case assignments.Withdraw(item=item, replica=name):
                held = self._books.held.get(name)
                if held is not None and held.replica.phase == "fetching":
                    # It has a lease and a fetch; its supervisor ends both and says so.
                    stop = item.stop if item is not None else None
                    self._books.note(replace(held, stop=stop, ending=True))
                    self._wake(name)
                    return
                if held is None and item is not None:
                    held = self._fresh(item)
                if held is not None:
                    self._leave_line(name)
                    self._books.say(held, ReplicaWithdrawn(), reason="it never started")
                    self._books.release(name, freed_bytes=0, why="withdrawn")
            case assignments.Drain(replica=name, stop=stop):
                self._drain(name, stop)
            case assignments.Halt(replica=name, stop=stop):
                held = self._books.held[name]
                LOG.info("replica halted", extra={"replica": name, "decision": stop.decision})
                self._books.note(replace(held, stop=stop, ending=True))
                self._wake(name)
            case assignments.Resume(replica=name, decision=decision):
                held = self._books.held[name]
                replica = replace(held.replica, stop_decision=None, taken_back=decision)
                self._books.say(
                    replace(held, replica=replica, stop=None),
                    ReplicaReady(load_s=replica.load_s, taken_back=decision),
                    reason="wanted again",
                )
                self._wake(name)
            case assignments.Forget(replica=name):
                self._books.forget(name)
                self._supervisors.pop(name, None)
                self._unheard.pop(name, None)
                self._used_at.pop(name, None)

    def _start(self, action: assignments.Start) -> None:
        """Reserves and reports in one step. What is not on this node yet is fetched first, then started."""
        item = action.item
        here = self._tools.files.local(item.launch.source) is not None
        try:
            port = self._books.take_port(self._port_is_free) if here else 0
        except NoPort as error:
            self._books.say(self._fresh(item), ReplicaRefused(), reason=str(error))
            self._books.release(item.replica, freed_bytes=0)
            return
        self._books.lease(action.cards, item.replica, cause=item.cause)
        held = replace(self._fresh(item), port=port)
        if here:
            held = replace(held, replica=replace(held.replica, started_at=self._now()))
            durable = self._books.say(held, ReplicaStarting(port=port))
        else:
            durable = self._books.say(held, ReplicaFetching(source=item.launch.source))
        LOG.info(
            "replica starts" if here else "replica fetches",
            extra={"replica": item.replica, "model": item.launch.model, "cause": item.cause},
        )
        self.supervise(Supervisor(self._tools, item.replica, durable=durable))

    def _wait(self, action: assignments.Wait) -> None:
        """In line, and said so by a replica that was never started; a parked one stays what it is."""
        item, names = action.item, action.waiting_for
        held = self._books.held.get(item.replica)
        if action.new:
            waiter = assignments.waiter_of(item, names, self._now())
            self._books.change(*queue(self._books.cards, waiter))
        if held is not None and held.replica.phase != "waiting":
            return
        held = held or self._fresh(item)
        told = self._told_names(names)
        LOG.info("replica waits", extra={"replica": item.replica, "for": told})
        replica = replace(held.replica, waiting_for=names)
        self._books.say(
            replace(held, replica=replica),
            ReplicaWaiting(waiting_for=told, place=action.place),
            reason=f"waits for {told}",
        )

    def _told_names(self, holders: tuple[str, ...]) -> str:
        """Holders as a person knows them: `training (l-...)`."""
        names = {
            lease.holder: lease.name for card in self._books.cards.values() for lease in card.leases
        }
        return ", ".join(f"{names[x]} ({x})" if names.get(x) else x for x in holders) or "nobody"

    def _leave_line(self, name: str) -> None:
        """Out of line; a parked replica that was given its cards there has again what a parked one has."""
        changes = dequeue(self._books.cards, name, "withdrawn")
        if changes:
            self._books.change(*changes)
        held = self._books.held.get(name)
        if held is not None and held.replica.phase == "parked" and self._books.fences(name):
            self._books.park(
                name,
                residual_bytes=held.replica.residual_bytes,
                ram_bytes=held.replica.ram_bytes,
            )

    def _unpark(self, name: str, cards: tuple[Card, ...]) -> None:
        """Leases the cards again and says so in one step; its supervisor brings it back."""
        held = self._books.held[name]
        self._books.lease(cards, name, cause=held.cause)
        replica = replace(held.replica, stop_decision=None, taken_back=None, card_revs={})
        LOG.info("replica resumes", extra={"replica": name})
        self._books.say(
            replace(held, replica=replica, stop=None, resuming=True),
            ReplicaStarting(port=held.port, resumed=True),
            reason="wanted again",
        )
        self._wake(name)

    def _drain(self, name: str, stop: Stop) -> None:
        held = self._books.held[name]
        replica = replace(
            held.replica, stop_decision=stop.decision, taken_back=None, forced=stop.force
        )
        LOG.info("replica drains", extra={"replica": name, "decision": stop.decision})
        supervisor = self._supervisors.get(name)
        if supervisor is not None:
            supervisor.drain_began()
        self._books.say(
            replace(held, replica=replica, stop=stop),
            ReplicaDraining(decision=stop.decision),
            reason=self._why(stop),
        )

    def _why(self, stop: Stop) -> str:
        if stop.reason in OWN:
            return f"makes way for {stop.reason} {stop.decision}"
        return stop.reason if stop.for_model is None else f"room for {stop.for_model}"

    def _fresh(self, item: PlanItem) -> Held:
        """A replica nothing was said about yet."""
        launch = item.launch
        now = self._now()
        replica = Replica(
            id=item.replica,
            node=self._node,
            model=launch.model,
            incarnation=launch.incarnation,
            profile=launch.profile,
            revision=launch.revision,
            engine=launch.engine,
            phase="waiting",
            since=now,
            epoch=self._reporter.epoch,
            cards=item.cards,
            memory_bytes=item.memory_bytes,
            weight=launch.weight,
        )
        return Held(replica=replica, launch=launch, cause=item.cause)

    def supervise(self, supervisor: Supervisor) -> None:
        """Gives a replica to its supervisor; from now on nobody else touches its process."""
        assert self._group is not None
        name = supervisor.name
        self._supervisors[name] = supervisor
        task = self._tasks[name] = self._group.create_task(supervisor.run())
        task.add_done_callback(lambda _: self._tasks.pop(name, None))
        for event in self._unheard.pop(name, ()):
            self.launch_event(event)

    def _wake(self, name: str) -> None:
        supervisor = self._supervisors.get(name)
        if supervisor is not None:
            supervisor.wake()

    def wake_drains(self) -> None:
        """A gateway was heard: drains are judged again."""
        for name, held in self._books.held.items():
            if held.replica.phase == "draining":
                self._wake(name)

    def stored(self, entry: Entry, seq: int) -> None:
        """The log has one more of our events."""
        if entry.replica is None:
            return
        name = entry.replica.id
        supervisor = self._supervisors.get(name)
        if supervisor is not None and isinstance(entry.event, ReplicaDraining):
            held = self._books.held.get(name)
            if held is not None and held.replica.stop_decision == entry.event.decision:
                supervisor.drain_stored(seq)
        if entry.replica.phase in TERMINAL_PHASES:
            self.act()
