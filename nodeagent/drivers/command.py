"""Drives any server given as a command line: puts port, host and weights into it, asks its health.

There is no shell between the catalog and the program, and no word the catalog did not spell out.
"""

import os
import re
import shutil
from collections.abc import Mapping
from typing import Final

from nodeagent.drivers import asking, metrics, routes
from nodeagent.drivers.driver import (
    Capabilities,
    EngineStart,
    SecretMissing,
    SecretReader,
    StartRefused,
    inherited,
    resolve,
)
from schemas.beacons import EngineCounters
from schemas.model import EngineName
from schemas.node import EngineInfo
from schemas.plan import Launch

PATHS: Final = routes.OPENAI
"""What a gateway may forward, of what a program turns out to have. Its other routes may be anything, so they stay
closed."""

_WORD = re.compile(r"\$\{(PORT|HOST|MODEL|SOURCE)\}")


class CommandDriver:
    """Engine `command`. `${PORT}` `${HOST}` `${MODEL}` `${SOURCE}` are filled in, nothing else."""

    engine: EngineName = "command"
    capabilities = Capabilities()

    def __init__(self, environment: Mapping[str, str] | None = None) -> None:
        """`environment` is what engines inherit; by default this process's own."""
        self._environment = inherited(os.environ if environment is None else environment)

    def info(self) -> EngineInfo:
        """It runs whatever it is given, so it has no version and no list of architectures."""
        return EngineInfo(name=self.engine, version="1")

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
        """See `Driver.prepare`. The key goes into `key_env`; without that the engine has none."""
        if not launch.command:
            return StartRefused(code="invalid", sentence="the profile has no command")
        words = {"PORT": str(port), "HOST": host, "MODEL": launch.model, "SOURCE": launch.source}
        if launch.source.startswith("/") and not os.path.exists(launch.source):
            sentence = f"{launch.source} does not exist on this node"
            return StartRefused(code="source_missing", sentence=sentence)
        try:
            environment, secret_names = resolve(launch.env, secrets)
        except SecretMissing as error:
            return StartRefused(code="secret_missing", sentence=str(error))
        environment = {**self._environment, **environment}
        if launch.key_env:
            environment[launch.key_env] = key
            secret_names = (*secret_names, launch.key_env)
        argv = tuple(_WORD.sub(lambda match: words[match[1]], word) for word in launch.command)
        if shutil.which(argv[0], path=environment.get("PATH")) is None:
            sentence = f"the program {argv[0]!r} is not on this node or cannot be run"
            return StartRefused(code="invalid", sentence=sentence)
        return EngineStart(
            argv=argv,
            environment=environment,
            endpoint=f"http://{host}:{port}",
            port=port,
            ready="probe",
            paths=PATHS,
            has_key=bool(launch.key_env),
            secret_names=secret_names,
        )

    async def probe(self, endpoint: str, key: str, *, health: str = "/health") -> bool:
        """It answers when GET `health` is 200."""
        answer = await asking.get(endpoint, health, key)
        return answer is not None and answer.status == 200

    async def routes(self, endpoint: str, key: str, paths: tuple[str, ...]) -> tuple[str, ...]:
        """See `Driver.routes`."""
        return await routes.answered(endpoint, key, paths)

    async def counters(self, endpoint: str, key: str) -> EngineCounters:
        """From /metrics, for those commands that start an engine we know by its names."""
        answer = await asking.get(endpoint, "/metrics", key)
        if answer is None or answer.status != 200:
            return EngineCounters()
        return metrics.counters(answer.body.decode(errors="replace"))
