"""The launcher that waits for its launch: it is used, replaced, and never the reason why nothing starts."""

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from nodeagent import launching, processes
from nodeagent.drivers.driver import EngineStart
from nodeagent.launchhandle import LaunchHandle
from nodeagent.launching import Running
from nodeagent.spare import Spare
from tests.support.aio import run, until
from tests.support.launches import REPLICA, launcher

WAITS = EngineStart(
    argv=(sys.executable, "-I", "-S", "-c", "import signal; signal.pause()"),
    environment={**os.environ},
    endpoint="",
    port=1,
    ready="probe",
    paths=(),
    has_key=False,
)


def waiting() -> list[int]:
    """Children of this process that lead a session of their own."""
    found = [processes.look(int(n)) for n in os.listdir("/proc") if n.isdigit()]
    return [
        p.pid for p in found if p and p.alive and p.parent == os.getpid() and p.session == p.pid
    ]


async def begun(made: launching.Launcher, replica: str = REPLICA) -> Running:
    found = await made.start(replica, WAITS, grace_s=1.0, log_bytes=1 << 20)
    assert isinstance(found, Running), found
    return found


def test_a_launcher_waits_and_takes_the_next_launch(tmp_path: Path) -> None:
    async def story() -> None:
        before = set(waiting())
        async with launcher(tmp_path) as made:
            (spare,) = set(waiting()) - before
            running = await begun(made)
            assert running.launcher_pid == spare
            # The environment it was started with is not the engine's.
            assert processes.mark_of(running.pid) == (REPLICA, str(tmp_path / "replicas" / REPLICA))
            assert processes.mark_of(spare) is None

    run(story())


def test_one_that_died_is_replaced_at_the_start_itself(tmp_path: Path) -> None:
    async def story() -> None:
        before = set(waiting())
        async with launcher(tmp_path) as made:
            (spare,) = set(waiting()) - before
            os.kill(spare, signal.SIGKILL)
            await until(lambda: spare not in waiting(), "its end")
            assert (await begun(made)).launcher_pid != spare

    run(story())


