"""Lets a request wait, for its model to run or for its turn at one, and counts what it waited.

Who may wait, how long and in which order is decided elsewhere (gateway/domain, waits.py, line.py). Whatever ends a wait,
also a client that leaves, its place is given back here, and a run that was begun for nobody is ended.
"""

from dataclasses import dataclass

from gateway.domain.answers import Answer
from gateway.domain.keytable import ANYBODY, Caller
from gateway.gateway import Gateway
from gateway.http.exchange import Exchange
from gateway.http.messages import Responder
from gateway.inhand import Asked, Run
from gateway.loadingstream import LoadingStreams
from gateway.metrics import Metrics
from gateway.sending import Sending
from gateway.served import Served
from gateway.timeline import Timeline
from schemas.model import Model


@dataclass(slots=True)
class Waiting:
    """How long one request waits, in all its waits until it runs; `accepted`: it was let in before."""

    accepted: bool = False
    deadline_s: float | None = None

    def until_s(self, gateway: Gateway) -> float:
        """When it waits no longer, counted from its first wait."""
        if self.deadline_s is None:
            self.deadline_s = gateway.clock.now_s() + gateway.wait_s
        return self.deadline_s


class Patience:
    """One for all requests of a gateway."""

    def __init__(self, gateway: Gateway, metrics: Metrics, loading: LoadingStreams) -> None:
        self._gateway = gateway
        self._metrics = metrics
        self._loading = loading

    async def for_model(
        self,
        model: Model,
        scope: str,
        deadline_s: float,
        sending: Sending,
        exchange: Exchange,
        timeline: Timeline,
        served: Served,
        loading: Responder | None,
    ) -> Run | Answer | None:
        """Waits in the room; None: look again. Whatever ends the wait, the place is given back. `loading` is told
        of it meanwhile.

        All that a request needs before it goes out is done here, while there is time.
        """
        gateway = self._gateway
        clock = gateway.clock
        joined_s = clock.now_s()
        timeline.first("joined", joined_s)
        ticket = gateway.join(
            model,
            scope,
            size_bytes=sending.request.body.size,
            deadline_s=deadline_s,
            # One that was served here before its replica went is not refused because of that.
            asked=_asked(
                sending,
                exchange,
                timeline,
                ANYBODY if served.moves or served.stood else served.caller,
            ),
            on_asked=lambda: timeline.first("activate_sent", clock.now_s()),
            accepted=served.moves > 0 or served.stood or served.waited_s > 0,
        )
        if isinstance(ticket, Answer):
            return ticket
        try:
            if sending.seeking is not None:
                # Under which name its engine will serve the adapter is not known yet.
                await sending.spans()
            elif sending.made(model.name) is None:
                await sending.make(model.name, waits=True)
            if loading is None:
                outcome = await ticket.outcome
            else:
                outcome = await self._loading.until(ticket.outcome, loading, model.name, scope)
        except BaseException:
            gateway.leave(ticket)
            self._waited(served, model.name, clock.now_s() - joined_s)
            raise
        woken_s = clock.now_s()
        timeline.mark("woken", woken_s)
        if sending.seeking is not None:
            sending.seeking.begin_anew()
        if isinstance(outcome, Run):
            # Counted once it went out: of a thousand woken together each would wait for all others.
            served.waited_s += woken_s - joined_s
            served.to_count_s = woken_s - joined_s
        else:
            self._waited(served, model.name, woken_s - joined_s)
        return outcome

    async def for_turn(
        self,
        model: Model,
        deadline_s: float,
        sending: Sending,
        exchange: Exchange,
        timeline: Timeline,
        served: Served,
    ) -> Run | Answer | None:
        """Waits in line for a turn at the model; otherwise as `for_model`."""
        gateway = self._gateway
        clock = gateway.clock
        joined_s = clock.now_s()
        timeline.first("joined", joined_s)
        place = gateway.line.join(
            model,
            _asked(sending, exchange, timeline, served.caller),
            size_bytes=sending.request.body.size,
            deadline_s=deadline_s,
            accepted=served.moves > 0 or served.waited_s > 0,
        )
        if isinstance(place, Answer):
            return place
        served.stood = True
        try:
            outcome = await place.outcome
        except BaseException:
            run = gateway.line.leave(place)
            if run is not None:
                gateway.finish(run, used=False)
            raise
        finally:
            served.waited_s += clock.now_s() - joined_s
        timeline.mark("woken", clock.now_s())
        return outcome

    def tell(self, served: Served, model: str) -> None:
        """Counts a wait that is over and was not counted yet, now that its request is out."""
        if served.to_count_s is not None:
            self._metrics.waited_for(model, served.to_count_s)
            served.to_count_s = None

    def _waited(self, served: Served, model: str, seconds: float) -> None:
        served.waited_s += seconds
        self._metrics.waited_for(model, seconds)


def _asked(sending: Sending, exchange: Exchange, timeline: Timeline, caller: Caller) -> Asked:
    """What a request that waits, for a model or for its turn, will ask of an engine with the rights of `caller`."""
    return Asked(
        name=sending.name,
        path=sending.path,
        abort=exchange.abort,
        on=sending.on,
        seeking=sending.seeking,
        caller=caller,
        priority=sending.request.headers.get(b"x-yard-priority"),
        affinity=sending.affinity,
        traceparent=timeline.trace.traceparent.decode(),
    )
