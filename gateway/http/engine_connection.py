"""One connection to an engine: writes a request, reads the head of the answer, hands the body over.

It pools nothing and retries nothing, and never parses a body: the response tells it when that was
consumed and the connection is free. What an engine does wrong becomes one of the errors of
gateway/http/errors.py.
"""

import asyncio
from collections.abc import Callable
from typing import Final, Protocol, cast

import httptools

from gateway.domain import http_rules
from gateway.domain.http_rules import (
    CHUNKED,
    NO_BODY,
    UNTIL_CLOSE,
    FramingRefused,
    Headers,
    HeadFacts,
)
from gateway.domain.known_heads import KnownHead, known_head
from gateway.http.engine_response import EngineResponse
from gateway.http.errors import BadEngineAnswer, EngineError, EngineGone, ReadTimeout
from gateway.http.exchange import Exchange
from gateway.http.limits import ClientLimits


class _HeadReader:
    """Collects what httptools reports of one response head; no cycle with its parser, and None for what it need not
    hear (as in request_head.py)."""

    __slots__ = ("complete", "items")

    on_message_begin = on_url = on_body = on_message_complete = on_chunk_header = None
    on_chunk_complete = on_status = None

    def __init__(self) -> None:
        self.items: list[tuple[bytes, bytes]] = []
        self.complete = False

    def on_header(self, name: bytes, value: bytes) -> None:
        self.items.append((name.lower(), value))

    def on_headers_complete(self) -> None:
        self.complete = True


MOST_WHOLE: Final = 64 * 1024
"""A body up to this is waited for until it is all there, for who wants the answer in one piece."""


class Asker(Protocol):
    """Wants a good answer, in one piece or as a stream of events; others are somebody else's to see to."""

    def answered(self, headers: Headers, body: bytes) -> None:
        """It is there: 200, with this body. The connection is free again."""
        ...

    def streams(self, response: EngineResponse) -> None:
        """It is a stream of events, good so far."""
        ...

    def otherwise(self, answer: "asyncio.Future[EngineResponse]") -> Exchange:
        """It comes otherwise, or not at all: who asks from now on, for whom `answer` will tell."""
        ...


TICKS: Final = 4
"""A silence is measured in so many parts of its bound."""


