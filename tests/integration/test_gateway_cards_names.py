"""Cards of any name have a base URL of their own, and no spelling below one reaches an engine's management routes."""

import asyncio
from pathlib import Path
from urllib.parse import quote

import pytest

from schemas.model import Scaling
from tests.support.aio import run
from tests.support.gateway_cards import GPU0, PATH, nothing_left, two_gpus
from tests.support.gateway_world import a_profile
from tests.support.gateway_yard import chat, memory_yard


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
        async with two_gpus(tmp_path, "gpu0") as (yard, (engine,)):
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
