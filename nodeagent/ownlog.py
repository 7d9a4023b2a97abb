"""Reads what the log holds about this node: where its subjects stand and what they say.

Each reader has one filter, because an agent may read nothing but its own subjects. It only reads.
"""

from dataclasses import dataclass, field
from datetime import datetime

from msgspec import Struct

from events.log import Broken, EventLog, Recorded
from events.subjects import encode_token, event_subject
from schemas.card import Card
from schemas.node import Node
from schemas.replica import Replica, ReplicaStarting
from schemas.slots import Slots


class Head(Struct, frozen=True, kw_only=True):
    """Where a subject stands: the sequence and revision of its last event (0: there is none).

    `type` and `time` tell which event that was, when it was read and not written by this agent.
    """

    seq: int = 0
    rev: int = 0
    type: str = ""
    time: datetime | None = None
    writable: bool = True
    problem: str = ""

    @classmethod
    def of(cls, item: Recorded | Broken) -> "Head":
        if isinstance(item, Broken):
            rev = item.previous.rev if item.previous is not None else 0
            return cls(seq=item.seq, rev=rev, writable=False, problem=item.why)
        return cls(
            seq=item.seq,
            rev=item.rev,
            type=item.type,
            time=item.time,
            writable=item.problem is None,
            problem=item.problem or "",
        )


@dataclass(slots=True)
class OwnSubjects:
    """What the log says of this node. `ports` are those named by `replica.starting` events."""

    heads: dict[str, Head] = field(default_factory=dict)
    node: Node | None = None
    node_epoch: int = 0
    cards: dict[str, Card] = field(default_factory=dict)
    replicas: dict[str, Replica] = field(default_factory=dict)
    slots: dict[str, Slots] = field(default_factory=dict)
    ports: dict[str, int] = field(default_factory=dict)


def node_subject(node: str, prefix: str) -> str:
    return event_subject("node", node, prefix=prefix)


def card_subject(node: str, card: str, prefix: str) -> str:
    return event_subject("card", node, card, prefix=prefix)


def replica_subject(node: str, replica: str, prefix: str) -> str:
    return event_subject("replica", node, replica, prefix=prefix)


def slots_subject(node: str, replica: str, prefix: str) -> str:
    return event_subject("slots", node, replica, prefix=prefix)


def plan_subject(node: str, prefix: str) -> str:
    return event_subject("plan", node, prefix=prefix)


async def read_subjects(log: EventLog, subjects: str) -> list[Recorded | Broken]:
    """The last event of each subject that matches; waits for the server as long as it takes."""
    follower = log.follow([subjects])
    found: dict[str, Recorded | Broken] = {}
    try:
        while True:
            batch = await follower.next()
            if batch.reset:
                found.clear()
            found.update({item.subject: item for item in batch.items})
            if batch.synced:
                return sorted(found.values(), key=lambda item: item.seq)
    finally:
        await follower.close()


async def read_own(log: EventLog, node: str, prefix: str) -> OwnSubjects:
    """A pass each: the node, its cards, its replicas, their slots. Waits for the server as long as it takes."""
    own = OwnSubjects()
    token = encode_token(node)
    filters = (
        node_subject(node, prefix),
        f"{prefix}.evt.card.{token}.*",
        f"{prefix}.evt.replica.{token}.*",
        f"{prefix}.evt.slots.{token}.*",
    )
    for subjects in filters:
        for item in await read_subjects(log, subjects):
            own.heads[item.subject] = Head.of(item)
            last = item.previous if isinstance(item, Broken) else item
            if last is None:
                continue
            match last.state:
                case Node() as state:
                    own.node = state
                    own.node_epoch = max(state.epoch, last.epoch)
                case Card() as state:
                    own.cards[state.id] = state
                case Replica() as state:
                    own.replicas[state.id] = state
                case Slots() as state:
                    own.slots[state.replica] = state
                case _:  # a tombstone, or a version this program cannot read: its head is enough
                    pass
            if isinstance(last.event, ReplicaStarting) and isinstance(last.state, Replica):
                own.ports[last.state.id] = last.event.port
    return own
