"""Keeps one engine from its first moment to its last: copies its log, tells ready and end, stops it.

It is the second half of the launcher and imports the standard library only, for it runs beside every
engine. It decides nothing: it ends when the engine ends and ends the engine when told to. It must
not fail on a full disk or a missing agent, for the engine would fail with it.
"""

import contextlib
import json
import os
import select
import signal
import socket
import time

from nodeagent import processes
from nodeagent.enginelog import LogWriter, Redactor, write_whole

LAUNCH = "launch.json"
RUNNING = "running.json"
READY = "ready.json"
EXIT = "exit.json"
STOP = "stop.json"

_PIECE = 256 * 1024
_KILL_EVERY_S = 0.1
_GIVE_UP_S = 5.0
"""How long SIGKILL is repeated before what is left is called a survivor."""


class Keeper:
    """The launcher's state while its engine lives. One thread, one `poll`, no clock but monotonic."""

    def __init__(self, folder: str, pid: int, *, log: int, fault: int, ready: int) -> None:
        self._began = time.monotonic()
        self._folder = folder
        self._pid = pid
        self._fault = fault
        self._log = log
        self._ready = ready
        os.umask(0o077)
        with open(os.path.join(folder, LAUNCH), "rb") as file:
            launch = json.load(file)
        self._launch: str = launch["launch"]
        self._grace_s: float = launch["grace_s"]
        self._notify: str = launch["notify"]
        self._telling: list[str] = launch["telling"]
        secrets = [os.environb.get(name.encode(), b"") for name in launch["secret_names"]]
        self._redactor = Redactor(secrets)
        self._writer = LogWriter(folder, launch["log_bytes"])
        self._since = 0
        self._status: int | None = None
        self._stop_wanted = False
        self._kill_at: float | None = None
        self._give_up_at: float | None = None
        self._killed = False
        self._was_ready = False
        self._unwritten: dict[str, dict[str, object]] = {}

    def keep(self) -> int:
        """Runs until the engine and everything it started is gone; the launcher's exit status."""
        # Signals first, so that a stop in the middle of the start is not lost.
        woken = self._catch_signals()
        fault = self._read_fault()
        if fault:
            with contextlib.suppress(ChildProcessError):
                os.waitpid(self._pid, 0)
            self._tell(EXIT, {"code": "spawn_failed", "status": None, "last_line": fault[:500]})
            return 1
        found = processes.look(self._pid)
        self._since = found.start_time if found else 0
        me = processes.look(os.getpid())
        self._tell(
            RUNNING,
            {
                "pid": self._pid,
                "pgid": self._pid,
                "start_time": self._since,
                "launcher_pid": os.getpid(),
                "launcher_start_time": me.start_time if me else 0,
                "boot": boot_id(),
            },
        )
        self._loop(woken)
        # What is left in the pipe; a survivor that goes on printing must not keep us.
        for _ in range(16):
            if not self._copy_log():
                break
        self._writer.write(self._redactor.rest())
        self._tell(EXIT, self._end())
        return 0

    def _loop(self, woken: int) -> None:
        poll = select.poll()
        for fd in (woken, self._log, self._ready):
            if fd >= 0:
                os.set_blocking(fd, False)
                poll.register(fd, select.POLLIN)
        while True:
            self._reap()
            if self._status is not None and not self._anyone():
                return
            if self._advance_stop():
                return
            for fd, _ in poll.poll(self._wait_ms()):
                if fd == woken:
                    os.read(woken, 4096)
                elif fd == self._log and not self._copy_log():
                    poll.unregister(fd)
                elif fd == self._ready:
                    poll.unregister(fd)
                    self._read_ready()
            self._write_again()

    def _catch_signals(self) -> int:
        """SIGTERM and SIGINT wish for a stop, SIGCHLD only wakes; returns what becomes readable."""
        readable, writable = os.pipe()
        os.set_blocking(writable, False)
        signal.set_wakeup_fd(writable, warn_on_full_buffer=False)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.signal(signal.SIGHUP, signal.SIG_IGN)
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self._want_stop)
        return readable

    def _want_stop(self, *_: object) -> None:
        self._stop_wanted = True

    def _read_fault(self) -> str:
        """Why the program could not be run; empty once it runs, for the pipe closes with exec."""
        with open(self._fault, "rb") as pipe:
            return pipe.read().decode(errors="replace")

    def _read_ready(self) -> None:
        try:
            line = os.read(self._ready, 4096)
        except OSError:
            line = b""
        os.close(self._ready)
        # An engine that ends without being ready closes the pipe unwritten.
        if line.startswith(b"ready"):
            self._was_ready = True
            self._tell(READY, {"load_s": round(time.monotonic() - self._began, 4)})

    def _copy_log(self) -> bool:
        """Copies a piece of what the engine printed; False when there is none now or ever."""
        try:
            piece = os.read(self._log, _PIECE)
        except OSError:
            return False
        self._writer.write(self._redactor.clean(piece))
        return bool(piece)

    def _reap(self) -> None:
        """Collects every ended child: the engine, and what it abandoned (we are its subreaper)."""
        with contextlib.suppress(ChildProcessError):
            while True:
                pid, status = os.waitpid(-1, os.WNOHANG)
                if pid == 0:
                    return
                if pid == self._pid:
                    self._status = os.waitstatus_to_exitcode(status)

    def _anyone(self) -> bool:
        """Whether anything the engine started is left. As subreaper we then have a child."""
        try:
            os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        except ChildProcessError:
            return False
        return True

    def _members(self) -> tuple[processes.Process, ...]:
        return processes.members(
            processes.Mark(self._launch, self._folder),
            launcher=os.getpid(),
            group=self._pid,
            since=self._since,
            launcher_alive=True,
        )

    def _advance_stop(self) -> bool:
        """The stop's next step, if it is due; True when what is left will not go.

        1. A stop is wished, or the engine ended and left others behind: SIGTERM to all of it.
        2. The grace has passed: SIGKILL to all, repeated, for the group may be forking.
        3. That did not help for 5 s: give up.
        """
        now = time.monotonic()
        if self._kill_at is None:
            if not self._stop_wanted and self._status is None:
                return False
            self._kill_at = now + self._grace()
            self._ask_to_end()
        elif now >= self._kill_at:
            self._give_up_at = self._give_up_at or now + _GIVE_UP_S
            if now >= self._give_up_at:
                return True
            self._killed = True
            self._kill_at = now + _KILL_EVERY_S
            processes.signal_all(self._members(), signal.SIGKILL)
        return False

    def _ask_to_end(self) -> None:
        """SIGTERM, once to each: a second one makes many servers drop what they were finishing."""
        members = self._members()
        if any(process.group == self._pid for process in members):
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._pid, signal.SIGTERM)
        elsewhere = [process for process in members if process.group != self._pid]
        processes.signal_all(elsewhere, signal.SIGTERM)
        # A stopped process would see the signal only after it was continued.
        processes.signal_all(members, signal.SIGCONT)

    def _grace(self) -> float:
        """Seconds between SIGTERM and SIGKILL: the stop's own, or the launch's.

        An engine that ended by itself has nothing to finish; what it left gets two seconds.
        """
        if not self._stop_wanted:
            return min(self._grace_s, 2.0)
        try:
            with open(os.path.join(self._folder, STOP), "rb") as file:
                return float(json.load(file)["grace_s"])
        except (OSError, ValueError, KeyError):
            return self._grace_s

    def _wait_ms(self) -> float | None:
        due = [1000.0] if self._unwritten else []
        if self._kill_at is not None:
            due.append(max(0.0, self._kill_at - time.monotonic()) * 1000 + 1)
        return min(due) if due else None

    def _end(self) -> dict[str, object]:
        return {
            "code": "exited",
            "status": self._status,
            "last_line": self._writer.last_line(() if self._was_ready else self._telling),
            "was_ready": self._was_ready,
            "killed": self._killed,
            "survivors": [process.pid for process in self._members()],
        }

    def _tell(self, name: str, content: dict[str, object]) -> None:
        """Writes one of our files, then wakes the agent, which may be there or not."""
        self._unwritten[name] = {"launch": self._launch, "at": time.time(), **content}
        self._write_again()
        deadline = time.monotonic() + _GIVE_UP_S
        # After the end there is no later try: wait for the disk a while, then let the agent find
        # a launcher that is gone without a word.
        while name == EXIT and self._unwritten and time.monotonic() < deadline:
            time.sleep(0.1)
            self._write_again()

    def _write_again(self) -> None:
        for name, content in list(self._unwritten.items()):
            try:
                write_whole(self._folder, name, json.dumps(content).encode())
            except OSError:
                continue
            del self._unwritten[name]
            self._send(name)

    def _send(self, name: str) -> None:
        """One datagram: which launch has news. The news is in the files, so losing it costs time."""
        message = json.dumps({"launch": self._launch, "file": name}).encode()
        with contextlib.suppress(OSError):
            folder = os.open(os.path.dirname(self._notify), os.O_PATH | os.O_DIRECTORY)
            try:
                # A socket's address holds 107 bytes; a data folder may lie deeper than that.
                address = f"/proc/self/fd/{folder}/{os.path.basename(self._notify)}"
                with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as agent:
                    agent.setblocking(False)
                    agent.sendto(message, address)
            finally:
                os.close(folder)


def boot_id() -> str:
    """Names this boot of the machine; process ids and start times mean nothing across it."""
    try:
        with open("/proc/sys/kernel/random/boot_id") as file:
            return file.read().strip()
    except OSError:
        return ""
