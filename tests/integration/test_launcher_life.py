"""Engines under real launchers: started, ready, ended, stopped, adopted, and nothing left behind."""

import asyncio
import os
import signal
import sys
import textwrap
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from nodeagent import processes
from nodeagent.drivers.driver import EngineStart
from nodeagent.launching import (
    Ended,
    LaunchEnded,
    Launcher,
    LaunchEvent,
    LaunchFault,
    LaunchReady,
    Running,
)
from tests.support.aio import run, until


def engine(code: str, *, ready: str = "probe", **environment: str) -> EngineStart:
    """A tiny engine: a Python program given as text."""
    return EngineStart(
        argv=(sys.executable, "-I", "-S", "-u", "-c", textwrap.dedent(code)),
        environment={**os.environ, **environment},
        endpoint="http://127.0.0.1:1",
        port=1,
        ready="pipe" if ready == "pipe" else "probe",
        paths=(),
        has_key=False,
    )


SLEEPER = engine("import signal; print('here', flush=True); signal.pause()")
READY = """
import os, signal
os.write(int(os.environ["YARD_READY_FD"]), b"ready\\n")
signal.pause()
"""


@asynccontextmanager
async def launcher(folder: Path, **settings: float) -> AsyncIterator[Launcher]:
    made = Launcher(folder / "replicas", folder / "agent.sock", **settings)  # pyright: ignore[reportArgumentType]
    await made.open()
    try:
        yield made
    finally:
        for replica in made.found():
            if await made.adopt(replica) is not None:
                await made.stop(replica, 0.0)
        await made.close()


async def begin(made: Launcher, start: EngineStart, replica: str = "r-1", **kw: float) -> Running:
    found = await made.start(
        replica, start, grace_s=kw.get("grace_s", 5.0), log_bytes=int(kw.get("log_bytes", 1 << 20))
    )
    assert isinstance(found, Running), found
    return found


async def next_event(made: Launcher) -> LaunchEvent:
    return await asyncio.wait_for(made.events.get(), 10.0)


async def end_of(made: Launcher, start: EngineStart, **kw: float) -> Ended | LaunchEnded:
    """Starts an engine that ends by itself; it may have ended before `start` looked."""
    found = await made.start("r-1", start, grace_s=5.0, log_bytes=int(kw.get("log_bytes", 1 << 20)))
    if isinstance(found, Ended):
        return found
    event = await next_event(made)
    assert isinstance(event, LaunchEnded)
    return event


async def printed(made: Launcher, replica: str, word: str) -> str:
    async def there() -> bool:
        return word in (await made.read_log(replica)).text

    await until(there, f"{word!r} in the log of {replica}")
    return (await made.read_log(replica)).text


def test_start_runs_the_engine_in_its_own_group_under_a_launcher_of_its_own(tmp_path: Path) -> None:
    async def story() -> None:
        async with launcher(tmp_path) as made:
            running = await begin(made, SLEEPER)
            process = processes.look(running.pid)
            assert process is not None
            assert process.alive
            assert process.group == running.pid == running.pgid
            assert process.session == running.launcher_pid == process.parent
            assert process.start_time == running.start_time
            assert processes.launch_of(running.pid) == "r-1"
            assert await made.survivors("r-1") == (running.pid,)
            assert await made.memory_bytes("r-1") > 1_000_000

    run(story())


def test_ready_is_told_once_over_the_pipe(tmp_path: Path) -> None:
    async def story() -> None:
        async with launcher(tmp_path) as made:
            running = await begin(made, engine(READY, ready="pipe"))
            if not running.ready:
                event = await next_event(made)
                assert isinstance(event, LaunchReady)
                assert event.replica == "r-1"
                assert 0 < event.load_s < 10
            again = await made.adopt("r-1")
            assert isinstance(again, Running)
            assert again.ready
            assert again.load_s is not None
            assert made.events.empty()

    run(story())


def test_an_engine_that_ends_tells_its_status_and_last_line(tmp_path: Path) -> None:
    async def story() -> None:
        async with launcher(tmp_path) as made:
            code = """
            print("loading")
            print("\\x1b[31mno such tensor\\x1b[0m")
            raise SystemExit(3)
            """
            ended = await end_of(made, engine(code))
            assert (ended.exit_status, ended.last_line) == (3, "no such tensor")
            assert (ended.code, ended.was_ready, ended.survivors) == ("exited", False, ())
            part = await made.read_log("r-1", 0)
            assert part.text.startswith("loading\n")
            assert part.ended
            made.forget("r-1")
            assert made.found() == ()

    run(story())


