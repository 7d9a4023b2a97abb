"""An engine's answer: the head is here, the body comes as raw bytes and is consumed by somebody.

The framing advances only where the body is consumed, so nothing is parsed that a relay passes on as
it is. It decides nothing about errors: it keeps the one that ended the body and hands it over.
"""

import asyncio
from collections.abc import AsyncIterator
from typing import Final, Protocol

from gateway.domain.chunked import ChunkedBody, ChunkError
from gateway.domain.http_rules import CHUNKED, UNTIL_CLOSE, Headers
from gateway.http.errors import BadEngineAnswer, EngineError, EngineGone
from gateway.http.exchange import Exchange

HIGH_WATER: Final = 128 * 1024
"""Raw body bytes kept for a consumer that is not there yet; above it reading pauses."""


class RawConsumer(Protocol):
    """Takes an engine's body as it arrives."""

    def on_block(self, block: bytes) -> None:
        """Raw bytes, framing included; calls EngineResponse.advance() on them."""
        ...

    def on_gone(self, error: EngineError) -> None:
        """The body broke off; nothing more comes."""
        ...


class Source(Protocol):
    """The connection an answer arrives on."""

    loop: asyncio.AbstractEventLoop

    def pause(self) -> None: ...
    def resume(self) -> None: ...
    def close(self) -> None: ...
    def finished(self, response: "EngineResponse") -> None:
        """The response was consumed to its end."""
        ...


