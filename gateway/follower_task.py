"""Follows the log into the gateway's table: a first pass into a new one, a swap when it is whole, then live.

It never waits for anything but the log and never touches requests; what a batch means for them is
gateway/gateway.py's affair.
"""

import logging
from collections.abc import Callable

from events.log import Batch, EventLog, LogError, StreamIdentity
from gateway.domain.table import NOUNS, Table
from gateway.gateway import Gateway

log = logging.getLogger("gateway.follower")


def filters(prefix: str) -> tuple[str, ...]:
    """The subjects a gateway reads."""
    return tuple(f"{prefix}.evt.{noun}.>" for noun in sorted(NOUNS))


class TableFollower:
    """One task, `run`. `connected` is what the last batch said."""

    def __init__(
        self,
        gateway: Gateway,
        events: EventLog,
        *,
        prefix: str,
        on_synced: Callable[[], None],
        on_identity: Callable[[StreamIdentity], None],
    ) -> None:
        self._gateway = gateway
        self._events = events
        self._prefix = prefix
        self._on_synced = on_synced
        self._on_identity = on_identity
        self._building: Table | None = Table()
        self.connected = False

    async def run(self) -> None:
        """Follows until cancelled."""
        follower = self._events.follow(filters(self._prefix))
        try:
            while True:
                await self.take(await follower.next())
        finally:
            await follower.close()

    async def take(self, batch: Batch) -> None:
        """Applies one batch.

        1. it only reports a lost connection: the table stays as it is
        2. `reset`: the history was replaced; a new table is begun beside the old one
        3. while a new table is being built it is filled, and swapped in once nothing is pending
        4. otherwise the batch is folded into the table in use and its effects are carried out
        """
        self.connected = batch.connected
        if not batch.connected:  # 1
            log.warning("connection to the log lost")
            return
        if batch.reset:  # 2
            log.warning("the log's history was replaced; reading it afresh")
            self._building = Table()
        building = self._building
        if building is not None:  # 3
            for item in batch.items:
                building.apply(item)
            building.advance(batch.position)
            if batch.synced:
                self._building = None
                self._gateway.install(building, synced=True)
                log.info(
                    "table synced",
                    extra={
                        "position": building.position,
                        "models": len(building.models),
                        "replicas": len(building.replicas),
                    },
                )
                self._on_synced()
                await self._identify()
            return
        table = self._gateway.table
        assert table is not None, "a table was installed"
        changes = [c for item in batch.items if (c := table.apply(item)) is not None]  # 4
        self._gateway.apply(changes, position=batch.position)

    async def _identify(self) -> None:
        """Which stream this was, for the snapshot; unknown now is no reason to stop following."""
        try:
            self._on_identity(await self._events.identity())
        except LogError as error:
            log.warning("stream identity not read", extra={"why": str(error)})
