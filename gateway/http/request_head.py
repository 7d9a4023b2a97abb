"""Reads one complete request head and refuses every one that could be read in two ways.

httptools parses; what it lets pass and a proxy must not is checked here. It knows no connection: a
refusal is a RequestError that closes it, because what follows such a head would be guesswork.
"""

from typing import Final

import httptools
from msgspec import Struct

from gateway.domain import http_rules
from gateway.domain.http_rules import FramingRefused, Headers, HeadFacts
from gateway.http.errors import RequestError
from gateway.http.limits import ServerLimits

_GIVEN_ONCE: Final = (
    b"content-type",
    b"content-encoding",
    b"authorization",
    b"x-api-key",
    b"api-key",
)
"""Headers that decide something here: of two, an engine might believe the other one."""


class RequestHead(Struct, frozen=True, kw_only=True):
    """A head that was accepted; fields as in messages.Request."""

    method: str
    target: bytes
    path: str
    query: bytes
    version: str
    headers: Headers
    facts: HeadFacts


class _HeadReader:
    """Collects what httptools reports of one request head.

    It does not hold its parser: the two would keep each other alive until the collector comes, and
    a collector's pass over every few hundred requests costs more than parsing them. What it does not want to hear
    of is None: the parser asks for each by name, and a name that is missing costs an exception.
    """

    __slots__ = ("complete", "items", "target")

    on_message_begin = on_body = on_message_complete = on_chunk_header = on_chunk_complete = None
    on_status = None

    def __init__(self) -> None:
        self.items: list[tuple[bytes, bytes]] = []
        self.target = b""
        self.complete = False

    def on_url(self, url: bytes) -> None:
        self.target += url

    def on_header(self, name: bytes, value: bytes) -> None:
        self.items.append((name.lower(), value))

    def on_headers_complete(self) -> None:
        self.complete = True


def bad_request(message: str) -> RequestError:
    """A 400 behind which the connection ends."""
    return RequestError(400, "invalid_request", message, close=True)


def read_request_head(head: bytes, limits: ServerLimits) -> RequestHead:
    """The head in `head`, which ends with its empty line. Raises RequestError."""
    reader = _HeadReader()
    parser = httptools.HttpRequestParser(reader)
    try:
        parser.feed_data(head)
    except httptools.HttpParserUpgrade:
        pass  # an offer to upgrade is not taken up; the request stands
    except httptools.HttpParserError as problem:
        raise bad_request(f"The request is not valid HTTP/1.1: {problem}.") from None
    if not reader.complete:
        raise bad_request("The request head is incomplete.")
    version = parser.get_http_version()
    if version not in ("1.1", "1.0"):
        raise RequestError(
            505, "invalid_request", "Only HTTP/1.0 and HTTP/1.1 are spoken here.", close=True
        )
    items = reader.items
    if len(items) > limits.head_count:
        raise RequestError(
            431,
            "invalid_request",
            f"The request has more than {limits.head_count} headers.",
            close=True,
        )
    # Not `in`, which would first try each of them as a number, at the price of an exception.
    if head.find(b"\0") >= 0 or head.find(b"\r\n ") >= 0 or head.find(b"\r\n\t") >= 0:
        raise bad_request("The request head holds a folded line or a NUL.")
    once = http_rules.by_name(items)
    if once is None:
        names = [name for name, _ in items]
        for name in _GIVEN_ONCE:
            if names.count(name) > 1:
                raise bad_request(f"{name.decode().title()} is given more than once.")
    facts = http_rules.request_facts(items, version, once)
    if isinstance(facts, FramingRefused):
        raise bad_request(f"The request is ambiguous: {facts.reason}.")
    if facts.hosts > 1 or (facts.hosts == 0 and version == "1.1"):
        raise bad_request("A request has exactly one Host header.")
    if facts.expect is not None and facts.expect.lower() != b"100-continue":
        raise RequestError(
            417, "invalid_request", "The only expectation met here is 100-continue.", close=True
        )
    method = parser.get_method().decode("ascii")
    if not head.startswith(b" HTTP/1.", len(method) + 1 + len(reader.target)):
        # Two spaces, or another protocol's name, which the parser knows too.
        raise bad_request("The request line is not one of HTTP/1.1.")
    target = http_rules.split_target(reader.target)
    if target is None or method == "CONNECT":
        raise bad_request("The request target is not a path.")
    return RequestHead(
        method=method,
        target=reader.target,
        path=target[0],
        query=target[1],
        version=version,
        headers=Headers(items, once),
        facts=facts,
    )
