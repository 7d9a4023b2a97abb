"""Takes one body off its connection into a partial and a digest: written and hashed in one pass.

What came is appended even when the connection broke behind it. It compares no checksum and retries nothing.
"""

import time
from collections.abc import Callable
from typing import Final

from msgspec import Struct

from controlplane.mirror.connecting import CutOff, Reply, Stopped
from controlplane.mirror.digesting import Digest
from controlplane.mirror.domain.contents import SNIFFED
from controlplane.mirror.partials import Partial

FLUSH_S: Final = 0.1
"""Received bytes are written at the latest this long after the first of them, or when the buffer is full."""


class Filled(Struct, frozen=True, kw_only=True):
    """`ended`: the body is over. `problem`: what ended it early; the `count` bytes before it are good."""

    count: int
    ended: bool = False
    problem: CutOff | Stopped | None = None


def fill(answer: Reply, view: memoryview, *, least: int, silence_s: float) -> Filled:
    """Reads until `view` is full, or FLUSH_S passed and `least` bytes are there; never raises."""
    began = heard_at = time.monotonic()
    filled = 0
    try:
        while filled < len(view):
            count = answer.read_into(view[filled:])
            now = time.monotonic()
            if count == 0:
                return Filled(count=filled, ended=True)
            if count is not None:
                filled += count
                heard_at = now
            elif now - heard_at >= silence_s:
                return Filled(count=filled, problem=CutOff(f"nothing came for {silence_s:.0f} s"))
            if filled >= least and now - began >= FLUSH_S:
                break
    except (CutOff, Stopped) as problem:
        return Filled(count=filled, problem=problem)
    return Filled(count=filled)


def append(
    answer: Reply,
    partial: Partial,
    digest: Digest,
    *,
    room: int,
    silence_s: float,
    check_first: Callable[[bytes], None],
) -> Filled:
    """Appends the next at most `room` bytes. `check_first` sees a file's first ones and raises if they are
    not to be kept. Raises OSError of the disk."""
    first = partial.size == 0
    buffer = digest.buffer()
    kept = 0
    try:
        view = memoryview(buffer)[:room]
        filled = fill(answer, view, least=SNIFFED if first else 1, silence_s=silence_s)
        if first and filled.count:
            check_first(bytes(view[: min(filled.count, SNIFFED)]))
        partial.append(view[: filled.count])
        kept = filled.count
    finally:
        digest.add(buffer, kept)
    return filled
