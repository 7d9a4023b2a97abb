"""A control plane with its mirror on a registry: plans change nothing, jobs fetch, and what was lost is fetched again."""

import asyncio
import contextlib
import os
import shutil
from collections.abc import AsyncIterator, Awaitable, Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import httpx
import msgspec

from controlplane.app import ControlPlane, new_decider
from controlplane.candidate import Me
from controlplane.identifiers import new_ids
from controlplane.mirroring import Mirroring
from events.ids import new_id
from events.log import Draft
from events.memory import MemoryLog, MemoryWire
from events.memory_broker import MemoryBroker
from events.secrets import mirror_token, node_secret
from schemas.beacons import AgentBeacon
from schemas.commands import Command, CommandBody, JobServe, MirrorGc, MirrorRemove
from schemas.job import JOB_OVER, Job
from schemas.mirror import Manifest
from schemas.node import CardInfo, EngineInfo, Node, NodeStarted
from tests.hub import ggufs
from tests.hub.contents import OnDisk
from tests.hub.faults import Fault
from tests.hub.server import Hub
from tests.support.aio import run, until
from tests.support.controlplanes import FAST, TOKEN, api, leads, running

GIB = 1024**3
REPO = "acme/Tiny-GGUF"
SECRET = "yard secret"


class Yard:
    """Control planes over one log, with a node that beacons, and a hub."""

    def __init__(self, folder: Path, hub: Hub, *, memory_bytes: int = 8 * GIB) -> None:
        self.folder = folder
        self.hub = hub
        self.memory_bytes = memory_bytes
        self.broker = MemoryBroker()
        self.admin = MemoryLog(self.broker, source="/ctl/anna")

    def plane(self, name: str = "cp-1") -> ControlPlane:
        log = MemoryLog(self.broker, source=f"/cp/{name}")
        wire = MemoryWire(log.connection)
        return ControlPlane(
            events=log,
            wire=wire,
            me=Me(instance=name, host=f"host-of-{name}", pid=1),
            settings=FAST,
            folder=self.folder / name,
            token=TOKEN,
            make_decider=new_decider,
            ids=new_ids(),
            mirroring=Mirroring(
                name=name,
                folder=self.folder / name / "mirror",
                settings=FAST,
                wire=wire,
                yard_secret=SECRET,
                environment={"HF_ENDPOINT": self.hub.url},
            ),
        )

    async def join(self) -> None:
        """A node whose llama.cpp loads llama."""
        node = Node(
            id="n",
            running=True,
            started_at=datetime.now(UTC),
            cards=(CardInfo(id="cpu", kind="cpu", memory_bytes=self.memory_bytes),),
            engines=(EngineInfo(name="llamacpp", version="b1", architectures=("llama",)),),
        )
        draft = Draft(
            subject="yard.evt.node.n", event=NodeStarted(), state=node, expected_seq=0, rev=1
        )
        await self.admin.append(draft, epoch=1000)

    async def beacon(self) -> None:
        wire = MemoryWire(MemoryLog(self.broker, source="/agent/n").connection)
        while True:
            await wire.beacon("agent", "n", AgentBeacon(node="n", epoch=1, position=0))
            await asyncio.sleep(0.5)

    async def send(self, plane: ControlPlane, body: CommandBody) -> Any:
        command = Command(id=new_id(), body=body)
        await self.admin.send("anna", command)
        world = plane.leader.world
        await until(lambda: command.id in world.outcomes, "an outcome")
        return world.outcomes[command.id]

    async def serve(self, plane: ControlPlane, **given: Any) -> Job:
        """Serves on demand, and returns the job when it is over."""
        body = JobServe(repo=REPO, quant="F16", replicas=0, ctx_pool=512, **given)
        outcome = await self.send(plane, body)
        (job,) = (r.rpartition(".")[2] for r in outcome.refs if ".job." in r)
        jobs = plane.leader.world.jobs
        await until(lambda: jobs[job].state in JOB_OVER, "the end of the job", 30)
        return jobs[job]


Story = Callable[[Yard, ControlPlane, httpx.AsyncClient], Awaitable[None]]


