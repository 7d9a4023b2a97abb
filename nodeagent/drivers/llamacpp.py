"""Drives llama.cpp: the one in the xllamacpp wheel in a process of ours, or a llama-server by path.

Either runs under the catalog's name for the model, with counters on, and with the launch's key. It
must not import the engine: the agent would carry its memory, and a fault in it would take the agent.
"""

import importlib.metadata
import importlib.util
import json
import os
import re
import subprocess
import sys
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Final

from nodeagent.drivers import asking, metrics, routes
from nodeagent.drivers.architectures import architectures_of
from nodeagent.drivers.driver import (
    GGUF_MAGIC,
    Capabilities,
    EngineStart,
    SecretMissing,
    SecretReader,
    StartRefused,
    inherited,
    resolve,
)
from schemas import llamacpp_flags
from schemas.beacons import EngineCounters
from schemas.model import EngineName
from schemas.node import EngineInfo
from schemas.plan import Launch

PATHS: Final = (
    "/v1/chat/completions",
    "/v1/completions",
    "/v1/responses",
    "/v1/responses/input_tokens",
    "/v1/messages",
    "/v1/messages/count_tokens",
    "/tokenize",
    "/detokenize",
    "/v1/chat/completions/input_tokens",
    "/completion",
    "/infill",
    "/apply-template",
)
"""What a gateway may forward, of every llama.cpp; /metrics, /slots, /props and the rest are the agent's alone. It keeps
no responses, so there is no path with an id in it."""

EMBEDDING_PATHS: Final = ("/v1/embeddings", "/embedding")
"""With --embeddings besides: without, these are there and answer nothing but that they are off."""

RERANKING_PATHS: Final = ("/v1/rerank", "/rerank")
"""With --reranking besides, which switches embeddings on as well."""

AUDIO_PATHS: Final = ("/v1/audio/transcriptions",)
"""With a projector (--mmproj) besides; one for pictures alone says so itself."""

TELLING: Final = ("error loading model: ", "couldn't bind", "failed to ", " E ")
"""How llama.cpp marks why it does not start, before it says that it exits."""

EMBEDDED_KEY: Final = "YARD_ENGINE_KEY"
SERVER_KEY: Final = "LLAMA_API_KEY"

_CHILD = Path(__file__).parents[1] / "engines" / "llamacpp_server.py"
_DEVICES = Path(__file__).parents[1] / "engines" / "llamacpp_devices.py"

_GPU_TYPES: Final = ("GGML_BACKEND_DEVICE_TYPE_GPU", "GGML_BACKEND_DEVICE_TYPE_IGPU")
_LISTED: Final = re.compile(r"\s+(?P<name>[A-Za-z]+)\d*: .*\((?P<mib>\d+) MiB, \d+ MiB free\)\s*")
"""A device as `llama-server --list-devices` prints it."""

_DEFAULTS: Final = {"cache_ram_mib": 0}
"""Unless the profile says otherwise, nothing grows beside the memory that was leased: by itself llama.cpp keeps
up to 8 GiB of past prompts."""

_NO_GPU: Final = ("CPU", "BLAS", "RPC")
"""Names of listed devices that are no card of this node."""

_NO_DEBUGGER: Final = {"GGML_NO_BACKTRACE": "1"}
"""An engine that aborts would start gdb, where there is one, to print its stack, and may wait for it for ever:
it has to end, so that its failure is seen."""


