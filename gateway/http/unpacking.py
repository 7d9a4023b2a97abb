"""Unpacks a compressed request body into another one, under the same bounds and at the same pace.

What comes out is counted, not what went in: a body that would unpack to more than the cap ends at the cap, whatever its
ratio. It decides nothing about what the body says.
"""

import asyncio
import zlib
from collections.abc import Iterator
from typing import Final

from gateway.http.bodies import Body
from gateway.http.errors import RequestError

PIECE: Final = 64 * 1024
"""What is unpacked at once: all that a body can make us hold beyond its bounds."""

UNDERSTOOD: Final = (b"gzip", b"x-gzip", b"deflate")

_GZIP: Final = 16 + zlib.MAX_WBITS


_WITHOUT_HEAD: Final = -zlib.MAX_WBITS

_MOST_MEMBERS: Final = 1000
"""Of one gzip body: a member costs us more than the few bytes it may have."""


async def unpacked(packed: Body, encoding: bytes) -> Body:
    """What `packed` holds, complete; the caller releases it. Raises RequestError; `packed` stays the caller's.

    `encoding` is one of `UNDERSTOOD`. Of `deflate` both readings are accepted, with zlib's head and without.
    """
    room = asyncio.Event()
    body = packed.another(on_room=room.set)
    stream = _Deflate() if encoding == b"deflate" else _Gzip()
    try:
        async for block in packed.replay():
            for piece in stream.pieces(block):
                body.feed(piece)
                if body.failed:
                    await body.read_all()  # which says why
                # A piece takes a fifth of a millisecond: others get their turn, and the disk its time.
                await asyncio.sleep(0)
                while body.crowded:
                    room.clear()
                    await room.wait()
        if not stream.complete:
            raise _broken("it ends too early")
    except zlib.error:
        body.release()
        raise _broken("it is damaged") from None
    except BaseException:
        body.release()
        raise
    body.end()
    return body


class _Gzip:
    """One member or several, one behind the other."""

    def __init__(self) -> None:
        self._member = zlib.decompressobj(_GZIP)
        self._members = 1

    @property
    def complete(self) -> bool:
        return self._member.eof

    def pieces(self, block: bytes) -> Iterator[bytes]:
        """What the next bytes unpack to, so much at once. Raises zlib.error, RequestError."""
        while block:
            if self._member.eof:
                self._member = zlib.decompressobj(_GZIP)
                self._members += 1
                if self._members > _MOST_MEMBERS:
                    raise _broken(f"it has more than {_MOST_MEMBERS} members")
            piece = self._member.decompress(block, PIECE)
            if piece:
                yield piece
            block = self._member.unused_data if self._member.eof else self._member.unconsumed_tail


class _Deflate:
    """One stream; nothing may stand behind it."""

    def __init__(self) -> None:
        self._stream = zlib.decompressobj()
        self._first = b""
        self._begun = False

    @property
    def complete(self) -> bool:
        return self._stream.eof

    def pieces(self, block: bytes) -> Iterator[bytes]:
        """As `_Gzip.pieces`."""
        if not self._begun:
            block = self._first + block
            if len(block) < 2:
                self._first = block
                return
            self._begun = True
            if block[0] & 0x0F != 8 or (block[0] << 8 | block[1]) % 31:
                self._stream = zlib.decompressobj(_WITHOUT_HEAD)
        while block:
            if self._stream.eof:
                raise _broken("something stands behind it")
            piece = self._stream.decompress(block, PIECE)
            if piece:
                yield piece
            block = self._stream.unused_data if self._stream.eof else self._stream.unconsumed_tail


def _broken(why: str) -> RequestError:
    return RequestError(
        400, "invalid_request", f"The compressed request body cannot be unpacked: {why}."
    )
