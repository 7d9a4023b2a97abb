"""A whole yard for system tests: every process real, kills on demand, every event at hand to wait for."""

import asyncio
import json
import os
import signal
import sys
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryFile
from typing import IO, Any

import httpx

from controlplane.ctl.supervisor import become_subreaper, bury_orphans
from controlplane.ctl.up import RunningYard, UpOptions, start_yard
from events.log import EventLog, Recorded, Unavailable
from tests.support.ctl_server import CtlServer
from tests.support.logs import open_admin_log
from tests.support.ports import PORTS, engine_ports

ROOT = Path(__file__).parent.parent.parent
SCRIPTED = ROOT / "tests" / "engines" / "scripted.py"
SMOLLM2 = ROOT / ".cache" / "models" / "SmolLM2-135M-Instruct.Q4_1.gguf"

CTL = CtlServer()


def read_whole(file: IO[bytes]) -> str:
    """What another process wrote there."""
    file.seek(0)
    return file.read().decode()


def scripted_model(name: str, *flags: str, **more: Any) -> dict[str, Any]:
    """A catalog entry that runs the scripted engine with these flags."""
    profile: dict[str, Any] = {
        "name": "scripted",
        "engine": "command",
        "command": [
            sys.executable,
            str(SCRIPTED),
            "--port",
            "${PORT}",
            "--model",
            "${MODEL}",
            *flags,
        ],
        "health": "/health",
        "key_env": "API_KEY",
        "memory": "64MiB",
        "start_timeout": "30s",
    }
    profile |= more.pop("profile", {})
    entry: dict[str, Any] = {
        "name": name,
        "scaling": {"min": 0, "max": 1, "idle_timeout": "15m"},
        "profiles": [profile],
    }
    return entry | more


@dataclass
class SystemYard:
    """A running yard and what a test needs of it."""

    running: RunningYard
    log: EventLog
    said: list[str]
    events: list[Recorded] = field(default_factory=list)
    _changed: asyncio.Event = field(default_factory=asyncio.Event)
    _read: int = 0

    @property
    def data(self) -> Path:
        return self.running.yard.data

    def gateway(self, n: int = 0) -> str:
        """Base URL of the n-th gateway, without a path."""
        yard = self.running.yard
        port = (yard.gateway_port, *yard.more_gateway_ports)[n]
        return f"http://127.0.0.1:{port}"

    @property
    def api(self) -> str:
        return self.running.yard.api_url

    def of(self, short_type: str) -> list[Recorded]:
        """The events seen so far whose type ends so, e.g. `replica.ready`."""
        return [e for e in self.events if e.type == short_type]

    async def in_log(self, short_type: str) -> list[Recorded]:
        """All events of that type that are in the log by now: whoever was woken by one, and answered, may have read it
        before this does."""
        async with asyncio.timeout(20.0):
            while (last := await self._last()) is None or self._read < last:
                self._changed.clear()
                await self._changed.wait()
        return self.of(short_type)

    async def _last(self) -> int | None:
        """The sequence of the newest event; None while there is no connection, of whose return the follower tells."""
        try:
            return (await self.log.identity()).last_seq
        except Unavailable:
            return None

    async def event(
        self,
        short_type: str,
        where: Callable[[Recorded], bool] = lambda _: True,
        *,
        after: int = 0,
        timeout_s: float = 20.0,
    ) -> Recorded:
        """Waits for an event of that type with `seq` above `after`; seen ones count."""
        deadline = time.monotonic() + timeout_s
        while True:
            for event in self.of(short_type):
                if event.seq > after and where(event):
                    return event
            self._changed.clear()
            left = deadline - time.monotonic()
            try:
                await asyncio.wait_for(self._changed.wait(), max(left, 0.001))
            except TimeoutError:
                seen = [f"{e.seq} {e.type} {e.key}" for e in self.events]
                raise AssertionError(
                    f"waited {timeout_s} s for {short_type} after {after}; seen:\n"
                    + "\n".join(seen[-60:])
                ) from None

    async def when(
        self,
        true_of: Callable[[Recorded], bool],
        what: str,
        *,
        after: int = 0,
        timeout_s: float = 20.0,
    ) -> Recorded:
        """Waits for the first event of any type with `seq` above `after` of which it is true."""
        deadline = time.monotonic() + timeout_s
        seen = 0
        while True:
            for event in self.events[seen:]:
                if event.seq > after and true_of(event):
                    return event
            seen = len(self.events)
            self._changed.clear()
            try:
                await asyncio.wait_for(
                    self._changed.wait(), max(deadline - time.monotonic(), 0.001)
                )
            except TimeoutError:
                told = [f"{e.seq} {e.type} {e.key} {e.reason}" for e in self.events[-40:]]
                raise AssertionError(
                    f"waited {timeout_s} s for {what}; seen:\n" + "\n".join(told)
                ) from None

    @property
    def position(self) -> int:
        return self.events[-1].seq if self.events else 0

    async def ctl(self, *arguments: str, expect: int = 0, stdin: str | None = None) -> str:
        """Runs yardctl as a person would (in a fork: tests/support/ctl_server.py); what it printed on stdout."""
        out, _ = await self.told(*arguments, expect=expect, stdin=stdin)
        return out

    async def told(
        self, *arguments: str, expect: int = 0, stdin: str | None = None
    ) -> tuple[str, str]:
        """As `ctl`, with what it printed on stderr besides."""
        environment = {**os.environ, "YARD_DATA": str(self.data)}
        with TemporaryFile() as given, TemporaryFile() as out, TemporaryFile() as err:
            given.write((stdin or "").encode())
            given.seek(0)
            files = (given.fileno(), out.fileno(), err.fileno())
            status = await CTL.call(arguments, environment, files)
            said = [read_whole(file) for file in (out, err)]
        assert status == expect, f"yardctl {arguments}: {status}\n{said[0]}\n{said[1]}"
        return said[0], said[1]

    async def add(self, *entries: dict[str, Any]) -> None:
        """Applies these catalog entries."""
        path = self.data / f"catalog-{time.monotonic_ns()}.yaml"
        path.write_text(json.dumps(list(entries)), encoding="utf-8")  # JSON is YAML
        await self.ctl("apply", "-f", str(path))

    def kill(self, name: str, number: int = signal.SIGKILL) -> int:
        """Signals a service; returns the pid it had."""
        pid = self.running.supervisor.pids[name]
        os.kill(pid, number)
        return pid

    async def _follow(self, synced: asyncio.Event) -> None:
        follower = self.log.follow(["yard.evt.>"])
        try:
            while True:
                batch = await follower.next()
                self.events.extend(i for i in batch.items if isinstance(i, Recorded))
                self._read = batch.position
                if batch.synced:
                    synced.set()
                self._changed.set()
        finally:
            await follower.close()


