"""Keeps one launcher waiting, so that a cold request need not wait for a Python to start.

A spare is a launcher that has everything imported and blocks on a socket. It knows no replica, holds no
lock and runs nothing; it ends when the agent does. It must never be given two launches.
"""

import contextlib
import os
import signal
import socket
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final

from nodeagent.drivers.driver import inherited

_PROGRAM: Final = Path(__file__).with_name("launcher.py")


class Spare:
    """One launcher, our child, that has not been given its launch yet."""

    def __init__(self, root: Path, *, hurry: bool) -> None:
        """Starts it. `hurry`: its launch follows at once, so it shall not prepare itself first.

        `root` is the folder of all launches; it tells a person whose launcher this is. Raises OSError.
        """
        ours, its = socket.socketpair()
        try:
            self.pid = os.posix_spawn(
                sys.executable,
                [sys.executable, "-I", "-S", str(_PROGRAM), str(root), "now" if hurry else "later"],
                # What an engine shall not see, its launcher need not hold.
                inherited(os.environ),
                # A leader of its own session, so no signal meant for us reaches it.
                setsid=True,
                file_actions=[
                    (os.POSIX_SPAWN_DUP2, its.fileno(), 0),
                    (os.POSIX_SPAWN_OPEN, 1, os.devnull, os.O_WRONLY, 0),
                    (os.POSIX_SPAWN_OPEN, 2, os.devnull, os.O_WRONLY, 0),
                ],
            )
        except BaseException:
            ours.close()
            raise
        finally:
            its.close()
        self._socket = ours
        self._collected = False

    def give(
        self,
        folder: Path,
        ready: str,
        argv: Sequence[str],
        environment: Mapping[str, str],
        *,
        lock: int,
        output: int,
    ) -> None:
        """Hands it its launch; from here on it goes on without us. Its process is then the caller's.

        Raises ValueError for what no process can be given, OSError when it is gone (then call `end`).
        """
        words = [str(folder), ready, repr(time.monotonic()), str(len(argv)), *argv]
        words += [f"{name}={value}" for name, value in environment.items()]
        if any("\0" in word for word in words):
            raise ValueError("an argument or a value of the environment holds a NUL")
        # A file in memory takes any size without waiting, and no disk sees the engine's key.
        told = os.memfd_create("launch")
        try:
            content = memoryview(b"\0".join(os.fsencode(word) for word in words))
            while content:
                content = content[os.write(told, content) :]
            socket.send_fds(self._socket, [b"!"], [told, lock, output])
        finally:
            os.close(told)
        self._socket.close()

    def alive(self) -> bool:
        """Whether it still waits; one that ended is collected here."""
        if not self._collected:
            try:
                self._collected = os.waitpid(self.pid, os.WNOHANG)[0] != 0
            except ChildProcessError:
                self._collected = True
        return not self._collected

    def end(self) -> None:
        """Ends it unused and collects it."""
        self._socket.close()
        if self.alive():
            # It holds nothing and runs nothing, so this takes no longer than the kernel needs.
            with contextlib.suppress(ProcessLookupError, ChildProcessError):
                os.kill(self.pid, signal.SIGKILL)
                os.waitpid(self.pid, 0)
            self._collected = True
