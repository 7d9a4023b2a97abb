"""Starts engines under launchers that outlive this agent, and says when they are ready or gone.

It knows processes, files and the launcher's datagrams. It must not decide what runs, when to stop or
what a state means: that is the supervisor's; and it must not know what an engine speaks.
"""

import asyncio
import codecs
import contextlib
import json
import logging
import os
import shutil
import signal
import socket
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path

import msgspec

from nodeagent import census, enginelog, launches, listeners, processes
from nodeagent.census import Census
from nodeagent.drivers.driver import EngineStart
from nodeagent.keeper import EXIT, READY, RUNNING, STOP, boot_id
from nodeagent.launches import (
    EndCode,
    Ended,
    LaunchEnded,
    LaunchEvent,
    LaunchFault,
    LaunchReady,
    LogPart,
    Running,
    StopResult,
)
from nodeagent.launchhandle import LaunchHandle
from nodeagent.spare import Spare
from schemas.card import ProcessRef

__all__ = [
    "EndCode",
    "Ended",
    "LaunchEnded",
    "LaunchEvent",
    "LaunchFault",
    "LaunchReady",
    "Launcher",
    "LogPart",
    "Running",
    "StopResult",
]

log = logging.getLogger(__name__)

_REPORT_S = 10.0
"""How long a launcher may take to say that its engine runs; it takes some 30 ms."""

_SPARE_AFTER_S = 2.0
"""So long after a start the next launcher is made to wait."""

_AFTER_KILL_S = 5.0
"""How long a killed process may take to leave before it is called a survivor."""


