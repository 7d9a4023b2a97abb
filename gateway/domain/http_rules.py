"""Decides what a message's headers mean and which of them travel on: framing, keep-alive, hop-by-hop.

It never touches a socket or a parser: bytes and lists in, values out. A message whose framing could
be read in two ways is refused here, because two readers of one connection would then disagree.
"""

from collections.abc import Sequence
from http import HTTPStatus
from typing import Any, Final

from msgspec import Struct

HeaderList = Sequence[tuple[bytes, bytes]]
"""Names in lower case, values as sent; order and repetitions kept."""

NO_BODY: Final = 0
UNTIL_CLOSE: Final = -1
CHUNKED: Final = -2
"""A framing is one int: a positive one is the Content-Length."""

MAX_LENGTH_DIGITS: Final = 15

HOP_BY_HOP: Final = frozenset(
    {
        b"connection",
        b"keep-alive",
        b"proxy-authenticate",
        b"proxy-authorization",
        b"proxy-connection",
        b"te",
        b"trailer",
        b"transfer-encoding",
        b"upgrade",
        b"http2-settings",
    }
)

_NOT_TO_ENGINE: Final = HOP_BY_HOP | {
    b"host",
    b"content-length",
    b"expect",
    b"authorization",  # the client's key is ours; the engine gets its own
    b"x-api-key",
    b"api-key",
    b"cookie",
    b"accept-encoding",  # answers are rewritten and relayed as they are, so never compressed
    # The gateway's own, whatever the client's say (gateway/domain/traces.py).
    b"x-request-id",
    b"traceparent",
    b"tracestate",
}

_NOT_TO_CLIENT: Final = HOP_BY_HOP | {
    b"content-length",
    b"date",  # the gateway says its own
    b"x-request-id",
    b"request-id",  # Anthropic's name for the same
    b"set-cookie",  # engines share one origin at the gateway
    b"alt-svc",
}

SSE_HEADERS: Final = (
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),
)
"""Without them a buffering proxy in front of the gateway would hold a stream back."""

_SSE_OWN: Final = frozenset(name for name, _ in SSE_HEADERS)

_NOT_ON: Final = 1  # of a request: stays behind
_NOT_BACK: Final = 2  # of an answer: stays behind
_IS_SSE: Final = 4  # of a stream: ours replaces it
_IS_CONNECTION: Final = 8


class _Ways(dict[bytes, int]):
    """Which ways a header does not travel, by name; remembered, for the same few come with every message."""

    def __missing__(self, name: bytes) -> int:
        way = 0
        # Some servers take `_` for `-`: what must not reach an engine must not under that spelling either.
        spelled = name.replace(b"_", b"-")
        if spelled in _NOT_TO_ENGINE or spelled.startswith(b"x-yard-"):
            way |= _NOT_ON
        if name in _NOT_TO_CLIENT or name.startswith((b"x-yard-", b"access-control-")):
            way |= _NOT_BACK
        if name in _SSE_OWN:
            way |= _IS_SSE
        if name == b"connection":
            way |= _IS_CONNECTION
        if len(self) < MOST_NAMES and len(name) <= LONGEST_NAME:
            self[name] = way
        return way


MOST_NAMES: Final = 1024
LONGEST_NAME: Final = 64
"""Bounds of what is remembered of header names: senders make them up."""

_WAYS: Final = _Ways()

_PLAIN_CONNECTION: Final = {b"keep-alive": True, b"Keep-Alive": True, b"close": False}
"""What nearly every Connection header says, and whether the connection stays open then."""

STATUS_LINES: Final = {
    status.value: b"HTTP/1.1 %d %s\r\n" % (status.value, status.phrase.encode())
    for status in HTTPStatus
}


class Headers:
    """The headers of one message: `items` in the order sent, names in lower case."""

    __slots__ = ("_first", "items", "memo")

    def __init__(
        self,
        items: list[tuple[bytes, bytes]] | None = None,
        once: dict[bytes, bytes] | None = None,
    ) -> None:
        """`once`: the same by name, where that is known already and no name comes twice."""
        self.items: list[tuple[bytes, bytes]] = [] if items is None else items
        self._first = once
        self.memo: dict[str, Any] = {}
        """What was worked out of them, by whom; the messages of one connection may share their headers."""

    def get(self, name: bytes, default: bytes | None = None) -> bytes | None:
        """The first value of `name` (in lower case), else `default`."""
        first = self._first
        if first is None:
            first = self._first = dict(reversed(self.items))
        return first.get(name, default)

    def get_all(self, name: bytes) -> list[bytes]:
        """Every value of `name`, in order."""
        return [value for key, value in self.items if key == name]

    def __repr__(self) -> str:
        # Values may be secrets: a log line with a request in it must not carry them.
        return f"Headers({[name.decode('latin-1') for name, _ in self.items]})"


class FramingRefused(Struct, frozen=True, kw_only=True):
    """Why the framing of a message is not accepted; the connection must be closed."""

    reason: str


