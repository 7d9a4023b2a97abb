"""Supervises one replica: starts its engine, learns that it is ready, drains it, stops it, returns its memory.

One task per replica and nobody else touches its process. What should happen is read from the books, where
the plan's wishes stand; each step is level-triggered, so a wake too many is harmless. It never decides
what runs: that is `domain/assignments.py`, and when a drain is over is `domain/drains.py`.
"""

import asyncio
import contextlib
import logging
import os
import signal
from collections.abc import Awaitable, Callable, Coroutine, Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import Any, Protocol, TypeVar

from msgspec.structs import replace

from nodeagent.beacons import Gateways
from nodeagent.books import Books
from nodeagent.domain import drains, starts
from nodeagent.domain.assignments import Held
from nodeagent.drivers.driver import Driver, EngineStart, SecretReader, StartRefused
from nodeagent.launching import Ended, LaunchEnded, LaunchFault, LogPart, Running, StopResult
from schemas.beacons import EngineCounters
from schemas.model import EngineName
from schemas.plan import Stop
from schemas.replica import (
    TERMINAL_PHASES,
    ReplicaFailed,
    ReplicaReady,
    ReplicaStopFailed,
    ReplicaStopped,
)

LOG = logging.getLogger(__name__)
T = TypeVar("T")

HOST = "127.0.0.1"
SURVIVORS_RETRY_S = 2.0
DRAIN_LOOK_S = 0.25
PROGRESS_LOOK_S = 1.0


class Processes(Protocol):
    """What the supervisor needs of `nodeagent.launching.Launcher`."""

    async def start(
        self, replica: str, start: EngineStart, *, grace_s: float, log_bytes: int
    ) -> Running | Ended: ...

    async def stop(self, replica: str, grace_s: float) -> StopResult: ...

    async def survivors(self, replica: str) -> tuple[int, ...]: ...

    async def memory_bytes(self, replica: str) -> int: ...

    async def read_log(
        self, replica: str, offset: int | None = None, max_bytes: int = 65536
    ) -> LogPart: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Tools:
    """What every supervisor of a node shares."""

    books: Books
    processes: Processes
    drivers: Mapping[EngineName, Driver]
    gateways: Gateways
    engine_key: Callable[[str], str]
    secrets: SecretReader
    now: Callable[[], datetime]
    grace_s: float
    log_bytes: int
    gateway_gone_s: float
    listen_s: float


