"""A file server whose every answer a test writes down: right, wrong, cut, slow, or none at all.

Each connection carries one request. What was asked is kept for the test to look at.
"""

import contextlib
import re
import socket
import ssl
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

RANGE = re.compile(r"bytes=(\d+)-")


@dataclass
class Asked:
    """One request, its connection, and how many bytes of bodies went out for it."""

    method: str
    path: str
    headers: dict[str, str]
    connection: socket.socket
    server: "FileServer"
    sent: int = 0

    @property
    def offset(self) -> int | None:
        match = RANGE.fullmatch(self.headers.get("range", ""))
        return None if match is None else int(match.group(1))

    def head(self, status: int, **headers: object) -> None:
        lines = [
            f"HTTP/1.1 {status} X",
            *(f"{k.replace('_', '-')}: {v}" for k, v in headers.items()),
        ]
        self.connection.sendall(("\r\n".join(lines) + "\r\n\r\n").encode("latin-1"))

    def body(self, part: bytes) -> None:
        self.connection.sendall(part)
        self.sent += len(part)

    def answer(self, status: int, part: bytes = b"", **headers: object) -> None:
        self.head(status, content_length=len(part), **headers)
        self.body(part)

    def stall(self) -> None:
        """Sends nothing more until the client goes or the server ends."""
        while not self.server.ending.is_set():
            try:
                if not self.connection.recv(1):
                    return
            except TimeoutError:
                continue
            except OSError:
                return


Script = Callable[[Asked], None]


def whole_or_rest(
    content: bytes, *, etag: str = '"v1"', cut_after: int | None = None, step: int = 65536
) -> Script:
    """Serves `content` with ranges; `cut_after` ends each connection after that many bytes of body."""

    def script(asked: Asked) -> None:
        offset = asked.offset
        if offset is not None and asked.headers.get("if-range", etag) != etag:
            offset = None
        if offset is not None and offset >= len(content):
            asked.answer(416, content_range=f"bytes */{len(content)}")
            return
        rest = content[offset or 0 :]
        if offset is None:
            asked.head(200, content_length=len(rest), etag=etag)
        else:
            asked.head(
                206,
                content_length=len(rest),
                etag=etag,
                content_range=f"bytes {offset}-{len(content) - 1}/{len(content)}",
            )
        if cut_after is not None:
            rest = rest[:cut_after]
        for begin in range(0, len(rest), step):
            asked.body(rest[begin : begin + step])

    return script


@dataclass
class FileServer:
    """Answers by `script`, which may be changed at any time; `requests` holds what was asked, in order."""

    script: Script
    requests: list[Asked] = field(default_factory=list)
    ending: threading.Event = field(default_factory=threading.Event)
    url: str = ""
    tls: ssl.SSLContext | None = None

    @property
    def sent(self) -> int:
        return sum(asked.sent for asked in self.requests)

    def serve_one(self, connection: socket.socket) -> None:
        with contextlib.suppress(OSError):
            if self.tls is not None:
                connection = self.tls.wrap_socket(connection, server_side=True)
        with connection, contextlib.suppress(OSError):
            connection.settimeout(10)
            head = b""
            while b"\r\n\r\n" not in head:
                data = connection.recv(65536)
                if not data:
                    return
                head += data
            lines = head.split(b"\r\n\r\n")[0].decode("latin-1").split("\r\n")
            method, path, _ = lines[0].split(" ")
            headers = {
                name.lower(): text.strip()
                for name, _, text in (line.partition(":") for line in lines[1:])
            }
            connection.settimeout(0.05 if self.ending.is_set() else 5)
            asked = Asked(method, path, headers, connection, self)
            self.requests.append(asked)
            self.script(asked)


@contextmanager
def file_server(script: Script, tls: ssl.SSLContext | None = None) -> Iterator[FileServer]:
    """A running server; all its threads are over afterwards."""
    listener = socket.create_server(("127.0.0.1", 0))
    listener.settimeout(0.05)
    server = FileServer(script, tls=tls)
    server.url = f"http{'s' if tls else ''}://127.0.0.1:{listener.getsockname()[1]}"
    workers: list[threading.Thread] = []

    def accept() -> None:
        while not server.ending.is_set():
            try:
                connection, _ = listener.accept()
            except TimeoutError:
                continue
            worker = threading.Thread(target=server.serve_one, args=(connection,), daemon=True)
            workers.append(worker)
            worker.start()

    acceptor = threading.Thread(target=accept, daemon=True)
    acceptor.start()
    try:
        yield server
    finally:
        server.ending.set()
        acceptor.join()
        listener.close()
        for asked in server.requests:
            with contextlib.suppress(OSError):
                asked.connection.shutdown(socket.SHUT_RDWR)
        for worker in workers:
            worker.join(10)
            assert not worker.is_alive(), "a connection of the file server did not end"