def _length(values: list[bytes]) -> int | FramingRefused:
    """The one Content-Length; refused when repeated (even equal ones), signed, a list or absurd."""
    if len(values) != 1:
        return FramingRefused(reason="Content-Length is given more than once")
    value = values[0]
    if not value.isdigit() or len(value) > MAX_LENGTH_DIGITS:
        return FramingRefused(reason="Content-Length is not a plain number")
    return int(value)


class HeadFacts(Struct, frozen=True, kw_only=True):
    """What one look over a message's headers says about the message and its connection.

    `framing` as above. `keep_alive`: the sender leaves the connection open behind it. `hosts`: how
    often Host was given. `expect`: the value of Expect. `sse`: the body is a stream of events.
    """

    framing: int
    keep_alive: bool
    hosts: int = 0
    expect: bytes | None = None
    sse: bool = False


def by_name(headers: HeaderList) -> dict[bytes, bytes] | None:
    """The values by name; None where a name comes more than once."""
    values = dict(headers)
    return values if len(values) == len(headers) else None


def request_facts(
    headers: HeaderList, version: str, once: dict[bytes, bytes] | None = None
) -> HeadFacts | FramingRefused:
    """How the body of a request ends, and what else its head asks for. `once` as in Headers: spares a look at each.

    1. Transfer-Encoding beside Content-Length, or given twice, or anything but plain `chunked`, or
       on HTTP/1.0: refused. 2. `chunked`: CHUNKED. 3. one plain Content-Length: that, 0 is NO_BODY.
    4. neither: NO_BODY.
    """
    if once is not None and b"transfer-encoding" not in once:
        length = once.get(b"content-length")
        announced = NO_BODY if length is None else _length([length])
        if isinstance(announced, FramingRefused):
            return announced
        connection = once.get(b"connection")
        stays = version == "1.1"
        return HeadFacts(
            framing=announced,
            keep_alive=stays if connection is None else _keeps_alive(connection, stays),
            hosts=int(b"host" in once),
            expect=once.get(b"expect"),
        )
    lengths: list[bytes] = []
    encodings: list[bytes] = []
    keep_alive = version == "1.1"
    hosts = 0
    expect: bytes | None = None
    for name, value in headers:
        if name == b"content-length":
            lengths.append(value)
        elif name == b"transfer-encoding":
            encodings.append(value)
        elif name == b"host":
            hosts += 1
        elif name == b"connection":
            keep_alive = _keeps_alive(value, keep_alive)
        elif name == b"expect":
            expect = value
    framing: int | FramingRefused = NO_BODY  # 4
    if encodings:  # 1
        if lengths:
            return FramingRefused(reason="Transfer-Encoding and Content-Length exclude each other")
        if len(encodings) > 1 or encodings[0].strip().lower() != b"chunked":
            return FramingRefused(reason="the only Transfer-Encoding understood is `chunked`")
        if version != "1.1":
            return FramingRefused(reason="Transfer-Encoding needs HTTP/1.1")
        framing = CHUNKED  # 2
    elif lengths:
        framing = _length(lengths)  # 3
        if isinstance(framing, FramingRefused):
            return framing
    return HeadFacts(framing=framing, keep_alive=keep_alive, hosts=hosts, expect=expect)


def response_facts(
    method: str,
    status: int,
    version: str,
    headers: HeaderList,
    once: dict[bytes, bytes] | None = None,
) -> HeadFacts | FramingRefused:
    """How the body of an engine's answer ends, and whether the connection stays usable.

    1. both framings, two of one kind or an unknown Transfer-Encoding: refused. 2. HEAD, 204, 304
    and 1xx: NO_BODY whatever the headers say. 3. `chunked`. 4. a Content-Length. 5. neither:
    UNTIL_CLOSE.
    """
    if once is not None and b"transfer-encoding" not in once:
        length = once.get(b"content-length")
        announced = UNTIL_CLOSE if length is None else _length([length])
        if isinstance(announced, FramingRefused):
            return announced
        if method == "HEAD" or status in (204, 304) or status < 200:
            announced = NO_BODY
        connection = once.get(b"connection")
        stays = version == "1.1"
        return HeadFacts(
            framing=announced,
            keep_alive=stays if connection is None else _keeps_alive(connection, stays),
            sse=_is_sse(once.get(b"content-type", b"")),
        )
    lengths: list[bytes] = []
    encodings: list[bytes] = []
    keep_alive = version == "1.1"
    sse = False
    for name, value in headers:
        if name == b"content-length":
            lengths.append(value)
        elif name == b"transfer-encoding":
            encodings.append(value)
        elif name == b"content-type":
            sse = _is_sse(value)
        elif name == b"connection":
            keep_alive = _keeps_alive(value, keep_alive)
    framing: int | FramingRefused = UNTIL_CLOSE  # 5
    if encodings:
        if lengths:  # 1
            return FramingRefused(reason="Transfer-Encoding and Content-Length exclude each other")
        if len(encodings) > 1 or encodings[0].strip().lower() != b"chunked":
            return FramingRefused(reason="an unknown Transfer-Encoding")
        framing = CHUNKED  # 3
    elif lengths:
        framing = _length(lengths)  # 4
        if isinstance(framing, FramingRefused):
            return framing
    if method == "HEAD" or status in (204, 304) or status < 200:  # 2
        framing = NO_BODY
    return HeadFacts(framing=framing, keep_alive=keep_alive, sse=sse)


