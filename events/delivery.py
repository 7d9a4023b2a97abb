"""Cuts what the server sends into messages and hands each to its subscription at once.

It replaces the client library's way of doing both, which costs more than everything a reader does with a
message afterwards: headers are read only when somebody asks for them, and no queue and no task stand
between the socket and the handler. Headers to send are put together here as well. It knows nothing of
streams. Lines other than messages are left to the library.
"""

import logging
from collections.abc import Callable
from typing import Any, Final

from nats.aio.client import Client
from nats.aio.msg import Msg
from nats.errors import ProtocolError
from nats.protocol.parser import Parser

log = logging.getLogger(__name__)

STATUS: Final = "Status"
DESCRIPTION: Final = "Description"
_VERSION: Final = b"NATS/1.0"
_CRLF: Final = b"\r\n"


class Message:
    """One message as it came. `headers` are parsed anew at every look; ask `header` for one of them."""

    __slots__ = ("data", "head", "reply", "subject")

    def __init__(self, subject: str, reply: str, data: bytes, head: bytes = b"") -> None:
        self.subject = subject
        self.reply = reply
        self.data = data
        self.head = head
        """The header block as bytes, empty without one."""

    @property
    def headers(self) -> dict[str, str]:
        """All headers; an inline status is told as `Status` and `Description`."""
        return parse_headers(self.head)

    @property
    def status(self) -> str:
        """The inline status of an answer of the server itself, `503` for instance; else empty."""
        head = self.head
        # `NATS/1.0 503...`; a header that somebody named Status is none.
        return head[9:12].decode() if head[8:9] == b" " and head[9:12].isdigit() else ""

    def header(self, name: str) -> str | None:
        """A named header's value. Costs next to nothing when the message does not have it."""
        if name.encode() not in self.head:
            return None
        return parse_headers(self.head).get(name)


Handler = Callable[[Message], None]
"""Called for each message, in order, on the event loop; it must not block and must not raise."""


def parse_headers(head: bytes) -> dict[str, str]:
    r"""The headers of a block `NATS/1.0[ status[ description]]\r\nName: value\r\n...\r\n\r\n`.

    Never raises: a line that is no header is left out, a byte that is no text is replaced. Of a name
    that comes twice the last counts, which is what the server's own checks do not depend on: it
    refuses nothing for it. Names keep their case.
    """
    headers: dict[str, str] = {}
    first, *lines = head.split(_CRLF)
    status = first[len(_VERSION) :]
    if status.startswith(b" "):
        code, text = status[1:4].strip(), status[5:]
        if code.isdigit():
            headers[STATUS] = code.decode()
        if text:
            headers[DESCRIPTION] = text.decode("utf-8", "replace")
    for line in lines:
        name, colon, value = line.partition(b":")
        name = name.strip()
        # A name is one token of ASCII; anything else could not be looked up anyway.
        if colon and name.isascii() and not any(c in name for c in b" \t\v\f\r\n\x1c\x1d\x1e\x1f"):
            headers[name.decode()] = value.strip().decode("utf-8", "replace")
    return headers


class Receiver:
    """One subscription's end on this side. Its `receive` is the callback the library wants to have; the
    client below calls `take` in its place."""

    def __init__(self, handler: Handler) -> None:
        self._handler = handler
        self.open = True

    def take(self, message: Message) -> None:
        """Hands a message over, unless this end was closed."""
        if not self.open:
            return
        try:
            self._handler(message)
        except Exception:
            # One subscription's mistake must not end the reading of all the others.
            log.exception("message handler failed", extra={"subject": message.subject})

    async def receive(self, message: Msg) -> None:
        """For the library, should a message ever reach it."""
        self.take(Message(message.subject, message.reply, message.data))


