"""Runs one node: registers it, follows its plan, beats its heart, and leaves as it was told to.

The loops and their order, nothing more: what to do is decided in `domain/`, carried out by the fleet, and
taken over from an earlier agent by the inheritance. It places nothing and judges no other node.
"""

import asyncio
import contextlib
import logging
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from datetime import datetime
from typing import Any, Protocol

from msgspec.structs import replace

from events.log import (
    Broken,
    Conflict,
    Draft,
    EventLog,
    LogError,
    LogFull,
    OutcomeUnknown,
    Unavailable,
    Wire,
)
from nodeagent.beacons import Gateways, Pulse
from nodeagent.books import Books
from nodeagent.domain.assignments import due_endings
from nodeagent.fleet import Fleet
from nodeagent.inheritance import Adopting, Inheritance
from nodeagent.journal import Journal, JournalFault
from nodeagent.launching import LaunchEvent, LaunchFault
from nodeagent.logs_rpc import Logs, LogsRpc
from nodeagent.ownlog import Head, OwnSubjects, node_subject, plan_subject, read_own, read_subjects
from nodeagent.reporter import Deposed, Reporter
from nodeagent.tools import Processes, Tools
from schemas.beacons import GatewayBeacon, LogsRequest, MirrorBeacon
from schemas.node import CardInfo, Node, NodeStarted, NodeStopped
from schemas.plan import Plan, Stop

LOG = logging.getLogger(__name__)

KERNEL_S = 10.0


class Launches(Processes, Logs, Adopting, Protocol):
    """What the agent needs of `nodeagent.launching.Launcher`."""

    events: "asyncio.Queue[LaunchEvent]"


