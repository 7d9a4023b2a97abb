"""`yardctl up`: starts a whole yard on this machine and keeps it until Ctrl-C.

It only starts, watches and stops processes and prints where they are; whatever it knows of the yard it
learns through the API like any client.
"""

import asyncio
import contextlib
import errno
import fcntl
import json
import os
import signal
import socket
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, Final

import httpx

from controlplane.ctl.init import make_files
from controlplane.ctl.supervisor import (
    ServiceSpec,
    Supervisor,
    become_subreaper,
    bury_orphans,
    python_argv,
)
from controlplane.ctl.uplisten import gateway_host
from events.secrets import (
    api_token_path,
    read_secret,
    yard_id,
)
from events.server import ServerMissing, answers, command_line
from events.service import EXIT_DEPOSED, EXIT_LOCKED
from events.settings import SettingsError, load, read_yaml

NODE: Final = "local"
HOST: Final = "127.0.0.1"
REGISTRY_SECRETS: Final = ("HF_TOKEN", "HUGGING_FACE_HUB_TOKEN")
"""Of all services only the control plane asks the registry."""
EXIT_OK: Final = 0
EXIT_FAILED: Final = 1
READY_TIMEOUT_S: Final = 60.0
PATIENCE_S: Final = 15.0
"""How long the processes of an `up` that was killed may take to let go of their ports and folders."""

AGENT_FINAL: Final = {
    EXIT_DEPOSED: (
        "another agent runs this node now; a new start would take the node from it, and so on in"
        " turns. Stop that one, then start `yardctl up` again"
    ),
    EXIT_LOCKED: (
        "another agent works in this data folder. Stop that one, then start `yardctl up` again"
    ),
}


class UpError(Exception):
    """The yard cannot be started; the sentence says why and what to do."""


def free_ports(count: int, taken: Sequence[int] = ()) -> list[int]:
    """Ports nobody listens on now, all different and none of `taken`; another program may take one before
    it is used."""
    found: list[int] = []
    with contextlib.ExitStack() as held:
        # Each is held until all are found: a port that was let go may be given again at once.
        while len(found) < count:
            probe = held.enter_context(socket.socket())
            probe.bind((HOST, 0))
            port = int(probe.getsockname()[1])
            if port not in taken:
                found.append(port)
    return found


@dataclass(frozen=True, kw_only=True)
class UpOptions:
    """The flags of `yardctl up`. A port of 0 means any free one."""

    data: Path
    gateway_port: int = 8080
    api_port: int = 8081
    nats_port: int = 4222
    workers: int | None = None
    """Processes of the gateway; None: what the settings say."""
    catalog: Path | None = None
    config: Path | None = None
    more_gateways: int = 0
    more_controlplanes: int = 0
    """Further instances on free ports, for tests of several on one NATS."""
    free_ports: Callable[[int, Sequence[int]], list[int]] = free_ports
    """Where ports that nobody named come from: how many, and which it may not be."""


@dataclass(frozen=True, kw_only=True)
class Yard:
    """Where a started yard answers; written to DATA/yard.json."""

    yard_id: str
    data: Path
    gateway_port: int
    api_port: int
    nats_port: int
    monitoring_port: int
    more_gateway_ports: tuple[int, ...] = ()
    more_api_ports: tuple[int, ...] = ()

    @property
    def base_url(self) -> str:
        return f"http://{HOST}:{self.gateway_port}/v1"

    @property
    def api_url(self) -> str:
        return f"http://{HOST}:{self.api_port}"

    @property
    def nats_url(self) -> str:
        return f"nats://{HOST}:{self.nats_port}"


def lock_data(data: Path) -> IO[str]:
    """Holds the data folder for one `up`. Raises UpError when another has it."""
    data.mkdir(mode=0o700, parents=True, exist_ok=True)
    lock = (data / "up.lock").open("a+", encoding="ascii")
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        lock.close()
        raise UpError(
            f"another `yardctl up` runs on {data}; stop it first, or give another folder with --data"
        ) from error
    return lock


