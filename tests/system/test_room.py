"""Several models and room for one: who waits, who is drained, and that every load serves somebody."""

import asyncio
from pathlib import Path
from typing import Any

import pytest

from tests.support.aio import run
from tests.system.yard import chat, client, scripted_model, system_yard

ONE_CARD: dict[str, Any] = {
    "nodeagent": {"cards": [{"id": "gpu0", "kind": "gpu", "memory": "1GiB"}]},
    "controlplane": {"min_residency": "200ms"},
}
WHOLE_CARD = {"memory": "900MiB", "card": "local/gpu0"}


def on_card(name: str, *flags: str, **more: Any) -> dict[str, Any]:
    return scripted_model(name, *flags, profile=WHOLE_CARD, **more)


@pytest.mark.timeout(90)
def test_scn_a3_a_long_stream_finishes_before_its_card_goes_to_another(tmp_path: Path) -> None:
    async def story() -> None:
        async with system_yard(tmp_path, settings=ONE_CARD) as yard:
            await yard.add(
                on_card("a", "--load-s", "0.1", "--pace-s", "0.05", "--tokens", "60"),
                on_card("b", "--load-s", "0.1"),
            )
            async with client(yard.gateway()) as http:
                assert (await http.post("/v1/chat/completions", json=chat("a"))).status_code == 200
                async with http.stream(
                    "POST", "/v1/chat/completions", json=chat("a", stream=True, max_tokens=60)
                ) as long:
                    lines = long.aiter_lines()
                    await anext(lines)
                    other = asyncio.create_task(http.post("/v1/chat/completions", json=chat("b")))
                    await yard.event("replica.draining", lambda e: e.state.model == "a")
                    text = "\n".join([line async for line in lines])
                    assert "finish_reason" in text
                    assert text.rstrip().endswith("data: [DONE]")
                answer = await other
                assert answer.status_code == 200, answer.text
            stopped = await yard.event("replica.stopped", lambda e: e.state.model == "a")
            b = await yard.event("replica.starting", lambda e: e.state.model == "b")
            assert stopped.seq < b.seq

    run(story(), 80)


@pytest.mark.timeout(120)
def test_scn_a4_alternating_clients_never_load_more_than_they_ask(tmp_path: Path) -> None:
    async def story() -> None:
        async with system_yard(tmp_path, settings=ONE_CARD) as yard:
            await yard.add(on_card("a", "--load-s", "0.1"), on_card("b", "--load-s", "0.1"))
            served = 0

            async def asks(number: int) -> None:
                nonlocal served
                async with client(yard.gateway()) as http:
                    for turn in range(3):
                        model = "ab"[(number + turn) % 2]
                        answer = await http.post("/v1/chat/completions", json=chat(model))
                        assert answer.status_code == 200, answer.text
                        served += 1

            await asyncio.gather(*(asks(n) for n in range(10)))
            assert served == 30
            loads = {e.key for e in await yard.in_log("replica.ready")}
            assert 2 <= len(loads) <= served

    run(story(), 110)


@pytest.mark.timeout(90)
def test_scn_a7_three_cold_models_and_room_for_one_are_served_or_told_when(tmp_path: Path) -> None:
    async def story() -> None:
        async with system_yard(tmp_path, settings=ONE_CARD) as yard:
            names = ("a", "b", "c")
            await yard.add(*(on_card(n, "--load-s", "0.3") for n in names))
            async with client(yard.gateway()) as http:
                answers = await asyncio.gather(
                    *(http.post("/v1/chat/completions", json=chat(n)) for n in names)
                )
            for answer in answers:
                if answer.status_code != 200:
                    assert answer.status_code == 503
                    assert answer.json()["error"]["code"] in ("no_capacity", "model_loading")
                    assert int(answer.headers["retry-after"]) >= 1
            assert any(a.status_code == 200 for a in answers)

    run(story(), 80)


@pytest.mark.timeout(60)
def test_inv_9_a_model_too_large_for_every_card_is_told_the_numbers(tmp_path: Path) -> None:
    async def story() -> None:
        async with system_yard(tmp_path, settings=ONE_CARD) as yard:
            await yard.add(scripted_model("huge", profile={"memory": "9GiB", "card": "local/gpu0"}))
            async with client(yard.gateway()) as http:
                answer = await http.post("/v1/chat/completions", json=chat("huge"))
            assert answer.status_code == 503
            error = answer.json()["error"]
            assert error["code"] == "no_capacity"
            assert "gpu0" in error["message"]
            assert "9.0 GiB" in error["message"]

    run(story(), 50)


@pytest.mark.timeout(90)
def test_scn_a15_changed_arguments_replace_the_replica_and_leave_others_alone(
    tmp_path: Path,
) -> None:
    async def story() -> None:
        async with system_yard(tmp_path) as yard:
            await yard.add(
                scripted_model("a", "--load-s", "0.1"), scripted_model("b", "--load-s", "0.1")
            )
            async with client(yard.gateway()) as http:
                for name in ("a", "b"):
                    assert (
                        await http.post("/v1/chat/completions", json=chat(name))
                    ).status_code == 200
                old = await yard.event("replica.ready", lambda e: e.state.model == "a")
                before = yard.position
                await yard.add(scripted_model("a", "--load-s", "0.2"))
                new = await yard.event(
                    "replica.ready",
                    lambda e: e.state.model == "a" and e.key != old.key,
                    after=before,
                )
                assert new.state.revision != old.state.revision
                await yard.event("replica.stopped", lambda e: e.key == old.key, after=before)
                assert (await http.post("/v1/chat/completions", json=chat("a"))).status_code == 200
            assert not [
                e
                for e in yard.events
                # "measured" may still follow its ready
                if e.noun == "replica"
                and e.seq > before
                and e.state.model == "b"
                and e.state.phase != "ready"
            ]

    run(story(), 80)
