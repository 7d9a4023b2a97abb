"""Whatever agents answer, a request for an adapter ends with one answer, in bounded time, and leaves nothing behind."""

import asyncio
import tempfile
from datetime import timedelta
from pathlib import Path
from typing import Any
from unittest.mock import patch

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from gateway import adapters
from gateway.clock import LoopClock
from schemas.adapterasks import Ensure, EnsureAnswer
from schemas.adapternames import engine_name
from tests.support.aio import run, until
from tests.support.gateway_agent import FakeAgent, a_replica_with_slots, agent, nothing_left
from tests.support.gateway_world import a_profile, an_adapter
from tests.support.gateway_yard import chat, memory_yard

PATH = "/v1/chat/completions"
POET = engine_name("poet", an_adapter().version)

SAYS = st.sampled_from(
    ["loads", "loading", "waiting", "not_here", "unsure", "no", "odd", "never", "raises", "lies"]
)
"""What an agent does with one ask."""

ENDS = {
    (200, ""),
    (400, "invalid_request"),
    (503, "start_failed"),
    (503, "no_capacity"),
    (503, "yard_unavailable"),
}


async def said(made: FakeAgent, what: str, ask: Ensure) -> EnsureAnswer:
    until_then = LoopClock().now() + timedelta(seconds=20)
    match what:
        case "loads":
            return await made.load(ask)
        case "loading" | "waiting" | "not_here":
            return EnsureAnswer(status=what, how="loaded" if what == "loading" else "hit")  # type: ignore[arg-type]
        case "unsure":
            return EnsureAnswer(status="refused", code="not_found", sentence="not known yet")
        case "no":
            return EnsureAnswer(
                status="refused", code="load_failed", sentence="no memory", until=until_then
            )
        case "odd":
            return EnsureAnswer(
                status="refused",
                code="load_failed",
                sentence="error 7",
                until=until_then,
                known=False,
            )
        case "never":
            return EnsureAnswer(
                status="refused", code="rank_too_high", sentence="64 > 16", whose="adapter"
            )
        case "lies":
            return EnsureAnswer(status="ready", engine_name=POET)
        case _:
            raise RuntimeError("an agent's own fault")


@settings(
    max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(
    st.lists(st.lists(SAYS, max_size=6), min_size=1, max_size=3),
    st.integers(1, 4),
    st.sampled_from([None, "stopped", "draining"]),
)
def test_inv_5_every_wait_for_an_adapter_ends_whatever_agents_say(
    scripts: list[list[str]], requests: int, then: Any
) -> None:
    """Each replica's agent says what its script has, over and over its last; with `then` one of them ends."""

    async def story(folder: Path) -> None:
        async with memory_yard(folder) as yard, agent(yard) as made:
            await yard.model(max_loaded_adapters=4)
            await yard.tell(yard.story.adapter())
            left = {f"r-{n}": list(script) for n, script in enumerate(scripts)}
            for id in left:
                await a_replica_with_slots(yard, made, id)

            async def on_ask(ask: Ensure) -> EnsureAnswer:
                made.asks.append(ask)
                script = left[ask.replica]
                what = script.pop(0) if len(script) > 1 else (script or ["loads"])[0]
                return await said(made, what, ask)

            serving = await made.wire.serve("adapters", "n1", Ensure, on_ask)
            gateway = await yard.gateway(wait_s=0.3, no_decision_s=0.2)
            async with yard.client(gateway) as client:
                asked = [
                    asyncio.create_task(client.post(PATH, json=chat("poet")))
                    for _ in range(requests)
                ]
                if then is not None:
                    await yard.replica(
                        made.engines["r-0"], "r-0", then, adapter_slots=4, forced=True
                    )
                answers = await asyncio.gather(*asked)
            for answer in answers:
                code = "" if answer.status_code == 200 else answer.json()["error"]["code"]
                known = ENDS | ({(503, "model_loading")} if then is not None else set())
                assert (answer.status_code, code) in known
                if answer.status_code == 200:
                    assert answer.json()["choices"][0]["message"]["content"].startswith(f"[{POET}]")
            await until(lambda: gateway.adapters.open_questions == 0, "every question to end")
            assert len(made.asks) < 400
            nothing_left(gateway)
            await serving.close()

    with (
        tempfile.TemporaryDirectory() as folder,
        patch.object(adapters, "PAUSE_S", 0.02),
        patch.object(adapters, "LOAD_S", 0.3),
    ):
        run(story(Path(folder)), 30)


def test_an_adapter_under_the_base_url_of_a_card_is_loaded_there(tmp_path: Path) -> None:
    async def story() -> None:
        async with memory_yard(tmp_path) as yard, agent(yard) as made:
            await yard.model(max_loaded_adapters=4, profiles=(a_profile("gpu"),))
            await yard.tell(yard.story.adapter())
            await yard.cards("n1", "gpu0", "gpu1")
            for number in range(2):
                await a_replica_with_slots(yard, made, f"r-{number}", cards=(f"gpu{number}",))
            gateway = await yard.gateway()
            async with yard.client(gateway) as client:
                for number in (1, 0, 1):
                    answer = await client.post(f"/cards/n1/gpu{number}{PATH}", json=chat("m:poet"))
                    assert answer.status_code == 200
                    assert answer.json()["model"] == "m:poet"
                listed = (await client.get("/cards/n1/gpu1/v1/models")).json()["data"]
                assert [c["id"] for c in listed] == ["m", "poet"]
                nowhere = await client.post(f"/cards/n1/cpu{PATH}", json=chat("poet"))
                assert nowhere.json()["error"]["code"] == "model_not_found"
            assert [a.replica for a in made.asks] == ["r-1", "r-0"]

    run(story())


def test_a_large_body_reaches_the_engine_whole_under_the_engine_side_name(tmp_path: Path) -> None:
    async def story() -> None:
        async with memory_yard(tmp_path) as yard, agent(yard) as made:
            await yard.model(max_loaded_adapters=4)
            await yard.tell(yard.story.adapter())
            engine = await a_replica_with_slots(yard, made)
            gateway = await yard.gateway(body_memory_bytes=65536)
            text = "ü" * 400_000
            async with yard.client(gateway) as client:
                for _ in range(2):
                    body = {"messages": [{"role": "user", "content": text}], "model": "poet"}
                    answer = await client.post(PATH, json=body)
                    assert answer.status_code == 200
            for seen in engine.seen:
                assert seen.body == {
                    "messages": [{"role": "user", "content": text}],
                    "model": POET,
                }

    run(story())
