"""One base URL per card over real HTTP: which engine answers, who waits for what, what parking does to both.

The test is the control plane and the agents.
"""

import asyncio
import json
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any
from urllib.parse import quote

import httpx
import pytest
from openai import AsyncOpenAI, NotFoundError

from gateway.app import RunningGateway
from schemas.commands import ModelActivate
from schemas.model import Scaling
from tests.support.aio import run, until
from tests.support.fake_engine import FakeEngine
from tests.support.gateway_world import a_profile
from tests.support.gateway_yard import Yard, chat, memory_yard

PATH = "/v1/chat/completions"
GPU0 = "/cards/n1/gpu0"
GPU1 = "/cards/n1/gpu1"


async def two_cards(yard: Yard, *replicas: str, **model: Any) -> list[FakeEngine]:
    """A node with two gpus and a model for either; `replicas` are cards it is ready on."""
    model.setdefault("scaling", Scaling(min=0, max=2))
    model.setdefault("profiles", (a_profile("gpu"),))
    await yard.cards("n1", "gpu0", "gpu1")
    await yard.model(**model)
    engines = []
    for card in replicas:
        engine = await yard.engine()
        await yard.replica(engine, f"r-{card}", cards=(card,))
        engines.append(engine)
    return engines


async def waits(gateway: RunningGateway, count: int, scope: str = "any") -> None:
    await until(
        lambda: gateway.gateway.room.count(("m", scope)) == count, f"{count} to wait in {scope}"
    )


async def scopes_asked_for(yard: Yard) -> list[str]:
    """The scopes of all wishes so far, sorted."""
    bodies = [c.command.body for c in await yard.activates() if c.command is not None]
    return sorted(b.scope for b in bodies if isinstance(b, ModelActivate))


def nothing_left(gateway: RunningGateway) -> None:
    state = gateway.gateway
    assert len(state.room) == 0
    assert state.open_tickets == 0
    assert dict(state.usage.by_replica) == {}
    assert gateway.activator.timers == 0


async def first_event(lines: Any) -> None:
    async for line in lines:
        if line.startswith("data: "):
            return


async def last_event(lines: Any) -> dict[str, Any]:
    rest = [line async for line in lines if line.startswith("data: ")]
    assert "data: [DONE]" not in rest
    return json.loads(rest[-1].removeprefix("data: "))


# -- which engine ---------------------------------------------------------------------------------


def test_req_d2_each_cards_base_url_is_answered_by_the_engine_on_that_card(tmp_path: Path) -> None:
    async def story() -> None:
        async with memory_yard(tmp_path) as yard:
            engines = await two_cards(yard, "gpu0", "gpu1", aliases=("tiny",))
            gateway = await yard.gateway()
            async with yard.client(gateway) as client:
                for n, base in enumerate((GPU0, GPU1)):
                    for path in (PATH, "/v1/completions"):
                        for name in ("m", "tiny"):
                            answer = await client.post(base + path, json=chat(name))
                            assert answer.status_code == 200
                    assert [s.path for s in engines[n].seen] == [PATH] * 2 + ["/v1/completions"] * 2
                    assert {s.body["model"] for s in engines[n].seen} == {"m"}
                # Without a card the least busy one is chosen, as ever.
                for engine in engines:
                    engine.gate.clear()
                plain = [asyncio.create_task(client.post(PATH, json=chat())) for _ in range(4)]
                await until(
                    lambda: [e.running for e in engines] == [2, 2], "both to be given their share"
                )
                for engine in engines:
                    engine.gate.set()
                assert {a.status_code for a in await asyncio.gather(*plain)} == {200}
            assert await yard.activates() == []
            nothing_left(gateway)

    run(story())


def test_req_d2_an_openai_client_takes_a_card_as_its_base_url(tmp_path: Path) -> None:
    async def story() -> None:
        async with memory_yard(tmp_path) as yard:
            engines = await two_cards(yard, "gpu0", "gpu1")
            await yard.model("elsewhere", profiles=(a_profile("cpu"),))
            gateway = await yard.gateway()
            base = f"http://127.0.0.1:{gateway.port}{GPU1}/v1"
            async with AsyncOpenAI(base_url=base, api_key="x", max_retries=0) as client:
                messages: Any = [{"role": "user", "content": "hi"}]
                told = await client.chat.completions.create(model="m", messages=messages)
                assert told.choices[0].message.content
                stream = await client.chat.completions.create(
                    model="m", messages=messages, stream=True
                )
                assert [c async for c in stream][-1].choices[0].finish_reason == "stop"
                assert [m.id async for m in client.models.list()] == ["m"]
                assert (await client.models.retrieve("m")).id == "m"
                with pytest.raises(NotFoundError, match="no profile for the card n1/gpu1"):
                    await client.models.retrieve("elsewhere")
            assert [len(e.seen) for e in engines] == [0, 2]

    run(story())


