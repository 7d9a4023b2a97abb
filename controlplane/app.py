"""Wires one control plane: log, leader's loop, projection, API. No decision and no policy is made here."""

import asyncio
import logging
import os
import socket
import time
from collections.abc import Generator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import uvicorn

from controlplane.api import build_api
from controlplane.api_guard import Guard, Known
from controlplane.asking import NextDecision
from controlplane.candidate import Me
from controlplane.doctor import Doctor
from controlplane.domain.decision import Ids
from controlplane.domain.index import StepIndex
from controlplane.domain.step import next_decision
from controlplane.events_api import EventStreams
from controlplane.identifiers import new_ids
from controlplane.leader import LeaderLoop, MakeDecider
from controlplane.metrics import Metrics
from controlplane.mirror.store import StoreError
from controlplane.mirroring import Mirroring
from controlplane.placing import Placer
from controlplane.planning import Planner
from controlplane.projections.readmodel import ReadModel
from controlplane.projections.usage import UsageModel
from events.connection import Connection, connect
from events.ids import utc_now
from events.jetstream import JetStreamLog, JetStreamWire
from events.log import EventLog, Misconfigured, Unavailable, Wire
from events.provision import ensure_streams
from events.roles import inbox_prefix
from events.secrets import api_token_path, read_secret, yard_id, yard_secret_path
from events.service import FatalError, Service
from events.subjects import encode_token
from schemas.messages import SCHEMA
from schemas.settings import ControlplaneSettings

log = logging.getLogger("controlplane")

USER = "control"
STREAMS_RETRY_S = 1.0
SHUTDOWN_S = 2


class _Server(uvicorn.Server):
    """A server whose process handles signals elsewhere."""

    @contextmanager
    def capture_signals(self) -> Generator[None, None, None]:
        yield


def new_decider() -> NextDecision:
    """The decision function with an index of its own; a new term begins with an empty one."""
    return partial(next_decision, index=StepIndex())


class ControlPlane:
    """One instance over any log and wire: what the tests start, and `run` with NATS behind it."""

    def __init__(
        self,
        *,
        events: EventLog,
        wire: Wire,
        me: Me,
        settings: ControlplaneSettings,
        folder: Path,
        token: str,
        prefix: str = "yard",
        make_decider: MakeDecider = new_decider,
        ids: Ids | None = None,
        mirroring: Mirroring | None = None,
    ) -> None:
        """Without `mirroring` it serves no job and keeps no file."""
        self._mirroring = mirroring
        self.metrics = Metrics()
        self.leader = LeaderLoop(
            events=events,
            wire=wire,
            me=me,
            settings=settings,
            make_decider=make_decider,
            ids=ids or new_ids(),
            now=utc_now,
            monotonic=time.monotonic,
            metrics=self.metrics,
            prefix=prefix,
            mirroring=mirroring,
        )
        self.model = ReadModel(
            events=events,
            path=folder / "projection.sqlite",
            prefix=prefix,
            now=utc_now,
            monotonic=time.monotonic,
            metrics=self.metrics,
        )
        self.usage = UsageModel(
            events=events,
            path=folder / "usage.sqlite",
            keys=lambda: self.leader.world.keys,
            now=utc_now,
            metrics=self.metrics,
        )
        self.doctor = Doctor(events=events, leader=self.leader, model=self.model, usage=self.usage)
        self._streams = EventStreams(events, self.metrics)
        self._settings = settings
        self._token = token
        self._prefix = prefix
        self.port = 0
        self.listening = asyncio.Event()
        self.metrics.read_from(self._readings)

    def _readings(
        self,
    ) -> Generator[tuple[str, str, dict[tuple[str, ...], float], tuple[str, ...]]]:
        world = self.leader.world
        phases: dict[tuple[str, ...], float] = {}
        for replica in world.replicas.values():
            key = (replica.phase,)
            phases[key] = phases.get(key, 0.0) + 1
        yield "yard_models", "Models in the catalog.", {(): float(len(world.models))}, ()
        yield "yard_replicas", "Replicas the log holds, by phase.", phases, ("phase",)
        positions: dict[tuple[str, ...], float] = {
            (name,): float(projection.position)
            for name, projection in self.doctor.facts().projections.items()
        }
        yield "yard_position", "Last sequence applied.", positions, ("projection",)
        yield "yard_unknown_events", "Events of a newer version.", {(): world.unknown_events}, ()
        yield "yard_broken_events", "Events nobody can read.", {(): world.broken_events}, ()
        yield "yard_ready", "1 when ready.", {(): float(self.doctor.ready().ready)}, ()

    async def run(self, stopping: asyncio.Event) -> None:
        """Runs until `stopping`. A side task that fails ends all of it, with its error."""
        host, _, port = self._settings.listen.rpartition(":")
        host = host.strip("[]")
        listener = _listen(host, int(port))
        self.port = listener.getsockname()[1]
        try:
            await self.model.open()
            if self._mirroring is not None:
                await self._mirroring.open()
            server = self._server(host)
            async with asyncio.TaskGroup() as tasks:
                work = [
                    tasks.create_task(self.leader.run(), name="leader"),
                    tasks.create_task(self.model.run(), name="projection"),
                    tasks.create_task(self.usage.run(), name="usage"),
                ]
                if self._mirroring is not None:
                    work.append(
                        tasks.create_task(self._mirroring.run(self.port), name="mirror beacon")
                    )
                serving = tasks.create_task(server.serve(sockets=[listener]), name="api")
                self.listening.set()
                log.info("listening", extra={"host": host, "port": self.port})
                stop = tasks.create_task(stopping.wait(), name="stop")
                await asyncio.wait({stop, serving}, return_when=asyncio.FIRST_COMPLETED)
                stop.cancel()
                await self._streams.close()
                server.should_exit = True
                await serving
                for task in work:
                    task.cancel()
        finally:
            listener.close()
            # The database has a thread of its own that would keep the process alive.
            await self.model.close()
            await self.usage.close()
            if self._mirroring is not None:
                await self._mirroring.close()

    def _planner(self) -> Planner | None:
        if self._mirroring is None:
            return None
        return Planner(
            registry=self._mirroring.registry,
            store=self._mirroring.store,
            far=self._mirroring.far,
            world=lambda: self.leader.world,
            live=self.leader.view,
            ids=new_ids(),
            settings=self._settings,
            now=utc_now,
        )

    def _server(self, host: str) -> _Server:
        application = build_api(
            model=self.model,
            streams=self._streams,
            metrics=self.metrics,
            doctor=self.doctor,
            prefix=self._prefix,
            planner=self._planner(),
            usage=self.usage,
            placer=Placer(
                world=lambda: self.leader.world,
                live=self.leader.view,
                synced=lambda: self.leader.reader.synced,
                ids=new_ids(),
                settings=self._settings,
                now=utc_now,
            ),
        )
        guard = Guard(
            application,
            token=self._token,
            known=Known(host, self._settings.allowed_hosts),
            metrics=self.metrics,
        )
        door: Any = guard
        if self._mirroring is not None:
            door = self._mirroring.in_front_of(guard, lambda: self.leader.world)
        return _Server(
            uvicorn.Config(
                door,
                lifespan="off",
                ws="none",
                log_config=None,
                access_log=False,
                server_header=False,
                timeout_graceful_shutdown=SHUTDOWN_S,
            )
        )


