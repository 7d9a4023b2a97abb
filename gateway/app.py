"""Wires a gateway together and says in which order its parts start and end; it decides nothing.

Start: the log is followed in the background; the port opens once there is a table, synced or from the
snapshot. End: new requests are turned away, running ones finish, then the yard hears the last beacon.
"""

import asyncio
import gc
import logging
import os
import random
import secrets
import signal
import socket
import sys
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

from events.connection import connect
from events.ids import new_id
from events.jetstream import JetStreamLog, JetStreamWire
from events.log import EventLog, Wire
from events.roles import inbox_prefix
from events.secrets import read_secret, yard_secret_path
from events.service import FatalError, Service
from gateway.accesslog import AccessLog
from gateway.accounting import Accounting
from gateway.activator import Activator
from gateway.adapters import Adapters
from gateway.admin import Admin
from gateway.beacons import Beacons
from gateway.callers import Callers
from gateway.clock import LoopClock
from gateway.domain.doors import is_loopback, why_not_listen
from gateway.domain.snapshot import restore
from gateway.endings import Endings
from gateway.endpoints import EngineKey, Inference
from gateway.errand import Means
from gateway.express import Express
from gateway.follower_task import TableFollower
from gateway.gateway import Gateway
from gateway.handler import RequestHandler, request_ids
from gateway.http.bodies import BodyBudget
from gateway.http.client import EngineClient
from gateway.http.errands import Take
from gateway.http.exchange import Exchange
from gateway.http.limits import ClientLimits, ServerLimits
from gateway.http.server import Server, serve
from gateway.keys import engine_keys
from gateway.limits import Limits
from gateway.limitsbeacon import LimitsBeacons
from gateway.listening import inherited_socket
from gateway.loadingstream import LoadingStreams
from gateway.metrics import Metrics
from gateway.probe import FIRST_LOOK_S, Prober
from gateway.siblings import Siblings, folder_of
from gateway.snapshot import SnapshotWriter, read_snapshot, snapshot_path
from gateway.spans import Spans
from gateway.timeline import Timelines
from gateway.workers import AsWorker, as_worker, run_crew
from schemas.beacons import AgentBeacon
from schemas.settings import GatewaySettings

log = logging.getLogger("gateway")

USER = "gateway"

HAND_OVER_S = 5.0
"""So long a gateway with a successor keeps connections on which no request is; a client that sends one may send it
on any of them."""

SYNC_BEFORE_SNAPSHOT_S = 0.5
"""So long a connected gateway waits for the log itself before it serves from a snapshot."""


@dataclass(slots=True)
class RunningGateway:
    """A gateway whose port is open."""

    gateway: Gateway
    server: Server
    metrics: Metrics
    timelines: Timelines
    activator: Activator
    adapters: Adapters
    client: EngineClient
    snapshots: SnapshotWriter
    limits: Limits
    accounting: Accounting

    @property
    def port(self) -> int:
        return self.server.port


