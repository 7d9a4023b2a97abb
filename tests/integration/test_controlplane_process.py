"""The control plane as a process on a server with the yard's own users: starts, outages, kills, ends."""

import asyncio
import contextlib
import os
import signal
import sys
from asyncio.subprocess import PIPE, Process
from collections.abc import AsyncIterator
from pathlib import Path

import httpx

from events.connection import connect
from events.ids import new_id
from events.jetstream import JetStreamLog
from events.roles import inbox_prefix
from events.secrets import (
    api_token_path,
    ensure_secret,
    nats_password_path,
    read_secret,
    yard_secret_path,
)
from events.server import prepare
from schemas.commands import Command, ModelAdd
from tests.support.aio import run, until
from tests.support.natsserver import NatsServer
from tests.support.ports import free_port

ENTRY = {
    "name": "mine",
    "scaling": {"min": 0, "max": 1},
    "profiles": [
        {"name": "any", "engine": "command", "command": "server --port ${PORT}", "memory": "1GiB"}
    ],
}


class Yard:
    """A data folder, its NATS server, and one control plane on it."""

    def __init__(self, folder: Path) -> None:
        self.data = folder / "data"
        self.token = ensure_secret(api_token_path(self.data))
        ensure_secret(yard_secret_path(self.data))
        self.server = NatsServer(folder / "nats", configuration=prepare(self.data, ["local"]))
        self.port = free_port()

    @contextlib.asynccontextmanager
    async def controlplane(self, *more: str) -> AsyncIterator[Process]:
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-m", "controlplane",
            "--data", str(self.data), "--nats", self.server.url,
            "--listen", f"127.0.0.1:{self.port}", "--id", "cp-1", *more,
            env={**os.environ, "YARD_ID": "yard-of-tests"},
            stderr=PIPE,
        )  # fmt: skip
        assert process.stderr is not None
        reading = asyncio.create_task(process.stderr.read())
        try:
            yield process
        finally:
            if process.returncode is None:
                process.kill()
            await process.wait()
            self.log = (await reading).decode()

    def client(self) -> httpx.AsyncClient:
        return httpx.AsyncClient(
            base_url=f"http://127.0.0.1:{self.port}",
            headers={"Authorization": f"Bearer {self.token}"},
            timeout=10,
        )

    async def add(self) -> str:
        """An operator adds the model; returns the command's id."""
        connection = await connect(
            self.server.settings,
            name="test",
            user="admin",
            password=read_secret(nats_password_path(self.data, "admin")),
            inbox_prefix=inbox_prefix("admin"),
        )
        try:
            command = Command(id=new_id(), body=ModelAdd(entry=ENTRY))
            await JetStreamLog(connection, source="/ctl/admin").send("admin", command)
            return command.id
        finally:
            await connection.close()


async def status(client: httpx.AsyncClient, path: str) -> int:
    try:
        return (await client.get(path)).status_code
    except httpx.TransportError:
        return 0


async def until_status(client: httpx.AsyncClient, path: str, wanted: int) -> None:
    async def is_so() -> bool:
        return await status(client, path) == wanted

    await until(is_so, f"{wanted} on {path}", 25)


def test_log_23_started_before_nats_it_connects_later_and_outlives_its_restart(
    tmp_path: Path,
) -> None:
    async def story() -> None:
        yard = Yard(tmp_path)
        async with yard.controlplane() as process, yard.client() as client:
            await until_status(client, "/healthz", 200)
            assert await status(client, "/readyz") == 503
            assert await status(client, "/v1/models") == 503
            with yard.server:
                await until_status(client, "/readyz", 200)
                command = await yard.add()
                await until_status(client, f"/v1/commands/{command}", 200)
                shown = (await client.get("/v1/models/mine")).json()["data"]
                assert shown["event"]["actor"] == "admin"
                yard.server.kill()
                await until_status(client, "/readyz", 503)
                assert await status(client, "/v1/models/mine") == 200
                yard.server.start()
                await until_status(client, "/readyz", 200)
                assert process.returncode is None
                process.send_signal(signal.SIGTERM)
                assert await asyncio.wait_for(process.wait(), 10) == 0
        assert '"level": "critical"' not in yard.log
        assert "Traceback" not in yard.log

    run(story(), 55)


def test_inv_6_a_killed_control_plane_comes_back_to_the_same_state(tmp_path: Path) -> None:
    async def story() -> None:
        yard = Yard(tmp_path)
        with yard.server:
            async with yard.controlplane() as process, yard.client() as client:
                await until_status(client, "/readyz", 200)
                command = await yard.add()
                await until_status(client, f"/v1/commands/{command}", 200)
                before = (await client.get("/v1/models/mine")).json()["data"]
                process.kill()
                await process.wait()
            async with yard.controlplane(), yard.client() as client:
                await until_status(client, "/readyz", 200)
                doctor = (await client.get("/v1/doctor")).json()
                assert doctor["leading"]  # at once: the record names this host and a dead pid
                assert (await client.get("/v1/models/mine")).json()["data"] == before

    run(story(), 55)


def test_what_is_missing_is_said_in_a_sentence_and_the_process_ends(tmp_path: Path) -> None:
    async def story() -> None:
        yard = Yard(tmp_path)
        api_token_path(yard.data).unlink()
        async with yard.controlplane() as process:
            assert await asyncio.wait_for(process.wait(), 20) == 1
        assert "api.token" in yard.log
        assert "Traceback" not in yard.log

    run(story(), 40)
