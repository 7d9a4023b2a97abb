"""Parks an engine by two commands of its profile, run on the node: exit code 0 says it is done.

Only for nodes that allow commands. There is no shell, and of a command's words only `{pid}`, `{replica}` and
`{endpoint}` are filled in. A command must bear being run again: an agent that ends in between does that.
"""

import os
import re
from collections.abc import Mapping

from nodeagent.drivers import programs
from nodeagent.drivers.driver import inherited
from nodeagent.drivers.parkways import Parkable, ParkFault
from schemas.model import ParkWay

_WORD = re.compile(r"\{(pid|replica|endpoint)\}")


class HooksWay:
    """`command`: the profile's `park` and `resume`. The engine's key is in their environment alone."""

    name: ParkWay = "command"

    def __init__(self, environment: Mapping[str, str] | None = None) -> None:
        """`environment` is what commands inherit; by default this process's own."""
        self._environment = inherited(os.environ if environment is None else environment)

    async def park(self, engine: Parkable) -> None:
        await self._run(engine, engine.parking.park, "park")

    async def resume(self, engine: Parkable) -> None:
        await self._run(engine, engine.parking.resume, "resume")

    async def _run(self, engine: Parkable, command: tuple[str, ...], step: str) -> None:
        if not command:
            raise ParkFault(f"the profile has no {step} command")
        words = {
            "pid": str(engine.pid),
            "replica": engine.replica,
            "endpoint": engine.endpoint,
        }
        environment = {
            **self._environment,
            "YARD_PID": words["pid"],
            "YARD_REPLICA": words["replica"],
            "YARD_ENDPOINT": words["endpoint"],
            "YARD_MODEL": engine.model,
            "YARD_ENGINE_KEY": engine.key,
        }
        argv = tuple(_WORD.sub(lambda match: words[match[1]], word) for word in command)
        try:
            ran = await programs.run(argv, environment)
        except (OSError, ValueError) as error:  # ValueError: a NUL in a word
            raise ParkFault(f"the {step} command {argv[0]!r} cannot be run: {error}") from None
        if ran.status != 0:
            told = f": {ran.last_line}" if ran.last_line else ""
            raise ParkFault(f"the {step} command ended with {ran.status}{told}")