def _with_own_ports(settings: dict[str, Any]) -> dict[str, Any]:
    ports = engine_ports()
    own = {"port_first": ports[0], "port_last": ports[-1]}
    return {**settings, "nodeagent": {**own, **settings.get("nodeagent", {})}}


def _write_settings(data: Path, settings: dict[str, Any]) -> Path:
    data.mkdir(parents=True, exist_ok=True)
    config = data / "yard.yaml"
    config.write_text(json.dumps(settings), encoding="utf-8")
    return config


@asynccontextmanager
async def system_yard(
    data: Path,
    *,
    gateways: int = 1,
    controlplanes: int = 1,
    settings: dict[str, Any] | None = None,
) -> AsyncIterator[SystemYard]:
    """Starts a yard in `data` and stops all of it, engines too, at the end."""
    become_subreaper()
    loop = asyncio.get_running_loop()
    loop.add_signal_handler(signal.SIGCHLD, bury_orphans)
    config = _write_settings(data, _with_own_ports(settings or {}))
    said: list[str] = []
    running = await start_yard(
        UpOptions(
            data=data,
            gateway_port=0,
            api_port=0,
            nats_port=0,
            config=config,
            more_gateways=gateways - 1,
            more_controlplanes=controlplanes - 1,
            free_ports=PORTS.take,
        ),
        said.append,
    )
    try:
        async with open_admin_log(data) as log:
            yard = SystemYard(running=running, log=log, said=said)
            synced = asyncio.Event()
            following = asyncio.create_task(yard._follow(synced))
            try:
                await asyncio.wait_for(synced.wait(), 10)
                yield yard
            finally:
                following.cancel()
                await asyncio.gather(following, return_exceptions=True)
    finally:
        await running.stop()
        bury_orphans()
        loop.remove_signal_handler(signal.SIGCHLD)


async def rows(yard: SystemYard, *arguments: str) -> list[dict[str, Any]]:
    """What a command of yardctl that lists something lists."""
    return json.loads(await yard.ctl(*arguments, "-o", "json"))


def chat(model: str, **more: Any) -> dict[str, Any]:
    return {"model": model, "messages": [{"role": "user", "content": "hello"}], **more}


def client(base: str, timeout_s: float = 60.0) -> httpx.AsyncClient:
    """A client of one gateway; no connection limit of its own."""
    return httpx.AsyncClient(
        base_url=base,
        timeout=timeout_s,
        limits=httpx.Limits(max_connections=None, max_keepalive_connections=50),
    )
