"""Who waits under a card's base URL, for what, and what ends the wait: the card kept, gone or full, a start that failed."""

import asyncio
from datetime import UTC, datetime
from pathlib import Path

import httpx
import pytest

from tests.support.aio import run
from tests.support.gateway_cards import GPU0, GPU1, PATH, nothing_left, two_gpus, waits
from tests.support.gateway_world import a_profile
from tests.support.gateway_yard import chat, memory_yard


@pytest.mark.parametrize("base", ["", GPU0])
def test_req_d7_a_wait_behind_a_kept_card_ends_with_who_keeps_it(tmp_path: Path, base: str) -> None:
    async def story() -> None:
        async with two_gpus(tmp_path) as (yard, _):
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
        async with two_gpus(tmp_path) as (yard, _):
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
        async with two_gpus(tmp_path) as (yard, _):
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
        async with two_gpus(tmp_path) as (yard, _):
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
        async with two_gpus(tmp_path) as (yard, _):
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
        async with two_gpus(tmp_path) as (yard, _):
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
        async with two_gpus(tmp_path) as (yard, _):
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
