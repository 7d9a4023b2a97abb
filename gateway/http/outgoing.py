"""A request to an engine, made ready before it is known which engine gets it.

All that costs time is done when it is made: its head is checked and rendered but for Host and the key,
and a small body is at hand. It does no I/O and can be sent any number of times.
"""

import re
from typing import Final

from gateway.domain.http_rules import HeaderList
from gateway.http.bodies import BodySource

_TARGET: Final = re.compile(r"/[!-~]*")

INLINE_BODY: Final = 256 * 1024
"""A body up to this goes out with its head in one write."""


_LINES: Final[dict[tuple[str, str], bytes]] = {}
_MOST_LINES: Final = 256
_LONGEST_TARGET: Final = 128
"""Bounds of the first lines that are kept: nearly all requests have one of a few, and some are made up."""


def _first_line(method: str, target: str) -> bytes:
    if _TARGET.fullmatch(target) is None:
        raise ValueError(f"not a request target: {target!r}")
    line = b"%b %b HTTP/1.1\r\nhost: " % (method.encode("ascii"), target.encode("ascii"))
    if len(_LINES) < _MOST_LINES and len(target) <= _LONGEST_TARGET:
        _LINES[method, target] = line
    return line


def rendered(headers: HeaderList) -> bytes:
    """The lines of `headers`; ValueError for one that would split a head."""
    lines = [b": ".join(header) for header in headers]
    # One look over the whole: a value with a line end in it would begin a second request.
    fields = b"\r\n".join([*lines, b""])
    joints = len(lines)
    if fields.count(b"\n") != joints or fields.count(b"\r") != joints:
        raise ValueError("a header of the request holds a line end")
    return fields


class Outgoing:
    """One request: `source` is the body that does not go out with the head, None when all of it does."""

    __slots__ = ("_fields", "_inline", "_line", "method", "source")

    def __init__(
        self,
        method: str,
        target: str,
        headers: HeaderList | bytes,
        body: bytes | BodySource | None = None,
    ) -> None:
        """`target` is path and query, `headers` those to send besides Host, key and framing, or what `rendered` made.

        Raises ValueError for a target or header that would split the head.
        """
        line = _LINES.get((method, target))
        if line is None:
            line = _first_line(method, target)
        fields = headers if isinstance(headers, bytes) else rendered(headers)
        self.method = method
        self.source: BodySource | None = None
        # A small body is asked for when it is sent: a copy would double what waiting requests hold.
        self._inline: bytes | BodySource = b""
        size = 0
        if isinstance(body, bytes):
            self._inline, size = body, len(body)
        elif body is not None:
            length = body.length
            if length is not None and length <= INLINE_BODY and body.is_held:
                self._inline, size = body, length
            else:
                self.source = body
        if self.source is not None:
            length = self.source.length
            if length is None:
                fields += b"transfer-encoding: chunked\r\n"
            else:
                fields += b"content-length: %d\r\n" % length
        elif size or method not in ("GET", "HEAD", "DELETE", "OPTIONS"):
            fields += b"content-length: %d\r\n" % size
        self._fields = fields + b"\r\n"
        self._line = line

    def block(self, host: bytes, key: bytes | None) -> bytes:
        """The head, and the body that goes with it, for the engine at `host` that asks for `key`."""
        inline = self._inline
        if not isinstance(inline, bytes):
            inline = inline.in_memory()
            assert inline is not None, "a body is kept until the answer began"
        if key is None:
            return b"%b%b\r\n%b%b" % (self._line, host, self._fields, inline)
        return b"%b%b\r\nauthorization: Bearer %b\r\n%b%b" % (
            self._line,
            host,
            key,
            self._fields,
            inline,
        )


class Front:
    """How requests to one replica begin that differ in their ids and bodies alone; `of` is whom it is for."""

    __slots__ = ("_front", "of")

    def __init__(
        self, of: object, method: str, target: str, host: bytes, key: bytes | None, headers: bytes
    ) -> None:
        """As Outgoing and its `block`; `headers` are rendered."""
        self.of = of
        line = _LINES.get((method, target)) or _first_line(method, target)
        own = b"" if key is None else b"authorization: Bearer %b\r\n" % key
        self._front = b"%b%b\r\n%b%b" % (line, host, own, headers)

    def block(self, ids: bytes, body: bytes) -> bytes:
        """The request with these lines and this body."""
        return b"%b%bcontent-length: %d\r\n\r\n%b" % (self._front, ids, len(body), body)


__all__ = ["INLINE_BODY", "Front", "Outgoing"]
