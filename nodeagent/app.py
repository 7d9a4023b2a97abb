"""Wires one agent: data folder, journal, launcher, drivers, log and wire. It holds no policy at all."""

import asyncio
import fcntl
import logging
import os
import signal
import socket
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Final

from msgspec import Struct
from msgspec.structs import replace

from events.connection import connect
from events.ids import utc_now
from events.jetstream import JetStreamLog, JetStreamWire
from events.log import EventLog, Wire
from events.roles import agent_user, inbox_prefix
from events.secrets import engine_key, mirror_token, node_secret_path, read_secret, secrets_folder
from events.service import EXIT_DEPOSED, EXIT_LOCKED, FatalError, Service
from events.subjects import encode_token
from nodeagent import memory
from nodeagent.adapterfiles import AdapterFiles
from nodeagent.agent import Agent, Around, Unreadable
from nodeagent.beacons import Gateways
from nodeagent.books import Books
from nodeagent.cards.nvml import Nvml
from nodeagent.cards.provider import Provider
from nodeagent.cardwiring import beside, meter_of
from nodeagent.domain.assignments import needed_keys
from nodeagent.domain.inventory import BadInventory, cards_of, given_out
from nodeagent.domain.ports import PortBook
from nodeagent.drivers import asking
from nodeagent.drivers.asking import Ask
from nodeagent.drivers.command import CommandDriver
from nodeagent.drivers.driver import Driver, SecretReader, secrets_in
from nodeagent.drivers.lines import Lines
from nodeagent.drivers.llamacpp import LlamacppDriver
from nodeagent.drivers.vllm import VllmDriver
from nodeagent.files.fetches import Files
from nodeagent.fleet import Fleet
from nodeagent.journal import Journal, JournalFault
from nodeagent.launching import Launcher
from nodeagent.parkbook import ParkBook, told_of, ways_of
from nodeagent.reporter import Deposed, Reporter
from nodeagent.slotdesk import SlotDesk
from nodeagent.slots_rpc import serve_slots
from nodeagent.slotwork import SlotTimes
from nodeagent.tools import Tools
from schemas.model import EngineName
from schemas.node import Node
from schemas.settings import NodeagentSettings

LOG = logging.getLogger(__name__)


class Locked(Exception):
    """Another agent works in this data folder."""


class Times(Struct, frozen=True, kw_only=True):
    """Times that are no settings, in seconds; tests make them short."""

    listen_s: float = 3.0
    plan_grace_s: float = 2.0
    retry_s: float = 1.0
    endings_after_s: float = 86400.0
    endings_look_s: float = 60.0
    leave_s: float = 3.0
    slots: SlotTimes = SlotTimes()


DEFAULT_TIMES: Final = Times()


@contextmanager
def locked(path: Path) -> Iterator[None]:
    """Holds the lock of a data folder. The kernel lets go of it however this process ends.

    Raises Locked.
    """
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    handle = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise Locked(
                f"another agent works in {path.parent}; give this one its own --data"
            ) from None
        yield
    finally:
        os.close(handle)


def drivers_of(
    settings: NodeagentSettings, adapter_root: Path | None = None, ask: Ask = asking.ask
) -> dict[EngineName, Driver]:
    """One driver per kind of engine this node can run; vLLM's where there is one.

    `adapter_root` is the folder below which this node keeps adapters for engines to load; `ask` asks them about
    adapters.
    """
    drivers: dict[EngineName, Driver] = {
        "llamacpp": LlamacppDriver(settings.llama_server),
        "command": CommandDriver(),
    }
    vllm = VllmDriver(settings.vllm, parking=settings.parking, adapter_root=adapter_root, ask=ask)
    if vllm.present:
        drivers["vllm"] = vllm
    return drivers


def node_of(
    id: str,
    settings: NodeagentSettings,
    drivers: Mapping[EngineName, Driver],
    gpus: Provider | None = None,
) -> Node:
    """The inventory of this machine as `node.started` tells it. Blocks. Raises BadInventory.

    `gpus` finds the cards that are not declared.
    """
    ways = ways_of(settings)
    return Node(
        id=id,
        running=True,
        started_at=utc_now(),
        host=socket.gethostname(),
        pid=os.getpid(),
        version=_version(),
        cards=cards_of(
            settings,
            ram_bytes=memory.ram_bytes(),
            cgroup_limit_bytes=memory.cgroup_limit_bytes(),
            found=gpus.cards() if gpus is not None else (),
        ),
        engines=tuple(told_of(drivers[name], settings, ways) for name in sorted(drivers)),
        allow_commands=settings.allow_commands,
    )


