"""Loads that fail, last too long or find no place, and engines and replicas that are lost on the way."""

import asyncio
from pathlib import Path

import pytest

from gateway import adapters
from gateway.clock import LoopClock
from schemas.adapterasks import Ensure
from schemas.adapternames import engine_name
from tests.support.aio import run, until
from tests.support.gateway_agent import (
    EnsureAnswer,
    a_yard_with,
    agent,
    error,
    for_now,
    nothing_left,
    refused,
)
from tests.support.gateway_world import an_adapter
from tests.support.gateway_yard import chat, memory_yard

PATH = "/v1/chat/completions"
POET = engine_name("poet", an_adapter().version)


def test_req_b58_an_adapters_own_fault_is_told_at_once_and_no_other_replica_is_asked(
    tmp_path: Path,
) -> None:
    words = "LoRA rank 64 is greater than max_lora_rank 16."

    async def story() -> None:
        async with memory_yard(tmp_path) as yard, agent(yard) as made:
            engines = await a_yard_with(yard, made, "r-1", "r-2")
            gateway = await yard.gateway()
            made.answers = [refused(whose="adapter", code="rank_too_high", sentence=words)]
            async with yard.client(gateway) as client:
                answer = await client.post(PATH, json=chat("poet"))
            status, code, message = error(answer)
            assert (status, code) == (400, "invalid_request")
            assert words in message
            assert answer.json()["error"]["param"] == "model"
            assert answer.headers["x-should-retry"] == "false"
            assert len(made.asks) == 1
            assert not [s for e in engines for s in e.seen]
            assert len(gateway.gateway.pins) == 0
            nothing_left(gateway)

    run(story())


def test_scn_d6_a_replicas_own_fault_sends_the_request_to_another_one(tmp_path: Path) -> None:
    async def story() -> None:
        async with memory_yard(tmp_path) as yard, agent(yard) as made:
            await a_yard_with(yard, made, "r-1", "r-2")
            gateway = await yard.gateway()
            made.answers = [for_now()]
            async with yard.client(gateway) as client:
                answer = await client.post(PATH, json=chat("poet"))
            assert answer.status_code == 200
            assert answer.headers["x-yard-adapter"] == "loaded"
            assert {a.replica for a in made.asks} == {"r-1", "r-2"}
            assert len(made.asks) == 2
            # It waited once, however many replicas that took.
            numbers = gateway.metrics.render().decode()
            assert 'yard_gateway_adapter_seconds_count{model="m"} 1.0' in numbers
            nothing_left(gateway)

    run(story())


def test_every_replica_asked_once_and_then_the_engines_words_and_when_to_come_back(
    tmp_path: Path,
) -> None:
    async def story() -> None:
        async with memory_yard(tmp_path) as yard, agent(yard) as made:
            await a_yard_with(yard, made, "r-1", "r-2", "r-3")
            gateway = await yard.gateway()
            made.answers = [for_now(sentence="out of memory")] * 3
            async with yard.client(gateway) as client:
                answer = await client.post(PATH, json=chat("poet"))
            status, code, message = error(answer)
            assert (status, code) == (503, "start_failed")
            assert "out of memory" in message
            assert 25 <= int(answer.headers["retry-after"]) <= 30
            assert sorted(a.replica for a in made.asks) == ["r-1", "r-2", "r-3"]
            nothing_left(gateway)

    run(story())


def test_req_bugb6_the_same_unknown_words_from_two_replicas_stop_the_tour(tmp_path: Path) -> None:
    async def story() -> None:
        async with memory_yard(tmp_path) as yard, agent(yard) as made:
            await a_yard_with(yard, made, "r-1", "r-2", "r-3")
            gateway = await yard.gateway()
            made.answers = [for_now(sentence="engine refused it", known=False)] * 2
            async with yard.client(gateway) as client:
                answer = await client.post(PATH, json=chat("poet"))
            status, code, message = error(answer)
            assert (status, code) == (400, "invalid_request")
            assert "engine refused it" in message
            assert len(made.asks) == 2

    run(story())


