"""Parks any CUDA process by NVIDIA's cuda-checkpoint: all it has on its cards goes to RAM, and back to the same
addresses.

NVIDIA does not promise a good state after a failure, so nothing is undone here: whatever fails, the process is
lost. All processes are locked before the first is checkpointed, so one that cannot be has cost the others nothing.
"""

import os
from collections.abc import Mapping
from typing import Final

from nodeagent.drivers import programs
from nodeagent.drivers.driver import inherited
from nodeagent.drivers.parkways import Parkable, ParkFault
from schemas.model import ParkWay

LOCK_S: Final = 10.0
"""Longest wait for a process to be done with its calls to the driver, whatever the profile allows in all."""


class CheckpointWay:
    """`checkpoint`: lock, checkpoint; restore, unlock, of each process of the engine that uses a card."""

    name: ParkWay = "checkpoint"

    def __init__(self, program: str, environment: Mapping[str, str] | None = None) -> None:
        """`program` is the path of cuda-checkpoint on this node."""
        self._program = program
        self._environment = inherited(os.environ if environment is None else environment)

    async def park(self, engine: Parkable) -> None:
        users = await self._states(engine)
        if not users:
            raise ParkFault("none of its processes uses a card as far as cuda-checkpoint can tell")
        wait_ms = int(min(engine.parking.timeout_s, LOCK_S) * 1000)
        for pid in users:
            await self._act("lock", pid, "--timeout", str(wait_ms))
        for pid in users:
            await self._act("checkpoint", pid)

    async def resume(self, engine: Parkable) -> None:
        """Goes on where an earlier resume ended: each process by the state it is in."""
        users = await self._states(engine)
        if not users:
            raise ParkFault(
                "none of its processes was checkpointed as far as cuda-checkpoint can tell"
            )
        for pid, state in users.items():
            if state == "checkpointed":
                await self._act("restore", pid)
        for pid, state in users.items():
            if state in ("checkpointed", "locked"):
                await self._act("unlock", pid)

    async def _states(self, engine: Parkable) -> dict[int, str]:
        """The processes that use CUDA, by pid, each with its state; the program refuses all others."""
        found: dict[int, str] = {}
        for pid in sorted(engine.pids):
            ran = await self._run("--get-state", "--pid", str(pid))
            if ran.status == 0:
                found[pid] = ran.last_line.lower()
        failed = [pid for pid, state in found.items() if state == "failed"]
        if failed:
            raise ParkFault(f"cuda-checkpoint calls process {failed[0]} failed")
        return found

    async def _act(self, action: str, pid: int, *more: str) -> None:
        ran = await self._run("--action", action, "--pid", str(pid), *more)
        if ran.status != 0:
            told = f": {ran.last_line}" if ran.last_line else ""
            raise ParkFault(f"cuda-checkpoint {action} of {pid} ended with {ran.status}{told}")

    async def _run(self, *words: str) -> programs.Ran:
        try:
            return await programs.run((self._program, *words), self._environment)
        except OSError as error:
            raise ParkFault(f"{self._program} cannot be run: {error.strerror}") from None
