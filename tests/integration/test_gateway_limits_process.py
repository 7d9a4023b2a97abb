"""Keys and shared limits with gateways as processes, on a real nats-server, each with the rights of its role."""

import asyncio
import signal
from pathlib import Path

import httpx

from events.jetstream import JetStreamLog
from events.secrets import engine_key, node_secret, read_secret, yard_secret_path
from schemas.key import KeyCreated
from tests.integration.test_gateway_process import GatewayProcess, as_user, tell, yard
from tests.support.aio import run, until
from tests.support.fake_engine import FakeEngine
from tests.support.gateway_keys import ID, SECRET, a_key, text_of
from tests.support.gateway_world import Story
from tests.support.gateway_yard import chat

PATH = "/v1/chat/completions"


def test_gateways_of_one_yard_share_a_limit_over_nats(tmp_path: Path) -> None:
    """One that is killed is no more reckoned with after a moment; what it told stays used."""

    async def story() -> None:
        async with yard(tmp_path) as (nats, log, _):
            agent = await as_user(nats, tmp_path, "agent-n1")
            engine, world = FakeEngine(), Story()
            await engine.start()
            secret = read_secret(yard_secret_path(tmp_path))
            engine.key = engine_key(node_secret(secret, "n1"), "r-1")
            one, two = (GatewayProcess(nats, tmp_path, id) for id in ("gw-1", "gw-2"))
            try:
                await tell(log, world.model())
                key = a_key(rpm=20)
                await tell(log, world.event("key", (ID,), KeyCreated(by="admin"), key))
                await tell(
                    JetStreamLog(agent, source="/agent/n1"),
                    world.replica(endpoint=engine.endpoint, has_key=True),
                )
                for gateway in (one, two):
                    await gateway.start()
                    await gateway.listens()
                headers = {"authorization": f"Bearer {text_of()}"}
                async with httpx.AsyncClient(timeout=20.0, headers=headers) as client:

                    async def ask(gateway: GatewayProcess) -> int:
                        return (await client.post(gateway.url + PATH, json=chat())).status_code

                    anonymous = await client.post(
                        one.url + PATH, json=chat(), headers={"authorization": ""}
                    )
                    assert anonymous.status_code == 401
                    statuses = await asyncio.gather(
                        *(ask(g) for _ in range(15) for g in (one, two))
                    )
                    assert set(statuses) <= {200, 429}
                    assert 10 <= statuses.count(200) <= 21
                    await two.end(signal.SIGKILL)

                    async def used_up() -> bool:
                        await ask(one)
                        return len(engine.seen) >= 20

                    await until(used_up, "the living one to use what is left", timeout_s=15.0)
                    assert await ask(one) == 429
                    # The bound: one more for the other gateway, and what that had not told when it was killed.
                    assert 20 <= len(engine.seen) <= 20 + 1 + 10
                text = (tmp_path / "gateway.log").read_text()
                assert f'"key":"{ID}"' in text
                assert SECRET not in text
            finally:
                for gateway in (one, two):
                    await gateway.end(signal.SIGKILL)
                await engine.kill()
                await agent.close()

    run(story(), timeout_s=55.0)


def test_a_gateway_that_may_not_listen_says_what_to_do_and_ends(tmp_path: Path) -> None:
    async def story() -> None:
        async with yard(tmp_path) as (nats, log, _):
            await tell(log, Story().model())
            gateway = GatewayProcess(nats, tmp_path, host="0.0.0.0")
            await gateway.start()
            assert await gateway.ended() == 1
            text = (tmp_path / "gateway.log").read_text()
            assert "yardctl key create" in text
            assert "gateway.keys: off" in text
            assert "Traceback" not in text

    run(story(), timeout_s=40.0)
