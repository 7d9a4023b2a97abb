"""Asks engines directly whether they answer as their launch: before a snapshot's routes are used, after one
failed a request, and while its node is silent.

A probe only reads the engine's model list with the launch's key: it loads nothing and is no use of it.
"""

import asyncio
import contextlib
import logging
from collections.abc import Iterable

from gateway.activator import Spawn
from gateway.domain.routing import SERVING_PHASES
from gateway.endpoints import EngineKey
from gateway.gateway import Gateway
from gateway.http.client import EngineClient
from gateway.http.errors import EngineError, NoDescriptors
from schemas.replica import Replica

log = logging.getLogger("gateway.probe")

PATH = "/v1/models"
TIMEOUT_S = 3.0
FIRST_PAUSE_S = 0.05
LONGEST_PAUSE_S = 2.0
UNREACHABLE_EVERY_S = 5.0
AT_ONCE = 64
"""So many endpoints are probed side by side when a snapshot is loaded."""
FIRST_LOOK_S = 1.0
"""So long the routes of a snapshot may take to be asked before the gateway opens; the rest is asked meanwhile."""


class Prober:
    """One task per suspected replica, and one that watches replicas on silent nodes."""

    def __init__(
        self, gateway: Gateway, client: EngineClient, *, engine_key: EngineKey, spawn: Spawn
    ) -> None:
        self._gateway = gateway
        self._client = client
        self._engine_key = engine_key
        self._spawn = spawn
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._nodes_changed = asyncio.Event()

    async def passes(self, replica: Replica) -> bool:
        """Whether the engine at its endpoint answers, and as this launch.

        401 is another launch, 5xx not ready. Any other status is an HTTP server that took the key:
        not every engine has the route asked.
        """
        if replica.endpoint is None:
            return False
        key = self._engine_key(replica)
        headers = [] if key is None else [(b"authorization", b"Bearer " + key.encode())]
        try:
            async with asyncio.timeout(TIMEOUT_S):
                response = await self._client.request(replica.endpoint, "GET", PATH, headers)
                response.abort()
        except (EngineError, NoDescriptors, TimeoutError):
            return False
        return response.status != 401 and response.status < 500

    async def check_all(
        self, replicas: Iterable[Replica], *, within_s: float | None = None
    ) -> None:
        """Probes each once, ejecting those that do not answer; they are tried again in the background.

        Who has not answered `within_s` is ejected for now, and let in again when the answer comes.
        """
        slots = asyncio.Semaphore(AT_ONCE)
        asked: dict[asyncio.Task[None], Replica] = {}
        for replica in replicas:
            if replica.id not in self._tasks:
                task = self._spawn(self._check(replica, slots))
                self._tasks[replica.id] = task
                asked[task] = replica
        if not asked:
            return
        _, late = await asyncio.wait(asked, timeout=within_s)
        for task in late:
            self._gateway.suspect(asked[task], "refused_connection")

    async def _check(self, replica: Replica, slots: asyncio.Semaphore) -> None:
        try:
            async with slots:
                passed = await self.passes(replica)
        finally:
            # Whoever suspects it from now on must start another probe.
            del self._tasks[replica.id]
        if passed:
            self._gateway.trust(replica.id)
        else:
            self._gateway.suspect(replica, "refused_connection")

    def suspect(self, replica: Replica) -> None:
        """Probes until it passes or the replica is over; called each time it fails somebody."""
        if replica.id in self._tasks:
            return
        self._tasks[replica.id] = self._spawn(self._until_passed(replica))

    async def _until_passed(self, replica: Replica) -> None:
        pause_s = FIRST_PAUSE_S
        try:
            while self._still_known(replica):
                if await self.passes(replica):
                    log.info("replica answers again", extra={"replica": replica.id})
                    break
                await asyncio.sleep(pause_s)
                pause_s = min(pause_s * 2, LONGEST_PAUSE_S)
        finally:
            # Before `trust`: whoever is let go by it and fails again must start another probe.
            del self._tasks[replica.id]
        # It passed, or is over by the log: what was suspected is not there any more.
        self._gateway.trust(replica.id)

    def _still_known(self, replica: Replica) -> bool:
        table = self._gateway.table
        known = None if table is None else table.replicas.get(replica.id)
        return (
            known is not None
            and known.endpoint == replica.endpoint
            # A parked engine is left alone: some answer a probe while they sleep, some never would.
            and known.phase in SERVING_PHASES
        )

    def nodes_changed(self) -> None:
        """A node's standing changed: look at once instead of at the next round."""
        self._nodes_changed.set()

    async def watch_silent_nodes(self) -> None:
        """Probes replicas on unreachable nodes: they are routed to only while they answer."""
        while True:
            self._nodes_changed.clear()
            table = self._gateway.table
            if table is not None and any(
                n.reach == "unreachable" for n in table.nodestates.values()
            ):
                await self.check_all(
                    [
                        r
                        for r in list(table.replicas.values())
                        if table.may_route(r) and table.unreachable(r)
                    ]
                )
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(UNREACHABLE_EVERY_S):
                    await self._nodes_changed.wait()

    def close(self) -> None:
        for task in self._tasks.values():
            task.cancel()