class LlamacppDriver:
    """Engine `llamacpp`. `llama_server` is a path to run instead of the embedded one."""

    engine: EngineName = "llamacpp"
    capabilities = Capabilities()

    def __init__(
        self, llama_server: str = "", environment: Mapping[str, str] | None = None
    ) -> None:
        """`environment` is what engines inherit; by default this process's own."""
        self._llama_server = llama_server
        self._environment = inherited(os.environ if environment is None else environment)

    def info(self) -> EngineInfo:
        """The version of the engine that will run, the architectures this build loads (none told when they
        cannot be found out), and whether it sees a GPU here."""
        with ThreadPoolExecutor(1) as beside:
            sees_gpu = beside.submit(self._sees_gpu)
            return EngineInfo(
                name=self.engine,
                version=self._version(),
                architectures=architectures_of(self._libraries(), _known_architectures()),
                card_kinds=("cpu", "gpu") if sees_gpu.result() else ("cpu",),
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
        """See `Driver.prepare`. The source must be a GGUF file on this node."""
        refused = _refuse_source(launch.source)
        if refused is not None:
            return refused
        try:
            environment, secret_names = resolve(launch.env, secrets)
        except SecretMissing as error:
            return StartRefused(code="secret_missing", sentence=str(error))
        settings, problems = llamacpp_flags.read(launch.args)
        if self._llama_server:
            argv, key_name = self._server_argv(launch, host, port), SERVER_KEY
        else:
            if problems:
                return StartRefused(code="invalid", sentence=problems[0].sentence)
            argv, key_name = _embedded_argv(launch, host, port, settings), EMBEDDED_KEY
        return EngineStart(
            argv=argv,
            environment={**self._environment, **_NO_DEBUGGER, **environment, key_name: key},
            endpoint=f"http://{host}:{port}",
            port=port,
            ready="probe" if self._llama_server else "pipe",
            paths=_paths(settings),
            has_key=True,
            secret_names=(*secret_names, key_name),
            telling=TELLING,
        )

    async def probe(self, endpoint: str, key: str, *, health: str = "/health") -> bool:
        """It answers when its health is 200: 503 while it loads."""
        answer = await asking.get(endpoint, health, key)
        return answer is not None and answer.status == 200

    async def routes(self, endpoint: str, key: str, paths: tuple[str, ...]) -> tuple[str, ...]:
        """See `Driver.routes`. A `llama-server` may be older than the wheel and lack some."""
        return await routes.answered(endpoint, key, paths)

    async def counters(self, endpoint: str, key: str) -> EngineCounters:
        """Processing and deferred, and whether it decoded anything since, from /metrics."""
        answer = await asking.get(endpoint, "/metrics", key)
        if answer is None or answer.status != 200:
            return EngineCounters()
        return metrics.counters(answer.body.decode(errors="replace"))

    def _server_argv(self, launch: Launch, host: str, port: int) -> tuple[str, ...]:
        """The profile's arguments first: of a flag given twice llama-server keeps the last."""
        ours = ("--model", launch.source, "--alias", launch.model, "--host", host)
        return (
            *(self._llama_server, *launch.args, *ours),
            *("--port", str(port), "--metrics", "--slots"),
        )

    def _libraries(self) -> list[Path]:
        """Where the table of architectures may be: the library, or the program it is linked into."""
        if not self._llama_server:
            spec = importlib.util.find_spec("xllamacpp")
            folder = Path(spec.origin).parent if spec is not None and spec.origin else Path()
            return sorted(folder.glob("*.so"))
        program = Path(self._llama_server).resolve()
        folders = (program.parent, program.parent.parent / "lib")
        return [*(lib for folder in folders for lib in sorted(folder.glob("libllama.*"))), program]

    def _version(self) -> str:
        if not self._llama_server:
            return f"xllamacpp {importlib.metadata.version('xllamacpp')}"
        try:
            told = self._said(self._llama_server, "--version")
        except (OSError, subprocess.TimeoutExpired) as error:
            return f"llama-server (unknown: {error})"
        lines = told.splitlines()
        found = [line for line in lines if line.startswith("version:")]
        return f"llama-server {found[0].partition(':')[2].strip()}" if found else "llama-server"

    def _sees_gpu(self) -> bool:
        """Whether the engine itself lists a GPU. One that cannot say has none that anybody could use."""
        try:
            if self._llama_server:
                return _lists_gpu(self._said(self._llama_server, "--list-devices"))
            told = self._said(sys.executable, "-I", str(_DEVICES)).splitlines()
            return any(kind in _GPU_TYPES for kind in json.loads(told[-1]))
        except (OSError, subprocess.TimeoutExpired, ValueError, IndexError):
            return False

    def _said(self, *argv: str) -> str:
        """What a short-lived program of the engine's printed. Raises OSError, TimeoutExpired."""
        told = subprocess.run(  # noqa: S603 - paths from this node's own configuration
            argv, capture_output=True, timeout=10, check=False, env=self._environment
        )
        return (told.stderr + b"\n" + told.stdout).decode(errors="replace")


def _known_architectures() -> set[str]:
    """The names the gguf package knows. Read out of its one file that holds them: the package itself brings
    numpy, which takes as long as the rest of the agent's start."""
    package = importlib.util.find_spec("gguf")
    assert package is not None, "a dependency of ours"
    assert package.origin is not None
    path = Path(package.origin).with_name("constants.py")
    found = importlib.util.spec_from_file_location("gguf_constants", path)
    assert found is not None
    assert found.loader is not None
    constants = importlib.util.module_from_spec(found)
    found.loader.exec_module(constants)
    return set(constants.MODEL_ARCH_NAMES.values())


def _paths(settings: tuple[llamacpp_flags.Setting, ...]) -> tuple[str, ...]:
    """What an engine that is started so answers."""
    given = {setting.path: setting.value for setting in settings}
    return (
        *PATHS,
        *(EMBEDDING_PATHS if given.get("embedding") else ()),
        *(RERANKING_PATHS if given.get("pooling_type") == llamacpp_flags.POOLING["rank"] else ()),
        *(AUDIO_PATHS if "mmproj.path" in given else ()),
    )


def _lists_gpu(told: str) -> bool:
    """Whether a device list names a GPU with memory of its own."""
    listed = (_LISTED.fullmatch(line) for line in told.splitlines())
    return any(
        found is not None and found["name"].upper() not in _NO_GPU and int(found["mib"]) > 0
        for found in listed
    )


def _embedded_argv(
    launch: Launch, host: str, port: int, settings: tuple[llamacpp_flags.Setting, ...]
) -> tuple[str, ...]:
    """Our child gets attributes, not flags, so it needs nothing of ours to import."""
    attributes = {**_DEFAULTS, **{setting.path: setting.value for setting in settings}}
    return (
        *(sys.executable, "-I", str(_CHILD)),
        *("--model", launch.source, "--alias", launch.model, "--host", host, "--port", str(port)),
        *("--set", json.dumps(attributes)),
    )


def _refuse_source(source: str) -> StartRefused | None:
    """Why these weights cannot be loaded here; looks at the first four bytes, no more."""
    if not source:
        return StartRefused(code="source_missing", sentence="the entry names no source")
    try:
        with open(source, "rb") as file:
            magic = file.read(len(GGUF_MAGIC))
    except FileNotFoundError:
        sentence = f"{source} does not exist on this node"
        return StartRefused(code="source_missing", sentence=sentence)
    except OSError as error:
        sentence = f"{source} cannot be read on this node: {error.strerror}"
        return StartRefused(code="source_missing", sentence=sentence)
    if magic != GGUF_MAGIC:
        sentence = f"{source} is not a GGUF file (it begins with {magic!r})"
        return StartRefused(code="source_invalid", sentence=sentence)
    return None
