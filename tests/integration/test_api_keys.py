"""A whole control plane that is told of API keys: its read API shows them, by id and by name, and never a hash."""

import contextlib
import hashlib
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import httpx
import msgspec

from controlplane.app import ControlPlane, new_decider
from controlplane.candidate import Me
from controlplane.ctl import keyacts
from controlplane.ctl.newkey import make_key
from controlplane.identifiers import new_ids
from events.ids import new_id
from events.lines import line_of
from events.log import Recorded
from events.memory import MemoryLog, MemoryWire
from events.memory_broker import MemoryBroker
from events.subjects import event_subject
from schemas import api as bodies
from schemas.commands import Command, CommandBody, KeyChange, KeyCreate, KeyRevoke, Outcome
from tests.support.aio import run, until
from tests.support.controlplanes import FAST, TOKEN, api, leads, running

ID, OTHER = "aaaabbbbcccc", "ddddeeeeffff"
HASH = hashlib.sha256(b"secret").hexdigest()


class Yard:
    """One control plane over a log in memory, that leads."""

    def __init__(self, folder: Path) -> None:
        broker = MemoryBroker()
        self.admin = MemoryLog(broker, source="/ctl/anna")
        log = MemoryLog(broker, source="/cp/cp-1")
        self.plane = ControlPlane(
            events=log,
            wire=MemoryWire(log.connection),
            me=Me(instance="cp-1", host="host-of-cp-1", pid=1),
            settings=FAST,
            folder=folder / "cp-1",
            token=TOKEN,
            make_decider=new_decider,
            ids=new_ids(),
        )

    async def send(self, body: CommandBody) -> Outcome:
        command = Command(id=new_id(), body=body)
        await self.admin.send("anna", command)
        world = self.plane.leader.world
        await until(lambda: command.id in world.outcomes, "an outcome")
        return world.outcomes[command.id]


Story = Callable[[Yard, httpx.AsyncClient], Awaitable[None]]


@contextlib.asynccontextmanager
async def at_work(folder: Path) -> AsyncIterator[tuple[Yard, httpx.AsyncClient]]:
    yard = Yard(folder)
    async with running(yard.plane):
        await until(leads(yard.plane), "a leader")
        async with api(yard.plane) as client:
            yield yard, client


def tell(folder: Path, story: Story) -> None:
    async def whole() -> None:
        async with at_work(folder) as (yard, client):
            await story(yard, client)

    run(whole(), 60)


async def shown(yard: Yard, client: httpx.AsyncClient, key: str) -> dict[str, Any]:
    """What the API says of a key, once it has read all there is."""
    query = {"min_seq": yard.plane.leader.world.position, "wait": "10s"}
    answer = await client.get(f"/v1/keys/{key}", params=query)
    assert answer.status_code == 200, answer.text
    assert "hash" not in answer.json()["data"]
    assert HASH not in answer.text
    return answer.json()["data"]


def test_a_key_is_shown_by_id_and_by_name_without_its_hash(tmp_path: Path) -> None:
    async def story(yard: Yard, client: httpx.AsyncClient) -> None:
        body = KeyCreate(
            id=ID, name="a/b c", hash=HASH, models=["llama*"], rpm=60, expires_s=3600.0
        )
        assert (await yard.send(body)).status == "accepted"
        assert yard.plane.leader.world.keys[ID].hash == HASH
        by_id = await shown(yard, client, ID)
        assert by_id == await shown(yard, client, "a%2Fb%20c")
        view = msgspec.convert(by_id, bodies.KeyView)
        assert (view.id, view.name, view.models, view.rpm) == (ID, "a/b c", ("llama*",), 60)
        assert view.event.actor == "anna"
        assert view.by == "anna"
        assert view.expires_at is not None
        listed = await client.get("/v1/keys")
        whole = msgspec.json.decode(listed.content, type=bodies.KeyList)
        assert whole.data == (view,)
        assert HASH not in listed.text

    tell(tmp_path, story)


def test_a_name_means_the_key_that_is_not_over(tmp_path: Path) -> None:
    async def story(yard: Yard, client: httpx.AsyncClient) -> None:
        await yard.send(KeyCreate(id=ID, name="ci", hash=HASH))
        await yard.send(KeyRevoke(key="ci"))
        assert (await shown(yard, client, "ci"))["revoked_at"] is not None
        await yard.send(KeyCreate(id=OTHER, name="ci", hash=HASH))
        assert (await shown(yard, client, "ci"))["id"] == OTHER
        assert (await shown(yard, client, ID))["revoked_at"] is not None
        await yard.send(KeyChange(key="ci", rpm=7))
        assert (await shown(yard, client, OTHER))["rpm"] == 7
        assert (await shown(yard, client, ID))["rpm"] == 0
        assert [row["id"] for row in (await client.get("/v1/keys")).json()["data"]] == [ID, OTHER]

    tell(tmp_path, story)


def test_a_key_nobody_knows_is_not_found(tmp_path: Path) -> None:
    async def story(yard: Yard, client: httpx.AsyncClient) -> None:
        await until(lambda: yard.plane.model.synced, "a synced projection")
        answer = await client.get("/v1/keys/none")
        assert answer.status_code == 404
        assert "'none'" in answer.json()["error"]["sentence"]
        assert (await client.get("/v1/keys")).json()["data"] == []

    tell(tmp_path, story)


def test_nobody_reads_keys_without_the_token(tmp_path: Path) -> None:
    async def story(yard: Yard, _: httpx.AsyncClient) -> None:
        async with api(yard.plane, token=None) as stranger:
            assert (await stranger.get("/v1/keys")).status_code == 401

    tell(tmp_path, story)


def test_what_yardctl_prints_is_a_key_the_log_knows_by_hash_alone(
    tmp_path: Path, capsys: Any
) -> None:
    """The secret is in no event, no command, no file of the control plane."""

    async def story(yard: Yard, client: httpx.AsyncClient) -> None:
        key = make_key()
        secret = key.text().split("_", 2)[2]
        body = KeyCreate(id="", name="ci", hash="")
        await keyacts.create_on(yard.admin, body, key, 10.0, "table")
        assert capsys.readouterr().out == key.text() + "\n"
        known = yard.plane.leader.world.keys[key.id]
        assert known.hash == hashlib.sha256(secret.encode()).hexdigest()
        assert (await shown(yard, client, "ci"))["id"] == key.id
        told = await client.get("/v1/events", params={"follow": "false", "state": "true"})
        assert key.id in told.text
        assert secret not in told.text
        for file in (tmp_path / "cp-1").rglob("*"):
            assert not file.is_file() or secret.encode() not in file.read_bytes()

    tell(tmp_path, story)


def test_the_events_of_a_decision_carry_the_trace_of_the_command_behind_it(tmp_path: Path) -> None:
    trace = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01"

    async def story(yard: Yard, client: httpx.AsyncClient) -> None:
        traced = Command(id=new_id(), body=KeyCreate(id=ID, name="ci", hash=HASH))
        await yard.admin.send("anna", traced, traceparent=trace)
        world = yard.plane.leader.world
        await until(lambda: traced.id in world.outcomes, "an outcome")
        await yard.send(KeyCreate(id=OTHER, name="other", hash=HASH))
        for id_, said, told in (
            (ID, traced.id, trace),
            (OTHER, "", None),
        ):
            subjects = [event_subject("key", id_)]
            if said:
                subjects.append(event_subject("command", said))
            for subject in subjects:
                last = await yard.admin.last(subject)
                assert isinstance(last, Recorded)
                assert last.traceparent == told
                assert line_of(last).traceparent == told

    tell(tmp_path, story)
