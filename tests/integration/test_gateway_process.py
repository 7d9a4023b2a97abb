"""`python -m gateway` on a real nats-server with its own user: starts, serves, survives NATS, ends on SIGTERM."""

import asyncio
import os
import signal
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import httpx
import pytest

from events import server
from events.connection import Connection, connect
from events.jetstream import JetStreamLog, JetStreamWire
from events.log import Draft, Recorded
from events.provision import ensure_streams
from events.roles import inbox_prefix
from events.secrets import (
    engine_key,
    ensure_secret,
    nats_password_path,
    node_secret,
    read_secret,
    yard_secret_path,
)
from schemas.beacons import GatewayBeacon
from schemas.messages import SCHEMA
from schemas.settings import NatsSettings
from tests.support.aio import run, until
from tests.support.fake_engine import FakeEngine
from tests.support.gateway_world import Story
from tests.support.gateway_yard import chat
from tests.support.natsserver import NatsServer
from tests.support.ports import free_port

PATH = "/v1/chat/completions"


async def as_user(nats: NatsServer, data: Path, user: str) -> Connection:
    return await connect(
        NatsSettings(url=nats.url),
        name=user,
        user=user,
        password=read_secret(nats_password_path(data, user)),
        inbox_prefix=inbox_prefix(user),
    )


class GatewayProcess:
    """The service as `yardctl up` starts it."""

    def __init__(
        self,
        nats: NatsServer,
        data: Path,
        id: str = "gw-1",
        host: str = "127.0.0.1",
        more: tuple[str, ...] = (),
    ) -> None:
        self.port = free_port()
        self._id = id
        self._host = host
        self._more = more
        self._nats = nats
        self._data = data
        self._process: asyncio.subprocess.Process | None = None

    @property
    def pid(self) -> int:
        assert self._process is not None
        return self._process.pid

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    async def start(self) -> None:
        log = (self._data / "gateway.log").open("ab")
        with log:
            self._process = await asyncio.create_subprocess_exec(
                sys.executable,
                "-m",
                "gateway",
                *("--data", str(self._data), "--nats", self._nats.url),
                *("--listen", f"{self._host}:{self.port}", "--id", self._id, *self._more),
                env=os.environ | {"YARD_GATEWAY_DRAIN_S": "5"},
                stderr=log,
            )

    async def ended(self) -> int:
        """Waits until it ends by itself."""
        assert self._process is not None
        async with asyncio.timeout(20.0):
            return await self._process.wait()

    async def end(self, number: int) -> int:
        process = self._process
        if process is None or process.returncode is not None:
            return 0 if process is None else (process.returncode or 0)
        process.send_signal(number)
        async with asyncio.timeout(10.0):
            return await process.wait()

    async def listens(self) -> None:
        async def ready() -> bool:
            try:
                async with httpx.AsyncClient() as client:
                    return (await client.get(f"{self.url}/readyz")).status_code == 200
            except httpx.TransportError:
                return False

        await until(ready, "the gateway to listen", timeout_s=20.0)


@asynccontextmanager
async def yard(data: Path) -> AsyncIterator[tuple[NatsServer, JetStreamLog, JetStreamWire]]:
    """A server with the yard's users, its streams, and the log as the control plane sees it."""
    ensure_secret(yard_secret_path(data))
    nats = NatsServer(data / "nats", configuration=server.prepare(data, ["n1"]))
    nats.start()
    control = await as_user(nats, data, "control")
    try:
        await ensure_streams(control, "yard-of-this-test", SCHEMA)
        yield nats, JetStreamLog(control, source="/cp/test"), JetStreamWire(control)
    finally:
        await control.close()
        nats.stop()


async def tell(log: JetStreamLog, made: Recorded, expected_seq: int = 0) -> int:
    assert made.event is not None
    draft = Draft(
        subject=made.subject,
        event=made.event,
        state=made.state,
        expected_seq=expected_seq,
        rev=made.rev,
    )
    return (await log.append(draft, epoch=1)).seqs[0]


def test_a_gateway_without_workers_goes_on_when_it_hears_sighup(tmp_path: Path) -> None:
    """As who is used to other servers sends it, to have settings read anew."""

    async def story() -> None:
        async with yard(tmp_path) as (nats, log, _):
            await tell(log, Story().model())
            gateway = GatewayProcess(nats, tmp_path)
            await gateway.start()
            try:
                await gateway.listens()
                os.kill(gateway.pid, signal.SIGHUP)
                told = tmp_path / "gateway.log"
                await until(lambda: "SIGHUP without workers" in told.read_text(), "it to be told")
                await gateway.listens()
                assert await gateway.end(signal.SIGTERM) == 0
            finally:
                await gateway.end(signal.SIGKILL)

    run(story(), timeout_s=40.0)


