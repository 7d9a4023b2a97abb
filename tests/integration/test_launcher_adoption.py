"""An agent that is killed leaves its engines to the next one, which adopts each or ends it."""

import asyncio
import json
import os
import signal
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from nodeagent import processes
from nodeagent.drivers.driver import EngineStart
from nodeagent.keeper import boot_id
from nodeagent.launching import Ended, LaunchEnded, Launcher, LaunchReady, Running
from tests.support.aio import run, until
from tests.support.launches import REPLICA

ROOT = Path(__file__).parents[2]

AGENT = """
import asyncio, json, os, sys
from pathlib import Path
from nodeagent.drivers.driver import EngineStart
from nodeagent.launching import Launcher

async def main():
    folder, code, ready = Path(sys.argv[1]), sys.argv[2], sys.argv[3]
    made = Launcher(folder / "replicas", folder / "agent.sock")
    await made.open()
    start = EngineStart(argv=(sys.executable, "-I", "-S", "-u", "-c", code),
        environment=dict(os.environ), endpoint="", port=1, ready=ready, paths=(), has_key=False)
    running = await made.start(sys.argv[4], start, grace_s=5.0, log_bytes=1 << 20)
    print(json.dumps([running.pid, running.start_time, running.launcher_pid]), flush=True)
    await asyncio.Event().wait()

asyncio.run(main())
"""

WAITS = "import signal; print('here'); signal.pause()"
READY_LATER = """
import os, signal
released = os.open(os.environ["GATE"], os.O_RDONLY)  # waits until the test opens the other end
os.write(int(os.environ["YARD_READY_FD"]), b"ready")
signal.pause()
"""


def killed_agent(folder: Path, code: str, ready: str = "probe", **env: str) -> tuple[int, int, int]:
    """Starts an engine by an agent in a process of its own and kills that with -9: pid, start time
    and launcher pid of what it left."""
    with subprocess.Popen(
        [sys.executable, "-c", AGENT, str(folder), textwrap.dedent(code), ready, REPLICA],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        env={**os.environ, **env},
    ) as agent:
        assert agent.stdout is not None
        line = agent.stdout.readline()
        agent.kill()
        agent.wait()
    pid, start_time, launcher_pid = json.loads(line)
    return pid, start_time, launcher_pid


async def event_of(made: Launcher) -> LaunchReady | LaunchEnded:
    return await asyncio.wait_for(made.events.get(), 10.0)


async def open_launcher(folder: Path, watch_s: float = 2.0) -> Launcher:
    made = Launcher(folder / "replicas", folder / "agent.sock", watch_s=watch_s)
    await made.open()
    return made


def test_scn_a10_an_engine_of_a_killed_agent_is_adopted(tmp_path: Path) -> None:
    """One owner: the same process goes on, its end is told to the new agent, and it can stop it."""
    pid, start_time, launcher_pid = killed_agent(tmp_path, WAITS)

    async def story() -> None:
        assert processes.is_same(pid, start_time)
        made = await open_launcher(tmp_path)
        assert made.found() == (REPLICA,)
        running = await made.adopt(REPLICA)
        assert isinstance(running, Running)
        assert (running.pid, running.start_time, running.launcher_pid) == (
            pid,
            start_time,
            launcher_pid,
        )
        assert not running.ready
        assert await made.survivors(REPLICA) == (pid,)
        result = await made.stop(REPLICA, 5.0)
        assert (result.exit_status, result.survivors) == (-15, ())
        assert not processes.is_same(pid, start_time)
        assert made.events.empty()
        await made.close()

    run(story())


def test_log_19_an_agent_killed_in_the_middle_of_a_load_hears_ready_after_adoption(
    tmp_path: Path,
) -> None:
    gate = tmp_path / "gate"
    os.mkfifo(gate)
    pid, start_time, _ = killed_agent(tmp_path, READY_LATER, "pipe", GATE=str(gate))

    async def story() -> None:
        made = await open_launcher(tmp_path)
        running = await made.adopt(REPLICA)
        assert isinstance(running, Running)
        assert (running.pid, running.start_time, running.ready) == (pid, start_time, False)
        os.close(os.open(gate, os.O_WRONLY))
        event = await event_of(made)
        assert isinstance(event, LaunchReady)
        assert event.load_s > 0
        await made.stop(REPLICA, 5.0)
        await made.close()

    run(story())


def test_log_19_ready_while_no_agent_lived_is_read_at_adoption(tmp_path: Path) -> None:
    gate = tmp_path / "gate"
    os.mkfifo(gate)
    killed_agent(tmp_path, READY_LATER, "pipe", GATE=str(gate))

    async def story() -> None:
        os.close(os.open(gate, os.O_WRONLY))
        ready = tmp_path / "replicas" / REPLICA / "ready.json"
        await until(ready.exists, "ready.json")
        made = await open_launcher(tmp_path)
        running = await made.adopt(REPLICA)
        assert isinstance(running, Running)
        assert running.ready
        assert running.load_s == json.loads(ready.read_bytes())["load_s"]
        assert made.events.empty()
        await made.stop(REPLICA, 5.0)
        await made.close()

    run(story())


def test_scn_a10_an_engine_that_ended_meanwhile_is_told_as_ended(tmp_path: Path) -> None:
    pid, _, _ = killed_agent(tmp_path, WAITS)

    async def story() -> None:
        folder = tmp_path / "replicas" / REPLICA
        await until(lambda: b"here" in (folder / "engine.log").read_bytes(), "its line")
        os.kill(pid, signal.SIGKILL)
        await until((folder / "exit.json").exists, "exit.json")
        made = await open_launcher(tmp_path)
        ended = await made.adopt(REPLICA)
        assert isinstance(ended, Ended)
        assert (ended.exit_status, ended.last_line, ended.code) == (-9, "here", "exited")
        assert made.events.empty()
        made.forget(REPLICA)
        assert made.found() == ()
        assert await made.adopt(REPLICA) is None
        await made.close()

    run(story())


