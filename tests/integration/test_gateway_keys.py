"""Keys at a gateway: who is let in, to what, and that nothing of it reaches an engine."""

import asyncio
import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import msgspec
import pytest

from events.service import FatalError
from gateway.app import RunningGateway
from schemas.key import Key, KeyCreated, KeyRevoked
from tests.support.aio import run, until
from tests.support.gateway_keys import ID, SECRET, a_key, text_of
from tests.support.gateway_world import NOW
from tests.support.gateway_yard import Yard, chat, memory_yard

CHAT = "/v1/chat/completions"
OTHER = "otherkey2345"


async def tell_key(yard: Yard, key: Key) -> int:
    event = KeyRevoked(by="admin") if key.revoked_at else KeyCreated(by="admin")
    return await yard.put("key", (key.id,), event, key)


@asynccontextmanager
async def a_yard(
    tmp_path: Path, *keys: Key, **settings: Any
) -> AsyncIterator[tuple[Yard, RunningGateway, httpx.AsyncClient]]:
    """A model `m` that is ready, one `cold` that is not, these keys and a gateway."""
    async with memory_yard(tmp_path) as yard:
        await yard.model("m", aliases=("gpt",))
        await yard.model("cold")
        await yard.replica(await yard.engine(), "r-1", has_key=True)
        for key in keys:
            await tell_key(yard, key)
        gateway = await yard.gateway(**settings)
        async with yard.client(gateway) as client:
            yield yard, gateway, client


def _is_keyless(gateway: RunningGateway) -> bool:
    table = gateway.gateway.table
    return table is not None and not table.keys.keys


def bearer(text: str = "") -> dict[str, str]:
    return {"authorization": f"Bearer {text or text_of()}"}


def test_a_yard_without_keys_is_open_on_this_machine_and_asks_once_it_has_one(
    tmp_path: Path,
) -> None:
    async def story() -> None:
        async with a_yard(tmp_path) as (yard, gateway, client):
            assert (
                await client.post(CHAT, json=chat(), headers=bearer("sk-any"))
            ).status_code == 200
            await yard.applied(gateway, await tell_key(yard, a_key()))
            refused = await client.post(CHAT, json=chat(), headers=bearer("sk-any"))
            assert (refused.status_code, refused.json()["error"]["code"]) == (
                401,
                "invalid_api_key",
            )
            assert refused.headers["www-authenticate"] == "Bearer"
            assert refused.headers["x-should-retry"] == "false"
            assert (await client.post(CHAT, json=chat(), headers=bearer())).status_code == 200
            # It does not open again when the last one is revoked.
            await yard.applied(gateway, await tell_key(yard, a_key(revoked_at=NOW)))
            refused = await client.post(CHAT, json=chat(), headers=bearer())
            assert refused.status_code == 401
            assert "revoked" in refused.json()["error"]["message"]
            assert (await client.post(CHAT, json=chat())).status_code == 401

    run(story())


@pytest.mark.parametrize(
    "headers",
    [
        {"authorization": f"Bearer {text_of()}"},
        {"authorization": f"bEARER   {text_of()}"},
        {"x-api-key": text_of()},
        {"api-key": text_of()},
        # Clients that know several keys send them all.
        {"authorization": "Bearer sk-of-somebody-else", "x-api-key": text_of()},
        {"authorization": "Basic dXNlcjpwYXNz", "api-key": text_of()},
    ],
)
def test_a_key_is_found_where_clients_put_it_and_reaches_no_engine(
    tmp_path: Path, headers: dict[str, str], caplog: pytest.LogCaptureFixture
) -> None:
    async def story() -> None:
        caplog.set_level(logging.DEBUG)
        async with a_yard(tmp_path, a_key()) as (yard, _gateway, client):
            answer = await client.post(CHAT, json=chat("gpt"), headers=headers)
            assert answer.status_code == 200
            seen = yard.engines[0].seen[-1]
            assert SECRET not in repr(seen)
            assert not {"x-api-key", "api-key"} & {name.lower() for name in seen.headers}
        written = b"".join(yard.access)
        assert ID.encode() in written
        assert SECRET.encode() not in written
        assert SECRET not in caplog.text
        assert SECRET.encode() not in (tmp_path / "gateway/gw/routes.json").read_bytes()

    run(story())


def test_who_asks_is_decided_before_a_body_is_read(tmp_path: Path) -> None:
    async def story() -> None:
        async with a_yard(tmp_path, a_key()) as (_, gateway, _client):
            reader, writer = await asyncio.open_connection("127.0.0.1", gateway.port)
            writer.write(
                b"POST /v1/chat/completions HTTP/1.1\r\nhost: y\r\ncontent-length: 1000000\r\n"
                b"expect: 100-continue\r\n\r\n"
            )
            head = await reader.readuntil(b"\r\n\r\n")
            assert head.startswith(b"HTTP/1.1 401 ")
            writer.close()
            await writer.wait_closed()

    run(story())


