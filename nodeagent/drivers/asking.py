"""Asks an engine one small question over HTTP, with a deadline, and takes no answer for an answer.

For health, counters, parking and adapters only; requests of clients never come this way. It keeps no connection:
an engine that was replaced on the same port must not be reached by a connection of its predecessor.
"""

import asyncio
from typing import Final, Literal
from urllib.parse import urlsplit

import httptools
from msgspec import Struct

ANSWER_LIMIT_BYTES: Final = 4 * 1024 * 1024
ASK_S: Final = 2.0
"""Bound of one question, from connecting to the last byte."""

Silence = Literal["unreachable", "broken", "late", "too_long"]
"""unreachable: nobody took the connection, so nothing was asked. broken: it was asked, and the connection ended
without a whole answer. late: no whole answer within the bound. too_long: more bytes than the bound."""


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

    def on_header(self, name: bytes, value: bytes) -> None:
        # Either names its own end; a body with neither ends with the connection.
        self.framed = self.framed or name.lower() in (b"content-length", b"transfer-encoding")

    def on_headers_complete(self) -> None:
        self.begun = True

    def on_body(self, body: bytes) -> None:
        self.parts.append(body)
        self.size += len(body)

    def on_message_complete(self) -> None:
        self.complete = True


async def get(
    endpoint: str, path: str, key: str = "", *, timeout_s: float = ASK_S
) -> Answer | None:
    """GET `path` at `endpoint` (a base URL); None when no whole answer came within `timeout_s`."""
    answer = await ask(endpoint, "GET", path, key, timeout_s=timeout_s)
    return answer if isinstance(answer, Answer) else None


async def post(
    endpoint: str,
    path: str,
    key: str = "",
    *,
    content: bytes = b"",
    timeout_s: float = ASK_S,
) -> Answer | None:
    """POST `content` (JSON, or nothing) to `path`; None when no whole answer came within `timeout_s`."""
    answer = await ask(endpoint, "POST", path, key, content=content, timeout_s=timeout_s)
    return answer if isinstance(answer, Answer) else None


async def ask(
    endpoint: str,
    method: Literal["GET", "POST"],
    path: str,
    key: str = "",
    *,
    content: bytes | None = None,
    timeout_s: float = ASK_S,
    limit_bytes: int = ANSWER_LIMIT_BYTES,
    cut: bool = False,
) -> Answer | NoAnswer:
    """One question for those who must know why there is no answer; never raises for what an engine does.

    A body above `limit_bytes` is no answer, unless `cut`: then its beginning is enough, and the rest is not read.
    """
    try:
        async with asyncio.timeout(timeout_s):
            return await _ask(endpoint, method, path, key, content, limit_bytes, cut)
    except TimeoutError:
        return NoAnswer(why="late")
    except (OSError, httptools.HttpParserError):
        return NoAnswer(why="broken")


async def _ask(
    endpoint: str,
    method: str,
    path: str,
    key: str,
    content: bytes | None,
    limit_bytes: int,
    cut: bool,
) -> Answer | NoAnswer:
    address = urlsplit(endpoint)
    if address.hostname is None or address.port is None:
        return NoAnswer(why="unreachable")
    try:
        reader, writer = await asyncio.open_connection(address.hostname, address.port)
    except OSError:
        return NoAnswer(why="unreachable")
    try:
        lines = [f"{method} {path} HTTP/1.1", f"Host: {address.netloc}", "Connection: close"]
        if key:
            lines.append(f"Authorization: Bearer {key}")
        if content is not None:
            lines += ["Content-Type: application/json", f"Content-Length: {len(content)}"]
        writer.write(("\r\n".join(lines) + "\r\n\r\n").encode() + (content or b""))
        return await _read(reader, limit_bytes, cut)
    finally:
        # Not waited for: the answer is here, and an engine that does not close must not delay it.
        writer.transport.abort()


async def _read(reader: asyncio.StreamReader, limit_bytes: int, cut: bool) -> Answer | NoAnswer:
    answer = Answer()
    parser = httptools.HttpResponseParser(answer)
    while not answer.complete:
        piece = await reader.read(65536)
        if not piece:
            answer.complete = answer.begun and not answer.framed
            break
        parser.feed_data(piece)
        answer.status = parser.get_status_code()
        if answer.size > limit_bytes and not cut:
            return NoAnswer(why="too_long")
        answer.cut = answer.size > limit_bytes
        if answer.cut:
            break
    if not answer.complete and not answer.cut:
        return NoAnswer(why="broken")
    answer.body = b"".join(answer.parts)[:limit_bytes]
    return answer