def test_the_service_serves_survives_nats_and_ends_on_sigterm(tmp_path: Path) -> None:
    async def story() -> None:
        async with yard(tmp_path) as (nats, log, wire):
            agent = await as_user(nats, tmp_path, "agent-n1")
            agent_log = JetStreamLog(agent, source="/agent/n1")
            beacons: list[GatewayBeacon] = []
            heard = await wire.on_beacon("gateway", GatewayBeacon, lambda _, b: beacons.append(b))
            gateway, engine = GatewayProcess(nats, tmp_path), FakeEngine()
            await engine.start()
            world = Story()
            try:
                await tell(log, world.model())
                await gateway.start()
                await gateway.listens()
                async with httpx.AsyncClient(base_url=gateway.url, timeout=20.0) as client:
                    asked = asyncio.create_task(client.post(PATH, json=chat()))
                    commands = log.follow_commands(after=0)
                    async with asyncio.timeout(10.0):
                        (stored,) = await commands.next()
                    await commands.close()
                    assert (stored.actor, stored.name) == ("gateway", "model.activate")
                    secret = read_secret(yard_secret_path(tmp_path))
                    engine.key = engine_key(node_secret(secret, "n1"), "r-1")
                    ready = world.replica(endpoint=engine.endpoint, has_key=True)
                    await tell(agent_log, ready)
                    assert (await asked).status_code == 200
                    await until(
                        lambda: any("m" in b.last_use_age_s for b in beacons), "the use to be told"
                    )
                    # NATS is killed and comes back: nobody notices.
                    nats.kill()
                    for _ in range(3):
                        assert (await client.post(PATH, json=chat())).status_code == 200
                    nats.start()
                    await until(lambda: log.connected, "NATS to be back", timeout_s=15.0)

                    async def connected() -> bool:
                        return bool((await client.get("/readyz")).json()["connected"])

                    await until(connected, "the gateway to be connected", timeout_s=15.0)
                    await agent.wait_connected(10.0)
                    # A change after it is seen.
                    await tell(log, world.model("another"))

                    async def listed() -> bool:
                        return (await client.get("/v1/models/another")).status_code == 200

                    await until(listed, "the new model to be known", timeout_s=15.0)
                assert await gateway.end(signal.SIGTERM) == 0
                await until(lambda: beacons[-1].leaving, "the last beacon")
                assert (tmp_path / "gateway" / "gw-1" / "routes.json").exists()
                text = (tmp_path / "gateway.log").read_text()
                assert '"message": "gateway drained"' in text
                assert engine.key not in text
                assert secret not in text
            finally:
                await gateway.end(signal.SIGKILL)
                await engine.kill()
                await heard.close()
                await agent.close()

    run(story(), timeout_s=55.0)


def test_inv_6_a_killed_gateway_serves_again_from_its_snapshot_without_nats(tmp_path: Path) -> None:
    async def story() -> None:
        async with yard(tmp_path) as (nats, log, _):
            gateway, engine = GatewayProcess(nats, tmp_path), FakeEngine()
            await engine.start()
            world = Story()
            try:
                await tell(log, world.model())
                agent = await as_user(nats, tmp_path, "agent-n1")
                await tell(
                    JetStreamLog(agent, source="/agent/n1"),
                    world.replica(endpoint=engine.endpoint),
                )
                await agent.close()
                await gateway.start()
                await gateway.listens()
                path = tmp_path / "gateway" / "gw-1" / "routes.json"
                await until(path.exists, "a snapshot")
                await gateway.end(signal.SIGKILL)
                nats.kill()
                await gateway.start()
                await gateway.listens()
                async with httpx.AsyncClient(base_url=gateway.url, timeout=20.0) as client:
                    assert (await client.post(PATH, json=chat())).status_code == 200
                    state = (await client.get("/readyz")).json()
                    assert (state["synced"], state["connected"]) == (False, False)
                    nats.start()

                    async def synced() -> bool:
                        return bool((await client.get("/readyz")).json()["synced"])

                    await until(synced, "the log to be read", timeout_s=15.0)
            finally:
                await gateway.end(signal.SIGKILL)
                await engine.kill()

    run(story(), timeout_s=55.0)


def test_log_23_a_gateway_with_neither_nats_nor_a_snapshot_still_ends_when_told(
    tmp_path: Path,
) -> None:
    async def story() -> None:
        ensure_secret(yard_secret_path(tmp_path))
        nats = NatsServer(tmp_path / "nats", configuration=server.prepare(tmp_path, ["n1"]))
        gateway = GatewayProcess(nats, tmp_path)
        try:
            await gateway.start()
            log = tmp_path / "gateway.log"
            # It has begun: the signal has its handler.
            await until(lambda: "lost" in log.read_text(), "it to miss NATS", timeout_s=20.0)
            with pytest.raises(httpx.ConnectError):
                async with httpx.AsyncClient() as client:
                    await client.get(f"{gateway.url}/readyz")
            assert await gateway.end(signal.SIGTERM) == 0
        finally:
            await gateway.end(signal.SIGKILL)

    run(story(), timeout_s=40.0)