def test_a_large_body_without_a_key_is_answered_and_not_kept(tmp_path: Path) -> None:
    async def story() -> None:
        async with a_yard(tmp_path, a_key()) as (_, _gateway, client):
            for size in (100, 1_000_000, 20_000_000):
                answer = await client.post(CHAT, content=b"x" * size)
                assert answer.status_code == 401

    run(story())


def test_a_key_is_for_its_models_and_lists_only_them(tmp_path: Path) -> None:
    async def story() -> None:
        mine, other = a_key(models=("m",)), a_key(OTHER, name="two", models=("co*",))
        async with a_yard(tmp_path, mine, other) as (yard, gateway, client):
            for name in ("m", "gpt"):
                answer = await client.post(CHAT, json=chat(name), headers=bearer())
                assert answer.status_code == 200
            for name in ("cold", "no-such-model"):
                refused = await client.post(CHAT, json=chat(name), headers=bearer())
                assert (refused.status_code, refused.json()["error"]["code"]) == (
                    403,
                    "key_not_allowed",
                )
                one = await client.get(f"/v1/models/{name}", headers=bearer())
                assert (one.status_code, one.json()["error"]["code"]) == (403, "key_not_allowed")
            listed = await client.get("/v1/models", headers=bearer())
            assert [card["id"] for card in listed.json()["data"]] == ["m"]
            listed = await client.get("/v1/models", headers=bearer(text_of(OTHER)))
            assert [card["id"] for card in listed.json()["data"]] == ["cold"]
            assert (await client.get("/v1/models/gpt", headers=bearer())).status_code == 200
            assert (await client.get("/v1/models")).status_code == 401
            await yard.applied(gateway, await yard.cards("n1"))
            on_card = await client.get("/cards/n1/cpu/v1/models", headers=bearer(text_of(OTHER)))
            assert "m" not in [card["id"] for card in on_card.json()["data"]]
            assert (await client.get("/cards/n1/cpu/v1/models")).status_code == 401

    run(story())


def test_req_x2_a_key_that_may_not_start_models_starts_none_and_wakes_with_others(
    tmp_path: Path,
) -> None:
    async def story() -> None:
        may = a_key(OTHER, name="two", may_activate=True)
        async with a_yard(tmp_path, a_key(), may) as (yard, gateway, client):
            refused = await client.post(CHAT, json=chat("cold"), headers=bearer())
            assert (refused.status_code, refused.json()["error"]["code"]) == (
                403,
                "key_may_not_activate",
            )
            assert not await yard.activates()
            # Somebody else has it started: it is waited for like by anybody.
            starter = asyncio.create_task(
                client.post(CHAT, json=chat("cold"), headers=bearer(text_of(OTHER)))
            )
            assert (await yard.wish()).model == "cold"
            await yard.applied(gateway, await yard.activation("loading", model="cold"))
            joiner = asyncio.create_task(client.post(CHAT, json=chat("cold"), headers=bearer()))
            await until(lambda: gateway.gateway.open_tickets == 2, "both to wait")
            await yard.replica(await yard.engine(), "r-2", model="cold")
            assert (await starter).status_code == (await joiner).status_code == 200

    run(story())


def test_who_may_not_start_a_model_is_answered_when_nobody_starts_it_any_more(
    tmp_path: Path,
) -> None:
    async def story() -> None:
        async with a_yard(tmp_path, a_key()) as (yard, gateway, client):
            await yard.applied(gateway, await yard.activation("loading", model="cold"))
            waiting = asyncio.create_task(client.post(CHAT, json=chat("cold"), headers=bearer()))
            await until(lambda: gateway.gateway.open_tickets == 1, "it to wait")
            await yard.activation("idle", model="cold")
            answer = await waiting
            assert (answer.status_code, answer.json()["error"]["code"]) == (
                403,
                "key_may_not_activate",
            )
            assert not await yard.activates()

    run(story())


def test_scn_b6_a_preflight_needs_no_key_and_every_refusal_names_the_origin(tmp_path: Path) -> None:
    async def story() -> None:
        async with a_yard(tmp_path, a_key(models=("m",), rpm=1)) as (_, _gateway, client):
            page = {"origin": "https://page.example"}
            asked = {
                **page,
                "access-control-request-method": "POST",
                "access-control-request-headers": "authorization,content-type,x-stainless-os",
            }
            preflight = await client.options(CHAT, headers=asked)
            assert preflight.status_code == 204
            assert preflight.headers["access-control-allow-headers"] == (
                "authorization, content-type, x-stainless-os"
            )
            statuses = []
            for headers in ({}, bearer(), bearer(), bearer("yk_wrong")):
                answer = await client.post(CHAT, json=chat(), headers={**page, **headers})
                assert answer.headers["access-control-allow-origin"] == "*"
                assert (
                    "x-ratelimit-reset-requests" in answer.headers["access-control-expose-headers"]
                )
                statuses.append(answer.status_code)
            forbidden = await client.post(CHAT, json=chat("x"), headers={**page, **bearer()})
            assert forbidden.headers["access-control-allow-origin"] == "*"
            assert [*statuses, forbidden.status_code] == [401, 200, 429, 401, 403]

    run(story())


