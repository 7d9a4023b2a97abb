"""Chunked bodies: every split is the same body, and httptools agrees on what is one."""

import itertools

import httptools
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gateway.domain.chunked import LAST_CHUNK, SIZE_LINES, ChunkedBody, ChunkError, chunk

BODY = b'3\r\nabc\r\n1;name="v"\r\n!\r\n0a\r\n0123456789\r\n0\r\nx: y\r\n\r\n'


def read(pieces: list[bytes]) -> tuple[bytes, int, bool]:
    """Payload, bytes used, done."""
    body = ChunkedBody()
    out: list[bytes] = []
    used = 0
    for piece in pieces:
        if body.done:
            break
        used += body.feed(piece, out)
    return b"".join(out), used, body.done


def split(data: bytes, cuts: list[int]) -> list[bytes]:
    marks = sorted({0, len(data), *(cut % (len(data) + 1) for cut in cuts)})
    return [data[a:b] for a, b in itertools.pairwise(marks)]


@given(st.lists(st.integers(0, 200), max_size=20))
@settings(max_examples=100, deadline=None)
def test_a_body_is_the_same_in_any_pieces(cuts: list[int]) -> None:
    assert read(split(BODY + b"NEXT", cuts)) == (b"abc!0123456789", len(BODY), True)


def test_ends_say_where_another_chunk_may_go() -> None:
    body = ChunkedBody()
    out: list[bytes] = []
    ends: list[tuple[int, int]] = []
    first = chunk(b"ab") + chunk(b"c")
    assert body.feed(first + b"5\r\nde", out, ends) == len(first) + 5
    assert ends == [(7, 1), (13, 2)]
    assert not body.between_chunks
    body.feed(b"fgh\r\n", out, ends)
    assert body.between_chunks
    assert b"".join(out) == b"abcdefgh"


@pytest.mark.parametrize(
    "data",
    [
        b"x\r\n",
        b"0x1\r\na\r\n",
        b"+1\r\na\r\n",
        b" 1\r\na\r\n",
        b"1 \na\r\n",
        b"1\na\r\n",
        b"\r\n",
        b"-1\r\n",
        b"1_0\r\n",
        b"1\r\nab\r\n",
        b"1\r\na\n",
        b"1\r\na\rb",
        b"f" * 13 + b"\r\n",
        b"1;" + b"x" * 400,
        b"1;\0\r\n",
        b"0\r\nbad trailer\r\n\r\n",
        b"0\r\n: v\r\n\r\n",
        b"0\r\na: b\n\r\n",
        b"0\r\n" + b"a: b\r\n" * 4000,
    ],
)
def test_what_is_no_chunked_body_is_refused(data: bytes) -> None:
    with pytest.raises(ChunkError):
        ChunkedBody().feed(data)
    with pytest.raises(ChunkError):
        read([bytes([byte]) for byte in data + b"\r\n\r\n"])


class _Oracle:
    """The same body read by llhttp."""

    def __init__(self) -> None:
        self.body = b""
        self.done = False

    def on_body(self, piece: bytes) -> None:
        self.body += piece

    def on_message_complete(self) -> None:
        self.done = True


@given(
    st.lists(st.binary(min_size=1, max_size=40), max_size=5),
    st.lists(st.tuples(st.integers(0, 300), st.binary(max_size=2)), max_size=3),
    st.lists(st.integers(0, 300), max_size=6),
)
@settings(max_examples=300, deadline=None)
def test_what_is_accepted_is_what_llhttp_accepts(
    payloads: list[bytes], mutations: list[tuple[int, bytes]], cuts: list[int]
) -> None:
    data = b"".join(chunk(payload) for payload in payloads) + b"0\r\n\r\n"
    for position, replacement in mutations:
        position %= len(data)
        data = data[:position] + replacement + data[position + 1 :]
        if not data:
            return
    try:
        ours = read(split(data, cuts))
    except ChunkError:
        return
    if not ours[2] or b";" in data:
        return
    oracle = _Oracle()
    parser = httptools.HttpResponseParser(oracle)
    parser.feed_data(b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n")
    parser.feed_data(data[: ours[1]])
    assert oracle.done
    assert oracle.body == ours[0]


@given(st.integers(1, 70_000))
def test_a_block_that_begins_with_its_size_line_is_one_whole_chunk(size: int) -> None:
    block = chunk(b"x" * size)
    assert block.startswith(SIZE_LINES[len(block)])
    for longer in (len(block) - 1, len(block) + 1):
        assert not block.startswith(SIZE_LINES[longer])


def test_a_block_too_short_for_a_chunk_begins_with_no_size_line() -> None:
    for short in range(6):
        assert not LAST_CHUNK.startswith(SIZE_LINES[short])
        assert not b"0\r\n\r\n\r\n"[:short].startswith(SIZE_LINES[short])
