"""Serves one plain request without a task: asks its engine, passes the answer on, and ends all that was counted for it.

Each step is one call of whoever has something new: the connection its answer comes on, the agent that was asked for its
adapter, the client that left. Whatever turns out otherwise, at any moment, is handed over to the handler as it stands then,
and goes on there as if it had begun there. It decides nothing of its own: which replica, how long and what is counted are asked of
the same parts that the handler asks.
"""

import asyncio
import logging
from collections.abc import Callable
from functools import lru_cache, partial
from typing import Final

import msgspec

from gateway.adapterdesk import Adapted, Seeking
from gateway.adapters import Adapters
from gateway.begun import Begun
from gateway.domain.admission import Route
from gateway.domain.answers import Answer
from gateway.domain.envelopes import envelope
from gateway.domain.http_rules import Headers
from gateway.domain.model_rewrite import Renaming
from gateway.domain.outliers import is_good
from gateway.domain.reasons import HeaderPairs, reason_headers, waited_header
from gateway.domain.request_fields import RequestFields
from gateway.domain.routing import Why
from gateway.domain.tokens import Tail, Tokens, tokens_of_whole
from gateway.domain.traces import new_trace, own_lines
from gateway.domain.turns import Busy
from gateway.endings import Endings, Plain
from gateway.endpoints import EngineKey, may_name_model
from gateway.gateway import Gateway
from gateway.http.bodies import BodyBudget
from gateway.http.client import EngineClient
from gateway.http.engine_connection import EngineConnection
from gateway.http.engine_response import EngineResponse
from gateway.http.errands import ErrandWire
from gateway.http.exchange import Exchange
from gateway.http.messages import Responder
from gateway.http.outgoing import rendered
from gateway.http.relay import Relay, onward_lines
from gateway.http.unhandled import DRAINING, answer_at_once
from gateway.inhand import Run
from gateway.lanes import Lane
from gateway.limits import Grant, Limits
from gateway.metrics import Metrics
from gateway.served import CLIENT_GONE, Served, charge
from gateway.timeline import Timeline, Timelines
from schemas.adapterasks import EnsureAnswer

log = logging.getLogger("gateway.errand")

_NONE_TOLD: Final = Tokens()

_NOT_WAITED: Final = waited_header(0.0)


class Means:
    """What all errands of a gateway are served with."""

    def __init__(
        self,
        gateway: Gateway,
        limits: Limits,
        client: EngineClient,
        adapters: Adapters,
        metrics: Metrics,
        timelines: Timelines,
        endings: Endings,
        budget: BodyBudget,
        *,
        engine_key: EngineKey,
        stalled: Callable[[Run], None],
        new_request_id: Callable[[], str],
        random_bits: Callable[[int], int],
    ) -> None:
        self.gateway = gateway
        self.clock = gateway.clock
        self.limits = limits
        self.client = client
        self.adapters = adapters
        self.metrics = metrics
        self.timelines = timelines
        self.endings = endings
        self.budget = budget
        self.engine_key = engine_key
        self.stalled = stalled
        self.new_request_id = new_request_id
        self.random_bits = random_bits


