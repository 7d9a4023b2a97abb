"""The read API of a whole control plane, over the log in memory, with a real server on a free port."""

import asyncio
import contextlib
import json
import re
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

import httpx
import msgspec
import pytest

from controlplane.app import ControlPlane
from controlplane.domain.decision import Ids, Live, Step
from controlplane.domain.reports import Report
from controlplane.domain.world import World
from controlplane.leader import NextDecision
from events.log import Draft, StoredCommand
from events.memory import MemoryLog, MemoryWire
from events.memory_broker import MemoryBroker
from schemas import api as bodies
from schemas.activation import Activation, ActivationWanted
from schemas.card import Card, CardMeasured
from schemas.messages import Event, State
from schemas.node import Node, NodeStarted, NodeState, NodeStateCordoned
from schemas.replica import Replica, ReplicaStarting
from schemas.settings import ControlplaneSettings
from schemas.slots import Slot, Slots, SlotsLoaded
from tests.support.aio import run, until
from tests.support.controlplanes import (
    FAST,
    TOKEN,
    add_command,
    api,
    leads,
    plane,
    running,
    smallest_domain,
)

NOW = datetime.fromisoformat("2026-01-01T00:00:00Z")


class Yard:
    """A control plane, its log, and an operator's log beside it."""

    def __init__(
        self,
        folder: Path,
        *,
        decide: NextDecision = smallest_domain,
        settings: ControlplaneSettings = FAST,
    ) -> None:
        self.broker = MemoryBroker()
        self.log = MemoryLog(self.broker)
        self.admin = MemoryLog(self.broker, source="/ctl/anna")
        self.plane = plane(
            self.log, MemoryWire(self.log.connection), folder, decide=decide, settings=settings
        )

    async def put(self, subject: str, event: Event, state: State) -> int:
        last = await self.admin.last(subject)
        draft = Draft(
            subject=subject,
            event=event,
            state=state,
            expected_seq=last.seq if last else 0,
            rev=1,
            actor="node-n",
            reason="a test",
        )
        # Any epoch from the node's own start on is good.
        return (await self.admin.append(draft, epoch=1000)).seqs[0]

    async def add(self, name: str) -> int:
        """Returns the sequence of the outcome."""
        command = add_command(name)
        await self.admin.send("anna", command)
        await until(lambda: command.id in self.plane.leader.world.outcomes, "an outcome")
        return self.plane.leader.world.head("command", command.id).seq


Story = Callable[[Yard, httpx.AsyncClient], Awaitable[None]]


@contextlib.asynccontextmanager
async def at_work(yard: Yard) -> AsyncIterator[httpx.AsyncClient]:
    async with running(yard.plane):
        await until(leads(yard.plane), "a leader")
        await until(lambda: yard.plane.model.synced, "a synced projection")
        async with api(yard.plane) as client:
            yield client


def tell(folder: Path, story: Story, **given: Any) -> None:
    async def whole() -> None:
        yard = Yard(folder, **given)
        async with at_work(yard) as client:
            await story(yard, client)

    run(whole())


def test_a_command_becomes_a_state_that_the_api_shows_with_its_cause(tmp_path: Path) -> None:
    async def story(yard: Yard, client: httpx.AsyncClient) -> None:
        command = add_command("qwen/2.5:7b")
        await yard.admin.send("anna", command)
        world = yard.plane.leader.world
        await until(lambda: command.id in world.outcomes, "an outcome")
        seq = world.head("command", command.id).seq
        answer = await client.get("/v1/models/qwen%2F2.5:7b", params={"min_seq": seq, "wait": "5s"})
        assert answer.status_code == 200, answer.text
        body = msgspec.json.decode(answer.content, type=bodies.ModelOne)
        assert body.applied_seq >= seq
        assert body.data.name == "qwen/2.5:7b"
        assert (body.data.event.actor, body.data.event.causationid) == ("anna", command.id)
        outcome = (await client.get(f"/v1/commands/{command.id}")).json()["data"]
        assert outcome["status"] == "accepted"

    tell(tmp_path, story)


