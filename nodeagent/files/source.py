"""Opens where bytes come from: a mirror over HTTP from any byte on, or a mirror's folder on this machine.

Blocking, for a thread of its own; `stop` ends it from outside at once. It reads no more than it is asked to
and judges nothing: what a fault means is decided in `domain/files.py`.
"""

import contextlib
import http.client
import json
import os
import socket
import ssl
import threading
import time
from pathlib import Path
from typing import Final, Protocol
from urllib.parse import urlsplit

from nodeagent.domain.files import Fault

CONNECT_S: Final = 5.0
PIECE_BYTES: Final = 1 << 20
_ANSWER_BYTES: Final = 1 << 20
"""The largest manifest that is read."""


class Stopped(Exception):
    """It was told to stop."""


class Failed(Exception):
    """An attempt came to nothing; `fault` tells why."""

    def __init__(self, fault: Fault) -> None:
        super().__init__(fault.sentence)
        self.fault = fault


class Stopper:
    """Ends a blocking attempt from another thread: the socket it waits on is shut down."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._socket: socket.socket | None = None
        self._stopped = False

    def stop(self) -> None:
        """The attempt raises Stopped as soon as it is back from the kernel."""
        with self._lock:
            self._stopped = True
            if self._socket is not None:
                _shut_down(self._socket)

    def watch(self, connected: socket.socket | None) -> None:
        """From now on `stop` shuts this socket down, or none. Raises Stopped when it was stopped."""
        with self._lock:
            self._socket = connected
            if self._stopped and connected is not None:
                raise Stopped

    def check(self) -> None:
        """Raises Stopped when it was stopped."""
        if self._stopped:
            raise Stopped


def _shut_down(connected: socket.socket) -> None:
    with contextlib.suppress(OSError):
        # Of the plain socket: that of TLS would forget its state under the reader's hands.
        socket.socket.shutdown(connected, socket.SHUT_RDWR)


def _give_up(late: threading.Event, connected: socket.socket) -> None:
    late.set()
    _shut_down(connected)


class Source(Protocol):
    """Somewhere the bytes of one content can be read."""

    @property
    def name(self) -> str:
        """Its URL or folder, as a person is told."""
        ...

    def open(self, offset: int, stopper: Stopper) -> "Bytes":
        """The bytes from `offset` on. Raises Failed, Stopped."""
        ...


class Bytes(Protocol):
    """Bytes on their way. `offset` is where they begin: 0 when the source would not begin later."""

    offset: int

    def read(self) -> bytes:
        """The next piece, as soon as there is any; empty at the end. Raises Failed, Stopped."""
        ...

    def close(self) -> None: ...


class HttpSource:
    """One content on one mirror. `stall_s` without a byte is a fault."""

    def __init__(self, url: str, key: str, sha256: str, token: str, stall_s: float) -> None:
        self._url = url
        self._key = key
        self._sha256 = sha256
        self._token = token
        self._stall_s = stall_s

    @property
    def name(self) -> str:
        return self._url

    def open(self, offset: int, stopper: Stopper) -> "HttpBytes":
        """See Source.open. Asks for the rest of this very content, by its ETag."""
        etag = f'"{self._sha256}"'
        headers = {"If-Range": etag, "Range": f"bytes={offset}-"} if offset else {}
        asked = _ask(
            self._url, f"/mirror/files/{self._key}", self._token, headers, self._stall_s, stopper
        )
        try:
            found = asked.response.getheader("ETag")
            if found is not None and found.removeprefix("W/") != etag:
                raise Failed(
                    Fault(
                        kind="gone",
                        source=self._url,
                        sentence=f"the mirror at {self._url} holds other content under this key",
                    )
                )
            if asked.response.status == http.client.PARTIAL_CONTENT:
                told = asked.response.getheader("Content-Range") or ""
                if not told.startswith(f"bytes {offset}-"):
                    raise asked.away(f"answered with the range {told!r}, not from {offset} on")
                return HttpBytes(asked, offset)
            return HttpBytes(asked, 0)
        except BaseException:
            asked.close()
            raise


class HttpBytes:
    """The body of one answer."""

    def __init__(self, asked: "_Asked", offset: int) -> None:
        self._asked = asked
        self.offset = offset

    def read(self) -> bytes:
        """See Bytes.read."""
        return self._asked.read(PIECE_BYTES)

    def close(self) -> None:
        self._asked.close()


class FolderSource:
    """One content in a mirror's folder on this machine, which lies on another file system."""

    def __init__(self, folder: Path, sha256: str) -> None:
        self._path = folder / "blobs" / sha256

    @property
    def name(self) -> str:
        return str(self._path)

    def open(self, offset: int, stopper: Stopper) -> "FolderBytes":
        """See Source.open."""
        try:
            return FolderBytes(os.open(self._path, os.O_RDONLY | os.O_CLOEXEC), offset, stopper)
        except OSError as error:
            raise Failed(_unreadable(self._path, error)) from error


class FolderBytes:
    """A file that is read from some byte on."""

    def __init__(self, file: int, offset: int, stopper: Stopper) -> None:
        self._file = file
        self._at = offset
        self._stopper = stopper
        self.offset = offset

    def read(self) -> bytes:
        """See Bytes.read."""
        self._stopper.check()
        try:
            piece = os.pread(self._file, PIECE_BYTES, self._at)
        except OSError as error:
            raise Failed(_unreadable(Path("the mirror's folder"), error)) from error
        self._at += len(piece)
        return piece

    def close(self) -> None:
        os.close(self._file)


