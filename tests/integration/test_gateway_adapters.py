"""Requests for adapters over real HTTP, with an agent that answers as it is told: loads, hits, refusals, losses."""

import asyncio
import json
from datetime import timedelta
from pathlib import Path

import httpx
import pytest

from gateway.clock import LoopClock
from schemas.adapternames import engine_name
from schemas.model import Scaling
from tests.support.aio import run, until
from tests.support.gateway_agent import (
    a_replica_with_slots,
    a_yard_with,
    agent,
    error,
    nothing_left,
)
from tests.support.gateway_world import Story, an_adapter, folded
from tests.support.gateway_yard import chat, memory_yard

PATH = "/v1/chat/completions"
POET = engine_name("poet", an_adapter().version)


def test_req_b38_the_first_request_loads_the_second_is_a_hit_and_sends_nothing(
    tmp_path: Path,
) -> None:
    async def story() -> None:
        async with memory_yard(tmp_path) as yard, agent(yard) as made:
            (engine,) = await a_yard_with(yard, made)
            gateway = await yard.gateway()
            async with yard.client(gateway) as client:
                first = await client.post(PATH, json=chat("poet"))
                again = [await client.post(PATH, json=chat("poet")) for _ in range(5)]
            assert first.headers["x-yard-adapter"] == "loaded"
            assert [a.headers["x-yard-adapter"] for a in again] == ["hit"] * 5
            assert {a.headers["x-yard-waited-ms"] for a in again} == {"0"}
            assert len(made.asks) == 1
            ask = made.asks[0]
            assert (ask.replica, ask.adapter, ask.version) == (
                "r-1",
                "poet",
                an_adapter().version,
            )
            assert (ask.gateway, ask.gone) == ("gw", "")
            assert ask.request == first.headers["x-request-id"]
            # The engine is asked for the version's own name, the client hears the name it gave.
            assert {s.body["model"] for s in engine.seen} == {POET}
            assert {a.json()["model"] for a in (first, *again)} == {"poet"}
            numbers = gateway.metrics.render().decode()
            assert 'yard_gateway_adapter_requests_total{model="m",outcome="hit"} 5.0' in numbers
            assert 'yard_gateway_adapter_requests_total{model="m",outcome="loaded"} 1.0' in numbers
            assert 'yard_gateway_adapter_asks_total{answer="ready"} 1.0' in numbers
            assert 'yard_gateway_requests_total{code="ok",model="m"} 6.0' in numbers
            nothing_left(gateway)
        lines = [json.loads(line) for block in yard.access for line in block.splitlines()]
        assert [(x["model"], x["adapter"], x["how"]) for x in lines] == [
            ("m", "poet", "loaded"),
            *[("m", "poet", "hit")] * 5,
        ]

    run(story())


@pytest.mark.parametrize("name", ["poet", "rhymer", "m:poet", "em:rhymer"])
@pytest.mark.parametrize("stream", [False, True])
def test_scn_b2_an_adapter_is_answered_under_the_name_it_was_asked_by(
    tmp_path: Path, name: str, stream: bool
) -> None:
    async def story() -> None:
        async with memory_yard(tmp_path) as yard, agent(yard) as made:
            (engine,) = await a_yard_with(yard, made)
            gateway = await yard.gateway()
            async with yard.client(gateway) as client:
                answer = await client.post(PATH, json=chat(name, stream=stream))
            assert answer.status_code == 200
            if stream:
                events = [x[6:] for x in answer.text.split("\n\n") if x.startswith("data: {")]
                assert {json.loads(e)["model"] for e in events} == {name}
                assert answer.text.endswith("data: [DONE]\n\n")
            else:
                assert answer.json()["model"] == name
                assert answer.json()["choices"][0]["message"]["content"].startswith(f"[{POET}]")
            (seen,) = engine.seen
            assert seen.body["model"] == POET
            assert "x-yard-adapter" not in seen.headers

    run(story())


