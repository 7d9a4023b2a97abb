"""What tests of launches share: an id of their own, a launcher that leaves nothing behind."""

import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from uuid import uuid4

from nodeagent.drivers.driver import SecretMissing
from nodeagent.launching import Launcher

REPLICA = f"r-{os.getpid()}-{uuid4().hex[:8]}"
"""An id of this test run alone: a launch is found by its id, so two runs on one machine that share
one would find, and end, each other's engines."""


def no_secrets(name: str) -> str:
    """A secret reader of a node that has none."""
    raise SecretMissing(f"no secret {name!r} here")


@asynccontextmanager
async def launcher(folder: Path) -> AsyncIterator[Launcher]:
    """An open launcher in `folder`; what it still runs at the end is killed."""
    made = Launcher(folder / "replicas", folder / "agent.sock")
    await made.open()
    try:
        yield made
    finally:
        for replica in made.found():
            if await made.adopt(replica) is not None:
                await made.stop(replica, 0.0)
        await made.close()
