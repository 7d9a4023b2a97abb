"""A whole control plane with its mirror: an adapter of a folder becomes ready, and the read API tells it as it goes."""

import contextlib
import hashlib
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import httpx
import msgspec

from controlplane.app import ControlPlane, new_decider
from controlplane.candidate import Me
from controlplane.identifiers import new_ids
from controlplane.mirroring import Mirroring
from events.ids import new_id
from events.memory import MemoryLog, MemoryWire
from events.memory_broker import MemoryBroker
from schemas import api as bodies
from schemas import codes
from schemas.commands import (
    AdapterAdd,
    AdapterPin,
    AdapterRemove,
    Command,
    CommandBody,
    ModelAdd,
    Outcome,
)
from tests.support.aio import run, until
from tests.support.controlplanes import FAST, TOKEN, api, leads, running
from tests.support.lora import write_adapter

ENTRY: dict[str, Any] = {
    "name": "llama",
    "source": "/models/llama",
    "max_loaded_adapters": 4,
    "profiles": [
        {
            "name": "gpu",
            "engine": "vllm",
            "memory": "1GiB",
            "card": "gpu",
            "args": ["--max-lora-rank", "32"],
        }
    ],
}


class Yard:
    """One control plane over a log in memory, that leads."""

    def __init__(self, folder: Path) -> None:
        broker = MemoryBroker()
        self.admin = MemoryLog(broker, source="/ctl/anna")
        log = MemoryLog(broker, source="/cp/cp-1")
        wire = MemoryWire(log.connection)
        self.plane = ControlPlane(
            events=log,
            wire=wire,
            me=Me(instance="cp-1", host="host-of-cp-1", pid=1),
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
                environment={"HF_ENDPOINT": "http://127.0.0.1:9"},
            ),
        )

    async def send(self, body: CommandBody) -> Outcome:
        command = Command(id=new_id(), body=body)
        await self.admin.send("anna", command)
        world = self.plane.leader.world
        await until(lambda: command.id in world.outcomes, "an outcome")
        return world.outcomes[command.id]

    async def in_phase(self, name: str, phase: str) -> int:
        """Returns the position at which the adapter is in that phase."""
        world = self.plane.leader.world
        await until(
            lambda: name in world.adapters and world.adapters[name].phase == phase,
            f"{name} {phase}",
        )
        return world.position


Story = Callable[[Yard, httpx.AsyncClient], Awaitable[None]]


@contextlib.asynccontextmanager
async def at_work(folder: Path) -> AsyncIterator[tuple[Yard, httpx.AsyncClient]]:
    yard = Yard(folder)
    async with running(yard.plane):
        await until(leads(yard.plane), "a leader")
        assert (await yard.send(ModelAdd(entry=ENTRY))).status == "accepted"
        async with api(yard.plane) as client:
            yield yard, client


def tell(folder: Path, story: Story) -> None:
    async def whole() -> None:
        async with at_work(folder) as (yard, client):
            await story(yard, client)

    run(whole(), 60)


def test_an_adapter_of_a_folder_is_ready_and_told(tmp_path: Path) -> None:
    folder = write_adapter(tmp_path / "sql", base="x/llama", rank=8)

    async def story(yard: Yard, client: httpx.AsyncClient) -> None:
        body = AdapterAdd(name="sql", base="llama", source=str(folder), aliases=["db"])
        outcome = await yard.send(body)
        assert outcome.status == "accepted", outcome
        seq = await yard.in_phase("sql", "ready")
        shown = await client.get("/v1/adapters/sql", params={"min_seq": seq, "wait": "10s"})
        found = msgspec.json.decode(shown.content, type=bodies.AdapterOne)
        assert (found.data.phase, found.data.rank, found.data.base) == ("ready", 8, "llama")
        assert found.data.event.type == "adapter.ready"
        sums = sorted(
            f"{name} {hashlib.sha256((folder / name).read_bytes()).hexdigest()}\n"
            for name in ("adapter_model.safetensors", "adapter_config.json")
        )
        version = hashlib.sha256("".join(sums).encode()).hexdigest()[:12]
        assert found.data.version == version
        listed = await client.get("/v1/adapters")
        whole = msgspec.json.decode(listed.content, type=bodies.AdapterList)
        assert [one.name for one in whole.data] == ["sql"]
        assert whole.data[0] == found.data

    tell(tmp_path, story)


def test_scn_d1_one_whose_rank_is_too_high_is_told_with_both_numbers(tmp_path: Path) -> None:
    folder = write_adapter(tmp_path / "big", base="x/llama", rank=64)

    async def story(yard: Yard, client: httpx.AsyncClient) -> None:
        await yard.send(AdapterAdd(name="big", base="llama", source=str(folder)))
        seq = await yard.in_phase("big", "refused")
        shown = await client.get("/v1/adapters/big", params={"min_seq": seq, "wait": "10s"})
        data = shown.json()["data"]
        assert data["code"] == codes.RANK_TOO_HIGH
        assert "64" in data["reason"]
        assert "32" in data["reason"]
        assert data["reason"] == data["event"]["reason"]

    tell(tmp_path, story)


def test_a_pinned_and_a_removed_one_are_told(tmp_path: Path) -> None:
    folder = write_adapter(tmp_path / "sql", base="x/llama", rank=8)

    async def story(yard: Yard, client: httpx.AsyncClient) -> None:
        await yard.send(AdapterAdd(name="a/b sql", base="llama", source=str(folder)))
        await yard.in_phase("a/b sql", "ready")
        await yard.send(AdapterPin(adapter="a/b sql"))
        seq = yard.plane.leader.world.position
        path = "/v1/adapters/a%2Fb%20sql"
        shown = await client.get(path, params={"min_seq": seq, "wait": "10s"})
        assert shown.json()["data"]["pinned"] is True
        assert shown.json()["data"]["event"]["actor"] == "anna"
        await yard.send(AdapterRemove(adapter="a/b sql"))
        seq = yard.plane.leader.world.position
        gone = await client.get(path, params={"min_seq": seq, "wait": "10s"})
        assert gone.status_code == 404
        assert gone.json()["error"]["code"] == "not_found"
        assert (await client.get("/v1/adapters")).json()["data"] == []

    tell(tmp_path, story)


def test_an_adapter_nobody_knows_is_not_found(tmp_path: Path) -> None:
    async def story(yard: Yard, client: httpx.AsyncClient) -> None:
        await until(lambda: yard.plane.model.synced, "a synced projection")
        answer = await client.get("/v1/adapters/none")
        assert answer.status_code == 404
        assert "'none'" in answer.json()["error"]["sentence"]

    tell(tmp_path, story)
