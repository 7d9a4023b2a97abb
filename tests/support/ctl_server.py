"""Runs yardctl many times without starting Python many times: each call is a fork of one that imported everything.

A call is a process of its own, with its own arguments, environment, descriptors and exit code, as the
program's would be. It must not be used where the start of the program is what a test is about. As a
program it serves the socket that is its descriptor 0, and ends with it.
"""

import asyncio
import contextlib
import json
import os
import selectors
import signal
import socket
import subprocess
import sys
from pathlib import Path
from types import FrameType
from typing import Final

ROOT: Final = Path(__file__).resolve().parents[2]
MOST_BYTES: Final = 128 * 1024
"""Of one call's arguments and environment together."""


class CtlServer:
    """The tests' side: one server, started with the first call, ended by `close`."""

    def __init__(self) -> None:
        self._socket: socket.socket | None = None
        self._process: subprocess.Popen[bytes] | None = None

    def _open(self) -> socket.socket:
        if self._socket is None:
            ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            ours.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, MOST_BYTES)
            with theirs:
                argv = [sys.executable, "-m", "tests.support.ctl_server"]
                self._process = subprocess.Popen(argv, stdin=theirs, cwd=ROOT)
            self._socket = ours
        return self._socket

    async def call(
        self, arguments: tuple[str, ...], environment: dict[str, str], files: tuple[int, int, int]
    ) -> int:
        """Its exit code (negative for a signal). `files` are its stdin, stdout and stderr; who stops
        waiting ends it."""
        ours, theirs = socket.socketpair()
        with ours:
            with theirs:
                call = json.dumps({"arguments": arguments, "environment": environment})
                socket.send_fds(self._open(), [call.encode()], [*files, theirs.fileno()])
            ours.setblocking(False)
            said = await asyncio.get_running_loop().sock_recv(ours, 16)
        assert said, "the server of yardctl ended"
        return int(said)

    def close(self) -> None:
        if self._socket is not None:
            self._socket.close()
            self._socket = None
        if self._process is not None:
            self._process.wait(10)
            self._process = None


# The server's side ----------------------------------------------------------------------------------


def serve(calls: socket.socket) -> None:
    """Forks for each call until the other end is closed, and tells how each ended."""
    from controlplane.ctl import main  # noqa: F401 - what each call finds imported already

    running: dict[int, socket.socket] = {}
    wake_r, wake_w = os.pipe()
    os.set_blocking(wake_w, False)
    signal.set_wakeup_fd(wake_w)
    signal.signal(signal.SIGCHLD, _nothing)
    with selectors.DefaultSelector() as selector:
        selector.register(calls, selectors.EVENT_READ, "calls")
        selector.register(wake_r, selectors.EVENT_READ, "ended")
        while True:
            for key, _ in selector.select():
                if key.data == "calls":
                    call, fds, _, _ = socket.recv_fds(calls, MOST_BYTES, 4)
                    if not call:
                        return
                    pid = os.fork()
                    if pid == 0:
                        _become(json.loads(call), fds)
                    for fd in fds[:3]:
                        os.close(fd)
                    running[pid] = socket.socket(fileno=fds[3])
                    selector.register(running[pid], selectors.EVENT_READ, pid)
                elif key.data == "ended":
                    os.read(wake_r, 1024)
                    _bury(running, selector)
                elif key.data in running:
                    # Its caller left: nobody wants it any more.
                    selector.unregister(key.fileobj)
                    os.kill(key.data, signal.SIGTERM)


def _bury(running: dict[int, socket.socket], selector: selectors.BaseSelector) -> None:
    while running:
        pid, status = os.waitpid(-1, os.WNOHANG)
        if pid == 0:
            return
        caller = running.pop(pid)
        with contextlib.suppress(KeyError):
            selector.unregister(caller)
        with contextlib.suppress(OSError), caller:
            caller.send(str(os.waitstatus_to_exitcode(status)).encode())


def _become(call: dict[str, object], fds: list[int]) -> None:
    """The fork: as the program would find itself, then the program."""
    code = 70
    try:
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        for number, fd in enumerate(fds[:3]):
            os.dup2(fd, number)
        os.closerange(3, 256)
        arguments = [str(word) for word in call["arguments"]]  # pyright: ignore[reportGeneralTypeIssues]
        os.environ.clear()
        os.environ.update(call["environment"])  # pyright: ignore[reportArgumentType, reportCallIssue]
        sys.argv = ["yardctl", *arguments]

        from controlplane.ctl.main import main

        code = main(arguments)
        sys.stdout.flush()
        sys.stderr.flush()
    except SystemExit as error:
        code = error.code if isinstance(error.code, int) else 1
    finally:
        os._exit(code)


def _nothing(number: int, frame: FrameType | None) -> None:
    """So that the wakeup descriptor is written to."""


if __name__ == "__main__":
    with socket.socket(fileno=os.dup(0)) as served:
        with open(os.devnull) as nothing:
            os.dup2(nothing.fileno(), 0)
        serve(served)