def test_req_d4_an_engine_that_is_up_answers_before_anything_is_asked(tmp_path: Path) -> None:
    async def story() -> None:
        async with memory_yard(tmp_path) as yard:
            engines = await two_cards(yard, "gpu1")
            # A load elsewhere is under way; whoever can be answered now is.
            await yard.activation("loading", scope="n1~gpu0", since=datetime.now(UTC))
            await yard.replica(None, "r-gpu0", "starting", cards=("gpu0",))
            gateway = await yard.gateway()
            async with yard.client(gateway) as client:
                for base in ("", GPU1):
                    answer = await client.post(base + PATH, json=chat())
                    assert answer.status_code == 200
                    assert answer.headers["x-yard-waited-ms"] == "0"
            assert len(engines[0].seen) == 2
            assert await yard.activates() == []

    run(story())


def test_req_d9_with_one_entry_on_one_card_everything_is_as_before(tmp_path: Path) -> None:
    async def story() -> None:
        async with memory_yard(tmp_path) as yard:
            await yard.cards("n1")
            await yard.model(profiles=(a_profile("cpu"),))
            engine = await yard.engine()
            gateway = await yard.gateway()
            async with yard.client(gateway) as client:
                asked = asyncio.create_task(client.post(PATH, json=chat()))
                wish = await yard.wish()
                assert (wish.model, wish.scope, wish.rev) == ("m", "any", 0)
                await yard.activation("loading", replica="r-1")
                await yard.replica(engine)
                assert (await asked).status_code == 200
                assert (await client.post(f"/cards/n1/cpu{PATH}", json=chat())).status_code == 200
            assert len(await yard.activates()) == 1
            nothing_left(gateway)

    run(story())


def test_req_d2_a_card_is_asked_for_and_waited_for_by_itself(tmp_path: Path) -> None:
    """gpu1 is up and idle all along: a request on gpu0 never goes there."""

    async def story() -> None:
        async with memory_yard(tmp_path) as yard:
            other = (await two_cards(yard, "gpu1"))[0]
            await yard.activation("ready", replica="r-gpu1")
            gateway = await yard.gateway()
            async with yard.client(gateway) as client:
                asked = [asyncio.create_task(client.post(GPU0 + PATH, json=chat())) for _ in "ab"]
                wish = await yard.wish()
                assert (wish.model, wish.scope, wish.rev) == ("m", "n1~gpu0", 0)
                await waits(gateway, 2, "n1~gpu0")
                # The beacon tells by model, whatever the scope.
                await until(
                    lambda: yard.beacons[-1].waiting == {"m": 2}, "the beacon with those who wait"
                )
                await yard.activation("loading", scope="n1~gpu0", replica="r-gpu0")
                # Another replica of the model is ready, and it is not on that card.
                third = await yard.engine()
                seq = await yard.replica(third, "r-third", cards=("gpu1",))
                await yard.applied(gateway, seq)
                await waits(gateway, 2, "n1~gpu0")
                engine = await yard.engine()
                await yard.replica(engine, "r-gpu0", cards=("gpu0",))
                assert {a.status_code for a in await asyncio.gather(*asked)} == {200}
                assert [len(e.seen) for e in (engine, other, third)] == [2, 0, 0]
            assert len(await yard.activates()) == 1
            nothing_left(gateway)

    run(story())


def test_inv_4_many_requests_on_one_card_over_two_gateways_are_one_wish(tmp_path: Path) -> None:
    async def story() -> None:
        async with memory_yard(tmp_path) as yard:
            await two_cards(yard)
            gateways = [await yard.gateway("gw-1"), await yard.gateway("gw-2")]
            async with yard.client(gateways[0]) as one, yard.client(gateways[1]) as two:
                asked = [
                    asyncio.create_task(c.post(GPU0 + PATH, json=chat())) for c in [one, two] * 10
                ]
                for gateway in gateways:
                    await waits(gateway, 10, "n1~gpu0")
                engine = await yard.engine()
                await yard.replica(engine, "r-0", cards=("gpu0",))
                assert {a.status_code for a in await asyncio.gather(*asked)} == {200}
            assert await scopes_asked_for(yard) == ["n1~gpu0"]

    run(story())