class EngineConnection(asyncio.Protocol):
    """A TCP connection to one engine, used for one exchange at a time.

    `on_made(connection)`: it may serve its first request, `on_free(connection)`: another one.
    `on_closed(connection)`: it will serve none any more.
    """

    __slots__ = (
        "_answered",
        "_asker",
        "_began",
        "_drain_waiter",
        "_exchange",
        "_failure",
        "_fresh",
        "_head",
        "_head_waiter",
        "_keep_alive",
        "_known",
        "_latest",
        "_latest_length",
        "_limits",
        "_method",
        "_missing",
        "_on_closed",
        "_on_free",
        "_on_made",
        "_paused_reading",
        "_pieces",
        "_request_sent",
        "_response",
        "_said_wait",
        "_timed",
        "_timer",
        "_transport",
        "_whole",
        "_write_paused",
        "closed",
        "free_since",
        "loop",
        "served",
    )

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        limits: ClientLimits,
        on_free: Callable[["EngineConnection"], None],
        on_closed: Callable[["EngineConnection"], None],
        on_made: Callable[["EngineConnection"], None] | None = None,
    ) -> None:
        self.loop = loop
        self._limits = limits
        self._on_free = on_free
        self._on_closed = on_closed
        self._on_made = on_made
        self._transport: asyncio.Transport | None = None
        self._exchange: Exchange | None = None
        self._asker: Asker | None = None  # instead of an exchange
        self._whole: tuple[Headers, HeadFacts, int] | None = None  # what its answer began with
        self._pieces: list[bytes] = []
        self._missing = 0  # bytes of that answer's body
        self._method = ""
        self._head = b""
        self._head_waiter: asyncio.Future[EngineResponse] | None = None
        self._response: EngineResponse | None = None
        self._known: KnownHead | None = (
            None  # the head of the answer before, and what was read of it
        )
        self._latest = b""  # the same, as it was
        self._latest_length = 0
        self._answered: tuple[int, Headers, HeadFacts] | None = None
        self._keep_alive = False
        self._request_sent = False
        self._paused_reading = False
        self._drain_waiter: asyncio.Future[None] | None = None
        self._write_paused = False
        self._timer: asyncio.TimerHandle | None = None
        self._said_wait = False  # it has the request: it said so, with a 1xx
        self._fresh = False  # something came since the last tick
        self._began = False  # a byte of the body is here
        self._timed = limits.first_byte_s > 0 or limits.stall_s > 0
        self._failure: EngineError | None = None
        self.closed = False
        self.served = 0
        """Exchanges completed on it."""
        self.free_since = 0.0

    # -- one exchange --------------------------------------------------------------------------

    def start(
        self, exchange: Exchange, method: str, block: bytes, *, whole: bool
    ) -> "asyncio.Future[EngineResponse]":
        """Writes the head of a request; `whole` says that `block` holds all of its body too.

        The future is the answer once its head is complete.
        """
        assert self._transport is not None
        assert self._exchange is None
        self._exchange = exchange
        self._method = method
        self._request_sent = whole
        waiter = self._head_waiter = self.loop.create_future()
        exchange.reused = self.served > 0
        exchange.bind(self._abort)
        self._transport.write(block)
        exchange.wrote(self.loop.time())
        self._began = False
        if self._limits.first_byte_s > 0:
            self._arm(self._limits.first_byte_s)
        return waiter

    def ask(self, asker: Asker, method: str, block: bytes) -> None:
        """Writes a whole request; `asker` hears of the answer, at once or not at all."""
        assert self._transport is not None
        assert self._exchange is None
        self._asker = asker
        self._method = method
        self._request_sent = True
        self._transport.write(block)
        self._began = False
        if self._limits.first_byte_s > 0:
            self._arm(self._limits.first_byte_s)

    def hand_over(self) -> None:
        """What comes is for the exchange that the asker names now; what came already too."""
        asker, self._asker = self._asker, None
        if asker is None:
            return
        waiter = self._head_waiter = self.loop.create_future()
        self._exchange = exchange = asker.otherwise(waiter)
        exchange.reused = self.served > 0
        exchange.bind(self._abort)
        if self._whole is not None:
            headers, facts, length = self._whole
            body = b"".join(self._take_pieces())
            self._begin_response(200, headers, facts, length, body)

    def drop(self) -> None:
        """Nobody wants the answer any more."""
        self._asker = None
        self._take_pieces()
        self.close()

    async def send(self, block: bytes) -> bool:
        """Writes more of the request's body; False when the engine has answered or gone already."""
        assert self._head_waiter is not None
        if self.closed or self._head_waiter.done():
            return False
        assert self._transport is not None
        self._transport.write(block)
        if self._write_paused:
            waiter = self._drain_waiter = self.loop.create_future()
            await waiter
        return not self.closed and not self._head_waiter.done()

    def sent(self) -> None:
        """The whole body was written: the connection can be kept afterwards."""
        self._request_sent = True

    @property
    def saw_nothing(self) -> bool:
        """Whether not one byte of an answer arrived in this exchange."""
        return not self._head and not self._said_wait and self._response is None

    def finished(self, response: EngineResponse) -> None:
        """The response was consumed to its end: free the connection, or close it."""
        self._disarm()
        self._exchange = None
        self._response = None
        self._head_waiter = None
        if (
            self.closed
            or response.surplus
            or not self._keep_alive
            or not self._request_sent
            or response.framing == UNTIL_CLOSE
        ):
            self.close()
            return
        self._free()

    def _free(self) -> None:
        self.served += 1
        self._head = b""
        self._said_wait = False
        self.free_since = self.loop.time()
        self.resume()
        self._on_free(self)

    @property
    def usable(self) -> bool:
        """Whether a request may be written to it."""
        return not self.closed and self._transport is not None and not self._transport.is_closing()

    def close(self) -> None:
        """Closes at once; nothing that was not sent matters any more."""
        if self._transport is not None and not self.closed:
            self._transport.abort()

    def pause(self) -> None:
        """Stops reading from the engine."""
        if not self._paused_reading and not self.closed and self._transport is not None:
            self._paused_reading = True
            self._transport.pause_reading()

    def resume(self) -> None:
        """Reads again."""
        if self._paused_reading and not self.closed and self._transport is not None:
            self._paused_reading = False
            # What came while nobody read counts from now.
            self._fresh = True
            self._transport.resume_reading()

    # -- asyncio.Protocol ----------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        # uvloop's transports are no asyncio.Transport to isinstance(), only in behaviour.
        self._transport = cast(asyncio.Transport, transport)
        on_made, self._on_made = self._on_made, None
        if on_made is not None:
            on_made(self)

    def data_received(self, data: bytes) -> None:
        response = self._response
        if response is not None:
            if self._timed:
                self._fresh = True
                if not self._began:
                    self._begin()
            consumer = response.consumer
            if consumer is None:
                response.feed(data)
            else:
                consumer.on_block(data)
        elif self._whole is not None:
            self._take_rest(data)
        elif self._asker is not None or self._head_waiter is not None:
            self._read_head(data)
        else:
            # An engine that talks without being asked: whatever it says is nobody's answer.
            self.close()

    def eof_received(self) -> bool:
        return False

    def connection_lost(self, exc: Exception | None) -> None:
        self.closed = True
        self._disarm()
        self._write_paused = False
        if self._drain_waiter is not None and not self._drain_waiter.done():
            self._drain_waiter.set_result(None)
        try:
            self._tell_lost(exc)
        finally:
            # Whatever goes wrong with who hears of it: the end of the gateway waits for every connection.
            self._on_closed(self)

    def pause_writing(self) -> None:
        self._write_paused = True

    def resume_writing(self) -> None:
        self._write_paused = False
        waiter, self._drain_waiter = self._drain_waiter, None
        if waiter is not None and not waiter.done():
            waiter.set_result(None)

    # -- inside --------------------------------------------------------------------------------

    def _tell_lost(self, exc: Exception | None) -> None:
        """Tells who asked, or takes the answer, that nothing more comes."""
        self.hand_over()
        response, self._response = self._response, None
        if response is not None:
            if self._failure is not None or exc is not None:
                response.gone(self._failure or _lost(exc))
            else:
                response.closed_cleanly()
        elif self._head_waiter is not None and not self._head_waiter.done():
            error = self._failure or _lost(exc)
            self._head_waiter.set_exception(error)
            # A request cancelled meanwhile never looks at it.
            self._head_waiter.exception()

    def _read_head(self, data: bytes) -> None:
        """Parses response heads: 1xx are skipped, the first other one makes the response."""
        known = self._known
        if known is not None and not self._head and self._method != "HEAD":
            end = data.find(b"\r\n\r\n") + 4
            head = data[:end]
            length = self._latest_length if head == self._latest else known.length_in(head)
            if length > 0:
                self._latest, self._latest_length = head, length
                assert self._answered is not None, "read when it was first known"
                self._head = data
                status, headers, facts = self._answered
                self._begin_response(status, headers, facts, length, data[end:])
                return
        self._head = self._head + data if self._head else data
        try:
            while True:
                head, rest = self._split_head()
                if head is None:
                    return
                reader = _HeadReader()
                parser = httptools.HttpResponseParser(reader)
                try:
                    parser.feed_data(head)
                except httptools.HttpParserUpgrade:
                    pass
                except httptools.HttpParserError:
                    raise BadEngineAnswer("the engine's answer is not HTTP/1.1") from None
                if not reader.complete:
                    raise BadEngineAnswer("the head of the engine's answer is incomplete")
                if len(reader.items) > self._limits.head_count:
                    raise BadEngineAnswer("the head of the engine's answer has too many headers")
                status = parser.get_status_code()
                if status >= 200:
                    break
                if status == 101:
                    raise BadEngineAnswer("the engine switched protocols without being asked")
                self._head = rest
                self._said_wait = True
            self._respond(reader.items, status, parser.get_http_version(), head, rest)
        except BadEngineAnswer as problem:
            self._fail(problem)

    def _split_head(self) -> tuple[bytes | None, bytes]:
        data = self._head
        end = data.find(b"\r\n\r\n")
        size = len(data) if end < 0 else end
        if size > self._limits.head_bytes:
            raise BadEngineAnswer(
                f"the head of the engine's answer is larger than {self._limits.head_bytes} bytes"
            )
        if not data.startswith(b"HTTP/1."[: len(data)]):
            raise BadEngineAnswer("the engine's answer is not HTTP/1.1")
        return (None, b"") if end < 0 else (data[: end + 4], data[end + 4 :])

    def _respond(
        self,
        items: list[tuple[bytes, bytes]],
        status: int,
        version: str,
        head: bytes,
        rest: bytes,
    ) -> None:
        once = http_rules.by_name(items)
        facts = http_rules.response_facts(self._method, status, version, items, once)
        if isinstance(facts, FramingRefused):
            raise BadEngineAnswer(f"the engine's answer is ambiguous: {facts.reason}")
        headers = Headers(items, once)
        if facts.framing > 0:
            self._known = known_head(head, date=True)
            self._latest, self._latest_length = head, facts.framing
            self._answered = (status, headers, facts)
        self._begin_response(status, headers, facts, facts.framing, rest)

    def _begin_response(
        self, status: int, headers: Headers, facts: HeadFacts, framing: int, rest: bytes
    ) -> None:
        """The head is read: the answer is there, and `rest` the beginning of its body."""
        asker = self._asker
        if asker is not None:
            if status == 200 and len(rest) <= framing <= MOST_WHOLE and not facts.sse:
                self._keep_alive = facts.keep_alive
                if len(rest) < framing:
                    self._whole = headers, facts, framing
                    self._missing = framing - len(rest)
                    if rest:
                        self._pieces.append(rest)
                        if self._timed:
                            self._begin()
                    return
                self._tell_whole(asker, headers, rest)
                return
            if status == 200 and facts.sse and framing == CHUNKED:
                self._tell_stream(asker, headers, facts, rest)
                return
            self.hand_over()
        assert self._exchange is not None
        assert self._head_waiter is not None
        self._keep_alive = facts.keep_alive
        self._exchange.head_at = self.loop.time()
        waiter = self._head_waiter
        if waiter.done():  # cancelled: close() is on its way
            self.close()
            return
        response = EngineResponse(self, self._exchange, status, headers, framing, facts.sse)
        self._response = response
        if framing == NO_BODY:
            response.end_at_head(surplus=bool(rest))
        elif rest:
            if self._timed and not 0 < framing <= len(rest):
                self._begin()
            response.feed(rest)
        waiter.set_result(response)

    def _take_rest(self, data: bytes) -> None:
        """More of the body of an answer in one piece."""
        if self._timed:
            self._fresh = True
            if not self._began:
                self._begin()
        self._pieces.append(data)
        self._missing -= len(data)
        if self._missing < 0:
            self.hand_over()
        elif not self._missing:
            asker, whole = self._asker, self._whole
            assert asker is not None
            assert whole is not None
            self._tell_whole(asker, whole[0], b"".join(self._take_pieces()))

    def _take_pieces(self) -> list[bytes]:
        self._whole = None
        pieces, self._pieces = self._pieces, []
        return pieces

    def _tell_whole(self, asker: Asker, headers: Headers, body: bytes) -> None:
        self._disarm()
        self._asker = None
        if self._keep_alive and not self.closed:
            self._free()
        else:
            self.close()
        asker.answered(headers, body)

    def _tell_stream(self, asker: Asker, headers: Headers, facts: HeadFacts, rest: bytes) -> None:
        self._asker = None
        self._keep_alive = facts.keep_alive
        self._exchange = exchange = Exchange()
        exchange.reused = self.served > 0
        exchange.head_at = self.loop.time()
        exchange.bind(self._abort)
        self._response = response = EngineResponse(self, exchange, 200, headers, CHUNKED, True)
        if rest:
            if self._timed:
                self._begin()
            response.feed(rest)
        asker.streams(response)

    def _abort(self, reason: str) -> None:
        self._fail(EngineGone(reason, before_first_byte=True, aborted=True))

    def _fail(self, error: EngineError) -> None:
        """Ends the exchange with `error`, which the waiter or the consumer sees at once."""
        self.hand_over()
        self._failure = error
        if self._response is not None:
            response, self._response = self._response, None
            self.close()
            response.gone(error)
            return
        if self._head_waiter is not None and not self._head_waiter.done():
            self._head_waiter.set_exception(error)
            self._head_waiter.exception()
        self.close()

    def _begin(self) -> None:
        """The body begins: from here on only the silence between two pieces of it is measured."""
        self._began = True
        self._disarm()
        if self._limits.stall_s > 0:
            self._arm(self._limits.stall_s)

    def _arm(self, bound_s: float) -> None:
        self._fresh = False
        self._timer = self.loop.call_later(bound_s / TICKS, self._tick, bound_s, 1)

    def _disarm(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _tick(self, bound_s: float, silent: int) -> None:
        """Ends the exchange when nothing came in so many ticks in a row; silence that we asked for ourselves is none.

        So a piece of a body costs a flag and no look at the clock; what is found is found a tick late at most.
        """
        if self._fresh or self._paused_reading:
            self._fresh = False
            silent = 0
        if silent < TICKS:
            self._timer = self.loop.call_later(bound_s / TICKS, self._tick, bound_s, silent + 1)
            return
        self._timer = None
        self.hand_over()
        if self._exchange is not None:
            self._exchange.stalled = True
        what = "nothing more" if self._began else "no answer"
        self._fail(ReadTimeout(f"the engine sent {what} for {bound_s:g} s", before_first_byte=True))


def _lost(exc: Exception | None) -> EngineGone:
    reason = "the engine closed the connection"
    if exc is not None:
        reason = f"the connection to the engine broke: {exc}"
    return EngineGone(reason, before_first_byte=True)
