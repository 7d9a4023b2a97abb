"""Supervises one replica: has it fetched, started, drained, parked, brought back and ended, and says so.

One task per replica and nobody else touches its process. What should happen is read from the books, where
the plan's wishes stand; each step is level-triggered, so a wake too many is harmless. It never decides
what runs: that is `domain/assignments.py`. A parked engine is asked nothing at all.
"""

import asyncio
import logging
from collections.abc import Awaitable
from typing import Final

from msgspec.structs import replace

from nodeagent.domain import drains
from nodeagent.domain.held import Held
from nodeagent.domain.ports import NoPort
from nodeagent.draining import Draining
from nodeagent.ending import Ending
from nodeagent.launching import Ended, LaunchEnded, Running
from nodeagent.loading import Loaded, Loading, NotStarted, Stuck
from nodeagent.resting import Resting
from nodeagent.tools import Tools
from nodeagent.waking import pause
from schemas.beacons import EngineCounters
from schemas.replica import TERMINAL_PHASES, ReplicaReady, ReplicaStarting

LOG = logging.getLogger(__name__)

MEASURE_AFTER_S: Final = 2.0
"""So long after ready the engine's memory is read: whoever waited for it is being answered until
then, and a placement counts what the profile says meanwhile."""


class Supervisor:
    """The owner of one replica's process. The fleet creates it, runs `run` as a task, and wakes it."""

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
        self._begun = running is not None or ended is not None
        self._wake = asyncio.Event()
        self._ended: LaunchEnded | Ended | None = ended
        self._loading = Loading(
            tools,
            replica,
            held=lambda: self._held,
            wake=self._wake,
            over=lambda: self._ended is not None or self._held.ending,
            running=running,
        )
        self._draining = Draining(tools, replica, wake=self._wake, counters=self.counters)
        self._ending = Ending(tools, replica)
        self._resting = Resting(
            tools,
            replica,
            held=lambda: self._held,
            wake=self._wake,
            ended=lambda: self._ended is not None,
            ending=self._ending,
        )
        self._measured = False

    @property
    def name(self) -> str:
        return self._name

    # What the agent tells; none of these waits.

    def wake(self) -> None:
        """Something changed: look again."""
        self._wake.set()

    def became_ready(self, load_s: float) -> None:
        """The engine said over its pipe that it is ready."""
        self._loading.said_ready(load_s)
        self.wake()

    def process_ended(self, ended: LaunchEnded | Ended) -> None:
        """The engine is gone without having been told to go."""
        self._ended = ended
        self.wake()

    def drain_stored(self, seq: int) -> None:
        """The log has this replica's `replica.draining` at `seq`."""
        self._draining.stored(seq)
        self.wake()

    def drain_began(self) -> None:
        """The replica turned to draining, or to draining under another decision."""
        self._draining.began()
        self.wake()

    # The task.

    async def run(self) -> None:
        """Works until the replica ended and its memory is back."""
        held = self._t.books.held.get(self._name)
        self._t.parkbook.join(self._name, self.wake)
        if self._begun or await self._begin():
            await self._follow()
        self._t.slots.leave(self._name)
        self._t.parkbook.leave(self._name)
        if held is not None and held.launch is not None:
            self._t.files.used(held.launch.source)
            await self._t.files.keep_within()

    async def counters(self) -> EngineCounters:
        """What the engine says of its own work; nothing where it does not tell, or is not to be asked."""
        held = self._t.books.held.get(self._name)
        if held is None or held.replica.endpoint is None:
            return EngineCounters()
        # One that is being parked still drains by its phase, and is told to end by then.
        if held.replica.phase not in ("ready", "draining") or held.ending:
            return EngineCounters()
        driver = self._t.drivers[held.replica.engine]
        return await driver.counters(held.replica.endpoint, self._t.engine_key(self._name))

    @property
    def _held(self) -> Held:
        return self._t.books.held[self._name]

    async def _follow(self) -> None:
        """One step after the other until nothing is left to do.

        1. the process ended by itself. 2. it was told to end. 3. survivors of a kill are left.
        4. it comes back from being parked; 5. it loads. 6. it serves: measure it once. 7. it drains.
        Parked it is left alone until one of these holds.
        """
        while True:
            self._wake.clear()
            held = self._t.books.held.get(self._name)
            if held is None or held.replica.phase in TERMINAL_PHASES:
                return
            if self._ended is not None:  # 1
                await self._ending.by_itself(self._ended, code=_code_of_loss(held))
                return
            if held.ending:  # 2
                await self._ending.told("told to stop")
                return
            match held.replica.phase:
                case "stop_failed":  # 3
                    await self._ending.outlive()
                case "starting":
                    if _comes_back(held):  # 4
                        await self._resting.resume()
                    else:  # 5
                        await self._load()
                case "ready":  # 6
                    self._t.slots.serve(self._name, adopted=self._begun)
                    if self._measured:
                        await self._wake.wait()
                        continue
                    # Whoever waited for this engine is served first: reading the memory of a large
                    # process, and telling it, takes processor and disk at the very same moment.
                    await pause(self._wake, MEASURE_AFTER_S)
                    if not self._wake.is_set():
                        await self._measure()
                case "draining":  # 7
                    await self._drain(held)
                case _:
                    self._t.slots.rest(self._name)
                    await self._wake.wait()

    async def _begin(self) -> bool:
        """Brings the process into being; False when there is none and that was said."""
        begun = await self._fetch()
        if begun is None and not self._held.ending:
            begun = await self._loading.begin(self._durable)
        match begun:
            case None:
                self._ending.never_began()
                return False
            case NotStarted(code=code, reason=reason):
                self._ending.not_started(code, reason)
                return False
            case Ended() as ended:
                self._ended = ended
            case Running(pid=pid):
                held = self._held
                self._t.books.note(replace(held, replica=replace(held.replica, pid=pid)))
        return True

    async def _fetch(self) -> NotStarted | None:
        """Has the files of a replica in phase fetching brought here, then says that it starts.

        That it fetches need not be durable: no process follows from it, and who forgot it fetches anew.
        A starting one has its files; fetching again is for those that somebody took away since.
        """
        failed = await self._loading.fetch()
        held = self._held
        if failed is not None or held.ending or held.replica.phase != "fetching":
            return failed
        try:
            # Only now: a fetch may take longer than a port that nobody listens on is left alone.
            port = self._t.books.take_port(self._t.port_is_free)
        except NoPort as error:
            return NotStarted(code="spawn_failed", reason=str(error))
        replica = replace(held.replica, started_at=self._t.now())
        event = ReplicaStarting(port=port)
        self._durable = self._t.books.say(replace(held, replica=replica, port=port), event)
        LOG.info("replica starts", extra={"replica": self._name, "port": port})
        return None

    async def _load(self) -> None:
        match await self._loading.wait():
            case Loaded() as loaded:
                self._ready(loaded)
            case Stuck(code=code, reason=reason):
                await self._ending.kill(code, reason)
            case None:
                pass

    def _ready(self, loaded: Loaded) -> None:
        held = self._held
        now = self._t.now()
        can_adapt = self._t.drivers[held.replica.engine].capabilities.adapters
        replica = replace(
            held.replica,
            endpoint=loaded.start.endpoint,
            paths=loaded.start.paths,
            has_key=loaded.start.has_key,
            ready_at=now,
            was_ready=True,
            load_s=round(loaded.load_s, 4),
            adapter_slots=held.launch.adapters if held.launch is not None and can_adapt else 0,
        )
        self._t.books.say(replace(held, replica=replica), ReplicaReady(load_s=replica.load_s))
        LOG.info("replica ready", extra={"replica": self._name, "load_s": replica.load_s})

    async def _measure(self) -> None:
        """Reads what the engine uses, after it was said to be ready and off everybody's path."""
        self._measured = True
        used = await self._t.meter.use(self._name)
        held = self._held
        if used <= 0 or held.ending:
            return
        replica = replace(held.replica, measured_memory_bytes=used)
        held = replace(held, replica=replica)
        if replica.phase == "ready":
            self._t.books.say(held, ReplicaReady(load_s=replica.load_s), reason="measured")
        else:
            self._t.books.note(held)
        for name in replica.cards:
            card = self._t.books.cards.get(name)
            if card is not None and card.provider != "nvml":
                self._t.books.measured(name, self._t.books.use_of(name))
        # Where a driver tells, it knows more than what engines use.
        self._t.meter.look_soon()

    async def _drain(self, held: Held) -> None:
        """Judges the drain once and carries the verdict out, or waits for something to change."""
        verdict = await self._draining.verdict(held)
        match verdict:
            case None | drains.KeepWaiting() | drains.AskEngine():
                pass
            case drains.StopNow(why="drained"):
                await self._resting.drained()
            case drains.StopNow(why=why, running=running):
                told = why if not running else f"{why}, {running} requests were running"
                await self._resting.stop(told)
            case drains.TakeBack(running=running):
                told = f"{running} requests still running after the drain's bound"
                self._resting.take_back(told)


def _comes_back(held: Held) -> bool:
    """Whether a starting replica was parked: it lives, and says that it is well while it sleeps.

    Its way tells it too, for an agent that knows it from the log alone.
    """
    return held.resuming or bool(held.replica.park_way)


def _code_of_loss(held: Held) -> str | None:
    """The code of an end by itself that is no failed start of its model; None: the launcher's own word."""
    if held.replica.phase == "parked":
        return "parked_lost"
    if held.replica.phase == "starting" and _comes_back(held):
        return "resume_failed"
    return None