def _port_taken(port: int) -> bool:
    with socket.socket() as probe:
        # As the servers do: an address in TIME_WAIT does not count as taken.
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((HOST, port))
        except OSError as error:
            if error.errno == errno.EACCES:
                raise UpError(f"port {port} needs privileges; choose one above 1023") from error
            return True
        return False


async def _choose_ports(
    options: UpOptions, patience_s: float, say: Callable[[str], None]
) -> tuple[int, int, int]:
    """The three ports, free. Waits a little for those a killed `up` of this folder still holds."""
    loop = asyncio.get_running_loop()
    deadline = loop.time() + patience_s
    named = {
        "--gateway-port": options.gateway_port,
        "--api-port": options.api_port,
        "--nats-port": options.nats_port,
    }
    fixed = [p for p in named.values() if p]
    if len(set(fixed)) != len(fixed):
        raise UpError("--gateway-port, --api-port and --nats-port must differ")
    for flag, port in named.items():
        if port and patience_s > 0 and _port_taken(port):
            say(f"waiting for port {port}: what an earlier `up` started may still hold it")
        while port and _port_taken(port):
            if loop.time() > deadline:
                raise UpError(
                    f"port {port} is in use by another program; stop it or choose another with {flag}"
                    " (0 = any free port)"
                )
            await asyncio.sleep(0.1)
    free = iter(options.free_ports(len(named) - len(fixed), fixed))
    chosen = [p or next(free) for p in named.values()]
    return chosen[0], chosen[1], chosen[2]


async def _wait_for_agent_folder(data: Path, patience_s: float) -> None:
    """Returns once no agent holds the folder; that of a killed `up` needs a moment to leave."""
    loop = asyncio.get_running_loop()
    deadline = loop.time() + patience_s
    while _agent_works_in(data):
        if loop.time() > deadline:
            raise UpError(f"another agent works in {data / 'nodeagent'}; stop it first")
        await asyncio.sleep(0.1)


def _agent_works_in(data: Path) -> bool:
    try:
        lock = os.open(data / "nodeagent" / "lock", os.O_RDWR)
    except FileNotFoundError:
        return False
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(lock)
    return False


def _old_services(data: Path) -> bool:
    """Whether an earlier `up` of this folder left a yard.json, so that its ports may still be closing."""
    return (data / "yard.json").exists()


def write_yard_file(yard: Yard, pids: dict[str, int]) -> None:
    """DATA/yard.json, replaced whole: ids, ports, pids; read by yardctl."""
    document = {
        "yard_id": yard.yard_id,
        "gateway_port": yard.gateway_port,
        "api_port": yard.api_port,
        "nats_port": yard.nats_port,
        "monitoring_port": yard.monitoring_port,
        "up_pid": os.getpid(),
        "pids": pids,
    }
    draft = yard.data / ".yard.json.new"
    draft.write_text(json.dumps(document, indent=2) + "\n", encoding="utf-8")
    draft.replace(yard.data / "yard.json")


def _said_of_the_node(config: Path | None) -> frozenset[str]:
    """The settings of `nodeagent` that the file decides itself; else `up` chooses for its own node."""
    if config is None:
        return frozenset()
    try:
        document = read_yaml(config.read_text(encoding="utf-8"), str(config))
    except OSError as error:
        raise UpError(f"cannot read {config}: {error.strerror}") from error
    section = document.get("nodeagent") if isinstance(document, dict) else None
    return frozenset(section) if isinstance(section, dict) else frozenset()


def _listening_host(config: Path | None) -> str:
    """Where gateways listen, by the settings. Raises UpError."""
    try:
        return gateway_host(load(config).gateway.listen)
    except (SettingsError, ValueError) as error:
        raise UpError(str(error)) from error


