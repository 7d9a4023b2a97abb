"""Finds where a chunked body ends, and its payload when asked, while the raw bytes pass by.

It never buffers payload: a relay writes the bytes it was given and only asks here whether that was
the end. It is strict (hex digits only, CRLF only, bounded lines), so that nothing it accepts can be
read as another message by the next reader of the same bytes.
"""

import re
from typing import Final

MAX_SIZE_LINE: Final = 256
MAX_TRAILERS: Final = 16 * 1024

_SIZE_LINE: Final = re.compile(rb"([0-9A-Fa-f]{1,12})(?:[ \t]*;[\t\x20-\x7e\x80-\xff]*)?\r\n")
_TRAILER: Final = re.compile(rb"[!#$%&'*+\-.^_`|~0-9A-Za-z]+:[\t\x20-\x7e\x80-\xff]*")

_SIZE: Final = 0
_DATA: Final = 1
_DATA_END: Final = 2
_TRAILERS: Final = 3
_DONE: Final = 4

LAST_CHUNK: Final = b"0\r\n\r\n"


class ChunkError(ValueError):
    """The bytes are no chunked body; the connection cannot be used any more."""


class ChunkedBody:
    """The state of one chunked body between two reads.

    `done`: the last chunk and its trailers were seen.
    """

    __slots__ = ("_left", "_partial", "_state", "_trailers", "done")

    def __init__(self) -> None:
        self._state = _SIZE
        self._left = 0
        self._partial = b""
        self._trailers = 0
        self.done = False

    @property
    def between_chunks(self) -> bool:
        """Whether all bytes so far end exactly behind a chunk: an extra chunk may be put in here."""
        return self._state == _SIZE and not self._partial

    def feed(
        self,
        block: bytes,
        out: list[bytes] | None = None,
        ends: list[tuple[int, int]] | None = None,
    ) -> int:
        """Advances over `block`; returns how far: its length, or less once `done`.

        Payload pieces are appended to `out` when it is given, and to `ends`, for every chunk that
        ended, the offset behind it and how many pieces `out` had then. Raises ChunkError.
        """
        position = 0
        end = len(block)
        while position < end:
            state = self._state
            if state == _SIZE:
                if self._partial:
                    position = self._finish_size_line(block, position)
                    continue
                match = _SIZE_LINE.match(block, position)
                if match is None:
                    self._keep_partial(block[position:], MAX_SIZE_LINE)
                    return end
                position = match.end()
                self._size(int(match[1], 16))
            elif state == _DATA:
                stop = position + self._left
                if stop > end:
                    if out is not None:
                        out.append(block[position:])
                    self._left = stop - end
                    return end
                if out is not None:
                    out.append(block[position:stop])
                if block[stop : stop + 2] == b"\r\n":  # the usual case in one step
                    self._state = _SIZE
                    position = stop + 2
                    if ends is not None and out is not None:
                        ends.append((position, len(out)))
                else:
                    self._state = _DATA_END
                    self._left = 2
                    position = stop
            elif state == _DATA_END:
                wanted = 13 if self._left == 2 else 10
                if block[position] != wanted:
                    raise ChunkError("a chunk is longer than its size says")
                position += 1
                self._left -= 1
                if not self._left:
                    self._state = _SIZE
                    if ends is not None and out is not None:
                        ends.append((position, len(out)))
            elif state == _TRAILERS:
                position = self._trailer_line(block, position)
            else:
                return position
        return position

    def _size(self, size: int) -> None:
        if size:
            self._left = size
            self._state = _DATA
        else:
            self._state = _TRAILERS

    def _keep_partial(self, rest: bytes, limit: int) -> None:
        """Keeps an unfinished line; refuses one that cannot become a valid one any more."""
        if len(rest) > limit or b"\n" in rest or b"\0" in rest:
            raise ChunkError("a chunk's size line is malformed")
        if self._state == _SIZE and rest[0] not in b"0123456789abcdefABCDEF":
            raise ChunkError("a chunk's size is not a hexadecimal number")
        self._partial = rest

    def _finish_size_line(self, block: bytes, position: int) -> int:
        eol = block.find(b"\n", position)
        if eol < 0:
            self._keep_partial(self._partial + block[position:], MAX_SIZE_LINE)
            return len(block)
        line = self._partial + block[position : eol + 1]
        match = _SIZE_LINE.fullmatch(line) if len(line) <= MAX_SIZE_LINE + 2 else None
        if match is None:
            raise ChunkError("a chunk's size line is malformed")
        self._partial = b""
        self._size(int(match[1], 16))
        return eol + 1

    def _trailer_line(self, block: bytes, position: int) -> int:
        eol = block.find(b"\n", position)
        if eol < 0:
            self._trailers += len(block) - position
            if self._trailers > MAX_TRAILERS:
                raise ChunkError("the trailers are too long")
            self._partial += block[position:]
            return len(block)
        line = self._partial + block[position : eol + 1]
        self._trailers += eol + 1 - position
        self._partial = b""
        if line == b"\r\n":
            self._state = _DONE
            self.done = True
            return eol + 1
        if self._trailers > MAX_TRAILERS or not line.endswith(b"\r\n"):
            raise ChunkError("the trailers are malformed or too long")
        if _TRAILER.fullmatch(line, 0, len(line) - 2) is None:
            raise ChunkError("a trailer is malformed")
        return eol + 1


def chunk(payload: bytes) -> bytes:
    """`payload` as one chunk; it must not be empty, an empty chunk would end the body."""
    return b"%x\r\n%b\r\n" % (len(payload), payload)


class _SizeLines(dict[int, bytes]):
    """By the length of a block that is one whole chunk, its line of size as nearly everybody writes it."""

    def __missing__(self, block: int) -> bytes:
        for digits in range(1, 9):
            payload = block - digits - 4
            line = b"%x\r\n" % max(payload, 0)
            if payload > 0 and len(line) == digits + 2:
                break
        else:
            line = b"\0"  # no chunk is so short
        if len(self) < _MOST_LINES:
            self[block] = line
        return line


_MOST_LINES: Final = 65536

SIZE_LINES: Final = _SizeLines()
"""A block that begins with `SIZE_LINES[len(block)]` and ends with a line end is one whole chunk: its size says so."""
