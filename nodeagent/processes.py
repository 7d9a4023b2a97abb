"""Reads from /proc which processes belong to a launch, whether they live and what memory they use.

It must import the standard library only, and little of it: the launcher uses it too. It must not
decide when to signal; it only knows how to reach every process of a launch.
"""

import os
from collections.abc import Iterable
from typing import NamedTuple

LAUNCH_ID = "YARD_LAUNCH_ID"
LAUNCH_DIR = "YARD_LAUNCH_DIR"
"""The two variables that mark every process of a launch, whatever group it moved to. The folder tells
launches of two yards on one machine apart, whatever their ids are."""

LOCK = "lock"
"""The file in a launch's folder that is locked from before it is handed to a launcher until the
launcher's end, by an open file that goes with the launch and becomes the launcher's descriptor 0: so
whoever can lock it knows that no launcher lives, without trusting any process number."""

_DEAD = "ZXx"


class Process(NamedTuple):
    """One line of /proc/PID/stat. `start_time` is in clock ticks since boot."""

    pid: int
    state: str
    parent: int
    group: int
    session: int
    start_time: int

    @property
    def alive(self) -> bool:
        """A zombie holds nothing any more and counts as dead."""
        return self.state not in _DEAD


def look(pid: int) -> Process | None:
    """The process, None when there is none (or it vanished while being read)."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            line = file.read()
    except OSError:
        return None
    # The name is in parentheses and may hold anything, parentheses too: read after the last one.
    fields = line[line.rfind(b")") + 2 :].split()
    if len(fields) < 20:
        return None
    return Process(
        pid,
        fields[0].decode(),
        int(fields[1]),
        int(fields[2]),
        int(fields[3]),
        int(fields[19]),
    )


class Mark(NamedTuple):
    """Which launch a process says it belongs to."""

    launch: str
    folder: str


def mark_of(pid: int) -> Mark | None:
    """The mark in the environment of `pid`; None when it has none or may not be read."""
    try:
        with open(f"/proc/{pid}/environ", "rb") as file:
            environ = file.read()
    except OSError:
        return None
    found: dict[bytes, str] = {}
    for entry in environ.split(b"\0"):
        name, _, value = entry.partition(b"=")
        found.setdefault(name, os.fsdecode(value))
    launch = found.get(LAUNCH_ID.encode())
    return None if launch is None else Mark(launch, found.get(LAUNCH_DIR.encode(), ""))


def is_same(pid: int, start_time: int) -> bool:
    """Whether the live process `pid` is the one that started at `start_time`."""
    found = look(pid)
    return found is not None and found.alive and found.start_time == start_time


def members(
    mark: Mark, *, launcher: int, group: int, since: int, launcher_alive: bool
) -> tuple[Process, ...]:
    """The live processes of a launch, the launcher itself excluded, by pid.

    A process belongs to it when
    1. it is in the launcher's session and the launcher lives: its number cannot be taken by others;
    2. it is in the engine's group, began no earlier than the engine (`since`, clock ticks) and does
       not carry another launch's mark: an engine that rewrites its title loses its environment, so
       that cannot be asked for;
    3. it carries the launch's mark, whatever session and group it moved to;
    4. it is a launcher that holds the launch's lock, while it is not known who that is (`launcher` 0):
       one that waited for a launch was started without a mark.
    The group's number may be taken by a stranger once everyone of the group has gone; its leader
    then began later than the engine, and the group is not ours.
    """
    leader = look(group)
    # Group 0 is that of the kernel's own threads and of processes from outside this namespace.
    ours = group > 0 and (leader is None or leader.start_time == since)
    found: list[Process] = []
    for name in os.listdir("/proc"):
        if not name.isdigit():
            continue
        process = look(int(name))
        if process is None or not process.alive or process.pid in (launcher, os.getpid()):
            continue
        if process.start_time < since:
            continue
        if launcher_alive and process.session == launcher:
            found.append(process)
            continue
        if launcher == 0 and _holds(process.pid, mark.folder):
            found.append(process)
            continue
        carried = mark_of(process.pid)
        if carried == mark or (carried is None and ours and process.group == group):
            found.append(process)
    return tuple(sorted(found))


def _holds(pid: int, folder: str) -> bool:
    """Whether a process has the lock of the launch in `folder` where launchers have it."""
    try:
        return os.readlink(f"/proc/{pid}/fd/0") == f"{folder}/{LOCK}"
    except OSError:
        return False


def signal_all(processes: Iterable[Process], number: int) -> None:
    """Signals each process, unless it ended since it was seen.

    A pidfd makes look-and-signal one step: a number that was taken by another in between is not hit.
    """
    # Imported late: the launcher needs this only when it stops something.
    import signal

    for process in processes:
        try:
            handle = os.pidfd_open(process.pid)
        except ProcessLookupError:
            continue
        except OSError:
            # A kernel without pidfds: the window between look and signal is all that is lost.
            if is_same(process.pid, process.start_time):
                _kill(process.pid, number)
            continue
        try:
            if is_same(process.pid, process.start_time):
                signal.pidfd_send_signal(handle, number)
        except (ProcessLookupError, PermissionError):
            pass
        finally:
            os.close(handle)


def _kill(pid: int, number: int) -> None:
    try:
        os.kill(pid, number)
    except (ProcessLookupError, PermissionError):
        return


def memory_bytes(processes: Iterable[Process]) -> int:
    """Proportional set size of these processes together, in bytes.

    PSS divides what processes share among them, so a model file mapped by two is counted once.
    A process that ends while being read counts as 0.
    """
    return sum(_memory_bytes(process.pid) for process in processes)


def _memory_bytes(pid: int) -> int:
    try:
        with open(f"/proc/{pid}/smaps_rollup", "rb") as file:
            for line in file:
                if line.startswith(b"Pss:"):
                    return int(line.split()[1]) * 1024
        return 0
    except ProcessLookupError:
        return 0
    except OSError:
        return _resident_bytes(pid)


def _resident_bytes(pid: int) -> int:
    """For a process whose PSS may not be read: what it has resident, shared pages in full."""
    try:
        with open(f"/proc/{pid}/statm", "rb") as file:
            return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except (OSError, IndexError):
        return 0
