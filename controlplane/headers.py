"""Reads a GGUF file's shape off its first bytes, wherever they are: at the registry by ranges, or on the mirror.

It fetches as little as the parser asks for, and judges nothing: a file without a shape is told as that.
"""

import asyncio
import os
from collections.abc import Awaitable, Callable
from typing import Final

from msgspec import Struct

from controlplane.domain.ggufheader import HEADER_BYTES_MAX, More, NotGguf, Prefix, parse
from controlplane.domain.ggufshape import NoShape, shape_of
from controlplane.domain.shape import ModelShape
from controlplane.mirror.store import Reading

Read = Callable[[int], Awaitable[Prefix]]
"""Gives the first bytes of a file: at least as many as asked for, fewer only when it has no more."""

FIRST_BYTES: Final = 64 * 1024

AT_ONCE: Final = 2
"""A header may be hundreds of MiB of memory while it is read; further ones wait for their turn."""

WHOLE_S: Final = 300.0
"""All the time one header gets, from its turn on: bytes that drip in hold up the others no longer. A large
vocabulary of 25 MiB comes within it at the lowest rate that the registry's client accepts."""


class TooSlow(Exception):
    """The header did not come whole in time; the text says how long that was."""


class Found(Struct, frozen=True, kw_only=True):
    """`shape` None: the header gives none, `why` says so; `architecture` it may name all the same."""

    shape: ModelShape | None
    architecture: str = ""
    why: str = ""


class Headers:
    """Reads headers by turns, `at_once` of them, each within `whole_s` seconds of its turn."""

    def __init__(self, *, at_once: int = AT_ONCE, whole_s: float = WHOLE_S) -> None:
        self._turns = asyncio.Semaphore(at_once)
        self._whole_s = whole_s

    async def shape(self, read: Read) -> Found | NotGguf:
        """See `read_shape`. Raises TooSlow as well."""
        async with self._turns:
            bound = asyncio.timeout(self._whole_s)
            try:
                async with bound:
                    return await read_shape(read)
            except TimeoutError:
                if not bound.expired():
                    raise
                raise TooSlow(f"did not come whole within {self._whole_s:g} s") from None


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
                    return Found(shape=None, architecture=shape.architecture, why=shape.sentence)
                return Found(shape=shape, architecture=shape.architecture)


def of_mirror(reading: Reading) -> Read:
    """The first bytes of a mirror's copy that is open for reading."""

    async def read(at_least: int) -> bytes:
        return await asyncio.to_thread(os.pread, reading.handle, at_least, 0)

    return read
