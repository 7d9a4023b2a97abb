"""Serves one request for inference: reads what it needs of it, waits if it must, relays the engine's answer.

Policy is in gateway/domain; here is only its order. It must not decide what runs, and never hands a
client's own credentials to an engine.
"""

import logging
from collections.abc import Callable

from gateway.adapters import Adapters, Elsewhere, Refused
from gateway.begun import Begun
from gateway.domain.admission import Route, Wait
from gateway.domain.answers import Answer, answer
from gateway.domain.error_bodies import says_no_such_model
from gateway.domain.http_rules import Headers
from gateway.domain.names import Place
from gateway.domain.outliers import is_good
from gateway.domain.places import RESPONSE, RESPONSES
from gateway.domain.reasons import reason_headers, waited_header
from gateway.domain.responseids import Kept, ResponseIds, id_in
from gateway.domain.routing import Loss, after_loss
from gateway.domain.tokens import Tail
from gateway.domain.turns import Busy
from gateway.gateway import Gateway, Run
from gateway.http.client import Asking, EngineClient
from gateway.http.engine_response import EngineResponse
from gateway.http.errors import BadEngineAnswer, ConnectFailed, EngineGone
from gateway.http.exchange import Exchange
from gateway.http.messages import Request, Responder
from gateway.intake import Intake, read_intake, where_response_is
from gateway.limits import Limits
from gateway.loadingstream import LoadingStreams
from gateway.metrics import Metrics
from gateway.patience import Patience, Waiting
from gateway.sending import Sending
from gateway.served import Served
from gateway.timeline import Timeline, Timelines
from schemas.cardnames import ANY_SCOPE
from schemas.model import Model
from schemas.replica import Replica

log = logging.getLogger("gateway.endpoints")

MOST_PEEKED = 64 * 1024
"""So much of an engine's 404 is read to know whether it lost the adapter."""

EngineKey = Callable[[Replica], str | None]
"""The key an engine of this launch asks for; None: it has none."""


class _Lost(Exception):
    """The replica went away before the first byte of its answer."""

    def __init__(self, loss: Loss, why: str) -> None:
        super().__init__(why)
        self.loss: Loss = loss


