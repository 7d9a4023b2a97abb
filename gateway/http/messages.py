"""One request and its answer as a handler sees them: head and body in, one answer out.

Framing, keep-alive, HEAD and HTTP/1.0 are settled here; which answer it is, is the handler's
decision. Nothing here reads a socket: the protocol in server_protocol.py is its wire.
"""

import asyncio
from collections.abc import Awaitable, Callable
from typing import Protocol

from gateway.domain import http_rules
from gateway.domain.chunked import LAST_CHUNK, chunk
from gateway.domain.envelopes import OPENAI, Envelope
from gateway.domain.http_rules import CHUNKED, NO_BODY, UNTIL_CLOSE, HeaderList, Headers
from gateway.domain.tokens import Tail
from gateway.http import relay as relaying
from gateway.http.bodies import Body
from gateway.http.engine_response import EngineResponse
from gateway.http.errors import ClientGone
from gateway.http.relay import Relayed

JSON_TYPE = (b"content-type", b"application/json")


class Wire(Protocol):
    """What an answer needs of the connection it goes out on."""

    loop: asyncio.AbstractEventLoop

    @property
    def sink(self) -> Callable[[bytes], object]:
        """As `write`, for who is told at once when the client is gone (`EngineResponse.abort`) and stops then."""
        ...

    def write(self, block: bytes) -> None:
        """Writes without waiting; ignored when the client is gone."""
        ...

    async def drain(self) -> None:
        """Waits while the client is slow."""
        ...

    def will_close(self) -> bool:
        """Whether this answer is the last on the connection."""
        ...

    def close_after(self) -> None:
        """This answer is the last."""
        ...

    def flow_to(self, response: EngineResponse | None) -> None:
        """While set, the client's slowness pauses this engine."""
        ...

    def date(self) -> bytes:
        """The Date header's value."""
        ...


class Begun(Protocol):
    """What was begun of a request before its handler was; the handler knows more of it."""

    @property
    def drop(self) -> Callable[[], None]:
        """Ends what was begun: no handler goes on with it."""
        ...


class Request:
    """One request.

    `target` is as sent; `path` its raw path (escapes untouched), `query` what follows the first
    `?`. `received_at` is `loop.time()` when the head was complete, `peer` the client's address. `begun`: what the
    handler goes on with.
    """

    __slots__ = (
        "_gone",
        "_loop",
        "begun",
        "body",
        "headers",
        "method",
        "path",
        "peer",
        "query",
        "received_at",
        "target",
        "version",
    )

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        *,
        method: str,
        target: bytes,
        path: str,
        query: bytes,
        version: str,
        headers: Headers,
        body: Body,
        received_at: float,
        peer: str,
    ) -> None:
        self._loop = loop
        self._gone: asyncio.Future[None] | None = None
        self.begun: Begun | None = None
        self.method = method
        self.target = target
        self.path = path
        self.query = query
        self.version = version
        self.headers = headers
        self.body = body
        self.received_at = received_at
        self.peer = peer

    @property
    def client_gone(self) -> "asyncio.Future[None]":
        """Done when the client closed its connection; the handler's task is cancelled too."""
        if self._gone is None:
            self._gone = self._loop.create_future()
        return self._gone

    def mark_gone(self) -> None:
        """The server's: the client closed."""
        if not self.client_gone.done():
            self.client_gone.set_result(None)


