"""A mirror in a test: serves sets and files over HTTP as a real one does, and misbehaves as told."""

import hashlib
import json
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import msgspec

from schemas.mirror import Manifest, ManifestFile

TOKEN = "n1.token"
PIECE = 64 * 1024


def a_sha256(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


def a_key(name: str) -> str:
    return hashlib.sha256(name.encode()).hexdigest()


def some_bytes(count: int, seed: int = 1) -> bytes:
    """`count` bytes that look like nothing else, the same for a seed."""
    block = hashlib.shake_256(str(seed).encode()).digest(1 << 16)
    whole, rest = divmod(count, len(block))
    return b"".join((i.to_bytes(4, "big") + block[4:]) for i in range(whole)) + block[:rest]


def a_manifest(name: str, *contents: bytes, names: Sequence[str] = ()) -> Manifest:
    """The manifest of a set of shards; its key is that of `name`'s first. `names` are the files'."""
    files = tuple(
        ManifestFile(
            key=a_key(f"{name}-{i}"),
            name=names[i] if names else f"{name}-{i}.gguf",
            bytes=len(c),
            sha256=a_sha256(c),
        )
        for i, c in enumerate(contents)
    )
    return Manifest(key=files[0].key, files=files)


@dataclass
class Mirror:
    """What the server does. All may be changed while it runs.

    `statuses` are answered to the next requests for files, one each, before any is served.
    `cut_at`: the connection ends when so many bytes of one answer went out. `stall_at`: nothing more comes
    then. `pause_s` is slept after each piece. `garble`: the bytes are not those announced.
    """

    manifests: dict[str, bytes] = field(default_factory=dict)
    contents: dict[str, bytes] = field(default_factory=dict)
    etags: dict[str, str] = field(default_factory=dict)
    statuses: list[int] = field(default_factory=list)
    set_statuses: list[int] = field(default_factory=list)
    always: int = 0
    cut_at: list[int] = field(default_factory=list)
    stall_at: list[int] = field(default_factory=list)
    garble: int = 0
    pause_s: float = 0.0
    ignore_range: bool = False
    close_each: bool = False
    url: str = ""
    token: str = TOKEN
    sent_bytes: int = 0
    running: int = 0
    most_running: int = 0
    asked: list[tuple[str, str, str]] = field(default_factory=list)
    ending: threading.Event = field(default_factory=threading.Event)
    lock: threading.Lock = field(default_factory=threading.Lock)

    def add(self, manifest: Manifest, *contents: bytes) -> Manifest:
        self.manifests[manifest.key] = msgspec.json.encode(manifest)
        for file, content in zip(manifest.files, contents, strict=True):
            self.contents[file.key] = content
            self.etags[file.key] = f'"{file.sha256}"'
        return manifest

    def files_asked(self) -> list[tuple[str, str]]:
        """(key, Range) of every request for a file."""
        return [
            (path.rsplit("/", 1)[-1], span) for kind, path, span in self.asked if kind == "files"
        ]


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    mirror: Mirror

    def log_message(self, format: str, *args: Any) -> None:
        return

    def do_GET(self) -> None:
        m = self.mirror
        _, _, kind, key = self.path.split("/")
        with m.lock:
            m.asked.append((kind, self.path, self.headers.get("Range") or ""))
        if self.headers.get("Authorization") != f"Bearer {m.token}":
            return self.refuse(401)
        if m.always:
            return self.refuse(m.always)
        if kind == "sets":
            if m.set_statuses:
                return self.refuse(m.set_statuses.pop(0))
            body = m.manifests.get(key)
            return self.refuse(404) if body is None else self.answer(200, body, {})
        with m.lock:
            status = m.statuses.pop(0) if m.statuses else 0
        if status:
            return self.refuse(status)
        if key not in m.contents:
            return self.refuse(404)
        return self.send_file(key)

    def send_file(self, key: str) -> None:
        m = self.mirror
        body, etag = m.contents[key], m.etags[key]
        span = self.headers.get("Range")
        headers = {"ETag": etag, "Accept-Ranges": "bytes"}
        offset = 0
        fits = self.headers.get("If-Range") in (None, etag)
        if span and fits and not m.ignore_range:
            offset = int(span.removeprefix("bytes=").rstrip("-"))
            if offset >= len(body):
                return self.refuse(416)
            headers["Content-Range"] = f"bytes {offset}-{len(body) - 1}/{len(body)}"
        with m.lock:
            if m.garble:
                m.garble -= 1
                body = body[:-1] + bytes([body[-1] ^ 1])
        return self.answer(206 if "Content-Range" in headers else 200, body[offset:], headers)

    def refuse(self, status: int) -> None:
        body = json.dumps({"error": {"code": "scripted", "sentence": "as told"}}).encode()
        self.answer(status, body, {})

    def answer(self, status: int, body: bytes, headers: dict[str, str]) -> None:
        m = self.mirror
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(body)))
        if m.close_each:
            self.send_header("Connection", "close")
            self.close_connection = True
        self.end_headers()
        with m.lock:
            cut = m.cut_at.pop(0) if "ETag" in headers and m.cut_at else None
            stall = m.stall_at.pop(0) if "ETag" in headers and m.stall_at else None
            m.running += "ETag" in headers
            m.most_running = max(m.most_running, m.running)
        try:
            self.send_body(body, "ETag" in headers, cut, stall)
        except OSError:
            self.close_connection = True

    def send_body(self, body: bytes, is_file: bool, cut: int | None, stall: int | None) -> None:
        m = self.mirror
        at, counts = 0, is_file
        try:
            while at < len(body) and not m.ending.is_set():
                if at in (cut, stall):
                    self.close_connection = True
                    m.ending.wait(30 if at == stall else 0)
                    return
                marks = [mark for mark in (cut, stall) if mark is not None and at < mark]
                end = min(at + PIECE, len(body), *marks)
                if end == len(body) and is_file:
                    self.leaves()  # before whoever gets the last byte can ask for more
                    is_file = False
                with m.lock:
                    m.sent_bytes += counts * (end - at)
                self.wfile.write(body[at:end])
                at = end
                if m.pause_s and is_file:
                    time.sleep(m.pause_s)
        finally:
            if is_file:
                self.leaves()

    def leaves(self) -> None:
        with self.mirror.lock:
            self.mirror.running -= 1


class _Server(ThreadingHTTPServer):
    daemon_threads = True

    def handle_error(self, request: Any, client_address: Any) -> None:
        return  # a client that went away is what many tests are about


@contextmanager
def serving_mirror(port: int = 0, **fields: Any) -> Iterator[Mirror]:
    """A mirror that listens until the block ends."""
    mirror = Mirror(**fields)
    handler = type("Handler", (_Handler,), {"mirror": mirror})
    server = _Server(("127.0.0.1", port), handler)
    mirror.url = f"http://127.0.0.1:{server.server_address[1]}"
    thread = threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True)
    thread.start()
    try:
        yield mirror
    finally:
        mirror.ending.set()
        server.shutdown()
        server.server_close()
        thread.join(10)