def test_every_resource_lists_and_shows_in_the_documented_form(tmp_path: Path) -> None:
    async def story(yard: Yard, client: httpx.AsyncClient) -> None:
        node = Node(id="n", running=True, started_at=NOW)
        await yard.put("yard.evt.node.n", NodeStarted(), node)
        standing = NodeState(node="n", since=NOW, admin="cordoned")
        await yard.put("yard.evt.nodestate.n", NodeStateCordoned(by="anna"), standing)
        card = Card(node="n", id="gpu0", kind="gpu", memory_bytes=8, rev=1)
        await yard.put("yard.evt.card.n.gpu0", CardMeasured(used_bytes=0), card)
        replica = Replica(
            id="r-1", node="n", model="m", incarnation="i", profile="p", revision="v",
            engine="command", phase="starting", since=NOW, epoch=1,
        )  # fmt: skip
        await yard.put("yard.evt.replica.n.r-1", ReplicaStarting(port=1), replica)
        slots = Slots(
            node="n", replica="r-1", model="m", epoch=1, limit=4, since=NOW,
            loaded=(Slot(adapter="sql", version="0123abcd4567", since=NOW),),
        )  # fmt: skip
        loaded = SlotsLoaded(adapter="sql", version="0123abcd4567")
        await yard.put("yard.evt.slots.n.r-1", loaded, slots)
        activation = Activation(
            model="m", incarnation="i", phase="wanted", wanted_at=NOW, since=NOW
        )
        await yard.put("yard.evt.activation.m.any", ActivationWanted(by="g"), activation)
        seq = await yard.add("m")
        for path, key, many, one in (
            ("models", "m", bodies.ModelList, bodies.ModelOne),
            ("nodes", "n", bodies.NodeList, bodies.NodeOne),
            ("cards", "n/gpu0", bodies.CardList, bodies.CardOne),
            ("replicas", "r-1", bodies.ReplicaList, bodies.ReplicaOne),
            ("slots", "n/r-1", bodies.SlotsList, bodies.SlotsOne),
            ("activations", "m/any", bodies.ActivationList, bodies.ActivationOne),
            ("activations", "m", bodies.ActivationList, bodies.ActivationOne),
        ):
            listed = await client.get(f"/v1/{path}", params={"min_seq": seq})
            shown = await client.get(f"/v1/{path}/{key}")
            assert shown.status_code == 200, shown.text
            whole = msgspec.json.decode(listed.content, type=many)
            single = msgspec.json.decode(shown.content, type=one)
            assert whole.data[0] == single.data
            assert whole.applied_seq >= seq
        commands = msgspec.json.decode(
            (await client.get("/v1/commands")).content, type=bodies.OutcomeList
        )
        assert len(commands.data) == 1
        nodes = msgspec.json.decode((await client.get("/v1/nodes")).content, type=bodies.NodeList)
        assert nodes.data[0].standing == standing
        assert nodes.data[0].event.reason == "a test"

    tell(tmp_path, story)


def test_what_a_newer_version_wrote_is_listed_beside_the_others_and_said_to_be_there(
    tmp_path: Path,
) -> None:
    async def story(yard: Yard, client: httpx.AsyncClient) -> None:
        await yard.add("known")
        plain = await yard.admin.last("yard.evt.model.known")
        assert plain is not None
        newer = json.loads(yard.broker.events.messages[plain.seq].payload)
        newer |= {
            "id": "e-newer",
            "subject": "yard.evt.model.new",
            "dataschema": "urn:modelyard:model:9",
        }
        seq = yard.broker.put("yard.evt.model.new", json.dumps(newer).encode())
        listed = await client.get("/v1/models", params={"min_seq": seq, "wait": "5s"})
        whole = msgspec.json.decode(listed.content, type=bodies.ModelList)
        assert [model.name for model in whole.data] == ["known"]
        assert [(one.name, one.event.problem) for one in whole.unread] == [
            ("new", "version 9 of model")
        ]
        shown = await client.get("/v1/models/new")
        assert (shown.status_code, shown.json()["error"]["code"]) == (409, "upgrade_required")
        assert "version 9 of model" in shown.json()["error"]["sentence"]

    tell(tmp_path, story)


