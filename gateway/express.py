"""Decides which requests are served on their way through, without a task: plain ones, whose model runs.

Most requests are of this kind, and a task with all it carries costs more than all that they need. What becomes of one that
was taken is gateway/errand.py's. Nothing is refused, retried or waited for here, and it keeps no rule of its own: who may
ask and what is admitted are asked of the same parts that the handler asks.
"""

import logging

from gateway.callers import Callers
from gateway.domain.admission import Route
from gateway.domain.answers import Answer
from gateway.domain.request_fields import read_plain
from gateway.errand import Errand, Means
from gateway.http.errands import ErrandWire
from gateway.http.outgoing import INLINE_BODY
from gateway.http.request_head import RequestHead
from gateway.lanes import NO_LANE, Lane, lane_of
from gateway.limits import Grant

log = logging.getLogger("gateway.express")


class Express:
    """One for all requests of a gateway."""

    def __init__(self, means: Means, callers: Callers) -> None:
        self._means = means
        self._callers = callers

    def take(self, wire: ErrandWire, head: RequestHead, body: bytes, received_s: float) -> bool:
        """Takes a request that came whole, if it is a plain one that can go out now; else nothing has happened.

        1. its head asks for nothing else, and it may come in
        2. its model runs without a line
        3. there is room for its body, and its key's limits have some
        """
        memo = head.headers.memo
        lane: Lane | None = memo.get("lane")
        means, callers = self._means, self._callers
        size, grant = 0, None
        try:
            if lane is None or not callers.is_still(lane.caller):  # 1
                origins = means.gateway.settings.cors_origins
                lane = None if memo.get(NO_LANE) else lane_of(head, wire.peer, callers, origins)
                if lane is None:
                    return False
            plain = read_plain(body)  # 2
            if plain is None or means.gateway.draining:
                return False
            fields, beginning = plain
            route = means.gateway.admit(fields.model, lane.path, accepted=True)
            if not isinstance(route, Route) or route.model.concurrency:
                return False
            if len(body) > INLINE_BODY or not means.budget.take(len(body)):  # 3
                return False
            size = len(body)
            if lane.caller.key is not None:
                grant = means.limits.enter(lane.caller, fields, size, route.model)
                if isinstance(grant, Answer):
                    means.budget.give(size)
                    return False
            errand = Errand(means, wire, lane, body, fields, grant, received_s)
        except Exception:
            # The handler meets the same, and answers it.
            log.exception("an errand did not begin", extra={"path": head.path})
            means.budget.give(size)
            if isinstance(grant, Grant):
                grant.end(0)
            return False
        wire.run(errand)
        try:
            errand.begin(route, beginning)
        except Exception:
            log.exception("an errand failed", extra={"path": lane.path})
            errand.fail()
        return True
