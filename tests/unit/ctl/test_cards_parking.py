"""`replica park` and `resume` with --wait, on the log in memory; and what is ended by name on several nodes."""

import contextlib
from collections.abc import AsyncIterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

from controlplane.ctl import cardasking
from controlplane.ctl.connect import Place
from controlplane.ctl.failures import CtlError, NotKnownYet, RejectedByYard, Unreachable
from controlplane.ctl.parkacts import Reached, is_parked, is_resumed, watch
from events.log import Draft, Recorded
from events.memory import MemoryLog
from events.memory_broker import MemoryBroker
from events.subjects import event_subject
from schemas.cardasks import CardAnswer, CardAsk, ClaimEnd, LeaseRelease
from schemas.replica import (
    Replica,
    ReplicaDraining,
    ReplicaEvent,
    ReplicaFailed,
    ReplicaParked,
    ReplicaReady,
    ReplicaStarting,
    ReplicaStopped,
)
from tests.support.aio import run

NOW = datetime(2026, 1, 1, tzinfo=UTC)
Told = tuple[ReplicaEvent, str, str]

DRAINING: Told = (ReplicaDraining(decision="d"), "draining", "parked by anna")
PARKED: Told = (ReplicaParked(way="sleep"), "parked", "")
READY: Told = (ReplicaReady(), "ready", "requests still ran")
STOPPED: Told = (ReplicaStopped(), "stopped", "its park failed")
STARTING: Told = (ReplicaStarting(port=1, resumed=True), "starting", "")
REFUSED: Told = (ReplicaParked(way="sleep", refused=True), "parked", "gpu0 is held by render")
FAILED: Told = (ReplicaFailed(code="resume_failed"), "failed", "it did not answer")


async def follow(reached: Reached, before: Told, *after: Told, timeout_s: float = 5.0) -> str:
    """What `watch` says of a replica that went this way."""
    log = MemoryLog(MemoryBroker())
    last = 0

    async def put(told: Told) -> None:
        nonlocal last
        event, phase, reason = told
        state = Replica(
            id="r-1", node="n", model="m", incarnation="i", profile="p", revision="v",
            engine="vllm", phase=phase, since=NOW, epoch=1,  # type: ignore[arg-type]
        )  # fmt: skip
        draft = Draft(
            subject=event_subject("replica", "n", "r-1"),
            event=event,
            state=state,
            expected_seq=last,
            rev=1,
            reason=reason,
        )
        last = (await log.append(draft, epoch=1)).seqs[0]

    shown: list[Recorded] = []
    for told in (before, *after):
        await put(told)
    return await watch(log, "r-1", reached, shown.append, prefix="yard", timeout_s=timeout_s)


class Stages:
    """Feeds a judge event by event, as a follower that is up to date sees them."""

    def __init__(self, reached: Reached) -> None:
        self.reached = reached

    def hear(self, *stages: Told) -> str | None:
        said = None
        for event, phase, reason in stages:
            state = Replica(
                id="r-1", node="n", model="m", incarnation="i", profile="p", revision="v",
                engine="vllm", phase=phase, since=NOW, epoch=1,  # type: ignore[arg-type]
            )  # fmt: skip
            item = Recorded(
                seq=1, subject="s", noun="replica", key=("n", "r-1"), id="e", type="t", time=NOW,
                stored_at=NOW, rev=1, epoch=1, actor="agent-n", reason=reason, event=event,
                state=state,
            )  # fmt: skip
            said = self.reached(item, state)
        return said


def test_a_replica_is_parked_when_it_says_so() -> None:
    assert Stages(is_parked()).hear(READY) is None
    assert Stages(is_parked()).hear(READY, DRAINING, PARKED) == "r-1: parked"
    assert run(follow(is_parked(), READY, DRAINING, PARKED)) == "r-1: parked"


def test_a_park_that_came_to_nothing_says_why() -> None:
    with pytest.raises(CtlError, match="serves on: requests still ran"):
        Stages(is_parked()).hear(READY, DRAINING, READY)
    with pytest.raises(CtlError, match="stopped instead: its park failed"):
        Stages(is_parked()).hear(READY, DRAINING, STOPPED)


