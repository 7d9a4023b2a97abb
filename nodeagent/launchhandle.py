"""Holds one launch by its launcher: hands it over, knows whether it lives, signals it, finds its processes.

Everything is asked of the kernel at the moment it is needed: the folder's lock, a pidfd, /proc. It
must not decide what a finding means; that is `launching`.
"""

import asyncio
import contextlib
import fcntl
import json
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path

from nodeagent import enginelog, processes
from nodeagent.drivers.driver import EngineStart
from nodeagent.keeper import LAUNCH
from nodeagent.launches import Ended, Running
from nodeagent.spare import Spare


class LaunchHandle:
    """One launch and what is known of it. Its state is changed by `launching.Launcher` alone."""

    def __init__(self, replica: str, folder: Path) -> None:
        self.replica = replica
        self.folder = folder
        self.running: Running | None = None
        self.ended: Ended | None = None
        self.ready = False
        # Between start or adopt and their answer, events tell nothing: the answer says it.
        self.answered = False
        self.stopping = False
        self.sweep: asyncio.Task[None] | None = None
        self.news = asyncio.Event()
        self._launcher_pid = 0
        self._is_child = False
        self._pidfd = -1

    def describe(self, start: EngineStart, *, grace_s: float, log_bytes: int, sock: Path) -> None:
        """Makes the folder and writes what the launcher needs to know. Raises OSError."""
        self.folder.mkdir(mode=0o700, parents=True)
        description = {
            "launch": self.replica,
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
            "notify": str(sock),
            "at": time.time(),
        }
        enginelog.write_whole(str(self.folder), LAUNCH, json.dumps(description).encode())

    def spawn(self, start: EngineStart, spare: Spare | None, on_end: Callable[[], None]) -> None:
        """Has `spare` launch it, or a launcher of its own when there is none or it is gone.

        Raises OSError, and ValueError for what no process can be given. `on_end` is called when the
        launcher has ended.
        """
        with contextlib.ExitStack() as opened:
            try:
                lock = os.open(self.folder / processes.LOCK, os.O_RDWR | os.O_CREAT, 0o600)
                opened.callback(os.close, lock)
                output = os.open(self.folder / "launcher.log", os.O_WRONLY | os.O_CREAT, 0o600)
                opened.callback(os.close, output)
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError:
                if spare is not None:  # nobody else knows of it any more
                    spare.end()
                raise
            try:
                self._launcher_pid = self._hand_over(start, spare, lock, output)
            except OSError:
                if spare is None:
                    raise
                self._launcher_pid = self._hand_over(start, None, lock, output)
        self._is_child = True
        self._watch(on_end)

    def _hand_over(self, start: EngineStart, spare: Spare | None, lock: int, output: int) -> int:
        """The pid of the launcher that has the launch now."""
        launcher = spare or Spare(self.folder.parent, hurry=True)
        environment = {
            **start.environment,
            processes.LAUNCH_ID: self.replica,
            processes.LAUNCH_DIR: str(self.folder),
        }
        try:
            launcher.give(
                self.folder, start.ready, start.argv, environment, lock=lock, output=output
            )
        except BaseException:
            launcher.end()
            raise
        return launcher.pid

    def hold(self, launcher_pid: int, start_time: int, on_end: Callable[[], None]) -> None:
        """Watches a launcher that somebody else spawned, if it is still that process."""
        self._launcher_pid = launcher_pid
        if self._pidfd < 0:
            self._watch(on_end)
            # Looked at after it was held: from here on the number cannot become another's.
            if self._pidfd >= 0 and not processes.is_same(launcher_pid, start_time):
                self.let_go()

    def _watch(self, on_end: Callable[[], None]) -> None:
        try:
            self._pidfd = os.pidfd_open(self._launcher_pid)
        except OSError:
            # It is gone, or this kernel has no pidfds; the regular look finds out.
            return
        asyncio.get_running_loop().add_reader(self._pidfd, on_end)

    def let_go(self) -> None:
        """Stops watching the launcher."""
        if self._pidfd >= 0:
            asyncio.get_running_loop().remove_reader(self._pidfd)
            os.close(self._pidfd)
            self._pidfd = -1

    def reap(self) -> bool:
        """Collects an ended launcher that is our child; whether there is nothing left to collect."""
        if self._is_child:
            try:
                pid, _ = os.waitpid(self._launcher_pid, os.WNOHANG)
            except ChildProcessError:
                pid = self._launcher_pid
            self._is_child = pid == 0
        return not self._is_child

    def was_begun(self) -> bool:
        """Whether a launcher was ever about to be spawned: its lock comes right before that."""
        return (self.folder / processes.LOCK).exists()

    def alive(self) -> bool:
        """Whether a launcher lives, whoever spawned it."""
        try:
            lock = os.open(self.folder / processes.LOCK, os.O_RDWR)
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

    def signal(self, number: signal.Signals) -> None:
        """Signals the launcher, not the engine."""
        with contextlib.suppress(ProcessLookupError):
            if self._pidfd >= 0:
                signal.pidfd_send_signal(self._pidfd, number)
            elif self._launcher_pid and self.alive():
                os.kill(self._launcher_pid, number)

    @property
    def mark(self) -> processes.Mark:
        """What every process of this launch carries in its environment."""
        return processes.Mark(self.replica, str(self.folder))

    def place(self) -> processes.Where:
        """Where the processes of this launch are found now."""
        running = self.running
        if running is None:
            return processes.where(self.mark, launcher=0, group=0, since=0, launcher_alive=False)
        return processes.where(
            self.mark,
            launcher=running.launcher_pid,
            group=running.pgid,
            since=running.start_time,
            launcher_alive=self.alive(),
        )

    def members(self) -> tuple[processes.Process, ...]:
        """The live processes of this launch, the launcher's excluded. Reads all of /proc: blocks."""
        return processes.members_at(self.place())

    def left(self) -> tuple[processes.Process, ...]:
        """As `members`, but nobody only when two looks found nobody: a process that forks and ends
        in the middle of a look hides both itself and its child from it."""
        return self.members() or self.members()
