"""Drives vLLM: `vllm serve` under the catalog's name, with the launch's key, with adapters, asleep when it is parked.

How it is put to sleep and woken is `sleep.py`'s affair, how it loads adapters `lora.py`'s. Its development routes,
which parking needs, ask for no key: the engine listens on this machine alone and `PATHS` keeps gateways off them,
and off those that load adapters.
"""

import asyncio
import os
import re
import shutil
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Final

from nodeagent.drivers import asking, lora, metrics, routes
from nodeagent.drivers.asking import Ask
from nodeagent.drivers.driver import (
    AdapterDone,
    AdapterFault,
    Capabilities,
    EngineStart,
    ListedAdapter,
    SecretMissing,
    SecretReader,
    StartRefused,
    inherited,
    resolve,
)
from schemas import vllm_flags
from schemas.beacons import EngineCounters
from schemas.model import EngineName
from schemas.node import EngineInfo
from schemas.plan import Launch

PATHS: Final = (*routes.OPENAI, "/pooling", "/classify")
"""What a gateway may forward, of what an engine turns out to have: which of these depends on vLLM's version and on what
the model can do. /sleep, /wake_up, /collective_rpc, the adapter routes and the like stay the agent's."""

TELLING: Final = ("error: ", "Error: ", "ERROR ")
"""How vLLM marks why it does not start; argparse's own complaint comes first."""

KEY: Final = "VLLM_API_KEY"

_FIXED: Final = {"VLLM_NO_USAGE_STATS": "1"}
"""An engine tells nobody outside that it runs, and waits for nobody there."""

_COUNTERS_BYTES: Final = 1024 * 1024
_DEVELOPMENT: Final = "VLLM_SERVER_DEV_MODE"

RUNTIME: Final = "VLLM_ALLOW_RUNTIME_LORA_UPDATING"
"""Without it the routes that load adapters do not exist."""

PREFIXES: Final = "VLLM_RUNTIME_LORA_ALLOWED_PATH_PREFIXES"
"""Folders, as a search path, below which an adapter may lie; front ends that know it load nothing from elsewhere."""

_VERSION = re.compile(r"\d+\.\d+\S*")
_REPOSITORY = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
_TOLD_S: Final = 20.0
"""Bound of `vllm --version`, which imports all of it first."""