def test_min_seq_waits_for_it_and_says_clearly_when_the_wait_ends(tmp_path: Path) -> None:
    async def story(yard: Yard, client: httpx.AsyncClient) -> None:
        seq = await yard.add("a")
        waiting = asyncio.create_task(
            client.get("/v1/models/b", params={"min_seq": seq + 2, "wait": "10s"})
        )
        await until(lambda: bool(yard.plane.model._waiters), "the request waiting")
        await yard.add("b")
        assert (await waiting).status_code == 200
        late = await client.get("/v1/models", params={"min_seq": seq + 1000, "wait": "20ms"})
        assert late.status_code == 504
        error = late.json()
        assert error["error"]["code"] == "not_applied_yet"
        assert str(seq + 1000) in error["error"]["sentence"]
        assert error["applied_seq"] >= seq
        assert yard.plane.model._waiters == []

    tell(tmp_path, story)


@pytest.mark.parametrize(
    ("path", "status", "code", "named"),
    [
        ("/v1/models/nobody", 404, "not_found", "nobody"),
        ("/v1/nothing", 404, "not_found", ""),
        ("/v1/models?min_seq=x", 400, "bad_request", "min_seq"),
        ("/v1/models?min_seq=1&wait=soon", 400, "bad_request", "soon"),
        ("/v1/events?subject=yard.cmd.>", 400, "bad_request", "yard.cmd.>"),
        ("/v1/events?since=yesterday", 400, "bad_request", "yesterday"),
        ("/v1/events?from_seq=-1", 400, "bad_request", "from_seq"),
    ],
)
def test_a_refusal_is_a_code_and_a_sentence(
    tmp_path: Path, path: str, status: int, code: str, named: str
) -> None:
    async def story(_: Yard, client: httpx.AsyncClient) -> None:
        answer = await client.get(path)
        assert (answer.status_code, answer.json()["error"]["code"]) == (status, code)
        assert named in answer.json()["error"]["sentence"]
        assert set(answer.json()["error"]) == {"code", "sentence"}

    tell(tmp_path, story)


def test_it_changes_nothing(tmp_path: Path) -> None:
    async def story(_: Yard, client: httpx.AsyncClient) -> None:
        for method in ("POST", "PUT", "PATCH", "DELETE"):
            answer = await client.request(method, "/v1/models", json={})
            assert answer.status_code == 405
            assert answer.json()["error"]["code"] == "method_not_allowed"

    tell(tmp_path, story)


@pytest.mark.parametrize(
    ("headers", "status", "code"),
    [
        ({"Authorization": "Bearer wrong"}, 401, "unauthorized"),
        ({"Authorization": TOKEN}, 401, "unauthorized"),
        ({"Authorization": ""}, 401, "unauthorized"),
        ({"Host": "evil.example"}, 403, "host_not_allowed"),
        ({"Host": "127.0.0.1.evil.example:80"}, 403, "host_not_allowed"),
        ({"Host": "evil.example@localhost"}, 403, "host_not_allowed"),
        ({"Host": "localhost:9"}, 200, ""),
        ({"Host": "[::1]:9"}, 200, ""),
        ({"Host": "yard.lan"}, 200, ""),
        ({"Origin": "http://evil.example"}, 403, "origin_not_allowed"),
        ({"Origin": "null"}, 403, "origin_not_allowed"),
        ({"Origin": "http://localhost:3000"}, 200, ""),
        ({"Content-Type": "text/plain", "Content-Length": "2"}, 415, "unsupported_media_type"),
    ],
)
def test_the_guard_names_what_it_refuses(
    tmp_path: Path, headers: dict[str, str], status: int, code: str
) -> None:
    settings = msgspec.structs.replace(FAST, allowed_hosts=("yard.lan",))

    async def story(_: Yard, client: httpx.AsyncClient) -> None:
        content = b"{}" if "Content-Length" in headers else None
        answer = await client.request("GET", "/v1/models", headers=headers, content=content)
        assert answer.status_code == status, answer.text
        if code:
            assert answer.json()["error"]["code"] == code
            assert TOKEN not in answer.text

    tell(tmp_path, story, settings=settings)


