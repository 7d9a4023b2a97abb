"""Requests and answers made so that two readers of them would disagree: each with what a gateway must make of it.

docs/security.md lists them under the same names; a test holds the two together.
"""

from typing import Final, NamedTuple


class Attack(NamedTuple):
    """`sent` is all that a client sends. `got`: the statuses a gateway answers with, in order."""

    sent: bytes
    got: tuple[int, ...]
    ends: bool = True
    """The gateway ends the connection behind its answers."""
    engine: int = 0
    """Requests the engine sees."""


EVIL: Final = b"GET /evil HTTP/1.1\r\nhost: a\r\n\r\n"
HEAD: Final = b"POST /v1/x HTTP/1.1\r\nhost: a\r\n"
CHUNKED: Final = HEAD + b"transfer-encoding: chunked\r\n\r\n"


def _refused(*lines: bytes, rest: bytes = b"0\r\n\r\n") -> Attack:
    """A head with these lines, and behind it what one of its readers would take for a request of its own."""
    head = b"".join(line + b"\r\n" for line in lines)
    return Attack(HEAD + head + b"\r\n" + rest + EVIL, (400,))


ATTACKS: Final[dict[str, Attack]] = {
    # Two ways to end a body
    "Content-Length and Transfer-Encoding": _refused(
        b"content-length: 5", b"transfer-encoding: chunked"
    ),
    "Transfer-Encoding and Content-Length": _refused(
        b"transfer-encoding: chunked", b"content-length: 5"
    ),
    "two equal Content-Lengths": _refused(b"content-length: 5", b"content-length: 5"),
    "two different Content-Lengths": _refused(b"content-length: 5", b"content-length: 50"),
    "Content-Length: 5, 5": _refused(b"content-length: 5, 5"),
    "Content-Length: +5": _refused(b"content-length: +5"),
    "Content-Length: -5": _refused(b"content-length: -5"),
    "Content-Length: 0x5": _refused(b"content-length: 0x5"),
    "Content-Length: 5 5": _refused(b"content-length: 5 5"),
    "Content-Length behind a vertical tab": _refused(b"content-length:\x0b5"),
    "an empty Content-Length": _refused(b"content-length:"),
    "a Content-Length of 23 digits": _refused(b"content-length: " + b"9" * 23),
    "a space before the colon": _refused(b"content-length : 5"),
    "Transfer-Encoding: xchunked": _refused(b"transfer-encoding: xchunked"),
    "Transfer-Encoding: identity": _refused(b"transfer-encoding: identity"),
    "Transfer-Encoding: gzip, chunked": _refused(b"transfer-encoding: gzip, chunked"),
    "Transfer-Encoding: chunked, identity": _refused(b"transfer-encoding: chunked, identity"),
    "Transfer-Encoding: chunked;q=1": _refused(b"transfer-encoding: chunked;q=1"),
    'Transfer-Encoding: "chunked"': _refused(b'transfer-encoding: "chunked"'),
    "Transfer-Encoding behind a vertical tab": _refused(b"transfer-encoding: \x0bchunked"),
    "two Transfer-Encodings": _refused(
        b"transfer-encoding: chunked", b"transfer-encoding: chunked"
    ),
    "an empty Transfer-Encoding": _refused(b"transfer-encoding:", b"content-length: 5"),
    "chunked on HTTP/1.0": Attack(
        b"POST / HTTP/1.0\r\nhost: a\r\ntransfer-encoding: chunked\r\n\r\n0\r\n\r\n" + EVIL, (400,)
    ),
    "content_length, which some servers take for Content-Length": Attack(
        HEAD + b"content_length: 50\r\ncontent-length: 5\r\n\r\nhello" + EVIL,
        (200, 200),
        ends=False,
        engine=2,
    ),
    # Two ways to end a line
    "a folded header (obs-fold)": _refused(b"transfer-encoding:", b" chunked"),
    "a header folded by a tab": _refused(b"x: a", b"\tcontent-length: 5"),
    "a fold before the first header": Attack(
        b"POST / HTTP/1.1\r\n content-length: 5\r\nhost: a\r\n\r\n" + EVIL, (400,)
    ),
    "a NUL in a value": _refused(b"x: a\0b"),
    "a NUL in a name": _refused(b"x\0: a"),
    "a control character in a value": _refused(b"x: a\x01b"),
    "a bare LF between headers": _refused(b"x: a\ncontent-length: 5"),
    "a bare CR between headers": _refused(b"x: a\rcontent-length: 5"),
    "bare LFs all over": Attack(b"GET / HTTP/1.1\nhost: a\n\n" + EVIL, (400,)),
    "an empty line of LF CR LF": Attack(b"GET / HTTP/1.1\r\nhost: a\n\r\n" + EVIL, (400,)),
    "a header without a colon": _refused(b"content-length"),
    "a header without a name": _refused(b": 5"),
    "a name with parentheses": _refused(b"x(y): a"),
    # Two ways to read the request line
    "two spaces behind the method": Attack(b"GET  / HTTP/1.1\r\nhost: a\r\n\r\n" + EVIL, (400,)),
    "a space behind the version": Attack(b"GET / HTTP/1.1 \r\nhost: a\r\n\r\n" + EVIL, (400,)),
    "a space in the target": Attack(b"GET /a b HTTP/1.1\r\nhost: a\r\n\r\n" + EVIL, (400,)),
    "a fragment in the target": Attack(b"GET /a#b HTTP/1.1\r\nhost: a\r\n\r\n" + EVIL, (400,)),
    "CONNECT": Attack(b"CONNECT a:1 HTTP/1.1\r\nhost: a\r\n\r\n" + EVIL, (400,)),
    "HTTP/0.9": Attack(b"GET /\r\n\r\n" + EVIL, (505,)),
    "HTTP/1.2": Attack(b"GET / HTTP/1.2\r\nhost: a\r\n\r\n" + EVIL, (400,)),
    "HTTP/2 without asking": Attack(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + EVIL, (400,)),
    "RTSP": Attack(b"DESCRIBE / RTSP/1.0\r\nhost: a\r\n\r\n" + EVIL, (400,)),
    "ICE": Attack(b"SOURCE / ICE/1.0\r\nhost: a\r\n\r\n" + EVIL, (400,)),
    "an upgrade to h2c with a body": Attack(
        HEAD + b"connection: upgrade\r\nupgrade: h2c\r\ncontent-length: 5\r\n\r\nhello" + EVIL,
        (200, 200),
        ends=False,
        engine=2,
    ),
    # Headers that decide something, twice
    "two Hosts": _refused(b"host: b"),
    "no Host": Attack(b"GET / HTTP/1.1\r\n\r\n" + EVIL, (400,)),
    "two Authorizations": _refused(b"authorization: Bearer a", b"authorization: Bearer b"),
    "two Content-Types": _refused(
        b"content-type: application/json", b"content-type: multipart/form-data"
    ),
    "two Content-Encodings": _refused(b"content-encoding: gzip", b"content-encoding: br"),
    # Chunks
    "a chunk's size with a sign": Attack(CHUNKED + b"+5\r\nhello\r\n0\r\n\r\n" + EVIL, (400,)),
    "a chunk's size with 0x": Attack(CHUNKED + b"0x5\r\nhello\r\n0\r\n\r\n" + EVIL, (400,)),
    "a chunk's size with a space behind": Attack(
        CHUNKED + b"5 \r\nhello\r\n0\r\n\r\n" + EVIL, (400,)
    ),
    "a chunk's size that overflows": Attack(
        CHUNKED + b"1" + b"0" * 16 + b"\r\nhello\r\n0\r\n\r\n" + EVIL, (400,)
    ),
    "a chunk's line that ends with LF": Attack(CHUNKED + b"5\nhello\n0\n\n" + EVIL, (400,)),
    "a chunk longer than it says": Attack(CHUNKED + b"4\r\nhello\r\n0\r\n\r\n" + EVIL, (400,)),
    "a chunk shorter than it says": Attack(CHUNKED + b"6\r\nhello\r\n0\r\n\r\n" + EVIL, (400,)),
    "an LF in a chunk's extension": Attack(CHUNKED + b"5;a\nb\r\nhello\r\n0\r\n\r\n", (400,)),
    "a Content-Length among the trailers": Attack(
        CHUNKED + b"0\r\ncontent-length: 50\r\n\r\n" + EVIL, (200, 200), ends=False, engine=2
    ),
    "a trailer that is no header": Attack(CHUNKED + b"0\r\nGET / HTTP/1.1\r\n\r\n" + EVIL, (400,)),
    # What is allowed stays apart
    "pipelined requests": Attack(
        HEAD + b"content-length: 5\r\n\r\nhello" + EVIL, (200, 200), ends=False, engine=2
    ),
    "a request inside the body of another": Attack(
        HEAD + b"content-length: %d\r\n\r\n%b" % (len(EVIL), EVIL), (200,), ends=False, engine=1
    ),
}

