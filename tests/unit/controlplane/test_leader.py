"""The leader's loop over the log in memory: every way an append can end, and what the loop does then."""

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Callable, Sequence
from datetime import UTC, datetime
from typing import Any, cast

import msgspec
import pytest

from controlplane.candidate import Me
from controlplane.domain.decision import Change, Decision, Ids, Live, Step
from controlplane.domain.reports import Report
from controlplane.domain.world import World
from controlplane.identifiers import new_ids, new_replica_id
from controlplane.leader import LeaderLoop, NextDecision
from controlplane.metrics import Metrics
from controlplane.readiness import Finding, assess
from events.ids import utc_now
from events.log import (
    Appended,
    Deposed,
    Draft,
    EventLog,
    Fence,
    LogError,
    LogFull,
    Misconfigured,
    OutcomeUnknown,
    Recorded,
    StoredCommand,
    Unavailable,
)
from events.memory import MemoryLog, MemoryWire
from events.memory_broker import MemoryBroker
from schemas.beacons import AgentBeacon, LeaderBeacon
from schemas.commands import ModelAdd, Outcome
from schemas.leader import Leader, LeaderElected
from schemas.model import Model, ModelChanged, ModelDeleted
from schemas.settings import ControlplaneSettings
from tests.support.aio import run, until
from tests.support.controlplanes import add_command, history, smallest_domain

SETTINGS = ControlplaneSettings(leader_silence_s=0.3)


class Faulty:
    """A log whose next batches end as told: an error instead of, or after, being stored."""

    def __init__(self, inner: MemoryLog) -> None:
        self._inner = inner
        self.faults: list[tuple[LogError, bool]] = []
        self.batches = 0

    def __getattr__(self, name: str) -> object:
        return getattr(self._inner, name)

    async def append_batch(
        self, drafts: Sequence[Draft], *, epoch: int, fence: Fence | None = None
    ) -> Appended:
        self.batches += 1
        if self.faults:
            error, stored = self.faults.pop(0)
            if stored:
                await self._inner.append_batch(drafts, epoch=epoch, fence=fence)
            raise error
        return await self._inner.append_batch(drafts, epoch=epoch, fence=fence)


class Yard:
    """One loop on one broker, and an operator's log beside it."""

    def __init__(self, decide: NextDecision = smallest_domain, schema: int = 1) -> None:
        self.broker = MemoryBroker(schema=schema)
        self.log = MemoryLog(self.broker)
        self.faulty = Faulty(self.log)
        self.admin = MemoryLog(self.broker, source="/ctl/anna")
        self.wire = MemoryWire(self.log.connection)
        self.others = MemoryWire(self.admin.connection)
        self.loop = self.another("cp-1", decide)

    def another(
        self, instance: str, decide: NextDecision = smallest_domain, log: EventLog | None = None
    ) -> LeaderLoop:
        return LeaderLoop(
            events=log or cast(EventLog, self.faulty),
            wire=self.wire,
            me=Me(instance=instance, host=f"host-of-{instance}", pid=1),
            settings=SETTINGS,
            make_decider=lambda: decide,
            ids=new_ids(),
            now=utc_now,
            monotonic=time.monotonic,
            metrics=Metrics(),
        )

    async def add(self, name: str) -> str:
        command = add_command(name)
        await self.admin.send("anna", command)
        return command.id

    def findings(self) -> list[Finding]:
        return list(assess(self.loop.facts()))


@contextlib.asynccontextmanager
async def started(loop: LeaderLoop, *, leading: bool = True) -> AsyncIterator[None]:
    task = asyncio.create_task(loop.run())
    try:
        if leading:
            await until(lambda: loop.term is not None or task.done(), "a term")
        yield
        if task.done():
            task.result()
    finally:
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task


