"""Keeps the processes of one yard running: starts them, restarts what ends, stops them in order.

It decides nothing about models. Engines are no business of it but for one thing: as the subreaper it
inherits launchers whose agent is gone, and buries them.
"""

import asyncio
import contextlib
import ctypes
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from events.service import STOPS

RESTART_DELAYS_S: Final = (0.2, 1.0, 5.0)
STEADY_S: Final = 60.0
"""After running this long an end starts again with the first delay."""

_PR_SET_PDEATHSIG: Final = 1
_PR_SET_CHILD_SUBREAPER: Final = 36
_libc = ctypes.CDLL(None, use_errno=True)


def become_subreaper() -> None:
    """Orphans below this process become its children instead of init's, so that it can bury them."""
    _libc.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


@dataclass(frozen=True, kw_only=True)
class ServiceSpec:
    """One process. `stop_signal` ends it politely, `orphan_signal` reaches it when the supervisor dies.

    `final`: exit codes after which a new start would not help, each with the reason for the person.
    `withheld` are variables of our own environment that it does not get. `holds_stops`: it unblocks the signals
    that ask it to end once it can hear them, so one that is sent while it starts is heard then.
    """

    name: str
    argv: Sequence[str]
    environment: Mapping[str, str]
    log: Path
    stop_signal: int = signal.SIGTERM
    orphan_signal: int = signal.SIGTERM
    stop_grace_s: float = 15.0
    final: Mapping[int, str] = field(default_factory=dict)
    withheld: tuple[str, ...] = ()
    holds_stops: bool = False


def _environment(spec: ServiceSpec) -> dict[str, str]:
    own = {name: value for name, value in os.environ.items() if name not in spec.withheld}
    return {**own, **spec.environment}


@dataclass(slots=True)
class Supervised:
    """A spec with its present process."""

    spec: ServiceSpec
    process: asyncio.subprocess.Process | None = None
    task: asyncio.Task[None] | None = None
    stopping: asyncio.Event = field(default_factory=asyncio.Event)
    started: asyncio.Event = field(default_factory=asyncio.Event)