@asynccontextmanager
async def run_gateway(
    gateway_id: str,
    settings: GatewaySettings,
    *,
    data: Path,
    events: EventLog,
    wire: Wire,
    engine_key: EngineKey,
    prefix: str = "yard",
    access: AccessLog | None = None,
    sock: socket.socket | None = None,
    succeeded: Callable[[], bool] = lambda: False,
    worker: AsWorker | None = None,
) -> AsyncIterator[RunningGateway]:
    """Runs a gateway for as long as the block lasts; the end of the block drains it.

    A task of it that fails ends the block with that failure. It listens on `sock` instead of its address, when
    there is one. `succeeded()`: at the end others listen there already. `worker`: it is one of several.
    """
    clock = LoopClock()
    gateway = Gateway(gateway_id, settings, clock)
    metrics = Metrics()
    timelines = Timelines()
    client = EngineClient(
        ClientLimits(
            connect_timeout_s=settings.connect_timeout_s,
            first_byte_s=settings.first_byte_s,
            stall_s=settings.stream_stall_s,
        )
    )
    # A task of a part that fails for a reason nobody foresaw ends the whole gateway.
    group = asyncio.TaskGroup()
    activator = Activator(gateway, events, metrics, new_command_id=new_id, spawn=group.create_task)
    prober = Prober(gateway, client, engine_key=engine_key, spawn=group.create_task)
    incarnation = new_id()
    adapters = Adapters(gateway, wire, metrics, incarnation=incarnation, spawn=group.create_task)

    def beacon_told(n: int) -> None:
        adapters.number = n

    beacons = Beacons(gateway, wire, metrics, incarnation=incarnation, told=beacon_told)
    path = snapshot_path(data, gateway_id)
    snapshots = SnapshotWriter(gateway, path, metrics)
    read = asyncio.Event()
    follower = TableFollower(
        gateway,
        events,
        prefix=prefix,
        on_synced=read.set,
        on_identity=snapshots.identify,
        on_stopped=read.set,
    )
    gateway.is_connected = lambda: events.connected and follower.connected
    gateway.on_demand = activator.look
    gateway.on_edge = beacons.edge
    gateway.on_suspect = prober.suspect
    gateway.on_endpoint_gone = client.forget
    gateway.on_node = prober.nodes_changed

    def model_gone(model: str) -> None:
        timelines.forget_model(model)
        activator.forget_model(model)

    gateway.on_model_gone = model_gone
    limits = Limits(gateway, incarnation)
    limits_beacons = LimitsBeacons(gateway, wire, limits)
    gateway.others_inflight = limits_beacons.others_inflight
    gateway.has_seat = limits.has_seat
    gateway.on_seat_free = limits_beacons.seat_free
    accounting = Accounting(gateway_id, incarnation, events, metrics)
    host = settings.listen.rpartition(":")[0] if sock is None else str(sock.getsockname()[0])
    callers = Callers(gateway, settings.keys, beyond_loopback=not is_loopback(host))
    loading = LoadingStreams(gateway, wire)
    inference = Inference(
        gateway,
        client,
        metrics,
        timelines,
        adapters,
        limits,
        loading,
        engine_key=engine_key,
        new_exchange=Exchange,
    )
    admin = Admin(gateway, metrics, timelines)
    siblings = None
    if worker is not None:
        siblings = Siblings(folder_of(data, worker.of), worker.number, metrics.pieces)
        admin.metrics_page = siblings.page
    access = access or AccessLog()
    endpoint = settings.otlp_endpoint
    spans = Spans(endpoint, gateway_id, clock, metrics) if endpoint else None
    endings = Endings(clock, metrics, access, accounting, spans)
    new_request_id = request_ids(secrets.token_hex(8))
    # Ids have to differ, not to be secret; this one costs no call of the system.
    random_bits = random.Random(secrets.randbits(256)).getrandbits  # noqa: S311
    handler = RequestHandler(
        gateway,
        inference,
        admin,
        callers,
        endings,
        new_request_id=new_request_id,
        random_bits=random_bits,
    )
    budget = BodyBudget(settings.body_budget_bytes)
    means = Means(
        gateway,
        limits,
        client,
        adapters,
        metrics,
        timelines,
        endings,
        budget,
        engine_key=engine_key,
        stalled=inference.stalled,
        new_request_id=new_request_id,
        random_bits=random_bits,
    )
    express = Express(means, callers)
    # Before the first ask: what agents say of its pins must not be missed.
    agents = await wire.on_beacon("agent", AgentBeacon, adapters.heard)
    try:
        async with group:
            tasks = [group.create_task(follower.run(), name="follower")]
            await _first_table(gateway, prober, path, read)
            _may_listen(gateway, [host], settings)
            await limits_beacons.introduce()
            server = await _listen(handler, express.take, budget, settings, sock)
            if siblings is not None:
                await siblings.open()
            beating = group.create_task(beacons.run(), name="beacons")
            tasks += [
                group.create_task(snapshots.run(), name="snapshots"),
                *([] if spans is None else [group.create_task(spans.run(), name="spans")]),
                group.create_task(loading.run(), name="loading"),
                group.create_task(prober.watch_silent_nodes(), name="silent nodes"),
            ]
            sharing = group.create_task(limits_beacons.run(), name="limits")
            telling = group.create_task(accounting.run(), name="accounting")
            log.info("gateway listens", extra={"gateway": gateway_id, "port": server.port})
            try:
                yield RunningGateway(
                    gateway=gateway,
                    server=server,
                    metrics=metrics,
                    timelines=timelines,
                    activator=activator,
                    adapters=adapters,
                    client=client,
                    snapshots=snapshots,
                    limits=limits,
                    accounting=accounting,
                )
                has_successor = succeeded()
                if has_successor:
                    await server.hand_over(min(HAND_OVER_S, settings.drain_s / 2))
                await _drain(gateway, server, beacons, adapters, has_successor=has_successor)
            finally:
                await server.close()
            # Nothing may follow the last word.
            beating.cancel()
            sharing.cancel()
            telling.cancel()
            await asyncio.wait([beating, sharing, telling])
            await accounting.close()
            await beacons.leave()
            await limits_beacons.leave()
            await snapshots.write_now()
            for task in tasks:
                task.cancel()
            activator.close()
            adapters.close()
            prober.close()
    finally:
        if siblings is not None:
            await siblings.close()
        await agents.close()
        await limits_beacons.close()
        await client.close()
        gateway.close()
        access.flush()


async def _first_table(gateway: Gateway, prober: Prober, path: Path, read: asyncio.Event) -> None:
    """Returns once there is a table to serve from. `read`: the log was, or cannot be folded.

    1. the log itself, when it can be read within a moment
    2. the snapshot, every endpoint of it asked once whether it is still what it was; one that takes long to answer is
       not routed to until it has
    3. neither: wait for the log, however long; FatalError when it cannot be folded
    """
    try:
        async with asyncio.timeout(SYNC_BEFORE_SNAPSHOT_S):
            await read.wait()
    except TimeoutError:
        pass
    if gateway.table is not None:
        return  # 1
    snapshot = await asyncio.to_thread(read_snapshot, path)
    if snapshot is not None and gateway.table is None:  # 2
        table = restore(snapshot)
        gateway.install(table, synced=False)
        routes = [r for r in table.replicas.values() if table.may_route(r)]
        await prober.check_all(routes, within_s=FIRST_LOOK_S)
        log.warning(
            "serving from a snapshot",
            extra={"position": snapshot.position, "ejected": len(gateway.ejected)},
        )
        return
    await read.wait()  # 3
    if gateway.table is None:
        raise FatalError(gateway.stopped or "the log was not read")