class EngineResponse:
    """An engine's answer: the head is here, the body comes.

    Consumed in one of three ways: iterated (decoded blocks), `read`, or by a relay (`attach`).
    Whoever stops before the end calls `abort()`.
    """

    __slots__ = (
        "_buffer",
        "_buffered",
        "_chunks",
        "_connection",
        "_error",
        "_left",
        "_waiter",
        "consumer",
        "ended",
        "exchange",
        "framing",
        "headers",
        "sse",
        "status",
        "surplus",
    )

    def __init__(
        self,
        connection: Source,
        exchange: Exchange,
        status: int,
        headers: Headers,
        framing: int,
        sse: bool,
    ) -> None:
        self._connection = connection
        self.exchange = exchange
        self.status = status
        self.headers = headers
        self.framing = framing
        self.sse = sse
        """The body is a stream of server-sent events."""
        self._chunks = ChunkedBody() if framing == CHUNKED else None
        self._left = max(framing, 0)
        self._buffer: list[bytes] = []
        self._buffered = 0
        self._error: EngineError | None = None
        self._waiter: asyncio.Future[None] | None = None
        self.consumer: RawConsumer | None = None
        """Who takes the body as it arrives, once somebody does."""
        self.ended = False
        """Every byte of the body was consumed."""
        self.surplus = False

    # -- from the connection -------------------------------------------------------------------

    def feed(self, block: bytes) -> None:
        """Raw bytes of the body arrived."""
        if self.consumer is not None:
            self.consumer.on_block(block)
            return
        if self.ended:
            self.surplus = True
            self._connection.close()
            return
        self._buffer.append(block)
        self._buffered += len(block)
        if self._buffered > HIGH_WATER:
            self._connection.pause()
        if self._waiter is not None:
            self._wake()

    def end_at_head(self, *, surplus: bool) -> None:
        """There is no body."""
        self._end(surplus=surplus)

    def gone(self, error: EngineError) -> None:
        """The connection ended. What is buffered can still be consumed; then `error` is raised."""
        if self.ended or self._error is not None:
            return
        self._error = error
        if self.consumer is not None:
            self.consumer.on_gone(error)
        self._wake()

    def closed_cleanly(self) -> None:
        """The engine ended its side: the end of a close-delimited body, a loss for any other."""
        if self.framing == UNTIL_CLOSE:
            self._left = -1  # marks that the end was seen; consumers meet it behind the buffer
            if self.consumer is not None:
                self.consumer.on_block(b"")
            self._wake()
        else:
            self.gone(
                EngineGone(
                    "the engine closed the connection in the middle of its answer",
                    before_first_byte=False,
                )
            )

    # -- for consumers -------------------------------------------------------------------------

    @property
    def chunks(self) -> ChunkedBody | None:
        """The state of a chunked body, for a relay that must know where an extra chunk may go."""
        return self._chunks

    def advance(
        self,
        block: bytes,
        out: list[bytes] | None = None,
        ends: list[tuple[int, int]] | None = None,
    ) -> int:
        """Moves the framing over raw `block`; returns how many bytes of it belong to this body.

        Decoded pieces go to `out`, ends of chunks to `ends` (see ChunkedBody.feed). Sets `ended` at
        the end. Raises BadEngineAnswer.
        """
        chunks = self._chunks
        if chunks is not None:
            try:
                used = chunks.feed(block, out, ends)
            except ChunkError as problem:
                self._connection.close()
                raise BadEngineAnswer(
                    f"the engine broke the chunked encoding: {problem}", before_first_byte=False
                ) from None
            if chunks.done:
                self._end(surplus=used < len(block))
            return used
        if self.framing == UNTIL_CLOSE:
            if out is not None and block:
                out.append(block)
            if not block and self._left < 0:
                self._end(surplus=False)
            return len(block)
        used = min(self._left, len(block))
        self._left -= used
        if out is not None and used:
            out.append(block if used == len(block) else block[:used])
        if not self._left:
            self._end(surplus=used < len(block))
        return used

    def take_buffered(self) -> list[bytes]:
        """The raw blocks that arrived so far; they are the caller's from now on."""
        blocks, self._buffer = self._buffer, []
        self._buffered = 0
        return blocks

    def take_whole(self) -> bytes | None:
        """The body when it has a length and arrived in one piece already, which is then consumed."""
        if len(self._buffer) != 1 or len(self._buffer[0]) != self.framing:
            return None
        block = self._buffer.pop()
        self._buffered = 0
        self._left = 0
        self._end(surplus=False)
        return block

    async def raw(self) -> list[bytes]:
        """Raw blocks as soon as there are any; empty when the end of a close-delimited body was met.

        Raises EngineGone or BadEngineAnswer when the body broke off before.
        """
        while not self._buffer:
            if self._error is not None:
                raise self._error
            if self.ended or self._left < 0:
                return []
            waiter = self._waiter = self._connection.loop.create_future()
            self._connection.resume()
            await waiter
        blocks = self.take_buffered()
        self._connection.resume()
        return blocks

    def attach(self, consumer: RawConsumer | None) -> None:
        """From now on every block goes straight to `consumer`; the buffer must have been taken.

        An end or error that came in between is reported at once.
        """
        assert not self._buffer, "take_buffered() first: order would be lost"
        self.consumer = consumer
        if consumer is None:
            return
        if self._error is not None:
            consumer.on_gone(self._error)
        elif self.framing == UNTIL_CLOSE and self._left < 0 and not self.ended:
            consumer.on_block(b"")
        self._connection.resume()

    async def __aiter__(self) -> AsyncIterator[bytes]:
        """Decoded blocks of the body; raises EngineGone, BadEngineAnswer."""
        while not self.ended:
            blocks = await self.raw()
            out: list[bytes] = []
            for block in blocks:
                if not self.ended:
                    self.advance(block, out)
            if not blocks:
                self.advance(b"")
            for piece in out:
                yield piece

    async def read(self, limit: int) -> bytes:
        """The decoded body, at most `limit` bytes; a longer one is cut and its connection closed."""
        pieces: list[bytes] = []
        size = 0
        async for piece in self:
            pieces.append(piece)
            size += len(piece)
            if size >= limit and not self.ended:
                self.abort()
                break
        return b"".join(pieces)[:limit]

    async def peek(self, limit: int) -> bytes:
        """The beginning of the raw body, framing included, once it is all there or holds `limit` bytes; whoever
        consumes the response next still gets it. Raises EngineGone or BadEngineAnswer when it broke off before.
        """
        chunks = ChunkedBody() if self.framing == CHUNKED else None
        seen = 0
        while not self.ended and self._left >= 0:
            for block in self._buffer[seen:]:
                seen += 1
                if chunks is not None:
                    try:
                        chunks.feed(block)
                    except ChunkError:
                        # Whoever consumes it meets the same, and says so.
                        return b"".join(self._buffer)
            whole = chunks.done if chunks is not None else 0 < self.framing <= self._buffered
            if whole or self._buffered >= min(limit, HIGH_WATER):
                break
            if self._error is not None:
                raise self._error
            waiter = self._waiter = self._connection.loop.create_future()
            await waiter
        return b"".join(self._buffer)

    def pause(self) -> None:
        """Back-pressure: reads no more from the engine until resume(); behind its end the connection is another's."""
        if not self.ended:
            self._connection.pause()

    def resume(self) -> None:
        """The consumer takes more again."""
        if not self.ended:
            self._connection.resume()

    def abort(self) -> None:
        """Done with it. Closes the engine's connection unless the answer was consumed to its end."""
        self.consumer = None
        if not self.ended:
            self.ended = True
            self.exchange.bind(None)
            self._buffer = []
            self._connection.close()

    # -- inside --------------------------------------------------------------------------------

    def _end(self, *, surplus: bool) -> None:
        self.ended = True
        self.surplus = self.surplus or surplus or bool(self._buffer)
        self.exchange.bind(None)
        self._connection.finished(self)

    def _wake(self) -> None:
        waiter, self._waiter = self._waiter, None
        if waiter is not None and not waiter.done():
            waiter.set_result(None)
