"""What is true of every input to the readers of HTTP; run by the coverage-guided fuzzer and by hypothesis alike.

Each target takes any bytes and raises AssertionError, or whatever escaped, when a truth does not hold.
"""

import re
from typing import Final

from gateway.domain.chunked import ChunkedBody, ChunkError
from gateway.domain.http_rules import CHUNKED
from gateway.domain.known_heads import known_head
from gateway.http.errors import RequestError
from gateway.http.limits import ServerLimits
from gateway.http.request_head import RequestHead, read_request_head

LIMITS: Final = ServerLimits()

_LINE: Final = re.compile(rb"([!#$%&'*+\-.^_`|~0-9A-Za-z]+):[ \t]*([\t\x20-\x7e\x80-\xff]*)")
_FIRST: Final = re.compile(rb"([A-Z-]+) (\S+) HTTP/1\.[01]")


def read(head: bytes) -> RequestHead | None:
    """None for a head that is refused, which always ends the connection or names a bound."""
    try:
        return read_request_head(head, LIMITS)
    except RequestError as problem:
        refused = problem
    assert refused.close
    assert refused.status in (400, 417, 431, 505)
    return None


def _cut(data: bytes) -> bytes:
    """Up to the first empty line, where the server cuts too; one that has none gets it."""
    data += b"\r\n\r\n"
    return data[: data.find(b"\r\n\r\n") + 4]


def request_head(data: bytes) -> None:
    """A head that is accepted says the same to a second reader, one that only splits lines at CR LF."""
    head = _cut(data.lstrip(b"\r\n"))
    accepted = read(head)
    if accepted is None:
        return
    first, *lines = head[:-4].split(b"\r\n")
    start = _FIRST.fullmatch(first)
    assert start is not None, first
    assert start[1] == accepted.method.encode()
    assert start[2] == accepted.target
    fields: list[tuple[bytes, bytes]] = []
    for line in lines:
        field = _LINE.fullmatch(line)
        assert field is not None, line
        fields.append((field[1].lower(), field[2].strip(b" \t")))
    assert fields == [(name, value.strip(b" \t")) for name, value in accepted.headers.items]
    lengths = [value for name, value in fields if name == b"content-length"]
    encodings = [value for name, value in fields if name == b"transfer-encoding"]
    assert len(lengths) + len(encodings) <= 1
    framing = CHUNKED if encodings else int(lengths[0]) if lengths else 0
    assert accepted.facts.framing == framing


def chunked_body(data: bytes) -> None:
    """A chunked body ends at the same byte with the same payload, however its bytes are cut, and as a slow reader reads it."""
    whole = _fed(data, len(data) or 1)
    for step in (1, 3):
        assert _fed(data, step) == whole
    if whole is not None and whole[0] >= 0:
        assert _slowly(data) == whole


def _fed(data: bytes, step: int) -> tuple[int, bytes] | None:
    """Where it ended (-1: not yet) and what it held; None for one that is refused."""
    body = ChunkedBody()
    out: list[bytes] = []
    position = 0
    try:
        for start in range(0, len(data), step):
            piece = data[start : start + step]
            used = body.feed(piece, out)
            position += used
            if body.done:
                return position, b"".join(out)
            assert used == len(piece)
    except ChunkError:
        return None
    return -1, b""


def _slowly(data: bytes) -> tuple[int, bytes]:
    """As the grammar says, without a state; only for what was accepted."""
    payload = b""
    at = 0
    while True:
        line, _, _ = data[at:].partition(b"\r\n")
        at += len(line) + 2
        size = int(line.split(b";")[0].strip(b" \t"), 16)
        if not size:
            break
        payload += data[at : at + size]
        assert data[at + size : at + size + 2] == b"\r\n"
        at += size + 2
    while data[at : at + 2] != b"\r\n":
        at = data.index(b"\r\n", at) + 2
    return at + 2, payload


def known_heads(data: bytes) -> None:
    """A head that is taken for one read before is accepted when it is read anew, and means the same."""
    before, _, after = data.partition(b"\n\n")
    before, after = _cut(before), _cut(after)
    accepted = read(before)
    if accepted is None or accepted.facts.framing <= 0:
        return
    known = known_head(before)
    assert known is not None, "it has one length"
    assert known.length_in(before) == accepted.facts.framing
    length = known.length_in(after)
    if length <= 0:
        return
    anew = read(after)
    assert anew is not None, "the shortcut took what is refused"
    assert anew.facts.framing == length
    assert anew.target == accepted.target
    assert anew.facts.keep_alive == accepted.facts.keep_alive
    assert [h for h in anew.headers.items if h[0] != b"content-length"] == [
        h for h in accepted.headers.items if h[0] != b"content-length"
    ]
