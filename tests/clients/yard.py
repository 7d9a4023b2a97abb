"""Starts the yard that the clients ask: llama.cpp and scripted engines behind one gateway that wants keys.

It knows no client and checks no answer.
"""

import asyncio
import json
import re
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any, Final

import httpx
from msgspec import Struct

from tests.clients.calls import ALIAS, BODY_LIMIT, FRAIL, IN_LINE, LLAMACPP, SCRIPTED, Key, hello
from tests.support.aio import until
from tests.system.yard import SMOLLM2, SystemYard, client, scripted_model, system_yard

WAIT_S: Final = 1.0
"""How long a request waits for a model; what is to wait in vain does so for this long."""

ALWAYS: Final = {"scaling": {"min": 1, "max": 1}}
ENTRIES: Final[tuple[dict[str, Any], ...]] = (
    {
        "name": LLAMACPP,
        "source": str(SMOLLM2),
        "context_length": 1024,
        **ALWAYS,
        "profiles": [
            {
                "name": "cpu",
                "engine": "llamacpp",
                # With --reranking it has every endpoint that this model can do without more files.
                "args": [
                    "--ctx-size",
                    "1024",
                    "--threads",
                    "1",
                    "--parallel",
                    "1",
                    "--temp",
                    "0.0",
                    "--reranking",
                ],
                "memory": "1GiB",
            }
        ],
    },
    scripted_model(SCRIPTED, aliases=[ALIAS], **ALWAYS),
    *(scripted_model(name, **ALWAYS) for name in FRAIL.values()),
    scripted_model("busy", "--pace-s", "0.05", "--tokens", "2000", concurrency=1, **ALWAYS),
    scripted_model("cold", "--hang-in-load", "1", profile={"start_timeout": "10m"}),
    scripted_model("asleep"),
    scripted_model("dying", "--crash-at-start", "out of luck"),
    scripted_model("vast", profile={"memory": "900TiB"}),
    scripted_model("off", scaling={"min": 0, "max": 0}),
)
READY: Final = (LLAMACPP, SCRIPTED, "busy", *FRAIL.values())


class ClientYard(Struct, frozen=True, kw_only=True):
    """The address of its gateway without a path, and the keys by what they are for."""

    base: str
    keys: dict[Key, str]


async def _make_keys(yard: SystemYard) -> dict[Key, str]:
    async def made(name: str, *options: str) -> str:
        return (await yard.ctl("key", "create", "--name", name, *options)).strip()

    keys: dict[Key, str] = {
        "all": await made("all", "--may-activate", "--rpm", "100000", "--tpm", "100000000"),
        "narrow": await made("narrow", "--models", LLAMACPP),
        "passive": await made("passive"),
        "spent": await made("spent", "--rpm", "1"),
        "revoked": await made("gone"),
        "none": "",
    }
    await yard.ctl("key", "revoke", "gone")
    keys["wrong"] = keys["all"][:-4] + "AAAA"
    return keys


@asynccontextmanager
async def clients_yard(data: Path, origins: tuple[str, ...] = ()) -> AsyncIterator[ClientYard]:
    """A yard whose models are ready; pages of these origins may call its gateway."""
    gateway = {
        "wait_s": WAIT_S,
        "body_limit_bytes": BODY_LIMIT,
        "waiting_requests": IN_LINE,
        "cors_origins": list(origins),
    }
    async with system_yard(data, settings={"gateway": gateway}) as yard:
        await yard.add(*ENTRIES)
        keys = await _make_keys(yard)
        for model in READY:
            await yard.when(
                lambda e, model=model: (
                    e.type == "replica.ready" and getattr(e.state, "model", "") == model
                ),
                f"a replica of {model}",
                timeout_s=30.0,
            )
        made = ClientYard(base=yard.gateway(), keys=keys)
        async with client(made.base) as http:

            async def serving() -> bool:
                headers = {"Authorization": f"Bearer {keys['all']}"}
                answer = await http.get("/v1/models", headers=headers)
                if answer.status_code != 200:
                    return False
                ready = {m["id"] for m in answer.json()["data"] if m.get("replicas_ready")}
                gone = await http.get(
                    "/v1/models", headers={"Authorization": f"Bearer {keys['revoked']}"}
                )
                return ready.issuperset(READY) and "revoked" in gone.text

            await until(serving, "a gateway that knows the models and the keys")
        yield made


@asynccontextmanager
async def kept_busy(yard: ClientYard, count: int) -> AsyncIterator[None]:
    """`count` requests at the model `busy`: the first runs, which its first bytes say; others wait in line."""
    headers = {"Authorization": f"Bearer {yard.keys['all']}"}

    async def waits(http: httpx.AsyncClient) -> None:
        # Whoever waited for as long as one does stands in line again.
        while True:
            await http.post("/v1/chat/completions", json=hello("busy"), headers=headers)

    async with AsyncExitStack() as stack:
        http = await stack.enter_async_context(client(yard.base))
        running = await stack.enter_async_context(
            http.stream(
                "POST", "/v1/chat/completions", json=hello("busy", stream=True), headers=headers
            )
        )
        assert running.status_code == 200
        waiting = [asyncio.create_task(waits(http)) for _ in range(count - 1)]
        try:
            if waiting:

                async def in_line() -> bool:
                    answer = await http.get("/metrics")
                    found = re.search(
                        r'yard_gateway_in_line\{[^}]*model="busy"[^}]*\} (\d+)', answer.text
                    )
                    return found is not None and int(found[1]) >= len(waiting)

                await until(in_line, "requests that wait in line", timeout_s=WAIT_S)
            yield
        finally:
            for task in waiting:
                task.cancel()
            await asyncio.gather(*waiting, return_exceptions=True)


async def spend(yard: ClientYard) -> None:
    """Uses up what the key `spent` may do in a minute; it may be used up already."""
    async with client(yard.base) as http:
        headers = {"Authorization": f"Bearer {yard.keys['spent']}"}
        answer = await http.post("/v1/chat/completions", json=hello(SCRIPTED), headers=headers)
        assert answer.status_code in (200, 429), answer.text


async def new_response(yard: ClientYard) -> str:
    """The id of a response that the scripted engine keeps."""
    async with client(yard.base) as http:
        headers = {"Authorization": f"Bearer {yard.keys['all']}"}
        body = {"model": SCRIPTED, "input": "Say hello."}
        answer = await http.post("/v1/responses", json=body, headers=headers)
        return json.loads(answer.content)["id"]