class Errand:
    """One request on its way: `begin`, then `answered` or `streams`, unless it is handed over or its client leaves."""

    __slots__ = (
        "_body",
        "_connection",
        "_fields",
        "_grant",
        "_how",
        "_is_over",
        "_lane",
        "_limited",
        "_means",
        "_name",
        "_received_s",
        "_relay",
        "_renaming",
        "_responder",
        "_response",
        "_route",
        "_run",
        "_seeking",
        "_served",
        "_size",
        "_timeline",
        "_waited_s",
        "_waiter",
        "_wire",
        "_written_s",
    )

    def __init__(
        self,
        means: Means,
        wire: ErrandWire,
        lane: Lane,
        body: bytes,
        fields: RequestFields,
        grant: Grant | None,
        received_s: float,
    ) -> None:
        self._means = means
        self._wire = wire
        self._lane = lane
        self._body = body
        self._size = len(body)
        self._fields = fields
        self._grant = grant
        self._limited = b"" if grant is None else means.limits.lines(lane.caller)
        self._received_s = received_s
        trace = new_trace(means.random_bits(192))
        self._timeline = Timeline(means.new_request_id(), received_s, trace)
        self._route: Route | None = None
        self._renaming: Renaming | None = None
        self._seeking: Seeking | None = None
        self._run: Run | None = None
        self._how = self._name = ""
        self._waiter: asyncio.Future[EnsureAnswer | None] | None = None  # what its agent will say
        self._waited_s = 0.0  # for its adapter
        self._connection: EngineConnection | None = None
        self._written_s = 0.0
        self._served: Served | None = None
        self._response: EngineResponse | None = None
        self._responder: Responder | None = None
        self._relay: Relay | None = None
        self._is_over = False

    def begin(self, route: Route, beginning: msgspec.Raw | None) -> None:
        """Sends it to a replica of the route, or hands it over."""
        means, timeline, lane = self._means, self._timeline, self._lane
        self._route = route
        name, asked = route.model.name, self._fields.model
        means.timelines.keep(timeline, name)
        run: Run | Answer | Busy | None
        if route.adapter is None:
            tie = partial(lane.tie, beginning) if lane.tied else None
            run = means.gateway.start(route, self.abort, affinity=tie)
        else:
            run = means.gateway.start_hit(route, self.abort)
            if run is None:
                self._seeking = seeking = Seeking(asked, timeline.request_id)
                run = means.gateway.start(route, self.abort, seeking)
        if not isinstance(run, Run):
            self.hand_over()
            return
        self._run = run
        if run.held is not None:
            name = run.held.engine_name if run.adapted is None else means.adapters.hit(run)
            if not name:
                self._ask_for_adapter(run)
                return
            self._name, self._how = name, "hit"
        self._send(run, name)

    def _ask_for_adapter(self, run: Run) -> None:
        self._waiter = waiter = self._means.adapters.ask_ahead(run)
        if waiter is None:
            self.hand_over()
        else:
            waiter.add_done_callback(self._heard)

    def _heard(self, waiter: "asyncio.Future[EnsureAnswer | None]") -> None:
        """Its agent has answered: it goes on if the adapter is there, else the handler does."""
        run = self._run
        if self._waiter is not waiter or run is None:
            return
        self._end_wait()
        try:
            name = self._means.adapters.there(run)
            if not name:
                self.hand_over()
                return
            assert self._seeking is not None, "no hit"
            self._name, self._how = name, self._seeking.how or ""
            self._timeline.mark("adapter_there", self._means.clock.now_s())
            self._send(run, name)
        except Exception:
            log.exception("an errand failed", extra={"path": self._lane.path})
            self.fail()

    def _end_wait(self) -> None:
        """Nothing is waited for any more here; what it took is kept."""
        if self._waiter is not None:
            self._waiter = None
            assert self._seeking is not None, "no hit"
            self._waited_s = self._means.clock.now_s() - min(self._seeking.asked_s.values())

    def _send(self, run: Run, name: str) -> None:
        """Asks the run's engine for what it knows by this name, or hands it over."""
        means, timeline, lane = self._means, self._timeline, self._lane
        replica, asked = run.replica, self._fields.model
        endpoint = replica.endpoint
        assert endpoint is not None, "routable replicas have an endpoint"
        kept = means.client.take(endpoint)
        if kept is None:
            self.hand_over()
            return
        if run.adapted is not None:
            run.adapted.ahead = None
        self._connection = connection = kept[0]
        body = self._body
        if asked != name:
            renaming = lane.renamings.get(asked)
            if renaming is None or renaming.own != name:
                renaming = lane.renames(asked, name)
            self._renaming = renaming
            body = renaming.onward(body)
        front = lane.fronts.get(replica.id)
        if front is None or front.of is not replica:
            front = lane.new_front(replica, kept[1], means.engine_key(replica))
        connection.ask(
            self, "POST", front.block(own_lines(timeline.request_id, timeline.trace), body)
        )
        self._written_s = timeline.marks["written_to_engine"] = means.clock.now_s()

    # -- its end -------------------------------------------------------------------------------

    def answered(self, headers: Headers, body: bytes) -> None:
        """The engine's whole answer is here: it goes out, and all that was counted ends."""
        try:
            self._answer(headers, body)
        except Exception:
            log.exception("an errand failed", extra={"path": self._lane.path})
            self.fail()
        else:
            # The run leads back here: what nobody needs any more shall go at once.
            self._run = None
            self._wire.errand_done()

    def _answer(self, headers: Headers, body: bytes) -> None:
        means, timeline, run, lane = self._means, self._timeline, self._run, self._lane
        assert run is not None, "asked by a run"
        self._connection = None
        wire = self._wire
        now_s = means.clock.now_s()
        marks = timeline.marks
        marks["first_byte"] = marks["last_byte"] = now_s
        onward = onward_lines(headers, sse=False)
        used = tokens_of_whole(body)
        renaming = self._renaming
        if renaming is not None and may_name_model(headers):
            body = renaming.back(body)
        size = len(body)
        replica = run.replica.id
        id_ = timeline.request_id.encode()
        closing = b"connection: close\r\n" if wire.will_close() else b""
        wire.write(
            b"HTTP/1.1 200 OK\r\n%b%b%b%b%bcontent-length: %d\r\ndate: %b\r\n%b\r\n%b"
            % (
                onward,
                _why_lines(run.model, replica, run.why, self._how)
                if not self._waited_s
                else rendered(self._why(run)),
                lane.told_id(id_),
                lane.cors,
                self._limited,
                size,
                wire.date(),
                closing,
                body,
            )
        )
        self._is_over = True
        gateway = means.gateway
        gateway.finish(run, used=True)
        means.budget.give(self._size)
        if run.lost is None:
            gateway.judge(run.replica, good=True)
        if self._how:
            means.metrics.count_adapter(run.model, self._how)
        # Not by what was asked for: an alias may be another adapter's by now.
        kind = replica, self._adapter()
        plain = lane.plain.get(kind)
        if self._waited_s:
            plain = None
        elif plain is None and lane.is_used and not means.endings.tells_spans:
            plain = self._new_plain(kind)
        lane.is_used = True
        if plain is None:
            # Of the only request of its connection, nothing will be the same another time.
            served = self._told()
            served.status, served.sent_bytes, served.used, served.whole = 200, size, used, True
            means.metrics.answered_first(run.model, now_s - self._written_s)
            self._end(served)
            return
        if self._grant is not None:
            self._grant.end(charge(self._grant, used, self._size, size))
        means.endings.answered(
            plain,
            timeline,
            received_s=self._received_s,
            written_s=self._written_s,
            answered_s=now_s,
            used=used or _NONE_TOLD,
            sent_bytes=size,
        )

    def _new_plain(self, kind: tuple[str, str]) -> Plain:
        lane, endings = self._lane, self._means.endings
        plain = endings.plain(self._told(), lane.head.path, self._wire.peer, lane.priority)
        lane.add_plain(kind, plain)
        return plain

    def _told(self) -> Served:
        """What the handler, or whoever says how it ended, has to know of it."""
        if self._served is None:
            self._served = served = Served(
                caller=self._lane.caller,
                grant=self._grant,
                asked_bytes=self._size,
                path=self._lane.path,
                how=self._how,
                waited_s=self._waited_s,
                adapter_waited_s=self._waited_s or None,
            )
            if self._route is not None:
                served.model = self._route.model.name
            if self._run is not None:
                served.replica = self._run.replica.id
                served.adapter = self._adapter()
        return self._served

    def _adapter(self) -> str:
        """The name of the adapter it is for, empty for none."""
        entry = None if self._route is None else self._route.adapter
        return "" if entry is None else entry.adapter.name

    # -- a stream ------------------------------------------------------------------------------

    def streams(self, response: EngineResponse) -> None:
        """The engine answers with a stream: it is passed on as it comes."""
        try:
            self._stream(response)
        except Exception:
            log.exception("an errand failed", extra={"path": self._lane.path})
            self.fail()

    def _stream(self, response: EngineResponse) -> None:
        means, run, lane = self._means, self._run, self._lane
        assert run is not None, "asked by a run"
        self._response = response
        replica, exchange = run.replica.id, response.exchange
        run.abort = exchange.abort
        exchange.written_at = self._written_s
        exchange.explain = partial(means.gateway.why_broke, replica)
        served = self._told()
        served.tail = tail = Tail()
        served.sse = True
        self._responder = responder = self._new_responder()
        responder.add_own(means.limits.headers(lane.caller))
        if self._how:
            means.metrics.count_adapter(run.model, self._how)
        name = self._fields.model
        renamed = name if name != run.model else None
        relay = Relay(responder, response, self._why(run), renamed, self._first_byte, tail)
        self._relay = relay
        if relay.begin(self._streamed):
            self._streamed()

    def _why(self, run: Run) -> HeaderPairs:
        """What an answer tells of where it came from, and how long that took to be there."""
        told = reason_headers(run.model, run.replica.id, run.why, self._how)
        return (waited_header(self._waited_s), *told)

    def _new_responder(self) -> Responder:
        """What an answer that is not written in one piece goes out by, with what every answer tells."""
        lane, request_id = self._lane, self._timeline.request_id
        responder = Responder(self._wire, "POST", "1.1")
        responder.envelope = envelope(lane.place.envelope, request_id)
        responder.add_own(
            (
                (b"x-request-id", request_id.encode()),
                *lane.cors_headers,
                *responder.envelope.headers(),
            )
        )
        return responder

    def _first_byte(self, _: bytes) -> None:
        """From here on it can go nowhere else."""
        self._timeline.marks["first_byte"] = self._means.clock.now_s()
        if self._run is not None:
            self._run.has_byte = True
        self._give_body()

    def _streamed(self) -> None:
        """The stream has ended, as its relay says; before its first byte the handler may send it elsewhere."""
        relay, run, response = self._relay, self._run, self._response
        if self._is_over or relay is None or run is None or response is None:
            return
        if relay.failure is not None:
            self._relay = None
            self._wire.flow_to(None)
            answer: asyncio.Future[EngineResponse] = relay.client.loop.create_future()
            answer.set_exception(relay.failure)
            # Whoever goes on with it may be cancelled before.
            answer.exception()
            self._to_handler(response.exchange, answer)
            return
        try:
            self._told_end(relay, run, response)
        except Exception:
            log.exception("an errand failed", extra={"path": self._lane.path})
            self.fail()
            return
        self._run = self._relay = None
        assert self._responder is not None, "made with the relay"
        self._wire.errand_done(finished=self._responder.finished)

    def _told_end(self, relay: Relay, run: Run, response: EngineResponse) -> None:
        outcome = relay.outcome
        assert outcome is not None, "a relay ends with it or with a failure"
        means, served, marks = self._means, self._told(), self._timeline.marks
        if not response.ended:
            response.abort()
        self._is_over = True
        self._give_body()
        means.gateway.finish(run, used=run.has_byte)
        exchange = response.exchange
        if exchange.stalled:
            means.stalled(run)
        elif run.lost is None:
            good = is_good(outcome.status, complete=outcome.complete)
            means.gateway.judge(run.replica, good=good)
        served.status, served.sent_bytes = outcome.status, outcome.sent_bytes
        served.complete, served.why = outcome.complete, outcome.reason
        if not outcome.complete:
            served.code = "engine_error"
        marks["last_byte"] = means.clock.now_s()
        if "first_byte" in marks:
            means.metrics.answered_first(run.model, marks["first_byte"] - self._written_s)
        self._end(served)

    # -- other ends ----------------------------------------------------------------------------

    def left(self) -> None:
        """Its client is gone, or nobody goes on with it."""
        self._stop()
        if self._release():
            served = self._told()
            served.status, served.code = CLIENT_GONE, "client_gone"
            served.complete = False
            self._end(served)

    def dismiss(self) -> bool:
        """This gateway ends: its client is told so where its stream had only been promised by the engine."""
        responder, is_told = self._responder, False
        if responder is not None and not responder.started:
            answer_at_once(responder, *DRAINING)
            is_told = True
        self.left()
        return is_told

    def fail(self) -> None:
        """Something failed that should not: it is answered as far as it can be, and all that was counted ends."""
        self._stop()
        started = self._is_over or (self._responder is not None and self._responder.started)
        if self._release():
            served = self._told()
            served.status, served.code = 500, "internal_error"
            self._end(served)
        elif self._grant is not None:
            # Once, whatever was said of it before.
            self._grant.end(self._grant.estimate)
        self._wire.errand_failed(None if started else self._new_responder())

    def _stop(self) -> None:
        """Nothing more is wanted of its engine, or its agent."""
        self._end_wait()
        if self._response is not None:
            self._response.abort()
        elif self._connection is not None:
            self._connection.drop()

    def _release(self) -> bool:
        """Gives back what it holds; False: it did that before."""
        if self._is_over:
            return False
        self._is_over = True
        self._give_body()
        if self._run is not None:
            self._means.gateway.finish(self._run, used=self._run.has_byte)
        return True

    def _end(self, served: Served) -> None:
        lane = self._lane
        self._means.endings.ended(
            served,
            self._timeline,
            lane.place,
            method="POST",
            path=lane.head.path,
            peer=self._wire.peer,
            received_s=self._received_s,
            priority=lane.priority,
        )

    def _give_body(self) -> bytes:
        """Its body is kept no more, or by somebody else."""
        body, self._body = self._body, b""
        self._means.budget.give(len(body))
        return body

    # -- handing over --------------------------------------------------------------------------

    def hand_over(self) -> bool:
        """The handler goes on with it; False: its answer has begun to flow."""
        if self._relay is not None:
            return False
        if self._connection is not None:
            self._connection.hand_over()
            return True
        self._end_wait()
        timeline, now_s = self._timeline, self._means.clock.now_s
        self._to_handler(Exchange(lambda: timeline.mark("written_to_engine", now_s())), None)
        return True

    def otherwise(self, answer: "asyncio.Future[EngineResponse]") -> Exchange:
        """The engine's answer is another than hoped for, or none: the handler sees to it."""
        exchange = Exchange()
        exchange.written_at = self._timeline.marks.get("written_to_engine")
        self._to_handler(exchange, answer)
        return exchange

    def abort(self, reason: str) -> None:
        """Its replica is gone, says the log."""
        self.hand_over()
        assert self._run is not None, "only a run is aborted"
        self._run.abort(reason)

    def _to_handler(
        self, exchange: Exchange, answer: "asyncio.Future[EngineResponse] | None"
    ) -> None:
        run, route = self._run, self._route
        if run is not None:
            run.abort = exchange.abort
            if run.held is not None and run.adapted is None:
                # A hit until now: whatever becomes of it, the handler sees to its adapter.
                assert route is not None, "a run is of a route"
                assert route.adapter is not None, "a pin is an adapter's"
                seeking = Seeking(self._fields.model, self._timeline.request_id, how="hit")
                others = len(route.candidates) - 1
                run.adapted = Adapted(route.adapter, run.held.pin, seeking, others)
                self._seeking = seeking
        body = self._give_body()
        begun = Begun(
            place=self._lane.place,
            timeline=self._timeline,
            served=self._told(),
            fields=self._fields,
            drop=self.left,
            seeking=self._seeking,
            run=run,
            exchange=exchange,
            connection=self._connection,
            answer=answer,
            name=self._name,
        )
        self._wire.hand_over(self._lane.head, body, self._received_s, begun)


@lru_cache(maxsize=4096)
def _why_lines(model: str, replica: str, why: Why, how: str) -> bytes:
    """What an answer tells of where it came from, after no wait, as lines of a head."""
    return rendered((_NOT_WAITED, *reason_headers(model, replica, why, how)))
