"""Starts control planes for tests: on the log in memory or a real server, with the smallest domain there is.

The domain here adds models and refuses names that exist; it stands for the real one where only leading,
fencing and reading are under test.
"""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Sequence
from datetime import datetime, timedelta
from functools import cache
from pathlib import Path
from typing import Any

import httpx
import msgspec
from msgspec import Struct

from controlplane.api import build_api
from controlplane.app import ControlPlane
from controlplane.candidate import Me
from controlplane.domain.decision import Change, Decision, Ids, Live, Step
from controlplane.domain.reports import Report
from controlplane.domain.world import World
from controlplane.identifiers import new_ids
from controlplane.leader import NextDecision
from events.connection import connect
from events.ids import new_id
from events.jetstream import JetStreamLog, JetStreamWire
from events.log import Appended, Draft, EventLog, Fence, Recorded, StoredCommand, Wire
from events.provision import ensure_streams
from events.subjects import event_subject
from schemas.codes import EXISTS, EXPIRED
from schemas.commands import Command, ModelAdd, Outcome
from schemas.messages import SCHEMA
from schemas.model import Model, ModelAdded
from schemas.settings import ControlplaneSettings
from tests.support.natsserver import NatsServer
from tests.support.openapi import Described

TOKEN = "the-token"
FAST = ControlplaneSettings(listen="127.0.0.1:0", leader_silence_s=0.5)


def add_command(name: str, *, id_: str | None = None, ttl_s: float = 60.0) -> Command:
    return Command(id=id_ or new_id(), body=ModelAdd(entry={"name": name}), ttl_s=ttl_s)


def _rejected(stored: StoredCommand, id_: str, now: datetime, code: str) -> Outcome:
    return Outcome(
        id=id_, actor=stored.actor, name=stored.name, status="rejected", at=now, code=code
    )


def smallest_domain(
    world: World,
    live: Live,
    commands: Sequence[StoredCommand],
    now: datetime,
    ids: Ids,
    settings: ControlplaneSettings,
    *,
    reports: Sequence[Report] = (),
) -> Step:
    """Adds models; everything else is consumed without an event."""
    if not commands:
        return Step()
    stored = commands[0]
    command = stored.command
    if command is None or not isinstance(command.body, ModelAdd):
        return Step(consumed=stored)
    name = str(command.body.entry["name"])
    changes: tuple[Change, ...] = ()
    if now - stored.stored_at > timedelta(seconds=command.ttl_s):
        outcome = _rejected(stored, command.id, now, EXPIRED)
    elif name in world.models:
        outcome = _rejected(stored, command.id, now, EXISTS)
    else:
        outcome = Outcome(
            id=command.id,
            actor=stored.actor,
            name=stored.name,
            status="accepted",
            at=now,
            refs=(event_subject("model", name),),
        )
        changes = (
            Change(
                noun="model",
                key=(name,),
                event=ModelAdded(by=stored.actor),
                state=Model(name=name, incarnation=ids.incarnation()),
            ),
        )
    return Step(
        decision=Decision(
            changes=changes,
            what=f"model.add {name}: {outcome.status}",
            cause=command.id,
            actor=stored.actor,
            outcome=outcome,
        ),
        consumed=stored,
    )


def plane(
    events: EventLog,
    wire: Wire,
    folder: Path,
    *,
    instance: str = "cp-1",
    host: str | None = None,
    pid: int = 1,
    decide: NextDecision = smallest_domain,
    settings: ControlplaneSettings = FAST,
) -> ControlPlane:
    """One instance; each on a host of its own unless told otherwise."""
    return ControlPlane(
        events=events,
        wire=wire,
        me=Me(instance=instance, host=host or f"host-of-{instance}", pid=pid),
        settings=settings,
        folder=folder / instance,
        token=TOKEN,
        make_decider=lambda: decide,
        ids=new_ids(),
    )


