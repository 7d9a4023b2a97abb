"""Engines under real launchers: started, ready, ended, stopped, adopted, and nothing left behind."""

import asyncio
import os
import signal
import sys
import textwrap
from pathlib import Path

import pytest

from nodeagent import enginelog, launching, processes
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
from tests.support.launches import REPLICA, launcher


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


async def begin(made: Launcher, start: EngineStart, replica: str = REPLICA, **kw: float) -> Running:
    found = await made.start(
        replica, start, grace_s=kw.get("grace_s", 5.0), log_bytes=int(kw.get("log_bytes", 1 << 20))
    )
    assert isinstance(found, Running), found
    return found


async def next_event(made: Launcher) -> LaunchEvent:
    return await asyncio.wait_for(made.events.get(), 10.0)


async def end_of(made: Launcher, start: EngineStart, **kw: float) -> Ended | LaunchEnded:
    """Starts an engine that ends by itself; it may have ended before `start` looked."""
    found = await made.start(
        REPLICA, start, grace_s=5.0, log_bytes=int(kw.get("log_bytes", 1 << 20))
    )
    if isinstance(found, Ended):
        return found
    event = await next_event(made)
    assert isinstance(event, LaunchEnded)
    return event


async def printed(made: Launcher, replica: str, word: str) -> str:
    """The log once it has the word and the rest of its line: a line may come in two pieces."""

    async def there() -> bool:
        return "\n" in (await made.read_log(replica)).text.partition(word)[2]

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
            assert processes.mark_of(running.pid) == (REPLICA, str(tmp_path / "replicas" / REPLICA))
            assert await made.survivors(REPLICA) == (running.pid,)
            assert await made.memory_bytes(REPLICA) > 1_000_000

    run(story())


def test_ready_is_told_once_over_the_pipe(tmp_path: Path) -> None:
    async def story() -> None:
        async with launcher(tmp_path) as made:
            running = await begin(made, engine(READY, ready="pipe"))
            if not running.ready:
                event = await next_event(made)
                assert isinstance(event, LaunchReady)
                assert event.replica == REPLICA
                assert 0 < event.load_s < 10
            again = await made.adopt(REPLICA)
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
            part = await made.read_log(REPLICA, 0)
            assert part.text.startswith("loading\n")
            assert part.ended
            made.forget(REPLICA)
            assert made.found() == ()

    run(story())


def test_an_engine_ended_by_a_signal_tells_which(tmp_path: Path) -> None:
    async def story() -> None:
        async with launcher(tmp_path) as made:
            running = await begin(made, SLEEPER)
            await printed(made, REPLICA, "here")
            os.kill(running.pid, signal.SIGKILL)
            event = await next_event(made)
            assert event == LaunchEnded(replica=REPLICA, exit_status=-9, last_line="here")

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
            ended = await made.start(REPLICA, missing, grace_s=1.0, log_bytes=1 << 20)
            assert isinstance(ended, Ended)
            assert ended.code == "spawn_failed"
            assert ended.last_line == "cannot run '/nowhere/engine': No such file or directory"
            assert made.events.empty()

    run(story())


def test_what_no_process_can_be_given_is_a_fault_and_leaves_nothing(tmp_path: Path) -> None:
    """A secret's file may hold anything; it must not end the agent again and again."""

    async def story() -> None:
        async with launcher(tmp_path) as made:
            with pytest.raises(LaunchFault, match="cannot start a launcher"):
                await made.start(REPLICA, engine("", KEY="a\0b"), grace_s=1.0, log_bytes=1 << 20)
            assert made.found() == ()

    run(story())


def test_an_id_is_started_once(tmp_path: Path) -> None:
    async def story() -> None:
        async with launcher(tmp_path) as made:
            await begin(made, SLEEPER)
            with pytest.raises(LaunchFault, match="started before"):
                await made.start(REPLICA, SLEEPER, grace_s=1.0, log_bytes=1 << 20)
            with pytest.raises(LaunchFault, match="may still run"):
                made.forget(REPLICA)

    run(story())


