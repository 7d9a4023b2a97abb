"""One HTTP exchange of the hub: reading a range, sending a body under a fault, counting what went out.

It knows neither repositories nor routes; answers.py and cdn.py do.
"""

import json
import re
import select
import socket
import sys
import threading
import time
from collections.abc import Mapping
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from tests.hub.contents import PIECE, Content
from tests.hub.counters import Counters, Exchanged, Request
from tests.hub.faults import Fault, FaultBook, Where

SEND_BUFFER = 256 * 1024
"""Bytes that the kernel takes beyond what the reader has: small, so that the counts are close to the truth."""

_AT_ONCE = 64 * 1024
_LOOK_S = 0.02
_RANGE = re.compile(r"bytes=(\d*)-(\d*)", re.ASCII)
HTML = (
    b"<!DOCTYPE html><html><head><title>Sign in</title></head>"
    b"<body>Please sign in to go on.</body></html>"
)


class Gone(Exception):
    """The reader is gone, the hub stops, or a fault ends the connection."""


class Pace:
    """Lets so many bytes a second out, all connections together; 0: as fast as they go."""

    def __init__(self, bytes_per_s: float = 0.0) -> None:
        self._lock = threading.Lock()
        self._rate = bytes_per_s
        self._free_at = 0.0

    @property
    def rate(self) -> float:
        return self._rate

    def set(self, bytes_per_s: float) -> None:
        with self._lock:
            self._rate = bytes_per_s
            self._free_at = 0.0

    def piece(self) -> int:
        """At most so many bytes at once, so that a slow answer drips instead of coming in lumps."""
        rate = self._rate
        return PIECE if not rate else max(1, min(PIECE, int(rate / 20)))

    def take(self, count: int) -> float:
        """Books `count` bytes; returns the seconds to wait before they may go."""
        with self._lock:
            if not self._rate:
                return 0.0
            now = time.monotonic()
            start = max(now, self._free_at)
            self._free_at = start + count / self._rate
            return start - now