class Unreadable(Exception):
    """The node's own aggregate cannot be read, so nobody may write over it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Around:
    """What an agent works with; all times in seconds.

    `plan_grace_s`: how long a start waits for the log before it acts on the journal's plan. `leave_s`:
    how long a leaving agent waits for the log to take its last events. `beside` is what else works as
    long as the agent does.
    """

    log: EventLog
    wire: Wire
    journal: Journal
    reporter: Reporter
    books: Books
    fleet: Fleet
    launches: Launches
    gateways: Gateways
    tools: Tools
    node: Node
    prefix: str
    actor: str
    infos: tuple[CardInfo, ...]
    now: Callable[[], datetime]
    beacon_s: float = 5.0
    plan_grace_s: float = 2.0
    retry_s: float = 1.0
    endings_after_s: float = 86400.0
    endings_look_s: float = 60.0
    leave_s: float = 3.0
    beside: tuple[Callable[[], Coroutine[Any, Any, None]], ...] = ()


class Agent:
    """One node's agent."""

    def __init__(self, around: Around) -> None:
        self._a = around
        self._id = around.node.id
        self._inheritance = Inheritance(
            books=around.books,
            fleet=around.fleet,
            tools=around.tools,
            launches=around.launches,
            infos=around.infos,
        )
        self._plan_read = asyncio.Event()
        self._inherited = asyncio.Event()
        self._met = asyncio.Event()
        self._leaving = False
        self._remembers = around.books.known is not None
        self._register_wanted = asyncio.Event()
        self._register_wanted.set()
        self.registered = asyncio.Event()
        self._node_head = Head()
        self._position = 0
        self._pulse = Pulse(
            around.wire,
            around.gateways,
            node=self._id,
            every_s=around.beacon_s,
            epoch=lambda: around.reporter.epoch,
            position=lambda: self._position,
            counters=around.fleet.counters,
            recall=around.tools.slots.recall,
        )
        around.tools.slots.on_recall = self._pulse.recall_now
        around.tools.slots.knows = self._knows
        around.gateways.on_heard = around.fleet.wake_drains
        around.reporter.on_stored(around.fleet.stored)

    async def run(self, stopping: asyncio.Event, stop_engines: Callable[[], bool]) -> None:
        """Works until `stopping`; then ends the engines if `stop_engines()`, else leaves them.

        Raises Deposed when another agent registered this node later, Unreadable when the node's own
        subject holds something this version cannot read, JournalFault when the disk is full.
        """
        try:
            async with asyncio.TaskGroup() as group:
                self._a.fleet.open(group)
                tasks = [group.create_task(work) for work in self._loops()]
                await stopping.wait()
                await self._leave(stop_engines())
                self._a.fleet.leave()
                for task in tasks:
                    task.cancel()
        except BaseExceptionGroup as group:
            ended = group.subgroup((Deposed, Unreadable, JournalFault))
            if ended is None:
                raise
            raise _first(ended) from None

    def _loops(self) -> list[Coroutine[Any, Any, None]]:
        return [
            self._a.journal.run(),
            self._a.reporter.run(),
            self._begin(),
            self._keep_registered(),
            self._follow_plan(),
            self._follow_node(),
            self._hear_launches(),
            self._end_subjects(),
            self._converse(),
            self._pulse.run(),
            *(work() for work in self._a.beside),
        ]

    def _knows(self) -> bool:
        """Whether what runs here was read: from the journal, or, where that is lost, from the log."""
        return self._inherited.is_set() and (self._remembers or self._met.is_set())

    async def _begin(self) -> None:
        """Takes over from the journal, then acts: on the log's plan when it comes soon, else on the
        journal's, because a node whose NATS is away goes on with what it was told last."""
        remembers = self._remembers
        await self._inheritance.from_journal()
        # Leases and claims need no log: a game never waits for a network. Only whoever has no memory does.
        self._a.fleet.settling = remembers and not self._leaving
        self._inherited.set()
        self._a.fleet.act()
        try:
            # Without a journal only the log tells which ids were used, so nothing begins before it did.
            async with asyncio.timeout(self._a.plan_grace_s if remembers else None):
                await self._met.wait()
        except TimeoutError:
            LOG.warning("no word from the log yet: going on with the journal's plan")
        self._a.fleet.acting = self._a.fleet.settling = not self._leaving
        self._a.fleet.act()

    # Registering.

    async def _keep_registered(self) -> None:
        """Registers the node at the start, and again whenever the log was replaced."""
        while True:
            await self._register_wanted.wait()
            self._register_wanted.clear()
            await self._inherited.wait()
            await self._register()

    async def _register(self) -> None:
        """Order: read own subjects, settle with them, `node.started`, then everything that waits,
        then how each adopted replica and card stands. Readers thus see the epoch first."""
        again = self.registered.is_set()
        own = await read_own(self._a.log, self._id, self._a.prefix)
        # What the plan says about an unknown engine decides how it is adopted.
        await self._plan_read.wait()
        self._inheritance.from_log(own)
        self._met.set()
        epoch = await self._append_started(own)
        waiting = self._a.reporter.backlog
        self._a.reporter.register(epoch, own.heads)
        self._inheritance.repeat(own, all_of_it=again)
        self.registered.set()
        LOG.info(
            "node registered",
            extra={
                "node": self._id,
                "epoch": epoch,
                "adopted": self._inheritance.adopted,
                "waiting": waiting,
                "again": again,
            },
        )
        self._pulse.beat_now()
        self._a.fleet.act()
        # Only now is it known what the replicas here need.
        self._a.fleet.also(self._a.tools.files.keep_within())
        self._a.tools.adapter_files.begin()

    async def _append_started(self, own: OwnSubjects) -> int:
        """Stores `node.started`; its sequence is the epoch. A conflict only means: read again, because
        the later start wins."""
        subject = node_subject(self._id, self._a.prefix)
        head = own.heads.get(subject, Head())
        event = NodeStarted(adopted=self._inheritance.adopted)
        while True:
            if not head.writable:
                raise Unreadable(
                    f"{subject} holds something this version cannot read ({head.problem});"
                    " `yardctl repair` shows and replaces it"
                )
            draft = Draft(
                subject=subject,
                event=event,
                state=self._a.node,
                expected_seq=head.seq,
                rev=head.rev + 1,
                actor=self._a.actor,
            )
            try:
                stored = await self._a.log.append(draft, epoch=own.node_epoch)
            except Conflict:
                last = await read_subjects(self._a.log, subject)
                head = Head.of(last[-1]) if last else Head()
                # An answer was lost and the event is there: it is our own word.
                if last and not isinstance(last[-1], Broken) and last[-1].state == draft.state:
                    return self._take_epoch(head)
            except (Unavailable, OutcomeUnknown, LogFull) as error:
                LOG.warning("the node cannot register yet", extra={"problem": str(error)})
                await asyncio.sleep(self._a.retry_s)
            else:
                return self._take_epoch(Head(seq=stored.seqs[0], rev=draft.rev))

    def _take_epoch(self, head: Head) -> int:
        self._node_head = head
        return head.seq

    # Following.

    async def _follow_plan(self) -> None:
        follower = self._a.log.follow([plan_subject(self._id, self._a.prefix)])
        found = False
        try:
            while True:
                batch = await follower.next()
                if not batch.connected:
                    self._a.gateways.connection_lost()
                    continue
                found = (found and not batch.reset) or bool(batch.items)
                replaced = batch.reset and self._plan_read.is_set()
                if replaced:
                    LOG.error("the log was replaced: registering anew")
                    self._a.reporter.suspend()
                for item in batch.items:
                    self._position = max(self._position, item.seq)
                    if isinstance(item, Broken):
                        LOG.error(
                            "plan unreadable, the one before holds",
                            extra={"seq": item.seq, "problem": item.why},
                        )
                    last = item.previous if isinstance(item, Broken) else item
                    if last is not None and last.problem is None:
                        plan = last.state if isinstance(last.state, Plan) else Plan(node=self._id)
                        self._a.books.plan_read(plan, item.seq)
                if batch.synced:
                    if not found:
                        # The log holds no plan for this node: nothing is wanted here.
                        found = True
                        self._a.books.plan_read(Plan(node=self._id), 0)
                    self._plan_read.set()
                if replaced:
                    self._register_wanted.set()
                self._a.fleet.act()
        finally:
            await follower.close()

    async def _follow_node(self) -> None:
        """Watches for another agent of this node."""
        follower = self._a.log.follow([node_subject(self._id, self._a.prefix)])
        try:
            while True:
                for item in (await follower.next()).items:
                    if isinstance(item, Broken) or not isinstance(item.event, NodeStarted):
                        continue
                    mine = self._a.reporter.epoch
                    if mine and item.seq > mine and not self._is_me(item.state):
                        raise Deposed(self._id, mine, item.seq)
        finally:
            await follower.close()

    def _is_me(self, state: object) -> bool:
        me = self._a.node
        return isinstance(state, Node) and (state.host, state.pid, state.started_at) == (
            me.host,
            me.pid,
            me.started_at,
        )

    async def _hear_launches(self) -> None:
        # Events of adopted launches have an owner only once they were settled.
        await self._inherited.wait()
        while True:
            self._a.fleet.launch_event(await self._a.launches.events.get())

    async def _end_subjects(self) -> None:
        """Ends the subjects of replicas that are long over, and removes what they left on disk."""
        await self.registered.wait()
        while True:
            due = due_endings(self._a.books.ended, self._a.endings_after_s, self._a.now())
            if due and await self._is_audited():
                for name in due:
                    try:
                        self._a.launches.forget(name)
                    except LaunchFault as fault:
                        LOG.error("its subject is not ended", extra={"problem": str(fault)})
                    else:
                        self._a.books.end_subject(name)
            await asyncio.sleep(self._a.endings_look_s)

    async def _is_audited(self) -> bool:
        """Whether the audit has what a tombstone takes out of the log; if not, endings can wait."""
        try:
            return await self._a.log.audited(self._a.endings_after_s)
        except LogError as error:
            LOG.info("subjects are not ended yet", extra={"problem": str(error)})
            return False

    async def _converse(self) -> None:
        """Hears gateways and mirrors and answers for logs as long as the agent lives."""
        rpc = LogsRpc(self._a.launches, self._id)
        wire = self._a.wire
        async with contextlib.AsyncExitStack() as talks:
            hearing = await wire.on_beacon("gateway", GatewayBeacon, self._a.gateways.hear)
            talks.push_async_callback(hearing.close)
            mirrors = await wire.on_beacon("mirror", MirrorBeacon, self._a.tools.files.hear)
            talks.push_async_callback(mirrors.close)
            serving = await wire.serve("replica_logs", self._id, LogsRequest, rpc.answer)
            talks.push_async_callback(serving.close)
            await asyncio.Event().wait()

    # Leaving.

    async def _leave(self, stop_engines: bool) -> None:
        """Stops acting, ends the engines if asked, and says goodbye if anybody hears it."""
        # For good: a start that is still under way goes on beside this.
        self._leaving = True
        self._a.fleet.acting = self._a.fleet.settling = False
        if stop_engines:
            stop = Stop(
                decision=f"leave-{self._id}-{self._a.reporter.epoch}",
                reason="node",
                decided_at=self._a.now(),
                force=True,
            )
            try:
                # Politely, hard, and what the kernel may need; then they are somebody else's.
                async with asyncio.timeout(self._a.tools.grace_s + KERNEL_S):
                    # Engines of the agent before are ours to end too, once they were found.
                    await self._inherited.wait()
                    self._a.fleet.stop_all(stop)
                    await self._a.fleet.all_done()
            except TimeoutError:
                LOG.error("engines outlived the agent", extra={"left": self._a.fleet.alive()})
        left = len(self._a.fleet.alive())
        LOG.info("agent leaves", extra={"node": self._id, "engines_left": left})
        if not self.registered.is_set():
            return
        try:
            async with asyncio.timeout(self._a.leave_s):
                await self._a.reporter.drained()
                await self._pulse.beat(leaving=True)
                await self._append_stopped(left)
        except (TimeoutError, LogError) as error:
            # The successor tells what the log did not get: it stands in the journal.
            LOG.warning("left without a word", extra={"problem": repr(error)})

    async def _append_stopped(self, left: int) -> None:
        epoch = self._a.reporter.epoch
        draft = Draft(
            subject=node_subject(self._id, self._a.prefix),
            event=NodeStopped(engines_left=left),
            state=replace(self._a.node, running=False, epoch=epoch),
            expected_seq=self._node_head.seq,
            rev=self._node_head.rev + 1,
            actor=self._a.actor,
        )
        await self._a.log.append(draft, epoch=epoch)


def _first(group: BaseExceptionGroup[BaseException]) -> Exception:
    """The first real exception of a group."""
    error: BaseException = group
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    assert isinstance(error, Exception)
    return error
