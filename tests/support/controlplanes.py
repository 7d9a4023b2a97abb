"""Starts control planes for tests: on the log in memory or a real server, with the smallest domain there is.

The domain here adds models and refuses names that exist; it stands for the real one where only leading,
fencing and reading are under test.
"""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Sequence
from datetime import datetime, timedelta
from pathlib import Path

import httpx

from controlplane.app import ControlPlane
from controlplane.candidate import Me
from controlplane.domain.decision import Change, Decision, Ids, Live, Step
from controlplane.domain.world import World
from controlplane.identifiers import new_ids
from controlplane.leader import NextDecision
from events.ids import new_id
from events.log import EventLog, StoredCommand, Wire
from events.subjects import event_subject
from schemas.codes import EXISTS, EXPIRED
from schemas.commands import Command, ModelAdd, Outcome
from schemas.model import Model, ModelAdded
from schemas.settings import ControlplaneSettings

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


@contextlib.asynccontextmanager
async def api(
    control: ControlPlane, *, token: str | None = TOKEN
) -> AsyncIterator[httpx.AsyncClient]:
    """A client of its API."""
    headers = {} if token is None else {"Authorization": f"Bearer {token}"}
    async with httpx.AsyncClient(
        base_url=f"http://127.0.0.1:{control.port}", headers=headers, timeout=10
    ) as client:
        yield client


def leads(control: ControlPlane) -> Callable[[], bool]:
    return lambda: control.leader.term is not None
