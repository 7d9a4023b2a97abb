"""Asks one URL for a file and hands its body over piece by piece: sockets, TLS, proxies, redirects.

It blocks, in slices of at most SLICE_S, so that a thread can be told to stop. A token goes to the host it is
for and to no other: it is dropped for good as soon as a redirect leads elsewhere. It judges no answer.
"""

import base64
import contextlib
import os
import select
import socket
import ssl
import threading
import time
from collections.abc import Callable, Mapping
from typing import Final, Protocol
from urllib.parse import unquote, urljoin, urlsplit
from urllib.request import getproxies, proxy_bypass

import httptools

from controlplane.mirror.domain.sources import host_of

SLICE_S: Final = 0.25
CONNECT_S: Final = 10.0
HEAD_BYTES: Final = 64 * 1024
REDIRECTS: Final = 8
READ: Final = 64 * 1024
USER_AGENT: Final = "modelyard"


class Stopped(Exception):
    """The fetch was told to end."""


class CutOff(Exception):
    """The connection could not be made, broke, stood still, or spoke no HTTP; says how. Worth another try."""


class Misdirected(Exception):
    """A redirect that is not followed, or a host that is not who it says; another try would meet it again."""


class Line:
    """One connection, which `stop` ends from another thread wherever it stands."""

    def __init__(self) -> None:
        self.waits_since: float | None = None
        """Monotonic time since when a folder's disk has been waited for, which `stop` cannot end; None: it is not."""
        self._stop = threading.Event()
        self._lock = threading.Lock()
        self._socket: socket.socket | None = None

    @property
    def stopped(self) -> bool:
        return self._stop.is_set()

    def stop(self) -> None:
        self._stop.set()
        with self._lock:
            if self._socket is not None:
                with contextlib.suppress(OSError):
                    # Of the plain socket: that of TLS would forget its state under the reader's hands.
                    socket.socket.shutdown(self._socket, socket.SHUT_RDWR)

    def check(self) -> None:
        """Raises Stopped."""
        if self._stop.is_set():
            raise Stopped

    def pause(self, seconds: float) -> None:
        """Waits. Raises Stopped."""
        if self._stop.wait(max(0.0, seconds)):
            raise Stopped

    def hold(self, connection: socket.socket | None) -> None:
        """Makes `connection` the one that `stop` ends."""
        with self._lock:
            self._socket = connection
        self.check()


class Reply(Protocol):
    """What a fetch reads: an answer of a server, or a file of a folder in its form. See Answer."""

    status: int
    headers: dict[str, str]

    @property
    def redirected(self) -> bool: ...

    @property
    def end_is_told(self) -> bool: ...

    def read_into(self, view: memoryview) -> int | None: ...

    def close(self) -> None: ...