def test_inv_1_a_request_on_a_card_that_loses_its_engine_waits_for_that_card(
    tmp_path: Path,
) -> None:
    async def story() -> None:
        async with memory_yard(tmp_path) as yard:
            first, other = await two_cards(yard, "gpu0", "gpu1")
            first.gate.clear()
            gateway = await yard.gateway()
            async with yard.client(gateway) as client:
                asked = asyncio.create_task(client.post(GPU0 + PATH, json=chat()))
                plain = asyncio.create_task(client.post(PATH, json=chat()))
                await first.until_seen(1)
                await yard.replica(first, "r-gpu0", "stopped", cards=("gpu0",))
                assert (await plain).status_code == 200
                await waits(gateway, 1, "n1~gpu0")
                assert (await yard.wish()).scope == "n1~gpu0"
                successor = await yard.engine()
                await yard.replica(successor, "r-next", cards=("gpu0",))
                assert (await asked).status_code == 200
            assert len(successor.seen) == 1
            assert len(other.seen) == 1
            nothing_left(gateway)

    run(story())


def test_inv_1_a_broken_connection_on_a_card_is_waited_out_on_that_card(tmp_path: Path) -> None:
    async def story() -> None:
        async with memory_yard(tmp_path) as yard:
            first, other = await two_cards(yard, "gpu0", "gpu1")
            first.drop_next = 1
            gateway = await yard.gateway()
            async with yard.client(gateway) as client:
                answer = await client.post(GPU0 + PATH, json=chat())
                assert answer.status_code == 200
            assert [len(first.seen), len(other.seen)] == [2, 0]
            assert await yard.activates() == []

    run(story())


# -- what waits and what is told ------------------------------------------------------------------


@pytest.mark.parametrize("base", ["", GPU0])
def test_req_d7_a_wait_behind_a_kept_card_ends_with_who_keeps_it(tmp_path: Path, base: str) -> None:
    async def story() -> None:
        async with memory_yard(tmp_path) as yard:
            await two_cards(yard)
            await yard.activation(
                "waiting",
                scope="n1~gpu0" if base else "any",
                waiting_for=("claim doom", "vm windows"),
                kept=True,
            )
            gateway = await yard.gateway(wait_s=0.2)
            async with yard.client(gateway) as client:
                answer = await client.post(base + PATH, json=chat())
            assert answer.status_code == 503
            assert answer.json()["error"]["code"] == "card_kept"
            assert "kept (by claim doom, vm windows)" in answer.json()["error"]["message"]
            assert answer.headers["retry-after"] == "60"
            assert answer.headers["x-should-retry"] == "true"
            assert await yard.activates() == []
            nothing_left(gateway)

    run(story())


def test_req_d18_the_wait_for_a_drain_is_bounded_and_says_when_to_come_back(
    tmp_path: Path,
) -> None:
    async def story() -> None:
        async with memory_yard(tmp_path) as yard:
            await two_cards(yard)
            await yard.replica(None, "r-0", "waiting", cards=("gpu0",), waiting_for=("r-8",))
            await yard.activation(
                "waiting", scope="n1~gpu0", waiting_for=("r-8",), wanted_at=datetime.now(UTC)
            )
            gateway = await yard.gateway(wait_s=0.2)
            async with yard.client(gateway) as client:
                answer = await client.post(GPU0 + PATH, json=chat())
                assert answer.json()["error"]["code"] == "no_capacity"
                assert answer.headers["x-should-retry"] == "true"
                assert 1 <= int(answer.headers["retry-after"]) <= 60
                # Room was made: the one that waited starts by itself, and who comes back is served.
                again = asyncio.create_task(client.post(GPU0 + PATH, json=chat()))
                await waits(gateway, 1, "n1~gpu0")
                await yard.replica(None, "r-0", "starting", cards=("gpu0",))
                await yard.replica(await yard.engine(), "r-0", cards=("gpu0",))
                assert (await again).status_code == 200
            nothing_left(gateway)

    run(story())