def test_scn_d5_ten_parallel_first_requests_over_two_gateways_are_one_load(tmp_path: Path) -> None:
    async def story() -> None:
        async with memory_yard(tmp_path) as yard, agent(yard) as made:
            (engine,) = await a_yard_with(yard, made)
            gateways = [await yard.gateway("gw-1"), await yard.gateway("gw-2")]
            made.gate.clear()
            async with yard.client(gateways[0]) as one, yard.client(gateways[1]) as two:
                asked = [
                    asyncio.create_task(c.post(PATH, json=chat("poet"))) for c in [one, two] * 5
                ]
                for gateway in gateways:
                    await until(
                        lambda g=gateway: g.gateway.usage.by_replica.get("r-1") == 5,
                        "five requests counted on the replica before it is asked",
                    )
                await made.until_asked(2)
                made.gate.set()
                answers = await asyncio.gather(*asked)
            assert {a.status_code for a in answers} == {200}
            assert len(made.loads) == 1
            # One question of each gateway, however many requests joined it.
            assert sorted(a.gateway for a in made.asks) == ["gw-1", "gw-2"]
            how = [a.headers["x-yard-adapter"] for a in answers]
            assert how.count("loaded") == 1
            assert set(how) <= {"loaded", "joined", "hit"}
            assert how.count("joined") >= 4
            assert len(engine.seen) == 10
            for gateway in gateways:
                nothing_left(gateway)

    run(story())


def test_req_b36_a_client_that_leaves_abandons_no_load(tmp_path: Path) -> None:
    async def story() -> None:
        async with memory_yard(tmp_path) as yard, agent(yard) as made:
            (engine,) = await a_yard_with(yard, made)
            gateway = await yard.gateway()
            made.gate.clear()
            async with yard.client(gateway) as client:
                leaving = asyncio.create_task(client.post(PATH, json=chat("poet")))
                await made.until_asked(1)
                leaving.cancel()
                await until(
                    lambda: not gateway.gateway.usage.by_replica, "the request to be given back"
                )
                # B39: whoever waits for the same load is not disturbed.
                assert gateway.adapters.open_questions == 1
                made.gate.set()
                await until(lambda: gateway.adapters.open_questions == 0, "the load to end")
                answer = await client.post(PATH, json=chat("poet"))
            assert answer.headers["x-yard-adapter"] == "hit"
            assert len(made.asks) == len(made.loads) == len(engine.seen) == 1
            nothing_left(gateway)

    run(story())


def test_req_b39_one_of_those_who_wait_for_a_load_leaves_and_the_others_are_answered(
    tmp_path: Path,
) -> None:
    async def story() -> None:
        async with memory_yard(tmp_path) as yard, agent(yard) as made:
            await a_yard_with(yard, made)
            gateway = await yard.gateway()
            made.gate.clear()
            async with yard.client(gateway) as client:
                asked = [asyncio.create_task(client.post(PATH, json=chat("poet"))) for _ in "123"]
                await until(
                    lambda: gateway.gateway.usage.by_replica.get("r-1") == 3, "three to wait"
                )
                with pytest.raises(httpx.ReadTimeout):
                    await client.post(PATH, json=chat("poet"), timeout=0.2)
                asked[0].cancel()
                await until(
                    lambda: gateway.gateway.usage.by_replica.get("r-1") == 2,
                    "two of them to be gone",
                )
                made.gate.set()
                answers = [await a for a in asked[1:]]
            assert [a.status_code for a in answers] == [200, 200]
            assert len(made.asks) == len(made.loads) == 1
            nothing_left(gateway)

    run(story())


def test_a_cold_base_is_asked_for_by_its_adapter_and_then_loads_it(tmp_path: Path) -> None:
    async def story() -> None:
        async with memory_yard(tmp_path) as yard, agent(yard) as made:
            await yard.model(max_loaded_adapters=4)
            await yard.tell(yard.story.adapter())
            gateway = await yard.gateway()
            async with yard.client(gateway) as client:
                asked = asyncio.create_task(client.post(PATH, json=chat("m:poet")))
                wish = await yard.wish()
                assert (wish.model, wish.scope) == ("m", "any")
                await until(lambda: any(b.waiting == {"m": 1} for b in yard.beacons), "a beacon")
                await a_replica_with_slots(yard, made)
                answer = await asked
            assert answer.status_code == 200
            assert answer.json()["model"] == "m:poet"
            assert answer.headers["x-yard-adapter"] == "loaded"
            assert int(answer.headers["x-yard-waited-ms"]) > 0
            nothing_left(gateway)

    run(story())


