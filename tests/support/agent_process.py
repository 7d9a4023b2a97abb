"""A real agent process on a real nats-server with the rights of its role, and the control plane's hand beside it."""

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

from events import server
from events.connection import Connection, connect
from events.jetstream import JetStreamLog, JetStreamWire
from events.provision import ensure_streams
from events.roles import inbox_prefix
from events.secrets import ensure_node_secret, nats_password_path, read_secret
from schemas.messages import SCHEMA
from schemas.settings import NatsSettings
from tests.support.agent_yard import Hand, beside
from tests.support.ports import engine_environment, free_port

NODE = "n1"


@dataclass(slots=True)
class AgentProcess:
    """One life of `python -m nodeagent`."""

    process: subprocess.Popen[bytes]
    log: Path

    @property
    def pid(self) -> int:
        return self.process.pid

    def send(self, number: int) -> None:
        self.process.send_signal(number)

    async def ended(self, timeout_s: float = 20.0) -> int:
        """The exit code; negative for a signal."""
        return await asyncio.to_thread(self.process.wait, timeout_s)


@dataclass(slots=True)
class ServerYard:
    """A server in a data folder; it can be killed and started again on the same port and store."""

    data: Path
    port: int
    _hand: Hand | None = None
    _control: JetStreamWire | None = None
    _server: subprocess.Popen[bytes] | None = None
    _agents: list[AgentProcess] = field(default_factory=list)

    @property
    def hand(self) -> Hand:
        assert self._hand is not None, "not open"
        return self._hand

    @property
    def control(self) -> JetStreamWire:
        """What the control plane says and hears."""
        assert self._control is not None, "not open"
        return self._control

    def take(self, hand: Hand, control: JetStreamWire) -> None:
        self._hand = hand
        self._control = control

    async def serve(self) -> None:
        argv = server.command_line(
            server.prepare(self.data, [NODE]),
            self.data / "nats" / "store",
            host="127.0.0.1",
            port=self.port,
            monitoring_port=free_port(),
        )
        self._server = subprocess.Popen(argv, stderr=subprocess.DEVNULL)  # noqa: ASYNC220
        assert await server.answers("127.0.0.1", self.port, 10.0), "nats-server did not answer"

    async def kill_server(self) -> None:
        assert self._server is not None
        self._server.kill()
        await asyncio.to_thread(self._server.wait, 10)
        self._server = None

    def start_agent(self, data: Path | None = None, **settings: str) -> AgentProcess:
        """`data` other than the yard's is another machine with the same node id."""
        log = self.data / f"agent-{len(self._agents)}.log"
        folder = data or self.data
        if data is not None:
            (folder / "secrets").mkdir(parents=True, mode=0o700)
            for name in (f"node-{NODE}.key", f"nats-agent-{NODE}.password"):
                (folder / "secrets" / name).write_bytes((self.data / "secrets" / name).read_bytes())
        environment = {
            **os.environ,
            "YARD_NODEAGENT_ALLOW_COMMANDS": "true",
            **engine_environment(),
            "YARD_NODEAGENT_STOP_GRACE_S": "2",
            **settings,
        }
        with log.open("wb") as out:
            given = ("--data", str(folder), "--id", NODE, "--nats", f"nats://127.0.0.1:{self.port}")
            process = subprocess.Popen(
                [sys.executable, "-m", "nodeagent", *given], env=environment, stderr=out
            )
        agent = AgentProcess(process=process, log=log)
        self._agents.append(agent)
        return agent

    async def close(self) -> None:
        """Ends agents with their engines, then the server."""
        stubborn: list[str] = []
        for agent in self._agents:
            if agent.process.poll() is None:
                agent.send(signal.SIGINT)
                try:
                    await agent.ended(15.0)
                except subprocess.TimeoutExpired:
                    agent.process.kill()
                    await agent.ended()
                    stubborn.append(agent.log.read_text(errors="replace")[-3000:])
        if self._server is not None:
            await self.kill_server()
        assert not stubborn, "an agent did not end with its engines; its log:\n" + "\n".join(
            stubborn
        )


@asynccontextmanager
async def server_yard(data: Path) -> AsyncIterator[ServerYard]:
    """A yard on a server, its hand connected as the control plane; a gateway beats through it."""
    port = free_port()
    ensure_node_secret(data, NODE)
    yard = ServerYard(data=data, port=port)
    await yard.serve()
    connections: list[Connection] = []
    try:
        control = await _connected(data, port, "control")
        connections.append(control)
        gateway = await _connected(data, port, "gateway")
        connections.append(gateway)
        await ensure_streams(control, "test-yard", SCHEMA)
        log = JetStreamLog(control, source="/cp/test")
        yard.take(Hand(log, JetStreamWire(gateway), node=NODE), JetStreamWire(control))
        async with beside(yard.hand.watch(), yard.hand.beacons()):
            try:
                yield yard
            finally:
                await yard.close()
    finally:
        for connection in connections:
            with contextlib.suppress(Exception):
                await connection.close()
        await yard.close()


async def _connected(data: Path, port: int, user: str) -> Connection:
    return await connect(
        NatsSettings(url=f"nats://127.0.0.1:{port}"),
        name="test",
        user=user,
        password=read_secret(nats_password_path(data, user)),
        inbox_prefix=inbox_prefix(user),
    )
