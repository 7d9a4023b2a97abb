"""The parent of workers with workers of three lines: who is started, succeeded, given up, and when not."""

import asyncio
import contextlib
import os
import signal
import socket
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

from events.service import FatalError
from gateway import workers
from gateway.workers import Crew
from tests.support.aio import run, until

PROGRAM = """
import os, select, signal, sys, time
folder, id = sys.argv[1], sys.argv[-1]
log = os.open(folder + "/log", os.O_WRONLY | os.O_APPEND | os.O_CREAT)
def said(what): os.write(log, f"{id} {what}\\n".encode())
def end(number, frame):
    os.close(int(os.environ["YARD_WORKER_SOCKET"]))
    said({signal.SIGTERM: "term", signal.SIGHUP: "hup"}[number])
    while os.path.exists(f"{folder}/{id} stays"): time.sleep(0.01)
    sys.exit(0)
for number in (signal.SIGTERM, signal.SIGHUP): signal.signal(number, end)
woken, wake = os.pipe()
os.set_blocking(wake, False)
signal.set_wakeup_fd(wake)  # A signal just before a sleep would be seen only after it.
said("started")
if os.path.exists(folder + "/broken"): sys.exit(7)
while os.path.exists(f"{folder}/{id} waits"): time.sleep(0.01)
os.fstat(int(os.environ["YARD_WORKER_SOCKET"]))
said("serves")
os.write(int(os.environ["YARD_WORKER_READY"]), b"1")
if os.path.exists(f"{folder}/{id} ends"): sys.exit(7)
while True: select.select([woken], [], [])
"""


@dataclass
class Scene:
    crew: Crew
    folder: Path
    running: "asyncio.Task[None]"
    stopping: asyncio.Event
    sock: socket.socket

    def said(self) -> list[str]:
        log = self.folder / "log"
        return log.read_text().splitlines() if log.exists() else []

    def break_new_ones(self, *, broken: bool = True) -> None:
        path = self.folder / "broken"
        path.touch() if broken else path.unlink()

    async def until_said(self, *lines: str) -> None:
        await until(lambda: set(lines) <= set(self.said()), f"{lines}", timeout_s=20.0)

    def pid_of(self, number: int) -> int:
        return next(w.process.pid for w in self.crew._all if w.number == number)


@asynccontextmanager
async def a_crew(folder: Path, count: int = 2, end_s: float = 60.0) -> AsyncIterator[Scene]:
    stopping = asyncio.Event()
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        argv = (sys.executable, "-S", "-c", PROGRAM, str(folder))
        crew = Crew("gw", count, sock, argv, stopping, end_s=end_s)
        scene = Scene(crew, folder, asyncio.create_task(crew.run()), stopping, sock)
        try:
            yield scene
        finally:
            stopping.set()
            with contextlib.suppress(FatalError):
                await asyncio.wait_for(scene.running, 10)
            assert not crew._all, "a worker was left"


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(workers, "RESTART_DELAYS_S", (0.01, 0.02))


def test_all_start_under_numbers_of_their_own_and_end_when_told(tmp_path: Path) -> None:
    async def story() -> None:
        async with a_crew(tmp_path) as scene:
            await scene.until_said("gw.1 serves", "gw.2 serves")
            scene.stopping.set()
            await asyncio.wait_for(scene.running, 10)
            assert sorted(scene.said()[-2:]) == ["gw.1 term", "gw.2 term"]

    run(story())


def test_while_the_last_of_them_finishes_new_connections_are_refused(tmp_path: Path) -> None:
    """The parent's own copy of the socket would take them, and nobody would ever answer."""

    async def story() -> None:
        stays = tmp_path / "gw.2 stays"
        stays.touch()
        async with a_crew(tmp_path) as scene:
            await scene.until_said("gw.1 serves", "gw.2 serves")
            address = scene.sock.getsockname()
            scene.sock.listen()
            with socket.create_connection(address):
                pass
            scene.stopping.set()
            await scene.until_said("gw.1 term", "gw.2 term")
            with socket.socket() as late:
                assert late.connect_ex(address) != 0
            stays.unlink()
            await asyncio.wait_for(scene.running, 10)

    run(story())


def test_one_that_ends_is_started_again_as_often_as_it_ends(tmp_path: Path) -> None:
    async def story() -> None:
        async with a_crew(tmp_path, 1) as scene:
            for count in range(1, 4):
                await until(
                    lambda n=count: scene.said().count("gw.1 serves") == n, "it to serve", 20.0
                )
                os.kill(scene.pid_of(1), signal.SIGKILL)

    run(story(), 60.0)


def test_when_none_ever_served_the_parent_ends_with_a_sentence(tmp_path: Path) -> None:
    async def story() -> None:
        (tmp_path / "broken").touch()
        async with a_crew(tmp_path) as scene:
            with pytest.raises(FatalError, match="no worker came to serve"):
                await asyncio.wait_for(asyncio.shield(scene.running), 20)

    run(story(), 40.0)