def test_an_adapter_that_is_removed_or_refused_while_its_base_starts_is_answered_then(
    tmp_path: Path,
) -> None:
    async def story() -> None:
        async with memory_yard(tmp_path) as yard:
            await yard.model(max_loaded_adapters=4, aliases=("em",))
            await yard.tell(yard.story.adapter())
            await yard.tell(yard.story.adapter("other"))
            gateway = await yard.gateway()
            async with yard.client(gateway) as client:
                names = ("poet", "em:other", "em")
                asked = [asyncio.create_task(client.post(PATH, json=chat(n))) for n in names]
                await until(lambda: len(gateway.gateway.room) == 3, "three to wait")
                await yard.tell(yard.story.adapter_gone("poet"))
                assert error(await asked[0])[:2] == (404, "model_not_found")
                reason = "rank 64 is above the 16 of the profile gpu"
                await yard.tell(yard.story.adapter("other", phase="refused", reason=reason))
                status, code, message = error(await asked[1])
                assert (status, code) == (404, "model_not_found")
                assert reason in message
                assert len(gateway.gateway.room) == 1
                asked[2].cancel()

    run(story())


def test_an_adapter_that_is_refused_in_a_history_that_was_replaced_is_answered_then(
    tmp_path: Path,
) -> None:
    """Its table is made anew beside the old one: no event tells what became of it."""

    async def story() -> None:
        async with memory_yard(tmp_path) as yard:
            await yard.model(max_loaded_adapters=4)
            await yard.tell(yard.story.adapter())
            gateway = await yard.gateway()
            async with yard.client(gateway) as client:
                asked = [
                    asyncio.create_task(client.post(PATH, json=chat(n))) for n in ("poet", "m")
                ]
                await until(lambda: len(gateway.gateway.room) == 2, "two to wait")
                world = Story()
                base = world.model(max_loaded_adapters=4)
                anew = folded(base, world.adapter(phase="refused", reason="rank 64 is above 16"))
                gateway.gateway.install(anew, synced=True)
                status, code, message = error(await asked[0])
                assert (status, code) == (404, "model_not_found")
                assert "rank 64 is above 16" in message
                assert len(gateway.gateway.room) == 1, "its base is waited for as before"
                asked[1].cancel()

    run(story())


def test_a_name_that_becomes_an_adapters_while_it_waits_is_served_as_that(tmp_path: Path) -> None:
    async def story() -> None:
        async with memory_yard(tmp_path) as yard, agent(yard) as made:
            await yard.model(max_loaded_adapters=4, aliases=("poet",))
            gateway = await yard.gateway()
            async with yard.client(gateway) as client:
                asked = asyncio.create_task(client.post(PATH, json=chat("poet")))
                await until(lambda: len(gateway.gateway.room) == 1, "it to wait")
                await yard.model(max_loaded_adapters=4)
                await yard.tell(yard.story.adapter("poet"))
                engine = await a_replica_with_slots(yard, made)
                answer = await asked
            assert answer.status_code == 200
            assert answer.headers["x-yard-adapter"] == "loaded"
            assert answer.json()["model"] == "poet"
            assert [s.body["model"] for s in engine.seen] == [POET]
            nothing_left(gateway)

    run(story())


def test_an_adapter_that_nobody_may_load_yet_starts_nothing(tmp_path: Path) -> None:
    async def story() -> None:
        async with memory_yard(tmp_path) as yard, agent(yard) as made:
            await a_yard_with(yard, made)
            since = LoopClock().now() - timedelta(seconds=40)
            await yard.tell(yard.story.adapter("new", phase="reading", since=since, version=""))
            await yard.tell(yard.story.adapter("soon", phase="fetching", since=since, version=""))
            await yard.model("off", scaling=Scaling(), max_loaded_adapters=4)
            await yard.tell(yard.story.adapter("unlit", base="off"))
            await yard.model("plain")
            await yard.tell(yard.story.adapter("stray", base="plain"))
            gateway = await yard.gateway()
            async with yard.client(gateway) as client:
                for name in ("new", "soon"):
                    answer = await client.post(PATH, json=chat(name))
                    assert error(answer)[:2] == (503, "model_loading")
                    assert int(answer.headers["retry-after"]) in (10, 11)
                    assert answer.headers["x-should-retry"] == "true"
                answer = await client.post(PATH, json=chat("unlit"))
                assert error(answer)[:2] == (503, "model_off")
                answer = await client.post(PATH, json=chat("stray"))
                status, code, message = error(answer)
                assert (status, code) == (404, "model_not_found")
                assert "loads no adapters" in message
            assert made.asks == []
            assert await yard.activates() == []

    run(story())