def test_stop_ends_the_engine_and_no_event_follows(tmp_path: Path) -> None:
    async def story() -> None:
        async with launcher(tmp_path) as made:
            await begin(made, SLEEPER)
            result = await made.stop(REPLICA, 5.0)
            assert (result.exit_status, result.survivors, result.killed) == (-15, (), False)
            assert await made.memory_bytes(REPLICA) == 0
            assert (await made.stop(REPLICA, 5.0)).exit_status == -15
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
            await printed(made, REPLICA, "here")
            result = await made.stop(REPLICA, 0.3)
            assert (result.exit_status, result.survivors, result.killed) == (-9, (), True)
            assert (await made.read_log(REPLICA, 0)).text.count("deaf") == 1

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
            text = await printed(made, REPLICA, "grandchild")
            grandchild = int(text.split()[1])
            assert grandchild in await made.survivors(REPLICA)
            result = await made.stop(REPLICA, 0.3)
            assert result.survivors == ()
            assert result.killed
            process = processes.look(grandchild)
            assert process is None or not process.alive
            assert await made.memory_bytes(REPLICA) == 0

    run(story())


def test_scn_a14_what_will_not_go_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A launcher that hangs and signals that do not arrive: the pids are told, nothing pretended."""
    monkeypatch.setattr(launching, "_AFTER_KILL_S", 0.5)

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
            result = await made.stop(REPLICA, 0.1)
            assert result.survivors == (running.pid,)
            assert running.pid in reached
            assert await made.memory_bytes(REPLICA) > 0
            with pytest.raises(LaunchFault):
                made.forget(REPLICA)
        finally:
            os.kill(running.launcher_pid, signal.SIGCONT)
        # The launcher was only asleep and still carries out the stop it was asked for.
        again = await made.stop(REPLICA, 5.0)
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
            assert await made.survivors(REPLICA) == ()

    run(story())


def test_the_engine_dies_with_a_launcher_that_is_killed(tmp_path: Path) -> None:
    """No engine without an owner: neither the engine nor what it forked outlives the launcher."""

    async def story() -> None:
        async with launcher(tmp_path) as made:
            running = await begin(made, engine(WRAPPER.format(detach="os.setsid()")))
            await printed(made, REPLICA, "grandchild")
            os.kill(running.launcher_pid, signal.SIGKILL)
            event = await next_event(made)
            assert isinstance(event, LaunchEnded)
            assert (event.code, event.exit_status, event.survivors) == ("lost", None, ())
            assert event.last_line.startswith("grandchild")
            assert not processes.is_same(running.pid, running.start_time)
            assert await made.survivors(REPLICA) == ()

    run(story())


def test_sigterm_to_the_launcher_stops_the_group(tmp_path: Path) -> None:
    async def story() -> None:
        async with launcher(tmp_path) as made:
            running = await begin(made, engine(WRAPPER.format(detach="pass")), grace_s=0.2)
            await printed(made, REPLICA, "grandchild")
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
            whole = await made.read_log(REPLICA, 0, 1 << 20)
            assert whole.ended
            assert whole.next_offset == total
            assert 16384 <= len(whole.text) <= 2 * 16384
            assert whole.offset == total - len(whole.text)
            text, offset = "", whole.offset
            while True:
                part = await made.read_log(REPLICA, offset, 1000)
                text, offset = text + part.text, part.next_offset
                if part.ended:
                    break
            assert text == whole.text
            assert text.endswith("line 004999\n")
            folder = tmp_path / "replicas" / REPLICA
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
            for path in (tmp_path / "replicas" / REPLICA).iterdir():
                assert b"sekret-value" not in path.read_bytes(), path

    run(story())


def test_two_yards_with_the_same_id_do_not_touch_each_other(tmp_path: Path) -> None:
    async def story() -> None:
        async with launcher(tmp_path / "a") as one, launcher(tmp_path / "b") as other:
            first, second = await begin(one, SLEEPER), await begin(other, SLEEPER)
            assert await one.survivors(REPLICA) == (first.pid,)
            assert await other.survivors(REPLICA) == (second.pid,)
            await one.stop(REPLICA, 5.0)
            assert processes.is_same(second.pid, second.start_time)

    run(story())


def test_an_engine_starts_with_clean_descriptors_and_signals(tmp_path: Path) -> None:
    """It holds no lock or pipe of ours, is told SIGPIPE as a program expects, and reads no input."""

    async def story() -> None:
        async with launcher(tmp_path) as made:
            shell = EngineStart(
                argv=("/bin/sh", "-c", "ls -l /proc/$$/fd; grep SigIgn /proc/$$/status; cat"),
                environment={**os.environ},
                endpoint="",
                port=1,
                ready="probe",
                paths=(),
                has_key=False,
            )
            ended = await end_of(made, shell)
            assert ended.exit_status == 0
            lines = (await made.read_log(REPLICA, 0)).text.splitlines()
            targets = [line.split()[-3:] for line in lines if "->" in line]
            assert targets[0] == ["0", "->", "/dev/null"]
            assert [fd for fd, _, _ in targets] == ["0", "1", "2"]
            ignored = int(lines[-1].split()[1], 16)
            for number in (signal.SIGPIPE, signal.SIGXFSZ, signal.SIGTERM, signal.SIGHUP):
                assert not ignored & (1 << (number - 1)), number

    run(story())


def test_a_launcher_that_breaks_at_its_start_leaves_no_engine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def story() -> None:
        async with launcher(tmp_path) as made:
            whole = enginelog.write_whole

            def broken(folder: str, name: str, content: bytes) -> None:
                whole(folder, name, b"{}" if name == "launch.json" else content)

            monkeypatch.setattr(enginelog, "write_whole", broken)
            ended = await made.start(REPLICA, SLEEPER, grace_s=1.0, log_bytes=1 << 20)
            assert isinstance(ended, Ended)
            assert (ended.code, ended.survivors) == ("lost", ())
            assert await made.survivors(REPLICA) == ()
            made.forget(REPLICA)

    run(story())


GATED = """
import os, signal
os.open(os.environ["GATE"], os.O_RDONLY)
os.write(int(os.environ["YARD_READY_FD"]), b"ready")
signal.pause()
"""


def test_a_disk_that_fails_for_a_while_delays_the_news_and_ends_nothing(tmp_path: Path) -> None:
    async def story() -> None:
        gate = tmp_path / "gate"
        os.mkfifo(gate)
        async with launcher(tmp_path) as made:
            running = await begin(made, engine(GATED, ready="pipe", GATE=str(gate)))
            # A folder where the launcher wants to write a file stands for a full disk.
            in_the_way = tmp_path / "replicas" / REPLICA / "ready.json.new"
            in_the_way.mkdir()
            os.close(os.open(gate, os.O_WRONLY))
            with pytest.raises(TimeoutError):
                await asyncio.wait_for(made.events.get(), 0.3)
            assert processes.is_same(running.pid, running.start_time)
            in_the_way.rmdir()
            event = await next_event(made)
            assert isinstance(event, LaunchReady)

    run(story())


def test_an_engine_that_prints_without_end_is_neither_held_up_nor_kept(tmp_path: Path) -> None:
    async def story() -> None:
        async with launcher(tmp_path) as made:
            code = """
            import os
            for _ in range(400): os.write(1, b"x" * 65535 + b"\\n")
            """
            await end_of(made, engine(code), log_bytes=1 << 20)
            part = await made.read_log(REPLICA, None, 10)
            assert part.next_offset == 400 * 65536
            folder = tmp_path / "replicas" / REPLICA
            assert sum(path.stat().st_size for path in folder.iterdir()) < 2 * (1 << 20) + 8192

    run(story(), 60.0)


def test_many_are_started_and_stopped_at_once(tmp_path: Path) -> None:
    async def story() -> None:
        async with launcher(tmp_path) as made:
            ids = [f"{REPLICA}-{number}" for number in range(8)]
            running = await asyncio.gather(*(begin(made, SLEEPER, replica) for replica in ids))
            assert len({one.pid for one in running}) == 8
            results = await asyncio.gather(*(made.stop(replica, 10.0) for replica in ids))
            assert {(one.exit_status, one.survivors) for one in results} == {(-15, ())}
            for replica in ids:
                made.forget(replica)
            assert made.found() == ()
            # Every launcher was collected: none is left as a zombie of ours.
            await until(lambda: all(gone(one.launcher_pid) for one in running), "the launchers")

    run(story(), 60.0)


def gone(pid: int) -> bool:
    return processes.look(pid) is None