@contextlib.asynccontextmanager
async def running(control: ControlPlane) -> AsyncIterator[ControlPlane]:
    """Runs it for the length of the block; a task of it that failed fails the test."""
    described()  # it takes a second the first time, in which nothing else here would go on
    stopping = asyncio.Event()
    task = asyncio.create_task(control.run(stopping))
    listening = asyncio.create_task(control.listening.wait())
    await asyncio.wait({task, listening}, timeout=10, return_when=asyncio.FIRST_COMPLETED)
    listening.cancel()
    try:
        if task.done():
            task.result()
        yield control
    finally:
        stopping.set()
        await asyncio.wait_for(task, 10)


@cache
def described() -> Described:
    """What the API says of itself; nothing in it depends on the yard."""
    nothing: Any = object()
    application = build_api(
        model=nothing,
        streams=nothing,
        metrics=nothing,
        doctor=nothing,
        prefix="yard",
        planner=nothing,
        placer=nothing,
        usage=nothing,
    )
    # Through JSON, for the defaults in it are structs of ours.
    document = msgspec.json.decode(msgspec.json.encode(application.openapi_schema.to_schema()))
    return Described(document, errors=("ErrorBody",), beside=("/schema", "/mirror/"))


@contextlib.asynccontextmanager
async def api(
    control: ControlPlane, *, token: str | None = TOKEN
) -> AsyncIterator[httpx.AsyncClient]:
    """A client of its API; an answer that the API's own description does not allow fails the test."""
    headers = {} if token is None else {"Authorization": f"Bearer {token}"}
    async with httpx.AsyncClient(
        base_url=f"http://127.0.0.1:{control.port}",
        headers=headers,
        timeout=10,
        event_hooks={"response": [described().hook]},
    ) as client:
        yield client


def leads(control: ControlPlane) -> Callable[[], bool]:
    return lambda: control.leader.term is not None


class Held:
    """A log whose batches wait at a gate: the process that makes decisions stands still there.

    Everything else passes, so what was read stays as it was when the gate closed.
    """

    def __init__(self, inner: EventLog) -> None:
        self._inner = inner
        self.gate = asyncio.Event()
        self.gate.set()
        self.waiting = asyncio.Event()

    def __getattr__(self, name: str) -> object:
        return getattr(self._inner, name)

    async def append_batch(
        self, drafts: Sequence[Draft], *, epoch: int, fence: Fence | None = None
    ) -> Appended:
        if not self.gate.is_set():
            self.waiting.set()
            await self.gate.wait()
        return await self._inner.append_batch(drafts, epoch=epoch, fence=fence)


class Mute:
    """A wire whose beacons can be silenced, as a stalled process silences them."""

    def __init__(self, inner: Wire) -> None:
        self._inner = inner
        self.silent = False

    def __getattr__(self, name: str) -> object:
        return getattr(self._inner, name)

    async def beacon(self, kind: str, name: str, body: Struct) -> None:
        if not self.silent:
            await self._inner.beacon(kind, name, body)


@contextlib.asynccontextmanager
async def on_server(
    server: NatsServer, name: str
) -> AsyncIterator[tuple[JetStreamLog, JetStreamWire]]:
    """The log and the wire of one process on a real server, its streams made."""
    connection = await connect(
        server.settings, name=name, user="", password="", inbox_prefix=f"_INBOX_{name}"
    )
    try:
        await ensure_streams(connection, "yard-of-tests", SCHEMA)
        yield JetStreamLog(connection, source=f"/cp/{name}"), JetStreamWire(connection)
    finally:
        await connection.close()


async def history(events: EventLog, *filters: str) -> list[Recorded]:
    """Every event the log holds of these subjects, in order."""
    follower = events.follow(filters or ("yard.evt.>",), after=0)
    found: list[Recorded] = []
    try:
        while True:
            batch = await asyncio.wait_for(follower.next(), 10)
            found += [item for item in batch.items if isinstance(item, Recorded)]
            if batch.synced:
                return found
    finally:
        await follower.close()
