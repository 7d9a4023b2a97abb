"""Parking by cuda-checkpoint: the order of its steps, which processes, and that any failure is a failure."""

import asyncio
import os
from pathlib import Path

import pytest

from nodeagent.drivers.checkpoint import CheckpointWay
from nodeagent.drivers.driver import Capabilities
from nodeagent.drivers.parkways import Parkable, ParkFault
from nodeagent.parkbook import ways_for, ways_of
from schemas.model import Parking
from schemas.settings import NodeagentSettings
from tests.support.aio import run, until
from tests.support.fake_cuda_checkpoint import FakeCheckpoint


def an_engine(*pids: int, timeout_s: float = 60.0) -> Parkable:
    return Parkable(
        replica="r-1",
        model="m",
        endpoint="http://127.0.0.1:1",
        key="k",
        pid=pids[0],
        pids=pids,
        parking=Parking(way="checkpoint", timeout_s=timeout_s),
    )


@pytest.fixture
def fake(tmp_path: Path) -> FakeCheckpoint:
    return FakeCheckpoint(tmp_path / "cuda")


def way(fake: FakeCheckpoint) -> CheckpointWay:
    return CheckpointWay(str(fake.program))


def test_all_are_locked_before_the_first_is_checkpointed(fake: FakeCheckpoint) -> None:
    """11 is a shell that uses no card: it is left alone."""
    fake.uses_cuda(12, 13)
    run(way(fake).park(an_engine(13, 12, 11)))
    assert fake.calls() == ["lock 12 10000", "lock 13 10000", "checkpoint 12", "checkpoint 13"]
    assert (fake.state(12), fake.state(13)) == ("checkpointed", "checkpointed")


def test_the_lock_is_bounded_by_what_the_profile_allows(fake: FakeCheckpoint) -> None:
    fake.uses_cuda(12)
    run(way(fake).park(an_engine(12, timeout_s=2.5)))
    assert fake.calls()[0] == "lock 12 2500"


def test_resuming_restores_all_and_then_unlocks_them(fake: FakeCheckpoint) -> None:
    fake.uses_cuda(12, 13, state="checkpointed")
    run(way(fake).resume(an_engine(12, 13, 11)))
    assert fake.calls() == ["restore 12", "restore 13", "unlock 12", "unlock 13"]
    assert (fake.state(12), fake.state(13)) == ("running", "running")


def test_a_resume_that_was_cut_off_is_gone_on_with(fake: FakeCheckpoint) -> None:
    fake.uses_cuda(12, state="locked")
    fake.uses_cuda(13, state="checkpointed")
    fake.uses_cuda(14, state="running")
    run(way(fake).resume(an_engine(12, 13, 14)))
    assert fake.calls() == ["restore 13", "unlock 12", "unlock 13"]


@pytest.mark.parametrize("action", ["lock", "checkpoint"])
def test_a_step_that_fails_fails_the_park_and_says_why(fake: FakeCheckpoint, action: str) -> None:
    fake.uses_cuda(12)
    fake.fails(action, "OS call failed or operation not supported on this OS")
    with pytest.raises(ParkFault) as told:
        run(way(fake).park(an_engine(12)))
    assert str(told.value) == (
        f"cuda-checkpoint {action} of 12 ended with 1:"
        " OS call failed or operation not supported on this OS"
    )
    # Nothing is undone: the state is not to be trusted.
    assert "unlock 12" not in fake.calls()


@pytest.mark.parametrize("action", ["restore", "unlock"])
def test_a_step_that_fails_fails_the_resume(fake: FakeCheckpoint, action: str) -> None:
    fake.uses_cuda(12, state="checkpointed")
    fake.fails(action, "out of memory")
    with pytest.raises(ParkFault, match=f"{action} of 12 ended with 1: out of memory"):
        run(way(fake).resume(an_engine(12)))


def test_an_engine_without_a_process_on_a_card_is_not_parked(fake: FakeCheckpoint) -> None:
    with pytest.raises(ParkFault, match="none of its processes uses a card"):
        run(way(fake).park(an_engine(12)))
    with pytest.raises(ParkFault, match="none of its processes was checkpointed"):
        run(way(fake).resume(an_engine(12)))


def test_a_process_that_failed_before_is_not_touched(fake: FakeCheckpoint) -> None:
    fake.uses_cuda(12, state="failed")
    with pytest.raises(ParkFault, match="calls process 12 failed"):
        run(way(fake).park(an_engine(12)))
    assert fake.calls() == []


def test_a_step_that_hangs_is_killed_with_whoever_waits_for_it(fake: FakeCheckpoint) -> None:
    fake.uses_cuda(12)
    fake.fails("checkpoint", "hang")

    def running() -> list[int]:
        found = []
        for name in os.listdir("/proc"):
            try:
                with open(f"/proc/{name}/cmdline", "rb") as file:
                    line = file.read()
            except OSError:
                continue
            if str(fake.program).encode() in line:
                found.append(int(name))
        return found

    async def story() -> None:
        parking = asyncio.create_task(way(fake).park(an_engine(12)))
        await until(lambda: "checkpoint 12" in fake.calls(), "the step that hangs")
        assert running()
        parking.cancel()
        with pytest.raises(asyncio.CancelledError):
            await parking
        assert running() == []

    run(story())


def test_a_node_without_the_program_has_no_such_way(fake: FakeCheckpoint, tmp_path: Path) -> None:
    with pytest.raises(ParkFault, match="cannot be run"):
        run(CheckpointWay(str(tmp_path / "gone")).park(an_engine(12)))
    assert "checkpoint" not in ways_of(NodeagentSettings(cuda_checkpoint=str(tmp_path / "gone")))
    with_it = ways_of(NodeagentSettings(cuda_checkpoint=str(fake.program)))
    assert sorted(with_it) == ["checkpoint", "sleep"]


def test_an_engine_has_the_ways_of_its_node_and_sleeps_only_if_it_can(fake: FakeCheckpoint) -> None:
    settings = NodeagentSettings(cuda_checkpoint=str(fake.program), allow_commands=True)
    ways = ways_of(settings)
    assert ways_for(Capabilities(parking=True), ways) == ("checkpoint", "command", "sleep")
    assert ways_for(Capabilities(), ways) == ("checkpoint", "command")