class Inference:
    """The inference endpoints; one object for all requests."""

    def __init__(
        self,
        gateway: Gateway,
        client: EngineClient,
        metrics: Metrics,
        timelines: Timelines,
        adapters: Adapters,
        limits: Limits,
        loading: LoadingStreams,
        *,
        engine_key: EngineKey,
        new_exchange: Callable[[Callable[[], None]], Exchange],
    ) -> None:
        self._gateway = gateway
        self._client = client
        self._metrics = metrics
        self._timelines = timelines
        self._adapters = adapters
        self._limits = limits
        self._loading = loading
        self._patience = Patience(gateway, metrics, loading)
        self._engine_key = engine_key
        self._new_exchange = new_exchange
        self._responses = ResponseIds()

    async def serve(
        self,
        place: Place,
        request: Request,
        respond: Responder,
        timeline: Timeline,
        served: Served,
        begun: Begun | None = None,
    ) -> None:
        """Answers `request` for an inference path, by the card of the `place` alone when one is named.

        1. what cannot be read as a request for a model is refused before anything is asked
        2. then, until it is answered: admit; wait; run. A lost replica leads back to `admit`.

        `begun`: it was let in already, and goes on with the run it has, if it has one.
        """
        if begun is None:
            sending = await self._let_in(place, request, respond, timeline, served)
            if isinstance(sending, Answer):  # 1
                await reply(respond, sending, served)
                return
        else:
            respond.add_own(self._limits.headers(served.caller))
            intake = Intake(fields=begun.fields)
            sending = Sending(request, place, intake, timeline, begun.seeking)
        loading = respond if self._loading.wanted(request, sending.intake.fields) else None
        waiting = Waiting()
        unplanned = planned = 0
        while True:  # 2
            asked, name = None, ""
            if begun is not None and begun.run is not None:
                assert begun.exchange is not None, "a run has an exchange"
                run, exchange = begun.run, begun.exchange
                if begun.connection is not None and begun.answer is not None:
                    asked, name = (begun.connection, begun.answer), begun.name
            else:
                exchange = self._exchange(timeline)
                found = await self._find_run(sending, exchange, timeline, served, loading, waiting)
                if found is None:
                    continue
                if isinstance(found, Answer):
                    await reply(respond, found, served)
                    return
                run = found
            begun = None
            try:
                await self._run(run, exchange, sending, respond, timeline, served, asked, name)
            except Elsewhere:
                continue
            except Refused as refused:
                await reply(respond, refused.answer, served)
                return
            except _Lost as lost:
                verdict = after_loss(lost.loss, unplanned_before=unplanned, planned_before=planned)
                self._metrics.rerouted.labels(lost.loss).inc()
                if verdict == "engine_error":
                    await reply(respond, _engine_error(run.model, lost), served)
                    return
                served.moves += 1
                if lost.loss == "stopped":
                    planned += 1
                else:
                    unplanned += 1
                # It had its place; waiting for another replica is a wait of its own.
                waiting.deadline_s = None
            else:
                return

    async def _let_in(
        self, place: Place, request: Request, respond: Responder, timeline: Timeline, served: Served
    ) -> Sending | Answer:
        """What `request` asks for, if it can be read and its key lets it in."""
        if place.on is not None:
            served.scope = timeline.scope = self._gateway.scope_known(place.on)
        kept = None
        if place.response:
            kept = self._responses.find(place.response, served.caller.id)
        intake = await read_intake(place, request, respond, kept)
        if isinstance(intake, Answer):
            return intake
        refused = self._enter(served, intake, request, respond)
        return Sending(request, place, intake, timeline) if refused is None else refused

    async def _find_run(
        self,
        sending: Sending,
        exchange: Exchange,
        timeline: Timeline,
        served: Served,
        loading: Responder | None,
        waiting: Waiting,
    ) -> Run | Answer | None:
        """A replica to run at, or the answer to it; None: look again."""
        gateway = self._gateway
        intake = sending.intake
        decision = gateway.admit(
            sending.name, sending.path, accepted=waiting.accepted, on=sending.on
        )
        waiting.accepted = True
        if intake.by_id and not isinstance(decision, Answer):
            assert gateway.table is not None, "a model was found in it"
            scope = ANY_SCOPE if sending.on is None else sending.on.scope
            decision = where_response_is(decision, intake, gateway.table, scope)
        match decision:
            case Answer():
                self._refused(sending.name, decision, served)
                return decision
            case Wait(model=model, scope=scope, adapter=adapter):
                self._name(timeline, served, model)
                sending.seek(adapter, timeline, served)
                return await self._patience.for_model(
                    model,
                    scope,
                    waiting.until_s(gateway),
                    sending,
                    exchange,
                    timeline,
                    served,
                    loading,
                )
            case Route(model=model, adapter=adapter):
                self._name(timeline, served, model)
                sending.seek(adapter, timeline, served)
                begun = gateway.start(
                    decision,
                    exchange.abort,
                    sending.seeking,
                    affinity=sending.affinity,
                    needs_seat=not intake.by_id,
                )
                if not isinstance(begun, Busy):
                    return begun
                return await self._patience.for_turn(
                    model, waiting.until_s(gateway), sending, exchange, timeline, served
                )

    def _enter(
        self, served: Served, intake: Intake, request: Request, respond: Responder
    ) -> Answer | None:
        """Whether its key lets the request in; what its limits are then is told with any answer."""
        caller = served.caller
        if caller.key is None:
            return None
        served.asked_bytes = request.body.size
        entered = self._limits.enter(caller, intake.fields, served.asked_bytes)
        respond.add_own(self._limits.headers(caller))
        if isinstance(entered, Answer):
            return entered
        served.grant = entered
        return None

    def _exchange(self, timeline: Timeline) -> Exchange:
        clock = self._gateway.clock
        return self._new_exchange(lambda: timeline.mark("written_to_engine", clock.now_s()))

    def _name(self, timeline: Timeline, served: Served, model: Model) -> None:
        if not served.model:
            served.model = model.name
            self._timelines.keep(timeline, model.name)

    def _refused(self, name: str, refusal: Answer, served: Served) -> None:
        """A model of the catalog is named where it was refused too, so that its refusals count as its own.

        Its timeline is not kept: those of requests that ran would have to go for it.
        """
        table = self._gateway.table
        if table is None or refusal.code == "card_not_found":
            return
        model = table.model(name)
        if model is None and (adapter := table.adapter(name)) is not None:
            model = table.base_of(adapter)
        if model is not None and not served.model:
            served.model = model.name

    async def _run(
        self,
        run: Run,
        exchange: Exchange,
        sending: Sending,
        respond: Responder,
        timeline: Timeline,
        served: Served,
        asked: Asking | None = None,
        name: str = "",
    ) -> None:
        """Runs the request at a replica, once its adapter is there if it names one. `asked`: it is out already, and
        `name` its engine's for that adapter.

        Raises _Lost when the replica went away before the first byte; Elsewhere and Refused as Adapters.
        """
        gateway = self._gateway
        clock = gateway.clock
        replica = run.replica
        served.replica = replica.id
        used = False
        try:
            assert replica.endpoint is not None, "routable replicas have an endpoint"
            exchange.explain = lambda: gateway.why_broke(replica.id)
            if run.adapted is None:
                response = await self._send(run, run.model, exchange, sending, served, asked)
            else:
                # What is out was there when it went, whatever became of the pin.
                name = name or self._adapters.hit(run)
                if name:
                    served.how = served.how or "hit"
                else:
                    name = await self._secure(run, exchange, sending, timeline, served)
                response = await self._send(run, name, exchange, sending, served, asked)
                if response.status == 404 and not response.sse:
                    response = await self._unless_gone(
                        name, response, run, exchange, sending, timeline, served
                    )

            def first_byte(block: bytes) -> None:
                nonlocal used
                used = run.has_byte = True
                # From here on it can go nowhere else, so nobody will send the body again.
                sending.release()
                timeline.mark("first_byte", clock.now_s())
                if sending.path == RESPONSES:
                    self._learn_response(
                        block, Kept(sending.name, replica.id, served.caller.id), run
                    )

            served.tail = Tail()
            served.path, served.sse = sending.path, response.sse
            served.asked_bytes = sending.request.body.size
            relayed = await respond.relay(
                response,
                headers=self._headers(run, served),
                model=sending.name if sending.name != run.model and _is_text(response) else None,
                before_first_byte=first_byte,
                tail=served.tail,
            )
        except ConnectFailed as error:
            raise self._lost(run, "refused_connection", error.reason) from error
        except (EngineGone, BadEngineAnswer) as error:
            self._judge(run, exchange, good=False)
            raise self._lost(run, "broke", error.reason) from error
        except _Lost as lost:
            raise self._lost(run, lost.loss, str(lost)) from None
        finally:
            gateway.finish(run, used=used)
            self._patience.tell(served, run.model)
            if exchange.stalled:
                self.stalled(run)
        self._judge(run, exchange, good=is_good(relayed.status, complete=relayed.complete))
        served.status = relayed.status
        served.sent_bytes = relayed.sent_bytes
        served.complete = relayed.complete
        served.why = relayed.reason
        if not relayed.complete:
            served.code = "engine_error"
        elif relayed.status >= 400:
            served.code = "engine_status"
        if relayed.last_byte_at is not None:
            timeline.mark("last_byte", clock.now_s())
        written_s = timeline.marks.get("written_to_engine")
        first_s = timeline.marks.get("first_byte")
        if written_s is not None and first_s is not None:
            self._metrics.answered_first(run.model, first_s - written_s)

    async def _send(
        self,
        run: Run,
        model: str,
        exchange: Exchange,
        sending: Sending,
        served: Served,
        asked: Asking | None = None,
    ) -> EngineResponse:
        """The head of the engine's answer to the request under the name `model`."""
        endpoint = run.replica.endpoint
        assert endpoint is not None, "routable replicas have an endpoint"
        key = self._engine_key(run.replica)
        response = await self._client.send(
            endpoint,
            sending.made(model) or await sending.make(model),
            key=None if key is None else key.encode("ascii"),
            exchange=exchange,
            asked=asked,
        )
        self._patience.tell(served, run.model)
        if response.status == 401:
            # Whoever has that port now does not know this launch's key.
            response.abort()
            raise _Lost("not_this_launch", "the engine did not know this launch's key")
        return response

    async def _unless_gone(
        self,
        name: str,
        response: EngineResponse,
        run: Run,
        exchange: Exchange,
        sending: Sending,
        timeline: Timeline,
        served: Served,
    ) -> EngineResponse:
        """This answer to a request under the engine-side `name`, unless it says that the engine lost the adapter;
        then it is given one more try (B29).

        It said so before a byte went to the client, and nothing of the request was begun: sending it once more
        is safe. A second time it is another replica's turn: an engine that forgets may do so for ever.
        """
        gone = ""
        while response.status == 404 and not response.sse:
            head = await response.peek(MOST_PEEKED)
            if not says_no_such_model(head):
                break
            response.abort()
            if gone:
                self._adapters.give_up_on(run, "its engine does not keep it")
                raise Elsewhere
            gone = name
            self._metrics.adapters_gone.inc()
            name = await self._secure(run, exchange, sending, timeline, served, gone)
            response = await self._send(run, name, exchange, sending, served)
        return response

    async def _secure(
        self,
        run: Run,
        exchange: Exchange,
        sending: Sending,
        timeline: Timeline,
        served: Served,
        gone: str = "",
    ) -> str:
        """The adapter's engine-side name, and what waiting for it took."""
        clock = self._gateway.clock
        began_s = clock.now_s()
        try:
            name = await self._adapters.secure(run, exchange, gone=gone)
        finally:
            seeking = sending.seeking
            assert seeking is not None, "a run for an adapter was sought"
            served.how = seeking.how or ""
            if seeking.asked_s:
                waited_s = clock.now_s() - began_s
                served.waited_s += waited_s
                served.adapter_waited_s = (served.adapter_waited_s or 0.0) + waited_s
        if seeking.asked_s:
            timeline.mark("adapter_there", clock.now_s())
        return name

    def _learn_response(self, block: bytes, kept: Kept, run: Run) -> None:
        """Where it can be asked for again, of engines that keep what they answered."""
        if RESPONSE in run.replica.paths:
            response = id_in(block)
            if response is not None:
                self._responses.keep(response, kept)

    def _headers(self, run: Run, served: Served) -> tuple[tuple[bytes, bytes], ...]:
        """Ours in an answer that is relayed, which is counted here as a use of its adapter."""
        why = "retried" if served.moves else run.why
        if served.how:
            self._metrics.count_adapter(served.model, served.how)
        return (
            waited_header(served.waited_s),
            *reason_headers(run.model, run.replica.id, why, served.how),
        )

    def _judge(self, run: Run, exchange: Exchange, *, good: bool) -> None:
        """What the end of a request says of its replica; nothing where the log ended it, or a stall was told already."""
        if run.lost is None and not exchange.stalled:
            self._gateway.judge(run.replica, good=good)

    def stalled(self, run: Run) -> None:
        """Its engine was silent for too long: told once for each request that it happened to."""
        self._metrics.stalled.labels(run.model).inc()
        log.warning("engine stalled", extra={"replica": run.replica.id, "model": run.model})
        self._gateway.on_stall(run.replica)

    def _lost(self, run: Run, loss: Loss, why: str) -> _Lost:
        """What the log said about the end of the replica wins over what its connection did."""
        if run.lost is not None:
            return _Lost(run.lost, why)
        self._gateway.suspect(run.replica, loss)
        log.warning(
            "request lost its replica",
            extra={"replica": run.replica.id, "model": run.model, "loss": loss, "why": why},
        )
        return _Lost(loss, why)


async def reply(respond: Responder, refused: Answer, served: Served) -> None:
    """Writes an answer of the code table."""
    served.status = 200 if respond.opened else refused.status
    served.code = refused.code
    await respond.send_error(
        refused.status,
        refused.code,
        refused.message,
        type=refused.type,
        param=refused.param,
        headers=[*refused.headers(), waited_header(served.waited_s)],
    )


def _is_text(response: EngineResponse) -> bool:
    """Whether an answer may name its model: speech and pictures are passed on untouched."""
    return response.sse or may_name_model(response.headers)


def may_name_model(headers: Headers) -> bool:
    """Whether a whole answer with these headers may name its model."""
    kind = headers.get(b"content-type")
    # What nearly all say is compared first: `in` takes bytes for a number first, at the price of an exception.
    return kind is None or kind == b"application/json" or b"json" in kind.lower()


def _engine_error(model: str, lost: _Lost) -> Answer:
    return answer(
        "engine_error",
        f"The model {model!r} lost its engine before it answered, twice: {lost}.",
    )