class Supervisor:
    """The owner of one replica's process. The agent creates it, runs `run` as a task, and wakes it."""

    def __init__(
        self,
        tools: Tools,
        replica: str,
        *,
        running: Running | None = None,
        ended: Ended | None = None,
        durable: Awaitable[None] | None = None,
    ) -> None:
        """`running` or `ended` when the process was found; without them it is started, once `durable`."""
        self._t = tools
        self._name = replica
        self._durable = durable
        self._running = running
        self._wake = asyncio.Event()
        self._ended: LaunchEnded | Ended | None = ended
        self._pipe_load_s: float | None = running.load_s if running and running.ready else None
        self._pipe_ready = running is not None and running.ready
        self._prepared: EngineStart | None = None
        self._measured = False
        self._drain_seq: int | None = None
        self._drain_began: float | None = None

    @property
    def name(self) -> str:
        return self._name

    # What the agent tells; none of these waits.

    def wake(self) -> None:
        """Something changed: look again."""
        self._wake.set()

    def became_ready(self, load_s: float) -> None:
        """The engine said over its pipe that it is ready."""
        self._pipe_ready = True
        self._pipe_load_s = load_s
        self.wake()

    def process_ended(self, ended: LaunchEnded | Ended) -> None:
        """The engine is gone without having been told to go."""
        self._ended = ended
        self.wake()

    def drain_stored(self, seq: int) -> None:
        """The log has this replica's `replica.draining` at `seq`."""
        self._drain_seq = seq
        self.wake()

    def drain_began(self) -> None:
        """The replica turned to draining, or to draining under another decision."""
        self._drain_seq = None
        self._drain_began = asyncio.get_running_loop().time()
        self.wake()

    # The task.

    async def run(self) -> None:
        """Works until the replica ended and its memory is back."""
        if self._running is None and self._ended is None and not await self._launch():
            return
        await self._follow()

    async def counters(self) -> EngineCounters:
        """What the engine says of its own work; nothing where it does not tell."""
        held = self._t.books.held.get(self._name)
        if held is None or held.replica.endpoint is None:
            return EngineCounters()
        driver = self._t.drivers[held.replica.engine]
        return await driver.counters(held.replica.endpoint, self._t.engine_key(self._name))

    @property
    def _held(self) -> Held:
        return self._t.books.held[self._name]

    async def _follow(self) -> None:
        """One step after the other until nothing is left to do.

        1. the process ended by itself. 2. it was told to end. 3. survivors of a kill are left.
        4. it loads. 5. it serves: measure it once. 6. it drains.
        """
        while True:
            self._wake.clear()
            held = self._t.books.held.get(self._name)
            if held is None or held.replica.phase in TERMINAL_PHASES:
                return
            if self._ended is not None:  # 1
                await self._gone(held, self._ended)
                return
            if held.ending:  # 2
                await self._end("told to stop")
                return
            match held.replica.phase:
                case "stop_failed":  # 3
                    await self._outlive(held)
                case "starting":  # 4
                    await self._load(held)
                case "ready":  # 5
                    if self._measured:
                        await self._wake.wait()
                    else:
                        await self._measure()
                case "draining":  # 6
                    await self._drain(held)
                case _:
                    await self._wake.wait()

    async def _launch(self) -> bool:
        """Brings the process into being; False when that failed and was said."""
        held = self._held
        if held.launch is None:  # only after a lost journal, and then a process was found
            self._fail(held, "lost", "nobody knows how it was to be started")
            return False
        prepared = await self._prepare(held)
        if self._durable is not None:
            # An id is started once: that it was must be known here before anything runs.
            await self._durable
        if isinstance(prepared, StartRefused):
            self._fail(held, prepared.code, prepared.sentence)
            return False
        self._prepared = prepared
        if self._held.ending:
            self._never_began()
            return False
        try:
            begun = await self._t.processes.start(
                self._name, prepared, grace_s=self._t.grace_s, log_bytes=self._t.log_bytes
            )
        except LaunchFault as error:
            self._fail(held, "spawn_failed", str(error))
            return False
        if isinstance(begun, Ended):
            self._ended = begun
            return True
        self._running = begun
        if begun.ready:
            self.became_ready(begun.load_s or 0.0)
        held = self._held
        replica = replace(held.replica, pid=begun.pid)
        self._t.books.note(replace(held, replica=replica))
        return True

    async def _prepare(self, held: Held) -> EngineStart | StartRefused:
        """What to run. In a thread: the driver looks at files that may lie far away."""
        assert held.launch is not None
        driver = self._t.drivers[held.launch.engine]
        return await asyncio.to_thread(
            driver.prepare,
            held.launch,
            replica=self._name,
            host=HOST,
            port=held.port,
            key=self._t.engine_key(self._name),
            secrets=self._t.secrets,
        )

    async def _load(self, held: Held) -> None:
        """Waits for readiness: over the pipe, or by asking; ends a load that stands still."""
        if self._prepared is None:
            prepared = None
            if held.launch is not None:
                prepared = await self._prepare(held)
            if not isinstance(prepared, EngineStart):
                # Adopted without knowing how to talk to it: it can serve nobody.
                await self._kill(held, "lost", "adopted, but nobody knows how to ask it")
                return
            self._prepared = prepared
        prepared = self._prepared
        assert held.launch is not None
        driver = self._t.drivers[held.launch.engine]
        loop = asyncio.get_running_loop()
        began = loop.time()
        age_before = _age_s(held.replica.started_at, self._t.now())
        silent_since, looked, log_bytes = began, began, -1
        while True:
            if self._wake.is_set():
                if self._ended is not None or self._held.ending:
                    return
                self._wake.clear()
            age_s = age_before + loop.time() - began
            if self._pipe_ready:
                load_s = self._pipe_load_s
                self._ready(prepared, age_s if load_s is None else load_s)
                return
            if prepared.ready == "probe":
                key = self._t.engine_key(self._name)
                asked = driver.probe(prepared.endpoint, key, health=held.launch.health)
                answered = await self._unless_woken(asked)
                if answered:
                    self._ready(prepared, age_before + loop.time() - began)
                    return
                if answered is None:
                    continue
            if loop.time() - looked >= PROGRESS_LOOK_S or log_bytes < 0:
                looked = loop.time()
                grown = (await self._t.processes.read_log(self._name, None, 1)).next_offset
                if grown != log_bytes:
                    # The first look only tells where the log stands, unless this load is new here.
                    log_bytes, silent_since = grown, looked
            if starts.overdue(loop.time() - silent_since, held.launch.start_timeout_s):
                reason = (
                    f"not ready and silent for {held.launch.start_timeout_s:g} s, {age_s:.0f} s"
                    " after its start"
                )
                await self._kill(held, "start_timeout", reason)
                return
            pause = starts.probe_delay_s(age_s)
            if prepared.ready == "pipe":
                pause = PROGRESS_LOOK_S
            if held.launch.start_timeout_s > 0:
                pause = min(pause, held.launch.start_timeout_s)
            await self._pause(pause)

    def _ready(self, prepared: EngineStart, load_s: float) -> None:
        held = self._held
        now = self._t.now()
        replica = replace(
            held.replica,
            endpoint=prepared.endpoint,
            paths=prepared.paths,
            has_key=prepared.has_key,
            ready_at=now,
            was_ready=True,
            load_s=round(load_s, 4),
        )
        self._t.books.say(replace(held, replica=replica), ReplicaReady(load_s=replica.load_s))
        LOG.info("replica ready", extra={"replica": self._name, "load_s": replica.load_s})

    async def _measure(self) -> None:
        """Reads what the engine uses, after it was said to be ready and off everybody's path."""
        self._measured = True
        used = await self._t.processes.memory_bytes(self._name)
        held = self._held
        if used <= 0 or held.ending:
            return
        replica = replace(held.replica, measured_memory_bytes=used)
        held = replace(held, replica=replica)
        if replica.phase == "ready":
            self._t.books.say(held, ReplicaReady(load_s=replica.load_s), reason="measured")
        else:
            self._t.books.note(held)
        for card in replica.cards:
            self._t.books.measured(card, self._use_of(card))

    def _use_of(self, card: str) -> int:
        """Bytes used on a card by all engines there, each split evenly over its cards."""
        held = self._t.books.held.values()
        return sum(
            (other.replica.measured_memory_bytes or 0) // max(len(other.replica.cards), 1)
            for other in held
            if card in other.replica.cards and other.replica.phase not in TERMINAL_PHASES
        )

    async def _drain(self, held: Held) -> None:
        """Judges the drain once and carries the verdict out, or waits for something to change."""
        if held.stop is None:  # adopted without its wish; the plan will tell
            await self._wake.wait()
            return
        verdict = drains.judge(self._facts(held, held.stop, None))
        if isinstance(verdict, drains.AskEngine):
            told = await self._unless_woken(self.counters())
            held = self._held
            if told is None or held.ending or held.stop is None or held.replica.phase != "draining":
                return
            # Everything is looked at again: a request may have come while the engine was asked.
            verdict = drains.judge(self._facts(held, held.stop, told))
        match verdict:
            case drains.KeepWaiting() | drains.AskEngine():
                await self._pause(DRAIN_LOOK_S)
            case drains.StopNow(why=why, running=running):
                reason = why if not running else f"{why}, {running} requests were running"
                LOG.info("replica stops", extra={"replica": self._name, "reason": reason})
                self._t.books.note(replace(held, ending=True))
                await self._end(reason)
            case drains.TakeBack(running=running):
                decision = held.stop.decision
                replica = replace(held.replica, stop_decision=None, taken_back=decision)
                self._t.books.say(
                    replace(held, replica=replica, stop=None),
                    ReplicaReady(load_s=replica.load_s, taken_back=decision),
                    reason=f"{running} requests still running after the drain's bound",
                )
                LOG.info("drain taken back", extra={"replica": self._name, "running": running})

    def _facts(self, held: Held, stop: Stop, engine: EngineCounters | None) -> drains.DrainFacts:
        gateways = self._t.gateways
        loop = asyncio.get_running_loop()
        if self._drain_began is None:  # adopted in the middle of a drain
            self._drain_began = loop.time() - _age_s(held.replica.since, self._t.now())
        return drains.DrainFacts(
            stop=stop,
            sequence=self._drain_seq,
            age_s=loop.time() - self._drain_began,
            connected_s=gateways.connected_s(),
            gateways=gateways.about(self._name, held.replica.model),
            gateway_gone_s=self._t.gateway_gone_s,
            listen_s=self._t.listen_s,
            engine=engine,
        )

    async def _end(self, reason: str) -> None:
        """Stops the process, says so, and gives the memory back when it is back."""
        before = await self._t.processes.memory_bytes(self._name)
        result = await self._stop(self._t.grace_s)
        held = self._held
        largest = max(before, held.replica.measured_memory_bytes or 0) or None
        replica = replace(
            held.replica,
            measured_memory_bytes=largest,
            stop_decision=held.stop.decision if held.stop else held.replica.stop_decision,
            exit_status=result.exit_status,
            last_line=result.last_line,
        )
        held = replace(held, replica=replica)
        if result.survivors:
            await self._survived(held, result.survivors)
            return
        self._t.books.returning(self._name)
        self._t.books.say(held, ReplicaStopped(exit_status=result.exit_status), reason=reason)
        LOG.info("replica stopped", extra={"replica": self._name, "reason": reason})
        await self._give_back(before)

    async def _gone(self, held: Held, ended: LaunchEnded | Ended) -> None:
        """The process ended by itself: a failure, unless it was to stop anyway."""
        freed = held.replica.measured_memory_bytes or 0
        replica = replace(
            held.replica, exit_status=ended.exit_status, last_line=ended.last_line, code=ended.code
        )
        held = replace(held, replica=replica)
        survivors = ended.survivors or await self._t.processes.survivors(self._name)
        if survivors:
            survivors = (await self._stop(self._t.grace_s)).survivors
        if survivors:
            await self._survived(held, survivors)
            return
        self._t.books.returning(self._name)
        if held.ending or held.replica.phase == "draining":
            held = replace(held, replica=replace(held.replica, code=None))
            self._t.books.say(
                held, ReplicaStopped(exit_status=ended.exit_status), reason="ended while draining"
            )
        else:
            self._say_failed(held, ended.code, _story(ended))
        await self._give_back(freed)

    async def _kill(self, held: Held, code: str, reason: str) -> None:
        """Ends a process that is of no use and says why."""
        freed = await self._t.processes.memory_bytes(self._name)
        result = await self._stop(self._t.grace_s)
        held = self._held
        replica = replace(
            held.replica, code=code, last_line=result.last_line, exit_status=result.exit_status
        )
        held = replace(held, replica=replica)
        if result.survivors:
            await self._survived(held, result.survivors)
            return
        self._t.books.returning(self._name)
        self._say_failed(held, code, reason)
        await self._give_back(freed)

    async def _stop(self, grace_s: float) -> StopResult:
        """Ends the process group; also one that carries this launch's id but was begun from another
        data folder, by an agent that had this node before: it has no other owner now."""
        try:
            return await self._t.processes.stop(self._name, grace_s)
        except LaunchFault:
            for pid in await self._t.processes.survivors(self._name):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            await asyncio.sleep(DRAIN_LOOK_S)
            left = await self._t.processes.survivors(self._name)
            return StopResult(exit_status=None, survivors=left, killed=True)

    async def _survived(self, held: Held, survivors: tuple[int, ...]) -> None:
        """The kill did not reach all of the group: say so and keep the lease."""
        pids = ", ".join(str(pid) for pid in survivors)
        self._t.books.say(
            replace(held, ending=True),
            ReplicaStopFailed(survivors=survivors),
            reason=f"processes {pids} outlived the kill; their memory is still taken",
        )
        LOG.error("stop failed", extra={"replica": self._name, "survivors": survivors})
        await self._outlive(self._held)

    async def _outlive(self, held: Held) -> None:
        """Kills again until nothing of the group is left; only then does the lease end."""
        freed = held.replica.measured_memory_bytes or 0
        while True:
            result = await self._stop(0.0)
            if not result.survivors:
                break
            await asyncio.sleep(SURVIVORS_RETRY_S)
        held = self._held
        self._t.books.returning(self._name)
        if held.replica.code is not None:
            self._say_failed(held, held.replica.code, "its last process is gone now")
        else:
            self._t.books.say(
                held,
                ReplicaStopped(exit_status=held.replica.exit_status),
                reason="its last process is gone now",
            )
        await self._give_back(freed)

    async def _give_back(self, freed_bytes: int) -> None:
        """Ends the leases after a reading that shows the memory back. Release after the replica's last
        event: a crash between leaves a lease that the next start ends, never one given twice."""
        # The kernel has no event for memory that came back.
        while await self._t.processes.memory_bytes(self._name) > 0:  # noqa: ASYNC110
            await asyncio.sleep(DRAIN_LOOK_S)
        self._t.books.rest_port(self._held.port if self._name in self._t.books.held else 0)
        self._t.books.release(self._name, freed_bytes=freed_bytes)

    def _never_began(self) -> None:
        """The wish to stop came before there was a process."""
        self._t.books.returning(self._name)
        self._t.books.say(self._held, ReplicaStopped(), reason="stopped before its engine began")
        self._t.books.release(self._name, freed_bytes=0)

    def _fail(self, held: Held, code: str, reason: str) -> None:
        """A start that never had a process."""
        self._t.books.returning(self._name)
        self._say_failed(held, code, reason)
        self._t.books.release(self._name, freed_bytes=0)

    def _say_failed(self, held: Held, code: str, reason: str) -> None:
        replica = replace(held.replica, code=code)
        event = ReplicaFailed(code=code, exit_status=replica.exit_status)
        self._t.books.say(replace(held, replica=replica), event, reason=reason)
        LOG.warning("replica failed", extra={"replica": self._name, "code": code, "reason": reason})

    async def _pause(self, seconds: float) -> None:
        """Waits that long, or until woken."""
        try:
            await asyncio.wait_for(self._wake.wait(), seconds)
        except TimeoutError:
            return

    async def _unless_woken(self, work: Coroutine[Any, Any, T]) -> T | None:
        """The result of `work`, or None when the supervisor was woken before there was one."""
        doing = asyncio.ensure_future(work)
        woken = asyncio.ensure_future(self._wake.wait())
        try:
            await asyncio.wait({doing, woken}, return_when=asyncio.FIRST_COMPLETED)
            return doing.result() if doing.done() else None
        finally:
            for task in (doing, woken):
                task.cancel()
            await asyncio.gather(doing, woken, return_exceptions=True)


def _age_s(since: datetime | None, now: datetime) -> float:
    return max((now - since).total_seconds(), 0.0) if since is not None else 0.0


def _story(ended: LaunchEnded | Ended) -> str:
    """Why an engine is gone, in a sentence; its own last line where it left one."""
    if ended.code == "spawn_failed":
        told = "the engine's program could not be run"
    elif ended.code == "lost":
        told = "the engine is gone and nobody saw how it ended"
    elif ended.exit_status is not None and ended.exit_status < 0:
        told = f"the engine was ended by signal {-ended.exit_status}"
    else:
        told = f"the engine ended with status {ended.exit_status}"
    return f"{told}: {ended.last_line}" if ended.last_line else told