FAMILY = """
import os, signal, sys
if os.fork() == 0:
    os.setsid()
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    print("child", os.getpid())
    while True: signal.pause()
signal.pause()
"""


def test_scn_a10_what_a_killed_launcher_left_is_ended_at_adoption(tmp_path: Path) -> None:
    """Agent and launcher are both killed: the engine died with the launcher, its child is found by
    the launch id in its environment."""
    pid, start_time, launcher_pid = killed_agent(tmp_path, FAMILY)

    async def story() -> None:
        log = tmp_path / "replicas" / REPLICA / "engine.log"
        await until(lambda: b"child" in log.read_bytes(), "the child")
        child = int(log.read_bytes().split()[1])
        os.kill(launcher_pid, signal.SIGKILL)
        await until(lambda: not processes.is_same(pid, start_time), "the engine's end")
        left = processes.look(child)
        assert left is not None
        assert left.alive
        made = await open_launcher(tmp_path)
        ended = await made.adopt(REPLICA)
        assert isinstance(ended, Ended)
        assert (ended.code, ended.exit_status, ended.survivors) == ("lost", None, ())
        left = processes.look(child)
        assert left is None or not left.alive
        await made.close()

    run(story())


@pytest.mark.parametrize("left", ["nothing", "folder", "description"])
def test_scn_a10_what_was_never_spawned_may_still_be_started(tmp_path: Path, left: str) -> None:
    """An agent killed between making the folder and spawning the launcher costs the start nothing."""

    async def story() -> None:
        folder = tmp_path / "replicas" / REPLICA
        if left != "nothing":
            folder.mkdir(parents=True)
        if left == "description":
            (folder / "launch.json").write_text(json.dumps({"launch": REPLICA}))
        made = await open_launcher(tmp_path)
        assert await made.adopt(REPLICA) is None
        start = EngineStart(
            argv=(sys.executable, "-I", "-S", "-c", WAITS),
            environment=dict(os.environ),
            endpoint="",
            port=1,
            ready="probe",
            paths=(),
            has_key=False,
        )
        begun = await made.start(REPLICA, start, grace_s=1.0, log_bytes=4096)
        assert isinstance(begun, Running)
        assert (await made.stop(REPLICA, 1.0)).survivors == ()
        await made.close()

    run(story())


def test_scn_a10_a_launch_that_left_no_word_is_lost_and_no_stranger_is_touched(
    tmp_path: Path,
) -> None:
    """The files name a process number that belongs to somebody else by now: to this test."""

    async def story() -> None:
        folder = tmp_path / "replicas" / REPLICA
        folder.mkdir(parents=True)
        (folder / "launch.json").write_text(json.dumps({"launch": REPLICA}))
        (folder / "lock").touch()
        made = await open_launcher(tmp_path)
        ended = await made.adopt(REPLICA)
        assert isinstance(ended, Ended)
        assert ended.code == "lost"
        await made.close()
        stranger = await asyncio.create_subprocess_exec(
            sys.executable, "-c", "import signal; signal.pause()", start_new_session=True
        )
        wrong = {
            "pid": stranger.pid,
            "pgid": stranger.pid,
            "start_time": 1,
            "launcher_pid": stranger.pid,
            "launcher_start_time": 1,
            "boot": boot_id(),
        }
        (folder / "running.json").write_text(json.dumps(wrong))
        made = await open_launcher(tmp_path)
        assert isinstance(await made.adopt(REPLICA), Ended)
        assert stranger.returncode is None
        found = processes.look(stranger.pid)
        assert found is not None
        assert found.alive
        stranger.kill()
        await stranger.wait()
        await made.close()

    run(story())


@pytest.mark.parametrize("lost", ["datagram", "pidfd"])
def test_req_x5_the_regular_look_finds_what_no_message_told(
    tmp_path: Path, lost: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is so is read from the files and the lock, not remembered from messages."""
    pid, _, _ = killed_agent(tmp_path, WAITS)

    async def story() -> None:
        made = await open_launcher(tmp_path, watch_s=0.05)
        if lost == "pidfd":
            monkeypatch.setattr(os, "pidfd_open", _no_pidfds)
        assert isinstance(await made.adopt(REPLICA), Running)
        (tmp_path / "agent.sock").unlink()
        os.kill(pid, signal.SIGKILL)
        event = await event_of(made)
        assert isinstance(event, LaunchEnded)
        assert event.exit_status == -9
        await made.close()

    run(story())


def _no_pidfds(*_: object) -> int:
    raise OSError("no pidfds here")


def test_datagrams_reach_an_agent_in_a_deep_folder(tmp_path: Path) -> None:
    """A socket's address may hold 107 bytes; a data folder may lie deeper."""

    async def story() -> None:
        deep = tmp_path / ("d" * 100) / ("e" * 100)
        deep.mkdir(parents=True)
        pid, _, _ = killed_agent(deep, WAITS)
        # The regular look is out of the way: only a datagram or the pidfd can tell.
        made = await open_launcher(deep, watch_s=3600.0)
        assert isinstance(await made.adopt(REPLICA), Running)
        os.kill(pid, signal.SIGKILL)
        assert isinstance(await event_of(made), LaunchEnded)
        await made.close()

    run(story())
