"""Asks about cards from other machines, on a real server: one answer each, and only `admin` may ask."""

import asyncio
import contextlib
from collections.abc import AsyncIterator
from pathlib import Path

import nats
import pytest

from events import server
from events.connection import Connection, connect
from events.jetstream import JetStreamWire
from events.log import Unavailable
from events.roles import agent_user, inbox_prefix
from events.secrets import nats_password_path, read_secret
from nodeagent.cards_rpc import WHAT, CardsRpc
from schemas.cardasks import (
    CardAnswer,
    CardAsk,
    CardRequest,
    ClaimEnd,
    ClaimStart,
    LeaseAcquire,
    LeaseRelease,
    VmAttach,
    VmDetach,
)
from schemas.settings import NatsSettings
from tests.support.aio import run
from tests.support.card_desk import FakeDesk, waits
from tests.support.ports import free_port

NODE = "n1"
LEASE = LeaseAcquire(id="l-abcdefgh23", name="render", cards=("gpu0",))
CLAIM = ClaimStart(id="c-abcdefgh23", name="game", card="gpu0")


@contextlib.asynccontextmanager
async def yard(data: Path) -> AsyncIterator[str]:
    port = free_port()
    argv = server.command_line(
        server.prepare(data, [NODE]),
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


@contextlib.asynccontextmanager
async def connected(url: str, data: Path, user: str) -> AsyncIterator[Connection]:
    connection = await connect(
        NatsSettings(url=url),
        name=user,
        user=user,
        password=read_secret(nats_password_path(data, user)),
        inbox_prefix=inbox_prefix(user),
    )
    try:
        assert await connection.wait_connected(5)
        yield connection
    finally:
        await connection.close()


@contextlib.asynccontextmanager
async def served(data: Path, desk: FakeDesk) -> AsyncIterator[tuple[str, JetStreamWire]]:
    """The server's URL and the wire of an admin, with the node's agent answering."""
    async with (
        yard(data) as url,
        connected(url, data, agent_user(NODE)) as agent,
        connected(url, data, "admin") as admin,
    ):
        wire = JetStreamWire(agent)
        serving = await wire.serve(WHAT, NODE, CardRequest, CardsRpc(desk, NODE).answer)
        # The server answers in order: whoever has heard from it is subscribed.
        await agent.probe(5)
        try:
            yield url, JetStreamWire(admin)
        finally:
            await serving.close()


async def ask(wire: JetStreamWire, body: CardAsk) -> CardAnswer:
    return await wire.request(WHAT, NODE, CardRequest(ask=body), CardAnswer, timeout_s=5)


def test_every_ask_goes_over_the_wire_and_comes_back_answered(tmp_path: Path) -> None:
    asks: tuple[CardAsk, ...] = (
        LEASE,
        LeaseRelease(what="render"),
        CLAIM,
        ClaimEnd(what="game"),
        VmAttach(name="win", card="gpu0", wait_s=5),
        VmDetach(card="gpu0"),
    )

    async def story() -> None:
        desk = FakeDesk()
        async with served(tmp_path, desk) as (_, wire):
            for body in asks:
                assert (await ask(wire, body)).status == "granted"
            assert tuple(a.ask for a in desk.asked) == asks
            assert {a.by for a in desk.asked} == {"admin"}
            assert desk.durables == len(asks)
            desk.decide = waits
            told = await ask(wire, LEASE)
            assert (told.status, told.waiting_for) == ("waiting", ("r-holder",))

    run(story())


@pytest.mark.parametrize(
    ("body", "code"),
    [
        (LeaseAcquire(id="l-abcdefgh23", name="x", cards=("gpu0",), process=1), "not_here"),
        (ClaimStart(id="c-abcdefgh23", name="x", card="gpu0", process=1), "not_here"),
        (LeaseAcquire(id="l-abcdefgh23", name="a\tb", cards=("gpu0",)), "invalid"),
        (LeaseAcquire(id="c-abcdefgh23", name="x", cards=("gpu0",)), "invalid"),
        (LeaseRelease(what=""), "invalid"),
    ],
)
def test_what_cannot_be_asked_from_afar_is_refused_with_a_sentence(
    body: CardAsk, code: str
) -> None:
    async def story() -> None:
        desk = FakeDesk()
        answer = await CardsRpc(desk, NODE).answer(CardRequest(ask=body))
        assert (answer.status, answer.code) == ("refused", code)
        assert answer.sentence
        assert desk.asked == []

    run(story())


@pytest.mark.parametrize("user", ["gateway", "control", "viewer", "agent-n1"])
def test_inv_2_nobody_but_admin_asks_for_cards_or_logs(tmp_path: Path, user: str) -> None:
    async def story() -> None:
        desk = FakeDesk()
        async with served(tmp_path, desk) as (url, admin):
            refused: list[str] = []

            async def note(error: Exception) -> None:
                refused.append(str(error).lower())

            client = await nats.connect(
                url,
                user=user,
                password=read_secret(nats_password_path(tmp_path, user)),
                inbox_prefix=inbox_prefix(user).encode(),
                error_cb=note,
                allow_reconnect=False,
            )
            try:
                for what in (WHAT, "replica_logs"):
                    await client.publish(f"yard.rpc.{what}.{NODE}", b"{}")
                await client.flush()
                await client.flush()
            finally:
                await client.close()
            assert len([r for r in refused if "permissions violation for publish" in r]) == 2
            await ask(admin, LEASE)
            assert len(desk.asked) == 1, "only admin was heard"

    run(story())


def test_a_node_whose_agent_is_away_is_told_soon(tmp_path: Path) -> None:
    async def story() -> None:
        async with yard(tmp_path) as url, connected(url, tmp_path, "admin") as admin:
            with pytest.raises(Unavailable):
                await ask(JetStreamWire(admin), LEASE)

    run(story())
