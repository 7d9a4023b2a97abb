"""A control plane with its mirror: adapters are read, fetched and served to nodes, whatever place they come from."""

import contextlib
import hashlib
import shutil
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import httpx
import msgspec

from controlplane.app import ControlPlane
from controlplane.domain.filesets import ADAPTER_CONFIG, ADAPTER_WEIGHTS
from events.secrets import mirror_token, node_secret
from schemas import codes
from schemas.adapter import Adapter
from schemas.commands import AdapterAdd, AdapterRemove, MirrorGc, MirrorRemove, ModelAdd
from schemas.mirror import Manifest
from tests.hub.adapters import adapter
from tests.hub.server import Hub
from tests.integration.test_serve_wiring import SECRET, Yard
from tests.support.aio import run, until
from tests.support.controlplanes import api, leads, running
from tests.support.fileserver import Asked, file_server
from tests.support.lora import write_adapter

BEARER = {"authorization": f"Bearer {mirror_token(node_secret(SECRET, 'n'), 'n')}"}
ENTRY = {
    "name": "llama",
    "source": "/srv/models/tiny-base",
    "max_loaded_adapters": 4,
    "scaling": {"min": 0, "max": 1},
    "profiles": [{"name": "gpu", "engine": "vllm", "memory": "1GiB", "card": ["gpu"]}],
}

Story = Callable[[Yard, ControlPlane, httpx.AsyncClient], Awaitable[None]]


@contextlib.asynccontextmanager
async def leading(
    yard: Yard, name: str = "cp-1"
) -> AsyncIterator[tuple[ControlPlane, httpx.AsyncClient]]:
    plane = yard.plane(name)
    async with running(plane):
        await until(leads(plane), "a leader")
        async with api(plane) as client:
            yield plane, client


def tell(tmp_path: Path, story: Story) -> None:
    async def whole(hub: Hub) -> None:
        yard = Yard(tmp_path, hub)
        async with leading(yard) as (plane, client):
            outcome = await yard.send(plane, ModelAdd(entry=ENTRY))
            assert outcome.status == "accepted", outcome
            await story(yard, plane, client)

    with Hub() as hub:
        run(whole(hub), 60)


async def follow(first: ControlPlane, second: ControlPlane) -> None:
    """The second leads in place of the first, which runs on."""
    await until(lambda: second.leader.reader.synced, "the second to be synced")
    mirroring = second.leader._mirroring
    assert mirroring is not None
    await until(lambda: bool(mirroring.others()), "the first one's mirror")
    await first.leader._say(leaving=True)
    await until(leads(second), "the second to lead", 20)


async def added(yard: Yard, plane: ControlPlane, name: str, source: str, **more: Any) -> Adapter:
    """Adds it, and returns it when it is ready or refused."""
    body = AdapterAdd(name=name, base="llama", source=source, trust_base=True, **more)
    outcome = await yard.send(plane, body)
    assert outcome.status == "accepted", outcome
    world = plane.leader.world
    await until(lambda: world.adapters[name].phase in ("ready", "refused"), f"the end of {name}")
    return world.adapters[name]


async def served(client: httpx.AsyncClient, found: Adapter) -> dict[str, bytes]:
    """What a node gets of the adapter, by name; each checked against the manifest."""
    answer = await client.get(f"/mirror/sets/{found.files[0].key}", headers=BEARER)
    assert answer.status_code == 200, answer.text
    manifest = msgspec.json.decode(answer.content, type=Manifest)
    assert [file.name for file in manifest.files] == [ADAPTER_WEIGHTS, ADAPTER_CONFIG]
    got: dict[str, bytes] = {}
    for file in manifest.files:
        answer = await client.get(f"/mirror/files/{file.key}", headers=BEARER)
        assert hashlib.sha256(answer.content).hexdigest() == file.sha256
        assert len(answer.content) == file.bytes
        got[file.name] = answer.content
    return got


