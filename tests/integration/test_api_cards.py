"""Cards and the dry run of placement over the API of a whole control plane, with a real server on a free port."""

import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable
from datetime import datetime
from pathlib import Path
from typing import Any

import httpx
import msgspec
import pytest

from events.log import Draft
from events.memory import MemoryLog, MemoryWire
from events.memory_broker import MemoryBroker
from schemas import api as bodies
from schemas.card import (
    Card,
    CardClaimed,
    CardEvent,
    CardQueued,
    Claim,
    Lease,
    Stowaway,
    Vm,
    Waiter,
)
from schemas.messages import Event, State
from schemas.model import Model, ModelAdded, Profile, Scaling
from schemas.node import CardInfo, EngineInfo, Node, NodeStarted, NodeState, NodeStateJoined
from tests.support.aio import run, until
from tests.support.controlplanes import api, leads, plane, running

NOW = datetime.fromisoformat("2026-01-01T00:00:00Z")
GIB = 1024**3
INFOS = tuple(CardInfo(id=f"gpu{n}", kind="gpu", memory_bytes=8 * GIB) for n in (0, 1))
NODE = Node(
    id="n",
    running=True,
    started_at=NOW,
    cards=INFOS,
    engines=(EngineInfo(name="llamacpp", version="1", card_kinds=("cpu", "gpu")),),
)
MODEL = Model(
    name="smol",
    incarnation="i",
    aliases=("s",),
    source="/models/smol.gguf",
    scaling=Scaling(min=0, max=1),
    profiles=(Profile(name="p", engine="llamacpp", memory_bytes=4 * GIB, card=("gpu",)),),
)
FULL = Card(
    node="n",
    id="gpu0",
    kind="gpu",
    memory_bytes=8 * GIB,
    rev=4,
    leases=(
        Lease(holder="l-1", memory_bytes=GIB, fence=2, since=NOW, kind="named", name="render",
              pinned=True, by="anna"),
    ),
    waiters=(Waiter(id="l-2", since=NOW, memory_bytes=GIB, waiting_for=("l-1",)),),
    claims=(Claim(id="c-1", name="quake", kind="game", since=NOW),),
    vm=Vm(name="win", since=NOW),
    stowaways=(Stowaway(pid=1, name="x", memory_bytes=5, since=NOW),),
    other_bytes=5,
    provider="nvml",
    device="GPU-1",
)  # fmt: skip


class Yard:
    def __init__(self, folder: Path) -> None:
        self.broker = MemoryBroker()
        self.log = MemoryLog(self.broker)
        self.admin = MemoryLog(self.broker, source="/ctl/anna")
        self.plane = plane(self.log, MemoryWire(self.log.connection), folder)

    async def put(self, subject: str, event: Event, state: State) -> int:
        last = await self.admin.last(subject)
        draft = Draft(
            subject=subject,
            event=event,
            state=state,
            expected_seq=last.seq if last else 0,
            rev=1,
            reason="a test",
        )
        # Any epoch from the node's own start on is good.
        return (await self.admin.append(draft, epoch=1000)).seqs[0]

    async def card(self, state: Card, event: CardEvent) -> int:
        return await self.put(f"yard.evt.card.n.{state.id}", event, state)

    async def furnish(self) -> int:
        await self.put("yard.evt.node.n", NodeStarted(), NODE)
        await self.put("yard.evt.nodestate.n", NodeStateJoined(), NodeState(node="n", since=NOW))
        for info in INFOS:
            await self.card(
                Card(node="n", id=info.id, kind="gpu", memory_bytes=info.memory_bytes, rev=1),
                CardQueued(waiter="nobody"),
            )
        return await self.put("yard.evt.model.smol", ModelAdded(by="anna"), MODEL)


Story = Callable[[Yard, httpx.AsyncClient], Awaitable[None]]


@contextlib.asynccontextmanager
async def at_work(yard: Yard) -> AsyncIterator[httpx.AsyncClient]:
    async with running(yard.plane):
        await until(leads(yard.plane), "a leader")
        await until(lambda: yard.plane.model.synced, "a synced projection")
        async with api(yard.plane) as client:
            yield client