@contextlib.asynccontextmanager
async def at_work(yard: Yard, plane: ControlPlane) -> AsyncIterator[httpx.AsyncClient]:
    async with running(plane):
        await until(leads(plane), "a leader")
        await until(lambda: bool(plane.leader.live.view(leading_since=0).agents), "the node")
        async with api(plane) as client:
            yield client


def tell(tmp_path: Path, story: Story, *, memory_bytes: int = 8 * GIB) -> None:
    weights = ggufs.write(tmp_path / "tiny.gguf", "llama")

    async def whole(hub: Hub) -> None:
        yard = Yard(tmp_path, hub, memory_bytes=memory_bytes)
        await yard.join()
        beacons = asyncio.create_task(yard.beacon())
        plane = yard.plane()
        try:
            async with at_work(yard, plane) as client:
                await story(yard, plane, client)
        finally:
            beacons.cancel()

    with Hub() as hub:
        hub.repo(REPO).commit({"tiny-F16.gguf": OnDisk(weights)})
        run(whole(hub), 60)


def test_a_job_on_demand_fetches_checks_and_adds(tmp_path: Path) -> None:
    async def story(yard: Yard, plane: ControlPlane, client: httpx.AsyncClient) -> None:
        job = await yard.serve(plane, name="tiny")
        assert (job.state, job.error) == ("done", "")
        world = plane.leader.world
        (file,) = world.files.values()
        assert file.sha256 == file.published_sha256
        assert world.models["tiny"].source == f"mirror:{file.key}"
        listed = (await client.get("/v1/jobs", params={"min_seq": world.position})).json()["data"]
        assert [one["id"] for one in listed] == [job.id]

    tell(tmp_path, story)


def test_a_mirror_is_read_by_nodes_and_control_planes_alone(tmp_path: Path) -> None:
    async def story(yard: Yard, plane: ControlPlane, client: httpx.AsyncClient) -> None:
        await yard.serve(plane, name="tiny")
        (file,) = plane.leader.world.files.values()
        token = mirror_token(node_secret(SECRET, "n"), "n")
        for path in (f"/mirror/files/{file.key}", f"/mirror/sets/{file.key}"):
            # The API's own token is none of a node.
            assert (await client.get(path)).status_code == 401
        headers = {"Authorization": f"Bearer {token}"}
        got = await client.get(f"/mirror/sets/{file.key}", headers=headers)
        manifest = msgspec.json.decode(got.content, type=Manifest)
        assert [f.sha256 for f in manifest.files] == [file.sha256]
        whole = await client.get(f"/mirror/files/{file.key}", headers=headers)
        assert whole.content == (tmp_path / "tiny.gguf").read_bytes()
        assert (await client.get("/v1/models", headers=headers)).status_code == 401

    tell(tmp_path, story)


def test_a_plan_tells_everything_and_changes_nothing(tmp_path: Path) -> None:
    async def story(yard: Yard, plane: ControlPlane, client: httpx.AsyncClient) -> None:
        body = {"repo": REPO, "quant": "F16", "name": "tiny", "ctx_pool": 512}
        before = yard.hub.counters.bytes_of("tiny-F16.gguf")
        answer = await client.post("/v1/plan", json=body)
        assert answer.status_code == 200, answer.text
        plan = answer.json()["data"]
        assert plan["problems"] == []
        assert (plan["architecture"], plan["model"]) == ("llama", "tiny")
        assert plan["estimate"]["total_bytes"] > plan["file_set"]["bytes"]
        assert [(p["node"], p["rank"]) for p in plan["places"]] == [("n", 2)]
        assert plan["entry"]["source"].startswith("mirror:")
        world = plane.leader.world
        assert not [*world.jobs, *world.files, *world.models]
        assert yard.hub.counters.bytes_of("tiny-F16.gguf") - before < 4 * 1024**2
        await yard.serve(plane, name="tiny")
        again = (await client.post("/v1/plan", json={**body, "name": "other"})).json()["data"]
        assert again["fetched_bytes"] == again["file_set"]["bytes"]
        taken = (await client.post("/v1/plan", json={**body, "quant": "Q8_0"})).json()["data"]
        assert [p["code"] for p in taken["problems"]] == ["no_such_file"]

    tell(tmp_path, story)