def test_an_engine_ended_by_a_signal_tells_which(tmp_path: Path) -> None:
    async def story() -> None:
        async with launcher(tmp_path) as made:
            running = await begin(made, SLEEPER)
            await printed(made, "r-1", "here")
            os.kill(running.pid, signal.SIGKILL)
            event = await next_event(made)
            assert event == LaunchEnded(replica="r-1", exit_status=-9, last_line="here")

    run(story())


def test_a_program_that_does_not_exist_is_said_in_a_sentence(tmp_path: Path) -> None:
    async def story() -> None:
        async with launcher(tmp_path) as made:
            start = engine("")
            missing = EngineStart(
                argv=("/nowhere/engine", "--port", "1"),
                environment=start.environment,
                endpoint="",
                port=1,
                ready="probe",
                paths=(),
                has_key=False,
            )
            ended = await made.start("r-1", missing, grace_s=1.0, log_bytes=1 << 20)
            assert isinstance(ended, Ended)
            assert ended.code == "spawn_failed"
            assert ended.last_line == "cannot run '/nowhere/engine': No such file or directory"
            assert made.events.empty()

    run(story())


def test_an_id_is_started_once(tmp_path: Path) -> None:
    async def story() -> None:
        async with launcher(tmp_path) as made:
            await begin(made, SLEEPER)
            with pytest.raises(LaunchFault, match="started before"):
                await made.start("r-1", SLEEPER, grace_s=1.0, log_bytes=1 << 20)
            with pytest.raises(LaunchFault, match="may still run"):
                made.forget("r-1")

    run(story())


def test_stop_ends_the_engine_and_no_event_follows(tmp_path: Path) -> None:
    async def story() -> None:
        async with launcher(tmp_path) as made:
            await begin(made, SLEEPER)
            result = await made.stop("r-1", 5.0)
            assert (result.exit_status, result.survivors, result.killed) == (-15, (), False)
            assert await made.memory_bytes("r-1") == 0
            assert (await made.stop("r-1", 5.0)).exit_status == -15
            assert made.events.empty()

    run(story())


def test_stop_kills_what_ignores_the_signal_after_the_grace(tmp_path: Path) -> None:
    async def story() -> None:
        async with launcher(tmp_path) as made:
            deaf = """
            import signal
            signal.signal(signal.SIGTERM, lambda *_: print("deaf", flush=True))
            print("here", flush=True)
            while True: signal.pause()
            """
            await begin(made, engine(deaf))
            await printed(made, "r-1", "here")
            result = await made.stop("r-1", 0.3)
            assert (result.exit_status, result.survivors, result.killed) == (-9, (), True)
            assert (await made.read_log("r-1", 0)).text.count("deaf") == 1

    run(story())


WRAPPER = """
import os, signal, time
if os.fork() == 0:
    {detach}
    if os.fork() == 0:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        print("grandchild", os.getpid(), flush=True)
        while True: signal.pause()
    os._exit(0)
os.wait()
signal.pause()
"""


@pytest.mark.parametrize("detach", ["pass", "os.setsid()"])
def test_scn_a14_a_wrapper_s_grandchild_is_stopped_with_it(tmp_path: Path, detach: str) -> None:
    """Also one that fled into a session of its own and ignores SIGTERM."""

    async def story() -> None:
        async with launcher(tmp_path) as made:
            await begin(made, engine(WRAPPER.format(detach=detach)))
            text = await printed(made, "r-1", "grandchild")
            grandchild = int(text.split()[1])
            assert grandchild in await made.survivors("r-1")
            result = await made.stop("r-1", 0.3)
            assert result.survivors == ()
            assert result.killed
            process = processes.look(grandchild)
            assert process is None or not process.alive
            assert await made.memory_bytes("r-1") == 0

    run(story())


