"""Roles on a real server: each user may do its work and is refused what the table of writers denies it."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import nats
import pytest
from nats.aio.client import Client

from events import server
from events.roles import inbox_prefix, roles
from events.secrets import nats_password_path, read_secret
from tests.support.aio import run
from tests.support.ports import free_port

NODE = "n1"


@asynccontextmanager
async def yard_server(data: Path) -> AsyncIterator[str]:
    port = free_port()
    argv = server.command_line(
        server.prepare(data, [NODE, "n2"]),
        data / "nats" / "store",
        host="127.0.0.1",
        port=port,
        monitoring_port=free_port(),
    )
    process = await asyncio.create_subprocess_exec(*argv, stderr=asyncio.subprocess.DEVNULL)
    try:
        assert await server.answers("127.0.0.1", port, 10.0), "nats-server did not answer"
        yield f"nats://127.0.0.1:{port}"
    finally:
        process.kill()
        await process.wait()


class Refusals:
    """Collects what the server refused a client."""

    def __init__(self) -> None:
        self.seen: list[str] = []

    async def note(self, error: Exception) -> None:
        self.seen.append(str(error).lower())


@asynccontextmanager
async def user(url: str, data: Path, name: str, refusals: Refusals) -> AsyncIterator[Client]:
    client = await nats.connect(
        url,
        user=name,
        password=read_secret(nats_password_path(data, name)),
        inbox_prefix=inbox_prefix(name).encode(),
        error_cb=refusals.note,
        allow_reconnect=False,
    )
    try:
        yield client
    finally:
        await client.close()


async def denied(client: Client, refusals: Refusals, subject: str) -> bool:
    """Publishes and tells whether the server refused; a ping behind it makes the answer certain."""
    refusals.seen.clear()
    await client.publish(subject, b"{}")
    await client.flush()
    await client.flush()
    return any("permissions violation for publish" in s for s in refusals.seen)


async def deaf(client: Client, refusals: Refusals, subject: str) -> bool:
    refusals.seen.clear()
    subscription = await client.subscribe(subject)
    await client.flush()
    await client.flush()
    refused = any("permissions violation for subscription" in s for s in refusals.seen)
    if not refused:
        await subscription.unsubscribe()
    return refused


# user -> subjects it may publish, subjects it may not
PUBLISH = {
    "control": (
        [
            "yard.evt.model.m",
            "yard.evt.plan.n1",
            "yard.evt.key.k",
            "yard.evt.leader.log",
            "$JS.API.CONSUMER.CREATE.YARD_USAGE.c.yard.use.>",
        ],
        [
            # Only gateways say what was used.
            "yard.use.gateway.g1",
            "yard.evt.replica.n1.r",
            "yard.evt.card.n1.cpu",
            "yard.cmd.admin.model.add",
            "yard.rpc.cards.n1",
            "yard.rpc.replica_logs.n1",
        ],
    ),
    "gateway": (
        [
            "yard.cmd.gateway.model.activate",
            "yard.beacon.gateway.g1",
            "yard.beacon.limits.g1",
            "yard.use.gateway.g1",
        ],
        [
            "$JS.API.CONSUMER.CREATE.YARD_USAGE.c.yard.use.>",
            "$JS.API.STREAM.PURGE.YARD_USAGE",
            "yard.evt.model.m",
            "yard.evt.activation.m.any",
            "yard.evt.key.k",
            "yard.cmd.gateway.key.create",
            "yard.cmd.admin.key.create",
            "yard.cmd.gateway.model.add",
            "yard.cmd.admin.model.activate",
            "yard.rpc.cards.n1",
            "yard.rpc.replica_logs.n1",
            "$JS.API.STREAM.DELETE.YARD_EVENTS",
            "$JS.API.STREAM.PURGE.YARD_EVENTS",
        ],
    ),
    "agent-n1": (
        [
            "yard.evt.node.n1",
            "yard.evt.card.n1.cpu",
            "yard.evt.replica.n1.r-1",
            "yard.evt.slots.n1.r-1",
            "$JS.API.STREAM.INFO.YARD_AUDIT",
            # The catalog: it has the adapters of the models it may run before somebody asks.
            "$JS.API.CONSUMER.CREATE.YARD_EVENTS.c.yard.evt.model.>",
            "$JS.API.CONSUMER.CREATE.YARD_EVENTS.c.yard.evt.adapter.>",
        ],
        [
            "$JS.API.STREAM.MSG.GET.YARD_AUDIT",
            "yard.evt.node.n2",
            "yard.evt.card.n2.cpu",
            "yard.evt.replica.n2.r-1",
            "yard.evt.plan.n1",
            "yard.evt.slots.n2.r-1",
            "yard.evt.model.m",
            "yard.evt.adapter.a",
            "yard.evt.key.k",
            # Who could tell gateways what keys used could shut every holder of a key out.
            "yard.beacon.limits.g1",
            "yard.use.gateway.g1",
            "yard.cmd.agent-n1.key.create",
            "yard.cmd.agent-n1.model.add",
            "$JS.API.CONSUMER.CREATE.YARD_EVENTS.c.yard.evt.key.>",
            "$JS.API.CONSUMER.CREATE.YARD_EVENTS.c.yard.evt.job.>",
            "$JS.API.CONSUMER.CREATE.YARD_EVENTS.c",
        ],
    ),
    "admin": (
        [
            "yard.cmd.admin.model.add",
            "yard.cmd.admin.key.create",
            "yard.rpc.replica_logs.n1",
            "yard.rpc.cards.n1",
            "$JS.API.CONSUMER.CREATE.YARD_USAGE.c.yard.use.>",
        ],
        [
            "yard.use.gateway.g1",
            "yard.cmd.gateway.model.activate",
            "yard.evt.model.m",
            "yard.evt.key.k",
            "$JS.API.STREAM.DELETE.YARD_EVENTS",
        ],
    ),
    "viewer": (
        ["$JS.API.STREAM.INFO.YARD_EVENTS"],
        [
            "yard.cmd.admin.model.add",
            "yard.cmd.viewer.model.add",
            "yard.cmd.viewer.key.create",
            "yard.beacon.limits.g1",
            "yard.use.gateway.g1",
            "$JS.API.CONSUMER.CREATE.YARD_USAGE.c.yard.use.>",
            "yard.evt.model.m",
            "yard.evt.key.k",
            "yard.rpc.x.n1",
        ],
    ),
}

SUBSCRIBE = {
    "control": (["yard.beacon.>"], ["yard.evt.>", "_INBOX.>", "_INBOX_admin.>"]),
    "gateway": (
        ["yard.beacon.agent.*", "yard.beacon.limits.*"],
        ["yard.evt.>", "yard.cmd.>", "_INBOX_admin.>"],
    ),
    "agent-n1": (["yard.beacon.gateway.*", "yard.rpc.*.n1"], ["yard.evt.>", "yard.rpc.*.n2"]),
    "admin": (["yard.live.>"], ["yard.evt.>", "yard.evt.model.m", "_INBOX_control.>"]),
    "viewer": (["yard.live.>"], ["yard.evt.>", "yard.cmd.>", ">"]),
}


@pytest.mark.parametrize("name", sorted(PUBLISH))
def test_inv_2_a_role_may_say_only_what_it_writes(tmp_path: Path, name: str) -> None:
    assert {r.user for r in roles([NODE])} == set(PUBLISH), "a role without a row here"

    async def story() -> None:
        async with yard_server(tmp_path) as url:
            refusals = Refusals()
            async with user(url, tmp_path, name, refusals) as client:
                may, may_not = PUBLISH[name]
                assert [s for s in may if await denied(client, refusals, s)] == []
                assert [s for s in may_not if not await denied(client, refusals, s)] == []
                may, may_not = SUBSCRIBE[name]
                assert [s for s in may if await deaf(client, refusals, s)] == []
                assert [s for s in may_not if not await deaf(client, refusals, s)] == []

    run(story())


def test_there_is_no_anonymous_user(tmp_path: Path) -> None:
    async def story() -> None:
        async with yard_server(tmp_path) as url:
            host, port = url.removeprefix("nats://").split(":")
            reader, writer = await asyncio.open_connection(host, int(port))
            await reader.readline()  # INFO
            writer.write(b'CONNECT {"verbose":false}\r\nPING\r\n')
            assert b"Authorization Violation" in await reader.readline()
            writer.close()
            await writer.wait_closed()

    run(story())