def test_a_plan_that_cannot_work_says_why_with_numbers(tmp_path: Path) -> None:
    async def story(yard: Yard, plane: ControlPlane, client: httpx.AsyncClient) -> None:
        answer = await client.post("/v1/plan", json={"repo": REPO, "quant": "F16"})
        plan = answer.json()["data"]
        assert [p["code"] for p in plan["problems"]] == ["no_capacity"]
        assert "needs 1 GiB" in plan["problems"][0]["sentence"].replace(".0", "")
        assert [p["rank"] for p in plan["places"]] == [None]

    tell(tmp_path, story, memory_bytes=GIB // 2)


def test_refusals_of_the_registry_and_of_the_request_are_told_apart(tmp_path: Path) -> None:
    async def story(yard: Yard, plane: ControlPlane, client: httpx.AsyncClient) -> None:
        unknown = await client.get("/v1/registry/acme/nothing")
        assert (unknown.status_code, unknown.json()["error"]["code"]) == (404, "repo_not_found")
        wrong = await client.post("/v1/plan", json={"repo": "no slash"})
        assert (wrong.status_code, wrong.json()["error"]["code"]) == (400, "invalid")
        extra = await client.post("/v1/plan", json={"repo": REPO, "by": "me"})
        assert extra.status_code == 400
        shown = (await client.get(f"/v1/registry/{REPO}", params={"quant": "f16"})).json()["data"]
        assert [(s["name"], s["picked"]) for s in shown["sets"]] == [("tiny-F16", True)]
        assert "picks tiny-F16" in shown["sentence"]

    tell(tmp_path, story)


def test_an_emptied_mirror_is_filled_again_when_a_term_begins(tmp_path: Path) -> None:
    weights = ggufs.write(tmp_path / "tiny.gguf", "llama")

    async def whole(hub: Hub) -> None:
        yard = Yard(tmp_path, hub)
        await yard.join()
        beacons = asyncio.create_task(yard.beacon())
        first = yard.plane()
        async with at_work(yard, first):
            await yard.serve(first, name="tiny")
        shutil.rmtree(tmp_path / "cp-1" / "mirror")
        again = yard.plane()
        async with at_work(yard, again):
            (key,) = again.leader.world.files
            store = tmp_path / "cp-1" / "mirror"
            await until(lambda: (store / "files" / f"{key}.json").exists(), "the file", 30)
            copies = again.leader.world.files
            await until(lambda: copies[key].copies[0].phase == "present", "the event", 30)
        beacons.cancel()

    with Hub() as hub:
        hub.repo(REPO).commit({"tiny-F16.gguf": OnDisk(weights)})
        run(whole(hub), 60)


def test_a_new_leader_copies_from_the_living_mirror_first(tmp_path: Path) -> None:
    weights = ggufs.write(tmp_path / "tiny.gguf", "llama")

    async def whole(hub: Hub) -> None:
        yard = Yard(tmp_path, hub)
        await yard.join()
        beacons = asyncio.create_task(yard.beacon())
        first, second = yard.plane("cp-1"), yard.plane("cp-2")
        async with at_work(yard, first):
            await yard.serve(first, name="tiny")
            served = hub.counters.bytes_of("tiny-F16.gguf")
            async with running(second):
                await until(lambda: second.leader.reader.synced, "the second to be synced")
                mirroring = second.leader._mirroring
                assert mirroring is not None
                await until(lambda: mirroring.others() == ("cp-1",), "the first mirror's beacon")
                await first.leader._say(leaving=True)
                await until(leads(second), "the second to lead", 20)
                (file,) = second.leader.world.files.values()
                files = second.leader.world.files
                await until(
                    lambda: (
                        {c.mirror for c in files[file.key].copies if c.phase == "present"}
                        == {"cp-1", "cp-2"}
                    ),
                    "the second copy",
                    20,
                )
                assert hub.counters.bytes_of("tiny-F16.gguf") == served
        beacons.cancel()

    with Hub() as hub:
        hub.repo(REPO).commit({"tiny-F16.gguf": OnDisk(weights)})
        run(whole(hub), 60)


def test_what_an_entry_needs_is_not_removed_and_gc_takes_the_rest(tmp_path: Path) -> None:
    async def story(yard: Yard, plane: ControlPlane, client: httpx.AsyncClient) -> None:
        await yard.serve(plane, name="tiny")
        world = plane.leader.world
        (key,) = world.files
        kept = await yard.send(plane, MirrorRemove(what=key))
        assert (kept.status, kept.code) == ("rejected", "in_use")
        assert "tiny" in kept.sentence
        nothing = await yard.send(plane, MirrorGc())
        assert nothing.status == "accepted"
        assert len(os.listdir(tmp_path / "cp-1" / "mirror" / "blobs")) == 1

    tell(tmp_path, story)


def test_a_fetch_the_registry_breaks_off_fails_the_job_with_its_reason(tmp_path: Path) -> None:
    async def story(yard: Yard, plane: ControlPlane, client: httpx.AsyncClient) -> None:
        yard.hub.fault(Fault(at="cdn", wrong_at=900_000))
        job = await yard.serve(plane, name="tiny")
        assert job.state == "failed"
        assert job.code == "checksum_mismatch"
        assert job.error.startswith("the mirror could not fetch it: ")
        assert job.steps[-1].detail == job.error
        assert not plane.leader.world.models

    tell(tmp_path, story)


def test_a_file_cut_under_the_running_mirror_is_fetched_again_when_it_is_asked_for(
    tmp_path: Path,
) -> None:
    async def story(yard: Yard, plane: ControlPlane, client: httpx.AsyncClient) -> None:
        await yard.serve(plane, name="tiny")
        (file,) = plane.leader.world.files.values()
        blob = tmp_path / "cp-1" / "mirror" / "blobs" / str(file.sha256)
        blob.chmod(0o600)
        os.truncate(blob, 1000)
        headers = {"Authorization": f"Bearer {mirror_token(node_secret(SECRET, 'n'), 'n')}"}
        path = f"/mirror/sets/{file.key}"
        assert (await client.get(path, headers=headers)).status_code == 404

        async def whole_again() -> bool:
            return (await client.get(path, headers=headers)).status_code == 200

        copies = plane.leader.world.files
        seq = plane.leader.world.head("file", file.key).seq
        await until(lambda: plane.leader.world.head("file", file.key).seq > seq, "it to be noticed")
        await until(lambda: copies[file.key].copies[0].phase == "present", "the file", 30)
        assert await whole_again()

    tell(tmp_path, story)


def test_a_folder_emptied_under_the_running_mirror_stops_no_job(tmp_path: Path) -> None:
    async def story(yard: Yard, plane: ControlPlane, client: httpx.AsyncClient) -> None:
        shutil.rmtree(tmp_path / "cp-1" / "mirror")
        job = await yard.serve(plane, name="tiny")
        assert (job.state, job.error) == ("done", "")

    tell(tmp_path, story)


def test_bodies_no_plan_can_be_made_of_are_refused_at_once(tmp_path: Path) -> None:
    async def story(yard: Yard, plane: ControlPlane, client: httpx.AsyncClient) -> None:
        aliases = [f"alias-{n}" for n in range(100_000)]
        many = await client.post("/v1/plan", json={"repo": REPO, "aliases": aliases})
        assert (many.status_code, many.json()["error"]["code"]) == (400, "invalid")
        headers = {"content-type": "application/json"}
        deep = await client.post("/v1/plan", content="[" * 100_000, headers=headers)
        assert deep.status_code == 400

    tell(tmp_path, story)


def test_an_architecture_nobody_knows_is_refused_though_its_header_has_no_shape(
    tmp_path: Path,
) -> None:
    strange = ggufs.write(
        tmp_path / "strange.gguf", "llama", extra={"general.architecture": "klingon"}
    )

    async def story(yard: Yard, plane: ControlPlane, client: httpx.AsyncClient) -> None:
        yard.hub.repo("acme/strange").commit({"strange-F16.gguf": OnDisk(strange)})
        answer = await client.post("/v1/plan", json={"repo": "acme/strange", "quant": "F16"})
        problems = answer.json()["data"]["problems"]
        assert [p["code"] for p in problems] == ["architecture_unknown"]
        assert "klingon" in problems[0]["sentence"]

    tell(tmp_path, story)
