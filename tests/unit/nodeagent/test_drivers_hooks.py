"""Parking by commands of the profile: what they are given, and that only exit code 0 counts."""

import asyncio
from pathlib import Path

import pytest
from msgspec.structs import replace

from nodeagent.drivers.hooks import HooksWay
from nodeagent.drivers.parkways import Parkable, ParkFault
from nodeagent.parkbook import ways_of
from schemas.model import Parking
from schemas.settings import NodeagentSettings
from tests.support.aio import run, until

ENVIRONMENT = {"PATH": "/usr/bin:/bin", "YARD_NATS_URL": "nats://x"}
ENGINE = Parkable(
    replica="r-1",
    model="org/my model",
    endpoint="http://127.0.0.1:20001",
    key="the-key",
    pid=4711,
    pids=(4711, 4712),
    parking=Parking(way="command"),
)


def hooks() -> HooksWay:
    return HooksWay(ENVIRONMENT)


def with_park(*command: str) -> Parkable:
    return replace(ENGINE, parking=Parking(way="command", park=command, resume=("true",)))


def test_the_words_are_filled_in_and_nothing_else_is(tmp_path: Path) -> None:
    out = tmp_path / "out"
    script = f'printf "%s|" "$@" > {out}'
    run(
        hooks().park(
            with_park("sh", "-c", script, "sh", "{pid}", "--to={endpoint}", "{replica}{x}")
        )
    )
    assert out.read_text() == "4711|--to=http://127.0.0.1:20001|r-1{x}|"


def test_the_key_is_in_their_environment_alone(tmp_path: Path) -> None:
    out = tmp_path / "out"
    script = f"env > {out}"
    run(hooks().park(with_park("sh", "-c", script)))
    told = dict(line.split("=", 1) for line in out.read_text().splitlines())
    assert told["YARD_ENGINE_KEY"] == "the-key"
    assert (told["YARD_REPLICA"], told["YARD_PID"]) == ("r-1", "4711")
    assert (told["YARD_ENDPOINT"], told["YARD_MODEL"]) == (ENGINE.endpoint, "org/my model")
    assert "YARD_NATS_URL" not in told


def test_only_exit_code_0_counts_and_its_last_line_is_the_reason() -> None:
    with pytest.raises(ParkFault) as told:
        run(hooks().park(with_park("sh", "-c", "echo first; echo no room >&2; exit 3")))
    assert str(told.value) == "the park command ended with 3: no room"
    failing = replace(ENGINE, parking=Parking(way="command", park=("true",), resume=("false",)))
    run(hooks().park(failing))
    with pytest.raises(ParkFault, match="the resume command ended with 1"):
        run(hooks().resume(failing))


def test_a_command_that_cannot_be_run_says_so() -> None:
    with pytest.raises(ParkFault, match="the park command '/nowhere/park' cannot be run"):
        run(hooks().park(with_park("/nowhere/park")))
    with pytest.raises(ParkFault, match="cannot be run"):
        run(hooks().park(with_park("true", "a\0b")))
    with pytest.raises(ParkFault, match="the profile has no park command"):
        run(hooks().park(with_park()))


def test_what_a_command_leaves_in_the_background_does_not_hold_it_up() -> None:
    run(hooks().park(with_park("sh", "-c", "sleep 5 & exit 0")), timeout_s=3.0)


def test_a_command_that_is_cut_off_leaves_nothing_running(tmp_path: Path) -> None:
    out = tmp_path / "pid"

    async def story() -> None:
        task = asyncio.create_task(
            hooks().park(with_park("sh", "-c", f"sleep 600 & echo $! > {out}; wait"))
        )
        await until(lambda: out.exists() and out.read_text().strip() != "", "its child")
        child = int(out.read_text())
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

        def gone() -> bool:
            try:
                with open(f"/proc/{child}/stat") as file:
                    return file.read().rpartition(")")[2].split()[0] == "Z"
            except OSError:
                return True

        await until(gone, "the end of the command's child")

    run(story())


def test_inv_2_only_a_node_that_allows_commands_has_this_way() -> None:
    assert "command" not in ways_of(NodeagentSettings())
    assert "command" in ways_of(NodeagentSettings(allow_commands=True))
