"""Answers `replica_logs`: pieces of an engine's log, held back a while when the asker waits for more.

It reads files through the launcher and changes nothing.
"""

import asyncio
from typing import Protocol

from nodeagent.launching import LogPart
from schemas.beacons import LogsReply, LogsRequest

LOOK_S = 0.25
LONGEST_WAIT_S = 30.0
MOST_BYTES = 256 * 1024


class Logs(Protocol):
    """What it needs of `nodeagent.launching.Launcher`."""

    def found(self) -> tuple[str, ...]: ...

    async def read_log(
        self, replica: str, offset: int | None = None, max_bytes: int = 65536
    ) -> LogPart: ...


class LogsRpc:
    """The handler of one node's `replica_logs`."""

    def __init__(self, logs: Logs, node: str) -> None:
        self._logs = logs
        self._node = node

    async def answer(self, request: LogsRequest) -> LogsReply:
        """The log from `offset`, else its end; waits at most `wait_s` (30 s) for something new."""
        # Only names this node really has: the id of a request never becomes a path.
        if request.replica not in self._logs.found():
            return LogsReply(
                ended=True, problem=f"the node {self._node} has no log of {request.replica!r}"
            )
        loop = asyncio.get_running_loop()
        deadline = loop.time() + min(max(request.wait_s, 0.0), LONGEST_WAIT_S)
        most = max(1, min(request.tail_bytes, MOST_BYTES))
        while True:
            part = await self._logs.read_log(request.replica, request.offset, most)
            left = deadline - loop.time()
            if part.text or part.ended or left <= 0:
                return LogsReply(text=part.text, next_offset=part.next_offset, ended=part.ended)
            await asyncio.sleep(min(LOOK_S, left))
