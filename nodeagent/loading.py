"""Brings one engine up: gets its files, starts its process and waits until it answers, or says why not.

It tells what happened and says nothing to the log; the supervisor does. How often to ask and when a load
counts as stuck is decided in `domain/starts.py`.
"""

import asyncio
from collections.abc import Awaitable, Callable
from datetime import datetime

from msgspec import Struct
from msgspec.structs import replace

from nodeagent.domain import starts
from nodeagent.domain.assignments import Held
from nodeagent.drivers.driver import Driver, EngineStart, StartRefused
from nodeagent.files.fetches import FetchFailed
from nodeagent.launching import Ended, LaunchFault, Running
from nodeagent.tools import HOST, Tools
from nodeagent.waking import pause, unless_woken
from schemas.plan import Launch

PROGRESS_LOOK_S = 1.0


class Loaded(Struct, frozen=True, kw_only=True):
    """The engine answers, `load_s` after its start."""

    start: EngineStart
    load_s: float


class NotStarted(Struct, frozen=True, kw_only=True):
    """There is no process: why, as code and sentence."""

    code: str
    reason: str


class Stuck(Struct, frozen=True, kw_only=True):
    """There is a process and it will not serve: why, as code and sentence."""

    code: str
    reason: str


class Loading:
    """One engine on its way up. `wake` interrupts any wait; `over` then tells whether to give up."""

    def __init__(
        self,
        tools: Tools,
        replica: str,
        *,
        held: Callable[[], Held],
        wake: asyncio.Event,
        over: Callable[[], bool],
        running: Running | None,
    ) -> None:
        self._t = tools
        self._name = replica
        self._held = held
        self._wake = wake
        self._over = over
        self._start: EngineStart | None = None
        self._fences: dict[str, int] = {}
        self._said_ready = running is not None and running.ready
        self._said_load_s = running.load_s if running is not None else None

    def said_ready(self, load_s: float | None) -> None:
        """The engine said over its pipe that it is ready."""
        self._said_ready = True
        self._said_load_s = load_s

    async def fetch(self) -> NotStarted | None:
        """Makes the files be on this node; None when they are, or when the wish to stop came first.

        An interrupted fetch leaves what came, for whoever wants the same files next.
        """
        # Granted in the step that made this; from here on somebody may take it away.
        self._fences = self._t.books.fences(self._name)
        launch = self._held().launch
        if launch is None:
            return None
        fetching = asyncio.ensure_future(
            self._t.files.obtain(launch.source, self._name, launch.model)
        )
        try:
            while not (fetching.done() or self._over()):
                self._wake.clear()
                woken = asyncio.ensure_future(self._wake.wait())
                try:
                    await asyncio.wait({fetching, woken}, return_when=asyncio.FIRST_COMPLETED)
                finally:
                    woken.cancel()
            if fetching.done():
                await fetching
        except FetchFailed as failed:
            return NotStarted(code=failed.code, reason=f"not fetched: {failed.sentence}")
        finally:
            fetching.cancel()
            await asyncio.gather(fetching, return_exceptions=True)
        return None

    async def begin(self, durable: Awaitable[None] | None) -> Running | Ended | NotStarted | None:
        """Starts the process. None when the wish to stop came first: nothing was started."""
        launch = self._held().launch
        if launch is None:  # only after a lost journal, and then a process was found
            return NotStarted(code="lost", reason="nobody knows how it was to be started")
        prepared = await self._prepare(launch)
        if durable is not None:
            # An id is started once: that it was must be known here before anything runs.
            await durable
        if isinstance(prepared, StartRefused):
            return NotStarted(code=prepared.code, reason=prepared.sentence)
        if self._over():
            return None
        if not self._t.books.still_leased(self._name, self._fences):
            # A fetch takes hours; a card may have been taken away meanwhile, by a repair of the log say.
            return NotStarted(code="lost", reason="its lease ended before its engine began")
        self._start = prepared
        environment = {
            **prepared.environment,
            # The cards it was given, whatever its profile or the agent's own environment say.
            **self._t.meter.environment(self._held().replica.cards),
        }
        try:
            begun = await self._t.processes.start(
                self._name,
                replace(prepared, environment=environment),
                grace_s=self._t.grace_s,
                log_bytes=self._t.log_bytes,
            )
        except LaunchFault as error:
            return NotStarted(code="spawn_failed", reason=str(error))
        if isinstance(begun, Running) and begun.ready:
            self.said_ready(begun.load_s)
        return begun

    async def wait(self) -> Loaded | Stuck | None:
        """Waits until the engine serves: told over the pipe, or asked. None when it is over.

        A sign of progress is a growing log; a load silent for the launch's start_timeout_s is stuck.
        """
        held = self._held()
        launch = held.launch
        start = self._start or (await self._prepare(launch) if launch is not None else None)
        if launch is None or not isinstance(start, EngineStart):
            return Stuck(code="lost", reason="adopted, but nobody knows how to ask it")
        driver = self._t.drivers[launch.engine]
        loop = asyncio.get_running_loop()
        began = silent_since = looked = loop.time()
        age_before_s = _age_s(held.replica.started_at, self._t.now())
        log_bytes = -1
        while not self._over():
            self._wake.clear()
            age_s = age_before_s + loop.time() - began
            if self._said_ready:
                load_s = self._said_load_s
                return Loaded(start=start, load_s=age_s if load_s is None else load_s)
            if start.ready == "probe" and await self._answers(driver, launch, start):
                start = await self._with_routes(driver, start)
                if self._over():  # somebody else may answer on the port of an engine that is gone
                    return None
                return Loaded(start=start, load_s=age_before_s + loop.time() - began)
            if loop.time() - looked >= PROGRESS_LOOK_S:
                looked = loop.time()
                grown = (await self._t.processes.read_log(self._name, None, 1)).next_offset
                if grown != log_bytes:
                    log_bytes, silent_since = grown, looked
            if starts.overdue(loop.time() - silent_since, launch.start_timeout_s):
                told = f"not ready and silent for {launch.start_timeout_s:g} s"
                return Stuck(code="start_timeout", reason=f"{told}, {age_s:.0f} s after its start")
            rest_s = PROGRESS_LOOK_S if start.ready == "pipe" else starts.probe_delay_s(age_s)
            if launch.start_timeout_s > 0:
                rest_s = min(rest_s, launch.start_timeout_s)
            await pause(self._wake, rest_s)
        return None

    async def _answers(self, driver: Driver, launch: Launch, start: EngineStart) -> bool:
        key = self._t.engine_key(self._name)
        asked = driver.probe(start.endpoint, key, health=launch.health)
        if not await unless_woken(self._wake, asked):
            return False
        # Another launch may have taken the port between our look at it and the engine's: what
        # answers there then says nothing of this engine, which is about to fail.
        return not await self._t.processes.is_anothers(self._name, self._held().port)

    async def _with_routes(self, driver: Driver, start: EngineStart) -> EngineStart:
        """`start` with the paths that the engine turned out to have."""
        key = self._t.engine_key(self._name)
        while not self._over():
            self._wake.clear()
            found = await unless_woken(self._wake, driver.routes(start.endpoint, key, start.paths))
            if found is not None:
                return replace(start, paths=found)
        return start

    async def _prepare(self, launch: Launch) -> EngineStart | StartRefused:
        """What to run. In a thread: the driver looks at files that may lie far away."""
        local = self._t.files.local(launch.source)
        if local is None:
            sentence = f"the files of {launch.source} are not on this node any more"
            return StartRefused(code="source_missing", sentence=sentence)
        return await asyncio.to_thread(
            self._t.drivers[launch.engine].prepare,
            replace(launch, source=local),
            replica=self._name,
            host=HOST,
            port=self._held().port,
            key=self._t.engine_key(self._name),
            secrets=self._t.secrets,
        )


def _age_s(since: datetime | None, now: datetime) -> float:
    return max((now - since).total_seconds(), 0.0) if since is not None else 0.0
