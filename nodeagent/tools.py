"""What every supervisor of a node works with, and what of the launcher they need. It holds no behaviour."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from datetime import datetime
from typing import Protocol

from nodeagent.adapterfiles import AdapterFiles
from nodeagent.beacons import Gateways
from nodeagent.books import Books
from nodeagent.cards.provider import Meter
from nodeagent.drivers.driver import Driver, EngineStart, SecretReader
from nodeagent.files.fetches import Files
from nodeagent.launching import Ended, LogPart, Running, StopResult
from nodeagent.parkbook import ParkBook
from nodeagent.slotdesk import SlotDesk
from schemas.model import EngineName

HOST = "127.0.0.1"
"""Where engines listen: this machine alone."""


class Processes(Protocol):
    """What the supervisor needs of `nodeagent.launching.Launcher`."""

    async def start(
        self, replica: str, start: EngineStart, *, grace_s: float, log_bytes: int
    ) -> Running | Ended: ...

    async def stop(self, replica: str, grace_s: float) -> StopResult: ...

    async def survivors(self, replica: str) -> tuple[int, ...]: ...

    async def memory_bytes(self, replica: str) -> int: ...

    async def is_anothers(self, replica: str, port: int) -> bool: ...

    async def read_log(
        self, replica: str, offset: int | None = None, max_bytes: int = 65536
    ) -> LogPart: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Tools:
    """What every supervisor of a node shares."""

    books: Books
    processes: Processes
    drivers: Mapping[EngineName, Driver]
    gateways: Gateways
    files: Files
    adapter_files: AdapterFiles
    slots: SlotDesk
    meter: Meter
    port_is_free: Callable[[int], bool]
    engine_key: Callable[[str], str]
    secrets: SecretReader
    now: Callable[[], datetime]
    grace_s: float
    log_bytes: int
    gateway_gone_s: float
    listen_s: float
    parkbook: ParkBook = field(default_factory=ParkBook)
