"""Plain requests with the same head, one behind the other on one connection, through a whole gateway."""

import asyncio
from pathlib import Path

import msgspec
import pytest

from tests.support.aio import run
from tests.support.gateway_yard import chat, memory_yard


async def answer(reader: asyncio.StreamReader) -> tuple[dict[bytes, bytes], bytes]:
    """Headers and body of the next answer, which must have a length."""
    head = await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), 10)
    status, *lines = head[:-4].split(b"\r\n")
    assert b" 200 " in status, head
    headers = {name.lower(): value for name, _, value in (x.partition(b": ") for x in lines)}
    return headers, await reader.readexactly(int(headers[b"content-length"]))


@pytest.mark.parametrize(
    ("version", "asked", "told"),
    [
        # A client of HTTP/1.0 that is not told so takes the end of the connection for the end of the answer.
        (b"1.0", b"Connection: keep-alive\r\n", b"keep-alive"),
        (b"1.1", b"", None),
        (b"1.1", b"Connection: keep-alive\r\n", None),
    ],
)
def test_every_answer_says_whether_the_connection_stays(
    tmp_path: Path, version: bytes, asked: bytes, told: bytes | None
) -> None:
    async def story() -> None:
        async with memory_yard(tmp_path) as yard:
            await yard.model()
            await yard.replica(await yard.engine(), "r-1")
            gateway = await yard.gateway()
            body = msgspec.json.encode(chat())
            request = b"POST /v1/chat/completions HTTP/%b\r\nHost: yard\r\n%b" % (version, asked)
            request += b"Content-Length: %d\r\n\r\n%b" % (len(body), body)
            reader, writer = await asyncio.open_connection("127.0.0.1", gateway.port)
            try:
                for _ in range(4):
                    writer.write(request)
                    headers, content = await answer(reader)
                    assert headers.get(b"connection") == told
                    assert msgspec.json.decode(content)["model"] == "m"
            finally:
                writer.close()
                await writer.wait_closed()

    run(story())