def _specs(
    yard: Yard, options: UpOptions, configuration: Path, *, listening_host: str = HOST
) -> dict[str, ServiceSpec]:
    data = yard.data
    logs = data / "logs"
    config = ["--config", str(options.config.absolute())] if options.config else []
    common = [*config, "--data", str(data), "--nats", yard.nats_url]
    said = _said_of_the_node(options.config)
    agent_environment: dict[str, str] = {}
    if "allow_commands" not in said:
        agent_environment["YARD_NODEAGENT_ALLOW_COMMANDS"] = "true"
    if "mirror_folder" not in said:
        # One machine, one copy: the node links the mirror's files instead of fetching them.
        agent_environment["YARD_NODEAGENT_MIRROR_FOLDER"] = str(data / "mirror")

    def service(name: str, module: str, *arguments: str, **more: Any) -> ServiceSpec:
        return ServiceSpec(
            name=name,
            argv=python_argv(module, *common, *arguments),
            environment=more.pop("environment", {}),
            log=logs / f"{name}.log",
            withheld=() if module == "controlplane" else REGISTRY_SECRETS,
            holds_stops=True,
            **more,
        )

    return {
        "nats": ServiceSpec(
            name="nats",
            argv=command_line(
                configuration,
                data / "nats",  # the server makes `jetstream` in it
                host=HOST,
                port=yard.nats_port,
                monitoring_port=yard.monitoring_port,
            ),
            environment={},
            log=logs / "nats.log",
            withheld=REGISTRY_SECRETS,
        ),
        "controlplane": service(
            "controlplane",
            "controlplane",
            "--listen",
            f"{HOST}:{yard.api_port}",
            "--id",
            "cp-1",
            environment={"YARD_ID": yard.yard_id},
        ),
        **{
            f"controlplane-{n}": service(
                f"controlplane-{n}",
                "controlplane",
                "--listen",
                f"{HOST}:{port}",
                "--id",
                f"cp-{n}",
                environment={"YARD_ID": yard.yard_id},
            )
            for n, port in enumerate(yard.more_api_ports, start=2)
        },
        **{
            f"gateway-{n}": service(
                f"gateway-{n}",
                "gateway",
                "--listen",
                f"{listening_host}:{port}",
                "--id",
                f"gw-{n}",
                orphan_signal=signal.SIGKILL,
                stop_grace_s=35.0,
            )
            for n, port in enumerate(yard.more_gateway_ports, start=2)
        },
        # Draining would keep the port from the successor; a gateway whose supervisor was killed just ends.
        "gateway": service(
            "gateway",
            "gateway",
            "--listen",
            f"{listening_host}:{yard.gateway_port}",
            "--id",
            "gw-1",
            *([] if options.workers is None else ["--workers", str(options.workers)]),
            orphan_signal=signal.SIGKILL,
            stop_grace_s=35.0,
        ),
        "nodeagent": service(
            "nodeagent",
            "nodeagent",
            "--id",
            NODE,
            environment=agent_environment,
            stop_grace_s=30.0,
            final=AGENT_FINAL,
        ),
    }


async def _wait_for_node(yard: Yard, supervisor: Supervisor, timeout_s: float) -> None:
    """Returns once the API says that our node registered and the yard is ready. Raises UpError."""
    loop = asyncio.get_running_loop()
    deadline = loop.time() + timeout_s
    token = read_secret(api_token_path(yard.data))
    last = "the API did not answer"
    async with httpx.AsyncClient(
        base_url=yard.api_url,
        headers={"Authorization": f"Bearer {token}"},
        timeout=5.0,
        trust_env=False,  # the token must not leave for a proxy on the way to this machine
    ) as client:
        while loop.time() < deadline:
            if supervisor.given_up:
                raise UpError("a part of the yard ended for good")
            try:
                answer = await client.get("/v1/nodes")
                nodes = answer.json().get("data", []) if answer.status_code == 200 else []
                last = f"the API answered {answer.status_code}" if not nodes else last
                if any(n.get("id") == NODE and n.get("running") for n in nodes):
                    ready = await client.get("/readyz")
                    gateway = await client.get(f"http://{HOST}:{yard.gateway_port}/readyz")
                    if ready.status_code == 200 and gateway.status_code == 200:
                        return
                    last = f"not ready: {ready.text.strip()[:200]} {gateway.text.strip()[:200]}"
                elif answer.status_code == 200:
                    last = "no node registered"
            except (httpx.HTTPError, ValueError) as error:
                last = f"{error.__class__.__name__}: {error}"
            await asyncio.sleep(0.05)
    raise UpError(
        f"the yard did not become ready within {timeout_s:g} s ({last}); see the logs in {yard.data / 'logs'}"
    )


