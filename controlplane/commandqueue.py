"""Holds the commands read but not yet settled, in order, and the position that may be written down.

It judges no command. There is no durable consumer and no acknowledgement: the position in leader.log is
the only memory, so a new leader reads again whatever its predecessor had not written down.
"""

import asyncio
from collections.abc import Callable

from events.log import EventLog, StoredCommand

WAITING_COMMANDS = 1000
"""Commands kept in memory; the rest waits in the stream."""

OFFERED = 64
"""Commands shown to one decision: enough to see what comes, bounded for the copy made of them."""


class CommandQueue:
    """One leader's commands of one term."""

    def __init__(self, source: EventLog, *, after: int, wake: Callable[[], None]) -> None:
        self._source = source
        self._wake = wake
        self._pending: dict[int, StoredCommand] = {}
        self._read = after
        self._room = asyncio.Event()
        self._room.set()

    async def run(self) -> None:
        """Reads until cancelled. Raises what the follower raises: such an error ends the process."""
        follower = self._source.follow_commands(after=self._read)
        try:
            while True:
                for command in await follower.next():
                    await self._room.wait()
                    if command.seq <= self._read:
                        continue
                    self._pending[command.seq] = command
                    self._read = command.seq
                    if len(self._pending) >= WAITING_COMMANDS:
                        self._room.clear()
                self._wake()
        finally:
            await follower.close()

    def offered(self) -> tuple[StoredCommand, ...]:
        """The oldest commands not yet settled."""
        return tuple(
            command for _, command in zip(range(OFFERED), self._pending.values(), strict=False)
        )

    def settle(self, command: StoredCommand) -> None:
        """The command needs no more decision; settling it twice is harmless."""
        self._pending.pop(command.seq, None)
        if len(self._pending) < WAITING_COMMANDS:
            self._room.set()

    def position(self, settling: StoredCommand | None = None) -> int:
        """The sequence up to which every command is settled, counting `settling` as settled."""
        for seq in self._pending:
            if settling is None or seq != settling.seq:
                return seq - 1
        return self._read
