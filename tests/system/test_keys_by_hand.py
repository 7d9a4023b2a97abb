"""yardctl key against a whole yard with two gateways, as a person types it: created, used, changed, revoked."""

from pathlib import Path

import httpx
import pytest

from controlplane.ctl import up
from tests.support.aio import run, until
from tests.system.yard import SystemYard, chat, client, rows, scripted_model, system_yard

GATEWAYS = 2

pytestmark = pytest.mark.timeout(120)
"""A dozen calls of yardctl; beside other tests that takes its time."""


async def ask(yard: SystemYard, gateway: int, key: str | None, model: str = "a") -> httpx.Response:
    headers = {} if key is None else {"Authorization": f"Bearer {key}"}
    async with client(yard.gateway(gateway)) as http:
        return await http.post("/v1/chat/completions", json=chat(model), headers=headers)


async def served(yard: SystemYard, gateway: int, key: str, model: str = "a") -> bool:
    answer = await ask(yard, gateway, key, model)
    assert answer.status_code in (200, 401, 403), answer.text
    return answer.status_code == 200


async def refused(yard: SystemYard, key: str | None) -> list[str]:
    """What each gateway says to a key it must refuse."""
    said: list[str] = []
    for gateway in range(GATEWAYS):
        answer = await ask(yard, gateway, key)
        assert answer.status_code == 401, answer.text
        assert answer.json()["error"]["code"] == "invalid_api_key"
        said.append(answer.json()["error"]["message"])
    return said


def test_scn_e4_a_revoked_key_is_refused_on_every_gateway_once_yardctl_says_so(
    tmp_path: Path,
) -> None:
    async def story() -> None:
        async with system_yard(tmp_path / "data", gateways=GATEWAYS) as yard:
            await yard.add(
                scripted_model("a", scaling={"min": 1, "max": 1}),
                scripted_model("b", scaling={"min": 0, "max": 1}),
            )
            await yard.event("replica.ready")
            assert "there are no keys" in await yard.ctl("key", "list")
            assert (await ask(yard, 0, None)).status_code == 200, "without any key a yard is open"
            assert not await up._asks_for_a_key(yard.running.yard)

            out, err = await yard.told("key", "create", "--name", "ci", "--rpm", "1000")
            key = out.removesuffix("\n")
            assert "the key 'ci' is valid now" in err
            assert key not in err
            await yard.ctl("key", "create", "--name", "ci", expect=2)
            made = await yard.event("key.created")
            id_ = made.key[0]
            assert id_ == key.split("_")[1]

            for gateway in range(GATEWAYS):
                await until(lambda at=gateway: served(yard, at, key), "a gateway that read of it")
            assert await up._asks_for_a_key(yard.running.yard), (
                "the line it prints has a place for one"
            )
            assert all("No API key" in said for said in await refused(yard, None))
            assert all("secret" in said for said in await refused(yard, f"{key[:-1]}_"))
            assert (await ask(yard, 0, key, "b")).json()["error"]["code"] == "key_may_not_activate"

            assert "may_activate changed" in await yard.ctl("key", "set", "ci", "--may-activate")
            (listed,) = await rows(yard, "key", "list")
            assert (listed["name"], listed["state"], listed["rpm"]) == ("ci", "valid", 1000)
            assert id_ in await yard.ctl("key", "show", "ci")
            await until(lambda: served(yard, 0, key, "b"), "a gateway that read of the change")

            said = await yard.ctl("key", "revoke", "ci")
            assert f"the key 'ci' ({id_}) is revoked" in said
            assert f"refused on {GATEWAYS} of {GATEWAYS} gateways" in said
            assert all("revoked" in told for told in await refused(yard, key))
            assert "revoked already" in await yard.ctl("key", "revoke", key)
            await yard.ctl("key", "revoke", "nobody", expect=2)
            (listed,) = await rows(yard, "key", "list")
            assert listed["state"] == "revoked"

            secret = key.split("_", 2)[2]
            told = await yard.ctl("events", "--since", "1h", "-o", "jsonl")
            assert id_ in told
            assert secret not in told
            for file in (tmp_path / "data").rglob("*"):
                assert not file.is_file() or secret.encode() not in file.read_bytes(), file

    run(story(), timeout_s=110)
