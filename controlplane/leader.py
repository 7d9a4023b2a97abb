"""Owns the World: follows always, and while this instance leads turns decisions into stored batches.

It decides nothing itself: candidate.py says whether to lead, the decision function what to do,
asking.py asks it, carrier.py stores the answer. It must never decide on a state that lacks an event stored
before the decision.
"""

import asyncio
import contextlib
import gc
import logging
from collections.abc import Callable
from datetime import datetime
from functools import partial

from msgspec.structs import replace

from controlplane.alarms import Alarms
from controlplane.asking import Asking, NextDecision
from controlplane.candidate import FAULT_RETRY_S, SCHEMA_CHECK_S, Candidate, Me, process_alive
from controlplane.carrier import PASSING_ALARMS, Carrier
from controlplane.commandqueue import CommandQueue
from controlplane.domain.decision import Ids, Live
from controlplane.domain.reports import FileGone
from controlplane.domain.world import World
from controlplane.drafts import expired
from controlplane.live import LiveTracker
from controlplane.metrics import Metrics
from controlplane.mirroring import Mirroring
from controlplane.readiness import Facts, ProjectionFacts
from controlplane.workers import Workers
from controlplane.worldreader import WorldReader
from events.log import EventLog, LogError, Wire
from events.subjects import event_subject
from schemas.beacons import AgentBeacon, GatewayBeacon, LeaderBeacon
from schemas.settings import ControlplaneSettings

log = logging.getLogger(__name__)


MakeDecider = Callable[[], NextDecision]
"""Makes the decision function of one term, with whatever it remembers to be fast."""

BEACON_S = 1.0
BEACONS_PER_SILENCE = 3
"""A shorter silence than the default wants more beacons: one lost must not end a term."""
BEACON_WAKE_S = 0.05
"""Beacons of many senders wake the loop at most this often."""
LOOK_AGAIN_S = 10.0
"""The loop looks at least this often, so that a clock that was set forward delays nothing for long."""
AUDIT_LOOK_S = 1.0
"""It looks so often while endings wait for the audit."""
HOUSEKEEPING_S = 3600.0
CATCH_UP_S = 10.0
ROUNDS = 100
"""Decisions in a row before other tasks of the process get their turn."""
WEDGED_S = 30.0
"""A leader whose turn takes longer stops its beacon, so that another takes over."""


