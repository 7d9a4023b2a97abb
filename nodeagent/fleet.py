"""Carries out the actions of a plan: one synchronous step per change, one supervisor per started replica.

Deciding and reserving happen without an await between them, so two plans read in a row cannot both be
granted the last gigabyte. It waits for nothing itself and decides nothing that `domain/` decides.
"""

import asyncio
import logging
from collections.abc import Callable, Coroutine
from datetime import datetime
from typing import Any

from msgspec.structs import replace

from nodeagent.books import Books
from nodeagent.domain import assignments
from nodeagent.domain.assignments import Held
from nodeagent.domain.ports import NoPort
from nodeagent.journal import Entry
from nodeagent.launching import LaunchEvent, LaunchReady
from nodeagent.reporter import Reporter
from nodeagent.supervisor import Supervisor
from nodeagent.tools import Tools
from schemas.beacons import EngineCounters
from schemas.plan import PlanItem, Stop
from schemas.replica import (
    TERMINAL_PHASES,
    Replica,
    ReplicaDraining,
    ReplicaFetching,
    ReplicaReady,
    ReplicaRefused,
    ReplicaStarting,
    ReplicaWithdrawn,
)

LOG = logging.getLogger(__name__)


class Fleet:
    """The replicas of one node and their supervisors. `acting` is False until the start is over and
    again when the agent leaves."""

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
        self.acting = False

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
        """Plans and carries out, if the plan is known and the start is over."""
        if not self.acting or self._books.known is None:
            return
        desired = self._books.known.plan
        for action in assignments.plan(desired, self._observed(), self._now()):
            self._carry_out(action)

    def _observed(self) -> assignments.Observed:
        return self._books.observed(frozenset(self._tools.drivers), self._allow_commands)

    def _carry_out(self, action: assignments.Action) -> None:
        match action:
            case assignments.Start(item=item):
                self._start(action)
            case assignments.Refuse(item=item, reason=reason, card_revs=revs):
                LOG.info("replica refused", extra={"replica": item.replica, "reason": reason})
                held = self._fresh(item)
                held = replace(held, replica=replace(held.replica, card_revs=revs))
                self._books.say(held, ReplicaRefused(card_revs=revs), reason=reason)
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
                    self._books.say(held, ReplicaWithdrawn(), reason="it never started")
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

    def _start(self, action: assignments.Start) -> None:
        """Reserves and reports in one step. What is not on this node yet is fetched first, then started."""
        item = action.item
        here = self._tools.files.local(item.launch.source) is not None
        try:
            port = self._books.take_port(self._port_is_free) if here else 0
        except NoPort as error:
            self._books.say(self._fresh(item), ReplicaRefused(), reason=str(error))
            return
        self._books.lease(action.cards, item.replica)
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

    def _drain(self, name: str, stop: Stop) -> None:
        held = self._books.held[name]
        replica = replace(held.replica, stop_decision=stop.decision, taken_back=None)
        LOG.info("replica drains", extra={"replica": name, "decision": stop.decision})
        supervisor = self._supervisors.get(name)
        if supervisor is not None:
            supervisor.drain_began()
        self._books.say(
            replace(held, replica=replica, stop=stop),
            ReplicaDraining(decision=stop.decision),
            reason=stop.reason if stop.for_model is None else f"room for {stop.for_model}",
        )

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
        self._tasks[name] = self._group.create_task(supervisor.run())
        for event in self._unheard.pop(name, ()):
            self.launch_event(event)

    def _wake(self, name: str) -> None:
        supervisor = self._supervisors.get(name)
        if supervisor is not None:
            supervisor.wake()

    def wake_drains(self) -> None:
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