OK: Final = b"HTTP/1.1 200 OK\r\n"
NEXT: Final = b"HTTP/1.1 200 OK\r\ncontent-length: 4\r\n\r\nevil"

ANSWERS: Final[dict[str, tuple[bytes, int]]] = {
    "an answer with both framings": (
        OK + b"content-length: 2\r\ntransfer-encoding: chunked\r\n\r\n2\r\nok\r\n0\r\n\r\n" + NEXT,
        502,
    ),
    "an answer with two lengths": (
        OK + b"content-length: 2\r\ncontent-length: 2\r\n\r\nok" + NEXT,
        502,
    ),
    "an answer with a folded header": (OK + b"content-length:\r\n 2\r\n\r\nok" + NEXT, 502),
    "an answer with an LF in a header": (
        OK + b"x: a\nset-cookie: b\r\ncontent-length: 2\r\n\r\nok",
        502,
    ),
    "an answer with a CR in a header": (OK + b"x: a\rb\r\ncontent-length: 2\r\n\r\nok", 502),
    "an answer with a NUL in a header": (OK + b"x: a\0b\r\ncontent-length: 2\r\n\r\nok", 502),
    "an answer packed in an unknown way": (
        OK + b"transfer-encoding: gzip, chunked\r\n\r\n2\r\nok\r\n0\r\n\r\n",
        502,
    ),
    "an answer whose chunks end with LF": (
        OK + b"transfer-encoding: chunked\r\n\r\n2\nok\n0\n\n",
        502,
    ),
    "an answer that switches protocols": (b"HTTP/1.1 101 OK\r\nupgrade: x\r\n\r\n", 502),
    "an answer without a head": (b"ok\r\n\r\n", 502),
    "an answer with another behind it": (OK + b"content-length: 2\r\n\r\nok" + NEXT, 200),
}
"""What an engine that went mad answers, and the status its client gets; nothing of it may reach the next client."""
