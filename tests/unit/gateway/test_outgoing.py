"""A request made ready for any engine: what it looks like on the wire, and what is never sent."""

import pytest

from gateway.http.outgoing import INLINE_BODY, Outgoing


def test_a_request_is_made_once_and_fits_every_engine() -> None:
    made = Outgoing("POST", "/v1/x?a=b", [(b"accept", b"*/*")], b"{}")
    assert made.block(b"one:1", None) == (
        b"POST /v1/x?a=b HTTP/1.1\r\nhost: one:1\r\naccept: */*\r\ncontent-length: 2\r\n\r\n{}"
    )
    assert made.block(b"two:2", b"k") == (
        b"POST /v1/x?a=b HTTP/1.1\r\nhost: two:2\r\nauthorization: Bearer k\r\naccept: */*\r\n"
        b"content-length: 2\r\n\r\n{}"
    )
    assert Outgoing("GET", "/", []).block(b"h", None) == b"GET / HTTP/1.1\r\nhost: h\r\n\r\n"
    assert Outgoing("POST", "/", [], b"x" * (INLINE_BODY + 1)).source is None  # bytes are at hand


@pytest.mark.parametrize(
    ("target", "header"),
    [
        ("/a b", (b"x", b"y")),
        ("a", (b"x", b"y")),
        ("/", (b"x", b"y\r\nz: 1")),
        ("/", (b"x", b"y\n")),
        ("/", (b"x\r", b"y")),
    ],
)
def test_what_would_split_a_head_is_no_request(target: str, header: tuple[bytes, bytes]) -> None:
    with pytest.raises(ValueError, match=r"target|line end"):
        Outgoing("POST", target, [header], b"{}")