def test_a_card_that_is_not_there_is_404_at_once_and_asked_of_nobody(tmp_path: Path) -> None:
    async def story() -> None:
        async with memory_yard(tmp_path) as yard:
            await two_cards(yard)
            gateway = await yard.gateway(wait_s=30.0)
            async with yard.client(gateway) as client:
                for base in ("/cards/n1/gpu9", "/cards/other/gpu0", "/cards/../gpu0", "/cards/*/*"):
                    url = str(client.base_url).rstrip("/") + base
                    for answer in (
                        await client.post(httpx.URL(url + PATH), json=chat()),
                        await client.get(httpx.URL(url + "/v1/models")),
                        await client.get(httpx.URL(url + "/v1/models/m")),
                    ):
                        if base == "/cards/../gpu0":  # the client's own doing
                            assert answer.json()["error"]["code"] == "not_found"
                            continue
                        assert answer.status_code == 404
                        assert answer.json()["error"]["code"] == "card_not_found"
                        assert answer.headers["x-should-retry"] == "false"
                answer = await client.get("/cards/n1/gpu9/v1/models")
                assert "it has cpu, gpu0, gpu1" in answer.json()["error"]["message"]
                # No label of what a client made up.
                text = gateway.metrics.render().decode()
                assert "gpu9" not in text
                assert 'code="card_not_found",model="",scope=""' in text
            assert await yard.activates() == []

    run(story())


def test_inv_11_before_any_node_told_its_cards_no_made_up_card_is_asked_for(
    tmp_path: Path,
) -> None:
    async def story() -> None:
        async with memory_yard(tmp_path) as yard:
            await yard.model(profiles=(a_profile("gpu"),))
            gateway = await yard.gateway(wait_s=30.0, no_decision_s=0.3)
            async with yard.client(gateway) as client:
                answers = await asyncio.gather(
                    *(client.post(f"/cards/n{n}/gpu{n}{PATH}", json=chat()) for n in range(20))
                )
            assert {a.status_code for a in answers} == {503}
            assert {a.json()["error"]["code"] for a in answers} == {"yard_unavailable"}
            assert {a.headers["retry-after"] for a in answers} == {"5"}
            assert await yard.activates() == []
            nothing_left(gateway)

    run(story())


def test_inv_5_who_waits_when_the_first_node_tells_its_cards_is_asked_for_or_told(
    tmp_path: Path,
) -> None:
    async def story() -> None:
        async with memory_yard(tmp_path) as yard:
            await yard.model(profiles=(a_profile("gpu"),))
            gateway = await yard.gateway(wait_s=30.0, no_decision_s=20.0)
            async with yard.client(gateway) as client:
                there = asyncio.create_task(client.post(GPU0 + PATH, json=chat()))
                missing = asyncio.create_task(client.post(f"/cards/n1/gpu9{PATH}", json=chat()))
                await waits(gateway, 1, "n1~gpu0")
                await waits(gateway, 1, "n1~gpu9")
                await yard.cards("n1", "gpu0")
                assert (await missing).json()["error"]["code"] == "card_not_found"
                assert (await yard.wish()).scope == "n1~gpu0"
                await yard.replica(await yard.engine(), "r-0", cards=("gpu0",))
                assert (await there).status_code == 200
            nothing_left(gateway)

    run(story())


def test_inv_5_who_waits_for_a_card_that_goes_is_told_at_once(tmp_path: Path) -> None:
    async def story() -> None:
        async with memory_yard(tmp_path) as yard:
            await two_cards(yard)
            gateway = await yard.gateway(wait_s=30.0)
            async with yard.client(gateway) as client:
                asked = asyncio.create_task(client.post(GPU1 + PATH, json=chat()))
                await waits(gateway, 1, "n1~gpu1")
                await yard.cards("n1", "gpu0")
                async with asyncio.timeout(5.0):
                    answer = await asked
            assert answer.json()["error"]["code"] == "card_not_found"
            nothing_left(gateway)

    run(story())


def test_inv_5_a_start_that_fails_answers_those_on_its_card_and_nobody_elses(
    tmp_path: Path,
) -> None:
    async def story() -> None:
        async with memory_yard(tmp_path) as yard:
            await two_cards(yard)
            gateway = await yard.gateway(wait_s=30.0)
            async with yard.client(gateway) as client:
                here = asyncio.create_task(client.post(GPU0 + PATH, json=chat()))
                there = asyncio.create_task(client.post(GPU1 + PATH, json=chat()))
                plain = asyncio.create_task(client.post(PATH, json=chat()))
                for scope in ("n1~gpu0", "n1~gpu1", "any"):
                    await waits(gateway, 1, scope)
                    await yard.activation("loading", scope=scope)
                await yard.replica(None, "r-0", "starting", cards=("gpu0",))
                await yard.replica(None, "r-1", "starting", cards=("gpu1",))
                await yard.replica(
                    None, "r-0", "failed", cards=("gpu0",), last_line="out of memory on gpu0"
                )
                answer = await here
                assert answer.json()["error"]["code"] == "start_failed"
                assert "out of memory on gpu0" in answer.json()["error"]["message"]
                assert not there.done()
                await yard.replica(await yard.engine(), "r-1", cards=("gpu1",))
                assert (await there).status_code == (await plain).status_code == 200
            nothing_left(gateway)

    run(story())


