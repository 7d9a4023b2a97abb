"""The leader's loop over the log in memory: its terms, how an append can end, and what the loop does then."""

from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Any

import msgspec
import pytest

from controlplane.domain.decision import Ids, Live, Step
from controlplane.domain.reports import Report
from controlplane.domain.world import World
from controlplane.identifiers import new_replica_id
from events.ids import utc_now
from events.log import (
    Appended,
    Deposed,
    Draft,
    LogError,
    OutcomeUnknown,
    Recorded,
    StoredCommand,
    Unavailable,
)
from events.memory import MemoryLog
from schemas.beacons import AgentBeacon, LeaderBeacon
from schemas.leader import Leader, LeaderElected
from schemas.model import Model, ModelChanged
from schemas.settings import ControlplaneSettings
from tests.support.aio import run, until
from tests.support.controlplanes import history, smallest_domain
from tests.support.leaders import Yard, decided, started


def test_the_term_is_the_sequence_of_the_election_and_every_line_carries_it() -> None:
    async def story() -> None:
        yard = Yard()
        async with started(yard.loop):
            await until(decided(yard, await yard.add("a")), "the first command")
            await until(decided(yard, await yard.add("b")), "the second command")
        elected, *rest = await history(yard.admin)
        assert isinstance(elected.event, LeaderElected)
        assert {e.epoch for e in rest} == {elected.seq}
        lines = [e.state for e in rest if e.noun == "leader.log"]
        assert [getattr(line, "commands_position", None) for line in lines] == [1, 2]

    run(story())


def test_own_events_are_in_the_world_before_the_next_decision() -> None:
    """Two commands for one name, read together: the second sees the first's model though no follower
    brought it yet."""

    async def story() -> None:
        yard = Yard()
        first, second = await yard.add("same"), await yard.add("same")
        async with started(yard.loop):
            await until(decided(yard, second), "both commands")
            outcomes = yard.loop.world.outcomes
            assert (outcomes[first].status, outcomes[second].code) == ("accepted", "exists")
        assert yard.faulty.batches == 2

    run(story())


@pytest.mark.parametrize("error", [OutcomeUnknown("lost ack"), Unavailable("no leader")])
@pytest.mark.parametrize("stored", [True, False])
def test_a_batch_of_unknown_outcome_is_looked_up_and_acts_once(
    error: LogError, stored: bool
) -> None:
    async def story() -> None:
        yard = Yard()
        async with started(yard.loop):
            yard.faulty.faults = [(error, stored)]
            await until(decided(yard, await yard.add("a")), "the command")
            await until(decided(yard, await yard.add("b")), "the next one")
        assert [e.key[0] for e in await history(yard.admin, "yard.evt.model.>")] == ["a", "b"]
        assert yard.faulty.batches == (2 if stored else 3)

    run(story())


def test_a_conflict_is_decided_again_on_what_came_first() -> None:
    """Somebody else adds the same model just before the batch arrives."""

    async def story() -> None:
        yard = Yard()
        other = MemoryLog(yard.broker, source="/cp/other")

        async def intrude() -> None:
            await other.append(
                Draft(
                    subject="yard.evt.model.a",
                    event=ModelChanged(by="other", fields=()),
                    state=Model(name="a", incarnation="other"),
                    expected_seq=0,
                    rev=1,
                ),
                epoch=yard.loop.term or 0,
            )

        async with started(yard.loop):
            original = yard.faulty.append_batch

            async def once(*given: Any, **more: Any) -> Appended:
                yard.faulty.append_batch = original
                await intrude()
                return await original(*given, **more)

            yard.faulty.append_batch = once
            command = await yard.add("a")
            await until(decided(yard, command), "the command")
            assert yard.loop.world.outcomes[command].code == "exists"
            assert yard.loop.world.models["a"].incarnation == "other"
            assert yard.loop.facts().conflicts == 0

    run(story())


def test_a_deposed_leader_stops_and_its_commands_go_to_the_next() -> None:
    async def story() -> None:
        yard = Yard()
        async with started(yard.loop):
            yard.faulty.faults = [(Deposed("another leads"), False)]
            term = yard.loop.term
            command = await yard.add("a")
            await until(lambda: yard.loop.term is None, "the end of the term")
            # Nobody else stands, so after the silence it is elected again, with a later term.
            await until(decided(yard, command), "the command")
            assert yard.loop.term is not None
            assert term is not None
            assert yard.loop.term > term

    run(story())