class WireParser(Parser):
    """Reads messages in one pass over what has come; see the module."""

    nc: "DirectClient"

    def reset(self) -> None:
        """A new connection: nothing is under way."""
        super().reset()
        self._wanted = 0

    async def parse(self, data: bytes = b"") -> None:
        """Hands over every whole message, in order; the rest waits for more bytes.

        Raises ProtocolError for a line that is none; the library then connects anew.
        """
        self.buf += data
        if len(self.buf) < self._wanted:
            return
        self._wanted = 0
        raw = bytes(self.buf)
        at = 0
        while at < len(raw):
            end = raw.find(_CRLF, at)
            if end < 0:
                break
            line = raw[at:end]
            if not line.startswith((b"MSG ", b"HMSG ", b"MSG\t", b"HMSG\t")):
                at = end + 2
                # The library takes the buffer for its own: it gets this one line.
                self.buf = alone = bytearray(line + _CRLF)
                await super().parse()
                if self.buf is not alone:
                    return  # connected anew meanwhile: what is left belonged to the old connection
                self.buf = bytearray(raw[at:])
                continue
            sid, subject, reply, head_size, size = _message_line(line)
            start = end + 2
            stop = start + size
            if len(raw) < stop + 2:
                self._wanted = stop + 2 - at
                break
            at = stop + 2
            body = start + head_size
            self.nc.deliver(sid, subject, reply, raw[body:stop], raw[start:body])
        self.buf = bytearray(raw[at:])


def _message_line(line: bytes) -> tuple[int, str, str, int, int]:
    """`MSG subject sid [reply] size` or `HMSG subject sid [reply] head size`: sid, subject, reply, sizes."""
    fields = line.split()
    try:
        size = int(fields[-1])
        if fields[0] == b"HMSG":
            head_size = int(fields[-2])
            reply = fields[3] if len(fields) == 6 else b""
            wrong = len(fields) not in (5, 6)
        else:
            head_size = 0
            reply = fields[3] if len(fields) == 5 else b""
            wrong = len(fields) not in (4, 5)
        if wrong or not 0 <= head_size <= size:
            raise ProtocolError("nats: malformed MSG")
        return int(fields[2]), fields[1].decode(), reply.decode(), head_size, size
    except (ValueError, IndexError) as error:
        raise ProtocolError("nats: malformed MSG") from error


class DirectClient(Client):
    """The library's client with that parser. Every subscription's callback must be a `Receiver.receive`.

    It also closes the socket of an attempt that failed half-way, which the library forgets.
    """

    def __init__(self) -> None:
        super().__init__()
        self._ps = WireParser(self)

    def deliver(self, sid: int, subject: str, reply: str, data: bytes, head: bytes) -> None:
        """Hands one message to the subscription `sid`; nobody waits for one that was ended."""
        subscription = self._subs.get(sid)
        if subscription is None:
            return
        receiver: Any = getattr(subscription._cb, "__self__", None)
        assert isinstance(receiver, Receiver), "subscribed past the connection"
        receiver.take(Message(subject, reply, data, head))

    async def _send_publish(
        self,
        subject: str,
        reply: str,
        payload: bytes,
        payload_size: int,
        headers: dict[str, Any] | None,
    ) -> None:
        """Puts the headers together in one piece; a value that holds a line break is left to the library,
        which takes it out."""
        if headers:
            lines = [f"{name}: {value.strip()}\r\n" for name, value in headers.items()]
            head = f"{_VERSION.decode()}\r\n{''.join(lines)}\r\n"
            breaks = len(lines) + 2
            if head.count("\r") == breaks == head.count("\n"):
                raw = head.encode()
                begin = f"HPUB {subject} {reply} {len(raw)} {len(raw) + payload_size}\r\n"
                await self._send_command(b"".join((begin.encode(), raw, payload, _CRLF)))
                if self._flush_queue is not None and self._flush_queue.empty():
                    await self._flush_pending()
                return
        await super()._send_publish(subject, reply, payload, payload_size, headers)

    async def _connect_to_server(self, s: Any) -> None:
        transport = self._transport
        if transport is not None:
            transport.close()
        await super()._connect_to_server(s)
