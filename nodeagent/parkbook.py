"""What all replicas of a node share when they are parked: the ways, one park or resume per card at a time, and what
earlier ones taught.

It remembers and serialises; it decides nothing (`domain/parking.py`) and touches no engine. What it learned is
gone with its process: the next agent then counts a first park as worth trying, as for a new model.
"""

import asyncio
import os
import shutil
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass

from msgspec.structs import replace

from nodeagent.drivers.checkpoint import CheckpointWay
from nodeagent.drivers.driver import Capabilities, Driver
from nodeagent.drivers.hooks import HooksWay
from nodeagent.drivers.parkways import Way
from nodeagent.drivers.sleep import SleepWay
from schemas.model import ParkWay
from schemas.node import EngineInfo
from schemas.replica import Replica
from schemas.settings import NodeagentSettings


def ways_of(settings: NodeagentSettings) -> dict[ParkWay, Way]:
    """The ways this node has: an engine's own sleep; cuda-checkpoint if it is installed; commands if allowed."""
    ways: dict[ParkWay, Way] = {"sleep": SleepWay()}
    program = settings.cuda_checkpoint or shutil.which("cuda-checkpoint") or ""
    if program and os.access(program, os.X_OK):
        ways["checkpoint"] = CheckpointWay(program)
    if settings.allow_commands:
        ways["command"] = HooksWay()
    return ways


def ways_for(capabilities: Capabilities, ways: Mapping[ParkWay, Way]) -> tuple[ParkWay, ...]:
    """Those of `ways` an engine with these capabilities can be parked by, by name."""
    return tuple(name for name in sorted(ways) if name != "sleep" or capabilities.parking)


def told_of(driver: Driver, settings: NodeagentSettings, ways: Mapping[ParkWay, Way]) -> EngineInfo:
    """An engine as the inventory tells of it: with the ways this node parks it by, and whether it loads adapters.

    Blocks as its `info`.
    """
    found = ways_for(driver.capabilities, ways) if settings.parking else ()
    return replace(driver.info(), park_ways=found, adapters=driver.capabilities.adapters)


@dataclass(slots=True)
class Learned:
    """What was measured of one model's copies here: None is unknown. `failed_at` is monotonic."""

    ram_bytes: int | None = None
    resume_s: float | None = None
    failed_at: float | None = None


class ParkBook:
    """One per agent, on its event loop."""

    def __init__(
        self,
        ways: Mapping[ParkWay, Way] | None = None,
        *,
        enabled: bool = True,
        again_s: float = 600.0,
    ) -> None:
        """`enabled`: whether this node parks; `again_s`: how long a model whose park failed is stopped instead."""
        self.ways: Mapping[ParkWay, Way] = ways or {}
        self.enabled = enabled
        self.again_s = again_s
        self._learned: dict[tuple[str, str, str], Learned] = {}
        self._cards: dict[str, asyncio.Lock] = {}
        self._wakes: dict[str, Callable[[], None]] = {}

    def learned(self, replica: Replica) -> Learned:
        """What is known of copies of this model under this profile, to be read and added to."""
        key = (replica.model, replica.profile, replica.revision)
        return self._learned.setdefault(key, Learned())

    @asynccontextmanager
    async def alone_on(self, cards: tuple[str, ...]) -> AsyncIterator[None]:
        """One park or resume per card: one engine falling asleep while another wakes there has crashed both."""
        async with AsyncExitStack() as stack:
            # Always in the same order, so that two that share two cards cannot wait for one another.
            for card in sorted(set(cards)):
                await stack.enter_async_context(self._cards.setdefault(card, asyncio.Lock()))
            yield

    def join(self, replica: str, wake: Callable[[], None]) -> None:
        """`wake` has the replica's supervisor look again."""
        self._wakes[replica] = wake

    def leave(self, replica: str) -> None:
        """Nobody supervises it any more."""
        self._wakes.pop(replica, None)

    def wake(self, replica: str) -> None:
        """Has whoever supervises it look again."""
        wake = self._wakes.get(replica)
        if wake is not None:
            wake()
