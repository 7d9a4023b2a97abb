"""How far a start is, as a step and a percentage, and the comment that says so."""

from collections.abc import Mapping
from datetime import timedelta
from typing import Any

import pytest

from gateway.domain.envelopes import envelope
from gateway.domain.loading import Progress, progress, without_parameter
from gateway.domain.table import Table
from schemas.progress import FileProgress
from tests.support.gateway_world import NOW, Story

LATER = NOW + timedelta(seconds=5)
NOTHING_HEARD: Mapping[str, FileProgress] = {}


def a_table(*told: Any) -> Table:
    table = Table()
    for item in told:
        table.apply(item)
    return table


def now_of(table: Table, heard: Mapping[str, FileProgress] = NOTHING_HEARD) -> Progress:
    return progress(table, "m", "any", heard, LATER)


def test_before_anybody_decided_it_is_being_asked_for() -> None:
    story = Story()
    assert now_of(a_table(story.model())) == Progress(step="asking")
    assert now_of(a_table(story.model(), story.activation("wanted"))) == Progress(step="asking")


@pytest.mark.parametrize(("phase", "step"), [("placing", "placing"), ("waiting", "waiting")])
def test_without_a_replica_the_decision_is_the_step(phase: Any, step: Any) -> None:
    story = Story()
    assert now_of(a_table(story.model(), story.activation(phase))).step == step


def test_files_on_their_way_are_measured_in_bytes_once_they_are_heard_of() -> None:
    story = Story()
    table = a_table(
        story.model(),
        story.activation("loading", replica="r-1"),
        story.replica("r-1", "fetching"),
    )
    assert now_of(table) == Progress(step="fetching")
    heard = {"r-1": FileProgress(key="k", bytes=420, total_bytes=1000)}
    assert now_of(table, heard) == Progress(step="fetching", percent=42)
    assert now_of(table, {"r-2": heard["r-1"]}).percent is None
    unknown = {"r-1": FileProgress(key="k", bytes=420, total_bytes=0)}
    assert now_of(table, unknown).percent is None


@pytest.mark.parametrize(("expected_s", "percent"), [(10, 50), (5, 99), (1, 99), (500, 1)])
def test_an_engine_that_loads_is_measured_by_the_loads_before_it_and_never_done_by_that(
    expected_s: int, percent: int
) -> None:
    story = Story()
    table = a_table(
        story.model(),
        story.activation(
            "loading", replica="r-1", expected_ready_at=NOW + timedelta(seconds=expected_s)
        ),
        story.replica("r-1", "starting"),
    )
    assert now_of(table) == Progress(step="starting", percent=percent)


def test_a_load_that_was_never_measured_has_no_percentage() -> None:
    story = Story()
    table = a_table(
        story.model(),
        story.activation("loading", replica="r-1"),
        story.replica("r-1", "starting"),
    )
    assert now_of(table) == Progress(step="starting")


@pytest.mark.parametrize(
    ("phase", "step"), [("parked", "resuming"), ("ready", "checking"), ("waiting", "waiting")]
)
def test_other_phases_are_steps_without_a_measure(phase: Any, step: Any) -> None:
    story = Story()
    table = a_table(
        story.model(), story.activation("loading", replica="r-1"), story.replica("r-1", phase)
    )
    assert now_of(table) == Progress(step=step)


def test_the_comment_is_one_that_readers_of_events_skip() -> None:
    told = Progress(step="starting", percent=42).comment(3.9)
    assert told == b": loading step=starting percent=42 elapsed_s=3\n\n"
    assert Progress(step="asking").comment(0.0) == b": loading step=asking elapsed_s=0\n\n"


@pytest.mark.parametrize(
    ("query", "rest"),
    [
        (b"loading=stream", b""),
        (b"a=1&loading=stream&b=2", b"a=1&b=2"),
        (b"loading=streams", b"loading=streams"),
        (b"xloading=stream", b"xloading=stream"),
    ],
)
def test_an_engine_is_not_told_what_the_gateway_was_asked(query: bytes, rest: bytes) -> None:
    assert without_parameter(query) == rest


def test_an_error_inside_a_stream_is_one_line_of_data_in_the_form_of_the_place() -> None:
    body = b'{\n "error": {"message": "no"}\r\n}'
    assert envelope("openai", "r").framed(body) == b'data: {  "error": {"message": "no"}  }\n\n'
    assert envelope("anthropic", "r").framed(b"{}") == b"event: error\ndata: {}\n\n"
