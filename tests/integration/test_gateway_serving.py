"""A gateway with its real HTTP, a log in memory and scripted engines: what clients see of a loaded model."""

from pathlib import Path

from tests.support.aio import run
from tests.support.gateway_yard import chat, memory_yard


def test_a_loaded_model_answers_at_once(tmp_path: Path) -> None:
    async def story() -> None:
        async with memory_yard(tmp_path) as yard:
            await yard.model()
            engine = await yard.engine(model="m")
            await yard.replica(engine, has_key=True)
            gateway = await yard.gateway()
            async with yard.client(gateway) as client:
                answer = await client.post("/v1/chat/completions", json=chat())
                assert answer.status_code == 200, answer.text
                assert answer.json()["choices"][0]["message"]["content"].startswith("w0 ")
                assert answer.headers["x-yard-waited-ms"] == "0"
                assert answer.headers["x-request-id"]
            assert len(engine.seen) == 1
            assert await yard.activates() == []

    run(story())