def test_a_room_that_is_full_for_one_card_is_not_full_for_another(tmp_path: Path) -> None:
    async def story() -> None:
        async with memory_yard(tmp_path) as yard:
            await two_cards(yard)
            await yard.activation("loading", scope="n1~gpu0", since=datetime.now(UTC))
            gateway = await yard.gateway(wait_s=30.0, waiting_requests=2)
            async with yard.client(gateway) as client:
                held = [asyncio.create_task(client.post(GPU0 + PATH, json=chat())) for _ in "ab"]
                await waits(gateway, 2, "n1~gpu0")
                answer = await client.post(GPU0 + PATH, json=chat())
                assert answer.json()["error"]["code"] == "queue_full"
                other = asyncio.create_task(client.post(GPU1 + PATH, json=chat()))
                await waits(gateway, 1, "n1~gpu1")
                for task in (*held, other):
                    task.cancel()
                await waits(gateway, 0, "n1~gpu0")
                await waits(gateway, 0, "n1~gpu1")

    run(story())


def test_inv_10_listing_models_under_a_card_loads_nothing_and_keeps_nothing(
    tmp_path: Path,
) -> None:
    async def story() -> None:
        async with memory_yard(tmp_path) as yard:
            await two_cards(yard)
            await yard.replica(await yard.engine(), "r-1", "parked", cards=("gpu1",))
            gateway = await yard.gateway()
            async with yard.client(gateway) as client:
                for _ in range(3):
                    for base in (GPU0, GPU1):
                        listed = (await client.get(base + "/v1/models")).json()
                        assert [m["id"] for m in listed["data"]] == ["m"]
                        assert (await client.get(base + "/v1/models/m")).status_code == 200
                assert (await client.get(GPU1 + "/v1/models/m")).json()["status"] == "parked"
                assert (await client.get(GPU0 + "/v1/models/m")).json()["status"] == "idle"
                assert (await client.get("/cards/n1/cpu/v1/models")).json()["data"] == []
                assert (await client.get(GPU0 + "/v1/models/no")).status_code == 404
            assert await yard.activates() == []
            assert yard.engines[0].connections == 0
            assert not yard.beacons[-1].last_use_age_s

    run(story())


# -- names ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("node", "card"),
    [
        ("my node", "gpu 0"),
        ("a/b", "c/d"),
        ("büro-1", "karte·0"),
        ("a.b", "gpu.0"),
        ("a~b", "c~d"),
        ("100%", "%2F"),
        ("n+1", "g?p#u"),
        ("*", ">"),
    ],
)
def test_scn_b7_a_card_of_any_name_has_a_base_url_that_is_its_alone(
    tmp_path: Path, node: str, card: str
) -> None:
    async def story() -> None:
        async with memory_yard(tmp_path) as yard:
            await yard.cards(node, card, "other")
            await yard.model(profiles=(a_profile("gpu"),), scaling=Scaling(max=2))
            other = await yard.engine()
            await yard.replica(other, "r-other", node=node, cards=("other",))
            gateway = await yard.gateway()
            base = f"/cards/{quote(node, safe='')}/{quote(card, safe='')}"
            async with yard.client(gateway) as client:
                asked = asyncio.create_task(client.post(base + PATH, json=chat()))
                wish = await yard.wish()
                assert wish.scope == f"{node}~{card}"
                await yard.activation("loading", scope=wish.scope)
                engine = await yard.engine()
                await yard.replica(engine, "r-1", node=node, cards=(card,))
                assert (await asked).status_code == 200
                assert (await client.get(base + "/v1/models/m")).json()["status"] == "ready"
                text = (await client.get("/metrics")).text
                assert "yard_gateway_card_requests_total" in text
            assert [s.path for s in engine.seen] == [PATH]
            assert other.seen == []
            nothing_left(gateway)

    run(story())


