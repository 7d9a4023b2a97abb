"""`yardctl replica logs`: an engine's log, asked of the agent of its node, and on wish as it grows.

The agent holds each answer until there is more; nothing is polled and nothing is stored here.
"""

import sys
from typing import Final

from controlplane.ctl.failures import CtlError
from events.log import Unavailable, Wire
from schemas.beacons import LogsReply, LogsRequest

WHAT: Final = "replica_logs"
ANSWER_S: Final = 5.0
HELD_S: Final = 20.0
"""How long an agent may hold an answer for more text."""

PATIENCE: Final = 6
"""Asks in a row without an answer, while following, before the agent counts as gone."""


async def print_logs(wire: Wire, replica: str, node: str, tail_bytes: int, follow: bool) -> None:
    """Writes the log's end, then what comes. Raises CtlError when the agent has none or is silent."""
    reply = await _ask(wire, node, LogsRequest(replica=replica, tail_bytes=tail_bytes), ANSWER_S)
    misses = 0
    while True:
        if reply.problem is not None:
            raise CtlError(f"{replica}: {reply.problem}")
        sys.stdout.write(reply.text)
        sys.stdout.flush()
        if not follow or reply.ended:
            return
        request = LogsRequest(replica=replica, offset=reply.next_offset, wait_s=HELD_S)
        try:
            reply = await _ask(wire, node, request, HELD_S + ANSWER_S)
            misses = 0
        except CtlError:
            # An agent being restarted is away for a moment; the engine and its log go on.
            misses += 1
            if misses >= PATIENCE:
                raise
            reply = LogsReply(next_offset=reply.next_offset)


async def _ask(wire: Wire, node: str, request: LogsRequest, timeout_s: float) -> LogsReply:
    try:
        return await wire.request(WHAT, node, request, LogsReply, timeout_s=timeout_s)
    except Unavailable as error:
        raise CtlError(f"the agent of node {node} does not answer: {error}") from error