def test_health_needs_no_key_and_numbers_none_on_this_machine(tmp_path: Path) -> None:
    async def story() -> None:
        async with a_yard(tmp_path, a_key(), keys="required") as (_, _gateway, client):
            for path in ("/healthz", "/readyz", "/metrics"):
                assert (await client.get(path)).status_code == 200
            assert (await client.get("/nothing/here")).status_code == 404
            assert (await client.delete("/v1/models")).status_code == 405

    run(story())


def test_required_refuses_everybody_while_there_is_no_key_and_off_nobody(tmp_path: Path) -> None:
    async def story() -> None:
        async with a_yard(tmp_path / "a", keys="required") as (_, _gateway, client):
            assert (await client.post(CHAT, json=chat())).status_code == 401
        async with a_yard(tmp_path / "b", a_key(), keys="off") as (_, _gateway, client):
            assert (await client.post(CHAT, json=chat())).status_code == 200

    run(story())


@pytest.mark.parametrize("keys", ["auto", "required"])
def test_a_gateway_without_keys_does_not_listen_where_others_reach_it(
    tmp_path: Path, keys: str
) -> None:
    async def story() -> None:
        async with memory_yard(tmp_path) as yard:
            await yard.model("m")
            with pytest.raises(ExceptionGroup) as refused:
                async with yard.own_gateway(listen="0.0.0.0:0", keys=keys):
                    pass
            (problem,) = refused.value.exceptions
            assert isinstance(problem, FatalError)
            assert "yardctl key create" in str(problem)
            async with yard.own_gateway("open", listen="0.0.0.0:0", keys="off"):
                pass
            await tell_key(yard, a_key())
            keyed = yard.own_gateway("keyed", listen="0.0.0.0:0", keys=keys)
            async with keyed as gateway, yard.client(gateway) as client:
                assert (await client.post(CHAT, json=chat())).status_code == 401

    run(story())


def test_a_gateway_that_others_reach_stays_shut_when_its_log_is_replaced(tmp_path: Path) -> None:
    """A new log has no keys; that is no reason to let everybody in."""

    async def story() -> None:
        async with a_yard(tmp_path, a_key()) as (yard, gateway, client):
            yard.broker.replace_events()
            yard.heads.clear()
            seq = await yard.model("m")
            await yard.applied(gateway, seq)
            await until(lambda: _is_keyless(gateway), "the new log to be read")
            assert (await client.post(CHAT, json=chat())).status_code == 401

    run(story())


def test_a_gateway_from_its_snapshot_knows_the_keys_it_knew(tmp_path: Path) -> None:
    async def story() -> None:
        async with a_yard(tmp_path, a_key()) as (yard, _gateway, _client):
            async with yard.own_gateway("gw2"):
                pass
            async with yard.own_gateway("gw2", connected=False) as alone, yard.client(alone) as c:
                assert not alone.gateway.synced
                assert (await c.post(CHAT, json=chat(), headers=bearer())).status_code == 200
                assert (await c.post(CHAT, json=chat())).status_code == 401
                unknown = await c.post(CHAT, json=chat(), headers=bearer(text_of(OTHER)))
                assert (unknown.status_code, unknown.json()["error"]["code"]) == (
                    503,
                    "yard_unavailable",
                )

    run(story())


def test_the_access_log_says_whose_key_it_was(tmp_path: Path) -> None:
    async def story() -> None:
        async with a_yard(tmp_path, a_key()) as (yard, _gateway, client):
            await client.post(CHAT, json=chat(), headers=bearer())
            await client.post(CHAT, json=chat())
        lines = [msgspec.json.decode(line) for line in b"".join(yard.access).splitlines()]
        assert [(line["key"], line["code"]) for line in lines] == [
            (ID, "ok"),
            ("", "invalid_api_key"),
        ]

    run(story())


def test_below_messages_refusals_have_anthropic_s_form(tmp_path: Path) -> None:
    async def story() -> None:
        key = a_key(models=("m",), rpm=1)
        async with a_yard(tmp_path, key) as (_, _gateway, client):
            body = {
                "model": "m",
                "max_tokens": 9,
                "messages": [{"role": "user", "content": "hello"}],
            }
            mine = {"x-api-key": text_of()}
            found: list[tuple[int, str]] = []
            for headers, model in (({}, "m"), (mine, "cold"), (mine, "m"), (mine, "m")):
                answer = await client.post(
                    "/v1/messages", json={**body, "model": model}, headers=headers
                )
                refused = answer.json()
                assert refused["type"] == "error"
                assert refused["error"]["message"]
                found.append((answer.status_code, refused["error"]["type"]))
            # This engine has no such endpoint: who was let in hears that.
            assert found == [
                (401, "authentication_error"),
                (403, "permission_error"),
                found[2],
                (429, "rate_limit_error"),
            ]
            assert found[2][0] == 501

    run(story())