def test_inv_2_no_spelling_below_a_card_reaches_a_management_route(tmp_path: Path) -> None:
    async def raw(port: int, method: str, target: str) -> int:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        try:
            body = b'{"model":"m"}'
            writer.write(
                f"{method} {target} HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
                f"content-length: {len(body)}\r\nconnection: close\r\n\r\n".encode()
                + body
            )
            await writer.drain()
            return int((await reader.readline()).split()[1])
        finally:
            writer.close()
            await writer.wait_closed()

    async def story() -> None:
        async with memory_yard(tmp_path) as yard:
            engine = (await two_cards(yard, "gpu0"))[0]
            gateway = await yard.gateway()
            for inner in (
                "/sleep",
                "/wake_up",
                "/v1/load_lora_adapter",
                "/slots",
                "//slots",
                "/%73lots",
                "/v1/../sleep",
                "/v1/chat/completions/../../sleep",
                "/v1/%2e%2e/sleep",
                "/..%2f..%2fsleep",
                "/v1/chat%2Fcompletions",
                "/../../../sleep",
                "/v1/chat/completions;/sleep",
            ):
                for method in ("POST", "GET"):
                    status = await raw(gateway.port, method, GPU0 + inner)
                    assert status in (403, 404), (method, inner, status)
            assert engine.seen == []
            assert engine.connections == 0

    run(story())


# -- parking --------------------------------------------------------------------------------------


def test_inv_1_a_parked_replica_gives_its_unanswered_requests_to_another(tmp_path: Path) -> None:
    """A parked engine is silent: nothing would ever time out by itself."""

    async def story() -> None:
        async with memory_yard(tmp_path) as yard:
            engines = await two_cards(yard, "gpu0", "gpu1")
            for engine in engines:
                engine.gate.clear()
            gateway = await yard.gateway()
            async with yard.client(gateway) as client:
                asked = [asyncio.create_task(client.post(PATH, json=chat())) for _ in range(4)]
                await until(lambda: [e.running for e in engines] == [2, 2], "two each")
                await yard.replica(engines[0], "r-gpu0", "parked", cards=("gpu0",))
                await engines[1].until_seen(4)
                engines[1].gate.set()
                assert {a.status_code for a in await asyncio.gather(*asked)} == {200}
                # Nothing more goes there, however busy the other is.
                assert (await client.post(PATH, json=chat())).status_code == 200
                await until(lambda: engines[0].running == 0, "the parked engine to be left alone")
            assert [len(e.seen) for e in engines] == [2, 5]
            lost = gateway.metrics.registry.get_sample_value(
                "yard_gateway_rerouted_total", {"loss": "stopped"}
            )
            assert lost == 2
            nothing_left(gateway)

    run(story())


def test_inv_5_a_stream_at_an_engine_that_is_parked_ends_with_an_error_frame(
    tmp_path: Path,
) -> None:
    """Its process lives and its connection stands: without the log's word the client would hang."""

    async def story() -> None:
        async with memory_yard(tmp_path) as yard:
            engine = (await two_cards(yard, "gpu0"))[0]
            engine.pace_s, engine.tokens = 0.01, 100_000
            gateway = await yard.gateway()
            async with (
                yard.client(gateway) as client,
                client.stream("POST", GPU0 + PATH, json=chat(stream=True)) as streamed,
            ):
                lines = streamed.aiter_lines()
                await first_event(lines)
                await yard.replica(engine, "r-gpu0", "draining", cards=("gpu0",))
                await yard.replica(
                    engine, "r-gpu0", "parked", cards=("gpu0",), reason="lease l-1 wants gpu0"
                )
                async with asyncio.timeout(5.0):
                    frame = await last_event(lines)
            assert frame["error"]["code"] == "engine_error"
            assert frame["error"]["message"] == (
                "the engine r-gpu0 was parked: lease l-1 wants gpu0"
            )
            await until(lambda: engine.running == 0, "the engine's request to be closed")
            nothing_left(gateway)

    run(story())


def test_inv_1_a_parked_replica_that_resumes_serves_those_who_waited_over_a_new_connection(
    tmp_path: Path,
) -> None:
    async def story() -> None:
        async with memory_yard(tmp_path) as yard:
            engine = (await two_cards(yard, "gpu0"))[0]
            gateway = await yard.gateway()
            async with yard.client(gateway) as client:
                assert (await client.post(PATH, json=chat())).status_code == 200
                made = engine.connections
                await yard.replica(engine, "r-gpu0", "draining", cards=("gpu0",))
                await yard.applied(
                    gateway, await yard.replica(engine, "r-gpu0", "parked", cards=("gpu0",))
                )
                engine.gate.clear()  # asleep: it would take a request and say nothing
                asked = [
                    asyncio.create_task(client.post(base + PATH, json=chat()))
                    for base in ("", GPU0)
                ]
                await waits(gateway, 1)
                await waits(gateway, 1, "n1~gpu0")

                async def both() -> bool:
                    return await scopes_asked_for(yard) == ["any", "n1~gpu0"]

                await until(both, "a wish for each scope")
                await yard.applied(
                    gateway, await yard.replica(engine, "r-gpu0", "starting", cards=("gpu0",))
                )
                assert len(engine.seen) == 1
                engine.gate.set()
                await yard.replica(engine, "r-gpu0", cards=("gpu0",), resume_s=0.4)
                assert {a.status_code for a in await asyncio.gather(*asked)} == {200}
                assert len(engine.seen) == 3
                assert engine.connections == made + 2
            nothing_left(gateway)

    run(story())


