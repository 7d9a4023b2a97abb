"""Passes an engine's answer to a client as it comes: the head rewritten, the body's bytes verbatim.

Only the framing is followed, so that the end is known and a stream that breaks off can still be
ended properly. Until the first byte for the client an engine's failure is raised, because the
request can go elsewhere; afterwards it is never raised and never hidden.
"""

import asyncio
from collections.abc import Callable
from typing import Final, Protocol

from msgspec import Struct

from gateway.domain import http_rules
from gateway.domain.chunked import LAST_CHUNK, SIZE_LINES, chunk
from gateway.domain.envelopes import Envelope
from gateway.domain.http_rules import CHUNKED, NO_BODY, UNTIL_CLOSE, HeaderList, Headers
from gateway.domain.model_rewrite import JsonModelRewriter, SseModelRewriter, replace_model
from gateway.domain.tokens import EVENT, KEPT_BYTES, Tail
from gateway.http.engine_response import EngineResponse
from gateway.http.errors import BadEngineAnswer, EngineError, EngineGone
from gateway.http.outgoing import rendered

MAX_ERROR_BODY: Final = 64 * 1024
MAX_HELD: Final = 64 * 1024
"""What is held back at most while an event is incomplete; a larger event is passed on in pieces."""

_EVENT_END: Final = (b"\n\n", b"\r\n\r\n", b"\n\r\n")
_EVENT_AND_CHUNK_END: Final = (b"\n\n\r\n", b"\n\r\n\r\n")


class Relayed(Struct, frozen=True, kw_only=True):
    """How a relayed answer ended. `complete` False: cut, and `reason` says why in a sentence.

    Times are `loop.time()`; `sent_bytes` counts what was written to the client behind the head.
    """

    status: int
    complete: bool
    sent_bytes: int
    reason: str = ""
    first_byte_at: float | None = None
    last_byte_at: float | None = None


class ClientSide(Protocol):
    """What a relay needs of the responder."""

    @property
    def loop(self) -> asyncio.AbstractEventLoop: ...
    @property
    def version(self) -> str: ...
    @property
    def envelope(self) -> Envelope: ...
    @property
    def opened(self) -> bool:
        """The head of an event stream is out already."""
        ...

    def begin(self, status: int, headers: HeaderList, framing: int, *, first: bytes = b"") -> bytes:
        """Marks the answer as started and returns its head; framing as in http_rules, `first` as in render_head."""
        ...

    @property
    def put(self) -> Callable[[bytes], None]:
        """Writes without waiting."""
        ...

    @property
    def sink(self) -> Callable[[bytes], object]:
        """The same for every token, while the answer flows from this engine."""
        ...

    def end(self, *, reusable: bool) -> None:
        """The answer is complete; not reusable closes the connection behind it."""
        ...

    def flow_to(self, response: EngineResponse | None) -> None:
        """While set, the client's slowness pauses this engine."""
        ...

    async def send(self, status: int, headers: HeaderList, body: bytes) -> None: ...


async def relay(
    client: ClientSide,
    response: EngineResponse,
    *,
    headers: HeaderList = (),
    model: str | None = None,
    before_first_byte: Callable[[bytes], None] | None = None,
    tail: Tail | None = None,
) -> Relayed:
    """Relays `response`; see Responder.relay for the contract."""
    tail = tail or Tail()
    try:
        if response.status >= 400 and not response.sse and response.framing != NO_BODY:
            return await _relay_error(client, response, headers, before_first_byte)
        if client.opened:
            if not response.sse or response.framing == NO_BODY:
                return await _relay_no_stream(client, response, before_first_byte)
        elif model is None:
            if (body := response.take_whole()) is not None:
                tail.first = body[:KEPT_BYTES]
                tail.last.append(body)
                return _relay_whole(client, response, body, headers, before_first_byte)
        elif not response.sse and 0 < response.framing <= MAX_HELD:
            body = response.take_whole()
            if body is None:
                body = await _read_whole(response)
            body = replace_model(body, model)
            tail.last.append(body)
            return _relay_whole(client, response, body, headers, before_first_byte)
        return await Relay(client, response, headers, model, before_first_byte, tail).run()
    finally:
        if not response.ended:
            response.abort()
        client.flow_to(None)


async def _read_whole(response: EngineResponse) -> bytes:
    """A short body of announced length, which comes with its head or right behind it.

    Rewriting it in one go costs a fifth of rewriting it as it comes, and one that breaks off may go elsewhere.
    """
    try:
        return await response.read(response.framing)
    except EngineError as problem:
        raise _early(problem) from None


