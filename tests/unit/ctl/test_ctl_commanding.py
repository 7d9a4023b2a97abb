"""A command and its outcome, against the log in memory: accepted, rejected, late, lost."""

import asyncio
from collections.abc import Callable
from datetime import UTC, datetime
from typing import Any

import pytest

from controlplane.ctl.acts import is_loaded, nothing_runs
from controlplane.ctl.commanding import Following, carry_out, wait_for, watch_until
from controlplane.ctl.failures import (
    EXIT_NOT_KNOWN,
    EXIT_REJECTED,
    EXIT_UNREACHABLE,
    CtlError,
    NotKnownYet,
    RejectedByYard,
    Unreachable,
)
from events.log import Draft, Recorded
from events.memory import MemoryLog
from events.memory_broker import MemoryBroker
from events.subjects import event_subject
from schemas.activation import Activation, ActivationReady
from schemas.commands import (
    CommandAccepted,
    CommandRejected,
    ModelLoad,
    ModelUnload,
    Outcome,
    Problem,
)
from schemas.replica import Replica, ReplicaReady, ReplicaStopped
from tests.support.aio import run

NOW = datetime(2026, 1, 1, tzinfo=UTC)


def outcome(id: str, **over: Any) -> Outcome:
    return Outcome(
        **{
            "id": id,
            "actor": "admin",
            "name": "model.load",
            "status": "accepted",
            "at": NOW,
            "lines": ("loading a",),
        }
        | over
    )


async def decide(log: MemoryLog, answer: Callable[[str], Outcome]) -> str:
    """Stands in for a control plane: answers the first command it sees."""
    follower = log.follow_commands(after=0)
    try:
        (stored,) = await follower.next()
    finally:
        await follower.close()
    assert stored.command is not None
    state = answer(stored.command.id)
    event = (
        CommandAccepted()
        if state.status == "accepted"
        else CommandRejected(code=state.code or "invalid")
    )
    await log.append(
        Draft(
            subject=event_subject("command", state.id),
            event=event,
            state=state,
            expected_seq=0,
            rev=1,
        ),
        epoch=0,
    )
    return stored.command.id


def carried_out(answer: Callable[[str], Outcome]) -> Outcome:
    async def story() -> Outcome:
        broker = MemoryBroker()
        plane, ctl = MemoryLog(broker), MemoryLog(broker, source="/ctl")
        deciding = asyncio.create_task(decide(plane, answer))
        try:
            return await carry_out(ctl, ModelLoad(model="a"))
        finally:
            await deciding

    return run(story())


def test_an_accepted_command_gives_its_outcome() -> None:
    assert carried_out(outcome).lines == ("loading a",)


def test_a_rejection_tells_code_sentence_and_every_problem() -> None:
    problem = Problem(path="[0].name", sentence="taken")
    with pytest.raises(RejectedByYard) as caught:
        carried_out(
            lambda id: outcome(
                id, status="rejected", code="exists", sentence="no", problems=(problem,)
            )
        )
    assert caught.value.lines == ("no [exists]", "[0].name: taken")
    assert caught.value.code == EXIT_REJECTED


def test_a_single_problem_is_told_once_with_its_place() -> None:
    problem = Problem(path="[0].name", sentence="taken")
    with pytest.raises(RejectedByYard) as caught:
        carried_out(
            lambda id: outcome(
                id, status="rejected", code="exists", sentence="taken", problems=(problem,)
            )
        )
    assert caught.value.lines == ("[0].name: taken [exists]",)


def test_no_decision_in_time_ends_with_the_id_to_ask_for() -> None:
    async def story() -> None:
        log = MemoryLog(MemoryBroker())
        with pytest.raises(NotKnownYet) as caught:
            await carry_out(log, ModelLoad(model="a"), timeout_s=0.05)
        assert caught.value.code == EXIT_NOT_KNOWN
        id = str(caught.value).rpartition(" ")[2]
        assert f"yardctl command wait {id}" in str(caught.value)
        assert await decide(log, outcome) == id
        found = await wait_for(log, id, prefix="yard", timeout_s=5)
        assert found.status == "accepted"

    run(story())


def test_a_log_that_is_away_changes_nothing_and_says_so() -> None:
    async def story() -> None:
        log = MemoryLog(MemoryBroker())
        log.connection.disconnect()
        with pytest.raises(Unreachable) as caught:
            await carry_out(log, ModelLoad(model="a"), timeout_s=0.05)
        assert caught.value.code == EXIT_UNREACHABLE

    run(story())


# What --wait waits for --------------------------------------------------------------------------------


def replica(phase: str, id: str = "r-1") -> Replica:
    return Replica(
        id=id,
        node="n",
        model="a",
        incarnation="i",
        profile="p",
        revision="v",
        engine="command",
        phase=phase,  # type: ignore[arg-type]
        since=NOW,
        epoch=1,
    )


def activation(phase: str, **over: Any) -> Activation:
    return Activation(
        **{"model": "a", "incarnation": "i", "phase": phase, "wanted_at": NOW, "since": NOW} | over
    )


def test_waiting_ends_with_the_state_and_tells_what_came_meanwhile() -> None:
    async def story() -> None:
        log = MemoryLog(MemoryBroker())
        subject = event_subject("replica", "n", "r-1")

        async def say(event: Any, state: Replica, expected: int, rev: int) -> int:
            draft = Draft(subject=subject, event=event, state=state, expected_seq=expected, rev=rev)
            return (await log.append(draft, epoch=1)).seqs[0]

        seq = await say(ReplicaReady(), replica("ready"), 0, 1)
        told: list[Recorded] = []
        waiting = asyncio.create_task(
            watch_until(log, "a", nothing_runs, told.append, prefix="yard", timeout_s=5)
        )
        other = Draft(
            subject=event_subject("activation", "b", "any"),
            event=ActivationReady(replica="x"),
            state=activation("ready", model="b"),
            expected_seq=0,
            rev=1,
        )
        await log.append(other, epoch=1)
        await asyncio.sleep(0)
        await say(ReplicaStopped(), replica("stopped"), seq, 2)
        assert await waiting == "a: nothing runs"
        assert {item.key[-1] for item in told} <= {"r-1"}

    run(story())


def test_waiting_is_bounded() -> None:
    async def story() -> None:
        log = MemoryLog(MemoryBroker())
        with pytest.raises(NotKnownYet, match=r"not there after 0\.05 s"):
            await watch_until(
                log, "a", lambda _: None, lambda _: None, prefix="yard", timeout_s=0.05
            )

    run(story())


def seen(demand: Activation | None, *replicas: Replica) -> Following:
    following = Following("a")
    following.activation = demand
    following.replicas = {r.id: r for r in replicas}
    return following


def test_a_load_is_done_when_as_many_are_ready_as_are_wanted() -> None:
    assert is_loaded(seen(None)) is None
    assert is_loaded(seen(activation("loading"), replica("starting"))) is None
    assert is_loaded(seen(activation("ready", replicas=2), replica("ready"))) is None
    assert is_loaded(seen(activation("ready"), replica("ready"))) == "a: 1 ready"


def test_a_load_that_was_refused_fails_with_its_reason() -> None:
    with pytest.raises(CtlError, match=r"a: needs 9 GiB \[no_capacity\]"):
        is_loaded(seen(activation("refused", code="no_capacity", reason="needs 9 GiB")))


def test_nothing_runs_when_every_replica_ended() -> None:
    assert nothing_runs(seen(None, replica("stopped"), replica("failed", "r-2"))) is not None
    assert nothing_runs(seen(None, replica("draining"))) is None
    assert ModelUnload(model="a").force is False