def test_a_replica_is_resumed_when_it_is_ready() -> None:
    assert Stages(is_resumed).hear(PARKED) is None
    assert Stages(is_resumed).hear(PARKED, STARTING, READY) == "r-1: ready"
    assert run(follow(is_resumed, PARKED, STARTING, READY)) == "r-1: ready"


def test_a_resume_that_came_to_nothing_says_why() -> None:
    with pytest.raises(CtlError, match="stays parked: gpu0 is held by render"):
        Stages(is_resumed).hear(PARKED, REFUSED)
    with pytest.raises(CtlError, match="failed instead: it did not answer"):
        Stages(is_resumed).hear(PARKED, STARTING, FAILED)


def test_a_wait_ends_and_says_how_to_go_on() -> None:
    with pytest.raises(NotKnownYet, match=r"yardctl events -f 'replica\.\*\.r-1'"):
        run(follow(is_parked(), READY, timeout_s=0.05))


# By name, on several nodes ----------------------------------------------------------------------------


def rows(*leases: tuple[str, str]) -> list[dict[str, Any]]:
    return [
        {
            "node": node,
            "id": "gpu0",
            "leases": [{"holder": id_, "name": "render", "kind": "named"}],
            "claims": [{"id": id_.replace("l-", "c-"), "name": "render"}],
        }
        for node, id_ in leases
    ]


async def ended(
    monkeypatch: pytest.MonkeyPatch,
    data: Path,
    found: list[dict[str, Any]] | None,
    body: LeaseRelease | ClaimEnd,
) -> str:
    """The node that was asked."""
    asked: list[str] = []

    class Api:
        async def data(self, path: str) -> list[dict[str, Any]]:
            assert path == "/v1/cards"
            assert found is not None
            return found

    @contextlib.asynccontextmanager
    async def open_api(_: Place) -> AsyncIterator[Api]:
        if found is None:
            raise Unreachable("no API")
        yield Api()

    async def ask(_: Place, node: str, given: CardAsk, tell: object) -> CardAnswer:
        assert given == body
        asked.append(node)
        return CardAnswer(status="done")

    monkeypatch.setattr(cardasking, "open_api", open_api)
    monkeypatch.setattr(cardasking, "ask", ask)
    place = Place(data=data, nats_url="nats://n", api_url="http://a")
    await cardasking.end(place, body, lambda _: None)
    return asked[0]


@pytest.mark.parametrize("body", [LeaseRelease(what="render"), ClaimEnd(what="render")])
def test_a_name_is_ended_where_it_is(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, body: LeaseRelease | ClaimEnd
) -> None:
    one = rows(("n2", "l-2"))
    assert run(ended(monkeypatch, tmp_path, one, body)) == "n2"
    with pytest.raises(RejectedByYard, match="ambiguous_name") as refused:
        run(ended(monkeypatch, tmp_path, rows(("n1", "l-1"), ("n2", "l-2")), body))
    assert [line.partition(": ")[0] for line in refused.value.lines[1:]] == ["n1", "n2"]
    with pytest.raises(RejectedByYard, match="not_found"):
        run(ended(monkeypatch, tmp_path, [], body))
    with pytest.raises(Unreachable):
        run(ended(monkeypatch, tmp_path, None, body))
    (tmp_path / "nodeagent").mkdir()
    (tmp_path / "nodeagent" / "node").write_text("here")
    # What the API does not know yet, or cannot tell, the agent of this folder may know.
    assert run(ended(monkeypatch, tmp_path, [], body)) == "here"
    assert run(ended(monkeypatch, tmp_path, None, body)) == "here"
    assert run(ended(monkeypatch, tmp_path, one, body)) == "n2"


def test_an_id_is_never_ambiguous(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    found = rows(("n1", "l-1"), ("n2", "l-2"))
    assert run(ended(monkeypatch, tmp_path, found, LeaseRelease(what="l-2"))) == "n2"