def test_successors_have_other_numbers_and_the_old_go_once_all_new_ones_serve(
    tmp_path: Path,
) -> None:
    async def story() -> None:
        async with a_crew(tmp_path) as scene:
            await scene.until_said("gw.1 serves", "gw.2 serves")
            scene.crew.succeed()
            await scene.until_said("gw.1 hup", "gw.2 hup")
            said = scene.said()
            last_new = max(said.index("gw.3 serves"), said.index("gw.4 serves"))
            assert last_new < min(said.index("gw.1 hup"), said.index("gw.2 hup"))
            # The numbers of those that are gone are free again.
            await until(lambda: len(scene.crew._all) == 2, "the old ones to be gone")
            scene.crew.succeed()
            await until(lambda: scene.said().count("gw.1 serves") == 2, "the next", 20.0)

    run(story(), 60.0)


def test_successors_that_do_not_serve_leave_the_old_ones_at_work(tmp_path: Path) -> None:
    async def story() -> None:
        async with a_crew(tmp_path) as scene:
            await scene.until_said("gw.1 serves", "gw.2 serves")
            scene.break_new_ones()
            scene.crew.succeed()
            await scene.until_said("gw.3 started", "gw.4 started")
            await until(lambda: len(scene.crew._all) == 2, "the new ones to be gone", 20.0)
            assert not any(line.endswith("hup") for line in scene.said())
            # They are still kept: one that is killed is started again.
            scene.break_new_ones(broken=False)
            os.kill(scene.pid_of(1), signal.SIGKILL)
            await until(lambda: scene.said().count("gw.1 serves") == 2, "it to be back", 20.0)

    run(story(), 60.0)


def test_a_successor_that_ends_before_the_others_serve_leaves_the_old_ones_at_work(
    tmp_path: Path,
) -> None:
    async def story() -> None:
        async with a_crew(tmp_path) as scene:
            await scene.until_said("gw.1 serves", "gw.2 serves")
            (tmp_path / "gw.3 ends").touch()
            (tmp_path / "gw.4 waits").touch()
            scene.crew.succeed()
            await scene.until_said("gw.3 serves", "gw.4 started")
            await until(lambda: len(scene.crew._all) == 3, "the third to be gone", 20.0)
            (tmp_path / "gw.4 waits").unlink()
            await until(lambda: len(scene.crew._all) == 2, "the fourth to be gone", 20.0)
            assert {w.number for w in scene.crew._all} == {1, 2}
            assert not any(line.endswith("hup") for line in scene.said())

    run(story(), 60.0)


def test_one_that_ended_before_a_succession_is_not_started_again_beside_the_successors(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(workers, "RESTART_DELAYS_S", (3.0,))

    async def story() -> None:
        async with a_crew(tmp_path) as scene:
            await scene.until_said("gw.1 serves", "gw.2 serves")
            os.kill(scene.pid_of(1), signal.SIGKILL)
            await until(lambda: len(scene.crew._all) == 1, "its end to be seen")
            scene.crew.succeed()
            await scene.until_said("gw.2 hup")
            # Who waited to start the first again has gone too: each that runs has one who watches it.
            await until(lambda: len(scene.crew._tasks) == 2, "nobody to be started besides", 20.0)
            assert len(scene.crew._all) == len(scene.crew._current) == 2

    run(story(), 60.0)


def test_one_that_hangs_at_the_end_is_killed_and_said_so(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async def story() -> None:
        (tmp_path / "gw.2 stays").touch()
        async with a_crew(tmp_path, end_s=0.5) as scene:
            await scene.until_said("gw.1 serves", "gw.2 serves")
            pid = scene.pid_of(2)
            scene.stopping.set()
            await asyncio.wait_for(scene.running, 20)
            told = [r for r in caplog.records if "did not end in time" in r.message]
            assert pid in [r.__dict__["pid"] for r in told]

    run(story(), 60.0)


def test_a_stopped_process_that_was_succeeded_is_killed(tmp_path: Path) -> None:
    async def story() -> None:
        async with a_crew(tmp_path, end_s=0.5) as scene:
            await scene.until_said("gw.1 serves", "gw.2 serves")
            os.kill(scene.pid_of(1), signal.SIGSTOP)
            scene.crew.succeed()
            await until(
                lambda: {w.number for w in scene.crew._all} == {3, 4}, "the old to be gone", 20.0
            )

    run(story(), 60.0)


def test_successors_that_hang_and_do_not_serve_are_killed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(workers, "SUCCEED_S", 1.0)

    async def story() -> None:
        async with a_crew(tmp_path, end_s=0.5) as scene:
            await scene.until_said("gw.1 serves", "gw.2 serves")
            for number in (3, 4):
                (tmp_path / f"gw.{number} waits").touch()
                (tmp_path / f"gw.{number} stays").touch()
            scene.crew.succeed()
            await until(lambda: len(scene.crew._all) == 4, "the new ones")
            await until(
                lambda: {w.number for w in scene.crew._all} == {1, 2}, "the new to be gone", 20.0
            )

    run(story(), 60.0)


def test_an_end_in_the_middle_of_a_succession_ends_old_and_new(tmp_path: Path) -> None:
    async def story() -> None:
        async with a_crew(tmp_path) as scene:
            await scene.until_said("gw.1 serves", "gw.2 serves")
            scene.crew.succeed()
            await scene.until_said("gw.3 started")
            scene.stopping.set()
            await asyncio.wait_for(scene.running, 20)

    run(story(), 60.0)