@pytest.mark.parametrize("token", [TOKEN, "wrong"])
def test_a_refusal_of_a_request_with_a_body_reaches_its_client(tmp_path: Path, token: str) -> None:
    """Closed with bytes unread, a connection is reset, and the answer on its way may be lost with it."""

    async def story(yard: Yard, _: httpx.AsyncClient) -> None:
        reader, writer = await asyncio.open_connection("127.0.0.1", yard.plane.port)
        try:
            for _ in range(2):
                writer.write(
                    b"POST /v1/place HTTP/1.1\r\nHost: localhost\r\nContent-Type: text/plain\r\n"
                    b"Authorization: Bearer %b\r\nContent-Length: 9\r\n\r\n" % token.encode()
                )
                await writer.drain()
                writer.write(b"{" + b" " * 7 + b"}")
                head = await reader.readuntil(b"\r\n\r\n")
                assert head.startswith((b"HTTP/1.1 415", b"HTTP/1.1 401")), head
                length = int(re.findall(rb"content-length: (\d+)", head)[0])
                assert b"error" in await reader.readexactly(length)
        finally:
            writer.close()

    tell(tmp_path, story)


def test_health_readiness_and_metrics_need_no_token_here_and_everything_else_does(
    tmp_path: Path,
) -> None:
    async def story(yard: Yard, _: httpx.AsyncClient) -> None:
        async with api(yard.plane, token=None) as client:
            for path in ("/healthz", "/readyz", "/metrics"):
                assert (await client.get(path)).status_code == 200
            for path in ("/v1/models", "/v1/events", "/v1/doctor", "/schema", "/nothing"):
                assert (await client.get(path)).status_code == 401

    tell(tmp_path, story)


def test_inv_10_looking_appends_nothing(tmp_path: Path) -> None:
    async def story(yard: Yard, client: httpx.AsyncClient) -> None:
        await yard.add("m")
        before = yard.broker.events.last_seq, yard.broker.commands.last_seq
        for path in ("/healthz", "/readyz", "/metrics", "/v1/models", "/v1/models/m", "/v1/doctor"):
            for _ in range(3):
                assert (await client.get(path)).status_code == 200
        assert (yard.broker.events.last_seq, yard.broker.commands.last_seq) == before

    tell(tmp_path, story)


def test_the_schema_names_every_route_and_the_shape_of_its_answer(tmp_path: Path) -> None:
    async def story(_: Yard, client: httpx.AsyncClient) -> None:
        for path in ("/schema", "/schema/openapi.json"):
            schema = (await client.get(path)).json()
            paths = schema["paths"]
            assert {"/v1/models", "/v1/models/{key}", "/v1/events", "/readyz"} <= set(paths)
            shown = paths["/v1/models"]["get"]["responses"]["200"]["content"]["application/json"]
            assert "ModelList" in json.dumps(shown)
            assert "wait" in [p["name"] for p in paths["/v1/models"]["get"]["parameters"]]

    tell(tmp_path, story)


def test_metrics_count_decisions_and_show_positions(tmp_path: Path) -> None:
    async def story(yard: Yard, client: httpx.AsyncClient) -> None:
        await yard.add("m")
        text = (await client.get("/metrics")).text
        assert "yard_leading 1.0" in text
        assert "yard_decisions_total 1.0" in text
        assert "yard_models 1.0" in text
        assert 'yard_position{projection="sqlite"}' in text
        assert "yard_ready 1.0" in text

    tell(tmp_path, story)


