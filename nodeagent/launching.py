"""Starts engines under launchers that outlive this agent, and says when they are ready or gone.

It knows processes, files and the launcher's datagrams. It must not decide what runs, when to stop or
what a state means: that is the supervisor's; and it must not know what an engine speaks.
"""

import asyncio
import codecs
import contextlib
import fcntl
import json
import logging
import os
import re
import shutil
import signal
import socket
import sys
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, Literal

from msgspec import Struct

from nodeagent import enginelog, processes
from nodeagent.drivers.driver import EngineStart
from nodeagent.keeper import EXIT, LAUNCH, READY, RUNNING, STOP, boot_id

log = logging.getLogger(__name__)

EndCode = Literal["exited", "spawn_failed", "lost"]
"""exited: the engine ended by itself or by a signal. spawn_failed: it never ran (no such program).
lost: the launcher was killed, its engine with it, and nobody saw the exit status."""

_LOCK = "lock"
"""Locked from before the launcher's spawn until its end, by an open file the launcher inherits: so
whoever can lock it knows that no launcher lives, without trusting any process number."""

_REPORT_S = 10.0
"""How long a launcher may take to say that its engine runs; it takes some 30 ms."""

_AFTER_KILL_S = 5.0
"""How long a killed process may take to leave before it is called a survivor."""


class Running(Struct, frozen=True, kw_only=True):
    """A live engine. `pid` is the engine's main process, `start_time` its start in clock ticks
    since boot: together they name one process for good. `ready`: it said so over its pipe
    already, so no `LaunchReady` follows; `load_s` then is the time from spawn to ready."""

    replica: str
    pid: int
    pgid: int
    start_time: int
    launcher_pid: int
    ready: bool = False
    load_s: float | None = None


class Ended(Struct, frozen=True, kw_only=True):
    """An engine that is gone, with its whole process group unless `survivors` says otherwise.

    `exit_status`: 0..255, or -N when signal N ended it; None when nobody saw it (lost,
    spawn_failed). `last_line`: the last non-empty line it printed, at most 500 characters.
    `killed`: a stop's grace passed and SIGKILL was needed.
    """

    replica: str
    exit_status: int | None
    last_line: str
    code: EndCode = "exited"
    was_ready: bool = False
    survivors: tuple[int, ...] = ()
    killed: bool = False


class LaunchReady(Struct, frozen=True, kw_only=True):
    """The engine reported ready over its pipe, `load_s` after its spawn. Sent once per launch."""

    replica: str
    load_s: float


class LaunchEnded(Struct, frozen=True, kw_only=True):
    """The engine is gone without `stop` having been called. Sent once per launch."""

    replica: str
    exit_status: int | None
    last_line: str
    code: EndCode = "exited"
    was_ready: bool = False
    survivors: tuple[int, ...] = ()


LaunchEvent = LaunchReady | LaunchEnded


class StopResult(Struct, frozen=True, kw_only=True):
    """What a stop left: the engine's exit status (None: not seen) and the pids that would not go.

    `killed`: the grace passed and SIGKILL was needed.
    """

    exit_status: int | None
    survivors: tuple[int, ...] = ()
    killed: bool = False
    last_line: str = ""


class LogPart(Struct, frozen=True, kw_only=True):
    """A piece of an engine's log. Offsets count all bytes since the start, over turned-over files.

    `offset` is where `text` really begins: later than asked when older bytes were dropped.
    `ended`: the process is gone and nothing follows `next_offset`.
    """

    text: str
    offset: int
    next_offset: int
    ended: bool = False


class LaunchFault(Exception):
    """The launcher itself did not do its part (could not be spawned, never reported)."""