@pytest.mark.parametrize("stream", [False, True])
def test_scn_d4_an_engine_that_forgot_it_loads_it_again_and_answers_once(
    tmp_path: Path, stream: bool
) -> None:
    async def story() -> None:
        async with memory_yard(tmp_path) as yard, agent(yard) as made:
            (engine,) = await a_yard_with(yard, made)
            gateway = await yard.gateway()
            async with yard.client(gateway) as client:
                await client.post(PATH, json=chat("poet"))
                assert engine.names is not None
                engine.names.clear()
                # B29: its 404 is no answer for the client; the agent is told which name was gone.
                answer = await client.post(PATH, json=chat("poet", stream=stream))
                assert answer.status_code == 200
                assert answer.headers["x-yard-adapter"] == "loaded"
                assert [a.gone for a in made.asks] == ["", POET]
                after = await client.post(PATH, json=chat("poet"))
            assert after.headers["x-yard-adapter"] == "hit"
            assert len(engine.seen) == 4
            assert "yard_gateway_adapters_gone_total 1.0" in gateway.metrics.render().decode()
            nothing_left(gateway)

    run(story())


def test_req_b29_an_engine_that_goes_on_forgetting_is_left_for_another_one(tmp_path: Path) -> None:
    async def story() -> None:
        async with memory_yard(tmp_path) as yard, agent(yard) as made:
            engines = await a_yard_with(yard, made, "r-1", "r-2")
            gateway = await yard.gateway()

            def lies(ask: Ensure) -> EnsureAnswer:
                return EnsureAnswer(status="ready", engine_name=POET)

            made.answers = [lies, lies]
            async with yard.client(gateway) as client:
                answer = await client.post(PATH, json=chat("poet"))
                assert answer.status_code == 200
                assert sorted(len(e.seen) for e in engines) == [1, 2]
                # With nobody else to go to, it is a failed load, never the engine's own 404.
                made.slots.clear()
                for engine in engines:
                    assert engine.names is not None
                    engine.names.clear()
                made.answers = [lies] * 4
                answer = await client.post(PATH, json=chat("poet"))
            status, code, message = error(answer)
            assert (status, code) == (503, "start_failed")
            assert POET not in message
            nothing_left(gateway)

    run(story())


def test_a_404_of_another_kind_is_the_clients_as_it_is(tmp_path: Path) -> None:
    async def story() -> None:
        async with memory_yard(tmp_path) as yard, agent(yard) as made:
            (engine,) = await a_yard_with(yard, made)
            gateway = await yard.gateway()
            async with yard.client(gateway) as client:
                await client.post(PATH, json=chat("poet"))
                engine.status = 404
                answer = await client.post(PATH, json=chat("poet"))
            assert answer.status_code == 404
            assert answer.json()["error"]["message"] == "no"
            assert len(made.asks) == 1

    run(story())


def test_scn_d7_when_every_place_is_in_use_it_waits_and_the_wait_ends(tmp_path: Path) -> None:
    async def story() -> None:
        async with memory_yard(tmp_path) as yard, agent(yard) as made:
            await a_yard_with(yard, made, "r-1", "r-2")
            gateway = await yard.gateway(wait_s=0.8)
            waiting = EnsureAnswer(status="waiting")
            made.answers = [waiting] * 50
            async with yard.client(gateway) as client:
                answer = await client.post(PATH, json=chat("poet"))
                status, code, message = error(answer)
                assert (status, code) == (503, "no_capacity")
                assert message.endswith("for a place: every one is in use.")
                assert answer.headers["x-should-retry"] == "true"
                # All of them were asked, and not in a loop without a pause.
                assert {a.replica for a in made.asks} == {"r-1", "r-2"}
                assert len(made.asks) < 12
                made.answers = [waiting]
                answer = await client.post(PATH, json=chat("poet"))
                assert answer.status_code == 200
            nothing_left(gateway)

    run(story())


def test_what_it_waits_for_is_told_as_its_agent_says_it(tmp_path: Path) -> None:
    async def story() -> None:
        async with memory_yard(tmp_path) as yard, agent(yard) as made:
            await a_yard_with(yard, made, "r-1")
            gateway = await yard.gateway(wait_s=0.3)
            made.answers = [
                EnsureAnswer(status="waiting", code="in_use", sentence="it is being unloaded")
            ] * 50
            async with yard.client(gateway) as client:
                answer = await client.post(PATH, json=chat("poet"))
            status, code, message = error(answer)
            assert (status, code) == (503, "no_capacity")
            assert message.startswith("The adapter 'poet' waited ")
            assert message.endswith(" s for a place: it is being unloaded.")
            nothing_left(gateway)

    run(story())