def test_readiness_names_a_demand_without_an_activation(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("controlplane.readiness.STUCK_AFTER_S", 0.0)

    def stuck(
        world: World,
        live: Live,
        commands: Sequence[StoredCommand],
        now: datetime,
        ids: Ids,
        settings: ControlplaneSettings,
        *,
        reports: Sequence[Report] = (),
    ) -> Step:
        return Step(stuck=("activation qwen/any",))

    async def story(_: Yard, client: httpx.AsyncClient) -> None:
        answer = await client.get("/readyz")
        assert answer.status_code == 503
        (finding,) = answer.json()["findings"]
        assert finding["code"] == "demand_stuck"
        assert "activation qwen/any" in finding["sentence"]

    tell(tmp_path, story, decide=stuck)


def test_readiness_names_a_stopped_projection_and_reads_go_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def story(yard: Yard, client: httpx.AsyncClient) -> None:
        await yard.add("m")
        await yard.plane.model.reached(yard.broker.events.last_seq, 5)

        def bug(*_: object) -> None:
            raise ZeroDivisionError("bug")

        monkeypatch.setattr("controlplane.projections.readmodel.fold", bug)
        await yard.add("n")
        await until(lambda: yard.plane.model.stopped is not None, "the stop")
        answer = await client.get("/readyz")
        assert answer.status_code == 503
        assert "the projection sqlite stopped" in answer.json()["findings"][0]["sentence"]
        assert (await client.get("/v1/models/m")).status_code == 200
        assert yard.plane.leader.term is not None
        await yard.add("o")  # the leader, on its own projection, goes on

    tell(tmp_path, story)


def test_log_23_without_nats_it_starts_serves_what_it_has_and_connects_later(
    tmp_path: Path,
) -> None:
    async def story() -> None:
        yard = Yard(tmp_path)
        async with at_work(yard):
            await yard.plane.model.reached(await yard.add("m"), 5)
        yard.log.connection.disconnect()
        again = plane(yard.log, MemoryWire(yard.log.connection), tmp_path)
        async with running(again), api(again) as client:
            answer = await client.get("/v1/models/m")
            assert answer.status_code == 200
            ready = await client.get("/readyz")
            assert ready.status_code == 503
            assert "nats_unavailable" in [f["code"] for f in ready.json()["findings"]]
            events = await client.get("/v1/events")
            assert (events.status_code, events.json()["error"]["code"]) == (503, "nats_unavailable")
            doctor = (await client.get("/v1/doctor")).json()
            assert doctor["connected"] is False
            yard.log.connection.reconnect()
            await until(leads(again), "a leader")

            async def is_ready() -> bool:
                return (await client.get("/readyz")).status_code == 200

            await until(is_ready, "readiness")

    run(story(), 40)


def test_doctor_shows_who_leads_how_far_it_is_and_what_cannot_be_read(tmp_path: Path) -> None:
    async def story(yard: Yard, client: httpx.AsyncClient) -> None:
        await yard.add("m")
        seq = yard.broker.put("yard.evt.model.m", b"junk")
        await until(lambda: yard.plane.leader.reader.position >= seq, "the junk read")
        answer = await client.get("/v1/doctor")
        body = msgspec.json.decode(answer.content, type=bodies.DoctorBody)
        assert body.leading
        assert body.leader is not None
        assert (body.leader.instance, body.leader.term) == ("cp-1", yard.plane.leader.term)
        assert body.log_seq == seq
        assert body.commands_position == 1
        assert {p.name for p in body.projections} == {"world", "sqlite"}
        (unreadable,) = body.unreadable
        assert (unreadable.subject, unreadable.seq) == ("yard.evt.model.m", seq)
        assert body.broken_events == 1

    tell(tmp_path, story)


def test_a_dead_task_ends_the_process_with_its_error(tmp_path: Path) -> None:
    async def story() -> None:
        yard = Yard(tmp_path)

        async def dies() -> None:
            raise RuntimeError("the projection died")

        yard.plane.model.run = dies
        with pytest.raises(ExceptionGroup) as caught:
            await yard.plane.run(asyncio.Event())
        assert caught.group_contains(RuntimeError, match="the projection died")

    run(story())


def test_the_port_is_named_when_it_cannot_be_had(tmp_path: Path) -> None:
    async def story() -> None:
        yard = Yard(tmp_path)
        async with at_work(yard):
            taken = f"127.0.0.1:{yard.plane.port}"
            second: ControlPlane = Yard(
                tmp_path / "2", settings=msgspec.structs.replace(FAST, listen=taken)
            ).plane
            with pytest.raises(Exception, match=taken):
                await second.run(asyncio.Event())

    run(story())