def onward_lines(headers: Headers, *, sse: bool) -> bytes:
    """Of an engine's headers those that go on to the client, rendered; the same for every answer with the same ones."""
    memo = headers.memo
    lines: bytes | None = memo.get("to client")
    if lines is None:
        onward = http_rules.client_response_headers(headers.items, sse=sse)
        lines = memo["to client"] = rendered(onward)
    return lines


def _relay_whole(
    client: ClientSide,
    response: EngineResponse,
    body: bytes,
    headers: HeaderList,
    before_first_byte: Callable[[bytes], None] | None,
) -> Relayed:
    """An answer whose body is all here, as of most that are no stream: nothing to wait for."""
    first = onward_lines(response.headers, sse=response.sse)
    if before_first_byte is not None:
        before_first_byte(body)
    client.put(client.begin(response.status, headers, len(body), first=first) + body)
    client.end(reusable=True)
    now = client.loop.time()
    return Relayed(
        status=response.status,
        complete=True,
        sent_bytes=len(body),
        first_byte_at=now,
        last_byte_at=now,
    )


async def _relay_error(
    client: ClientSide,
    response: EngineResponse,
    headers: HeaderList,
    before_first_byte: Callable[[bytes], None] | None,
) -> Relayed:
    """An error answer: read whole (they are small) and put into the one envelope."""
    try:
        body = await response.read(MAX_ERROR_BODY)
    except EngineError as problem:
        raise _early(problem) from None
    out = http_rules.client_response_headers(response.headers.items, sse=False)
    content_type = response.headers.get(b"content-type", b"") or b""
    wrapped = client.envelope.wrapped(response.status, content_type, body)
    if wrapped is not None:
        out = [item for item in out if item[0] not in (b"content-type", b"content-encoding")]
        out.append((b"content-type", b"application/json"))
        body = wrapped
    if before_first_byte is not None:
        before_first_byte(body)
    now = client.loop.time()
    await client.send(response.status, [*out, *headers], body)
    return Relayed(
        status=response.status,
        complete=True,
        sent_bytes=len(body),
        first_byte_at=now,
        last_byte_at=now,
    )


async def _relay_no_stream(
    client: ClientSide,
    response: EngineResponse,
    before_first_byte: Callable[[bytes], None] | None,
) -> Relayed:
    """A whole answer to a client that is in the middle of a stream already."""
    reason = "the engine did not answer with a stream of events"
    if before_first_byte is not None:
        before_first_byte(b"")
    now = client.loop.time()
    await client.send(502, (), client.envelope.body(502, "engine_error", reason))
    return Relayed(
        status=response.status,
        complete=False,
        sent_bytes=0,
        reason=reason,
        first_byte_at=now,
        last_byte_at=now,
    )


def _early(problem: EngineError) -> EngineError:
    """The same failure, marked as one before the client's first byte."""
    if isinstance(problem, BadEngineAnswer):
        return BadEngineAnswer(problem.reason, before_first_byte=True)
    aborted = isinstance(problem, EngineGone) and problem.aborted
    return EngineGone(problem.reason, before_first_byte=True, aborted=aborted)


