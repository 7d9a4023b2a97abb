"""Ends one replica: stops its process, says how it ended, and gives its memory back when it is back.

The order is always the same: the process, the replica's last event, a reading of the memory, the
lease. When to end is not decided here.
"""

import asyncio
import logging

from msgspec.structs import replace

from nodeagent.domain.assignments import Held
from nodeagent.givingback import until_back
from nodeagent.launching import Ended, LaunchEnded
from nodeagent.tools import Tools
from schemas.replica import ReplicaFailed, ReplicaStopFailed, ReplicaStopped, ReplicaWithdrawn

LOG = logging.getLogger(__name__)

SURVIVORS_RETRY_S = 2.0


class Ending:
    """The ways one replica can end. Its supervisor calls one of them, once."""

    def __init__(self, tools: Tools, replica: str) -> None:
        self._t = tools
        self._name = replica

    @property
    def _held(self) -> Held:
        return self._t.books.held[self._name]

    async def told(self, reason: str) -> None:
        """Stops the process, says so, and gives the memory back when it is back."""
        before = await self._t.meter.use(self._name)
        result = await self._t.processes.stop(self._name, self._t.grace_s)
        held = self._held
        largest = max(before, held.replica.measured_memory_bytes or 0) or None
        replica = replace(
            held.replica,
            measured_memory_bytes=largest,
            stop_decision=held.stop.decision if held.stop else held.replica.stop_decision,
            exit_status=result.exit_status,
            last_line=result.last_line,
        )
        held = replace(held, replica=replica)
        if result.survivors:
            await self._survived(held, result.survivors)
            return
        self._t.books.returning(self._name)
        self._t.books.say(held, ReplicaStopped(exit_status=result.exit_status), reason=reason)
        LOG.info("replica stopped", extra={"replica": self._name, "reason": reason})
        await self._give_back(before)

    async def by_itself(self, ended: LaunchEnded | Ended, code: str | None = None) -> None:
        """The process ended by itself: a failure, unless it was to stop anyway.

        `code` is what to call that failure where the launcher's own word would be taken for a failed start.
        """
        held = self._held
        freed = held.replica.measured_memory_bytes or 0
        replica = replace(
            held.replica, exit_status=ended.exit_status, last_line=ended.last_line, code=ended.code
        )
        held = replace(held, replica=replica)
        survivors = ended.survivors or await self._t.processes.survivors(self._name)
        if survivors:
            survivors = (await self._t.processes.stop(self._name, self._t.grace_s)).survivors
        if survivors:
            await self._survived(held, survivors)
            return
        self._t.books.returning(self._name)
        if held.ending or held.replica.phase == "draining":
            held = replace(held, replica=replace(held.replica, code=None))
            fetched = held.replica.phase != "fetching"
            event = ReplicaStopped(exit_status=ended.exit_status) if fetched else ReplicaWithdrawn()
            told = "ended while draining" if fetched else "withdrawn while its files were fetched"
            self._t.books.say(held, event, reason=told)
        else:
            self._say_failed(held, code or ended.code, _story(ended))
        await self._give_back(freed)

    async def kill(self, code: str, reason: str) -> None:
        """Ends a process that is of no use and says why."""
        freed = await self._t.meter.use(self._name)
        result = await self._t.processes.stop(self._name, self._t.grace_s)
        held = self._held
        replica = replace(
            held.replica, code=code, last_line=result.last_line, exit_status=result.exit_status
        )
        held = replace(held, replica=replica)
        if result.survivors:
            await self._survived(held, result.survivors)
            return
        self._t.books.returning(self._name)
        self._say_failed(held, code, reason)
        await self._give_back(freed)

    async def _survived(self, held: Held, survivors: tuple[int, ...]) -> None:
        """The kill did not reach all of the group: say so and keep the lease."""
        pids = ", ".join(str(pid) for pid in survivors)
        self._t.books.say(
            replace(held, ending=True),
            ReplicaStopFailed(survivors=survivors),
            reason=f"processes {pids} outlived the kill; their memory is still taken",
        )
        LOG.error("stop failed", extra={"replica": self._name, "survivors": survivors})
        await self.outlive()

    async def outlive(self) -> None:
        """Kills again until nothing of the group is left; only then does the lease end."""
        freed = self._held.replica.measured_memory_bytes or 0
        while True:
            result = await self._t.processes.stop(self._name, 0.0)
            if not result.survivors:
                break
            await asyncio.sleep(SURVIVORS_RETRY_S)
        held = self._held
        self._t.books.returning(self._name)
        if held.replica.code is not None:
            self._say_failed(held, held.replica.code, "its last process is gone now")
        else:
            self._t.books.say(
                held,
                ReplicaStopped(exit_status=held.replica.exit_status),
                reason="its last process is gone now",
            )
        await self._give_back(freed)

    async def _give_back(self, freed_bytes: int) -> None:
        """Ends the leases after a reading that shows the memory back. Release after the replica's last
        event: a crash between leaves a lease that the next start ends, never one given twice."""
        await until_back(self._t.books, self._t.meter, self._name)
        self._t.books.rest_port(self._held.port if self._name in self._t.books.held else 0)
        self._t.books.release(self._name, freed_bytes=freed_bytes)
        self._t.meter.look_soon()

    def never_began(self) -> None:
        """The wish to stop came before there was a process."""
        self._t.books.returning(self._name)
        held = self._held
        if held.replica.phase == "fetching":
            reason = "withdrawn while its files were fetched; what came of them stays"
            self._t.books.say(held, ReplicaWithdrawn(), reason=reason)
        else:
            decision = held.stop.decision if held.stop is not None else None
            held = replace(held, replica=replace(held.replica, stop_decision=decision))
            self._t.books.say(held, ReplicaStopped(), reason="stopped before its engine began")
        self._t.books.release(self._name, freed_bytes=0)

    def not_started(self, code: str, reason: str) -> None:
        """A start that never had a process."""
        self._t.books.returning(self._name)
        self._say_failed(self._held, code, reason)
        self._t.books.release(self._name, freed_bytes=0)

    def _say_failed(self, held: Held, code: str, reason: str) -> None:
        replica = replace(held.replica, code=code)
        event = ReplicaFailed(code=code, exit_status=replica.exit_status)
        self._t.books.say(replace(held, replica=replica), event, reason=reason)
        LOG.warning("replica failed", extra={"replica": self._name, "code": code, "reason": reason})


def _story(ended: LaunchEnded | Ended) -> str:
    """Why an engine is gone, in a sentence; its own last line where it left one."""
    if ended.code == "spawn_failed":
        told = "the engine's program could not be run"
    elif ended.code == "lost":
        told = "the engine is gone and nobody saw how it ended"
    elif ended.exit_status is not None and ended.exit_status < 0:
        told = f"the engine was ended by signal {-ended.exit_status}"
    else:
        told = f"the engine ended with status {ended.exit_status}"
    return f"{told}: {ended.last_line}" if ended.last_line else told
