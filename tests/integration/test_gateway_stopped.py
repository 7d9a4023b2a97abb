"""A gateway whose table cannot fold an event: what it knew goes on serving, `/readyz` is red and names the event."""

import asyncio
from pathlib import Path
from typing import Any

import pytest

from events.log import Recorded
from events.service import FatalError
from gateway.domain.snapshot import decode
from gateway.domain.table import Table
from schemas.model import Model
from tests.support.aio import run, until
from tests.support.gateway_yard import chat, memory_yard

PATH = "/v1/chat/completions"


@pytest.fixture(autouse=True)
def cursed(monkeypatch: pytest.MonkeyPatch) -> None:
    """A table that fails on one model."""
    fold = Table._fold_model

    def failing(self: Table, name: str, model: Model | None, item: Recorded) -> None:
        if name == "cursed":
            raise KeyError("a fault of ours")
        fold(self, name, model, item)

    monkeypatch.setattr(Table, "_fold_model", failing)


def test_a_table_that_cannot_fold_an_event_goes_on_serving_and_says_so(tmp_path: Path) -> None:
    async def story() -> None:
        async with memory_yard(tmp_path) as yard:
            await yard.model()
            await yard.model("cold")
            engine = await yard.engine()
            last = await yard.replica(engine, has_key=True)
            gateway = await yard.gateway()
            async with yard.client(gateway) as client:
                assert (await client.get("/readyz")).status_code == 200
                bad = await yard.model("cursed")
                await until(lambda: gateway.gateway.stopped is not None, "the table to stop")
                later = await yard.model("later")
                ready = await client.get("/readyz")
                body: dict[str, Any] = ready.json()
                assert (ready.status_code, body["ready"], body["synced"]) == (503, False, False)
                assert f"event {bad} on yard.evt.model.cursed" in body["stopped"]
                assert body["position"] == last
                assert (await client.post(PATH, json=chat())).status_code == 200
                # What it does not know may be there, and what is loaded now it would not see come.
                for name in ("later", "cold"):
                    refused = await client.post(PATH, json=chat(name))
                    assert refused.json()["error"]["code"] == "yard_unavailable", name
                assert await yard.activates() == []
                assert (await client.get("/v1/models")).json()["stale"] is True
                assert "yard_gateway_stopped 1.0" in (await client.get("/metrics")).text
                # It confirms no event from now on.
                told = len(yard.beacons)
                await until(lambda: len(yard.beacons) > told + 1, "another beacon")
                assert yard.beacons[-1].position == 0
                assert later > bad

    run(story())


def test_what_came_before_that_event_has_its_effects(tmp_path: Path) -> None:
    async def story() -> None:
        async with memory_yard(tmp_path) as yard:
            await yard.model()
            await yard.activation("loading")
            engine = await yard.engine()
            gateway = await yard.gateway()
            async with yard.client(gateway) as client:
                waiting = asyncio.ensure_future(client.post(PATH, json=chat()))
                await until(lambda: gateway.gateway.open_tickets == 1, "the request waiting")
                yard.logs["gw"].connection.disconnect()
                ready = await yard.replica(engine, has_key=True)
                await yard.model("cursed")
                yard.logs["gw"].connection.reconnect()
                assert (await waiting).status_code == 200
                assert (await client.get("/readyz")).json()["position"] == ready

    run(story())


def test_one_that_starts_so_serves_from_its_snapshot(tmp_path: Path) -> None:
    async def story() -> None:
        async with memory_yard(tmp_path) as yard:
            await yard.model()
            engine = await yard.engine()
            seq = await yard.replica(engine, has_key=True)
            path = tmp_path / "gateway" / "gw" / "routes.json"
            async with yard.own_gateway("gw"):
                await until(
                    lambda: path.exists() and decode(path.read_bytes()).position >= seq,
                    "a snapshot",
                    timeout_s=12.0,
                )
            bad = await yard.model("cursed")
            gateway = await yard.gateway()
            async with yard.client(gateway) as client:
                assert f"event {bad}" in (await client.get("/readyz")).json()["stopped"]
                assert (await client.post(PATH, json=chat())).status_code == 200

    run(story())


def test_one_with_nothing_to_serve_ends_and_says_why(tmp_path: Path) -> None:
    async def story() -> None:
        async with memory_yard(tmp_path) as yard:
            await yard.model("cursed")
            with pytest.raises(ExceptionGroup) as raised:
                await yard.gateway()
            assert raised.group_contains(
                FatalError, match=r"folding event 1 on yard\.evt\.model\.cursed"
            )

    run(story())