class Supervisor:
    """Owns its processes. `say(sentence)` tells the person at the terminal; `changed()` after every start."""

    def __init__(self, say: Callable[[str], None], changed: Callable[[], None]) -> None:
        self._person = say
        self._changed = changed
        self._services: dict[str, Supervised] = {}
        self.given_up: dict[str, str] = {}
        """Services that ended for good, each with the reason."""

    @property
    def names(self) -> list[str]:
        """Every service it was given, running or not."""
        return list(self._services)

    @property
    def pids(self) -> dict[str, int]:
        """Process ids by service name, of those that run."""
        return {
            name: s.process.pid
            for name, s in self._services.items()
            if s.process is not None and s.process.returncode is None
        }

    async def start(self, spec: ServiceSpec) -> None:
        """Starts it and keeps it; returns when the process exists."""
        service = Supervised(spec=spec)
        self._services[spec.name] = service
        service.task = asyncio.create_task(self._keep(service), name=f"keep {spec.name}")
        await service.started.wait()

    async def _keep(self, service: Supervised) -> None:
        spec = service.spec
        loop = asyncio.get_running_loop()
        failures = 0
        while not service.stopping.is_set():
            begun = loop.time()
            try:
                service.process = await _spawn(spec)
            except (OSError, subprocess.SubprocessError) as error:
                self._say(f"{spec.name} cannot be started: {error}")
                service.process = None
            service.started.set()
            self._tell_changed()
            if service.stopping.is_set():
                # The stop came while the process was being made and found nothing to signal.
                self.signal(service, signal.SIGKILL)
            status = -1 if service.process is None else await service.process.wait()
            if service.stopping.is_set():
                return
            if status in spec.final:
                self.given_up[spec.name] = spec.final[status]
                self._say(
                    f"{spec.name} ended ({describe_status(status)}) and is not started again:"
                    f" {spec.final[status]} (its log: {spec.log})"
                )
                self._tell_changed()
                return
            failures = 0 if loop.time() - begun > STEADY_S else failures
            delay = RESTART_DELAYS_S[min(failures, len(RESTART_DELAYS_S) - 1)]
            failures += 1
            self._say(
                f"{spec.name} ended ({describe_status(status)}); started again in {delay:g} s"
                f" (its log: {spec.log})"
            )
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(delay):
                    await service.stopping.wait()

    def _say(self, sentence: str) -> None:
        """Where it is said may be a file on a full disk, or a pipe nobody reads any more."""
        with contextlib.suppress(OSError, ValueError):
            self._person(sentence)

    def _tell_changed(self) -> None:
        """A disk that is full must not cost a process its keeper."""
        try:
            self._changed()
        except OSError as error:
            self._say(f"what runs could not be written down: {error}")

    @staticmethod
    def signal(service: Supervised, number: int) -> bool:
        """Sends a signal to the present process; False when there is none."""
        if service.process is None or service.process.returncode is not None:
            return False
        with contextlib.suppress(ProcessLookupError):
            service.process.send_signal(number)
        return True

    async def stop(self, name: str, *, stop_signal: int | None = None) -> bool:
        """Ends one service: its signal, its grace, then SIGKILL. False when it was not running."""
        service = self._services.get(name)
        if service is None:
            return False
        service.stopping.set()
        ran = self.signal(service, stop_signal or service.spec.stop_signal)
        if service.task is None:
            return ran
        # Never cancelled: a process in the making would be left behind.
        done, _ = await asyncio.wait({service.task}, timeout=service.spec.stop_grace_s)
        if not done:
            self._say(f"{name} did not end within {service.spec.stop_grace_s:g} s; killed")
            self.signal(service, signal.SIGKILL)
            await service.task
        return ran

    async def stop_anew(self, name: str, *, stop_signal: int) -> bool:
        """Starts a service that was stopped once more, for what it does at its end. False when it did not run."""
        await self.start(self._services[name].spec)
        return await self.stop(name, stop_signal=stop_signal)

    def kill_all(self) -> None:
        """SIGKILL to everything; for the impatient second Ctrl-C."""
        for service in self._services.values():
            service.stopping.set()
            self.signal(service, signal.SIGKILL)


def describe_status(status: int) -> str:
    """`exit code 1`, or `signal SIGKILL`."""
    if status < 0:
        with contextlib.suppress(ValueError):
            return f"signal {signal.Signals(-status).name}"
    return f"exit code {status}"


async def _spawn(spec: ServiceSpec) -> asyncio.subprocess.Process:
    spec.log.parent.mkdir(parents=True, exist_ok=True)
    parent = os.getpid()

    def in_child() -> None:
        # Own process group: a Ctrl-C at the terminal reaches the supervisor alone, which then stops
        # everything in order. The death signal is lost if the parent died before prctl, hence the look.
        os.setpgid(0, 0)
        _libc.prctl(_PR_SET_PDEATHSIG, spec.orphan_signal, 0, 0, 0)
        if os.getppid() != parent:
            os._exit(1)
        if spec.holds_stops:
            signal.pthread_sigmask(signal.SIG_BLOCK, STOPS)

    with spec.log.open("ab") as log:
        return await asyncio.create_subprocess_exec(
            *spec.argv,
            env=_environment(spec),
            stdin=asyncio.subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            # Runs between fork and exec only; what other threads this process has sit in waitpid.
            preexec_fn=in_child,
        )


def bury_orphans() -> list[int]:
    """Reaps inherited children that are dead; returns their pids.

    Told from the services by their session: launchers lead their own, services stay in ours. A service is
    left to whoever waits for it.
    """
    own_session = os.getsid(0)
    buried: list[int] = []
    for entry in Path("/proc/self/task").iterdir():
        with contextlib.suppress(OSError):
            for pid in map(int, (entry / "children").read_text(encoding="ascii").split()):
                with contextlib.suppress(OSError, ChildProcessError):
                    if os.getsid(pid) == own_session:
                        continue
                    done, _ = os.waitpid(pid, os.WNOHANG)
                    if done:
                        buried.append(pid)
    return buried


def python_argv(module: str, *arguments: str) -> list[str]:
    """This interpreter running a module of the yard."""
    return [sys.executable, "-m", module, *arguments]