class Responder:
    """Writes the one answer of one request.

    `started`: an answer began, so nothing else can be answered any more. `opened`: the head of an event stream
    was written before it was known what comes; every answer is given inside that stream then, errors as events.
    `finished`: the answer is complete. `status` is what was answered, 0 before. `envelope` is the form of its errors, set before
    anything is answered.
    """

    __slots__ = (
        "_extra",
        "_framing",
        "_head_only",
        "_left",
        "_wire",
        "envelope",
        "finished",
        "opened",
        "put",
        "started",
        "status",
        "version",
    )

    def __init__(self, wire: Wire, method: str, version: str) -> None:
        self._wire = wire
        self._head_only = method == "HEAD"
        self._framing = NO_BODY
        self._left = 0
        self._extra: list[tuple[bytes, bytes]] = []
        self.version = version
        self.envelope: Envelope = OPENAI
        self.started = False
        self.opened = False
        self.finished = False
        self.status = 0
        self.put = wire.write
        """Writes without waiting."""

    @property
    def sink(self) -> Callable[[bytes], object]:
        """Called for every token, so there is nothing around it; only while the answer flows from an engine
        (`flow_to`), whose end comes before the client's."""
        return self._wire.sink

    @property
    def loop(self) -> asyncio.AbstractEventLoop:
        """The loop whose clock `Relayed` uses."""
        return self._wire.loop

    def add_header(self, name: bytes, value: bytes) -> None:
        """Goes out with whatever is answered: errors and relayed answers too (CORS, request id)."""
        http_rules.check_header(name, value)
        self._extra.append((name, value))

    def add_own(self, headers: HeaderList) -> None:
        """As `add_header`, for headers whose values are numbers made here: nothing of a client is in them."""
        self._extra += headers

    async def send(self, status: int, headers: HeaderList, body: bytes) -> None:
        """A whole answer."""
        self.send_now(status, headers, body)
        await self._wire.drain()

    def send_now(self, status: int, headers: HeaderList, body: bytes) -> None:
        """A whole answer without waiting for a slow client; for small ones."""
        if self.opened:
            self._send_in_stream(body)
            return
        bodyless = status in (204, 304)
        head = self.begin(status, headers, NO_BODY if bodyless else len(body), whole=True)
        self._wire.write(head if bodyless or self._head_only else head + body)
        self.end(reusable=True)

    async def send_error(
        self,
        status: int,
        code: str,
        message: str,
        *,
        type: str | None = None,
        param: str | None = None,
        headers: HeaderList = (),
    ) -> None:
        """A whole answer in the client's envelope."""
        body = self.envelope.body(status, code, message, type=type, param=param)
        await self.send(status, [JSON_TYPE, *headers], body)

    async def send_head(
        self, status: int, headers: HeaderList, *, length: int | None = None
    ) -> None:
        """The head of an answer written piecewise; without a length it is chunked.

        On HTTP/1.0 an answer without a length ends with the connection.
        """
        framing = length if length is not None else CHUNKED
        if framing == CHUNKED and self.version == "1.0":
            framing = UNTIL_CLOSE
        self._left = max(framing, 0)
        self._wire.write(self.begin(status, headers, framing))
        await self._wire.drain()

    async def write(self, block: bytes) -> None:
        """A piece of the body; waits while the client is slow. Raises ClientGone."""
        if not self.started or self.finished:
            raise RuntimeError("write() comes between send_head() and finish()")
        if not block or self._head_only:
            return
        if self._framing == CHUNKED:
            block = chunk(block)
        elif self._framing >= 0:
            self._left -= len(block)
            if self._left < 0:
                raise ValueError("more body than the head announced")
        self._wire.write(block)
        await self._wire.drain()

    async def finish(self) -> None:
        """The end of a piecewise answer; ValueError when less was written than announced."""
        if self._left and not self._head_only:
            raise ValueError("less body than the head announced")
        if self._framing == CHUNKED and not self._head_only:
            self._wire.write(LAST_CHUNK)
        self.end(reusable=True)
        await self._wire.drain()

    def open_stream(self, headers: HeaderList = ()) -> None:
        """Writes the head of an event stream now, whatever its answer will be."""
        framing = UNTIL_CLOSE if self.version == "1.0" else CHUNKED
        fields = [(b"content-type", b"text/event-stream; charset=utf-8"), *http_rules.SSE_HEADERS]
        head = self.begin(200, [*fields, *headers], framing)
        self.started = False
        self.opened = True
        self._wire.write(head)

    def comment(self, block: bytes) -> None:
        """Writes a comment into an opened stream without waiting for a slow client; for small ones."""
        assert self.opened
        assert not self.started
        self._wire.write(chunk(block) if self._framing == CHUNKED else block)

    def _send_in_stream(self, body: bytes) -> None:
        """The whole answer of an opened stream: an event that says what `body` would have said, and the end."""
        frame = self.begin(200, (), self._framing) + self.envelope.framed(body)
        self._wire.write(chunk(frame) + LAST_CHUNK if self._framing == CHUNKED else frame)
        self.end(reusable=True)

    def relay(
        self,
        response: EngineResponse,
        *,
        headers: HeaderList = (),
        model: str | None = None,
        before_first_byte: Callable[[bytes], None] | None = None,
        tail: Tail | None = None,
    ) -> Awaitable[Relayed]:
        """Passes an engine's answer on as it comes, verbatim; `headers` go into its head.

        The client's head is written with the first byte of the body, so until then an engine that
        dies raises EngineGone(before_first_byte=True) or BadEngineAnswer and the caller may go
        elsewhere. Afterwards nothing is raised: a stream gets an in-band error frame, other
        answers are cut, and `complete` is False. `model`: the name the answer's top-level `model`
        shall have (an alias). Answers of 400 and above are put into the client's envelope.
        `before_first_byte` is called right before the client's head is written, with what follows it at once. `tail` gets what is
        kept of the answer to read from what it used.
        """
        return relaying.relay(
            self,
            response,
            headers=headers,
            model=model,
            before_first_byte=before_first_byte,
            tail=tail,
        )

    # -- for the relay and the server ----------------------------------------------------------

    def begin(
        self,
        status: int,
        headers: HeaderList,
        framing: int,
        *,
        whole: bool = False,
        first: bytes = b"",
    ) -> bytes:
        """Marks the answer as started and returns its head; `framing` as in http_rules, `first` as in render_head.

        A NO_BODY head says nothing of a length unless `whole` (then it says 0) or `headers` do. Of an opened
        stream the head is out: it is empty, and the framing stays.
        """
        if self.started:
            raise RuntimeError("a request is answered once")
        if self.opened:
            self.started = True
            return b""
        fields = [*headers, *self._extra]
        if framing > 0 or (framing == NO_BODY and whole and status not in (204, 304)):
            fields.append((b"content-length", b"%d" % framing))
        elif framing == CHUNKED:
            fields.append((b"transfer-encoding", b"chunked"))
        elif framing == UNTIL_CLOSE:
            self._wire.close_after()
        fields.append((b"date", self._wire.date()))
        if self._wire.will_close():
            fields.append((b"connection", b"close"))
        elif self.version == "1.0":
            fields.append((b"connection", b"keep-alive"))
        head = http_rules.render_head(status, fields, first)
        self.started = True
        self.status = status
        self._framing = framing
        return head

    def end(self, *, reusable: bool) -> None:
        """The answer is complete; not reusable closes the connection behind it."""
        self.finished = True
        if not reusable:
            self._wire.close_after()

    def flow_to(self, response: EngineResponse | None) -> None:
        """While set, the client's slowness pauses this engine."""
        self._wire.flow_to(response)


Handler = Callable[[Request, Responder], Awaitable[None]]
"""Runs once per request in its own task.

It is cancelled when the client leaves. A RequestError raised before the answer started is answered
by the server; anything else is logged and answered 500.
"""

__all__ = ["ClientGone", "Handler", "Relayed", "Request", "Responder", "Wire"]