def ask_manifest(url: str, key: str, token: str, stall_s: float, stopper: Stopper) -> bytes:
    """What a mirror says of a set. Raises Failed, Stopped."""
    asked = _ask(url, f"/mirror/sets/{key}", token, {}, stall_s, stopper)
    try:
        body = b""
        until = time.monotonic() + stall_s
        while piece := asked.read(PIECE_BYTES):
            body += piece
            if time.monotonic() > until:
                raise asked.away(f"did not tell of a set within {stall_s:g} s")
            if len(body) > _ANSWER_BYTES:
                raise asked.away("told of a set without end")
        return body
    finally:
        asked.close()


class _Asked:
    """An answer whose body can be read; every fault of the line becomes a Failed or Stopped."""

    def __init__(self, connection: http.client.HTTPConnection, url: str, stopper: Stopper) -> None:
        self._connection = connection
        self._url = url
        self._stopper = stopper
        self._opened = contextlib.ExitStack()
        self.response: http.client.HTTPResponse

    def ask(self, path: str, headers: dict[str, str], stall_s: float) -> None:
        try:
            self._connection.connect()
            self._stopper.watch(self._connection.sock)
            self._connection.sock.settimeout(stall_s)
            # The socket's own bound is for each piece; a head may come in as many as it likes.
            late = threading.Event()
            overdue = threading.Timer(stall_s, _give_up, (late, self._connection.sock))
            overdue.start()
            try:
                self._connection.request("GET", path, headers=headers)
                # It outlives its connection when the mirror closes after the answer.
                self.response = self._opened.enter_context(self._connection.getresponse())
            finally:
                overdue.cancel()
            if late.is_set():  # what was cut short looks like a head that ended
                raise TimeoutError
        except (OSError, http.client.HTTPException) as error:
            self._stopper.check()
            raise self.away(f"does not answer ({_told(error)})") from error

    def read(self, most: int) -> bytes:
        try:
            piece = self.response.read1(most)
        except (OSError, http.client.HTTPException) as error:
            self._stopper.check()
            raise self.away(f"stopped sending ({_told(error)})") from error
        # A socket that was shut down under the reader looks like the end of the answer.
        self._stopper.check()
        return piece

    def away(self, what: str) -> Failed:
        sentence = f"the mirror at {self._url} {what}"
        return Failed(Fault(kind="away", source=self._url, sentence=sentence))

    def close(self) -> None:
        self._stopper.watch(None)
        self._opened.close()
        self._connection.close()


def _ask(
    url: str, path: str, token: str, headers: dict[str, str], stall_s: float, stopper: Stopper
) -> _Asked:
    """A good answer to a GET. Raises Failed, Stopped."""
    stopper.check()
    try:
        parts = urlsplit(url)
        host, port = parts.hostname or "", parts.port
    except ValueError:
        parts, host, port = urlsplit(""), "", None
    if parts.scheme not in ("http", "https") or not host:
        sentence = f"a mirror announced {url!r}, which is no http or https address"
        raise Failed(Fault(kind="away", source=url, sentence=sentence))
    connection: http.client.HTTPConnection
    if parts.scheme == "https":
        context = ssl.create_default_context()
        connection = http.client.HTTPSConnection(host, port, timeout=CONNECT_S, context=context)
    else:
        connection = http.client.HTTPConnection(host, port, timeout=CONNECT_S)
    asked = _Asked(connection, url, stopper)
    try:
        given = {"Authorization": f"Bearer {token}", "Accept-Encoding": "identity", **headers}
        asked.ask(parts.path.rstrip("/") + path, given, stall_s)
        status = asked.response.status
        if status not in (http.client.OK, http.client.PARTIAL_CONTENT):
            raise Failed(_fault_of(status, url, _sentence_in(asked)))
    except BaseException:
        asked.close()
        raise
    return asked


def _fault_of(status: int, url: str, said: str) -> Fault:
    """What an answer other than the bytes means."""
    mirror = f"the mirror at {url}"
    match status:
        case 401 | 403:
            return Fault(
                kind="refused",
                source=url,
                sentence=f"{mirror} refuses this node ({status}): is the node's secret of this yard?"
                + said,
            )
        case 404 | 410:
            return Fault(kind="gone", source=url, sentence=f"{mirror} does not have it{said}")
        case 416:
            # What is here goes beyond what is there: nothing of it can be believed.
            return Fault(
                kind="wrong", source=url, sentence=f"{mirror} has fewer bytes than announced{said}"
            )
        case _:
            return Fault(kind="away", source=url, sentence=f"{mirror} answered {status}{said}")


def _sentence_in(asked: _Asked) -> str:
    """What the mirror says for itself, in one short line; nothing when it is no answer of a mirror."""
    try:
        said = json.loads(asked.read(4096))["error"]["sentence"]
    except (Failed, ValueError, KeyError, TypeError):
        return ""
    line = " ".join(str(said).split())[:200]
    return f": {line}" if line.isprintable() else ""


def _unreadable(path: Path, error: OSError) -> Fault:
    return Fault(kind="away", source=str(path), sentence=f"{path}: {error.strerror}")


def _told(error: BaseException) -> str:
    if isinstance(error, TimeoutError):
        return "no byte in time"
    return str(error) or type(error).__name__
