"""Follows the log into the gateway's table: a first pass into a new one, a swap when it is whole, then live.

It never waits for anything but the log and never touches requests; what a batch means for them is
gateway/gateway.py's affair. An event that cannot be folded is a fault of this program: the table stays as it was
before, and the gateway serves from it.
"""

import logging
from collections.abc import Callable, Sequence

from events.log import Batch, Broken, EventLog, LogError, Recorded, StreamIdentity
from gateway.domain.table import NOUNS, Change, Table
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
        on_stopped: Callable[[], None] = lambda: None,
    ) -> None:
        """`on_stopped`: an event could not be folded, and none is from now on; `Gateway.stopped` says which."""
        self._gateway = gateway
        self._events = events
        self._prefix = prefix
        self._on_synced = on_synced
        self._on_identity = on_identity
        self._on_stopped = on_stopped
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
        5. once a fold raised nothing is folded any more: what came before it has its effects, and the table in use,
           or the one from the snapshot, goes on serving
        """
        self.connected = batch.connected
        if not batch.connected:  # 1
            log.warning("connection to the log lost")
            return
        if self._gateway.stopped is not None:  # 5
            return
        if batch.reset:  # 2
            log.warning("the log's history was replaced; reading it afresh")
            self._building = Table()
        building = self._building
        if building is not None:  # 3
            self._fold(building, batch.items)
            if self._gateway.stopped is not None:  # 5
                return
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
        changes = self._fold(table, batch.items)  # 4
        whole = self._gateway.stopped is None
        self._gateway.apply(changes, position=batch.position if whole else table.position)

    def _fold(self, table: Table, items: Sequence[Recorded | Broken]) -> list[Change]:
        """What the items changed, up to one that cannot be folded."""
        changes: list[Change] = []
        for item in items:
            before = table.position
            try:
                change = table.apply(item)
            except Exception as error:
                table.position = before
                log.critical(
                    "the table stopped",
                    exc_info=error,
                    extra={"seq": item.seq, "subject": item.subject},
                )
                self._gateway.stop_reading(
                    f"folding event {item.seq} on {item.subject} failed: {error!r}"
                )
                self._on_stopped()
                break
            if change is not None:
                changes.append(change)
        return changes

    async def _identify(self) -> None:
        """Which stream this was, for the snapshot; unknown now is no reason to stop following."""
        try:
            self._on_identity(await self._events.identity())
        except LogError as error:
            log.warning("stream identity not read", extra={"why": str(error)})
