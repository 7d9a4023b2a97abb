"""A head that is recognised means what it would mean read anew."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.domain.known_heads import known_head
from gateway.http.errors import RequestError
from gateway.http.limits import ServerLimits
from gateway.http.request_head import RequestHead, read_request_head

DATE = b"Mon, 30 Nov 2026 07:35:00 GMT"
LATER = b"Tue, 01 Dec 2026 00:00:01 GMT"


def _read(head: bytes) -> RequestHead | None:
    try:
        return read_request_head(head, ServerLimits())
    except RequestError:
        return None


_fields = st.lists(
    st.sampled_from(
        [
            b"host: a",
            b"Content-Length: 12",
            b"content-length:\t7 ",
            b"x-content-length: 5",
            b"Date: " + DATE,
            b"connection: close",
            b"transfer-encoding: chunked",
            b"x: Content-Length: 3",
            b"expect: 100-continue",
        ]
    ),
    max_size=5,
)
_values = st.one_of(
    st.integers(min_value=0, max_value=10**16).map(lambda n: b"%d" % n),
    st.sampled_from(
        [b"", b"1 2", b"+1", b"1_0", b"0x1", b"1\r\na: b", b"\xd9\xa1", b"00", b"1, 1"]
    ),
)


@given(_fields, _values)
def test_a_recognised_request_reads_the_same(fields: list[bytes], value: bytes) -> None:
    head = b"POST /v1/x HTTP/1.1\r\n" + b"\r\n".join([*fields, b"", b""])
    first = _read(head)
    if first is None:
        return
    known = known_head(head)
    if known is None:
        return
    for digits in (b"12", b"7"):
        other = head.replace(b"Length: " + digits, b"Length: " + value).replace(
            b"length:\t" + digits, b"length:\t" + value
        )
        length = known.length_in(other)
        if length < 0:
            continue
        anew = _read(other)
        assert anew is not None
        assert anew.facts.framing == length
        assert (anew.target, anew.version, anew.facts.keep_alive, anew.facts.expect) == (
            first.target,
            first.version,
            first.facts.keep_alive,
            first.facts.expect,
        )
        rest = [item for item in anew.headers.items if item[0] != b"content-length"]
        assert rest == [item for item in first.headers.items if item[0] != b"content-length"]


@pytest.mark.parametrize("date_first", [True, False])
def test_an_answer_may_have_another_date(date_first: bool) -> None:
    def head(date: bytes, length: bytes, more: bytes = b"") -> bytes:
        pair = [b"Date: " + date, b"Content-Length: " + length]
        lines = [b"HTTP/1.1 200 OK", b"server: s", *(pair if date_first else pair[::-1])]
        return b"\r\n".join([*lines, b"a: b" + more, b"", b""])

    known = known_head(head(DATE, b"10"), date=True)
    assert known is not None
    assert known.length_in(head(DATE, b"10")) == 10
    assert known.length_in(head(LATER, b"9")) == 9
    assert known.length_in(head(LATER, b"12345")) == 12345
    assert known.length_in(head(LATER, b"9", b"c")) == -1
    assert known.length_in(head(b"x\r\nset-cookie: a=b; path=/q..", b"9")) == -1
    assert known.length_in(head(LATER + b" ", b"9")) == -1
    assert known.length_in(head(LATER, b"")) == -1
    assert known.length_in(head(LATER, b"1" * 16)) == -1
    assert known.length_in(head(LATER, b"9")[:-1]) == -1
    assert known.length_in(head(LATER, b"9").replace(b"server", b"Server")) == -1


def test_without_one_length_there_is_nothing_to_differ_by() -> None:
    assert known_head(b"GET / HTTP/1.1\r\nhost: a\r\n\r\n") is None
    assert known_head(b"GET / HTTP/1.1\r\ncontent-length: 1\r\nContent-Length: 1\r\n\r\n") is None


def test_a_date_that_may_not_differ_is_a_byte_like_any_other() -> None:
    head = b"POST / HTTP/1.1\r\nhost: a\r\ndate: " + DATE + b"\r\ncontent-length: 1\r\n\r\n"
    known = known_head(head)
    assert known is not None
    assert known.length_in(head) == 1
    assert known.length_in(head.replace(DATE, LATER)) == -1
