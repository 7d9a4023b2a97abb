"""Reads a GGUF file's shape off its first bytes, wherever they are: at the registry by ranges, or on the mirror.

It fetches as little as the parser asks for, and judges nothing: a file without a shape is told as that.
"""

import asyncio
import os
from collections.abc import Awaitable, Callable

from msgspec import Struct

from controlplane.domain.ggufheader import HEADER_BYTES_MAX, More, NotGguf, Prefix, parse
from controlplane.domain.ggufshape import NoShape, shape_of
from controlplane.domain.shape import ModelShape
from controlplane.mirror.store import Reading

Read = Callable[[int], Awaitable[Prefix]]
"""Gives the first bytes of a file: at least as many as asked for, fewer only when it has no more."""

FIRST_BYTES = 64 * 1024


class Found(Struct, frozen=True, kw_only=True):
    """`shape` None: the header gives none, `why` says so."""

    shape: ModelShape | None
    why: str = ""


async def read_shape(read: Read) -> Found | NotGguf:
    """The shape in the header, or why these bytes are no GGUF file. Raises what `read` raises."""
    at_least = FIRST_BYTES
    while True:
        prefix = await read(at_least)
        # A large vocabulary takes a tenth of a second to walk over; the leader decides meanwhile.
        header = await asyncio.to_thread(parse, prefix)
        match header:
            case NotGguf():
                return header
            case More(at_least_bytes=more):
                if len(prefix) < at_least:
                    return NotGguf(sentence=f"it ends within its header, after {len(prefix)} bytes")
                # Doubling keeps a large vocabulary from being walked over again and again; the parser asks
                # for no more than its bound, and neither may doubling: a registry's file refuses it.
                at_least = max(more, min(at_least * 2, HEADER_BYTES_MAX))
            case _:
                shape = shape_of(header)
                if isinstance(shape, NoShape):
                    return Found(shape=None, why=shape.sentence)
                return Found(shape=shape)


def of_mirror(reading: Reading) -> Read:
    """The first bytes of a mirror's copy that is open for reading."""

    async def read(at_least: int) -> bytes:
        return await asyncio.to_thread(os.pread, reading.handle, at_least, 0)

    return read