class Relay:
    """One answer on its way, begun by `begin` or `run`. Raw: the engine's bytes with its framing. Else: decoded and reframed."""

    __slots__ = (
        "before_first_byte",
        "clean",
        "client",
        "counted",
        "failure",
        "first_byte_at",
        "framing",
        "headers",
        "held",
        "keep",
        "kept",
        "on_end",
        "outcome",
        "pass_on",
        "passing",
        "raw",
        "response",
        "rewriter",
        "sent_bytes",
        "sse",
        "started",
        "tail",
    )

    def __init__(
        self,
        client: ClientSide,
        response: EngineResponse,
        headers: HeaderList,
        model: str | None,
        before_first_byte: Callable[[bytes], None] | None,
        tail: Tail,
    ) -> None:
        sse = response.sse
        self.kept = tail
        self.keep = tail.last.append
        self.counted = sse
        self.client = client
        self.response = response
        self.headers = headers
        self.before_first_byte = before_first_byte
        self.rewriter: JsonModelRewriter | SseModelRewriter | None = None
        self.framing = response.framing
        self.raw = True
        if model is not None and response.framing != NO_BODY:
            self.rewriter = SseModelRewriter(model) if sse else JsonModelRewriter(model)
        if self.rewriter is not None or response.framing == UNTIL_CLOSE:
            self.raw = False
        if response.framing == CHUNKED and client.version == "1.0":
            self.raw = False
        if client.opened and response.framing != CHUNKED:
            self.raw = False
        if not self.raw:
            self.framing = UNTIL_CLOSE if client.version == "1.0" else CHUNKED
        # A body of announced length has no room for an error frame.
        self.sse = sse and self.framing in (CHUNKED, UNTIL_CLOSE)
        self.started = False
        self.held = b""
        self.tail = b""  # the last payload bytes, to know whether an event is complete
        self.clean = True  # what was written so far ends between two events
        self.sent_bytes = 0
        self.first_byte_at: float | None = None
        self.passing = (
            False  # between two chunks and two events of a stream that goes on as it comes
        )
        self.pass_on = client.sink
        self.outcome: Relayed | None = None
        self.failure: EngineError | None = None
        self.on_end: Callable[[], None] | None = None

    async def run(self) -> Relayed:
        """How it ended; raises what `failure` says."""
        waiter: asyncio.Future[None] = self.client.loop.create_future()

        def wake() -> None:
            if not waiter.done():
                waiter.set_result(None)

        if not self.begin(wake):
            try:
                await waiter
            except asyncio.CancelledError:
                # A client that leaves behind the end, before this woke, was answered all the same.
                if self.outcome is None:
                    raise
        if self.failure is not None:
            raise self.failure
        assert self.outcome is not None
        return self.outcome

    def begin(self, on_end: Callable[[], None]) -> bool:
        """Passes on what there is and what comes, until there is an `outcome`, or a `failure` before the client's first
        byte: True, it is there by now; else `on_end` is called then."""
        response = self.response
        if response.ended:
            self._write(b"")
            self._complete()
        else:
            for block in response.take_buffered():
                if self.outcome is None:
                    self.on_block(block)
        if self.outcome is None and self.failure is None:
            response.attach(self)
        if self.outcome is not None or self.failure is not None:
            return True
        self.client.flow_to(response)
        self.on_end = on_end
        return False

    # -- RawConsumer ---------------------------------------------------------------------------

    def on_block(self, block: bytes) -> None:
        """A block of the engine's raw bytes."""
        if self.passing and block.endswith(_EVENT_AND_CHUNK_END):
            # Nearly every block of a stream: whole events in one whole chunk, behind which everything is as before.
            size = len(block)
            if block.startswith(SIZE_LINES[size]):
                self.sent_bytes += size
                self.keep(block if size <= KEPT_BYTES else block[-KEPT_BYTES:])
                if self.counted:
                    self.kept.events += block.count(EVENT)
                self.pass_on(block)
                return
        if self.outcome is not None or self.failure is not None:
            return
        response = self.response
        self.passing = False
        try:
            if not self.raw:
                self._decoded(block)
            elif not self.sse:
                used = response.advance(block)
                self._write(block if used == len(block) else block[:used])
            elif not self.held and block.endswith(_EVENT_AND_CHUNK_END):
                # Whole events in whole chunks.
                used = response.advance(block)
                chunks = response.chunks
                if chunks is not None and chunks.between_chunks:
                    self.tail = b"\n\n"
                    self.clean = True
                    self._write(block)
                    self.passing = True
                else:
                    self._hold(block[:used], 0)
            else:
                self._whole_events(block)
        except BadEngineAnswer as problem:
            self.on_gone(problem)
            return
        if response.ended:
            if not self.raw:
                self._finish_decoded()
            elif self.held:
                held, self.held = self.held, b""
                self._write(held)
            self._complete()

    def on_gone(self, error: EngineError) -> None:
        """The engine's body broke off.

        1. nothing written yet: the caller may go elsewhere. 2. a stream between two events: an error
        frame, then the proper end of the framing. 3. anything else cannot be told apart from a
        complete answer unless the connection breaks: it is closed.
        """
        if self.outcome is not None or self.failure is not None:
            return
        if not self.started:  # 1
            self.failure = _early(error)
            self._wake()
            return
        reason = self.response.exchange.why(error.reason)
        ended_well = self.sse and self.clean
        if ended_well:  # 2
            frame = self.client.envelope.frame("engine_error", reason)
            if self.framing == CHUNKED:
                frame = chunk(frame) + LAST_CHUNK
            self._write(frame)
        self.client.end(reusable=ended_well)  # 3
        self._settle(complete=False, reason=reason)

    # -- inside --------------------------------------------------------------------------------

    def _write(self, block: bytes) -> None:
        size = len(block)
        self.sent_bytes += size
        kept = block if size <= KEPT_BYTES else block[-KEPT_BYTES:]
        if self.counted:
            self.kept.events += block.count(EVENT)
        elif (last := self.kept.last) and len(last[-1]) + len(kept) <= KEPT_BYTES:
            # What is no stream may come in crumbs; its end is kept all the same.
            kept = last.pop() + kept
        self.keep(kept)
        if not self.started:
            self.kept.first = block[:KEPT_BYTES]
            block = self._head(block) + block
        if block:
            self.client.put(block)

    def _head(self, first: bytes) -> bytes:
        self.started = True
        if self.before_first_byte is not None:
            self.before_first_byte(first)
        items = self.response.headers.items
        out = http_rules.client_response_headers(items, sse=self.response.sse)
        if self.headers:
            out.extend(self.headers)
        if self.framing == NO_BODY and self.response.status not in (204, 304):
            # The answer to a HEAD says how long the body would be.
            length = self.response.headers.get(b"content-length")
            out.append((b"content-length", length or b"0"))
        self.first_byte_at = self.client.loop.time()
        return self.client.begin(self.response.status, out, self.framing)

    def _whole_events(self, block: bytes) -> None:
        """A block that does not plainly end behind an event: passes on up to the last one that did.

        An engine that dies inside an event must not leave half of one before the error frame.
        """
        out: list[bytes] = []
        ends: list[tuple[int, int]] = []
        used = self.response.advance(block, out, ends)
        safe = 0
        for offset, count in reversed(ends):
            if _tail(self.tail, out[:count]).endswith(_EVENT_END):
                safe = offset
                break
        self.tail = _tail(self.tail, out)
        self._hold(block[:used], safe)

    def _hold(self, block: bytes, safe: int) -> None:
        """Writes what was held and `block` up to `safe`; holds the rest, but not without bound."""
        data = self.held + block if self.held else block
        cut = len(data) - len(block) + safe if safe else 0
        if cut:
            self.clean = True
        elif len(data) > MAX_HELD:
            cut = len(data)
            self.clean = False
        if cut:
            self._write(data[:cut])
        self.held = data[cut:]

    def _decoded(self, block: bytes) -> None:
        out: list[bytes] = []
        self.response.advance(block, out)
        data = out[0] if len(out) == 1 else b"".join(out)
        if self.rewriter is not None and data:
            data = self.rewriter.feed(data)
        if not self.sse:
            self._write_decoded(data)
            return
        data = self.held + data
        cut = len(data)
        if not data.endswith(_EVENT_END):
            cut = max(data.rfind(b"\n\n") + 2, data.rfind(b"\n\r\n") + 3)
            cut = 0 if cut <= 2 else cut
        if cut == 0 and len(data) > MAX_HELD:
            cut = len(data)
        self.held = data[cut:]
        if cut:
            self.clean = data[:cut].endswith(_EVENT_END)
            self._write_decoded(data[:cut])

    def _write_decoded(self, data: bytes) -> None:
        if data:
            self._write(chunk(data) if self.framing == CHUNKED else data)

    def _finish_decoded(self) -> None:
        rest = self.rewriter.finish() if self.rewriter is not None else b""
        rest = self.held + rest
        self.held = b""
        tail = LAST_CHUNK if self.framing == CHUNKED else b""
        if rest and self.framing == CHUNKED:
            rest = chunk(rest)
        self._write(rest + tail)

    def _complete(self) -> None:
        self.client.end(reusable=True)
        self._settle(complete=True, reason="")

    def _settle(self, *, complete: bool, reason: str) -> None:
        self.passing = False
        self.outcome = Relayed(
            status=self.response.status,
            complete=complete,
            sent_bytes=self.sent_bytes,
            reason=reason,
            first_byte_at=self.first_byte_at,
            last_byte_at=self.client.loop.time(),
        )
        self._wake()

    def _wake(self) -> None:
        if self.on_end is not None:
            self.on_end()


def _tail(before: bytes, pieces: list[bytes]) -> bytes:
    """The last four bytes of a payload, of which `before` was the tail so far."""
    if pieces and len(pieces[-1]) >= 4:
        return pieces[-1][-4:]
    return (before + b"".join(pieces))[-4:]