def test_adapters_of_every_place_reach_the_nodes(tmp_path: Path) -> None:
    folder = write_adapter(tmp_path / "polite", rank=16)

    async def story(yard: Yard, plane: ControlPlane, client: httpx.AsyncClient) -> None:
        yard.hub.repo("acme/Rude").commit(adapter("rude"))
        yard.hub.repo("acme/Shy").commit(adapter("shy"))
        sources = {
            "polite": str(folder),
            "rude": "acme/rude",
            "shy": f"{yard.hub.url}/acme/Shy/resolve/main",
        }
        for name, source in sources.items():
            found = await added(yard, plane, name, source)
            assert found.phase == "ready", found.reason
            assert len(found.version) == 12
            files = await served(client, found)
            assert f'"marker": "{name}"'.encode() in files[ADAPTER_WEIGHTS]
        repos = {file.repo for file in plane.leader.world.files.values()}
        assert repos == {str(folder), "acme/Rude", f"{yard.hub.url}/acme/Shy/resolve/main"}

    tell(tmp_path, story)


def test_scn_d9_what_is_no_adapter_is_refused_and_nothing_of_it_is_kept(tmp_path: Path) -> None:
    folder = write_adapter(tmp_path / "polite")
    (folder / ADAPTER_WEIGHTS).rename(folder / "adapter_model.bin")

    async def story(yard: Yard, plane: ControlPlane, client: httpx.AsyncClient) -> None:
        found = await added(yard, plane, "polite", str(folder))
        assert (found.phase, found.code) == ("refused", codes.NOT_AN_ADAPTER)
        assert "may run code" in found.reason
        assert not plane.leader.world.files
        (folder / "adapter_model.bin").rename(folder / ADAPTER_WEIGHTS)
        again = await added(yard, plane, "polite", str(folder))
        assert again.phase == "ready"
        assert again.incarnation != found.incarnation

    tell(tmp_path, story)


def test_an_adapter_s_files_are_kept_while_it_is_there(tmp_path: Path) -> None:
    folder = write_adapter(tmp_path / "polite")

    async def story(yard: Yard, plane: ControlPlane, client: httpx.AsyncClient) -> None:
        found = await added(yard, plane, "polite", str(folder))
        refused = await yard.send(plane, MirrorRemove(what=found.files[1].key))
        assert refused.code == codes.IN_USE
        assert "is needed by adapter 'polite'" in refused.sentence
        assert "all of it is needed" in (await yard.send(plane, MirrorGc())).sentence
        await served(client, found)
        await yard.send(plane, AdapterRemove(adapter="polite"))
        assert "2 files" in (await yard.send(plane, MirrorGc())).sentence
        world = plane.leader.world
        await until(lambda: not any(file.copies for file in world.files.values()), "their end")
        answer = await client.get(f"/mirror/sets/{found.files[0].key}", headers=BEARER)
        assert answer.status_code == 404

    tell(tmp_path, story)


def test_inv_6_an_adapter_that_was_being_read_is_read_by_the_next_leader(tmp_path: Path) -> None:
    folder = write_adapter(tmp_path / "polite")

    def script(asked: Asked) -> None:
        if len(asked.server.requests) == 1:
            asked.stall()
        else:
            asked.answer(200, (folder / asked.path.rpartition("/")[2]).read_bytes())

    async def story(yard: Yard, first: ControlPlane, _: httpx.AsyncClient) -> None:
        with file_server(script) as server:
            body = AdapterAdd(
                name="polite", base="llama", source=f"{server.url}/a", trust_base=True
            )
            await yard.send(first, body)
            await until(lambda: bool(server.requests), "the first to read it")
            second = yard.plane("cp-2")
            async with running(second):
                await follow(first, second)
                adapters = second.leader.world.adapters
                await until(lambda: adapters["polite"].phase == "ready", "the adapter", 20)

    tell(tmp_path, story)


def test_req_b3_another_control_plane_has_what_lay_in_a_folder_of_the_first(tmp_path: Path) -> None:
    """The folder is gone when the second leads: its mirror takes the files from the first one's."""
    folder = write_adapter(tmp_path / "polite")

    async def story(yard: Yard, first: ControlPlane, _: httpx.AsyncClient) -> None:
        found = await added(yard, first, "polite", str(folder))
        shutil.rmtree(folder)
        second = yard.plane("cp-2")
        async with running(second):
            await follow(first, second)
            files = second.leader.world.files
            await until(
                lambda: all(
                    [copy.phase for copy in file.copies] == ["present", "present"]
                    for file in files.values()
                ),
                "the second copies",
                20,
            )
            async with api(second) as client:
                await served(client, found)

    tell(tmp_path, story)