def test_a_suspicion_from_before_the_park_does_not_keep_a_resumed_replica_out(
    tmp_path: Path,
) -> None:
    async def story() -> None:
        async with memory_yard(tmp_path) as yard:
            engine = (await two_cards(yard, "gpu0"))[0]
            port = engine.port
            gateway = await yard.gateway()
            async with yard.client(gateway) as client:
                await engine.kill()  # out of this gateway's reach for a while
                asked = asyncio.create_task(client.post(PATH, json=chat()))
                await until(lambda: "r-gpu0" in gateway.gateway.ejected, "it to be left out")
                seq = await yard.replica(engine, "r-gpu0", "parked", cards=("gpu0",))
                await yard.applied(gateway, seq)
                assert not gateway.gateway.ejected
                await engine.start(port)
                await yard.replica(engine, "r-gpu0", "starting", cards=("gpu0",))
                await yard.replica(engine, "r-gpu0", cards=("gpu0",))
                assert (await asked).status_code == 200
                assert not gateway.gateway.ejected
            nothing_left(gateway)

    run(story())


def test_inv_1_a_resume_that_is_refused_or_fails_leaves_its_waiters_to_a_cold_start(
    tmp_path: Path,
) -> None:
    async def story() -> None:
        async with memory_yard(tmp_path) as yard:
            engine = (await two_cards(yard, "gpu0"))[0]
            gateway = await yard.gateway(wait_s=30.0)
            await yard.replica(engine, "r-gpu0", "parked", cards=("gpu0",))
            async with yard.client(gateway) as client:
                asked = asyncio.create_task(client.post(PATH, json=chat()))
                await waits(gateway, 1)
                await yard.activation("placing", replica="r-gpu0")
                await yard.replica(engine, "r-gpu0", "starting", cards=("gpu0",))
                # No room after all; then it was tried again and the engine did not come back.
                await yard.replica(engine, "r-gpu0", "parked", cards=("gpu0",))
                await yard.replica(engine, "r-gpu0", "starting", cards=("gpu0",))
                seq = await yard.replica(
                    engine, "r-gpu0", "failed", cards=("gpu0",), code="resume_failed"
                )
                await yard.applied(gateway, seq)
                await asyncio.sleep(0)
                assert not asked.done()
                await yard.activation("loading", replica="r-new")
                await yard.replica(await yard.engine(), "r-new", cards=("gpu1",))
                assert (await asked).status_code == 200
            assert engine.seen == []
            nothing_left(gateway)

    run(story())


def test_a_claim_ends_the_streams_of_its_card_and_plain_requests_go_to_the_other(
    tmp_path: Path,
) -> None:
    """What the agent of a card tells when a game claims it: forced, so nothing is waited for."""

    async def story() -> None:
        async with memory_yard(tmp_path) as yard:
            engines = await two_cards(yard, "gpu0", "gpu1")
            for engine in engines:
                engine.pace_s, engine.tokens = 0.01, 100_000
            gateway = await yard.gateway()
            async with yard.client(gateway) as client:
                async with client.stream("POST", GPU0 + PATH, json=chat(stream=True)) as streamed:
                    lines = streamed.aiter_lines()
                    await first_event(lines)
                    why = "claim doom keeps gpu0"
                    # The engine is deaf to the signal at first: the word of its agent is enough.
                    await yard.replica(
                        engines[0], "r-gpu0", "draining", cards=("gpu0",), reason=why, forced=True
                    )
                    async with asyncio.timeout(5.0):
                        frame = await last_event(lines)
                    assert frame["error"]["code"] == "engine_error"
                    assert frame["error"]["message"] == f"the engine r-gpu0 was stopped: {why}"
                await yard.replica(engines[0], "r-gpu0", "stopped", cards=("gpu0",), reason=why)
                await engines[0].kill()
                engines[1].pace_s, engines[1].tokens = 0.0, 3
                answer = await client.post(PATH, json=chat())
                assert answer.status_code == 200
                assert answer.headers["x-yard-waited-ms"] == "0"
                assert len(engines[1].seen) == 1
                # On the claimed card itself a request waits.
                asked = asyncio.create_task(client.post(GPU0 + PATH, json=chat()))
                await waits(gateway, 1, "n1~gpu0")
                asked.cancel()
                await waits(gateway, 0, "n1~gpu0")
            nothing_left(gateway)

    run(story())