class RunningYard:
    """A started yard: its addresses and the supervisor that keeps it."""

    def __init__(self, yard: Yard, supervisor: Supervisor, say: Callable[[str], None]) -> None:
        self.yard = yard
        self.supervisor = supervisor
        self._say = say

    async def stop(self) -> None:
        """Engines first, then the services in the order that lets each say goodbye to the log."""
        names = self.supervisor.names
        ran = await self.supervisor.stop("nodeagent", stop_signal=signal.SIGINT)
        if "nodeagent" in names and not ran and "nodeagent" not in self.supervisor.given_up:
            # It was between two starts, and only an agent ends engines.
            ran = await self.supervisor.stop_anew("nodeagent", stop_signal=signal.SIGINT)
        if "nodeagent" in names and not ran:
            self._say(
                "no agent was there to stop engines; those that still run are adopted or stopped by"
                f" the next `yardctl up --data {self.yard.data}`"
            )
        for part in ("gateway", "controlplane", "nats"):
            await asyncio.gather(
                *(self.supervisor.stop(n) for n in names if n.partition("-")[0] == part)
            )
        with contextlib.suppress(OSError):  # a full disk has been told of while it mattered
            write_yard_file(self.yard, {})


async def start_yard(options: UpOptions, say: Callable[[str], None]) -> RunningYard:
    """Starts everything and returns once a node registered. On failure nothing is left running."""
    data = options.data
    host = _listening_host(options.config)
    patience = PATIENCE_S if _old_services(data) else 0.0
    await _wait_for_agent_folder(data, patience)
    gateway_port, api_port, nats_port = await _choose_ports(options, patience, say)
    more = options.more_gateways, options.more_controlplanes
    others = options.free_ports(1 + sum(more), (gateway_port, api_port, nats_port))
    configuration = make_files(data, [NODE])
    yard = Yard(
        yard_id=yard_id(data),
        data=data,
        gateway_port=gateway_port,
        api_port=api_port,
        nats_port=nats_port,
        monitoring_port=others[0],
        more_gateway_ports=tuple(others[1 : 1 + more[0]]),
        more_api_ports=tuple(others[1 + more[0] :]),
    )
    try:
        specs = _specs(yard, options, configuration, listening_host=host)
    except ServerMissing as error:
        raise UpError(str(error)) from error

    def changed() -> None:
        write_yard_file(yard, supervisor.pids)

    supervisor = Supervisor(say, changed)
    running = RunningYard(yard, supervisor, say)
    try:
        await supervisor.start(specs["nats"])
        if not await answers(HOST, yard.nats_port, 15.0):
            raise UpError(f"nats-server did not answer; see {data / 'logs' / 'nats.log'}")
        for name, spec in specs.items():
            if name != "nats":
                await supervisor.start(spec)
        await _wait_for_node(yard, supervisor, READY_TIMEOUT_S)
    except BaseException:
        await asyncio.shield(running.stop())
        raise
    return running


async def apply_catalog(yard: Yard, catalog: Path) -> None:
    """Runs `yardctl apply -f CATALOG` against the yard. Raises UpError with what it printed."""
    process = await asyncio.create_subprocess_exec(
        *python_argv("controlplane.ctl", "apply", "-f", str(catalog)),
        env={**os.environ, "YARD_DATA": str(yard.data)},
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
    )
    printed, _ = await process.communicate()
    text = printed.decode(errors="replace").strip()
    if process.returncode != 0:
        raise UpError(f"the catalog was not applied: {text}")
    if text:
        sys.stdout.write(text + "\n")


CURL: Final = (
    "curl -N {base}/chat/completions {key}-H 'Content-Type: application/json'"
    ' -d \'{{"model": "{model}", "stream": true,'
    ' "messages": [{{"role": "user", "content": "Say hello."}}]}}\''
)


