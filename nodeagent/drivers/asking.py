"""Asks an engine one small question over HTTP, with a deadline, and takes no answer for an answer.

For health, counters and parking only; requests of clients never come this way. It keeps no connection: an
engine that was replaced on the same port must not be reached by a connection of its predecessor.
"""

import asyncio
from urllib.parse import urlsplit

import httptools

ANSWER_LIMIT_BYTES = 4 * 1024 * 1024
ASK_S = 2.0
"""Bound of one question, from connecting to the last byte."""


class Answer:
    """Status and body of a complete response. Also the parser's callbacks."""

    def __init__(self) -> None:
        self.status = 0
        self.body = b""
        self.complete = False
        self.begun = False
        self.framed = False

    def on_header(self, name: bytes, value: bytes) -> None:
        # Either names its own end; a body with neither ends with the connection.
        self.framed = self.framed or name.lower() in (b"content-length", b"transfer-encoding")

    def on_headers_complete(self) -> None:
        self.begun = True

    def on_body(self, body: bytes) -> None:
        self.body += body

    def on_message_complete(self) -> None:
        self.complete = True


async def get(
    endpoint: str, path: str, key: str = "", *, timeout_s: float = ASK_S
) -> Answer | None:
    """GET `path` at `endpoint` (a base URL); None when no whole answer came within `timeout_s`."""
    return await _within(timeout_s, endpoint, "GET", path, key, None)


async def post(
    endpoint: str,
    path: str,
    key: str = "",
    *,
    content: bytes = b"",
    timeout_s: float = ASK_S,
) -> Answer | None:
    """POST `content` (JSON, or nothing) to `path`; None when no whole answer came within `timeout_s`."""
    return await _within(timeout_s, endpoint, "POST", path, key, content)


async def _within(
    timeout_s: float, endpoint: str, method: str, path: str, key: str, content: bytes | None
) -> Answer | None:
    try:
        async with asyncio.timeout(timeout_s):
            return await _ask(endpoint, method, path, key, content)
    except (OSError, TimeoutError, httptools.HttpParserError):
        return None


async def _ask(
    endpoint: str, method: str, path: str, key: str, content: bytes | None
) -> Answer | None:
    address = urlsplit(endpoint)
    if address.hostname is None or address.port is None:
        return None
    reader, writer = await asyncio.open_connection(address.hostname, address.port)
    try:
        lines = [f"{method} {path} HTTP/1.1", f"Host: {address.netloc}", "Connection: close"]
        if key:
            lines.append(f"Authorization: Bearer {key}")
        if content is not None:
            lines += ["Content-Type: application/json", f"Content-Length: {len(content)}"]
        writer.write(("\r\n".join(lines) + "\r\n\r\n").encode() + (content or b""))
        answer = Answer()
        parser = httptools.HttpResponseParser(answer)
        while not answer.complete:
            piece = await reader.read(65536)
            if not piece:
                answer.complete = answer.begun and not answer.framed
                break
            parser.feed_data(piece)
            answer.status = parser.get_status_code()
            if len(answer.body) > ANSWER_LIMIT_BYTES:
                return None
        return answer if answer.complete else None
    finally:
        # Not waited for: the answer is here, and an engine that does not close must not delay it.
        writer.transport.abort()
