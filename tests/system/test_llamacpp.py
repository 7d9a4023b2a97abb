"""The real engine: SmolLM2 on llama.cpp, asked by the openai client, given back when idle."""

from pathlib import Path

import openai
import pytest

from tests.support.aio import run
from tests.system.load import Loop
from tests.system.yard import SMOLLM2, system_yard


def smollm2(idle_timeout: str) -> dict[str, object]:
    return {
        "name": "smollm2",
        "aliases": ["tiny"],
        "source": str(SMOLLM2),
        "context_length": 2048,
        "max_output": 1024,
        "scaling": {"min": 0, "max": 1, "idle_timeout": idle_timeout},
        "profiles": [
            {
                "name": "cpu",
                "engine": "llamacpp",
                # One thread: several wait for each other by spinning, which a busy machine punishes.
                "args": ["--ctx-size", "2048", "--threads", "1"],
                "memory": "1GiB",
            }
        ],
    }


@pytest.mark.timeout(120)
def test_req_a8_a_real_engine_answers_the_openai_client_and_is_stopped_when_idle(
    tmp_path: Path,
) -> None:
    async def story() -> None:
        # The clock of idleness begins with the third beacon.
        settings = {"nodeagent": {"beacon": "1s"}}
        async with system_yard(tmp_path, settings=settings) as yard:
            await yard.add(smollm2("2s"))
            async with openai.AsyncOpenAI(
                base_url=f"{yard.gateway()}/v1", api_key="any", max_retries=0
            ) as api:
                stream = await api.chat.completions.create(
                    model="tiny",
                    messages=[{"role": "user", "content": "Say hello."}],
                    stream=True,
                    max_tokens=24,
                )
                text = ""
                async for chunk in stream:
                    assert chunk.model == "tiny", "the answer names what the client asked for"
                    text += chunk.choices[0].delta.content or "" if chunk.choices else ""
                assert text.strip()
                whole = await api.chat.completions.create(
                    model="smollm2",
                    messages=[{"role": "user", "content": "Say hello."}],
                    max_tokens=8,
                )
                assert whole.model == "smollm2"
                listed = await api.models.list()
                assert "smollm2" in {m.id for m in listed.data}
                with pytest.raises(openai.NotFoundError) as missing:
                    await api.chat.completions.create(
                        model="typo", messages=[{"role": "user", "content": "x"}]
                    )
                assert missing.value.code == "model_not_found"
            ready = await yard.event("replica.ready")
            await yard.event("replica.stopped")
            await yard.event("card.released")
            measured = await yard.event(
                "record.measured", lambda e: e.state.measured[0].memory_bytes > 0
            )
            assert ready.state.load_s > 0
            assert 50 * 2**20 < measured.state.measured[0].memory_bytes < 2**30

    run(story(), 110)


@pytest.mark.timeout(120)
def test_inv_6_a_real_engine_survives_its_agent_under_load(tmp_path: Path) -> None:
    async def story() -> None:
        async with system_yard(tmp_path) as yard:
            await yard.add(smollm2("15m"))
            async with Loop(yard.gateway(), "smollm2", rate=2.0) as loop:
                await loop.more_answers(2, 60)
                for part in ("nodeagent", "controlplane", "nats"):
                    yard.kill(part)
                    await loop.more_answers(4)
            assert loop.bad() == []
            assert len({e.key for e in await yard.in_log("replica.ready")}) == 1

    run(story(), 110)
