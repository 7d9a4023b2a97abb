"""Starts engines under launchers that outlive this agent, and says when they are ready or gone.

It knows processes, files and the launcher's datagrams. It must not decide what runs, when to stop or
what a state means: that is the supervisor's; and it must not know what an engine speaks.
"""

import asyncio
from pathlib import Path
from typing import Literal

from msgspec import Struct

from nodeagent.drivers.driver import EngineStart

EndCode = Literal["exited", "spawn_failed", "lost"]
"""exited: the engine ended by itself or by a signal. spawn_failed: it never ran (no such program).
lost: the launcher was killed, its engine with it, and nobody saw the exit status."""


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
    """

    replica: str
    exit_status: int | None
    last_line: str
    code: EndCode = "exited"
    was_ready: bool = False
    survivors: tuple[int, ...] = ()


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


class Launcher:
    """The launches of one node, each with its folder below `root`.

    One event loop owns an instance. All methods may run concurrently for different replicas; for
    one replica the caller does one thing at a time (start or adopt, then stop, then forget),
    except that `memory_bytes`, `survivors` and `read_log` are free to be called at any time.
    """

    events: "asyncio.Queue[LaunchEvent]"
    """Filled by datagrams of the launchers, by their pidfds, and by a look every `watch_s`."""

    def __init__(self, root: Path, sock: Path, *, watch_s: float = 2.0) -> None:
        """`root` holds one folder per replica, `sock` is where launchers send their datagrams."""
        raise NotImplementedError

    async def open(self) -> None:
        """Binds the socket and begins to watch. A stale socket file is replaced."""
        raise NotImplementedError

    async def close(self) -> None:
        """Stops watching and removes the socket. Engines and their launchers go on."""
        raise NotImplementedError

    def found(self) -> tuple[str, ...]:
        """Replicas that have a folder, sorted: what a predecessor of this agent left."""
        raise NotImplementedError

    async def start(
        self, replica: str, start: EngineStart, *, grace_s: float, log_bytes: int
    ) -> Running | Ended:
        """Starts the engine; returns as soon as its process exists (some 30 ms).

        `Ended(code="spawn_failed")` when the program cannot be run; no event follows then.
        Raises `LaunchFault` when the replica was started before (an id is used once) or the
        launcher did not report within 10 s (nothing is left running then).
        """
        raise NotImplementedError

    async def adopt(self, replica: str) -> Running | Ended | None:
        """Takes over what a predecessor started: by pid, start time and YARD_LAUNCH_ID.

        None: this id was never started here (its folder is absent or holds no spawn), so nothing
        runs under it. `Ended`: it is gone and no event follows; leftovers of its group were killed.
        """
        raise NotImplementedError

    async def stop(self, replica: str, grace_s: float) -> StopResult:
        """SIGTERM to the whole process group, SIGKILL after `grace_s`, then 5 s for the kernel.

        Returns when no process of the launch is left, or with those that are. No `LaunchEnded`
        follows unless it was queued before. May be called again while survivors are left, and for
        a launch that has ended already (it then returns its end). Cancelling it leaves the signals
        sent.
        """
        raise NotImplementedError

    async def survivors(self, replica: str) -> tuple[int, ...]:
        """The pids of this launch that are alive now (zombies are dead), the launcher's excluded."""
        raise NotImplementedError

    async def memory_bytes(self, replica: str) -> int:
        """Proportional set size of all live processes of this launch; 0 when none is left."""
        raise NotImplementedError

    async def read_log(
        self, replica: str, offset: int | None = None, max_bytes: int = 65536
    ) -> LogPart:
        """Up to `max_bytes` from byte `offset`; with None the last `max_bytes`.

        An unknown replica gives an empty part with `ended`.
        """
        raise NotImplementedError

    def forget(self, replica: str) -> None:
        """Removes the folder of a launch that has ended, its log with it.

        Raises `LaunchFault` while a process of it may be alive.
        """
        raise NotImplementedError