class Answer:
    """A head and the body behind it. `headers` have lower-case names. Close it."""

    def __init__(self, connection: socket.socket, line: Line) -> None:
        self.status = 0
        self.headers: dict[str, str] = {}
        self.url = ""
        self.redirected = False
        self._connection = connection
        self._line = line
        self._parser = httptools.HttpResponseParser(self)
        self._head_done = False
        self._complete = False
        self._body = bytearray()
        self._left: int | None = None

    # -- what the parser calls ----------------------------------------------------------------------

    def on_message_begin(self) -> None:
        if not self._head_done:  # an interim answer's headers are not those of the real one
            self.headers = {}

    def on_header(self, name: bytes, value: bytes) -> None:
        if self._head_done:
            return  # trailers, or whatever a server sends behind its answer
        key = name.decode("latin-1").lower()
        text = value.decode("latin-1")
        self.headers[key] = f"{self.headers[key]}, {text}" if key in self.headers else text

    def on_headers_complete(self) -> None:
        if not self._head_done:
            self.status = self._parser.get_status_code()
            self._head_done = self.status >= 200

    def on_body(self, body: bytes) -> None:
        if not self._complete:
            self._body += body

    def on_message_complete(self) -> None:
        self._complete = self._complete or self._head_done

    # -- reading ------------------------------------------------------------------------------------

    @property
    def end_is_told(self) -> bool:
        """Whether the end of the body is one the server meant, not that of the connection."""
        return self._left is not None or "transfer-encoding" in self.headers

    def read_head(self, silence_s: float) -> None:
        """All of the head within `silence_s`, interim answers included. Raises CutOff, Stopped."""
        read = 0
        until = time.monotonic() + silence_s
        while not self._head_done:
            data = self._receive_until(until)
            if data is None:
                raise CutOff(f"it did not answer for {silence_s:.0f} s")
            read += len(data)
            if not data or read > HEAD_BYTES:
                raise CutOff(
                    "it closed the connection without an answer"
                    if not data
                    else "its head has no end"
                )
            self._feed(data)
        length = self.headers.get("content-length", "")
        if "transfer-encoding" not in self.headers and length.isascii() and length.isdigit():
            # The length is known: the rest needs no parser and goes straight into the reader's buffer.
            self._left = max(0, int(length[:20]) - len(self._body))

    def read_into(self, view: memoryview) -> int | None:
        """The next bytes of the body; 0 at its end, None when none came within SLICE_S, or nothing but what
        stands between parts of a body.

        Raises CutOff when the connection ends before the body, Stopped.
        """
        if not self._body and self._left is not None:
            if self._left == 0:
                return 0
            self._line.check()
            try:
                count = self._connection.recv_into(view[: self._left])
            except TimeoutError:
                return None
            except OSError as error:
                self._line.check()
                raise CutOff(f"the connection broke ({reason(error)})") from None
            if count == 0:
                self._line.check()
                raise CutOff(f"the connection ended {self._left} bytes too early")
            self._left -= count
            return count
        if not self._body:
            if self._complete:
                return 0
            try:
                data = self._receive()
            except TimeoutError:
                return None
            if not data:
                if "transfer-encoding" in self.headers:
                    raise CutOff("the connection ended before the answer did")
                return 0  # without any length the end of the connection is the end of the body
            self._feed(data)
            if not self._body:
                return 0 if self._complete else None
        count = min(len(view), len(self._body))
        view[:count] = self._body[:count]
        del self._body[:count]
        return count

    def close(self) -> None:
        with contextlib.suppress(Stopped):
            self._line.hold(None)
        self._connection.close()

    def _feed(self, data: bytes) -> None:
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError as error:
            raise CutOff(f"it spoke no HTTP ({error})") from None

    def _receive(self) -> bytes:
        """Raises TimeoutError after a slice, CutOff, Stopped."""
        self._line.check()
        try:
            data = self._connection.recv(READ)
        except TimeoutError:
            raise
        except OSError as error:
            self._line.check()
            raise CutOff(f"the connection broke ({reason(error)})") from None
        if not data:
            self._line.check()
        return data

    def _receive_until(self, until: float) -> bytes | None:
        while time.monotonic() < until:
            with contextlib.suppress(TimeoutError):
                return self._receive()
        return None


def reason(error: OSError) -> str:
    """The short text of an error of a socket, a name lookup or TLS."""
    return error.strerror or str(error) or error.__class__.__name__


def ask(
    url: str,
    *,
    headers: Mapping[str, str],
    token: str,
    line: Line,
    silence_s: float,
    proxies: bool,
    tls: Callable[[], ssl.SSLContext] = ssl.create_default_context,
) -> Answer:
    """Sends GET and follows redirects; the answer is never one itself, unless it has no Location.

    Raises CutOff, Misdirected, Stopped.
    """
    home = host_of(url)
    redirected = False
    for _ in range(REDIRECTS):
        sent = dict(headers)
        if token and not redirected:
            sent["authorization"] = f"Bearer {token}"
        answer = _one(url, sent, line, silence_s, proxies, tls)
        location = answer.headers.get("location", "")
        if answer.status not in (301, 302, 303, 307, 308) or not location:
            answer.redirected = redirected
            return answer
        answer.close()
        try:
            before, url = urlsplit(url).scheme, urljoin(url, location)
            there = host_of(url)
        except ValueError:
            raise Misdirected("it points to an address that cannot be read") from None
        scheme = there[0]
        if scheme not in ("http", "https") or not urlsplit(url).hostname:
            raise Misdirected(f"it points to {scheme or 'nothing'}:, which is no web address")
        if (before, scheme) == ("https", "http"):
            raise Misdirected("it points from https to http")
        redirected = redirected or there != home
    raise Misdirected(f"it points on and on, more than {REDIRECTS} times")


