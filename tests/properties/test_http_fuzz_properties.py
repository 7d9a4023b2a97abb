"""The truths of tests/fuzz/targets.py for inputs that hypothesis makes of pieces of HTTP, and for the saved corpus."""

from pathlib import Path

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from tests.fuzz import targets
from tests.support.http_attacks import ATTACKS

CORPUS = Path(targets.__file__).parent / "corpus"

PIECES = [
    *(b"GET ", b"POST ", b"/", b"/a?b=c", b"*", b" HTTP/1.1", b" HTTP/1.0", b"\r\n", b"\r\n\r\n"),
    *(b"host: a\r\n", b"Host:a\r\n", b"content-length: ", b"5", b"0", b"00005", b" ", b"\t", b","),
    *(b"transfer-encoding: chunked\r\n", b"connection: close\r\n", b"expect: 100-continue\r\n"),
    *(b":", b";", b"\n", b"\r", b"\0", b"\xff", b"_", b"x-a: b\r\n", b"content-type: a/b\r\n"),
]
CHUNKS = [
    *(b"0\r\n", b"1\r\n", b"5\r\n", b"hello\r\n", b"x\r\n", b"\r\n", b"a;b=c\r\n", b"x: y\r\n"),
    *(b"5", b"0", b"f", b"\r", b"\n", b";", b" ", b"\0", b"g", b"0123456789\r\n", b"+", b"-"),
]
LINES = [
    *(b"content-length: 5\r\n", b"content-length: 17\r\n", b"Content-Length:0\r\n", b"x: 5\r\n"),
    *(b"x: content-length: 5\r\n", b"content-length: 5 \r\n", b"content-length:\t7\r\n"),
    *(b"content-length: x\r\n", b"content-lengths: 5\r\n", b"\r\n", b"expect: 100-continue\r\n"),
]
START = b"POST / HTTP/1.1\r\nhost: a\r\n"


@given(st.lists(st.sampled_from(PIECES), max_size=20).map(b"".join))
@example(START + b"content-length: 5\r\n\r\n")
def test_an_accepted_head_says_the_same_to_a_second_reader(data: bytes) -> None:
    targets.request_head(data)
    targets.request_head(START + data)


@given(st.lists(st.sampled_from(CHUNKS), max_size=20).map(b"".join))
@example(b"5;x=y\r\nhello\r\n0\r\na: b\r\n\r\nrest")
def test_a_chunked_body_ends_in_one_place(data: bytes) -> None:
    targets.chunked_body(data)


@given(st.lists(st.sampled_from(LINES), max_size=5), st.lists(st.sampled_from(LINES), max_size=5))
@example([b"content-length: 5\r\n"], [b"content-length: 17\r\n"])
def test_a_head_known_from_before_means_what_it_would_anew(
    before: list[bytes], after: list[bytes]
) -> None:
    heads = [START + b"".join(lines).rstrip(b"\r\n") for lines in (before, after)]
    targets.known_heads(b"\n\n".join(heads))


@pytest.mark.parametrize("name", ATTACKS)
def test_the_attacks_leave_the_readers_of_one_mind(name: str) -> None:
    sent = ATTACKS[name].sent
    targets.request_head(sent)
    targets.chunked_body(sent.partition(b"\r\n\r\n")[2])


def test_the_saved_corpus_holds() -> None:
    inputs = sorted(CORPUS.iterdir())
    assert inputs
    choices = (targets.request_head, targets.chunked_body, targets.known_heads)
    for path in inputs:
        if data := path.read_bytes():
            choices[data[0] % 3](data[1:])
