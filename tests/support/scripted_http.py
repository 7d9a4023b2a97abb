"""A server of a few lines that answers whatever a test says, byte for byte, and remembers what it was asked."""

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Asked:
    """One request as it came."""

    method: str
    path: str
    headers: dict[str, str]
    body: bytes

    def json(self) -> Any:
        return json.loads(self.body)


@dataclass
class ScriptedHttp:
    """What it answers and what it was asked. `reply` gives the bytes; None: it never answers."""

    reply: Callable[[Asked], bytes | None]
    asked: list[Asked] = field(default_factory=list[Asked])
    endpoint: str = ""


def response(status: int, body: bytes | str = b"", kind: str = "application/json") -> bytes:
    """A whole HTTP answer."""
    content = body.encode() if isinstance(body, str) else body
    head = f"HTTP/1.1 {status} Whatever\r\nContent-Type: {kind}\r\nContent-Length: {len(content)}"
    return head.encode() + b"\r\n\r\n" + content


@asynccontextmanager
async def scripted_http(
    reply: Callable[[Asked], bytes | None] | bytes | None,
) -> AsyncIterator[ScriptedHttp]:
    """The running server. Its connections end with it."""
    server = ScriptedHttp(reply if callable(reply) else lambda _: reply)
    ended = asyncio.Event()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            head = (await reader.readuntil(b"\r\n\r\n")).decode()
            first, *lines = head.strip().split("\r\n")
            method, path, _ = first.split(" ")
            headers = {name.lower(): value for name, _, value in (x.partition(": ") for x in lines)}
            body = await reader.readexactly(int(headers.get("content-length", "0")))
            asked = Asked(method, path, headers, body)
            server.asked.append(asked)
            answer = server.reply(asked)
            if answer is None:
                await ended.wait()
            else:
                writer.write(answer)
                await writer.drain()
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            writer.close()

    listening = await asyncio.start_server(serve, "127.0.0.1", 0)
    server.endpoint = f"http://127.0.0.1:{listening.sockets[0].getsockname()[1]}"
    try:
        yield server
    finally:
        ended.set()
        listening.close()
        await listening.wait_closed()
