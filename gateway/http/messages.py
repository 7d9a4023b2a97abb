"""One request and its answer as a handler sees them; it knows neither sockets nor engines' policy.

SIGNATURES ONLY, the implementation follows in the next commits under the same names.
"""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from typing import Protocol

from msgspec import Struct

HeaderList = Sequence[tuple[bytes, bytes]]
"""Names in lower case, values as sent; order and repetitions kept."""


class Headers(Protocol):
    """The headers of a message. `items` is a list of (lower-case name, value) as bytes."""

    items: list[tuple[bytes, bytes]]

    def get(self, name: bytes, default: bytes | None = None) -> bytes | None:
        """The first value of `name` (given in lower case), else `default`."""
        ...

    def get_all(self, name: bytes) -> list[bytes]: ...


class Body(Protocol):
    """A request's body: in memory up to 256 KiB, above that in an unlinked file; kept for a replay.

    It is received by the server at its own pace, whether or not anybody reads it. All readers raise
    RequestError (BodyTooLarge 413, BudgetFull 503 queue_full, 408 when the client falls silent,
    400 for broken chunks) and may be called again, in any order.
    """

    size: int  # bytes received so far; the length once `complete`
    declared: int | None  # Content-Length, None when chunked
    complete: bool

    async def prefix(self, n: int) -> bytes:
        """The first `n` bytes, or all of a shorter body, as soon as they are there."""
        ...

    async def read_all(self) -> bytes: ...

    def replay(self) -> AsyncIterator[bytes]:
        """The body from its first byte in blocks, as it comes; may be started any number of times."""
        ...

    def release(self) -> None:
        """Gives memory, file and budget back; called by the server after the handler ended.

        A handler may call it earlier, once the first byte of the answer made a retry impossible.
        """
        ...


class Request(Protocol):
    """One request."""

    method: str
    target: bytes  # as sent
    path: str  # raw path: percent-escapes untouched, no query
    query: bytes  # behind the first `?`, without it; b"" when there is none
    version: str  # "1.1" or "1.0"
    headers: Headers
    body: Body
    received_at: float  # loop.time() when the head was complete
    peer: str  # address of the client, for logs
    client_gone: asyncio.Future[
        None
    ]  # done when the client closed; the handler's task is also cancelled


class Relayed(Struct, frozen=True, kw_only=True):
    """How a relayed answer ended. `complete` False: cut, `reason` says why in a sentence."""

    status: int
    complete: bool
    sent_bytes: int
    reason: str = ""
    first_byte_at: float | None = None  # loop.time()
    last_byte_at: float | None = None


class Responder(Protocol):
    """Writes the one answer of one request; framing, keep-alive and HEAD are its affair."""

    started: bool  # the head was written: nothing else can be answered any more

    def add_header(self, name: bytes, value: bytes) -> None:
        """Goes out with whatever is answered, errors and relayed answers too (CORS, x-request-id)."""
        ...

    async def send(self, status: int, headers: HeaderList, body: bytes) -> None:
        """A whole answer."""
        ...

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
        """A whole answer in the OpenAI envelope."""
        ...

    async def send_head(
        self, status: int, headers: HeaderList, *, length: int | None = None
    ) -> None:
        """The head of an answer written piecewise; chunked (HTTP/1.0: until close) without a length."""
        ...

    async def write(self, block: bytes) -> None:
        """A piece of the body; waits while the client is slow."""
        ...

    async def finish(self) -> None:
        """The end of a piecewise answer."""
        ...

    async def relay(
        self,
        response: "EngineResponse",
        *,
        headers: HeaderList = (),
        model: str | None = None,
        before_first_byte: Callable[[], None] | None = None,
    ) -> Relayed:
        """Passes an engine's answer on as it comes, verbatim; `headers` go into its head.

        The client's head is written with the first byte of the body, so until then an engine that
        dies raises EngineGone(before_first_byte=True) / BadEngineAnswer and the caller may go
        elsewhere. Afterwards nothing raises: SSE gets an in-band error frame, other answers are cut,
        and `complete` is False. `model`: rename the top-level `model` of the answer to this (alias).
        Answers >= 400 that are not in the OpenAI envelope are wrapped in it.
        `before_first_byte` is called right before the client's head is written.
        """
        ...


Handler = Callable[[Request, Responder], Awaitable[None]]
"""Runs once per request in its own task. Client gone -> cancelled. RequestError raised before the
answer started is answered by the server; any other exception is logged and answered 500."""


class Exchange:
    """One request to one engine, as a handle: made by the caller before it starts.

    `Exchange(on_written=callable)`: called once, synchronously, right after the first byte was
    written to the engine's connection.
    """

    written_at: float | None  # loop.time() when the first byte was written to the engine
    head_at: float | None  # when the engine's head was complete

    def abort(self, reason: str) -> None:
        """Closes the engine's connection, at any time, also while request() still waits.

        Before the first byte to the client: request() or relay() raises EngineGone(aborted=True,
        before_first_byte=True). After it: the stream ends with an error frame that says `reason`.
        """
        ...


class EngineResponse(Protocol):
    """An engine's answer: the head is here, the body comes."""

    status: int
    headers: Headers
    exchange: Exchange

    def __aiter__(self) -> AsyncIterator[bytes]:
        """Blocks of the decoded body; raises EngineGone, BadEngineAnswer."""
        ...

    async def read(self, limit: int) -> bytes:
        """At most `limit` bytes of the body; the rest is dropped with the connection."""
        ...

    def abort(self) -> None:
        """Done with it: closes the engine's connection unless the answer was complete."""
        ...


class EngineClient(Protocol):
    """Connections to engines, pooled by endpoint. `EngineClient(limits: ClientLimits)`."""

    async def request(
        self,
        endpoint: str,  # base URL of the replica event, "http://127.0.0.1:20001"
        method: str,
        target: str,  # path and query
        headers: HeaderList,  # see http_rules.engine_request_headers(); framing and Host are added
        body: "bytes | Body | None" = None,
        *,
        exchange: Exchange | None = None,
    ) -> EngineResponse:
        """The engine's answer once its head is complete. Cancelling it closes the connection.

        Raises ConnectFailed, EngineGone(before_first_byte=True), BadEngineAnswer; RequestError when
        the client's own body breaks while it is passed on.
        """
        ...

    def forget(self, endpoint: str) -> None:
        """Closes the idle connections of an endpoint that is gone."""
        ...

    async def close(self) -> None:
        """Closes all connections."""
        ...


class Server(Protocol):
    """Returned by `await serve(handler, host, port, limits, *, sock=None, budget=None)`."""

    port: int
    active: int  # requests whose answer is not complete

    async def drain(self, timeout_s: float) -> int:
        """Stops listening, ends idle connections, waits for running requests; returns how many were cut."""
        ...

    async def close(self) -> None: ...
