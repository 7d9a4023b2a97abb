"""Small drafts of events for tests of the log; the contents do not matter, the subjects and checks do."""

from datetime import UTC, datetime

from events.log import Draft
from events.subjects import event_subject
from schemas.leader import Leader, LeaderDecided, LeaderElected, LeaderLine
from schemas.model import Model, ModelAdded, ModelChanged, ModelDeleted
from schemas.node import Node, NodeChanged, NodeStarted
from schemas.replica import Replica, ReplicaReady

NOW = datetime(2026, 1, 2, 3, 4, 5, tzinfo=UTC)
LEADER = event_subject("leader.current")
LINE = event_subject("leader.log")


def model_subject(name: str) -> str:
    return event_subject("model", name)


def model(
    name: str, expected: int, rev: int = 1, *, note: str = "", actor: str = "system"
) -> Draft:
    """`note` ends up in the state, so that two writes can be told apart."""
    event = ModelAdded(by="test") if rev == 1 else ModelChanged(by="test", fields=("description",))
    return Draft(
        subject=model_subject(name),
        event=event,
        state=Model(name=name, incarnation="i-1", description=note),
        expected_seq=expected,
        rev=rev,
        actor=actor,
    )


def model_deleted(name: str, expected: int, rev: int) -> Draft:
    return Draft(
        subject=model_subject(name),
        event=ModelDeleted(),
        state=None,
        expected_seq=expected,
        rev=rev,
    )


def elected(instance: str, expected: int) -> Draft:
    return Draft(
        subject=LEADER,
        event=LeaderElected(),
        state=Leader(instance=instance, host="here", pid=1, since=NOW),
        expected_seq=expected,
        rev=1,
    )


def line(term: int, expected: int, decision: str = "d") -> Draft:
    return Draft(
        subject=LINE,
        event=LeaderDecided(),
        state=LeaderLine(instance="a", term=term, decision=decision, what="test"),
        expected_seq=expected,
        rev=1,
    )


def node_started(node: str, expected: int, rev: int = 1) -> Draft:
    return Draft(
        subject=event_subject("node", node),
        event=NodeStarted(),
        state=Node(id=node, running=True, started_at=NOW),
        expected_seq=expected,
        rev=rev,
    )


def node_changed(node: str, expected: int, rev: int = 2) -> Draft:
    return Draft(
        subject=event_subject("node", node),
        event=NodeChanged(),
        state=Node(id=node, running=True, started_at=NOW),
        expected_seq=expected,
        rev=rev,
    )


def replica_ready(node: str, replica: str, expected: int, rev: int = 1) -> Draft:
    return Draft(
        subject=event_subject("replica", node, replica),
        event=ReplicaReady(load_s=1.5),
        state=Replica(
            id=replica,
            node=node,
            model="m",
            incarnation="i-1",
            profile="p",
            revision="v",
            engine="command",
            phase="ready",
            since=NOW,
            epoch=1,
            memory_bytes=3 * 1024 * 1024,
        ),
        expected_seq=expected,
        rev=rev,
    )
