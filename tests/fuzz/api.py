"""schemathesis against both doors: everything their OpenAPI documents say, asked right and wrong.

    make fuzz-api        (python -m tests.fuzz.api controlplane|gateway [options of `st run`])

The door runs in this process on a log in memory, with something behind every list. Following the events is left out,
whose answer has no end. What fails: a 500, a status, a type of content or a body that the document does not describe, an
answer that needed no token. It exits with schemathesis' status. The tests run the same with fewer examples.
"""

import asyncio
import sys
import tempfile
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import Final
from unittest.mock import patch

from controlplane import api
from controlplane.app import ControlPlane, new_decider
from controlplane.candidate import Me
from controlplane.identifiers import new_ids
from controlplane.mirroring import Mirroring
from events.ids import new_id
from events.log import Draft
from events.memory import MemoryLog, MemoryWire
from events.memory_broker import MemoryBroker
from gateway.domain.places import BY_ID, ENGINE_PATHS
from schemas.commands import Command, KeyCreate, ModelAdd
from schemas.key import KeyCreated
from schemas.node import CardInfo, EngineInfo, Node, NodeStarted
from tests.hub.contents import Held
from tests.hub.server import Hub
from tests.support.aio import until
from tests.support.controlplanes import FAST, TOKEN, leads, running
from tests.support.gateway_keys import a_key, text_of
from tests.support.gateway_yard import memory_yard
from tests.support.openapi import attack
from tests.support.scripted import scripted

CHECKS: Final = (
    "not_a_server_error",
    "status_code_conformance",
    "content_type_conformance",
    "response_headers_conformance",
    "response_schema_conformance",
    "ignored_auth",
)
CONFIG: Final = Path(__file__).with_name("schemathesis.toml")
MODEL: Final = {
    "name": "my-model",
    "source": "/models/my.gguf",
    "profiles": [{"name": "cpu", "engine": "llamacpp", "memory": "1GiB"}],
}


@asynccontextmanager
async def controlplane(folder: Path) -> AsyncIterator[list[str]]:
    """A control plane with a mirror, a registry, a node, a model and a key; the words for `attack`."""
    broker = MemoryBroker()
    log = MemoryLog(broker)
    wire = MemoryWire(log.connection)
    admin = MemoryLog(broker, source="/ctl/anna")
    # A position that is far ahead is asked for again and again; it shall not take five seconds each time.
    with Hub() as hub, patch.multiple(api, DEFAULT_WAIT_S=0.01, LONGEST_WAIT_S=0.02):
        hub.repo("acme/Tiny").commit({"README.md": Held(b"# nothing to serve\n")})
        control = ControlPlane(
            events=log,
            wire=wire,
            me=Me(instance="cp-1", host="here", pid=1),
            settings=FAST,
            folder=folder / "cp-1",
            token=TOKEN,
            make_decider=new_decider,
            ids=new_ids(),
            mirroring=Mirroring(
                name="cp-1",
                folder=folder / "cp-1" / "mirror",
                settings=FAST,
                wire=wire,
                yard_secret="yard secret",
                environment={"HF_ENDPOINT": hub.url},
            ),
        )
        node = Node(
            id="n",
            running=True,
            started_at=datetime.now(UTC),
            cards=(CardInfo(id="cpu", kind="cpu", memory_bytes=8 << 30),),
            engines=(EngineInfo(name="llamacpp", version="b1", architectures=("llama",)),),
        )
        draft = Draft(
            subject="yard.evt.node.n", event=NodeStarted(), state=node, expected_seq=0, rev=1
        )
        await admin.append(draft, epoch=1000)
        async with running(control):
            await until(leads(control), "a leader")
            for body in (ModelAdd(entry=MODEL), KeyCreate(id="a" * 12, name="ci", hash="0" * 64)):
                command = Command(id=new_id(), body=body)
                await admin.send("anna", command)
                outcomes = control.leader.world.outcomes
                await until(lambda: command.id in outcomes, "an outcome")  # noqa: B023
                assert outcomes[command.id].status == "accepted", outcomes[command.id]
            await until(lambda: control.model.synced, "a synced projection")
            yield [
                f"http://127.0.0.1:{control.port}/schema/openapi.json",
                *("--header", f"Authorization: Bearer {TOKEN}"),
                *("--exclude-path", "/v1/events"),
            ]


@asynccontextmanager
async def gateway(folder: Path) -> AsyncIterator[list[str]]:
    """A gateway that wants keys, with a model on a scripted engine that has every endpoint; the words for `attack`."""
    with scripted(model="my-model") as endpoint:
        async with memory_yard(folder) as yard:
            await yard.model("my-model", aliases=("an alias",))
            paths = (*ENGINE_PATHS, *BY_ID)
            await yard.replica(None, endpoint=endpoint, model="my-model", paths=paths)
            key = a_key()
            await yard.put("key", (key.id,), KeyCreated(by="anna"), key)
            running = await yard.gateway()
            yield [
                f"http://127.0.0.1:{running.port}/openapi.json",
                *("--header", f"Authorization: Bearer {text_of()}"),
            ]


Door = Callable[[Path], AbstractAsyncContextManager[list[str]]]
DOORS: Final[dict[str, Door]] = {"controlplane": controlplane, "gateway": gateway}


async def fuzz(door: Door, folder: Path, *options: str) -> tuple[int, str]:
    """schemathesis' status, and what it printed. It has one worker: threads of Python 3.11 that all make syntax trees,
    as hypothesis does, disturb each other (cpython#106905)."""
    async with door(folder) as (url, *words):
        return await attack(
            url,
            *words,
            *("--checks", ",".join(CHECKS), "--request-timeout", "10"),
            *("--seed", "1", "--generation-database", "none", "--no-color", *options),
            config=CONFIG,
        )


async def main(argv: list[str]) -> int:
    name, *options = argv
    with tempfile.TemporaryDirectory() as folder:
        status, said = await fuzz(DOORS[name], Path(folder), "--max-examples", "15", *options)
    print(said)  # noqa: T201 - a program a person runs
    return status


if __name__ == "__main__":
    sys.exit(asyncio.run(main(sys.argv[1:])))