KEY_HEADER: Final = '-H "Authorization: Bearer $KEY" '
KEY_HINT: Final = (
    "KEY is one of this yard's API keys: KEY=$(yardctl key create --name NAME --may-activate)"
)
"""Without `--may-activate` the line would be refused for a model that is not running."""


async def _asks_for_a_key(yard: Yard) -> bool:
    """Whether the gateway answers nobody without one."""
    async with httpx.AsyncClient(trust_env=False) as client:
        with contextlib.suppress(httpx.HTTPError):
            return (await client.get(f"{yard.base_url}/models")).status_code == 401
    return False


async def _first_model(yard: Yard) -> str | None:
    """A model the curl line can name; None: there is none, or nobody could be asked."""
    token = read_secret(api_token_path(yard.data))
    async with httpx.AsyncClient(
        headers={"Authorization": f"Bearer {token}"}, trust_env=False
    ) as client:
        with contextlib.suppress(httpx.HTTPError, ValueError):
            models = await client.get(f"{yard.api_url}/v1/models")
            demands = await client.get(f"{yard.api_url}/v1/activations")
            return model_to_ask(models.json().get("data", []), demands.json().get("data", []))
    return None


def model_to_ask(
    models: Sequence[Mapping[str, Any]], demands: Sequence[Mapping[str, Any]]
) -> str | None:
    """The first model that is not off; one whose last start was refused only when there is no other."""
    refused = {demand.get("model") for demand in demands if demand.get("phase") == "refused"}
    names = [str(model["name"]) for model in models if model.get("scaling", {}).get("max", 0) > 0]
    return next((name for name in names if name not in refused), names[0] if names else None)


async def run_up(options: UpOptions) -> int:
    """The whole command; returns the exit code."""

    def say(sentence: str) -> None:
        with contextlib.suppress(OSError, ValueError):  # a full disk, or nobody reads any more
            sys.stderr.write(sentence + "\n")
            sys.stderr.flush()

    try:
        lock = lock_data(options.data)
    except (UpError, OSError) as error:
        say(f"yardctl up: {error}")
        return EXIT_FAILED
    with lock:
        become_subreaper()
        loop = asyncio.get_running_loop()
        loop.add_signal_handler(signal.SIGCHLD, bury_orphans)
        stop = asyncio.Event()
        running: RunningYard | None = None

        def on_stop() -> None:
            if stop.is_set() and running is not None:
                say(
                    "stopping at once; engines that still run are adopted or stopped by the next `up`"
                )
                running.supervisor.kill_all()
            stop.set()

        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, on_stop)
        starting = asyncio.create_task(start_yard(options, say))
        stopping = asyncio.create_task(stop.wait())
        try:
            await asyncio.wait({starting, stopping}, return_when=asyncio.FIRST_COMPLETED)
            if not starting.done():
                starting.cancel()
                with contextlib.suppress(asyncio.CancelledError):
                    await starting
                return EXIT_OK
            running = starting.result()
            if options.catalog is not None:
                await apply_catalog(running.yard, options.catalog)
            model = await _first_model(running.yard)
            print(f"base URL   {running.yard.base_url}")
            print(f"API        {running.yard.api_url}")
            print(f"NATS       {running.yard.nats_url}")
            print(f"data       {running.yard.data}")
            print()
            key = KEY_HEADER if await _asks_for_a_key(running.yard) else ""
            if model is None:
                print(
                    "The catalog has no model that may run; serve one: yardctl model serve OWNER/REPO"
                )
            print(CURL.format(base=running.yard.base_url, model=model or "NAME", key=key))
            if key:
                print(KEY_HINT)
            print("\nCtrl-C stops all of it, engines too.", flush=True)
            await stopping
            say("stopping: engines, then services")
            await running.stop()
        except (UpError, OSError) as error:
            say(f"yardctl up: {error}")
            if running is not None:
                await running.stop()
            return EXIT_FAILED
        finally:
            stopping.cancel()
    return EXIT_OK