def test_another_election_ends_the_term_without_a_decision() -> None:
    async def story() -> None:
        yard = Yard()
        async with started(yard.loop):
            term = yard.loop.term
            assert term is not None
            await yard.admin.append(
                Draft(
                    subject="yard.evt.leader.current",
                    event=LeaderElected(previous="cp-1"),
                    state=Leader(instance="cp-9", host="x", pid=1, since=utc_now()),
                    expected_seq=term,
                    rev=2,
                ),
                epoch=term,
            )
            await until(lambda: yard.loop.term is None, "the end of the term")

    run(story())


def test_a_leader_beacons_and_a_silent_one_is_replaced() -> None:
    async def story() -> None:
        yard = Yard()
        heard: list[LeaderBeacon] = []
        await yard.others.on_beacon("leader", LeaderBeacon, lambda _, body: heard.append(body))
        second = yard.another("cp-2", log=MemoryLog(yard.broker, source="/cp/cp-2"))
        async with started(yard.loop):
            await until(lambda: bool(heard), "a beacon")
            assert heard[0].instance == "cp-1"
            assert heard[0].term == yard.loop.term
            async with started(second, leading=False):
                await until(lambda: second.reader.synced, "the second one caught up")
                await until(lambda: len(heard) >= 2, "another beacon")
                assert second.term is None
        await until(lambda: any(b.leaving for b in heard), "a goodbye")

    run(story())


def test_after_an_outage_agents_count_from_the_start_and_the_term_goes_on() -> None:
    async def story() -> None:
        yard = Yard()
        async with started(yard.loop):
            term = yard.loop.term
            for _ in range(3):
                await yard.others.beacon("agent", "n", AgentBeacon(node="n", epoch=1, position=0))
            view = yard.loop.live.view
            await until(lambda: [a.heard for a in view(leading_since=0).agents] == [3], "three")
            yard.log.connection.disconnect()
            await until(lambda: not yard.loop.reader.connected, "the loss")
            assert view(leading_since=0).agents[0].heard == 0
            assert "nats_unavailable" in [f.code for f in yard.findings()]
            yard.log.connection.reconnect()
            command = await yard.add("a")
            await until(decided(yard, command), "the command")
            assert yard.loop.term == term

    run(story())


def test_nothing_is_decided_before_the_own_election_was_applied() -> None:
    """The decision function sees a world that holds everything up to its own term."""
    seen: list[tuple[int, int]] = []

    def watching(
        world: World,
        live: Live,
        commands: Sequence[StoredCommand],
        now: datetime,
        ids: Ids,
        settings: ControlplaneSettings,
        *,
        reports: Sequence[Report] = (),
    ) -> Step:
        seen.append((world.head("leader.current").seq, len(world.models)))
        return smallest_domain(world, live, commands, now, ids, settings)

    async def story() -> None:
        yard = Yard(watching)
        for n in range(1500):
            draft = Draft(
                subject=f"yard.evt.model.m{n}",
                event=ModelChanged(by="x", fields=()),
                state=Model(name=f"m{n}", incarnation="i"),
                expected_seq=0,
                rev=1,
            )
            await yard.admin.append(draft, epoch=0)
        async with started(yard.loop):
            await until(lambda: bool(seen), "the first question")
        assert seen[0] == (yard.loop.reader.world.head("leader.current").seq, 1500)

    run(story())


def test_outcomes_and_tombstones_past_their_time_are_forgotten() -> None:
    async def story() -> None:
        yard = Yard()
        async with started(yard.loop):
            command = await yard.add("a")
            await until(decided(yard, command), "the command")
            loop = yard.loop
            subject = f"yard.evt.command.{command}"
            head = loop.world.heads[subject]
            old = msgspec.structs.replace(head, stored_at=datetime.fromtimestamp(0, UTC))
            loop.world.heads[subject] = old
            loop._housekept_at -= 7200
            await until(decided(yard, await yard.add("b")), "the next command")
            assert command not in loop.world.outcomes
            assert subject not in loop.world.heads
            assert "a" in loop.world.models

    run(story())


def test_replica_ids_have_the_written_shape() -> None:
    ids = {new_replica_id() for _ in range(200)}
    assert len(ids) == 200
    assert all(len(i) == 12 and i.startswith("r-") and i[2:].isalnum() and i.islower() for i in ids)


def test_the_history_of_one_decision_is_one_batch() -> None:
    async def story() -> None:
        yard = Yard()
        async with started(yard.loop):
            await until(decided(yard, await yard.add("a")), "the command")
        events: list[Recorded] = await history(yard.admin)
        assert [e.noun for e in events] == ["leader.current", "model", "command", "leader.log"]
        assert [e.seq for e in events[1:]] == list(range(events[1].seq, events[1].seq + 3))

    run(story())