def _one(
    url: str,
    headers: Mapping[str, str],
    line: Line,
    silence_s: float,
    proxies: bool,
    tls: Callable[[], ssl.SSLContext],
) -> Answer:
    parts = urlsplit(url)
    host = parts.hostname or ""
    port = parts.port or (443 if parts.scheme == "https" else 80)
    authority = f"[{host}]" if ":" in host else host
    if parts.port is not None:
        authority += f":{parts.port}"
    target = (parts.path or "/") + (f"?{parts.query}" if parts.query else "")
    proxy = getproxies().get(parts.scheme) if proxies and not proxy_bypass(host) else None
    sent = {
        "host": authority,
        "user-agent": USER_AGENT,
        "accept": "*/*",
        "accept-encoding": "identity",
        "connection": "close",
        **headers,
    }
    connection: socket.socket | None = None
    try:
        if proxy is None:
            connection = _connect(host, port, line)
        else:
            through = urlsplit(proxy if "//" in proxy else f"http://{proxy}")
            connection = _connect(through.hostname or "", through.port or 3128, line)
            if parts.scheme == "https":
                _tunnel(connection, host, port, _proxy_login(through.username, through.password))
            else:
                target = f"http://{authority}{target}"
                sent |= _proxy_login(through.username, through.password)
        if parts.scheme == "https":
            connection.settimeout(CONNECT_S)
            connection = tls().wrap_socket(
                connection, server_hostname=host, do_handshake_on_connect=False
            )
            line.hold(connection)
            connection.do_handshake()
        connection.settimeout(SLICE_S)
        answer = Answer(connection, line)
        answer.url = url
        connection.settimeout(CONNECT_S)
        connection.sendall(_head("GET", target, sent))
        connection.settimeout(SLICE_S)
        answer.read_head(silence_s)
    except BaseException as error:
        if connection is not None:
            connection.close()
        if isinstance(error, ssl.SSLCertVerificationError):
            raise Misdirected(f"its certificate is not trusted: {error.verify_message}") from None
        if isinstance(error, OSError):
            line.check()
            raise CutOff(reason(error)) from None
        raise
    return answer


def _head(method: str, target: str, headers: Mapping[str, str]) -> bytes:
    lines = [f"{method} {target} HTTP/1.1", *(f"{name}: {text}" for name, text in headers.items())]
    text = "\r\n".join(lines)
    if any(mark in line for line in lines for mark in "\r\n\0"):
        raise Misdirected("an address or a header holds a line break")
    return f"{text}\r\n\r\n".encode("latin-1", "replace")


def _proxy_login(user: str | None, password: str | None) -> dict[str, str]:
    if user is None:
        return {}
    login = f"{unquote(user)}:{unquote(password or '')}".encode()
    return {"proxy-authorization": f"Basic {base64.b64encode(login).decode()}"}


def _connect(host: str, port: int, line: Line) -> socket.socket:
    """A connected socket, to the first address that answers. Raises OSError, CutOff, Stopped."""
    line.check()
    problem: OSError | None = None
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    except UnicodeError:
        raise Misdirected(f"{host!r} is no name of a host") from None
    for family, kind, protocol, _, address in found:
        connection = socket.socket(family, kind, protocol)
        try:
            connection.setblocking(False)
            with contextlib.suppress(BlockingIOError):
                connection.connect(address)
            _await_connected(connection, line)
            connection.settimeout(SLICE_S)
            line.hold(connection)
        except OSError as error:
            connection.close()
            problem = error
        except BaseException:
            connection.close()
            raise
        else:
            return connection
    raise problem or OSError(f"{host} has no address")


def _await_connected(connection: socket.socket, line: Line) -> None:
    poller = select.poll()
    poller.register(connection, select.POLLOUT)
    until = time.monotonic() + CONNECT_S
    while not poller.poll(SLICE_S * 1000):
        line.check()
        if time.monotonic() >= until:
            raise TimeoutError(f"no connection within {CONNECT_S:.0f} s")
    number = connection.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
    if number:
        raise OSError(number, os.strerror(number))


def _tunnel(connection: socket.socket, host: str, port: int, login: Mapping[str, str]) -> None:
    """Asks an HTTP proxy for a way through to `host`. Raises OSError, CutOff."""
    target = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
    connection.settimeout(CONNECT_S)
    connection.sendall(_head("CONNECT", target, {"host": target, **login}))
    head = b""
    until = time.monotonic() + CONNECT_S
    # Byte by byte: what comes behind the head belongs to TLS.
    while not head.endswith(b"\r\n\r\n"):
        left_s = until - time.monotonic()
        if left_s <= 0:
            raise CutOff(f"the proxy did not answer for {CONNECT_S:.0f} s")
        connection.settimeout(left_s)
        byte = connection.recv(1)
        if not byte or len(head) > HEAD_BYTES:
            raise CutOff("the proxy closed the connection")
        head += byte
    status = head.split(b" ", 2)[1:2]
    if status != [b"200"]:
        raise CutOff(f"the proxy answers {b''.join(status).decode('latin-1')}")
