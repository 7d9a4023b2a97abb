"""The supervisor of `yardctl up` on real processes: what it starts again, and what it must not."""

import signal
import sys
from pathlib import Path

from controlplane.ctl.supervisor import ServiceSpec, Supervisor
from nodeagent.processes import look
from tests.support.aio import run, until


def spec(folder: Path, code: str, **more: object) -> ServiceSpec:
    return ServiceSpec(
        name="part",
        argv=[sys.executable, "-I", "-S", "-c", code],
        environment={},
        log=folder / "part.log",
        **more,  # type: ignore[arg-type]
    )


def test_an_exit_code_that_a_new_start_cannot_help_is_said_and_left(tmp_path: Path) -> None:
    async def story() -> None:
        said: list[str] = []
        supervisor = Supervisor(said.append, lambda: None)
        code = "import sys; print('begun', flush=True); sys.exit(3)"
        await supervisor.start(spec(tmp_path, code, final={3: "another one does its work"}))
        await until(lambda: "part" in supervisor.given_up, "the supervisor to give up")
        await supervisor.stop("part")
        assert said == [
            "part ended (exit code 3) and is not started again: another one does its work"
            f" (its log: {tmp_path / 'part.log'})"
        ]
        assert (tmp_path / "part.log").read_text() == "begun\n"
        assert supervisor.pids == {}

    run(story())


def test_any_other_end_is_followed_by_a_new_start(tmp_path: Path) -> None:
    async def story() -> None:
        said: list[str] = []
        supervisor = Supervisor(said.append, lambda: None)
        code = "import sys; print('begun', flush=True); sys.exit(1)"
        await supervisor.start(spec(tmp_path, code, final={3: "-"}))
        log = tmp_path / "part.log"
        await until(lambda: log.read_text().count("begun") == 2, "the second start")
        await supervisor.stop("part")
        assert said[0].startswith("part ended (exit code 1); started again in 0.2 s")
        assert supervisor.given_up == {}

    run(story())


def test_a_yard_file_that_cannot_be_written_costs_no_process_its_keeper(tmp_path: Path) -> None:
    async def story() -> None:
        said: list[str] = []

        def full() -> None:
            raise OSError(28, "No space left on device")

        supervisor = Supervisor(said.append, full)
        await supervisor.start(spec(tmp_path, "import signal; signal.pause()"))
        (first,) = supervisor.pids.values()
        assert await supervisor.stop("part") is True
        assert supervisor.pids == {}
        assert look(first) is None, "the process was waited for"
        assert any("No space left" in line for line in said)

    run(story())


def test_a_terminal_nobody_reads_costs_no_process_its_keeper(tmp_path: Path) -> None:
    async def story() -> None:
        def full(_: str) -> None:
            raise OSError(28, "No space left on device")

        supervisor = Supervisor(full, lambda: None)
        code = "import sys; print('begun', flush=True); sys.exit(1)"
        await supervisor.start(spec(tmp_path, code))
        log = tmp_path / "part.log"
        await until(lambda: log.read_text().count("begun") == 2, "the second start")
        await supervisor.stop("part")

    run(story())


def test_a_stop_that_comes_while_it_starts_is_heard_once_it_can_be(tmp_path: Path) -> None:
    code = (
        "import signal, sys; signal.signal(signal.SIGINT, lambda *_: sys.exit(print('heard')));"
        "signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGINT]); signal.pause()"
    )

    async def story() -> None:
        supervisor = Supervisor(lambda _: None, lambda: None)
        await supervisor.start(spec(tmp_path, code, holds_stops=True))
        assert await supervisor.stop("part", stop_signal=signal.SIGINT) is True
        assert (tmp_path / "part.log").read_text() == "heard\n"

    run(story())


def test_what_ended_is_started_once_more_for_its_end(tmp_path: Path) -> None:
    code = "import signal; print('begun', flush=True); signal.pause()"

    async def story() -> None:
        supervisor = Supervisor(lambda _: None, lambda: None)
        await supervisor.start(spec(tmp_path, "raise SystemExit(print('begun'))"))
        await until(lambda: not supervisor.pids, "its end")
        assert await supervisor.stop("part") is False
        await supervisor.start(spec(tmp_path, code))
        await supervisor.stop("part", stop_signal=signal.SIGKILL)
        before = (tmp_path / "part.log").read_text()
        assert await supervisor.stop_anew("part", stop_signal=signal.SIGTERM) is True
        assert supervisor.pids == {}
        assert (tmp_path / "part.log").read_text().startswith(before)

    run(story())


def test_a_stop_tells_whether_anything_ran(tmp_path: Path) -> None:
    async def story() -> None:
        supervisor = Supervisor(lambda _: None, lambda: None)
        await supervisor.start(spec(tmp_path, "raise SystemExit(1)"))
        await until(lambda: not supervisor.pids, "its end")
        assert await supervisor.stop("part") is False

    run(story())