def decided(yard: Yard, command_id: str) -> Callable[[], bool]:
    return lambda: command_id in yard.loop.world.outcomes


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


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (LogFull(10077, "maximum bytes exceeded"), "log_full"),
        (Misconfigured("denied"), "misconfigured"),
    ],
)
def test_log_15_a_full_log_is_an_alarm_and_over_when_there_is_room(
    error: LogError, code: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def story() -> None:
        monkeypatch.setattr("controlplane.carrier.FULL_RETRY_S", 0.2)
        yard = Yard()
        async with started(yard.loop):
            yard.faulty.faults = [(error, False)]
            command = await yard.add("a")
            await until(lambda: code in yard.loop.alarms.present(), "the alarm")
            assert [f.code for f in yard.findings()] == [code]
            assert yard.loop.term is not None  # it goes on leading and reading
            await until(decided(yard, command), "the command, later")
            assert yard.findings() == []

    run(story())


def test_a_command_that_cannot_be_decided_is_refused_and_others_go_on() -> None:
    def poisoned(
        world: World,
        live: Live,
        commands: Sequence[StoredCommand],
        now: datetime,
        ids: Ids,
        settings: ControlplaneSettings,
        *,
        reports: Sequence[Report] = (),
    ) -> Step:
        first = commands[0].command if commands else None
        if (
            first is not None
            and isinstance(first.body, ModelAdd)
            and first.body.entry["name"] == "x"
        ):
            raise ZeroDivisionError
        return smallest_domain(world, live, commands, now, ids, settings)

    async def story() -> None:
        yard = Yard(poisoned)
        async with started(yard.loop):
            bad, good = await yard.add("x"), await yard.add("a")
            await until(decided(yard, good), "the good command")
            assert yard.loop.world.outcomes[bad].code == "internal"
            assert yard.findings() == []

    run(story())


@pytest.mark.parametrize("poison", ["key", "size", "twice"])
def test_a_command_whose_decision_no_log_could_store_is_refused_and_others_go_on(
    poison: str,
) -> None:
    def impossible(
        world: World,
        live: Live,
        commands: Sequence[StoredCommand],
        now: datetime,
        ids: Ids,
        settings: ControlplaneSettings,
        *,
        reports: Sequence[Report] = (),
    ) -> Step:
        step = smallest_domain(world, live, commands, now, ids, settings)
        decision = step.decision
        if decision is None or not decision.changes or decision.changes[0].key != ("x",):
            return step
        change = decision.changes[0]
        match poison:
            case "key":
                changes = (msgspec.structs.replace(change, key=("",)),)
            case "size":
                huge = Model(name="x", incarnation="x" * 300_000)
                changes = (msgspec.structs.replace(change, state=huge),)
            case _:
                changes = (change, change)
        return msgspec.structs.replace(
            step, decision=msgspec.structs.replace(decision, changes=changes)
        )

    async def story() -> None:
        yard = Yard(impossible)
        async with started(yard.loop):
            bad, good = await yard.add("x"), await yard.add("a")
            await until(decided(yard, good), "the good command")
            assert yard.loop.world.outcomes[bad].code == "internal"
            assert yard.findings() == []

    run(story())


@pytest.mark.parametrize("recovers", [True, False])
def test_a_removal_lets_the_audit_catch_up_but_not_for_ever(
    recovers: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    def ending(
        world: World,
        live: Live,
        commands: Sequence[StoredCommand],
        now: datetime,
        ids: Ids,
        settings: ControlplaneSettings,
        *,
        reports: Sequence[Report] = (),
    ) -> Step:
        if "x" not in world.models:
            return smallest_domain(world, live, commands, now, ids, settings)
        ends = Change(noun="model", key=("x",), event=ModelDeleted(), state=None)
        outcome = Outcome(id="c-1", actor="anna", name="model.remove", status="accepted", at=now)
        return Step(decision=Decision(changes=(ends,), what="x ends", outcome=outcome))

    async def story() -> None:
        monkeypatch.setattr("controlplane.carrier.AUDIT_WAIT_S", 10 if recovers else 0.2)
        yard = Yard(ending)
        yard.broker.audit_lags = True
        async with started(yard.loop):
            await until(decided(yard, await yard.add("x")), "the model")
            await until(lambda: yard.broker.audit_asked > 2, "the leader to look at the audit")
            if recovers:
                assert "x" in yard.loop.world.models
                yard.broker.audit_lags = False
            await until(lambda: "x" not in yard.loop.world.models, "its end")

    run(story())


def test_an_end_nobody_asked_for_waits_for_the_audit_and_holds_up_nobody(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def ending(
        world: World,
        live: Live,
        commands: Sequence[StoredCommand],
        now: datetime,
        ids: Ids,
        settings: ControlplaneSettings,
        *,
        reports: Sequence[Report] = (),
    ) -> Step:
        if "x" in world.models and not live.audit_behind:
            ends = Change(noun="model", key=("x",), event=ModelDeleted(), state=None)
            return Step(decision=Decision(changes=(ends,), what="x ends"))
        return smallest_domain(world, live, commands, now, ids, settings)

    async def story() -> None:
        monkeypatch.setattr("controlplane.carrier.AUDIT_WAIT_S", 3600)
        monkeypatch.setattr("controlplane.carrier.AUDIT_AGAIN_S", 0.1)
        monkeypatch.setattr("controlplane.leader.AUDIT_LOOK_S", 0.05)
        yard = Yard(ending)
        yard.broker.audit_lags = True
        async with started(yard.loop):
            await until(decided(yard, await yard.add("x")), "the model")
            await until(lambda: yard.broker.audit_asked > 1, "the leader to look at the audit")
            await until(decided(yard, await yard.add("a")), "another's model")
            assert "x" in yard.loop.world.models
            yard.broker.audit_lags = False
            await until(lambda: "x" not in yard.loop.world.models, "its end")

    run(story())


def test_a_decision_function_that_always_fails_turns_readiness_red() -> None:
    def broken(*_: object, **__: object) -> Step:
        raise ZeroDivisionError("bug")

    async def story() -> None:
        yard = Yard(cast(NextDecision, broken))
        async with started(yard.loop):
            await until(lambda: bool(yard.findings()), "a finding")
            (finding,) = yard.findings()
            assert finding.code == "decision_failed"
            assert "ZeroDivisionError" in finding.sentence

    run(story())


def test_log_22_nothing_is_written_over_an_event_that_cannot_be_read() -> None:
    async def story() -> None:
        yard = Yard()
        async with started(yard.loop):
            seq = yard.broker.put("yard.evt.model.a", b"junk")
            await until(lambda: yard.loop.reader.position >= seq, "the junk read")
            command = await yard.add("a")
            await until(lambda: bool(yard.findings()), "a finding")
            (finding,) = yard.findings()
            assert finding.code == "not_writable"
            assert "yard.evt.model.a" in finding.sentence
            assert yard.faulty.batches == 0
            assert command not in yard.loop.world.outcomes

    run(story())


def test_a_record_of_the_leader_that_cannot_be_read_turns_readiness_red() -> None:
    async def story() -> None:
        yard = Yard()
        yard.broker.put("yard.evt.leader.current", b"junk")
        async with started(yard.loop, leading=False):
            await until(lambda: bool(yard.findings()), "a finding")
            await until(
                lambda: [f.code for f in yard.findings()] == ["no_election"], "the right finding"
            )
            assert yard.loop.term is None

    run(story())


def test_a_fold_that_raises_stops_the_world_and_the_leading() -> None:
    async def story() -> None:
        yard = Yard()
        async with started(yard.loop):

            def bug(_: object) -> None:
                raise ZeroDivisionError

            world = yard.loop.world

            class Broken(World):
                __slots__ = ()
                apply = bug  # type: ignore[assignment]

            yard.loop.reader.world = Broken(heads=world.heads)
            yard.broker.put("yard.evt.node.n", b"junk")
            await until(lambda: yard.loop.term is None, "the end of the term")
            (finding,) = yard.findings()
            assert finding.code == "projection_stopped"
            assert "yard.evt.node.n" in finding.sentence

    run(story())


def test_a_newer_log_is_read_and_not_led() -> None:
    async def story() -> None:
        yard = Yard(schema=2)
        async with started(yard.loop, leading=False):
            await until(lambda: bool(yard.loop.alarms.present()), "the alarm")
            assert yard.loop.term is None
            assert [f.code for f in yard.findings()] == ["upgrade_required"]
        assert await history(yard.admin) == []

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