def test_req_b59_a_load_that_takes_too_long_is_the_replicas_fault(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(adapters, "LOAD_S", 0.4)
    monkeypatch.setattr(adapters, "PAUSE_S", 0.05)

    async def story() -> None:
        async with memory_yard(tmp_path) as yard, agent(yard) as made:
            await a_yard_with(yard, made, "r-1", "r-2")
            gateway = await yard.gateway()
            slow: list[str] = []

            def loading(ask: Ensure) -> EnsureAnswer:
                if not slow:
                    slow.append(ask.replica)
                if ask.replica == slow[0]:
                    made.answers.append(loading)
                    return EnsureAnswer(status="loading", how="loaded")
                return EnsureAnswer(status="ready", engine_name=POET, how="loaded")

            made.answers = [loading]
            for engine in made.engines.values():
                assert engine.names is not None
                engine.names.add(POET)
            async with yard.client(gateway) as client:
                answer = await client.post(PATH, json=chat("poet"))
            assert answer.status_code == 200
            assert {a.replica for a in made.asks} == {"r-1", "r-2"}
            nothing_left(gateway)

    run(story())


class ShiftedClock(LoopClock):
    """The loop's clock, as far ahead as a test likes."""

    ahead_s = 0.0

    def now_s(self) -> float:
        return super().now_s() + self.ahead_s


def test_req_b5_a_replica_may_take_two_minutes_for_a_load_and_no_longer(tmp_path: Path) -> None:
    async def story() -> None:
        async with memory_yard(tmp_path) as yard, agent(yard) as made:
            await a_yard_with(yard, made, "r-1", "r-2")
            gateway = await yard.gateway()
            clock = gateway.gateway.clock = ShiftedClock()

            def loading(ask: Ensure) -> EnsureAnswer:
                made.answers.append(loading)
                return EnsureAnswer(status="loading", how="loaded")

            made.answers = [loading]
            async with yard.client(gateway) as client:
                asked = asyncio.create_task(client.post(PATH, json=chat("poet")))
                await made.until_asked(2)
                clock.ahead_s = 118.0
                await made.until_asked(len(made.asks) + 2)
                assert len({a.replica for a in made.asks}) == 1
                made.answers.clear()
                made.answers.append(lambda _: EnsureAnswer(status="loading", how="loaded"))
                clock.ahead_s = 121.0
                answer = await asked
            assert answer.status_code == 200
            assert len({a.replica for a in made.asks}) == 2

    run(story())


def test_a_load_that_outlasts_a_question_is_asked_for_again_and_stays_this_requests_own(
    tmp_path: Path,
) -> None:
    async def story() -> None:
        async with memory_yard(tmp_path) as yard, agent(yard) as made:
            await a_yard_with(yard, made)
            gateway = await yard.gateway()
            made.answers = [EnsureAnswer(status="loading", how="loaded")]
            async with yard.client(gateway) as client:
                answer = await client.post(PATH, json=chat("poet"))
            assert answer.headers["x-yard-adapter"] == "loaded"
            assert len(made.asks) == 2
            nothing_left(gateway)

    run(story())


def test_inv_1_a_replica_that_ends_while_its_agent_is_asked_costs_nobody_an_answer(
    tmp_path: Path,
) -> None:
    async def story() -> None:
        async with memory_yard(tmp_path) as yard, agent(yard) as made:
            await a_yard_with(yard, made, "r-1", "r-2")
            gateway = await yard.gateway()
            made.gate.clear()
            async with yard.client(gateway) as client:
                asked = asyncio.create_task(client.post(PATH, json=chat("poet")))
                await made.until_asked(1)
                lost = made.asks[0].replica
                await yard.replica(made.engines[lost], lost, "stopped", adapter_slots=4)
                await made.until_asked(2)
                made.gate.set()
                answer = await asked
            assert answer.status_code == 200
            assert made.asks[1].replica != lost
            await until(lambda: gateway.adapters.open_questions == 0, "the first question to end")
            nothing_left(gateway)

    run(story())
