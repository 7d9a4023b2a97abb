"""The trace of a request on its way: from a command to whoever reads it, and from a decision to its events."""

from pathlib import Path

import msgspec
import pytest

from events.envelope import traceparent_of
from events.log import Recorded
from schemas.commands import Command, ModelRemove
from tests.support import drafts
from tests.support.logstages import Play, Stage, player, read

TRACE = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01"


@pytest.fixture(params=["memory", "jetstream"])
def play(request: pytest.FixtureRequest, tmp_path: Path) -> Play:
    """Runs a scene on a fresh stage."""
    return player(request.param, tmp_path)


def test_a_command_tells_the_trace_it_was_sent_for(play: Play) -> None:
    async def scene(stage: Stage) -> None:
        for n, trace in enumerate((TRACE, "", "what a header may not say")):
            command = Command(id=f"c-{n}", body=ModelRemove(model="m"))
            await stage.log.send("anna", command, traceparent=trace)
        follower = stage.other.follow_commands(after=0)
        try:
            found = []
            while len(found) < 3:
                found += await follower.next()
            assert [one.traceparent for one in found] == [TRACE, "", ""]
            assert all(one.command is not None for one in found)
        finally:
            await follower.close()

    play(scene)


def test_an_event_carries_the_trace_it_was_decided_for(play: Play) -> None:
    async def scene(stage: Stage) -> None:
        draft = msgspec.structs.replace(drafts.model("m", 0), traceparent=TRACE)
        await stage.log.append(draft, epoch=1)
        await stage.log.append(drafts.model("n", 0), epoch=1)
        last = await stage.other.last(drafts.model_subject("m"))
        assert isinstance(last, Recorded)
        assert last.traceparent == TRACE
        follower = stage.other.follow(["yard.evt.>"])
        try:
            items = await read(follower, 2)
            assert [i.traceparent for i in items if isinstance(i, Recorded)] == [TRACE, None]
        finally:
            await follower.close()

    play(scene)


@pytest.mark.parametrize(
    "text", [None, "", "x", TRACE.upper(), TRACE + "-more", TRACE[:-1], TRACE + "\n"]
)
def test_what_is_no_trace_is_none(text: str | None) -> None:
    assert traceparent_of(text) == ""
