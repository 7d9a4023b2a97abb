"""One connection to an engine, on which it answers one question after the other; also what an answer is.

It has no deadline of its own and never asks again: whoever uses it says how long it waits (`asking.py`) and
whether it is used once more (`lines.py`).
"""

import asyncio
from typing import Literal
from urllib.parse import urlsplit

import httptools
from msgspec import Struct

Silence = Literal["unreachable", "broken", "late", "too_long"]
"""unreachable: nobody took the connection, so nothing was asked. broken: it was asked, and the connection ended
without a whole answer. late: no whole answer within the bound. too_long: more bytes than the bound."""

Method = Literal["GET", "POST"]


class NoAnswer(Struct, frozen=True, kw_only=True):
    """Why there is no answer."""

    why: Silence


class Answer:
    """Status and body of a complete response. Also the parser's callbacks.

    `cut`: the body is longer than what was read of it, which was asked for.
    """

    def __init__(self) -> None:
        self.status = 0
        self.body = b""
        self.parts: list[bytes] = []
        self.size = 0
        self.complete = False
        self.cut = False
        self.begun = False
        self.framed = False
        self.closes = False
        self.messages = 0

    def on_message_begin(self) -> None:
        self.messages += 1

    def on_header(self, name: bytes, value: bytes) -> None:
        lower = name.lower()
        # Either names its own end; a body with neither ends with the connection.
        self.framed = self.framed or lower in (b"content-length", b"transfer-encoding")
        self.closes = self.closes or (lower == b"connection" and b"close" in value.lower())

    def on_headers_complete(self) -> None:
        self.begun = True

    def on_body(self, body: bytes) -> None:
        self.parts.append(body)
        self.size += len(body)

    def on_message_complete(self) -> None:
        self.complete = True


def question(
    endpoint: str, method: Method, path: str, key: str, content: bytes | None, *, keep: bool
) -> bytes:
    """The bytes of a request. `keep`: the connection is wanted again after it."""
    lines = [f"{method} {path} HTTP/1.1", f"Host: {urlsplit(endpoint).netloc}"]
    if not keep:
        lines.append("Connection: close")
    if key:
        lines.append(f"Authorization: Bearer {key}")
    if content is not None:
        lines += ["Content-Type: application/json", f"Content-Length: {len(content)}"]
    return ("\r\n".join(lines) + "\r\n\r\n").encode() + (content or b"")


class Line(asyncio.Protocol):
    """One connection. Made by `connect`, ended by `abort`; one question at a time."""

    def __init__(self) -> None:
        self._transport: asyncio.Transport | None = None
        self._waiter: asyncio.Future[Answer | NoAnswer] | None = None
        self._answer = Answer()
        self._parser: httptools.HttpResponseParser | None = None
        self._limit_bytes = 0
        self._may_cut = False
        self.is_open = False
        """Whether the next question can be asked on it, as far as is known."""
        self.heard = False
        """Whether a byte came since the last question."""

    async def ask(
        self, asked: bytes, *, limit_bytes: int, cut: bool = False
    ) -> "Answer | NoAnswer":
        """Sends a request and waits for its answer, without a bound; ends the connection if it is cancelled.

        A body above `limit_bytes` is no answer, unless `cut`: then its beginning is enough, and the rest is not
        read.
        """
        transport = self._transport
        if transport is None or not self.is_open:
            return NoAnswer(why="broken")
        self._answer = Answer()
        self._parser = httptools.HttpResponseParser(self._answer)
        self._limit_bytes, self._may_cut = limit_bytes, cut
        self._waiter = waiter = asyncio.get_running_loop().create_future()
        self.is_open = self.heard = False
        transport.write(asked)
        try:
            return await waiter
        finally:
            self._waiter = None
            if not waiter.done() or waiter.cancelled():
                self.abort()

    def abort(self) -> None:
        """Ends it at once. Not waited for: an engine that does not close must delay nobody."""
        self.is_open = False
        if self._transport is not None:
            self._transport.abort()

    # Callbacks of the loop.

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        # uvloop's transports are no asyncio.Transport to isinstance(), only in behaviour.
        self._transport = transport  # pyright: ignore[reportAttributeAccessIssue]
        self.is_open = True

    def data_received(self, data: bytes) -> None:
        parser, answer = self._parser, self._answer
        if self._waiter is None or self._waiter.done() or parser is None:
            # Nobody asked anything: what follows cannot be told from the next answer.
            self.abort()
            return
        self.heard = True
        try:
            parser.feed_data(data)
        except httptools.HttpParserError:
            self._end("broken")
            return
        answer.status = parser.get_status_code()
        if answer.size > self._limit_bytes:
            if not self._may_cut:
                self._end("too_long")
                return
            answer.cut = True
        if answer.complete or answer.cut:
            answer.body = b"".join(answer.parts)[: self._limit_bytes]
            self._waiter.set_result(answer)
            is_whole = answer.complete and not answer.cut and answer.messages == 1
            self.is_open = is_whole and answer.framed and not answer.closes
            if not self.is_open:
                self.abort()

    def connection_lost(self, exc: Exception | None) -> None:
        self.is_open = False
        self._transport = None
        waiter, answer = self._waiter, self._answer
        if waiter is None or waiter.done():
            return
        if exc is None and answer.begun and not answer.framed:
            answer.body = b"".join(answer.parts)[: self._limit_bytes]
            waiter.set_result(answer)
        else:
            self._end("broken")

    def _end(self, why: Silence) -> None:
        assert self._waiter is not None, "only what is asked ends without an answer"
        self._waiter.set_result(NoAnswer(why=why))
        self.abort()


async def connect(endpoint: str) -> Line | None:
    """A new connection; None when nobody takes one there."""
    address = urlsplit(endpoint)
    if address.hostname is None or address.port is None:
        return None
    try:
        _, line = await asyncio.get_running_loop().create_connection(
            Line, address.hostname, address.port
        )
    except OSError:
        return None
    return line
