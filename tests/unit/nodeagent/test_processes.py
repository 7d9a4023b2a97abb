"""What /proc tells of processes: odd names, zombies, marks, memory that is shared."""

import mmap
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from nodeagent import processes
from nodeagent.processes import Mark

SLEEP = "import signal, sys; print('here', flush=True); signal.pause()"


@contextmanager
def child(code: str = SLEEP, *, group: bool = False, **env: str) -> Iterator[processes.Process]:
    """A Python process that has printed a line, in a group of its own with `group`."""
    with subprocess.Popen(
        [sys.executable, "-I", "-S", "-c", code],
        stdout=subprocess.PIPE,
        env={**os.environ, **env},
        process_group=0 if group else None,
    ) as process:
        assert process.stdout is not None
        process.stdout.readline()
        found = processes.look(process.pid)
        assert found is not None
        try:
            yield found
        finally:
            process.kill()


def marked(mark: Mark) -> dict[str, str]:
    return {processes.LAUNCH_ID: mark.launch, processes.LAUNCH_DIR: mark.folder}


def found_as(mark: Mark, *, group: int = 0, since: int = 0, launcher: int = 0) -> set[int]:
    found = processes.members(
        mark, launcher=launcher, group=group, since=since, launcher_alive=launcher > 0
    )
    return {process.pid for process in found}


def test_a_name_with_parentheses_and_spaces_does_not_shift_the_fields() -> None:
    odd = (
        "open('/proc/self/comm', 'w').write('a) R 1 (b'); import signal; print(flush=True)\n"
        "signal.pause()"
    )
    with child(odd) as process:
        assert process.parent == os.getpid()
        assert process.alive


def test_there_is_nothing_to_see_of_a_process_that_is_not_there() -> None:
    assert processes.look(2**22 + 1) is None
    assert processes.mark_of(2**22 + 1) is None
    assert not processes.is_same(2**22 + 1, 1)


def test_a_zombie_counts_as_dead() -> None:
    pid = os.fork()
    if pid == 0:
        os._exit(0)
    os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
    process = processes.look(pid)
    assert process is not None
    assert process.state == "Z"
    assert not process.alive
    assert processes.memory_bytes([process]) == 0
    os.waitpid(pid, 0)


def test_is_same_is_false_for_another_process_of_that_number() -> None:
    with child() as process:
        assert processes.is_same(process.pid, process.start_time)
        assert not processes.is_same(process.pid, process.start_time - 1)


def test_a_marked_process_is_found_in_whatever_group_and_only_by_its_whole_mark(
    tmp_path: Path,
) -> None:
    mark = Mark("r-mark", str(tmp_path))
    with child(group=True, **marked(mark)) as process:
        assert processes.mark_of(process.pid) == mark
        assert found_as(mark) == {process.pid}
        assert found_as(Mark("r-mark", "/elsewhere")) == set()
        assert found_as(Mark("r-other", str(tmp_path))) == set()
        # One that began before the engine is none of its processes, whatever it says.
        assert found_as(mark, since=process.start_time + 1) == set()


def test_a_group_whose_number_was_taken_by_a_stranger_is_not_ours(tmp_path: Path) -> None:
    mark = Mark("r-group", str(tmp_path))
    with child(group=True) as process:
        assert found_as(mark, group=process.group, since=process.start_time) == {process.pid}
        assert found_as(mark, group=process.group, since=process.start_time - 1) == set()


def test_no_group_at_all_is_nobody(tmp_path: Path) -> None:
    """Group 0 is that of the kernel's threads."""
    assert found_as(Mark("r-none", str(tmp_path)), group=0) == set()


def test_memory_shared_by_two_is_counted_once(tmp_path: Path) -> None:
    size = 32 << 20
    with (tmp_path / "weights").open("w+b") as file:
        file.truncate(size)
        with mmap.mmap(file.fileno(), size) as weights:
            for page in range(0, size, mmap.PAGESIZE):
                weights[page] = 1
        code = f"""
import mmap, signal
file = open({str(tmp_path / "weights")!r}, "r+b")
held = mmap.mmap(file.fileno(), {size})
sum(held[page] for page in range(0, {size}, 4096))
print(flush=True)
signal.pause()
"""
        with child(code) as one:
            alone = processes.memory_bytes([one])
            assert alone > size
            with child(code) as two:
                together = processes.memory_bytes([one, two])
                assert together < alone + size // 2


def test_a_signal_does_not_reach_a_process_that_took_the_number() -> None:
    with child() as process:
        processes.signal_all([process._replace(start_time=1)], signal.SIGKILL)
        assert processes.is_same(process.pid, process.start_time)
        processes.signal_all([process], signal.SIGKILL)
        os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
        assert not processes.is_same(process.pid, process.start_time)
    processes.signal_all([process], signal.SIGKILL)
