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


class Marks(NamedTuple):
    """What the environment of a process says: its launch, and the value of one more variable."""

    mark: Mark | None
    other: str


def mark_of(pid: int) -> Mark | None:
    """The mark in the environment of `pid`; None when it has none or may not be read."""
    return marks_of(pid, "").mark


def marks_of(pid: int, other: str) -> Marks:
    """The launch's mark and the variable `other` in the environment of `pid`, read in one go."""
    try:
        with open(f"/proc/{pid}/environ", "rb") as file:
            environ = file.read()
    except OSError:
        return Marks(None, "")
    found: dict[bytes, str] = {}
    for entry in environ.split(b"\0"):
        name, _, value = entry.partition(b"=")
        found.setdefault(name, os.fsdecode(value))
    launch = found.get(LAUNCH_ID.encode())
    mark = None if launch is None else Mark(launch, found.get(LAUNCH_DIR.encode(), ""))
    return Marks(mark, found.get(other.encode(), "") if other else "")


def is_same(pid: int, start_time: int) -> bool:
    """Whether the live process `pid` is the one that started at `start_time`."""
    found = look(pid)
    return found is not None and found.alive and found.start_time == start_time


class Where(NamedTuple):
    """Where the processes of one launch are found; see `belongs`."""

    mark: Mark
    launcher: int
    launcher_alive: bool
    group: int
    since: int


def where(mark: Mark, *, launcher: int, group: int, since: int, launcher_alive: bool) -> Where:
    """The place of a launch as things are now; `group` 0 when that number is nobody's of the launch.

    The group's number may be taken by a stranger once everyone of the group has gone; its leader
    then began later than the engine, and the group is not ours.
    """
    leader = look(group)
    # Group 0 is that of the kernel's own threads and of processes from outside this namespace.
    ours = group > 0 and (leader is None or leader.start_time == since)
    return Where(mark, launcher, launcher_alive, group if ours else 0, since)


def belongs(process: Process, carried: Mark | None, place: Where) -> bool:
    """Whether a live process, which carries this mark, is of the launch at `place`: it is when

    1. it is in the launcher's session and the launcher lives: its number cannot be taken by others;
    2. it is in the engine's group, began no earlier than the engine (`since`, clock ticks) and does
       not carry another launch's mark: an engine that rewrites its title loses its environment, so
       that cannot be asked for;
    3. it carries the launch's mark, whatever session and group it moved to;
    4. it is a launcher that holds the launch's lock, while it is not known who that is (`launcher` 0):
       one that waited for a launch was started without a mark.
    The launcher itself is none of them, nor is who began before the engine.
    """
    if process.pid == place.launcher or process.start_time < place.since:
        return False
    if place.launcher_alive and process.session == place.launcher:  # 1
        return True
    if place.launcher == 0 and _holds(process.pid, place.mark.folder):  # 4
        return True
    in_group = place.group > 0 and process.group == place.group
    return carried == place.mark or (carried is None and in_group)  # 3, 2


def members(
    mark: Mark, *, launcher: int, group: int, since: int, launcher_alive: bool
) -> tuple[Process, ...]:
    """The live processes of a launch, the launcher itself excluded, by pid."""
    return members_at(
        where(mark, launcher=launcher, group=group, since=since, launcher_alive=launcher_alive)
    )


def members_at(place: Where) -> tuple[Process, ...]:
    """As `members`, for a place known already."""
    found: list[Process] = []
    for name in os.listdir("/proc"):
        if not name.isdigit():
            continue
        process = look(int(name))
        if process is None or not process.alive or process.pid == os.getpid():
            continue
        if belongs(process, mark_of(process.pid), place):
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
    return sum(proportional_bytes(process.pid) for process in processes)


def proportional_bytes(pid: int) -> int:
    """The proportional set size of one process; 0 for one that is gone. It walks all its pages."""
    try:
        with open(f"/proc/{pid}/smaps_rollup", "rb") as file:
            for line in file:
                if line.startswith(b"Pss:"):
                    return int(line.split()[1]) * 1024
        return 0
    except ProcessLookupError:
        return 0
    except OSError:
        # Its PSS may not be read.
        return resident_bytes(pid)


def resident_bytes(pid: int) -> int:
    """What a process has resident, shared pages in full; 0 for one that is gone. It costs nothing."""
    try:
        with open(f"/proc/{pid}/statm", "rb") as file:
            return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except (OSError, IndexError):
        return 0
