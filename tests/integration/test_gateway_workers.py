"""`python -m gateway --workers 2` on a real nats-server: one port, workers that are restarted and succeeded."""

import asyncio
import re
import signal
from dataclasses import dataclass, field
from pathlib import Path

import httpx
import psutil
import pytest

from events.jetstream import JetStreamLog
from events.secrets import ensure_secret, yard_secret_path
from tests.integration.test_gateway_process import GatewayProcess, as_user, tell, yard
from tests.support.aio import run, until
from tests.support.fake_engine import FakeEngine
from tests.support.gateway_world import Story
from tests.support.gateway_yard import chat
from tests.support.natsserver import NatsServer

PATH = "/v1/chat/completions"


@dataclass
class Load:
    """Clients that ask without pause, each on a connection it keeps for as long as the gateway does."""

    url: str
    answered: int = 0
    failures: list[str] = field(default_factory=list)
    stopping: bool = False

    async def client(self, *, keeps: bool) -> None:
        headers = {} if keeps else {"connection": "close"}
        async with httpx.AsyncClient(base_url=self.url, timeout=20.0, headers=headers) as client:
            while not self.stopping:
                try:
                    answer = await client.post(PATH, json=chat())
                except httpx.TransportError as problem:
                    self.failures.append(repr(problem))
                    continue
                self.answered += 1
                if answer.status_code != 200:
                    self.failures.append(answer.text)

    async def more(self, count: int) -> None:
        """Waits until so many more were answered."""
        goal = self.answered + count
        await until(lambda: self.answered >= goal, "more to be answered", timeout_s=30.0)


async def workers_of(url: str) -> set[int]:
    """Those whose numbers any of them shows."""
    async with httpx.AsyncClient(timeout=20.0) as client:
        page = (await client.get(f"{url}/metrics")).text
    return {int(n) for n in re.findall(r'worker="(\d+)"', page)}


def children_of(pid: int) -> set[int]:
    return {child.pid for child in psutil.Process(pid).children()}


async def shows(url: str, numbers: set[int]) -> None:
    async def there() -> bool:
        try:
            return await workers_of(url) == numbers
        except httpx.TransportError:
            return False

    await until(there, f"the workers {numbers}", timeout_s=40.0)


def test_workers_share_a_port_are_restarted_and_succeeded_without_a_failed_request(
    tmp_path: Path,
) -> None:
    async def story() -> None:
        async with yard(tmp_path) as (nats, log, _):
            agent = await as_user(nats, tmp_path, "agent-n1")
            engine, world = FakeEngine(tokens=2), Story()
            slow = FakeEngine(model="slow", tokens=40, pace_s=0.1)
            for one in (engine, slow):
                await one.start()
            gateway = GatewayProcess(nats, tmp_path, more=("--workers", "2"))
            told = JetStreamLog(agent, source="/agent/n1")
            try:
                await tell(log, world.model())
                await tell(log, world.model("slow"))
                await tell(told, world.replica(endpoint=engine.endpoint))
                await tell(told, world.replica("r-2", model="slow", endpoint=slow.endpoint))
                await gateway.start()
                await gateway.listens()
                await shows(gateway.url, {1, 2})
                first = children_of(gateway.pid)
                assert len(first) == 2

                # One is killed: another takes its number, and nobody has to tell anybody.
                psutil.Process(next(iter(first))).kill()
                await until(
                    lambda: len(children_of(gateway.pid) - first) == 1,
                    "another worker to be started",
                    timeout_s=20.0,
                )
                await shows(gateway.url, {1, 2})

                # Under load, and with a stream that outlasts the change, all are replaced.
                before = children_of(gateway.pid)
                load = Load(gateway.url)
                async with asyncio.TaskGroup() as group:
                    for n in range(6):
                        group.create_task(load.client(keeps=n % 3 > 0))
                    streaming = group.create_task(_stream(gateway.url, chat("slow", stream=True)))
                    await slow.until_seen(1)
                    await load.more(30)
                    psutil.Process(gateway.pid).send_signal(signal.SIGHUP)
                    await until(
                        lambda: not children_of(gateway.pid) & before,
                        "the old workers to end",
                        timeout_s=40.0,
                    )
                    await load.more(30)
                    load.stopping = True
                assert load.failures == []
                assert streaming.result().endswith("data: [DONE]\n\n")
                assert await workers_of(gateway.url) == {3, 4}
                after = children_of(gateway.pid)
                assert len(after) == 2

                assert await gateway.end(signal.SIGTERM) == 0
                assert not any(psutil.pid_exists(pid) for pid in after)
                with pytest.raises(httpx.ConnectError):
                    await workers_of(gateway.url)
            finally:
                await gateway.end(signal.SIGKILL)
                for one in (engine, slow):
                    await one.kill()
                await agent.close()

    run(story(), timeout_s=110.0)


async def _stream(url: str, body: dict[str, object]) -> str:
    async with httpx.AsyncClient(base_url=url, timeout=60.0) as client:
        return (await client.post(PATH, json=body)).text


def test_workers_end_with_a_parent_that_is_killed_and_a_bad_start_ends_the_parent(
    tmp_path: Path,
) -> None:
    async def story() -> None:
        async with yard(tmp_path) as (nats, log, _):
            await tell(log, Story().model())
            gateway = GatewayProcess(nats, tmp_path, more=("--workers", "2"))
            await gateway.start()
            try:
                await gateway.listens()
                children = children_of(gateway.pid)
                await gateway.end(signal.SIGKILL)
                await until(
                    lambda: not any(psutil.pid_exists(pid) for pid in children),
                    "the workers to end with it",
                )
            finally:
                await gateway.end(signal.SIGKILL)
            # Beyond loopback nobody may listen without a key: no worker comes to serve.
            wrong = GatewayProcess(nats, tmp_path, "gw-2", "0.0.0.0", ("--workers", "2"))
            await wrong.start()
            try:
                assert await wrong.ended() == 1
                assert "no worker came to serve" in (tmp_path / "gateway.log").read_text()
            finally:
                await wrong.end(signal.SIGKILL)

    run(story(), timeout_s=80.0)


def test_an_address_that_is_taken_is_said_by_the_parent(tmp_path: Path) -> None:
    async def story() -> None:
        ensure_secret(yard_secret_path(tmp_path))
        taken = await asyncio.start_server(lambda *_: None, "127.0.0.1", 0)
        nats = NatsServer(tmp_path / "nats")
        gateway = GatewayProcess(nats, tmp_path, more=("--workers", "2"))
        gateway.port = taken.sockets[0].getsockname()[1]
        try:
            await gateway.start()
            assert await gateway.ended() == 1
            assert "cannot listen on 127.0.0.1" in (tmp_path / "gateway.log").read_text()
        finally:
            await gateway.end(signal.SIGKILL)
            taken.close()
            await taken.wait_closed()

    run(story(), timeout_s=40.0)
