"""Serves the files of a store and the manifests of their sets over HTTP, to nodes and other mirrors.

An ASGI application in front of another, which gets every path that is not below /mirror/. It answers nobody
without a mirror token, which it never logs, and holds a few buffers a reader, whatever the size of a file.
"""

import asyncio
import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import Any, Final

import msgspec

from controlplane.mirror.domain.ranges import (
    Part,
    Unsatisfiable,
    asked_part,
    if_range_holds,
    tags_match,
)
from controlplane.mirror.store import Reading, Store
from events.secrets import mirror_reader
from schemas.api import ErrorBody, ErrorDetail
from schemas.mirror import Manifest

PATH: Final = "/mirror/"
FILES: Final = "/mirror/files/"
SETS: Final = "/mirror/sets/"
CHUNK: Final = 1024 * 1024
SMALLEST_CHUNK: Final = 64 * 1024
BUFFERS: Final = 16 * 1024 * 1024
"""What all readers together may hold; each holds two chunks, one on its way and one read ahead."""
STALLED_S: Final = 120.0
THREADS: Final = 4

ASGI = Callable[..., Any]
Headers = list[tuple[bytes, bytes]]


class ReaderStalled(Exception):
    """A reader took nothing for STALLED_S; its connection is closed."""


class MirrorApp:
    """`manifest_of` gives the manifest of a set once all of it is present, by the key of its first file.

    `admit` says whether a reader, whose token is right, may still read (a removed node may not).
    """

    def __init__(
        self,
        app: ASGI,
        *,
        store: Store,
        yard_secret: str,
        manifest_of: Callable[[str], Manifest | None],
        admit: Callable[[str], bool] = lambda _: True,
        stalled_s: float = STALLED_S,
    ) -> None:
        self._app = app
        self._store = store
        self._yard_secret = yard_secret
        self._manifest_of = manifest_of
        self._admit = admit
        self._stalled_s = stalled_s
        self._reading = 0
        self._threads = ThreadPoolExecutor(THREADS, thread_name_prefix="mirror read")
        self.bytes_served = 0

    @property
    def reading(self) -> int:
        """Files being sent at this moment."""
        return self._reading

    def close(self) -> None:
        self._threads.shutdown(wait=False, cancel_futures=True)

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] != "http" or not scope["path"].startswith(PATH):
            await self._app(scope, receive, send)
            return
        headers: dict[bytes, bytes] = {}
        for name, value in scope["headers"]:
            # Of a header given twice neither counts: a proxy in front might have judged by the other.
            headers[name] = b"" if name in headers else value
        path, method = scope["path"], scope["method"]
        if not self._knows(headers.get(b"authorization", b"")):
            await _refuse(send, 401, "unauthorized", "a mirror wants the token of a node")
        elif method not in ("GET", "HEAD"):
            await _refuse(send, 405, "method_not_allowed", "a mirror is only read")
        elif path.startswith(FILES):
            await self._file(path.removeprefix(FILES), method, headers, receive, send)
        elif path.startswith(SETS):
            await self._set(path.removeprefix(SETS), method, send)
        else:
            await _refuse(send, 404, "not_found", "a mirror has files and sets")

    def _knows(self, authorization: bytes) -> bool:
        scheme, _, token = authorization.partition(b" ")
        if scheme.lower() != b"bearer" or len(token) > 1024:
            return False
        reader = mirror_reader(self._yard_secret, token.strip().decode("latin-1"))
        return reader is not None and self._admit(reader)

    async def _set(self, key: str, method: str, send: Any) -> None:
        manifest = self._manifest_of(key)
        if manifest is None:
            await _refuse(send, 404, "not_found", "this mirror has no complete set of that key")
            return
        body = msgspec.json.encode(manifest)
        await _head(send, 200, [*_length(len(body)), (b"content-type", b"application/json")])
        await send({"type": "http.response.body", "body": body if method == "GET" else b""})

    async def _file(
        self, key: str, method: str, headers: dict[bytes, bytes], receive: Any, send: Any
    ) -> None:
        """1 not here   2 the reader has it already   3 a range behind the end   4 a part   5 the whole"""

        def text(name: bytes) -> str | None:
            return headers[name].decode("latin-1") if name in headers else None

        reading = self._store.read(key)
        if reading is None:  # 1
            await _refuse(send, 404, "not_found", "this mirror has no file of that key")
            return
        with reading:
            size = reading.entry.bytes
            etag = f'"{reading.entry.sha256}"'
            common = [(b"etag", etag.encode()), (b"accept-ranges", b"bytes")]
            if tags_match(text(b"if-none-match"), etag):  # 2
                await _head(send, 304, common)
                await send({"type": "http.response.body"})
                return
            part = None
            if method == "GET" and if_range_holds(text(b"if-range"), etag):
                part = asked_part(text(b"range"), size)
            common.append((b"content-type", b"application/octet-stream"))
            match part:
                case Unsatisfiable():  # 3
                    await _refuse(
                        send,
                        416,
                        "range_not_satisfiable",
                        f"the file has {size} bytes",
                        [(b"content-range", f"bytes */{size}".encode())],
                    )
                    return
                case Part(first=first, end=end):  # 4
                    shown = (b"content-range", f"bytes {first}-{end - 1}/{size}".encode())
                    await _head(send, 206, [*common, *_length(part.length), shown])
                case None:  # 5
                    part = Part(first=0, end=size)
                    await _head(send, 200, [*common, *_length(size)])
            if method == "HEAD":
                await send({"type": "http.response.body"})
            else:
                await self._send_part(reading, part, receive, send)

    async def _send_part(self, reading: Reading, part: Part, receive: Any, send: Any) -> None:
        """Reads one chunk ahead while the last one is sent; ends when the reader is gone.

        Raises ReaderStalled, OSError: the server closes the connection, so that nobody takes the beginning
        of a file for the whole.
        """
        self._reading += 1
        gone = asyncio.create_task(_until_gone(receive))
        ahead = self._ahead(reading, part.first, part.end)
        offset = part.first
        try:
            while not gone.done():
                chunk = await asyncio.shield(ahead)
                if not chunk:
                    raise OSError(f"the file ended at byte {offset} of {part.end}")
                offset += len(chunk)
                if offset < part.end:
                    ahead = self._ahead(reading, offset, part.end)
                try:
                    async with asyncio.timeout(self._stalled_s):
                        await send(
                            {
                                "type": "http.response.body",
                                "body": chunk,
                                "more_body": offset < part.end,
                            }
                        )
                except TimeoutError:
                    raise ReaderStalled(f"nothing was taken for {self._stalled_s:.0f} s") from None
                self.bytes_served += len(chunk)
                if offset == part.end:
                    return
        finally:
            self._reading -= 1
            gone.cancel()
            # The descriptor is closed after this: a read that is under way has to be over.
            with suppress(OSError):
                await asyncio.shield(ahead)

    def _ahead(self, reading: Reading, offset: int, end: int) -> "asyncio.Future[bytes]":
        size = min(CHUNK, max(SMALLEST_CHUNK, BUFFERS // (2 * max(1, self._reading))))
        return asyncio.get_running_loop().run_in_executor(
            self._threads, os.pread, reading.handle, min(size, end - offset), offset
        )


async def _until_gone(receive: Any) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


def _length(count: int) -> Headers:
    return [(b"content-length", str(count).encode())]


async def _head(send: Any, status: int, headers: Headers) -> None:
    await send({"type": "http.response.start", "status": status, "headers": headers})


async def _refuse(
    send: Any, status: int, code: str, sentence: str, extra: Headers | None = None
) -> None:
    body = msgspec.json.encode(ErrorBody(error=ErrorDetail(code=code, sentence=sentence)))
    headers = [*_length(len(body)), (b"content-type", b"application/json"), *(extra or [])]
    if status == 401:
        headers.append((b"www-authenticate", b"Bearer"))
    if status == 405:
        headers.append((b"allow", b"GET, HEAD"))
    await _head(send, status, headers)
    await send({"type": "http.response.body", "body": body})
