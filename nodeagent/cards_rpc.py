"""Answers asks about this node's cards that come by request/reply, from people at other machines.

Only the user `admin` may send them (events/roles.py). It decides nothing: the desk does. Nobody's process can
be watched from afar, so an ask that names one is refused.
"""

import logging
from typing import Final

from nodeagent.domain.asks import wrong_with
from nodeagent.door import Desk
from schemas import codes
from schemas.cardasks import CardAnswer, CardRequest, ClaimStart, LeaseAcquire

log = logging.getLogger(__name__)

WHAT: Final = "cards"
BY: Final = "admin"


class CardsRpc:
    """The handler of one node's `cards`."""

    def __init__(self, desk: Desk, node: str) -> None:
        self._desk = desk
        self._node = node

    async def answer(self, request: CardRequest) -> CardAnswer:
        """One answer, once it is durable here; whoever got `waiting` follows the card's events."""
        ask = request.ask
        problem = wrong_with(ask)
        if problem:
            return CardAnswer(status="refused", code=codes.INVALID, sentence=problem)
        if isinstance(ask, LeaseAcquire | ClaimStart) and ask.process is not None:
            return CardAnswer(
                status="refused",
                id=ask.id,
                code=codes.NOT_HERE,
                sentence=f"a process can only be watched on the machine of node {self._node}",
            )
        answer = self._desk.ask(ask, by=BY)
        await self._desk.durable()
        if answer.status == "refused":
            log.info("card ask refused", extra={"code": answer.code, "sentence": answer.sentence})
        return answer