class Listener(ThreadingHTTPServer):
    """A listening socket with its connections, all of which `close` ends."""

    daemon_threads = False
    block_on_close = True
    request_queue_size = 64

    def __init__(
        self,
        port: int,
        handler: type["Exchange"],
        hub: Any,
        *,
        counters: Counters,
        faults: FaultBook,
        pace: Pace,
    ) -> None:
        self.hub = hub
        self.counters = counters
        self.faults = faults
        self.pace = pace
        self.stopping = threading.Event()
        self._open: set[socket.socket] = set()
        self._lock = threading.Lock()
        super().__init__(("127.0.0.1", port), handler)
        # Set before any connection is made: those inherit it.
        self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SEND_BUFFER)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"

    def process_request(self, request: Any, client_address: Any) -> None:
        with self._lock:
            self._open.add(request)
        super().process_request(request, client_address)

    def shutdown_request(self, request: Any) -> None:
        with self._lock:
            self._open.discard(request)
        super().shutdown_request(request)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A reader that goes away in the middle is what tests are about; anything else is a bug to see."""
        del client_address
        if not isinstance(sys.exc_info()[1], OSError):
            super().handle_error(request, ("a reader", 0))

    def close(self) -> None:
        """Ends every connection and waits for its thread."""
        self.stopping.set()
        self.shutdown()
        self.cut_all()
        self.server_close()

    def cut_all(self) -> None:
        """Ends every connection that is open now."""
        with self._lock:
            for one in self._open:
                try:
                    one.shutdown(socket.SHUT_RDWR)
                except OSError:
                    continue


class Exchange(BaseHTTPRequestHandler):
    """What both listeners share. `where` and `subject` name the request in the counts."""

    protocol_version = "HTTP/1.1"
    server: Listener  # pyright: ignore[reportIncompatibleVariableOverride]
    disable_nagle_algorithm = True
    where: Where = "api"

    def setup(self) -> None:
        super().setup()
        self.subject = ""
        self._exchanged: Exchanged | None = None

    def log_message(self, format: str, *args: Any) -> None:
        """The counts tell it; nothing is printed."""
        del format, args

    def version_string(self) -> str:
        return "hub"

    def handle_expect_100(self) -> bool:
        return True

    def answer(self) -> None:
        """Answers one request; of each listener's own."""
        raise NotImplementedError

    def do_GET(self) -> None:
        self.subject = ""
        self._exchanged = None
        try:
            self.answer()
        except (Gone, OSError):
            self.close_connection = True
        finally:
            if self._exchanged is None:
                self._answered(0)

    do_HEAD = do_POST = do_DELETE = do_PUT = do_GET

    def token(self) -> str | None:
        scheme, _, token = self.headers.get("Authorization", "").partition(" ")
        return token.strip() if scheme.lower() == "bearer" and token.strip() else None

    def reply(
        self, status: int, body: bytes | str | Any = b"", headers: Mapping[str, str] | None = None
    ) -> None:
        """A whole answer: bytes as they are, text as plain text, anything else as JSON."""
        kind = "application/octet-stream"
        if isinstance(body, str):
            body, kind = body.encode(), "text/plain; charset=utf-8"
        elif not isinstance(body, bytes):
            body, kind = json.dumps(body).encode(), "application/json; charset=utf-8"
        given = dict(headers or {})
        given.setdefault("Content-Type", kind)
        self._head(status, given, len(body))
        if self.command != "HEAD" and body:
            self.wfile.write(body)

    def fault(self, at: Where, path: str) -> Fault | None:
        """Meets the next fault; one that answers by itself was answered, and Gone ends the exchange."""
        fault = self.server.faults.take(at, path)
        if fault is None:
            return None
        if fault.delay_s:
            self._wait(fault.delay_s)
        if fault.redirect:
            self.reply(302, b"", {"Location": fault.redirect, **fault.headers})
            raise Answered
        if fault.status:
            self.reply(fault.status, fault.body, fault.headers)
            raise Answered
        if fault.html:
            self.reply(200, HTML, {"Content-Type": "text/html; charset=utf-8"})
            raise Answered
        return fault

    def send_file(
        self, content: Content, etag: str, fault: Fault | None, headers: Mapping[str, str]
    ) -> None:
        """The bytes that were asked for, with Range and If-Range, as far as the fault lets them."""
        fault = fault or Fault(at=self.where)
        size = content.size if fault.short_at is None else min(content.size, fault.short_at)
        given = {
            "Accept-Ranges": "bytes",
            "ETag": f'"{etag}"',
            "Content-Type": "application/octet-stream",
            **headers,
        }
        asked = self._asked_range(size, etag) if not fault.ignore_range else (0, size, False)
        if asked is None:
            self._head(416, {**given, "Content-Range": f"bytes */{size}"}, 0)
            return
        start, end, partial = asked
        if partial:
            given["Content-Range"] = f"bytes {start}-{end - 1}/{size}"
        self._head(206 if partial else 200, given, end - start)
        if self.command == "HEAD":
            return
        shift = start if fault.lie_range else 0
        self._body(content, start, end, shift, fault)

    def _asked_range(self, size: int, etag: str) -> tuple[int, int, bool] | None:
        """First byte, the byte after the last one, and whether it is a part; None: not in the file."""
        found = _RANGE.fullmatch(self.headers.get("Range", "").strip())
        if found is None or not (found[1] or found[2]):
            return 0, size, False
        condition = self.headers.get("If-Range")
        if condition is not None and condition.strip().strip('"') != etag:
            return 0, size, False
        if not found[1]:
            start = max(0, size - int(found[2]))
            return (start, size, True) if size and int(found[2]) else None
        start = int(found[1])
        end = size if not found[2] else min(size, int(found[2]) + 1)
        return (start, end, True) if start < size and start < end else None

    def _body(self, content: Content, start: int, end: int, shift: int, fault: Fault) -> None:
        at = start
        while at < end:
            stop = min(end, at + self.server.pace.piece(), (at // PIECE + 1) * PIECE)
            for mark in (fault.stall_at, fault.cut_at):
                if mark is not None and at < mark < stop:
                    stop = mark
            if fault.cut_at is not None and at >= fault.cut_at:
                raise Gone
            if fault.stall_at is not None and at >= fault.stall_at:
                self._stall(fault)
            piece = content.read(at - shift, stop - at)
            if fault.wrong_at is not None and at <= fault.wrong_at < stop:
                spoilt = bytearray(piece)
                spoilt[fault.wrong_at - at] ^= 0xFF
                piece = bytes(spoilt)
            self._send(piece)
            at = stop

    def _send(self, piece: bytes) -> None:
        wait_s = self.server.pace.take(len(piece))
        if wait_s:
            self._wait(wait_s)
        exchanged = self._exchanged
        assert exchanged is not None
        for start in range(0, len(piece), _AT_ONCE):
            left = memoryview(piece)[start : start + _AT_ONCE]
            self.server.counters.sent(exchanged, len(left))
            try:
                while left:
                    left = left[self.connection.send(left) :]
            finally:
                if left:
                    self.server.counters.sent(exchanged, -len(left))

    def _answered(self, status: int) -> Exchanged:
        return self.server.counters.answered(
            Request(
                at=self.where,
                method=self.command,
                path=self.subject,
                status=status,
                range=self.headers.get("Range", ""),
                authorized="Authorization" in self.headers,
            )
        )

    def _head(self, status: int, headers: Mapping[str, str], length: int) -> None:
        self._exchanged = self._answered(status)
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name, value)
        if "Content-Length" not in headers:
            self.send_header("Content-Length", str(length))
        self.end_headers()

    def _stall(self, fault: Fault) -> None:
        while not self.server.faults.wait_cleared(fault, _LOOK_S):
            if self.server.stopping.is_set() or self._reader_gone():
                raise Gone

    def _wait(self, seconds: float) -> None:
        deadline = time.monotonic() + seconds
        while (left := deadline - time.monotonic()) > 0:
            if self.server.stopping.wait(min(left, 0.5)) or self._reader_gone():
                raise Gone

    def _reader_gone(self) -> bool:
        readable, _, _ = select.select([self.connection], [], [], 0)
        if not readable:
            return False
        try:
            return self.connection.recv(1, socket.MSG_PEEK) == b""
        except OSError:
            return True


class Answered(Exception):
    """The fault was the answer."""