# -- what is told of it ---------------------------------------------------------------------------


def test_log_metrics_and_timeline_carry_the_scope(tmp_path: Path) -> None:
    async def story() -> list[bytes]:
        async with memory_yard(tmp_path) as yard:
            await two_cards(yard, "gpu0")
            await yard.activation("loading", scope="n1~gpu1", since=datetime.now(UTC))
            gateway = await yard.gateway(wait_s=30.0)
            async with yard.client(gateway) as client:
                given = {"x-request-id": "on-a-card"}
                await client.post(GPU0 + PATH, json=chat(), headers=given)
                await client.post(PATH, json=chat(), headers={"x-request-id": "plain"})
                waiting = asyncio.create_task(client.post(GPU1 + PATH, json=chat()))
                await waits(gateway, 1, "n1~gpu1")
                text = (await client.get("/metrics")).text
                assert (
                    'yard_gateway_card_requests_total{code="ok",model="m",scope="n1~gpu0"} 1.0'
                    in text
                )
                assert 'yard_gateway_card_waiting{scope="n1~gpu1"} 1.0' in text
                assert 'yard_gateway_requests_total{code="ok",model="m"} 2.0' in text
                listed = (await client.get(GPU1 + "/v1/models/m")).json()
                assert listed["waiting"] == 1
                assert (await client.get(GPU0 + "/v1/models/m")).json().get("waiting", 0) == 0
                for request, scope in (("on-a-card", "n1~gpu0"), ("plain", "")):
                    found = await client.get("/yard/timeline", params={"request": request})
                    assert found.json()["scope"] == scope
                    assert found.json()["marks_ms"]["last_byte"]
                waiting.cancel()
                await waits(gateway, 0, "n1~gpu1")
            return yard.access

    lines = [json.loads(line) for block in run(story()) for line in block.splitlines()]
    by_path = {line["path"]: line for line in lines if line["code"] == "ok" and line["model"]}
    assert by_path[GPU0 + PATH]["scope"] == "n1~gpu0"
    assert by_path[GPU0 + PATH]["replica"] == "r-gpu0"
    assert by_path[PATH]["scope"] == ""


def test_a_gateway_restarted_while_nats_is_away_still_knows_its_cards(tmp_path: Path) -> None:
    async def story() -> None:
        async with memory_yard(tmp_path) as yard:
            engines = await two_cards(yard, "gpu0", "gpu1")
            async with yard.own_gateway("gw") as before:
                await until(lambda: before.gateway.synced, "the first table")
            async with yard.own_gateway("gw", connected=False) as gateway:
                assert not gateway.gateway.synced
                async with yard.client(gateway) as client:
                    answer = await client.post(GPU1 + PATH, json=chat())
                    assert answer.status_code == 200
                    listed = (await client.get(GPU0 + "/v1/models")).json()
                    assert [m["id"] for m in listed["data"]] == ["m"]
                    assert listed["stale"] is True
                    # It may only be newer than what is remembered.
                    answer = await client.post(f"/cards/n1/gpu9{PATH}", json=chat())
                    assert answer.json()["error"]["code"] == "yard_unavailable"
            assert [len(e.seen) for e in engines] == [0, 1]

    run(story())


def test_a_quarantine_of_the_model_holds_on_every_card(tmp_path: Path) -> None:
    async def story() -> None:
        async with memory_yard(tmp_path) as yard:
            await two_cards(yard)
            until_ = datetime.now(UTC) + timedelta(minutes=30)
            await yard.tell(yard.story.quarantined(until_, "5 starts failed"))
            gateway = await yard.gateway(wait_s=30.0)
            async with yard.client(gateway) as client:
                for base in ("", GPU0, GPU1):
                    answer = await client.post(base + PATH, json=chat())
                    assert answer.json()["error"]["code"] == "model_quarantined"
            assert await yard.activates() == []

    run(story())
