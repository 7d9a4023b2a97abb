"""One look at all processes: which are under a launch, which under a named lease."""

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from nodeagent import census, processes
from nodeagent.keeper import boot_id
from schemas.card import ProcessRef

WAITS = "import signal; print('here', flush=True); signal.pause()"
FORKS = """
import os, signal
if os.fork() == 0:
    os.setsid()
    print(os.getpid(), flush=True)
signal.pause()
"""


@contextmanager
def child(code: str = WAITS, **env: str) -> Iterator[tuple[int, str]]:
    """A Python process and the first line it printed; its own session, which is ended whole."""
    with subprocess.Popen(
        [sys.executable, "-I", "-S", "-c", code],
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, **env},
    ) as process:
        assert process.stdout is not None
        line = process.stdout.readline().strip()
        try:
            yield process.pid, line
        finally:
            process.kill()
            if line.isdecimal():
                os.kill(int(line), 9)


def ref(pid: int, shift: int = 0, boot: str = "") -> ProcessRef:
    found = processes.look(pid)
    assert found is not None
    return ProcessRef(pid=pid, started=found.start_time + shift, boot=boot or boot_id())


def test_a_named_lease_has_its_process_and_all_that_came_of_it() -> None:
    with child(FORKS) as (pid, grandchild):
        seen = census.take({}, {"l-1": ref(pid)})
        assert seen.leases == {"l-1": frozenset((pid, int(grandchild)))}
        assert {pid, int(grandchild)} <= set(seen.processes)


def test_a_named_lease_has_who_carries_its_id_wherever_it_was_started() -> None:
    with child(**{census.LEASE_ID: "l-1"}) as (pid, _):
        seen = census.take({}, {"l-1": None, "l-2": None})
        assert seen.leases == {"l-1": frozenset((pid,)), "l-2": frozenset()}


def test_another_process_with_the_number_of_a_leases_is_not_its() -> None:
    with child() as (pid, _):
        later, elsewhere = ref(pid, shift=1), ref(pid, boot="another boot")
        seen = census.take({}, {"l-1": later, "l-2": elsewhere})
        assert seen.leases == {"l-1": frozenset(), "l-2": frozenset()}


def test_launches_are_told_apart_in_the_same_look(tmp_path: Path) -> None:
    def place(launch: str) -> processes.Where:
        mark = processes.Mark(launch, str(tmp_path))
        return processes.where(mark, launcher=1, group=0, since=0, launcher_alive=False)

    def marked(launch: str) -> dict[str, str]:
        return {processes.LAUNCH_ID: launch, processes.LAUNCH_DIR: str(tmp_path)}

    with child(**marked("r-1")) as (first, _), child(**marked("r-2")) as (second, _):
        seen = census.take({"r-1": place("r-1"), "r-2": place("r-2")}, {})
        assert seen.launches == {"r-1": frozenset((first,)), "r-2": frozenset((second,))}
