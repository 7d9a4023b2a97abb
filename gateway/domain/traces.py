"""Decides which trace a request belongs to, and what an engine is told of it (W3C Trace Context).

A client's `traceparent` is followed when it is one; else a trace begins here. Ids are arguments. Pure.
"""

import re
from typing import Final

from msgspec import Struct

_PARENT: Final = re.compile(
    rb"(?P<version>[0-9a-f]{2})-(?P<trace>[0-9a-f]{32})-(?P<span>[0-9a-f]{16})-(?P<flags>[0-9a-f]{2})(?P<more>-.*)?"
)
_NO_TRACE: Final = "0" * 32
_NO_SPAN: Final = "0" * 16
_SAMPLED: Final = 1
_NOT_IN_AN_ID: Final = re.compile(r"[^A-Za-z0-9_-]")
MAX_ID: Final = 64
MAX_STATE: Final = 512
"""So much of `tracestate` has to travel; a longer one is left out as a whole."""

_STATE: Final = re.compile(rb"[ -~]{1,%d}" % MAX_STATE)


class Trace(Struct, frozen=True, kw_only=True):
    """The trace of one request. `span` is the gateway's own part of it, `parent` the client's, empty where it began here.

    `state` is what the client said beside it, for whoever understands it.
    """

    trace: str
    span: str
    parent: str = ""
    sampled: bool = True
    state: bytes = b""

    @property
    def traceparent(self) -> bytes:
        """What the next in line is told: it hangs below our span."""
        return b"00-%b-%b-%b" % (
            self.trace.encode(),
            self.span.encode(),
            b"01" if self.sampled else b"00",
        )


def trace_of(parent: bytes | None, state: bytes | None, *, trace: int, span: int) -> Trace:
    """The trace of a request with these headers; `trace` (128 bit) and `span` (64 bit) are fresh.

    1. what is no `traceparent` of any version is ignored, and its `tracestate` with it
    2. of a later version only the fields that all have are read
    """
    own = f"{span or 1:016x}"
    found = None if parent is None else _PARENT.fullmatch(parent)
    if found is None or not _is_valid(found):  # 1
        return Trace(trace=f"{trace or 1:032x}", span=own)
    kept = state if state is not None and _STATE.fullmatch(state) else b""
    return Trace(
        trace=found["trace"].decode(),
        span=own,
        parent=found["span"].decode(),
        sampled=bool(int(found["flags"], 16) & _SAMPLED),
        state=kept,
    )


def new_trace(bits: int) -> Trace:
    """A trace that begins here; `bits` are 192 fresh ones."""
    digits = f"{bits:048x}"
    # All zeros are no id.
    return Trace(trace=digits[:31] + "1", span=digits[32:47] + "1")


def own_lines(request_id: str, trace: Trace) -> bytes:
    """As `engine_lines`, for an id of our own making, and a trace that begins here."""
    return f"x-request-id: {request_id}-{trace.span}\r\ntraceparent: 00-{trace.trace}-{trace.span}-01\r\n".encode()


def _is_valid(found: re.Match[bytes]) -> bool:
    if found["version"] == b"ff" or (found["version"] == b"00" and found["more"]):  # 2
        return False
    return found["trace"].decode() != _NO_TRACE and found["span"].decode() != _NO_SPAN


def engine_lines(request_id: str, trace: Trace) -> bytes:
    """Lines of a head by which what an engine logs and traces can be found from ours.

    Engines make ids of their answers of `x-request-id`, and refuse one that is running: clients send the same for two
    requests, and characters that are none in an id. So it gets the beginning of it, and our span behind.
    """
    id_there = f"{_NOT_IN_AN_ID.sub('-', request_id[:MAX_ID])}-{trace.span}"
    lines = b"x-request-id: %b\r\ntraceparent: %b\r\n" % (
        id_there.encode("ascii"),
        trace.traceparent,
    )
    return b"%btracestate: %b\r\n" % (lines, trace.state) if trace.state else lines