def _may_listen(gateway: Gateway, hosts: Sequence[str], settings: GatewaySettings) -> None:
    """Raises FatalError where the port would be open to others and nobody had to say who they are."""
    table = gateway.table
    any_key = table is not None and table.keys.any
    if problem := why_not_listen(hosts, settings.keys, any_key=any_key):
        raise FatalError(problem)


async def _listen(
    handler: RequestHandler,
    take: Take,
    budget: BodyBudget,
    settings: GatewaySettings,
    sock: socket.socket | None,
) -> Server:
    """Raises FatalError when the address cannot be had."""
    host, _, port = settings.listen.rpartition(":")
    try:
        return await serve(
            handler,
            host.strip("[]"),
            int(port),
            ServerLimits(
                body_bytes=settings.body_limit_bytes, body_memory_bytes=settings.body_memory_bytes
            ),
            sock=sock,
            budget=budget,
            take=take,
        )
    except OSError as problem:
        raise FatalError(f"cannot listen on {settings.listen}: {problem.strerror}") from None


async def _drain(
    gateway: Gateway,
    server: Server,
    beacons: Beacons,
    adapters: Adapters,
    *,
    has_successor: bool,
) -> None:
    """New requests are turned away; running and waiting ones get their time.

    With a successor none are new but those that were on their way here: they are served.
    """
    drain_s = gateway.settings.drain_s
    gateway.draining = not has_successor
    beacons.edge(True)
    # Whoever still waits shortly before the end is told to come back instead of being cut off.
    loop = asyncio.get_running_loop()

    def dismiss() -> None:
        gateway.dismiss_all()
        adapters.dismiss()

    dismissal = loop.call_later(max(drain_s - 1.0, drain_s / 2), dismiss)
    try:
        cut = await server.drain(drain_s)
    finally:
        dismissal.cancel()
    log.info("gateway drained", extra={"gateway": gateway.id, "cut": cut})


def calm_collector() -> None:
    """Keeps the collector of cycles out of the way of requests; for this process as a whole.

    What stands now mostly stays: a collection that walked a table of thousands of models would halt every
    stream for tens of milliseconds. What requests make is freed without it, and a thousand that are woken
    together make enough to call it forty times in the milliseconds that matter.

    What it costs is memory for cycles that wait: a request leaves a third of an object in them, so the
    50,000 are some 150,000 requests apart. Measured over 60,000 requests to a scripted engine, 32 at a time:
    45 MiB grew to 50, with the collector's own thresholds to 47.
    """
    gc.freeze()
    gc.set_threshold(50_000, 20, 20)


def _nowhere(_: bytes) -> None:
    """The log level of the yard asks for warnings only."""


async def main(service: Service) -> None:
    """The gateway as a service of the yard: this process, or the parent of several workers.

    Raises SecretMissing, FatalError.
    """
    settings = service.settings
    worker = as_worker(os.environ)
    if worker is None and settings.gateway.workers > 1:
        await run_crew(service, sys.argv[1:])
        return
    sock = inherited_socket(os.environ) if worker is None else worker.sock
    keys = engine_keys(read_secret(yard_secret_path(service.data)))
    user = service.nats_user(USER)
    connection = await connect(
        settings.nats,
        name=f"gateway {service.id}",
        user=user,
        # Read at each attempt: a file that was replaced is followed without a restart.
        password=lambda: service.nats_password(user),
        inbox_prefix=inbox_prefix(user),
        prefix=settings.yard.prefix,
    )
    opened = asyncio.Event()

    def succeed() -> None:
        service.signal = signal.SIGHUP
        service.stopping.set()

    def stay() -> None:
        log.warning("SIGHUP without workers: nobody would succeed this gateway, so it goes on")

    hung_up = stay if worker is None else succeed
    asyncio.get_running_loop().add_signal_handler(signal.SIGHUP, hung_up)

    async def serving() -> None:
        async with run_gateway(
            service.id,
            settings.gateway,
            data=service.data,
            events=JetStreamLog(connection, source=f"/gateway/{service.id}"),
            wire=JetStreamWire(connection),
            engine_key=keys,
            prefix=settings.yard.prefix,
            access=AccessLog() if log.isEnabledFor(logging.INFO) else AccessLog(_nowhere),
            sock=sock,
            succeeded=lambda: service.signal == signal.SIGHUP,
            worker=worker,
        ):
            opened.set()
            calm_collector()
            if worker is not None:
                worker.serves()
            await service.stopping.wait()

    try:
        async with asyncio.TaskGroup() as group:
            task = group.create_task(serving())
            await service.stopping.wait()
            if not opened.is_set():
                # Without a table it may wait for the log for ever; there is nothing to drain.
                task.cancel()
    finally:
        await connection.close()