def test_a_base_whose_replicas_load_none_yet_answers_when_nobody_decides(tmp_path: Path) -> None:
    async def story() -> None:
        async with memory_yard(tmp_path) as yard:
            await yard.model(max_loaded_adapters=4)
            await yard.tell(yard.story.adapter())
            engine = await yard.engine()
            await yard.replica(engine)
            gateway = await yard.gateway(no_decision_s=0.2)
            async with yard.client(gateway) as client:
                answer = await client.post(PATH, json=chat("poet"))
                status, code, message = error(answer)
                assert (status, code) == (503, "model_loading")
                assert "none of its replicas loads adapters yet" in message
                assert (await client.post(PATH, json=chat())).status_code == 200
            assert [s.body["model"] for s in engine.seen] == ["m"]
            assert await yard.activates() == []

    run(story())


def test_the_list_of_models_has_adapters_with_their_base_and_no_path(tmp_path: Path) -> None:
    async def story() -> None:
        async with memory_yard(tmp_path) as yard, agent(yard) as made:
            await a_yard_with(yard, made)
            source = "/srv/secret/place"
            await yard.tell(yard.story.adapter("poet", source=source, pinned=True))
            await yard.tell(yard.story.adapter("new", phase="fetching", version=""))
            await yard.tell(
                yard.story.adapter("bad", phase="refused", code="rank_too_high", reason="64 > 16")
            )
            made.slots["r-1"] = {}
            gateway = await yard.gateway()
            async with yard.client(gateway) as client:
                listed = (await client.get("/v1/models")).json()["data"]
                assert [(c["id"], c.get("parent"), c.get("root")) for c in listed] == [
                    ("m", None, None),
                    ("poet", "m", "poet"),
                ]
                poet = listed[1]
                assert (poet["object"], poet["status"], poet["pinned"]) == ("model", "ready", True)
                assert source not in json.dumps(listed)
                one = (await client.get("/v1/models/m:poet")).json()
                assert (one["id"], one["model"], one["parent"]) == ("m:poet", "poet", "m")
                new = (await client.get("/v1/models/new")).json()
                assert new["status"] == "fetching"
                bad = (await client.get("/v1/models/bad")).json()
                assert (bad["status"], bad["code"]) == ("refused", "rank_too_high")
                assert "64 > 16" in bad["reason"]
                assert (await client.get("/v1/models/m:nobody")).status_code == 404
                # inv 10: whoever only looks asks nobody for anything.
                assert made.asks == []
                assert len(gateway.gateway.pins) == 0
                await client.post(PATH, json=chat("poet"))
                poet = (await client.get("/v1/models/poet")).json()
                assert poet["replicas_loaded"] == 1
                numbers = (await client.get("/metrics")).text
                assert "yard_gateway_adapter_pins 1.0" in numbers
                assert "yard_gateway_adapter_pins_trusted 1.0" in numbers

    run(story())


def test_a_gateway_that_ends_sends_those_who_wait_for_an_adapter_back(tmp_path: Path) -> None:
    async def story() -> None:
        async with memory_yard(tmp_path) as yard, agent(yard) as made:
            await a_yard_with(yard, made)
            made.gate.clear()
            async with httpx.AsyncClient(timeout=20.0) as client:
                async with yard.own_gateway(drain_s=1.0) as gateway:
                    url = f"http://127.0.0.1:{gateway.port}{PATH}"
                    asked = asyncio.create_task(client.post(url, json=chat("poet")))
                    await made.until_asked(1)
                answer = await asked
            assert error(answer)[:2] == (503, "draining")
            # The last word lists nothing: its agent need not wait for anything.
            await until(lambda: made.heard["gw"].leaving, "the last beacon")
            assert made.heard["gw"].pins == {}

    run(story())