class Launcher:
    """The launches of one node, each with its folder below `root`.

    One event loop owns an instance. All methods may run concurrently for different replicas; for
    one replica the caller does one thing at a time (start or adopt, then stop, then forget),
    except that `memory_bytes`, `survivors` and `read_log` are free to be called at any time.
    """

    events: "asyncio.Queue[LaunchEvent]"
    """Filled by datagrams of the launchers, by their pidfds, and by a look every `watch_s`."""

    def __init__(
        self,
        root: Path,
        sock: Path,
        *,
        watch_s: float = 2.0,
        signal_all: Callable[[Iterable[processes.Process], int], None] = processes.signal_all,
    ) -> None:
        """`root` holds one folder per replica, `sock` is where launchers send their datagrams.

        `watch_s` is the interval of the regular look; `signal_all` how processes are reached.
        """
        self.events = asyncio.Queue()
        self._root = root.absolute()
        self._sock = sock.absolute()
        self._watch_s = watch_s
        self._signal = signal_all
        self._launches: dict[str, LaunchHandle] = {}
        self._unreaped: list[LaunchHandle] = []
        self._socket: socket.socket | None = None
        self._watch: asyncio.Task[None] | None = None
        self._spare: Spare | None = None
        self._started_at = -_SPARE_AFTER_S

    async def open(self) -> None:
        """Binds the socket and begins to watch. A stale socket file is replaced."""
        self._root.mkdir(parents=True, exist_ok=True, mode=0o700)
        self._sock.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        self._sock.unlink(missing_ok=True)
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self._socket.setblocking(False)
        folder = os.open(self._sock.parent, os.O_PATH | os.O_DIRECTORY)
        try:
            # A socket's address holds 107 bytes; a data folder may lie deeper than that.
            self._socket.bind(f"/proc/self/fd/{folder}/{self._sock.name}")
        finally:
            os.close(folder)
        asyncio.get_running_loop().add_reader(self._socket, self._receive)
        self._keep_a_spare()
        self._watch = asyncio.create_task(self._keep_looking(), name="launch watchdog")

    async def close(self) -> None:
        """Stops watching and removes the socket. Engines and their launchers go on."""
        tasks = [launch.sweep for launch in self._launches.values() if launch.sweep is not None]
        for task in (self._watch, *tasks):
            if task is not None:
                task.cancel()
                with contextlib.suppress(asyncio.CancelledError):
                    await task
        if self._socket is not None:
            asyncio.get_running_loop().remove_reader(self._socket)
            self._socket.close()
            self._socket = None
            self._sock.unlink(missing_ok=True)
        for launch in self._launches.values():
            launch.let_go()
            launch.reap()
        if self._spare is not None:
            self._spare.end()
            self._spare = None

    def found(self) -> tuple[str, ...]:
        """Replicas that have a folder, sorted: what a predecessor of this agent left."""
        if not self._root.is_dir():
            return ()
        return tuple(sorted(entry.name for entry in self._root.iterdir() if entry.is_dir()))

    async def start(
        self, replica: str, start: EngineStart, *, grace_s: float, log_bytes: int
    ) -> Running | Ended:
        """Starts the engine; returns as soon as its process exists (some 5 ms).

        `Ended` when it ended at once, or with code "spawn_failed" when the program cannot be run;
        no event follows then.
        Raises `LaunchFault` when the replica was started before (an id is used once) or the
        launcher did not report within 10 s (nothing is left running then).
        """
        launch = LaunchHandle(replica, self._root / replica)
        try:
            launch.describe(start, grace_s=grace_s, log_bytes=log_bytes, sock=self._sock)
        except FileExistsError:
            raise LaunchFault(f"{replica} was started before; an id is used once") from None
        except OSError as error:
            shutil.rmtree(launch.folder, ignore_errors=True)
            raise LaunchFault(f"cannot write to {launch.folder}: {error}") from error
        self._launches[replica] = launch
        spare, self._spare = self._spare, None
        loop = asyncio.get_running_loop()
        self._started_at = loop.time()
        loop.call_later(_SPARE_AFTER_S, self._keep_a_spare)
        try:
            launch.spawn(start, spare, lambda: self._launcher_ended(launch))
        except (OSError, ValueError) as error:  # ValueError: a NUL in a secret's value
            del self._launches[replica]
            shutil.rmtree(launch.folder, ignore_errors=True)
            raise LaunchFault(f"cannot start a launcher: {error}") from error
        await self._reported(launch)
        if launch.running is None and launch.ended is None:
            await self._sweep(launch)
            raise LaunchFault(f"the launcher of {replica} did not report within {_REPORT_S} s")
        return self._answer(launch)

    async def adopt(self, replica: str) -> Running | Ended | None:
        """Takes over what a predecessor started: by pid, start time and YARD_LAUNCH_ID.

        None: this id was never started here (its folder is absent or was only being made), so nothing
        runs under it and it may be started. `Ended`: it is gone and no event follows; leftovers of its group were killed.
        """
        launch = self._launches.get(replica) or LaunchHandle(replica, self._root / replica)
        if not launch.was_begun():
            # What a killed agent left between the folder and the launcher would only be in the way.
            shutil.rmtree(launch.folder, ignore_errors=True)
            return None
        self._launches[replica] = launch
        launch.answered = False
        self._look(launch)
        # A launcher that is only just starting has not said yet which process it runs; one that is
        # gone without a word is being swept up after.
        await self._reported(launch)
        if launch.running is None and launch.ended is None:
            await self._sweep(launch)
        elif launch.sweep is not None:
            await launch.sweep
        return self._answer(launch)

    async def stop(self, replica: str, grace_s: float) -> StopResult:
        """SIGTERM to the whole process group, SIGKILL after `grace_s`, then 5 s for the kernel.

        Returns when no process of the launch is left, or with those that are. No `LaunchEnded`
        follows unless it was queued before. May be called again while survivors are left, and for
        a launch that has ended already (it then returns its end). Cancelling it leaves the signals
        sent. Raises `LaunchFault` for a replica that was neither started nor adopted.
        """
        launch = self._launches.get(replica)
        if launch is None:
            raise LaunchFault(f"{replica} is not a launch of this agent")
        launch.stopping = True
        killed = False
        if launch.ended is None:
            content = json.dumps({"grace_s": grace_s}).encode()
            with contextlib.suppress(OSError):
                enginelog.write_whole(str(launch.folder), STOP, content)
            # The launcher owns the process and does it; the steps below are for one that cannot.
            launch.signal(signal.SIGTERM)
            await self._gone(launch, grace_s + 1.0)
        left = await self.survivors(replica)
        if launch.ended is None or left:
            killed = await self._kill(launch)
            left = await self.survivors(replica)
        end = launch.ended
        return StopResult(
            exit_status=end.exit_status if end else None,
            survivors=left,
            killed=killed or (end is not None and end.killed),
            last_line=end.last_line if end else "",
        )

    async def survivors(self, replica: str) -> tuple[int, ...]:
        """The pids of this launch that are alive now (zombies are dead), the launcher's excluded."""
        found = await asyncio.to_thread(self._handle(replica).members)
        return tuple(process.pid for process in found)

    async def memory_bytes(self, replica: str) -> int:
        """Proportional set size of all live processes of this launch; 0 when none is left."""
        launch = self._handle(replica)
        return await asyncio.to_thread(lambda: processes.memory_bytes(launch.members()))

    async def census(
        self, launches: Iterable[str], leases: Mapping[str, ProcessRef | None]
    ) -> Census:
        """One look at all processes: the pids of these launches, and of these named leases.

        A launch's first process is among them whether it lives or not: what a driver lists under that
        number is the launch's until somebody else got it. A launch that is not ours has none.
        """
        handles = {name: self._launches[name] for name in launches if name in self._launches}
        first = {
            replica: frozenset((launch.running.pid,))
            for replica, launch in handles.items()
            if launch.running is not None
        }

        def look() -> Census:
            places = {replica: launch.place() for replica, launch in handles.items()}
            seen = census.take(places, leases)
            launches = {
                replica: pids
                | frozenset(pid for pid in first.get(replica, ()) if pid not in seen.processes)
                for replica, pids in seen.launches.items()
            }
            return seen._replace(launches=launches)

        return await asyncio.to_thread(look)

    async def is_anothers(self, replica: str, port: int) -> bool:
        """Whether who listens on `port` is known to be another launch's process."""
        launch = self._handle(replica)
        likely = launch.running.pid if launch.running is not None else 0
        return await asyncio.to_thread(listeners.is_anothers, port, launch.mark, likely)

    async def read_log(
        self, replica: str, offset: int | None = None, max_bytes: int = 65536
    ) -> LogPart:
        """Up to `max_bytes` from byte `offset`; with None the last `max_bytes`.

        An unknown replica gives an empty part with `ended`.
        """
        launch = self._handle(replica)
        # Asked before reading: what is printed in between is then only reported a call later.
        known = replica in self._launches
        over = launch.ended is not None if known else not launch.alive()
        part = await asyncio.to_thread(enginelog.read_part, str(launch.folder), offset, max_bytes)
        decoder = codecs.getincrementaldecoder("utf-8")("replace")
        last = over and part.offset + len(part.content) == part.end
        text = decoder.decode(part.content, final=last)
        # A character cut in two at the end is left for the next part.
        following = part.offset + len(part.content) - len(decoder.getstate()[0])
        return LogPart(
            text=text,
            offset=part.offset,
            next_offset=following,
            ended=over and following == part.end,
        )

    def forget(self, replica: str) -> None:
        """Removes the folder of a launch that has ended, its log with it.

        Raises `LaunchFault` while a process of it may be alive.
        """
        launch = self._handle(replica)
        clean = launch.ended is not None and not launch.ended.survivors
        if not clean and (launch.alive() or launch.left()):
            raise LaunchFault(f"{replica} may still run")
        launch.let_go()
        if not launch.reap():
            # It wrote its last file and is about to end; the regular look collects it.
            self._unreaped.append(launch)
        self._launches.pop(replica, None)
        shutil.rmtree(launch.folder, ignore_errors=True)

    def _handle(self, replica: str) -> LaunchHandle:
        """The launch, or for one that is not ours a handle that only looks."""
        return self._launches.get(replica) or LaunchHandle(replica, self._root / replica)

    # What launchers tell

    def _receive(self) -> None:
        assert self._socket is not None
        while True:
            try:
                message = self._socket.recv(65536)
            except BlockingIOError:
                return
            except OSError as error:
                log.warning("launcher socket", extra={"error": str(error)})
                return
            # Only a hint where to look: anybody on this machine's account may send one.
            with contextlib.suppress(ValueError, KeyError, TypeError):
                launch = self._launches.get(json.loads(message)["launch"])
                if launch is not None:
                    self._look(launch)

    def _launcher_ended(self, launch: LaunchHandle) -> None:
        launch.let_go()
        launch.reap()
        self._look(launch)

    async def _keep_looking(self) -> None:
        """The net below datagrams and pidfds: a lost datagram costs `watch_s`, not for ever."""
        while True:
            await asyncio.sleep(self._watch_s)
            try:
                self._unreaped = [launch for launch in self._unreaped if not launch.reap()]
                for launch in list(self._launches.values()):
                    if launch.ended is None:
                        self._look(launch)
                    else:
                        launch.reap()
                self._keep_a_spare()
            except OSError as error:
                # No descriptor left, say: the net must hold when the next look can be had.
                log.warning("launches could not be looked at", extra={"problem": str(error)})

    def _keep_a_spare(self) -> None:
        """Has a launcher wait for the next start. Not right after a start: the processor is that one's."""
        if self._socket is None:  # closed meanwhile
            return
        if self._spare is not None and not self._spare.alive():
            self._spare.end()
            self._spare = None
        # The timer may be early by the clock's resolution.
        rested_s = asyncio.get_running_loop().time() - self._started_at + 0.01
        if self._spare is None and rested_s >= _SPARE_AFTER_S:
            try:
                self._spare = Spare(self._root, hurry=False)
            except OSError as error:
                # A start makes its own then; that only takes longer.
                log.warning("no launcher in reserve", extra={"problem": str(error)})

    def _look(self, launch: LaunchHandle) -> None:
        """Reads the launch's files, which are few and small, and tells what is new in them."""
        if launch.ended is not None:
            return
        # Asked first: a launcher found gone has written its last file before.
        alive = launch.alive()
        running = launches.read_file(launch.folder / RUNNING)
        if running is not None and launch.running is None and running["boot"] == boot_id():
            launch.running = Running(
                replica=launch.replica,
                pid=running["pid"],
                pgid=running["pgid"],
                start_time=running["start_time"],
                launcher_pid=running["launcher_pid"],
            )
            launch.hold(
                running["launcher_pid"],
                running["launcher_start_time"],
                lambda: self._launcher_ended(launch),
            )
        ready = None if launch.ready else launches.read_file(launch.folder / READY)
        if ready is not None:
            self._become_ready(launch, ready["load_s"])
        end = launches.read_file(launch.folder / EXIT)
        if end is not None:
            self._finish(launch, launches.ended(launch.replica, end))
        elif not alive and launch.sweep is None:
            launch.sweep = asyncio.create_task(self._sweep(launch), name=f"sweep {launch.replica}")
        launch.news.set()

    def _become_ready(self, launch: LaunchHandle, load_s: float) -> None:
        launch.ready = True
        if launch.running is not None:
            launch.running = msgspec.structs.replace(launch.running, ready=True, load_s=load_s)
        if launch.answered and not launch.stopping:
            self.events.put_nowait(LaunchReady(replica=launch.replica, load_s=load_s))

    def _finish(self, launch: LaunchHandle, end: Ended) -> None:
        """The one place where a launch ends."""
        if launch.ended is not None:
            return
        launch.ended = end
        if launch.answered and not launch.stopping:
            self.events.put_nowait(
                LaunchEnded(
                    replica=end.replica,
                    exit_status=end.exit_status,
                    last_line=end.last_line,
                    code=end.code,
                    was_ready=end.was_ready,
                    survivors=end.survivors,
                )
            )
        launch.news.set()

    def _answer(self, launch: LaunchHandle) -> Running | Ended:
        """What start and adopt return; from here on news go to `events`."""
        launch.answered = True
        if launch.ended is not None:
            return launch.ended
        assert launch.running is not None
        return launch.running

    # Ending what no launcher ends

    async def _kill(self, launch: LaunchHandle) -> bool:
        """SIGKILL until nobody is left or 5 s have passed; whether there was anybody to kill."""
        loop = asyncio.get_running_loop()
        deadline = loop.time() + _AFTER_KILL_S
        anybody = False
        while members := await asyncio.to_thread(launch.left):
            anybody = True
            self._signal(members, signal.SIGKILL)
            if loop.time() > deadline:
                return anybody
            await asyncio.sleep(0.05)
        # The launcher tells the end itself; one that hangs is ended too, for nothing is left to keep.
        await self._gone(launch, 1.0)
        if launch.ended is None:
            launch.signal(signal.SIGKILL)
            await self._gone(launch, 1.0)
        return anybody

    async def _sweep(self, launch: LaunchHandle) -> None:
        """Ends a launch whose launcher is gone without a word, or never spoke: kills what it left."""
        loop = asyncio.get_running_loop()
        deadline = loop.time() + _AFTER_KILL_S
        launch.signal(signal.SIGKILL)
        while (members := await asyncio.to_thread(launch.left)) and loop.time() < deadline:
            self._signal(members, signal.SIGKILL)
            await asyncio.sleep(0.02)
        tail = enginelog.read_part(str(launch.folder), None, 4096).content
        self._finish(
            launch,
            Ended(
                replica=launch.replica,
                exit_status=None,
                last_line=launches.plain(enginelog.last_line(tail)),
                code="lost",
                was_ready=launch.ready,
                survivors=tuple(process.pid for process in members),
            ),
        )

    # Waiting

    async def _reported(self, launch: LaunchHandle) -> None:
        """Returns when the launcher said that its engine runs or ended, or after 10 s."""
        await self._until(
            launch, lambda: launch.running is not None or launch.ended is not None, _REPORT_S
        )

    async def _gone(self, launch: LaunchHandle, timeout_s: float) -> None:
        await self._until(launch, lambda: launch.ended is not None, timeout_s)

    async def _until(
        self, launch: LaunchHandle, done: Callable[[], bool], timeout_s: float
    ) -> None:
        """Waits for `done` over news of this launch, at most `timeout_s`; looks before it gives up."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                while not done():
                    launch.news.clear()
                    await launch.news.wait()
        if not done():
            self._look(launch)