def _listen(host: str, port: int) -> socket.socket:
    """A listening socket. Raises FatalError when the address cannot be had."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((host, port))
        listener.listen(128)
    except OSError as error:
        listener.close()
        raise FatalError(f"cannot listen on {host}:{port}: {error.strerror}") from error
    listener.setblocking(False)
    return listener


def _yard_id(data: Path) -> str:
    """The yard's id, from the environment or the data folder. Raises SecretMissing."""
    given = os.environ.get("YARD_ID")
    if given:
        return given
    return yard_id(data)


async def _keep_streams(connection: Connection, owner: str) -> None:
    """Makes the streams be there as soon as a server answers. Raises FatalError when they cannot be."""
    while True:
        try:
            await ensure_streams(connection, owner, SCHEMA)
            return
        except Unavailable:
            await asyncio.sleep(STREAMS_RETRY_S)
        except Misconfigured as error:
            raise FatalError(str(error)) from error


async def run(service: Service) -> None:
    """The service: starts with or without NATS, ends when told to. Raises FatalError, SecretMissing."""
    settings = service.settings
    user = service.nats_user(USER)
    token = read_secret(api_token_path(service.data))
    yard_secret = read_secret(yard_secret_path(service.data))
    owner = _yard_id(service.data)
    me = Me(instance=service.id, host=socket.gethostname(), pid=os.getpid())
    connection = await connect(
        settings.nats,
        name=f"controlplane {service.id}",
        user=user,
        password=lambda: service.nats_password(user),
        inbox_prefix=inbox_prefix(user),
        prefix=settings.yard.prefix,
    )
    try:
        wire = JetStreamWire(connection)
        plane = ControlPlane(
            events=JetStreamLog(connection, source=f"/cp/{service.id}"),
            wire=wire,
            me=me,
            settings=settings.controlplane,
            folder=service.data / "controlplane" / encode_token(service.id),
            token=token,
            prefix=settings.yard.prefix,
            mirroring=Mirroring(
                name=service.id,
                folder=service.data / "mirror",
                settings=settings.controlplane,
                wire=wire,
                yard_secret=yard_secret,
            ),
        )
        async with asyncio.TaskGroup() as tasks:
            streams = tasks.create_task(_keep_streams(connection, owner), name="streams")
            await plane.run(service.stopping)
            streams.cancel()
    except* StoreError as errors:
        raise FatalError(str(errors.exceptions[0])) from errors
    finally:
        await connection.close()