def _is_sse(content_type: bytes) -> bool:
    return content_type[:17].lower() == b"text/event-stream"


def _keeps_alive(connection: bytes, keep_alive: bool) -> bool:
    """What a Connection header makes of the version's default; `close` wins over everything."""
    plain = _PLAIN_CONNECTION.get(connection)
    if plain is not None:
        return plain
    tokens = [token.strip() for token in connection.lower().split(b",")]
    if b"close" in tokens:
        return False
    return keep_alive or b"keep-alive" in tokens


def split_target(target: bytes) -> tuple[str, bytes] | None:
    """Raw path and query of a request target; None for one that names no path of ours.

    Origin form, absolute form (its authority is not looked at) and `*`. Escapes stay as they are:
    two different targets must not become the same path here.
    """
    if not target.startswith(b"/"):
        if target == b"*":
            return "*", b""
        scheme, separator, rest = target.partition(b"://")
        if not separator or scheme.lower() not in (b"http", b"https"):
            return None
        slash = rest.find(b"/")
        target = rest[slash:] if slash >= 0 else b"/"
    if target.find(b"#") >= 0:
        return None
    path, _, query = target.partition(b"?")
    try:
        return path.decode("ascii"), query
    except UnicodeDecodeError:
        return None


_NOTHING: Final[frozenset[bytes]] = frozenset()


def _travelling(headers: HeaderList, stays: int) -> list[tuple[bytes, bytes]]:
    """Those that none of the ways in `stays` keeps, nor the sender's Connection header declares for this hop only."""
    out: list[tuple[bytes, bytes]] = []
    named: frozenset[bytes] = _NOTHING
    ways = _WAYS
    for header in headers:
        way = ways[header[0]]
        if not way:
            out.append(header)
            continue
        if not way & stays:
            out.append(header)
        if way & _IS_CONNECTION and header[1] not in _PLAIN_CONNECTION:
            named |= {token.strip().lower() for token in header[1].split(b",")}
    return [header for header in out if header[0] not in named] if named else out


def engine_request_headers(
    client: HeaderList, *, engine_key: str | None = None, extra: HeaderList = ()
) -> list[tuple[bytes, bytes]]:
    """The headers of a client's request that go on to an engine.

    Hop-by-hop ones, the client's own credentials and everything in our namespace (`x-yard-*`) stay
    behind; Host and framing are the client's affair (gateway/http/client.py adds them). `engine_key`
    becomes the bearer token.
    """
    out = _travelling(client, _NOT_ON)
    if engine_key is not None:
        out.append((b"authorization", b"Bearer " + engine_key.encode("ascii")))
    out.extend(extra)
    return out


def client_response_headers(engine: HeaderList, *, sse: bool) -> list[tuple[bytes, bytes]]:
    """The headers of an engine's answer that go on to the client, without any framing.

    CORS is the gateway's to answer (two Access-Control-Allow-Origin make a browser refuse both);
    for SSE the headers that keep proxies from buffering replace the engine's.
    """
    out = _travelling(engine, _NOT_BACK | _IS_SSE if sse else _NOT_BACK)
    if sse:
        out.extend(SSE_HEADERS)
    return out


def render_head(status: int, headers: HeaderList, first: bytes = b"") -> bytes:
    """A response head with its final empty line; ValueError for a value that would split it. `first`: lines of
    headers that come before, rendered already."""
    line = STATUS_LINES.get(status) or b"HTTP/1.1 %d Status\r\n" % status
    if first:
        line += first
    if not headers:
        return line + b"\r\n"
    fields = b"\r\n".join([b": ".join(header) for header in headers])
    # One look over the joined block: it may hold no more line ends than it was joined with.
    joints = len(headers) - 1
    if fields.count(b"\n") != joints or fields.count(b"\r") != joints:
        raise ValueError("a header value holds a line end")
    return b"%b%b\r\n\r\n" % (line, fields)


_TOKEN: Final = frozenset(
    b"!#$%&'*+-.^_`|~0123456789abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ"
)


_CHECKED: Final[set[bytes]] = set()
"""Names that are proper ones: ours are the same few, and looking at each byte costs more than all else of a head."""


def check_header(name: bytes, value: bytes) -> None:
    """Raises ValueError for a header that a head must not carry: a bad name, CR, LF or NUL inside."""
    if name not in _CHECKED:
        if not name or not _TOKEN.issuperset(name):
            raise ValueError(f"not a header name: {name!r}")
        if len(_CHECKED) < MOST_NAMES:
            _CHECKED.add(name)
    # Not `in`, which would first try each of them as a number, at the price of an exception.
    if value.find(b"\r") >= 0 or value.find(b"\n") >= 0 or value.find(b"\0") >= 0:
        raise ValueError(f"the value of {name.decode()} holds a line end or NUL")