@asynccontextmanager
async def open_agent(
    *,
    node: Node,
    folder: Path,
    settings: NodeagentSettings,
    log: EventLog,
    wire: Wire,
    drivers: Mapping[EngineName, Driver],
    key_of: Callable[[str], str],
    secrets: SecretReader,
    gpus: Provider | None = None,
    files_folder: Path | None = None,
    mirror_token: str = "",
    prefix: str = "yard",
    times: Times = DEFAULT_TIMES,
    port_is_free: Callable[[int], bool] = memory.port_is_free,
    make_launcher: Callable[[Path, Path], Launcher] = Launcher,
) -> AsyncIterator[Agent]:
    """An agent on `folder` (its part of the data folder), ready to run. Raises Locked.

    `gpus` reads the cards of `node` that are not declared. `files_folder` holds fetched files, by default
    below `folder`; `mirror_token` is shown to mirrors.
    """
    loop = asyncio.get_running_loop()
    with locked(folder / "lock"):
        journal, remembered = await Journal.open(folder / "journal.sqlite")
        launcher = make_launcher(folder / "replicas", folder / "agent.sock")
        try:
            await launcher.open()
            actor = agent_user(node.id)
            reporter = Reporter(log, journal, node=node.id, actor=actor, retry_s=times.retry_s)
            books = Books(
                node=node.id,
                prefix=prefix,
                memory=remembered,
                book=PortBook(
                    first=settings.port_first,
                    last=settings.port_last,
                    rest_s=settings.port_rest_s,
                ),
                journal=journal,
                reporter=reporter,
                now=utc_now,
            )
            meter = meter_of(node, books, launcher, gpus, settings.card_look_s)
            gateways = Gateways(
                monotonic=loop.time,
                connected=lambda: log.connected,
                pin_s=settings.adapter_pin_s,
            )
            files = Files(
                files_folder or folder / "files",
                node=node.id,
                wire=wire,
                token=mirror_token,
                needed=lambda: needed_keys(books.held.values()) | adapter_files.kept(),
                spares_adapters=lambda: not adapter_files.settled(),
                settings=settings,
            )
            adapter_files = AdapterFiles(
                log=log, files=files, node=node, prefix=prefix, held=lambda: books.held
            )
            slots = SlotDesk(
                books=books,
                gateways=gateways,
                files=adapter_files,
                drivers=drivers,
                engine_key=key_of,
                epoch=lambda: reporter.epoch,
                now=utc_now,
                monotonic=loop.time,
                times=replace(times.slots, audit_s=settings.adapter_audit_s),
            )
            tools = Tools(
                books=books,
                processes=launcher,
                drivers=drivers,
                gateways=gateways,
                files=files,
                adapter_files=adapter_files,
                slots=slots,
                meter=meter,
                port_is_free=port_is_free,
                engine_key=key_of,
                secrets=secrets,
                now=utc_now,
                grace_s=settings.stop_grace_s,
                log_bytes=settings.engine_log_bytes,
                gateway_gone_s=settings.gateway_gone_s,
                listen_s=times.listen_s,
                parkbook=ParkBook(
                    ways_of(settings), enabled=settings.parking, again_s=settings.park_again_s
                ),
            )
            fleet = Fleet(
                node=node.id,
                books=books,
                reporter=reporter,
                tools=tools,
                allow_commands=settings.allow_commands,
                port_is_free=port_is_free,
                now=utc_now,
                settings=settings,
            )
            yield Agent(
                Around(
                    log=log,
                    wire=wire,
                    journal=journal,
                    reporter=reporter,
                    books=books,
                    fleet=fleet,
                    launches=launcher,
                    gateways=gateways,
                    tools=tools,
                    node=node,
                    prefix=prefix,
                    actor=actor,
                    infos=given_out(node.cards),
                    now=utc_now,
                    beacon_s=settings.beacon_s,
                    plan_grace_s=times.plan_grace_s,
                    retry_s=times.retry_s,
                    endings_after_s=times.endings_after_s,
                    endings_look_s=times.endings_look_s,
                    leave_s=times.leave_s,
                    beside=(
                        adapter_files.run,
                        slots.run,
                        partial(serve_slots, wire, slots, node.id),
                        *beside(
                            node.id,
                            folder,
                            wire=wire,
                            books=books,
                            fleet=fleet,
                            meter=meter,
                            settings=settings,
                        ),
                    ),
                )
            )
        finally:
            await launcher.close()
            if gpus is not None:
                gpus.close()
            await journal.close()


@dataclass(slots=True)
class Ending:
    """How the process should end, when that is not simply well or badly."""

    status: int = 0


async def run(service: Service, ending: Ending) -> None:
    """The service: SIGTERM leaves the engines, SIGINT stops them. Raises FatalError, SecretMissing."""
    settings = service.settings.nodeagent
    data = service.data
    user = service.nats_user(agent_user(service.id))
    secret = read_secret(node_secret_path(data, service.id))
    lines = Lines()
    drivers = drivers_of(settings, data / "files" / "sets", lines.ask)
    gpus = Nvml() if settings.gpus else None
    try:
        # Asking engines and the driver for their versions and cards loads libraries.
        node = await asyncio.to_thread(node_of, service.id, settings, drivers, gpus)
    except BadInventory as error:
        raise FatalError(str(error)) from error
    prefix = service.settings.yard.prefix
    connection = await connect(
        service.settings.nats,
        name=f"agent {service.id}",
        user=user,
        password=lambda: service.nats_password(user),
        inbox_prefix=inbox_prefix(user),
        prefix=prefix,
        first_wait_s=0.0,
    )
    try:
        async with open_agent(
            node=node,
            folder=data / "nodeagent",
            settings=settings,
            log=JetStreamLog(connection, source=f"/agent/{encode_token(service.id)}"),
            wire=JetStreamWire(connection),
            drivers=drivers,
            gpus=gpus,
            key_of=partial(engine_key, secret),
            files_folder=data / "files",
            mirror_token=mirror_token(secret, service.id),
            secrets=secrets_in(secrets_folder(data)),
            prefix=prefix,
            times=Times(endings_after_s=service.settings.controlplane.endings_after_s),
        ) as agent:
            await agent.run(service.stopping, lambda: service.signal == signal.SIGINT)
    except Deposed as error:
        ending.status = EXIT_DEPOSED
        raise FatalError(str(error)) from error
    except Locked as error:
        ending.status = EXIT_LOCKED
        raise FatalError(str(error)) from error
    except (Unreadable, JournalFault) as error:
        raise FatalError(str(error)) from error
    finally:
        lines.close()
        await connection.close()


def _version() -> str:
    try:
        return version("modelyard")
    except PackageNotFoundError:  # run from a source tree that was not installed
        return "unknown"