class _Launch:
    """What this agent knows of one launch; changed by `Launcher` alone."""

    def __init__(self, replica: str, folder: Path) -> None:
        self.replica = replica
        self.folder = folder
        self.running: Running | None = None
        self.ended: Ended | None = None
        self.ready = False
        # Between start/adopt and their answer nobody is told by event what the answer says.
        self.answered = False
        self.stopping = False
        self.launcher_pid = 0
        self.is_child = False
        self.pidfd = -1
        self.sweep: asyncio.Task[None] | None = None
        self.news = asyncio.Event()


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
        self._launches: dict[str, _Launch] = {}
        self._socket: socket.socket | None = None
        self._watch: asyncio.Task[None] | None = None

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
        self._watch = asyncio.create_task(self._keep_looking(), name="launch watchdog")

    async def close(self) -> None:
        """Stops watching and removes the socket. Engines and their launchers go on."""
        if self._watch is not None:
            self._watch.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._watch
        if self._socket is not None:
            asyncio.get_running_loop().remove_reader(self._socket)
            self._socket.close()
            self._socket = None
            self._sock.unlink(missing_ok=True)
        for launch in self._launches.values():
            self._unwatch(launch)
            if launch.sweep is not None and not launch.sweep.done():
                launch.sweep.cancel()
                with contextlib.suppress(asyncio.CancelledError):
                    await launch.sweep

    def found(self) -> tuple[str, ...]:
        """Replicas that have a folder, sorted: what a predecessor of this agent left."""
        if not self._root.is_dir():
            return ()
        return tuple(sorted(entry.name for entry in self._root.iterdir() if entry.is_dir()))

    async def start(
        self, replica: str, start: EngineStart, *, grace_s: float, log_bytes: int
    ) -> Running | Ended:
        """Starts the engine; returns as soon as its process exists (some 30 ms).

        `Ended` when it ended at once, or with code "spawn_failed" when the program cannot be run;
        no event follows then.
        Raises `LaunchFault` when the replica was started before (an id is used once) or the
        launcher did not report within 10 s (nothing is left running then).
        """
        launch = _Launch(replica, self._root / replica)
        try:
            launch.folder.mkdir(mode=0o700, parents=True)
        except FileExistsError:
            raise LaunchFault(f"{replica} was started before; an id is used once") from None
        self._launches[replica] = launch
        description = {
            "launch": replica,
            "argv": start.argv,
            # Names only: the values hold the engine's key.
            "environment": sorted(start.environment),
            "secret_names": start.secret_names,
            "telling": start.telling,
            "endpoint": start.endpoint,
            "port": start.port,
            "ready": start.ready,
            "grace_s": grace_s,
            "log_bytes": log_bytes,
            "notify": str(self._sock),
            "at": time.time(),
        }
        enginelog.write_whole(str(launch.folder), LAUNCH, json.dumps(description).encode())
        try:
            self._spawn(launch, start)
        except OSError as error:
            self._launches.pop(replica)
            shutil.rmtree(launch.folder, ignore_errors=True)
            raise LaunchFault(f"cannot start a launcher: {error}") from error
        await self._reported(launch)
        if launch.running is None and launch.ended is None:
            await self._sweep(launch)
            raise LaunchFault(f"the launcher of {replica} did not report within {_REPORT_S} s")
        return self._answer(launch)

    async def adopt(self, replica: str) -> Running | Ended | None:
        """Takes over what a predecessor started: by pid, start time and YARD_LAUNCH_ID.

        None: this id was never started here (its folder is absent or holds no launch), so nothing
        runs under it. `Ended`: it is gone and no event follows; leftovers of its group were killed.
        """
        folder = self._root / replica
        if not (folder / LAUNCH).is_file():
            return None
        launch = self._launches.get(replica) or _Launch(replica, folder)
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
        launch = self._known(replica)
        launch.stopping = True
        killed = False
        if launch.ended is None:
            content = json.dumps({"grace_s": grace_s}).encode()
            with contextlib.suppress(OSError):
                enginelog.write_whole(str(launch.folder), STOP, content)
            # The launcher owns the process and does it; the steps below are for one that cannot.
            self._signal_launcher(launch, signal.SIGTERM)
            await self._gone(launch, grace_s + 1.0)
        if launch.ended is None or launch.ended.survivors:
            killed = await self._kill(launch)
        end = launch.ended
        return StopResult(
            exit_status=end.exit_status if end else None,
            survivors=await self.survivors(replica),
            killed=killed or (end is not None and end.killed),
            last_line=end.last_line if end else "",
        )

    async def survivors(self, replica: str) -> tuple[int, ...]:
        """The pids of this launch that are alive now (zombies are dead), the launcher's excluded."""
        members = await asyncio.to_thread(self._members, replica)
        return tuple(process.pid for process in members)

    async def memory_bytes(self, replica: str) -> int:
        """Proportional set size of all live processes of this launch; 0 when none is left."""
        return await asyncio.to_thread(
            lambda: processes.memory_bytes(self._members(replica)),
        )

    async def read_log(
        self, replica: str, offset: int | None = None, max_bytes: int = 65536
    ) -> LogPart:
        """Up to `max_bytes` from byte `offset`; with None the last `max_bytes`.

        An unknown replica gives an empty part with `ended`.
        """
        folder = self._root / replica
        launch = self._launches.get(replica)
        # Asked before reading: what is printed in between is then only reported a call later.
        over = launch.ended is not None if launch else not self._locked(folder)
        part = await asyncio.to_thread(enginelog.read_part, str(folder), offset, max_bytes)
        decoder = codecs.getincrementaldecoder("utf-8")("replace")
        last = over and part.offset + len(part.content) == part.end
        text = decoder.decode(part.content, final=last)
        # A character cut in two at the end is left for the next part.
        cut = len(decoder.getstate()[0])
        following = part.offset + len(part.content) - cut
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
        launch = self._launches.get(replica)
        folder = self._root / replica
        clean = launch is not None and launch.ended is not None and not launch.ended.survivors
        if not clean and (self._locked(folder) or self._members(replica)):
            raise LaunchFault(f"{replica} may still run")
        if launch is not None:
            self._unwatch(launch)
            del self._launches[replica]
        shutil.rmtree(folder, ignore_errors=True)

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

    async def _keep_looking(self) -> None:
        """The net below datagrams and pidfds: a lost datagram costs `watch_s`, not for ever."""
        while True:
            await asyncio.sleep(self._watch_s)
            for launch in list(self._launches.values()):
                if launch.ended is None:
                    self._look(launch)

    def _look(self, launch: _Launch) -> None:
        """Reads the launch's files, which are few and small, and tells what is new in them."""
        if launch.ended is not None:
            return
        # In this order: a launcher found gone has written its last file before.
        alive = self._locked(launch.folder)
        running = _read(launch.folder / RUNNING)
        if running is not None and launch.running is None and running.get("boot") == boot_id():
            launch.launcher_pid = running["launcher_pid"]
            launch.running = Running(
                replica=launch.replica,
                pid=running["pid"],
                pgid=running["pgid"],
                start_time=running["start_time"],
                launcher_pid=running["launcher_pid"],
            )
            self._watch_launcher(launch, running["launcher_start_time"])
        ready = None if launch.ready else _read(launch.folder / READY)
        if ready is not None:
            launch.ready = True
            if launch.running is not None:
                launch.running = _with_ready(launch.running, ready["load_s"])
            if launch.answered and not launch.stopping:
                self.events.put_nowait(LaunchReady(replica=launch.replica, load_s=ready["load_s"]))
        end = _read(launch.folder / EXIT)
        if end is not None:
            self._finish(launch, _ended(launch.replica, end))
        elif not alive and launch.sweep is None:
            launch.sweep = asyncio.create_task(self._sweep(launch), name=f"sweep {launch.replica}")
        launch.news.set()

    def _finish(self, launch: _Launch, end: Ended) -> None:
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

    def _answer(self, launch: _Launch) -> Running | Ended:
        """What start and adopt return; from here on news go to `events`."""
        launch.answered = True
        if launch.ended is not None:
            return launch.ended
        assert launch.running is not None
        return launch.running

    # Processes

    def _spawn(self, launch: _Launch, start: EngineStart) -> None:
        """The launcher as a leader of its own session, so no signal meant for us reaches it."""
        here = Path(__file__).with_name("launcher.py")
        argv = [sys.executable, "-I", "-S", str(here), str(launch.folder), start.ready, "--"]
        environment = {**start.environment, processes.LAUNCH_ID: launch.replica}
        lock = os.open(launch.folder / _LOCK, os.O_RDWR | os.O_CREAT, 0o600)
        output = os.open(launch.folder / "launcher.log", os.O_WRONLY | os.O_CREAT, 0o600)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            launch.launcher_pid = os.posix_spawn(
                sys.executable,
                [*argv, *start.argv],
                environment,
                setsid=True,
                file_actions=[
                    (os.POSIX_SPAWN_DUP2, lock, 0),
                    (os.POSIX_SPAWN_DUP2, output, 1),
                    (os.POSIX_SPAWN_DUP2, output, 2),
                ],
            )
        finally:
            os.close(lock)
            os.close(output)
        launch.is_child = True
        self._watch_launcher(launch, None)

    def _watch_launcher(self, launch: _Launch, start_time: int | None) -> None:
        """Wakes us at the launcher's end, whoever its parent is. None: our child, not yet reaped."""
        if launch.pidfd >= 0:
            return
        try:
            handle = os.pidfd_open(launch.launcher_pid)
        except OSError:
            # It is gone, or this kernel has no pidfds; the regular look finds out.
            return
        if start_time is not None and not processes.is_same(launch.launcher_pid, start_time):
            os.close(handle)
            return
        launch.pidfd = handle
        asyncio.get_running_loop().add_reader(handle, self._launcher_ended, launch)

    def _launcher_ended(self, launch: _Launch) -> None:
        self._unwatch(launch)
        self._look(launch)

    def _unwatch(self, launch: _Launch) -> None:
        if launch.pidfd >= 0:
            asyncio.get_running_loop().remove_reader(launch.pidfd)
            os.close(launch.pidfd)
            launch.pidfd = -1
        if launch.is_child:
            with contextlib.suppress(ChildProcessError):
                reaped, _ = os.waitpid(launch.launcher_pid, os.WNOHANG)
                launch.is_child = reaped == 0

    def _locked(self, folder: Path) -> bool:
        """Whether a launcher holds this folder's lock."""
        try:
            lock = os.open(folder / _LOCK, os.O_RDWR)
        except OSError:
            return False
        try:
            # Shared, so that two who ask at once do not take each other for the launcher.
            fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except OSError:
            return True
        finally:
            os.close(lock)
        return False

    def _signal_launcher(self, launch: _Launch, number: signal.Signals) -> None:
        if launch.pidfd >= 0:
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(launch.pidfd, number)
        elif self._locked(launch.folder) and launch.launcher_pid:
            with contextlib.suppress(ProcessLookupError):
                os.kill(launch.launcher_pid, number)

    def _members(self, replica: str) -> tuple[processes.Process, ...]:
        launch = self._launches.get(replica)
        running = launch.running if launch else None
        return processes.members(
            replica,
            launcher=running.launcher_pid if running else 0,
            group=running.pgid if running else 0,
            since=running.start_time if running else 0,
            launcher_alive=running is not None and self._locked(self._root / replica),
        )

    def _left(self, replica: str) -> tuple[processes.Process, ...]:
        """As `_members`, but nobody only when two looks found nobody: a process that forks and ends
        in the middle of a look hides both itself and its child from it."""
        return self._members(replica) or self._members(replica)

    async def _kill(self, launch: _Launch) -> bool:
        """SIGKILL until nobody is left or 5 s have passed; whether there was anybody to kill."""
        loop = asyncio.get_running_loop()
        deadline = loop.time() + _AFTER_KILL_S
        anybody = False
        while members := await asyncio.to_thread(self._left, launch.replica):
            anybody = True
            self._signal(members, signal.SIGKILL)
            if loop.time() > deadline:
                return anybody
            await asyncio.sleep(0.05)
        # The launcher tells the end itself; one that hangs is ended too, for nothing is left to keep.
        await self._gone(launch, 1.0)
        if launch.ended is None:
            self._signal_launcher(launch, signal.SIGKILL)
            await self._gone(launch, 1.0)
        return anybody

    async def _sweep(self, launch: _Launch) -> None:
        """Ends a launch whose launcher is gone without a word: kills what it left, once."""
        members = await asyncio.to_thread(self._left, launch.replica)
        deadline = asyncio.get_running_loop().time() + _AFTER_KILL_S
        while members and asyncio.get_running_loop().time() < deadline:
            self._signal(members, signal.SIGKILL)
            await asyncio.sleep(0.02)
            members = await asyncio.to_thread(self._left, launch.replica)
        self._finish(launch, self._lost(launch, tuple(process.pid for process in members)))

    def _lost(self, launch: _Launch, survivors: tuple[int, ...]) -> Ended:
        tail = enginelog.read_part(str(launch.folder), None, 4096).content
        return Ended(
            replica=launch.replica,
            exit_status=None,
            last_line=_plain(enginelog.last_line(tail)),
            code="lost",
            was_ready=launch.ready,
            survivors=survivors,
        )

    # Waiting

    def _known(self, replica: str) -> _Launch:
        launch = self._launches.get(replica)
        if launch is None:
            raise LaunchFault(f"{replica} is not a launch of this agent")
        return launch

    async def _reported(self, launch: _Launch) -> None:
        """Returns when the launcher said that its engine runs or ended, or after 10 s."""
        await self._until(
            launch,
            lambda: launch.running is not None or launch.ended is not None,
            _REPORT_S,
        )

    async def _gone(self, launch: _Launch, timeout_s: float) -> None:
        await self._until(launch, lambda: launch.ended is not None, timeout_s)

    async def _until(self, launch: _Launch, done: Callable[[], bool], timeout_s: float) -> None:
        """Waits for `done` over news of this launch, at most `timeout_s`; looks before it gives up."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                while not done():
                    launch.news.clear()
                    await launch.news.wait()
        if not done():
            self._look(launch)


def _with_ready(running: Running, load_s: float) -> Running:
    return Running(
        replica=running.replica,
        pid=running.pid,
        pgid=running.pgid,
        start_time=running.start_time,
        launcher_pid=running.launcher_pid,
        ready=True,
        load_s=load_s,
    )


def _ended(replica: str, content: dict[str, Any]) -> Ended:
    return Ended(
        replica=replica,
        exit_status=content["status"],
        last_line=_plain(content["last_line"]),
        code=content["code"],
        was_ready=content.get("was_ready", False),
        survivors=tuple(content.get("survivors", ())),
        killed=content.get("killed", False),
    )


def _read(path: Path) -> dict[str, Any] | None:
    """One of the launcher's files; None when it is not there. They are put in place whole."""
    try:
        return json.loads(path.read_bytes())
    except (OSError, ValueError):
        return None


_CONTROL = re.compile(r"\x1b\[[0-9;?]*[ -/]*[@-~]|[\x00-\x08\x0b-\x1f\x7f]")


def _plain(line: str) -> str:
    """A terminal's colours and control characters taken out: the line goes into an event."""
    return _CONTROL.sub("", line).strip()
