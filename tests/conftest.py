"""What holds for every test: no skipped tier, no network in unit tests, no process left behind.

It offers no fixtures of a yard; those are in tests/support. A missing nats-server or model fails the run
before the first test: a tier that silently does not run proves nothing.
"""

import os
import signal
import socket
import subprocess
import uuid
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
from hypothesis import settings

from events import server
from events.server import ServerMissing

ROOT = Path(__file__).resolve().parent.parent
MODEL = ROOT / ".cache" / "models" / "SmolLM2-135M-Instruct.Q4_1.gguf"
NEED_SERVER = ("contract", "integration", "system")
NEED_MODEL = ("integration", "system")
OLDEST_SERVER = (2, 12, 3)

# Every process a test starts inherits this variable, so one that outlived its parent is still found.
MARK = "YARD_TEST_RUN"
RUN = uuid.uuid4().hex

settings.register_profile("dev", deadline=None, print_blob=True, max_examples=50)
settings.register_profile(
    "ci", deadline=None, print_blob=True, max_examples=100, derandomize=True, database=None
)
settings.load_profile("ci" if os.environ.get("CI") else "dev")

_first_seen: dict[int, str] = {}
_leftovers: list[str] = []


def tier_of(path: Path) -> str:
    """`unit` for tests/unit/…; empty outside tests/."""
    try:
        return path.relative_to(ROOT / "tests").parts[0]
    except ValueError:
        return ""


def server_problem() -> str | None:
    """Why there is no usable nats-server; None when there is one."""
    try:
        program = server.binary()
        said = subprocess.run([program, "--version"], capture_output=True, text=True, timeout=10)
    except (ServerMissing, OSError) as error:
        return f"no usable nats-server ({error}); `make setup` installs it"
    version = said.stdout.strip().rpartition("v")[2]
    try:
        found = tuple(int(part) for part in version.split("-")[0].split("."))
    except ValueError:
        return f"{program} says {said.stdout.strip()!r} instead of its version"
    if found < OLDEST_SERVER:
        oldest = ".".join(map(str, OLDEST_SERVER))
        return f"{program} is {version}; atomic batches need {oldest} or newer"
    return None


def pytest_sessionstart() -> None:
    os.environ[MARK] = RUN
    # A shell starts what it puts in the background deaf to Ctrl-C, nohup to the end of its terminal. What is
    # ignored is inherited, by processes of tests that are about just that; what is handled is not.
    if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    if signal.getsignal(signal.SIGHUP) == signal.SIG_IGN:
        signal.signal(signal.SIGHUP, lambda *_: None)


def pytest_collection_finish(session: pytest.Session) -> None:
    if session.config.option.collectonly:
        return
    tiers = {tier_of(item.path) for item in session.items}
    problem = server_problem() if tiers & set(NEED_SERVER) else None
    if problem is None and tiers & set(NEED_MODEL) and not MODEL.exists():
        problem = f"{MODEL} is missing; `make setup` fetches it"
    if problem is not None:
        pytest.exit(f"these tests cannot run: {problem}", returncode=1)


@pytest.fixture(autouse=True)
def _no_network_in_unit_tests(
    request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A unit test that opens a socket is in the wrong tier. Unix sockets stay: asyncio needs a pair."""
    if tier_of(request.path) != "unit":
        return
    make = socket.socket.__init__

    def guarded(
        self: socket.socket,
        family: int = -1,
        type: int = -1,
        proto: int = -1,
        fileno: int | None = None,
    ) -> None:
        if fileno is None and family != socket.AF_UNIX:
            raise AssertionError("a unit test may open no network socket")
        make(self, family, type, proto, fileno)

    monkeypatch.setattr(socket.socket, "__init__", guarded)


def started_here() -> Iterator[int]:
    """Pids of processes that came from this test run and still live; a zombie counts as dead.

    It looks after every test, so it reads one file of each process and no more.
    """
    mark = f"{MARK}={RUN}".encode()
    for entry in os.scandir("/proc"):
        if not entry.name.isdigit() or int(entry.name) == os.getpid():
            continue
        try:
            # Empty for a zombie, and for what the kernel runs.
            environment = Path(entry.path, "environ").read_bytes()
        except OSError:
            continue
        if mark in environment.split(b"\0"):
            yield int(entry.name)


def pytest_runtest_teardown(item: pytest.Item) -> None:
    if tier_of(item.path) in NEED_SERVER:
        for pid in started_here():
            _first_seen.setdefault(pid, item.nodeid)


@pytest.hookimpl(trylast=True)
def pytest_sessionfinish(session: pytest.Session) -> None:
    """All fixtures are torn down by now; whoever still runs was forgotten."""
    for pid in started_here():
        try:
            process = psutil.Process(pid)
            said = " ".join(process.cmdline())[:160]
            since = _first_seen.get(pid, "an earlier test")
            process.kill()
        except psutil.Error:
            continue
        _leftovers.append(f"pid {pid}, first seen in {since}: {said}")
    if _leftovers:
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    if _leftovers:
        terminalreporter.section("processes left behind (killed)", red=True)
        for line in _leftovers:
            terminalreporter.line(line)
