"""Tells a stored event as one line, the same in `yardctl events` and in the API; and whom it concerns."""

from events.log import Broken, Recorded
from schemas.activation import Activation
from schemas.adapter import Adapter
from schemas.api import EventLine
from schemas.model import Model
from schemas.plan import Plan
from schemas.record import Record
from schemas.replica import Replica
from schemas.slots import Slots


def line_of(item: Recorded | Broken) -> EventLine:
    """The line of an event; one nobody can read is told as `broken`, with why."""
    if isinstance(item, Broken):
        return EventLine(seq=item.seq, subject=item.subject, type="broken", problem=item.why)
    return EventLine(
        seq=item.seq,
        subject=item.subject,
        type=item.type,
        id=item.id,
        time=item.time,
        stored_at=item.stored_at,
        rev=item.rev,
        epoch=item.epoch,
        actor=item.actor,
        source=item.source,
        reason=item.reason,
        causationid=item.causationid,
        correlationid=item.correlationid,
        traceparent=item.traceparent,
        change=item.event,
        state=item.state,
        problem=item.problem,
    )


def models_of(item: Recorded) -> set[str]:
    """The models an event concerns; a plan concerns every model it holds a replica of."""
    found = {item.key[0]} if item.noun in ("model", "activation", "record") and item.key else set()
    match item.state:
        case Plan(items=items):
            found |= {planned.launch.model for planned in items}
        case (
            Replica(model=name)
            | Activation(model=name)
            | Record(model=name)
            | Model(name=name)
            | Slots(model=name)
            | Adapter(base=name)
        ):
            found.add(name)
        case _:
            pass  # nodes, cards, outcomes and the leader concern no one model
    return found
