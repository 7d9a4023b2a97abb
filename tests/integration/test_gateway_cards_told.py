"""Logs, metrics and timelines know the card a request was for, and so does a gateway that has only its snapshot."""

import asyncio
import json
from datetime import UTC, datetime, timedelta
from pathlib import Path

from tests.support.aio import run, until
from tests.support.gateway_cards import GPU0, GPU1, PATH, two_gpus, waits
from tests.support.gateway_yard import chat


def test_log_metrics_and_timeline_carry_the_scope(tmp_path: Path) -> None:
    async def story() -> list[bytes]:
        async with two_gpus(tmp_path, "gpu0") as (yard, _):
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
        async with two_gpus(tmp_path, "gpu0", "gpu1") as (yard, engines):
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
        async with two_gpus(tmp_path) as (yard, _):
            until_ = datetime.now(UTC) + timedelta(minutes=30)
            await yard.tell(yard.story.quarantined(until_, "5 starts failed"))
            gateway = await yard.gateway(wait_s=30.0)
            async with yard.client(gateway) as client:
                for base in ("", GPU0, GPU1):
                    answer = await client.post(base + PATH, json=chat())
                    assert answer.json()["error"]["code"] == "model_quarantined"
            assert await yard.activates() == []

    run(story())