class VllmDriver:
    """Engine `vllm`. `vllm` is a path, or empty: looked up on PATH. `parking`: whether this node parks."""

    engine: EngineName = "vllm"
    capabilities = Capabilities(parking=True, adapters=True)

    def __init__(
        self,
        vllm: str = "",
        environment: Mapping[str, str] | None = None,
        *,
        parking: bool = True,
        adapter_root: Path | None = None,
        ask: Ask = asking.ask,
    ) -> None:
        """`environment` is what engines inherit; by default this process's own. `adapter_root` is the folder below
        which this node keeps adapters, and all of its disk that an engine may load one from. `ask` is what asks
        engines about adapters."""
        self._environment = inherited(os.environ if environment is None else environment)
        self._program = vllm or shutil.which("vllm", path=self._environment.get("PATH")) or ""
        self._parking = parking
        self._adapter_root = adapter_root
        self._ask = ask

    @property
    def present(self) -> bool:
        """Whether there is a vLLM on this node at all."""
        return bool(self._program) and os.access(self._program, os.X_OK)

    def info(self) -> EngineInfo:
        """The version, and the kind of card this build is for. It sleeps by itself where the node parks."""
        version = self._version()
        return EngineInfo(
            name=self.engine,
            version=f"vllm {version}" if version else "vllm",
            card_kinds=("cpu",) if "+cpu" in version else ("gpu",),
            park_ways=("sleep",) if self._parking else (),
            adapters=self.capabilities.adapters,
        )

    def prepare(
        self,
        launch: Launch,
        *,
        replica: str,
        host: str,
        port: int,
        key: str,
        secrets: SecretReader,
    ) -> EngineStart | StartRefused:
        """See `Driver.prepare`. The source is a folder or file of this node, or the name of a repository."""
        refused = _refuse_source(launch.source)
        if refused is not None:
            return refused
        wrong = vllm_flags.problems(launch.args)
        if launch.adapters:
            wrong += vllm_flags.lora_problems(launch.args, launch.adapters)
        if wrong:
            return StartRefused(code="invalid", sentence=wrong[0])
        if not self.present:
            where = f" at {self._program}" if self._program else " on its PATH"
            return StartRefused(code="invalid", sentence=f"this node has no vllm{where}")
        try:
            environment, secret_names = resolve(launch.env, secrets)
        except SecretMissing as error:
            return StartRefused(code="secret_missing", sentence=str(error))
        sleeps = self.sleeps(launch)
        environment = {**self._environment, **_FIXED, **environment, KEY: key}
        # A profile must not open the development routes of an engine that nobody will park.
        environment.pop(_DEVELOPMENT, None)
        if sleeps:
            environment[_DEVELOPMENT] = "1"
        # Nor the routes that load adapters from anywhere, into an engine nobody keeps account of.
        for name in (RUNTIME, PREFIXES):
            environment.pop(name, None)
        if launch.adapters:
            environment |= self._adapter_variables()
        return EngineStart(
            argv=(
                *(self._program, "serve", launch.source, *launch.args),
                # Ours last: of a flag given twice argparse keeps the last.
                *("--served-model-name", launch.model, "--host", host, "--port", str(port)),
                *(("--enable-sleep-mode",) if sleeps else ()),
                *vllm_flags.lora_args(launch.args, launch.adapters, launch.lora_rank),
            ),
            environment=environment,
            endpoint=f"http://{host}:{port}",
            port=port,
            ready="probe",
            paths=PATHS,
            has_key=True,
            secret_names=(*secret_names, KEY),
            telling=TELLING,
        )

    def sleeps(self, launch: Launch) -> bool:
        """Whether this launch is started so that it can be put to sleep: by default it is."""
        return self._parking and (launch.parking is None or launch.parking.way == "sleep")

    def _adapter_variables(self) -> dict[str, str]:
        root = str(self._adapter_root.absolute()) if self._adapter_root is not None else ""
        if not root or os.pathsep in root:
            # A list of folders cannot name that one. A front end with such a list then refuses every load and says
            # which variable is missing, instead of looking in folders that are not ours.
            return {RUNTIME: "1"}
        return {RUNTIME: "1", PREFIXES: root}

    async def probe(self, endpoint: str, key: str, *, health: str = "/health") -> bool:
        """It answers when its health is 200, and so is its list of models with this launch's key.

        Health asks for no key: whoever else listens there would be taken for it. It says both while asleep as
        well: never ask a parked one.
        """
        answers = await asyncio.gather(
            asking.get(endpoint, health, key), asking.get(endpoint, "/v1/models", key)
        )
        return all(answer is not None and answer.status == 200 for answer in answers)

    async def routes(self, endpoint: str, key: str, paths: tuple[str, ...]) -> tuple[str, ...]:
        """See `Driver.routes`."""
        return await routes.answered(endpoint, key, paths)

    async def counters(self, endpoint: str, key: str) -> EngineCounters:
        """Running and waiting, and whether it generated anything since, from the beginning of /metrics.

        What is told of adapters comes behind that and gets longer as long as the engine lives.
        """
        answer = await asking.ask(
            endpoint, "GET", "/metrics", key, limit_bytes=_COUNTERS_BYTES, cut=True
        )
        if isinstance(answer, asking.NoAnswer) or answer.status != 200:
            return EngineCounters()
        page = answer.body.decode(errors="replace")
        # Half a number is a wrong one.
        return metrics.counters(page[: page.rfind("\n") + 1] if answer.cut else page)

    async def load_adapter(
        self, endpoint: str, key: str, *, name: str, path: str, timeout_s: float
    ) -> AdapterDone | AdapterFault:
        """See `AdapterDriver`. `path` must lie below the driver's `adapter_root`."""
        return await lora.load(self._ask, endpoint, key, name=name, path=path, timeout_s=timeout_s)

    async def unload_adapter(
        self, endpoint: str, key: str, *, name: str, timeout_s: float
    ) -> AdapterDone | AdapterFault:
        """See `AdapterDriver`. Some front ends only forget the name: room in the engine's cache is not known by it."""
        return await lora.unload(self._ask, endpoint, key, name=name, timeout_s=timeout_s)

    async def list_adapters(
        self, endpoint: str, key: str
    ) -> tuple[ListedAdapter, ...] | AdapterFault:
        """See `AdapterDriver`. It lists names, whether their weights are in the engine's cache or not."""
        return await lora.listed(self._ask, endpoint, key)

    async def running_adapters(self, endpoint: str, key: str) -> frozenset[str] | None:
        """See `AdapterDriver`. A request that came since the engine's last step is not in it yet."""
        return await lora.running(self._ask, endpoint, key)

    async def loads_adapters(self, endpoint: str, key: str) -> bool | None:
        """See `AdapterDriver`."""
        return await lora.has_routes(self._ask, endpoint, key)

    def _version(self) -> str:
        """What is installed beside the program; else what it says itself, which takes it long."""
        if not self.present:
            return ""
        libraries = Path(self._program).resolve().parent.parent
        for found in sorted(libraries.glob("lib/python3*/site-packages/vllm-*.dist-info")):
            return found.name.removeprefix("vllm-").removesuffix(".dist-info")
        try:
            told = subprocess.run(  # noqa: S603 - the path is from this node's own configuration
                (self._program, "--version"),
                capture_output=True,
                timeout=_TOLD_S,
                check=False,
                env=self._environment,
            )
        except (OSError, subprocess.TimeoutExpired):
            return ""
        match = _VERSION.search(told.stdout.decode(errors="replace"))
        return match[0] if match is not None else ""


def _refuse_source(source: str) -> StartRefused | None:
    if not source:
        return StartRefused(code="source_missing", sentence="the entry names no source")
    if source.startswith("/"):
        if not os.path.exists(source):
            sentence = f"{source} does not exist on this node"
            return StartRefused(code="source_missing", sentence=sentence)
        return None
    if _REPOSITORY.fullmatch(source):
        return None
    sentence = f"{source!r} is neither a path of this node nor a repository's name"
    return StartRefused(code="source_invalid", sentence=sentence)
