"""Two control planes on one real server: one leads, a deposed one changes nothing, a command acts once."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import cast

from controlplane.app import ControlPlane
from events.log import EventLog, Wire
from schemas.commands import Command, ModelAdd
from schemas.leader import Leader, LeaderLine
from schemas.settings import ControlplaneSettings
from tests.support.aio import run, until
from tests.support.controlplanes import (
    FAST,
    Held,
    Mute,
    add_command,
    history,
    leads,
    on_server,
    plane,
    running,
)
from tests.support.natsserver import NatsServer, nats_server


@asynccontextmanager
async def two_planes(
    server: NatsServer, folder: Path, settings: ControlplaneSettings = FAST
) -> AsyncIterator[tuple[tuple[ControlPlane, Held, Mute], tuple[ControlPlane, Held, Mute]]]:
    """The leader first, the follower second."""
    async with (
        on_server(server, "one") as (log_1, wire_1),
        on_server(server, "two") as (
            log_2,
            wire_2,
        ),
    ):
        held = (Held(log_1), Held(log_2))
        mute = (Mute(wire_1), Mute(wire_2))
        planes = [
            plane(
                cast(EventLog, held[n]),
                cast(Wire, mute[n]),
                folder,
                instance=f"cp-{n + 1}",
                settings=settings,
            )
            for n in range(2)
        ]
        async with running(planes[0]):
            await until(leads(planes[0]), "cp-1 leading")
            async with running(planes[1]):
                await until(lambda: planes[1].leader.reader.synced, "cp-2 caught up")
                yield (planes[0], held[0], mute[0]), (planes[1], held[1], mute[1])


def test_log_09_a_deposed_leaders_batch_is_refused_whole(tmp_path: Path) -> None:
    async def story() -> None:
        with nats_server(tmp_path / "nats") as server:
            async with two_planes(server, tmp_path) as (first, second):
                one, held, mute = first
                two, held_2, _ = second
                term = one.leader.term
                assert term is not None
                held.gate.clear()
                mute.silent = True
                async with on_server(server, "admin") as (log, _):
                    command = add_command("qwen")
                    await log.send("anna", command)
                    await asyncio.wait_for(held.waiting.wait(), 5)
                    # The next leader has its term and has stored nothing yet: only the fence can
                    # tell the stalled one's batch from a good one.
                    held_2.gate.clear()
                    await asyncio.wait_for(held_2.waiting.wait(), 10)
                    held.gate.set()
                    await until(lambda: one.leader.term is None, "cp-1 stepping down")
                    assert [e for e in await history(log) if e.noun == "model"] == []
                    held_2.gate.set()
                    await until(
                        lambda: command.id in two.leader.world.outcomes, "cp-2 deciding the command"
                    )
                    assert one.metrics.deposed._value.get() == 1
                    events = await history(log)
                terms = [e.seq for e in events if isinstance(e.state, Leader)]
                assert terms == sorted(terms)
                assert len(terms) == 2
                assert two.leader.term == terms[1] > term
                lines = [e for e in events if isinstance(e.state, LeaderLine)]
                assert [e.seq for e in lines if e.seq > terms[1] and e.epoch != terms[1]] == []
                added = [(e.type, e.epoch) for e in events if e.noun == "model"]
                assert added == [("model.added", terms[1])]
                await until(
                    lambda: one.leader.world.models == two.leader.world.models,
                    "both holding the same models",
                )

    run(story(), 40)


def test_log_07_the_same_command_twice_has_one_effect_and_one_outcome(tmp_path: Path) -> None:
    """Also when the second comes past the dedupe window: its message id is another then."""

    async def story() -> None:
        with nats_server(tmp_path / "nats") as server:
            async with two_planes(server, tmp_path) as (first, _):
                one, _, _ = first
                async with on_server(server, "admin") as (log, _):
                    command = add_command("qwen")
                    seq = await log.send("anna", command)
                    assert await log.send("anna", command) == seq  # within the window
                    again = await log.send("anna", command, message_id="past-the-window")
                    assert again > seq
                    marker = add_command("marker")
                    await log.send("anna", marker)
                    await until(
                        lambda: marker.id in one.leader.world.outcomes, "all commands decided"
                    )
                    events = await history(log)
                outcomes = [e for e in events if e.noun == "command" and e.key == (command.id,)]
                assert [e.type for e in outcomes] == ["command.accepted"]
                assert [e.type for e in events if e.key == ("qwen",)] == ["model.added"]

    run(story(), 40)


def test_log_07_two_leaders_at_once_give_one_command_one_effect(tmp_path: Path) -> None:
    """Both control planes believe to lead and decide the same command at the same moment."""

    async def story() -> None:
        with nats_server(tmp_path / "nats") as server:
            async with two_planes(server, tmp_path) as (first, second):
                (one, held_1, mute_1), (two, held_2, _) = first, second
                held_1.gate.clear()
                held_2.gate.clear()
                mute_1.silent = True
                async with on_server(server, "admin") as (log, _):
                    command = add_command("qwen")
                    await log.send("anna", command)
                    await asyncio.wait_for(held_1.waiting.wait(), 5)
                    await asyncio.wait_for(held_2.waiting.wait(), 10)
                    assert one.leader.term is not None or two.leader.term is not None
                    held_1.gate.set()
                    held_2.gate.set()
                    await until(
                        lambda: (
                            command.id in two.leader.world.outcomes
                            and command.id in one.leader.world.outcomes
                        ),
                        "both seeing the outcome",
                    )
                    events = await history(log)
                assert [e.type for e in events if e.noun == "command"] == ["command.accepted"]
                assert [e.type for e in events if e.noun == "model"] == ["model.added"]

    run(story(), 40)


def test_log_08_a_stale_command_is_rejected_as_expired(tmp_path: Path) -> None:
    async def story() -> None:
        with nats_server(tmp_path / "nats") as server:
            async with on_server(server, "admin") as (log, wire):
                # No control plane runs while the command is good for something: not a moment.
                stale = Command(id="stale", body=ModelAdd(entry={"name": "late"}), ttl_s=0.0)
                await log.send("anna", stale)
                async with running(plane(log, wire, tmp_path)) as control:
                    await until(
                        lambda: "stale" in control.leader.world.outcomes, "the stale one decided"
                    )
                    outcome = control.leader.world.outcomes["stale"]
                    assert (outcome.status, outcome.code) == ("rejected", "expired")
                    assert control.leader.world.models == {}

    run(story(), 40)


def test_a_leader_that_says_goodbye_is_followed_at_once(tmp_path: Path) -> None:
    async def story() -> None:
        patient = ControlplaneSettings(listen="127.0.0.1:0", leader_silence_s=600.0)
        with nats_server(tmp_path / "nats") as server:
            async with (
                on_server(server, "one") as (log_1, wire_1),
                on_server(server, "two") as (log_2, wire_2),
            ):
                one = plane(log_1, wire_1, tmp_path, instance="cp-1", settings=patient)
                two = plane(log_2, wire_2, tmp_path, instance="cp-2", settings=patient)
                async with AsyncExitStack() as first, AsyncExitStack() as second:
                    await first.enter_async_context(running(one))
                    await until(leads(one), "cp-1 leading")
                    await second.enter_async_context(running(two))
                    await until(lambda: two.leader.reader.synced, "cp-2 caught up")
                    await first.aclose()
                    await until(leads(two), "cp-2 taking over", 5)

    run(story(), 40)


def test_a_leader_whose_process_is_gone_is_replaced_at_once(tmp_path: Path) -> None:
    """The record names this host and a dead pid: nobody waits for its silence."""

    async def story() -> None:
        patient = ControlplaneSettings(listen="127.0.0.1:0", leader_silence_s=600.0)
        with nats_server(tmp_path / "nats") as server:
            async with on_server(server, "one") as (log, wire):
                dead = plane(log, wire, tmp_path, host="here", pid=2**22 + 1)
                async with running(dead):
                    await until(leads(dead), "cp-1 leading")
                    before = dead.leader.term
                    dead.leader.term = None  # no goodbye, as a killed process says none
                async with on_server(server, "two") as (log_2, wire_2):
                    two = plane(
                        log_2, wire_2, tmp_path, instance="cp-2", host="here", settings=patient
                    )
                    async with running(two):
                        await until(leads(two), "cp-2 taking over", 5)
                        assert two.leader.term is not None
                        assert before is not None
                        assert two.leader.term > before

    run(story(), 40)


def test_inv_6_a_killed_leader_loses_nothing_and_the_next_goes_on(tmp_path: Path) -> None:
    """The leader dies with commands undecided; the next decides each of them once, in order."""

    async def story() -> None:
        with nats_server(tmp_path / "nats") as server:
            async with on_server(server, "admin") as (log, _):
                commands = [add_command(f"m{n}") for n in range(20)]
                async with on_server(server, "one") as (log_1, wire_1):
                    held = Held(log_1)
                    one = plane(cast(EventLog, held), wire_1, tmp_path)
                    task = asyncio.create_task(one.run(asyncio.Event()))
                    await until(leads(one), "cp-1 leading")
                    for command in commands[:10]:
                        await log.send("anna", command)
                    await until(lambda: commands[9].id in one.leader.world.outcomes, "ten decided")
                    held.gate.clear()
                    for command in commands[10:]:
                        await log.send("anna", command)
                    await asyncio.wait_for(held.waiting.wait(), 5)
                    task.cancel()
                    await asyncio.gather(task, return_exceptions=True)
                async with on_server(server, "two") as (log_2, wire_2):
                    two = plane(log_2, wire_2, tmp_path, instance="cp-2")
                    async with running(two):
                        await until(
                            lambda: all(c.id in two.leader.world.outcomes for c in commands),
                            "all decided",
                        )
                added = [e.key[0] for e in await history(log, "yard.evt.model.>")]
                assert added == [f"m{n}" for n in range(20)]

    run(story(), 40)


def test_inv_8_every_state_names_its_cause_and_its_actor(tmp_path: Path) -> None:
    async def story() -> None:
        with nats_server(tmp_path / "nats") as server:
            async with on_server(server, "one") as (log, wire):
                control = plane(log, wire, tmp_path)
                async with running(control):
                    await until(leads(control), "a leader")
                    command = add_command("qwen")
                    await log.send("anna", command)
                    await until(lambda: command.id in control.leader.world.outcomes, "an outcome")
                (added,) = await history(log, "yard.evt.model.>")
                assert (added.actor, added.causationid, added.correlationid) == (
                    "anna",
                    command.id,
                    command.id,
                )
                (line,) = await history(log, "yard.evt.leader.log")
                assert isinstance(line.state, LeaderLine)
                assert line.state.cause == command.id
                assert line.state.term == line.epoch
                assert line.state.commands_position == 1

    run(story(), 40)
