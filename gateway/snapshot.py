"""Keeps `routes.json`: the table in a file, so that a gateway started while NATS is away can serve.

The file is a cache. It is replaced whole, by rename, at most once in `EVERY_S`; one that cannot be read
is treated like none. What is in it is gateway/domain/snapshot.py's affair.
"""

import asyncio
import logging
import os
from pathlib import Path

from events.log import StreamIdentity
from gateway.domain.snapshot import BadSnapshot, Snapshot, decode, encode, take
from gateway.gateway import Gateway
from gateway.metrics import Metrics

log = logging.getLogger("gateway.snapshot")

EVERY_S = 5.0
FILE = "routes.json"


def snapshot_path(data: Path, gateway_id: str) -> Path:
    return data / "gateway" / gateway_id / FILE


def read_snapshot(path: Path) -> Snapshot | None:
    """The snapshot, or None when there is none that can be read (said in the log). Blocks on the disk."""
    try:
        return decode(path.read_bytes())
    except FileNotFoundError:
        return None
    except (OSError, BadSnapshot) as error:
        log.warning("snapshot not used", extra={"path": str(path), "why": str(error)})
        return None


def write_snapshot(path: Path, snapshot: Snapshot) -> None:
    """Replaces the file whole or leaves it as it was. Raises OSError. Blocks on the disk."""
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    draft = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        with open(draft, "wb", opener=_for_us_alone) as file:
            file.write(encode(snapshot))
            file.flush()
            os.fsync(file.fileno())
        draft.replace(path)
    finally:
        draft.unlink(missing_ok=True)


def _for_us_alone(path: str, flags: int) -> int:
    return os.open(path, flags, 0o600)


class SnapshotWriter:
    """One task, `run`, and a last write by `write_now`."""

    def __init__(
        self, gateway: Gateway, path: Path, metrics: Metrics, *, every_s: float = EVERY_S
    ) -> None:
        self._gateway = gateway
        self._path = path
        self._metrics = metrics
        self._every_s = every_s
        self._written: tuple[str, int] | None = None
        self._identity: StreamIdentity | None = None
        self._writing = asyncio.Lock()
        """The last write may come while a regular one is under way, and a file has one draft."""

    def identify(self, identity: StreamIdentity) -> None:
        """Which stream the table was read from; until it is known nothing is written."""
        self._identity = identity

    async def run(self) -> None:
        """Writes whenever the table moved, until cancelled."""
        while True:
            await self.write_now()
            await asyncio.sleep(self._every_s)

    async def write_now(self) -> None:
        """Writes unless nothing changed; a table from a snapshot is never written back."""
        async with self._writing:
            table, identity = self._gateway.table, self._identity
            if table is None or identity is None or not self._gateway.synced:
                return
            now_at = (identity.stream_id, table.position)
            if now_at == self._written:
                return
            snapshot = take(table, stream_id=identity.stream_id, stream_created=identity.created)
            try:
                # The file and its fsync go to a thread; taking the snapshot does not, the table is ours.
                await asyncio.to_thread(write_snapshot, self._path, snapshot)
            except OSError as error:
                self._metrics.snapshot_failed.inc()
                told = {"path": str(self._path), "why": str(error)}
                log.warning("snapshot not written", extra=told)
            else:
                self._written = now_at