def test_scn_a14_what_will_not_go_is_named(tmp_path: Path) -> None:
    """A launcher that hangs and signals that do not arrive: the pids are told, nothing pretended."""

    async def story() -> None:
        reached: list[int] = []
        made = Launcher(
            tmp_path / "replicas",
            tmp_path / "agent.sock",
            signal_all=lambda found, number: reached.extend(process.pid for process in found),
        )
        await made.open()
        running = await begin(made, SLEEPER)
        os.kill(running.launcher_pid, signal.SIGSTOP)
        try:
            result = await made.stop("r-1", 0.1)
            assert result.survivors == (running.pid,)
            assert running.pid in reached
            assert await made.memory_bytes("r-1") > 0
            with pytest.raises(LaunchFault):
                made.forget("r-1")
        finally:
            os.kill(running.launcher_pid, signal.SIGCONT)
        # The launcher was only asleep and still carries out the stop it was asked for.
        again = await made.stop("r-1", 5.0)
        assert again.survivors == ()
        assert again.exit_status == -15
        await made.close()

    run(story())


def test_what_an_engine_leaves_behind_ends_with_it(tmp_path: Path) -> None:
    async def story() -> None:
        async with launcher(tmp_path) as made:
            code = """
            import os, signal
            if os.fork() == 0:
                print("left", os.getpid(), flush=True)
                signal.pause()
            os._exit(0)
            """
            event = await end_of(made, engine(code))
            assert (event.exit_status, event.survivors) == (0, ())
            assert await made.survivors("r-1") == ()

    run(story())


def test_the_engine_dies_with_a_launcher_that_is_killed(tmp_path: Path) -> None:
    """No engine without an owner: neither the engine nor what it forked outlives the launcher."""

    async def story() -> None:
        async with launcher(tmp_path) as made:
            running = await begin(made, engine(WRAPPER.format(detach="os.setsid()")))
            await printed(made, "r-1", "grandchild")
            os.kill(running.launcher_pid, signal.SIGKILL)
            event = await next_event(made)
            assert isinstance(event, LaunchEnded)
            assert (event.code, event.exit_status, event.survivors) == ("lost", None, ())
            assert event.last_line.startswith("grandchild")
            assert not processes.is_same(running.pid, running.start_time)
            assert await made.survivors("r-1") == ()

    run(story())


def test_sigterm_to_the_launcher_stops_the_group(tmp_path: Path) -> None:
    async def story() -> None:
        async with launcher(tmp_path) as made:
            running = await begin(made, engine(WRAPPER.format(detach="pass")), grace_s=0.2)
            await printed(made, "r-1", "grandchild")
            os.kill(running.launcher_pid, signal.SIGTERM)
            event = await next_event(made)
            assert isinstance(event, LaunchEnded)
            assert (event.exit_status, event.survivors) == (-15, ())

    run(story())


def test_the_log_is_bounded_and_read_by_offset_over_a_turn(tmp_path: Path) -> None:
    async def story() -> None:
        async with launcher(tmp_path) as made:
            code = "for i in range(5000): print(f'line {i:06d}', flush=True)"
            await end_of(made, engine(code), log_bytes=16384)
            total = 5000 * 12
            whole = await made.read_log("r-1", 0, 1 << 20)
            assert whole.ended
            assert whole.next_offset == total
            assert 16384 <= len(whole.text) <= 2 * 16384
            assert whole.offset == total - len(whole.text)
            text, offset = "", whole.offset
            while True:
                part = await made.read_log("r-1", offset, 1000)
                text, offset = text + part.text, part.next_offset
                if part.ended:
                    break
            assert text == whole.text
            assert text.endswith("line 004999\n")
            folder = tmp_path / "replicas" / "r-1"
            kept = sum(path.stat().st_size for path in folder.glob("engine.log*"))
            assert kept <= 2 * 16384 + 16

    run(story())


def test_a_secret_the_engine_prints_is_hidden_in_log_and_last_line(tmp_path: Path) -> None:
    async def story() -> None:
        async with launcher(tmp_path) as made:
            code = """
            import os, sys, time
            key = os.environ["ENGINE_KEY"]
            os.write(1, b"key " + key[:5].encode())
            time.sleep(0.05)
            os.write(1, key[5:].encode() + b" end\\n")
            """
            start = engine(code, ENGINE_KEY="sekret-value-0123")
            start = EngineStart(
                argv=start.argv,
                environment=start.environment,
                endpoint="",
                port=1,
                ready="probe",
                paths=(),
                has_key=True,
                secret_names=("ENGINE_KEY",),
            )
            event = await end_of(made, start)
            assert event.last_line == "key [hidden] end"
            for path in (tmp_path / "replicas" / "r-1").iterdir():
                assert b"sekret-value" not in path.read_bytes(), path

    run(story())
