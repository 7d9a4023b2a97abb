"""Takes one look at all processes of the machine and says which belong to whom: to a launch, to a named lease.

One look for all of them: /proc is long. It must not decide what follows for anybody.
"""

import os
from collections.abc import Iterable, Mapping
from typing import NamedTuple

from nodeagent import processes
from nodeagent.keeper import boot_id
from nodeagent.processes import Process, Where
from schemas.card import ProcessRef

LEASE_ID = "YARD_LEASE"
"""The variable that marks a process as one under the named lease of this id, wherever it was started."""


class Census(NamedTuple):
    """The live processes, and by launch and by named lease the pids that belong to it (nobody: empty)."""

    processes: Mapping[int, Process]
    launches: Mapping[str, frozenset[int]]
    leases: Mapping[str, frozenset[int]]


def take(launches: Mapping[str, Where], leases: Mapping[str, ProcessRef | None]) -> Census:
    """Looks once; blocks for some milliseconds.

    A process is under a named lease when it or an ancestor is the lease's own process, or when it
    carries the lease's id in its environment.
    """
    found: dict[int, Process] = {}
    carried: dict[int, processes.Marks] = {}
    for name in os.listdir("/proc"):
        if not name.isdigit():
            continue
        process = processes.look(int(name))
        if process is None or not process.alive or process.pid == os.getpid():
            continue
        found[process.pid] = process
        carried[process.pid] = processes.marks_of(process.pid, LEASE_ID)
    by_launch = {
        launch: frozenset(
            process.pid
            for process in found.values()
            if processes.belongs(process, carried[process.pid].mark, where)
        )
        for launch, where in launches.items()
    }
    return Census(found, by_launch, _under(leases, found, carried))


def _under(
    leases: Mapping[str, ProcessRef | None],
    found: Mapping[int, Process],
    carried: Mapping[int, processes.Marks],
) -> dict[str, frozenset[int]]:
    if not leases:
        return {}
    children: dict[int, list[int]] = {}
    marked: dict[str, list[int]] = {}
    for process in found.values():
        children.setdefault(process.parent, []).append(process.pid)
        if carried[process.pid].other:
            marked.setdefault(carried[process.pid].other, []).append(process.pid)
    under: dict[str, frozenset[int]] = {}
    for lease, ref in leases.items():
        roots = list(marked.get(lease, ()))
        if ref is not None and is_that(ref, found.get(ref.pid)):
            roots.append(ref.pid)
        under[lease] = _with_descendants(roots, children)
    return under


def is_that(ref: ProcessRef, process: Process | None) -> bool:
    """Whether a live process is the very one `ref` names and no later one with its number."""
    return process is not None and process.start_time == ref.started and ref.boot == boot_id()


def _with_descendants(roots: Iterable[int], children: Mapping[int, list[int]]) -> frozenset[int]:
    seen: set[int] = set()
    waiting = list(roots)
    while waiting:
        pid = waiting.pop()
        if pid not in seen:
            seen.add(pid)
            waiting.extend(children.get(pid, ()))
    return frozenset(seen)