def test_the_next_one_waits_again_after_a_while(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(launching, "_SPARE_AFTER_S", 0.05)

    async def story() -> None:
        before = set(waiting())
        made = launching.Launcher(tmp_path / "replicas", tmp_path / "agent.sock", watch_s=0.05)
        await made.open()
        first = await begun(made)
        await until(lambda: len(set(waiting()) - before) == 2, "another launcher")
        (spare,) = set(waiting()) - before - {first.launcher_pid}
        second = await begun(made, f"{REPLICA}-2")
        assert second.launcher_pid == spare
        for replica in (REPLICA, f"{REPLICA}-2"):
            await made.stop(replica, 1.0)
        await made.close()
        await until(lambda: set(waiting()) <= before, "the end of all of them")

    run(story())


def test_it_ends_with_its_agent(tmp_path: Path) -> None:
    code = (
        "import os, sys; from pathlib import Path; from nodeagent.spare import Spare;"
        f"spare = Spare(Path({str(tmp_path)!r}), hurry=False); print(spare.pid, flush=True);"
        "sys.stdin.read()"
    )
    with subprocess.Popen(
        [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as agent:
        assert agent.stdout is not None
        spare = int(agent.stdout.readline())
        found = processes.look(spare)
        assert found is not None
        agent.kill()

    async def story() -> None:
        await until(lambda: not processes.is_same(spare, found.start_time), "the spare's end")

    run(story())


DIES = {
    "before the folder": "LaunchHandle.describe = die",
    "with a launcher in reserve and the lock held": "Spare.give = die",
    "with a launcher made in haste": "Launcher._keep_a_spare = lambda self: None; Spare.give = die",
    "once it is handed over": "socket.send_fds = then_die",
}
"""Moments of a start at which an agent is killed, and what makes it kill itself there."""

AGENT = """
import asyncio, os, signal, socket, sys
from pathlib import Path
from nodeagent.launchhandle import LaunchHandle
from nodeagent.launching import Launcher
from nodeagent.spare import Spare
from tests.integration.test_launcher_spare import WAITS

send = socket.send_fds

def die(*args, **fields):
    os.kill(os.getpid(), signal.SIGKILL)

def then_die(*args):
    send(*args)
    die()

async def work(root, replica):
    made = Launcher(root / "replicas", root / "agent.sock")
    await made.open()
    {dies}
    await made.start(replica, WAITS, grace_s=1.0, log_bytes=1 << 20)

asyncio.run(work(Path(sys.argv[1]), sys.argv[2]))
"""


def of_folder(folder: Path) -> list[int]:
    """Processes that were started with this folder in their words, launchers of any age."""
    found: list[int] = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with contextlib.suppress(OSError):
                if os.fsencode(folder) in (entry / "cmdline").read_bytes():
                    found.append(int(entry.name))
    return found


@pytest.mark.parametrize("moment", DIES)
def test_an_agent_killed_in_a_start_leaves_no_launcher_that_nobody_would_find(
    tmp_path: Path, moment: str
) -> None:
    """One that was given nothing ends by itself; one that has its launch is found by its lock."""

    async def story() -> None:
        code = AGENT.replace("{dies}", DIES[moment])
        words = [sys.executable, "-c", code, str(tmp_path), REPLICA]
        agent = await asyncio.create_subprocess_exec(*words)
        assert await agent.wait() == -signal.SIGKILL
        has_launch = moment == "once it is handed over"
        if not has_launch:
            await until(lambda: not of_folder(tmp_path), "launchers without a launch to end")
        async with launcher(tmp_path) as made:
            found = await made.adopt(REPLICA)
            assert isinstance(found, Running) == has_launch, found
            if has_launch:
                assert (await made.stop(REPLICA, 1.0)).survivors == ()
        await until(lambda: not of_folder(tmp_path), "every launcher to end")

    run(story())


@pytest.mark.parametrize("hurry", [True, False])
def test_a_launch_that_lay_too_long_is_not_begun(
    tmp_path: Path, hurry: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whoever asked may have told the log already that nothing runs under this id."""
    spare = Spare(tmp_path, hurry=hurry)
    now = time.monotonic()
    monkeypatch.setattr(time, "monotonic", lambda: now - 6.0)
    engine = ("/bin/sh", "-c", f"touch {tmp_path / 'began'}")
    lock = os.open(tmp_path / "lock", os.O_RDWR | os.O_CREAT)
    try:
        spare.give(tmp_path, "probe", engine, {"A": "b"}, lock=lock, output=lock)
    finally:
        os.close(lock)
    monkeypatch.undo()

    async def story() -> None:
        await until(lambda: not spare.alive(), "its end")

    run(story())
    assert not (tmp_path / "began").exists()


def test_a_launcher_nobody_knows_yet_is_found_by_the_lock_it_holds(tmp_path: Path) -> None:
    """Else one that hangs before its first word would start an engine after its launch was given up."""
    lock = tmp_path / processes.LOCK
    lock.touch()
    mark = processes.Mark(REPLICA, str(tmp_path))

    def found(launcher: int) -> list[int]:
        members = processes.members(
            mark, launcher=launcher, group=0, since=0, launcher_alive=launcher != 0
        )
        return [process.pid for process in members]

    with lock.open("rb") as held:
        code = "import signal; signal.pause()"
        child = subprocess.Popen([sys.executable, "-I", "-S", "-c", code], stdin=held)
    try:
        assert found(0) == [child.pid]
        assert found(child.pid) == []
    finally:
        child.kill()
        child.wait()
    assert found(0) == []


def test_an_environment_of_any_size_reaches_the_engine(tmp_path: Path) -> None:
    """The socket between agent and launcher holds less than an environment may."""

    async def story() -> None:
        async with launcher(tmp_path) as made:
            big = "x" * 100_000
            names = [f"BIG{n}" for n in range(5)]
            argv = ("/bin/sh", "-c", 'echo "${#BIG0} ${#BIG4} $ODD"; exec sleep 60')
            environment = {**os.environ, **dict.fromkeys(names, big), "ODD": "a=b\udcff"}
            start = EngineStart(
                argv=argv,
                environment=environment,
                endpoint="",
                port=1,
                ready="probe",
                paths=(),
                has_key=False,
            )
            assert isinstance(
                await made.start(REPLICA, start, grace_s=1.0, log_bytes=1 << 20), Running
            )

            async def printed() -> bool:
                return "100000 100000 a=b" in (await made.read_log(REPLICA)).text

            await until(printed, "what the engine was given")

    run(story())


def test_no_spare_is_no_reason_not_to_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made_spares = 0
    real = Spare.__init__

    def none_in_reserve(self: Spare, root: Path, *, hurry: bool) -> None:
        nonlocal made_spares
        if not hurry:
            raise OSError("no process left")
        made_spares += 1
        real(self, root, hurry=hurry)

    monkeypatch.setattr(Spare, "__init__", none_in_reserve)

    async def story() -> None:
        async with launcher(tmp_path) as made:
            await asyncio.sleep(0)
            await begun(made)
            assert made_spares == 1

    run(story())


def test_one_that_cannot_be_handed_its_launch_is_ended_and_collected(tmp_path: Path) -> None:
    spare = Spare(tmp_path, hurry=False)
    launch = LaunchHandle(REPLICA, tmp_path / "no folder")
    with pytest.raises(OSError, match="no folder"):
        launch.spawn(WAITS, spare, lambda: None)
    with pytest.raises(ChildProcessError):
        os.waitpid(spare.pid, os.WNOHANG)
