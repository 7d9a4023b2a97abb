"""Serves one client connection: one request at a time, by the handler or as an errand.

It refuses what could be read in two ways and then closes, because everything behind it on the
connection would be guesswork. It knows no path and no model.
"""

import asyncio
import logging
from collections.abc import Callable
from typing import Final, cast

from gateway.domain.http_rules import CHUNKED
from gateway.http.arriving import Arriving
from gateway.http.bodies import Body
from gateway.http.due import DUE_BYTES, Due
from gateway.http.engine_response import EngineResponse
from gateway.http.errands import Errand
from gateway.http.errors import ClientGone, RequestError
from gateway.http.heads import Heads
from gateway.http.home import Home
from gateway.http.messages import Begun, Request, Responder
from gateway.http.request_head import RequestHead
from gateway.http.unhandled import (
    DRAINING,
    FAILED,
    NOTHING,
    Unhandled,
    answer_at_once,
    answer_problem,
)

log = logging.getLogger(__name__)

PIPELINE_BYTES: Final = 64 * 1024
"""Bytes of later requests kept while one is answered; above it reading pauses."""

SLICE: Final = 16 * 1024

CONTINUE: Final = b"HTTP/1.1 100 Continue\r\n\r\n"


class ServerProtocol(asyncio.Protocol):
    """States: waiting for a head; a request running (its body still arriving or not), which may be an errand;
    discarding the rest of a body nobody wanted; lingering (answered, closing, reading only to be polite).
    """

    __slots__ = (
        "_arriving",
        "_closing",
        "_drain_waiter",
        "_due",
        "_engine",
        "_errand",
        "_expects_continue",
        "_given_up",
        "_gone",
        "_handler_began",
        "_heads",
        "_home",
        "_keep_alive",
        "_limits",
        "_paused",
        "_pending",
        "_request",
        "_responder",
        "_task",
        "_transport",
        "_why",
        "_write_paused",
        "deadline",
        "loop",
        "peer",
    )

    def __init__(self, home: Home["ServerProtocol"], loop: asyncio.AbstractEventLoop) -> None:
        self.loop = loop
        self._home = home
        self._limits = home.limits
        self._transport: asyncio.Transport | None = None
        self.peer = ""
        """The client's address."""
        self._heads = Heads(home.limits)
        self._pending = bytearray()  # bytes of later requests
        self._due: Due | None = None  # a head whose body is about to come
        self._request: Request | None = None
        self._errand: Errand | None = None  # instead of a request
        self._task: asyncio.Task[None] | None = None
        self._handler_began = False
        self._arriving: Arriving | None = None  # the body that is still being received
        self._given_up = False  # the body cannot be followed any further; more of it comes
        self._closing = False
        self._keep_alive = True
        self._expects_continue = False
        self._responder: Responder | None = None
        self._gone = False
        self._paused = False
        self._write_paused = False
        self._drain_waiter: asyncio.Future[None] | None = None
        self._engine: EngineResponse | None = None
        self.deadline = 0.0
        """`loop.time()` at which the server's sweep ends this state; 0 = never."""
        self._why = "idle"

    # -- asyncio.Protocol ----------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        # uvloop's transports are no asyncio.Transport to isinstance(), only in behaviour.
        self._transport = cast(asyncio.Transport, transport)
        peer = transport.get_extra_info("peername")
        self.peer = str(peer[0]) if isinstance(peer, tuple) else ""
        self._wait_for("idle", self._limits.idle_timeout_s)
        self._home.opened(self)

    def data_received(self, data: bytes) -> None:
        if self._closing:
            return
        if self._pending:
            self._pending += data
        elif self._arriving is not None:
            self._receive_body(data)
        elif self._request is not None or self._errand is not None or self._write_paused:
            self._pending += data
        elif self._due is not None:
            self._receive_due(self._due, data)
        else:
            self._receive_head(data)
        if self._pending:
            self._pump()

    def eof_received(self) -> bool:
        # A client that ends its side is gone: keeping an engine busy for half a connection would
        # keep it busy for every client that left without a word.
        self._client_left()
        if not self._closing:
            # What was written is still sent, for as long as it takes that.
            self._closing = True
            self._wait_for("closing", self._limits.write_stall_timeout_s)
        return False

    def connection_lost(self, exc: Exception | None) -> None:
        self._gone = True
        self._client_left()
        waiter, self._drain_waiter = self._drain_waiter, None
        if waiter is not None and not waiter.done():
            waiter.set_result(None)
        self._home.closed(self)

    def pause_writing(self) -> None:
        self._write_paused = True
        self._wait_for("write", self._limits.write_stall_timeout_s)
        if self._engine is not None:
            self._engine.pause()

    def resume_writing(self) -> None:
        self._write_paused = False
        if self._why == "write":
            self._wait_again()
        if self._engine is not None:
            self._engine.resume()
        waiter, self._drain_waiter = self._drain_waiter, None
        if waiter is not None and not waiter.done():
            waiter.set_result(None)
        if self._pending:
            self._pump()

    # -- Wire ----------------------------------------------------------------------------------

    @property
    def sink(self) -> Callable[[bytes], object]:
        """As in messages.Wire."""
        transport = self._transport
        return self.write if transport is None else transport.write

    def write(self, block: bytes) -> None:
        """Writes without waiting; ignored when the client is gone."""
        transport = self._transport
        # One that is closing and not gone yet takes what comes and drops it.
        if transport is not None and not self._gone:
            transport.write(block)

    async def drain(self) -> None:
        """Waits while the client is slow; raises ClientGone when it left."""
        if self._write_paused and not self._gone:
            waiter = self._drain_waiter = self.loop.create_future()
            await waiter
        if self._gone:
            raise ClientGone

    def will_close(self) -> bool:
        """Whether the running answer is the last on this connection.

        A body that nobody will read to its end closes it, unless little enough of it is left.
        """
        if not self._keep_alive or self._home.draining:
            self._keep_alive = False
        elif (arriving := self._arriving) is not None:
            much = arriving.rest > self._limits.discard_bytes
            if much or self._expects_continue or arriving.body.failed:
                self._keep_alive = False
        return not self._keep_alive

    def close_after(self) -> None:
        """The running answer is the last."""
        self._keep_alive = False

    def flow_to(self, response: EngineResponse | None) -> None:
        """While set, the client's slowness pauses this engine."""
        self._engine = response
        if response is not None and self._write_paused:
            response.pause()

    def date(self) -> bytes:
        """The Date header's value."""
        return self._home.date

    # -- for the server ------------------------------------------------------------------------

    @property
    def busy(self) -> bool:
        """Whether a request is being answered."""
        return self._request is not None or self._errand is not None

    @property
    def spare(self) -> bool:
        """Whether it may be ended for somebody else's sake: nothing was asked on it yet, or all is answered."""
        return not self._closing and self._why in ("idle", "head")

    def expire(self, now: float) -> None:
        """The sweep's: acts when the state outlived its bound."""
        if not self.deadline or now < self.deadline:
            return
        self.deadline = 0.0
        if self._why == "head":
            self._refuse(408, "request_timeout", "The request head did not arrive in time.")
        elif self._why == "body" and (arriving := self._arriving) and not arriving.discarding:
            arriving.too_slow()
            self._keep_alive = False
        else:
            self.abort()

    def close_when_idle(self) -> None:
        """A drain: an idle connection ends now, a busy one behind its answer."""
        if self._due is not None:
            self.overdue(self._due)
        self._keep_alive = False
        if not self.busy and not self._closing and self._transport is not None:
            self._closing = True
            self._transport.close()

    def cut(self) -> bool:
        """Ends a running request; whether there was one."""
        errand = self._errand
        if errand is not None:
            if errand.hand_over():
                # Behind the first step of the handler, which can then say why.
                self.loop.call_soon(self._cancel_handler)
            else:
                self._errand = self._engine = None
                self._ended(finished=errand.dismiss())
            return True
        if self._task is None:
            self.abort()
            return False
        self._cancel_handler()
        return True

    def abort(self) -> None:
        """Closes at once."""
        self._closing = True
        if self._transport is not None:
            self._transport.abort()

    # -- heads ---------------------------------------------------------------------------------

    def _receive_head(self, data: bytes) -> None:
        """Bytes outside any request: a head, whole or in pieces, perhaps with a body behind it."""
        try:
            found = self._heads.cut(data)
            if found is not None:
                self._begin_request(*found)
            elif self._heads.is_begun and self._why != "head":
                self._wait_for("head", self._limits.head_timeout_s)
        except RequestError as problem:
            self._refuse(problem.status, problem.code, problem.message)

    def _begin_request(self, head: bytes, rest: bytes) -> None:
        """A complete head: checks it and starts the handler. Raises RequestError, all closing."""
        parsed, framing = self._heads.read(head)
        facts = parsed.facts
        self._keep_alive = facts.keep_alive and not self._home.draining
        self._expects_continue = (
            facts.expect is not None and parsed.version == "1.1" and framing != 0
        )
        now = self.loop.time()
        if (
            0 < framing <= self._limits.body_bytes
            and framing <= self._limits.body_memory_bytes
            and self._keep_alive
            and not self._expects_continue
            and not self._write_paused
        ):
            if framing == len(rest):
                if self._home.take(self, parsed, rest, now):
                    return
            elif len(rest) < framing <= DUE_BYTES and (bodies := self._home.due) is not None:
                self._due = due = Due(parsed, framing, rest, now)
                self._wait_for("request", 0.0)
                bodies.add(self, due)
                return
        self._begin(parsed, framing, rest, now)

    def _begin(self, parsed: RequestHead, framing: int, rest: bytes, now: float) -> None:
        body = self._make_body(framing)
        request = self._make_request(parsed, body, now)
        self._wait_for("request", 0.0)
        if framing == 0:
            body.end()
            if rest:
                self._pending[:0] = rest
        elif len(rest) == framing:
            # It came with its head, as most do.
            self._expects_continue = False
            body.fill(rest)
        else:
            self._arriving = Arriving(body, framing, self._limits, now)
            self._wait_for_body(self._arriving)
            if rest:
                self._receive_body(rest)
        self._home.begun()
        self._begin_handler(request)

    def _make_request(self, head: RequestHead, body: Body, received_at: float) -> Request:
        request = self._request = Request(
            self.loop,
            method=head.method,
            target=head.target,
            path=head.path,
            query=head.query,
            version=head.version,
            headers=head.headers,
            body=body,
            received_at=received_at,
            peer=self.peer,
        )
        self._responder = Responder(self, head.method, head.version)
        return request

    def _begin_handler(self, request: Request) -> None:
        responder = self._responder
        assert responder is not None, "made with the request"
        self._handler_began = False
        self._task = self.loop.create_task(self._run(request, responder))

    # -- bodies that are due -------------------------------------------------------------------

    def _receive_due(self, due: Due, data: bytes) -> None:
        """More of it, perhaps all; what comes behind it makes it the handler's."""
        body = due.body = due.body + data if due.body else data
        if len(body) < due.framing:
            return
        self._due, due.body = None, b""
        whole = len(body) == due.framing and not self._write_paused
        if not (whole and self._home.take(self, due.head, body, due.received_s)):
            self._begin(due.head, due.framing, body, due.received_s)

    def overdue(self, due: Due) -> None:
        """As `Expecting` says: the handler gets what there is."""
        if self._due is due and not self._closing:
            self._due = None
            self._begin(due.head, due.framing, due.body, due.received_s)

    # -- errands -------------------------------------------------------------------------------

    def run(self, errand: Errand) -> None:
        """The request that just came is an errand, until `errand_done` or `hand_over`."""
        self._errand = errand
        self._wait_for("request", 0.0)
        self._home.begun()

    def errand_done(self, *, finished: bool = True) -> None:
        """The whole answer was written; or, not `finished`, what there will ever be of it."""
        self._errand = self._engine = None
        self._ended(finished=finished)

    def errand_failed(self, responder: Responder | None) -> None:
        """It cannot be answered as it should, and is by `responder`; None: something of an answer was written."""
        self._errand = self._engine = None
        self._keep_alive = False
        if responder is not None:
            answer_at_once(responder, *FAILED)
        self._ended(finished=responder is not None)

    def hand_over(self, head: RequestHead, whole: bytes, received_at: float, begun: Begun) -> None:
        """The handler goes on with an errand, which had this head and body."""
        self._errand = None
        body = self._make_body(len(whole))
        request = self._make_request(head, body, received_at)
        request.begun = begun
        body.fill(whole)
        self._begin_handler(request)

    def _make_body(self, framing: int) -> Body:
        limits = self._limits
        return Body(
            self.loop,
            declared=None if framing == CHUNKED else framing,
            limit_bytes=limits.body_bytes,
            memory_bytes=limits.body_memory_bytes,
            budget=self._home.budget,
            spool_dir=limits.spool_dir,
            on_wanted=self._send_continue if self._expects_continue else None,
            on_room=self._resume if framing else None,
        )

    def _send_continue(self) -> None:
        """Asks for the body, when somebody wants it and it has not come by itself."""
        if self._expects_continue and self._responder is not None and not self._responder.started:
            self._expects_continue = False
            self.write(CONTINUE)

    # -- bodies --------------------------------------------------------------------------------

    def _receive_body(self, data: bytes) -> None:
        arriving = self._arriving
        assert arriving is not None
        self._expects_continue = False
        self._wait_for_body(arriving, len(data))
        used = arriving.receive(data)
        if arriving.lost:
            self._arriving = None
            self._given_up = True
            self._keep_alive = False
            if arriving.discarding:
                self.abort()
        elif arriving.is_too_much:
            self._arriving = None
            self.abort()
        elif arriving.done:
            self._arriving = None
            self._wait_for("request", 0.0)
            arriving.body.end()
            if used < len(data):
                self._pending[:0] = data[used:]
            if arriving.discarding:
                self._next_request()
        elif arriving.body.crowded:
            self._pause()

    # -- requests ------------------------------------------------------------------------------

    async def _run(self, request: Request, responder: Responder) -> None:
        """The handler's task, and what is answered when the handler does not."""
        self._handler_began = True
        try:
            await self._home.handler(request, responder)
            if not responder.started:
                log.error("a handler answered nothing", extra={"path": request.path})
                await self._last_resort(responder, NOTHING)
        except RequestError as problem:
            if problem.close:
                self._keep_alive = False
            if not responder.started:
                await answer_problem(responder, problem)
        except (ClientGone, asyncio.CancelledError):
            if not self._gone and not responder.started:
                await self._last_resort(responder, DRAINING)
        except Exception:
            log.exception("a handler failed", extra={"path": request.path})
            if not responder.started:
                await self._last_resort(responder, FAILED)
        finally:
            request.body.release()
            self._answered(responder)

    async def _last_resort(self, responder: Responder, unhandled: Unhandled) -> None:
        self._keep_alive = False
        await answer_problem(responder, RequestError(*unhandled))

    def _answered(self, responder: Responder) -> None:
        """The handler is done: go on with the connection or end it."""
        self._request = None
        self._task = None
        self._responder = None
        self._engine = None
        self._ended(finished=responder.finished)

    def _ended(self, *, finished: bool) -> None:
        self._home.done()
        if self._gone:
            return
        if not finished:
            # Cut in the middle: only a broken connection tells the client.
            self.abort()
        elif not self._keep_alive:
            self._linger()
        elif self._arriving is not None:
            self._arriving.discard()
            self._wait_for_body(self._arriving)
            self._resume()
        elif self._pending or self._paused or self._write_paused or self._home.draining:
            self._next_request()
        else:
            self._wait_for("idle", self._limits.idle_timeout_s)

    def _next_request(self) -> None:
        if self._home.draining and self._transport is not None:
            self._closing = True
            self._transport.close()
            return
        self._wait_for("idle", self._limits.idle_timeout_s)
        self._pump()

    def _pump(self) -> None:
        """Feeds what was kept while a request was answered, in slices, as far as it may go now."""
        while self._pending and not self._closing:
            # Nor is more answered to who takes nothing: the answers would be kept.
            if self._arriving is None and (self.busy or self._write_paused):
                break
            piece = bytes(self._pending[:SLICE])
            del self._pending[:SLICE]
            if self._arriving is not None:
                self._receive_body(piece)
            elif self._due is not None:
                self._receive_due(self._due, piece)
            else:
                self._receive_head(piece)
        if len(self._pending) > PIPELINE_BYTES:
            self._pause()
        elif self._arriving is None or not self._arriving.body.crowded:
            self._resume()

    def _refuse(self, status: int, code: str, message: str) -> None:
        """Answers what never became a request, and closes: what follows cannot be trusted."""
        self._heads.clear()
        self._pending.clear()
        self._keep_alive = False
        answer_at_once(Responder(self, "", "1.1"), status, code, message)
        self._linger(unread=True)

    def _linger(self, *, unread: bool = False) -> None:
        """Closes so that the client can still read the answer: a reset would destroy it."""
        transport = self._transport
        if transport is None or self._gone:
            return
        unread = unread or self._given_up or self._arriving is not None
        unread = unread or bool(self._pending) or self._paused
        self._arriving = None
        self._closing = True
        if not unread:
            # What is not sent yet still is, for as long as the client takes it.
            self._write_paused = False
            self._wait_for("closing", self._limits.write_stall_timeout_s)
            transport.close()
            return
        self._pending.clear()
        self._resume()
        if transport.can_write_eof():
            transport.write_eof()
        self._write_paused = False
        self._wait_for("linger", self._limits.linger_s)

    def _client_left(self) -> None:
        self._due = None
        errand = self._errand
        if errand is not None:
            self._gone = True
            self._errand = self._engine = None
            errand.left()
            self._home.done()
            return
        request, task = self._request, self._task
        if request is not None and task is not None:
            self._gone = True
            if self._engine is not None:
                # Nothing more of its answer may come.
                self._engine.abort()
            self._arriving = None
            request.mark_gone()
            self._cancel_handler()

    def _cancel_handler(self) -> None:
        """Cancels the running handler; one that had not begun never will, so it is cleared here."""
        task, request, responder = self._task, self._request, self._responder
        if task is None or request is None or responder is None:
            return
        task.cancel()
        if not self._handler_began:
            if request.begun is not None:
                request.begun.drop()
            request.body.release()
            self._answered(responder)

    # -- flow ----------------------------------------------------------------------------------

    def _pause(self) -> None:
        if not self._paused and self._transport is not None and not self._gone:
            self._paused = True
            self._transport.pause_reading()

    def _resume(self) -> None:
        if self._paused and self._transport is not None and not self._gone:
            self._paused = False
            self._transport.resume_reading()

    def _wait_for(self, why: str, timeout_s: float) -> None:
        """Bounds the state the connection is in now; 0: it has no bound.

        While the client takes nothing of an answer that bound stands, whatever else begins: a request more on the
        connection must not lift it.
        """
        if self._write_paused and why != "write":
            return
        self._why = why
        self.deadline = self.loop.time() + timeout_s if timeout_s > 0 else 0.0

    def _wait_for_body(self, arriving: Arriving, came: int = 0) -> None:
        self._wait_for("body", arriving.bound_s(self.loop.time(), came))

    def _wait_again(self) -> None:
        """The client takes its answers again: the bound of what is going on otherwise counts from now."""
        if self._closing:
            self._wait_for("closing", self._limits.write_stall_timeout_s)
        elif self._arriving is not None:
            self._wait_for_body(self._arriving)
        elif self.busy:
            self._wait_for("request", 0.0)
        elif self._heads.is_begun:
            self._wait_for("head", self._limits.head_timeout_s)
        else:
            self._wait_for("idle", self._limits.idle_timeout_s)