class LeaderLoop:
    """One instance of the control plane: follows always, leads when elected.

    `run` is the only task that touches the World. `monotonic` are seconds, `now` is aware UTC.
    """

    def __init__(
        self,
        *,
        events: EventLog,
        wire: Wire,
        me: Me,
        settings: ControlplaneSettings,
        make_decider: MakeDecider,
        ids: Ids,
        now: Callable[[], datetime],
        monotonic: Callable[[], float],
        metrics: Metrics,
        prefix: str = "yard",
        alive: Callable[[int, datetime], bool] = process_alive,
        mirroring: Mirroring | None = None,
    ) -> None:
        """Without `mirroring` this instance does none of the work that jobs and files need."""
        self._events = events
        self._wire = wire
        self.me = me
        self._settings = settings
        self._make_decider = make_decider
        self._ids = ids
        self._now = now
        self._monotonic = monotonic
        self._metrics = metrics
        self._prefix = prefix

        self._wake = asyncio.Event()
        self._beacon_wake_due = False
        self.alarms = Alarms()
        self.reader = WorldReader(events, prefix=prefix, wake=self._wake.set)
        self.live = LiveTracker(monotonic, row_gap_s=settings.unreachable_after_s, now=now)
        self._viewed: tuple[tuple[Live, bool, str, tuple[str, ...]], Live] | None = None
        self._generation = self._connection = 0
        self._candidate = Candidate(
            events=events,
            me=me,
            silence_s=settings.leader_silence_s,
            prefix=prefix,
            now=now,
            monotonic=monotonic,
            alarms=self.alarms,
            alive=alive,
        )
        self._carrier = Carrier(
            events=events,
            reader=self.reader,
            instance=me.instance,
            prefix=prefix,
            ids=ids,
            now=now,
            alarms=self.alarms,
            metrics=metrics,
            catch_up=self._catch_up,
        )

        self._mirroring = mirroring
        self._workers = (
            Workers(mirroring.name, mirroring.hands.do, wake=self._wake.set)
            if mirroring is not None
            else None
        )
        if mirroring is not None:
            mirroring.on_gone = self._missed
        self.term: int | None = None
        """The term this instance leads, None while it follows."""
        self._leading_since = 0.0
        self._tasks: asyncio.TaskGroup | None = None
        self._asking: Asking | None = None
        """The questions of the term; None while it follows."""
        self._commands_task: asyncio.Task[None] | None = None
        self._housekept_at = monotonic()
        self._stuck_since: dict[str, float] = {}
        self._turn_began: float | None = None

    @property
    def world(self) -> World:
        return self.reader.world

    def facts(self) -> Facts:
        """What readiness judges, as of now."""
        now = self._monotonic()
        return Facts(
            connected=self._events.connected,
            projections={
                "world": ProjectionFacts(
                    position=self.reader.position,
                    synced=self.reader.synced,
                    stopped=self.reader.stopped,
                )
            },
            stuck={name: now - since for name, since in self._stuck_since.items()},
            turn_s=None if self._turn_began is None else now - self._turn_began,
            conflicts=self._carrier.conflicts,
            alarms=self.alarms.present(),
        )

    async def run(self) -> None:
        """Runs until cancelled; says goodbye when it led. A task of it that fails ends all of it."""
        subscriptions = [
            await self._wire.on_beacon("gateway", GatewayBeacon, self._on_gateway),
            await self._wire.on_beacon("agent", AgentBeacon, self._on_agent),
            await self._wire.on_beacon("leader", LeaderBeacon, self._on_leader),
        ]
        try:
            async with asyncio.TaskGroup() as tasks:
                self._tasks = tasks
                tasks.create_task(self.reader.run(), name="world reader")
                tasks.create_task(self._beacon_while_leading(), name="leader beacon")
                tasks.create_task(self._own(), name="leader loop")
        finally:
            if self._workers is not None:
                self._workers.stop()
            if self.term is not None:
                with contextlib.suppress(LogError, TimeoutError):
                    async with asyncio.timeout(1):
                        await self._say(leaving=True)
            if self._workers is not None:
                # After the goodbye: a fetch takes seconds to let go, and whoever leads next waits for none of it.
                await self._workers.close()
            for subscription in subscriptions:
                await subscription.close()

    # Beacons

    def _on_gateway(self, name: str, beacon: GatewayBeacon) -> None:
        if self.live.on_gateway(name, beacon):
            self._wake_soon()

    def _on_agent(self, name: str, beacon: AgentBeacon) -> None:
        if self.live.on_agent(name, beacon):
            self._wake_soon()

    def _on_leader(self, name: str, beacon: LeaderBeacon) -> None:
        if name != beacon.instance or name == self.me.instance:
            return
        if self._candidate.heard(beacon, self.world):
            self._wake.set()

    def _wake_soon(self) -> None:
        if self.term is not None and not self._beacon_wake_due:
            self._beacon_wake_due = True
            asyncio.get_running_loop().call_later(BEACON_WAKE_S, self._wake_for_beacon)

    def _wake_for_beacon(self) -> None:
        self._beacon_wake_due = False
        self._wake.set()

    async def _beacon_while_leading(self) -> None:
        while True:
            wedged = (
                self._turn_began is not None and self._monotonic() - self._turn_began > WEDGED_S
            )
            if self.term is not None and not wedged:
                await self._say(leaving=False)
            await asyncio.sleep(
                min(BEACON_S, self._settings.leader_silence_s / BEACONS_PER_SILENCE)
            )

    async def _say(self, *, leaving: bool) -> None:
        assert self.term is not None
        beacon = LeaderBeacon(
            instance=self.me.instance,
            term=self.term,
            position=self.reader.position,
            leaving=leaving,
        )
        await self._wire.beacon("leader", self.me.instance, beacon)

    # The loop

    async def _own(self) -> None:
        while True:
            self._turn_began = self._monotonic()
            delay_s = await self._turn()
            self._turn_began = None
            await self._pause(delay_s)

    async def _pause(self, delay_s: float | None) -> None:
        """Until something happens, at most `delay_s`; None: until something happens."""
        if delay_s is not None and delay_s <= 0:
            await asyncio.sleep(0)
            return
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(delay_s):
                await self._wake.wait()
        self._wake.clear()

    async def _turn(self) -> float | None:
        """One turn; returns after how many seconds to turn again if nothing happens."""
        self._take_in()
        if self.reader.stopped is not None:
            return None
        if self.term is None:
            race = await self._candidate.turn(self.reader)
            if race.term is None:
                return race.again_in_s
            self._begin(race.term)
        return await self._lead()

    def _take_in(self) -> None:
        """Applies what was read, and draws the conclusions about who leads."""
        self.reader.take_in()
        reader = self.reader
        if reader.stopped is not None:
            self._step_down("the world stopped")
        if reader.generation != self._generation:
            self._generation = reader.generation
            self._candidate.forget()
            self._step_down("the history was replaced")
        if reader.connection != self._connection:
            self._connection = reader.connection
            self.live.reset()
            self._candidate.restart()
            self._leading_since = self._monotonic()
        self._candidate.note(self.world)
        if self.term is not None and self._candidate.term_of(self.world) != self.term:
            self._step_down("another control plane was elected")

    # Terms

    def _begin(self, term: int) -> None:
        assert self._tasks is not None
        self.term = term
        self._leading_since = self._monotonic()
        # What was read stays: without this every full collection walks the whole world in vain.
        gc.freeze()
        line = self.world.line
        commands = CommandQueue(
            self._events,
            after=line.commands_position if line is not None else 0,
            wake=self._wake.set,
        )
        self._commands_task = self._tasks.create_task(commands.run(), name="commands")
        self._asking = Asking(
            self._make_decider(),
            commands,
            self._workers,
            ids=self._ids,
            settings=self._settings,
            now=self._now,
            alarms=self.alarms,
            metrics=self._metrics,
        )
        self._metrics.elections.inc()
        self._metrics.leading.set(1)
        log.info("leading", extra={"term": term, "instance": self.me.instance})

    def _step_down(self, why: str) -> None:
        if self.term is None:
            return
        log.warning(
            "no longer leading",
            extra={"term": self.term, "instance": self.me.instance, "why": why},
        )
        self.term = None
        self._candidate.forget()
        self._candidate.restart()
        self._carrier.drop()
        if self._workers is not None:
            self._workers.stop()
        if self._commands_task is not None:
            self._commands_task.cancel()
        self._asking = self._commands_task = None
        self._stuck_since = {}
        self.alarms.down("decision_failed", *PASSING_ALARMS)
        self._metrics.deposed.inc()
        self._metrics.leading.set(0)

    # Leading

    async def _lead(self) -> float | None:
        if self._candidate.schema_due():
            try:
                if not await self._candidate.may_lead():
                    self._step_down("the log was upgraded")
                    return SCHEMA_CHECK_S
            except LogError:
                return FAULT_RETRY_S
        self._housekeep()
        for _ in range(ROUNDS):
            self._take_in()
            if self.term is None:
                return 0
            if not (self.reader.connected and self.reader.synced):
                return None  # the next batch wakes
            asking = self._asking
            assert asking is not None
            if self._carrier.in_doubt:
                carried = await self._carrier.resolve(self.term)
            else:
                step = asking.next_step(self.world, self.view())
                if step is None:
                    return FAULT_RETRY_S
                self._note_stuck(step.stuck)
                if step.decision is None:
                    asking.settle_report(step.settled)
                    asking.settle(step.consumed)
                    if step.consumed is None and step.settled is None:
                        self._put_to_work()
                        return self._until(step.wake_at)
                    continue
                asking.deciding = step.settled
                carried = await self._carrier.carry_out(
                    step.decision,
                    term=self.term,
                    commands_position=asking.position(step.consumed),
                    consumed=step.consumed,
                )
            match carried.result:
                case "stored":
                    asking.settle(self._carrier.settled)
                    asking.settle_report(asking.deciding)
                case "deposed":
                    self._step_down("the server refused a batch of this term")
                    return 0
                case "again" | "unknown":
                    if carried.delay_s > 0:
                        return carried.delay_s
                case "impossible":
                    if not asking.set_aside(self._carrier.settled):
                        return carried.delay_s
        return 0

    def _until(self, wake_at: datetime | None) -> float:
        most_s = AUDIT_LOOK_S if self._carrier.audit_behind else LOOK_AGAIN_S
        if wake_at is None:
            return most_s
        # A wake-up in the past means "now": a domain that asks for it again and again must not spin.
        return min(most_s, max(0.01, (wake_at - self._now()).total_seconds()))

    def view(self) -> Live:
        """What beacons say now, as ages, and what else is known beside the log; the same object while all of
        it is the same."""
        told = self.live.view(leading_since=self._leading_since)
        behind = self._carrier.audit_behind
        mirror, mirrors = "", ()
        if self._mirroring is not None:
            mirror, mirrors = self._mirroring.name, self._mirroring.others()
        key = (told, behind, mirror, mirrors)
        if self._viewed is None or self._viewed[0][0] is not told or self._viewed[0][1:] != key[1:]:
            live = replace(told, audit_behind=behind, mirror=mirror, mirrors=mirrors)
            self._viewed = (key, live)
        return self._viewed[1]

    def _missed(self, gone: FileGone) -> None:
        """The mirror lacks what the log says it has. Whoever does not lead has nobody to tell; the next term
        looks by itself."""
        if self.term is not None and self._workers is not None:
            self._workers.tell(gone)

    def _note_stuck(self, stuck: tuple[str, ...]) -> None:
        now = self._monotonic()
        self._stuck_since = {name: self._stuck_since.get(name, now) for name in stuck}

    async def _catch_up(self, seq: int) -> bool:
        """Waits until everything up to `seq` is applied; False when it did not come in time."""
        deadline = self._monotonic() + CATCH_UP_S
        while self.reader.position < seq:
            left_s = deadline - self._monotonic()
            if left_s <= 0 or self.reader.stopped is not None:
                return False
            await self._pause(left_s)
            self._take_in()
        return True

    def _put_to_work(self) -> None:
        """Lets the workers do what the log says is due."""
        if self._workers is None or self._mirroring is None:
            return
        if self._workers.begins:
            # The first time of a term: the folder may not hold what the log says it does.
            self._workers.look(partial(self._mirroring.missing, self.world))
        self._workers.keep_up(self.world, self._generation)

    # Keeping house

    def _housekeep(self) -> None:
        """Forgets what the server has forgotten: outcomes and tombstones past their TTL."""
        if self._monotonic() - self._housekept_at < HOUSEKEEPING_S:
            return
        self._housekept_at = self._monotonic()
        now = self._now()
        heads = self.world.heads
        for subject in [s for s, head in heads.items() if expired(head, now)]:
            del heads[subject]
        outcome = self.world.outcomes
        for command in [
            c for c in outcome if event_subject("command", c, prefix=self._prefix) not in heads
        ]:
            del outcome[command]