def tell(folder: Path, story: Story) -> None:
    async def whole() -> None:
        yard = Yard(folder)
        async with at_work(yard) as client:
            await story(yard, client)

    run(whole())


def test_a_card_is_told_whole_with_the_event_that_made_it(tmp_path: Path) -> None:
    async def story(yard: Yard, client: httpx.AsyncClient) -> None:
        await yard.furnish()
        seq = await yard.card(FULL, CardClaimed(claim="c-1", name="quake"))
        answer = await client.get("/v1/cards/n%2Fgpu0", params={"min_seq": seq})
        one = msgspec.json.decode(answer.content, type=bodies.CardOne)
        told = {name: getattr(one.data, name) for name in FULL.__struct_fields__}
        assert told == {name: getattr(FULL, name) for name in FULL.__struct_fields__}
        assert one.data.event.type == "card.claimed"
        assert one.data.event.reason == "a test"
        assert one.data.event.change == {"type": "card.claimed", "claim": "c-1", "name": "quake"}
        listed = await client.get("/v1/cards")
        many = msgspec.json.decode(listed.content, type=bodies.CardList)
        assert [card.id for card in many.data] == ["gpu0", "gpu1"]

    tell(tmp_path, story)


async def placed(client: httpx.AsyncClient, **body: Any) -> bodies.PlaceView:
    answer = await client.post("/v1/place", json=body)
    assert answer.status_code == 200, answer.text
    one = msgspec.json.decode(answer.content, type=bodies.PlaceOne)
    assert one.applied_seq == one.data.position
    return one.data


def test_inv_9_a_dry_run_names_every_candidate_and_stores_nothing(tmp_path: Path) -> None:
    async def story(yard: Yard, client: httpx.AsyncClient) -> None:
        seq = await yard.furnish()
        world = yard.plane.leader.world
        await until(lambda: world.position >= seq, "everything is read")
        both = await placed(client, model="s")
        assert both.sentence.startswith("smol would go to n/gpu0 (rank 2, p)")
        assert [(c.cards, c.rank) for c in both.candidates] == [(("gpu0",), 2), (("gpu1",), 2)]
        seq = await yard.card(FULL, CardClaimed(claim="c-1", name="quake"))
        await until(lambda: world.position >= seq, "the claim is read")
        beside = await placed(client, model="smol")
        assert beside.sentence.startswith("smol would go to n/gpu1")
        only = await placed(client, model="smol", card="n/gpu0")
        assert only.sentence.startswith("smol would wait for n/gpu0")
        assert (await yard.admin.identity()).last_seq == seq

    tell(tmp_path, story)


@pytest.mark.parametrize(
    ("body", "status", "code"),
    [
        ({"model": "none"}, 404, "not_found"),
        ({"model": "smol", "card": "n/gpu7"}, 404, "not_found"),
        ({"model": "smol", "card": "gpu0"}, 404, "not_found"),
        ({"model": "smol", "force": True}, 400, "bad_request"),
        ({}, 400, "bad_request"),
        ({"model": 7}, 400, "bad_request"),
        ([], 400, "bad_request"),
    ],
)
def test_what_cannot_be_placed_is_refused_with_a_sentence(
    tmp_path: Path, body: Any, status: int, code: str
) -> None:
    async def story(yard: Yard, client: httpx.AsyncClient) -> None:
        seq = await yard.furnish()
        await until(lambda: yard.plane.leader.world.position >= seq, "everything is read")
        answer = await client.post("/v1/place", json=body)
        assert (answer.status_code, answer.json()["error"]["code"]) == (status, code)
        assert answer.json()["error"]["sentence"]

    tell(tmp_path, story)


def test_the_dry_run_wants_the_token(tmp_path: Path) -> None:
    async def story(yard: Yard, client: httpx.AsyncClient) -> None:
        async with api(yard.plane, token=None) as stranger:
            assert (await stranger.post("/v1/place", json={"model": "smol"})).status_code == 401
        assert "/v1/place" in (await client.get("/schema/openapi.json")).json()["paths"]

    tell(tmp_path, story)
