"""What a leader does with what it cannot decide, store, read or fold, and what its readiness says of it."""

from collections.abc import Sequence
from datetime import datetime
from typing import cast

import msgspec
import pytest

from controlplane.domain.decision import Change, Decision, Ids, Live, Step
from controlplane.domain.reports import Report
from controlplane.domain.world import World
from controlplane.leader import NextDecision
from events.log import LogError, LogFull, Misconfigured, StoredCommand
from schemas.commands import ModelAdd, Outcome
from schemas.model import Model, ModelDeleted
from schemas.settings import ControlplaneSettings
from tests.support.aio import run, until
from tests.support.controlplanes import history, smallest_domain
from tests.support.leaders import Yard, decided, started


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
