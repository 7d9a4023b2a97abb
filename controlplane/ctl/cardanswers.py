"""What every way of asking an agent about cards shares: how long is waited, what a no is, what undoes an ask."""

from collections.abc import Callable
from typing import Final

from controlplane.ctl.failures import RejectedByYard, Unreachable
from schemas.cardasks import CardAnswer, CardAsk, LeaseAcquire, LeaseRelease, VmAttach, VmDetach

LATE_S: Final = 15.0
"""The agent ends a wait by itself; this much later its word is not awaited any more."""

TAKE_BACK_S: Final = 5.0

NOT_READY: Final = "yard_unavailable"

Tell = Callable[[CardAnswer], None]
Waits = LeaseAcquire | VmAttach
"""The asks that may wait in line."""


def accepted(answer: CardAnswer) -> CardAnswer:
    """The answer itself unless it is a no. Raises RejectedByYard, Unreachable for an agent not ready yet."""
    if is_early(answer):
        raise Unreachable(answer.sentence)
    if answer.status == "refused":
        raise RejectedByYard(f"{answer.sentence or 'refused'} [{answer.code}]")
    return answer


def is_early(answer: CardAnswer) -> bool:
    """Whether the agent is only starting, or about to leave, and decides nothing at the moment."""
    return answer.status == "refused" and answer.code == NOT_READY


def taking_back(ask: CardAsk) -> CardAsk | None:
    """What undoes an ask that may wait; None for one that never does."""
    match ask:
        case LeaseAcquire():
            return LeaseRelease(what=ask.id)
        case VmAttach():
            return VmDetach(card=ask.card, name=ask.name)
        case _:
            return None
