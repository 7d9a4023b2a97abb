"""What is done about a stream that exists: nothing, an update that loses nothing, or a refusal."""

from typing import Any

import pytest

from events.streams import (
    CONFIG_REV,
    StreamSpec,
    Verdict,
    compare,
    creation,
    stream_name,
    stream_specs,
    version_of,
)

SPECS = {s.name: s for s in stream_specs()}
EVENTS = SPECS["YARD_EVENTS"]


def found(spec: StreamSpec = EVENTS, **changes: Any) -> dict[str, Any]:
    """A stream as we made it, with changes."""
    config = creation(spec, yard_id="yard", schema=1, stream_id="s-1")
    # What a server adds or leaves out by itself.
    config = {k: v for k, v in config.items() if v not in (False, 0)}
    config["metadata"] = {**config["metadata"], "_nats.ver": "2.15.1"}
    config["consumer_limits"] = {}
    return {**config, **changes}


def judge(config: dict[str, Any], spec: StreamSpec = EVENTS, schema: int = 1) -> Verdict:
    return compare(spec, config, yard_id="yard", schema=schema, stream_id="s-2")


@pytest.mark.parametrize("name", sorted(SPECS))
def test_our_own_stream_is_left_alone(name: str) -> None:
    assert judge(found(SPECS[name]), SPECS[name]) == Verdict(action="leave")


def test_the_truth_never_expires_and_refuses_rather_than_forgets() -> None:
    assert EVENTS.config["max_age"] == 0
    assert EVENTS.config["discard"] == "new"
    assert EVENTS.config["max_msgs_per_subject"] == 64
    assert EVENTS.config["allow_direct"] is False
    assert EVENTS.config["republish"] == {"src": "yard.evt.>", "dest": "yard.live.>"}


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("max_age", 3600),
        ("discard", "old"),
        ("allow_direct", True),
        ("max_msgs_per_subject", 1),
        ("republish", None),
        ("subjects", ["yard.evt.model.>"]),
    ],
)
def test_a_setting_of_ours_is_put_back_and_the_rest_kept(field: str, value: Any) -> None:
    verdict = judge(found(**{field: value}, sealed=False, placement={"cluster": "east"}))
    assert verdict.action == "update"
    assert field in verdict.differences[0]
    assert verdict.config[field] == EVENTS.config[field]
    assert verdict.config["placement"] == {"cluster": "east"}
    assert verdict.config["metadata"]["yard.stream_id"] == "s-1"
    assert "_nats.ver" not in verdict.config["metadata"]


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("storage", "memory"),
        ("retention", "workqueue"),
        ("deny_purge", True),
        ("sources", [{"name": "X"}]),
    ],
)
def test_what_only_a_deletion_could_change_is_refused(field: str, value: Any) -> None:
    spec = SPECS["YARD_AUDIT"] if field == "sources" else EVENTS
    verdict = judge(found(spec, **{field: value}), spec)
    assert verdict.action == "refuse"
    assert field in verdict.differences[0]


def test_another_yards_stream_is_refused() -> None:
    config = found()
    config["metadata"]["yard.id"] = "another"
    assert judge(config).action == "refuse"


@pytest.mark.parametrize(("field", "value"), [("max_bytes", 5), ("num_replicas", 3)])
def test_what_an_operator_sized_stays(field: str, value: int) -> None:
    assert judge(found(EVENTS, **{field: value})).action == "leave"


@pytest.mark.parametrize("newer", [{"yard.config_rev": str(CONFIG_REV + 1)}, {"yard.schema": "2"}])
def test_a_newer_programs_settings_are_left_alone(newer: dict[str, str]) -> None:
    config = found(max_age=77)
    config["metadata"] |= newer
    verdict = judge(config)
    assert verdict.action == "leave"
    assert verdict.differences


def test_a_higher_schema_is_written_into_the_stream() -> None:
    verdict = judge(found(), schema=2)
    assert verdict.action == "update"
    assert verdict.config["metadata"]["yard.schema"] == "2"
    assert verdict.config["metadata"]["yard.stream_id"] == "s-1"


def test_a_stream_without_marks_gets_them() -> None:
    config = found()
    del config["metadata"]
    verdict = judge(config)
    assert verdict.action == "update"
    assert verdict.config["metadata"]["yard.stream_id"] == "s-2"


def test_another_prefix_has_streams_of_its_own() -> None:
    assert stream_name("EVENTS", "lab") == "LAB_EVENTS"
    assert {s.name for s in stream_specs("lab")} == {
        "LAB_EVENTS", "LAB_COMMANDS", "LAB_PROGRESS", "LAB_AUDIT", "LAB_USAGE"
    }  # fmt: skip


@pytest.mark.parametrize(
    ("text", "version"),
    [
        ("2.15.1", (2, 15, 1)),
        ("2.12.3-RC.1", (2, 12, 3)),
        ("2.14.0+dirty", (2, 14, 0)),
        ("", (0, 0, 0)),
        ("two", (0, 0, 0)),
    ],
)
def test_a_version_is_three_numbers(text: str, version: tuple[int, int, int]) -> None:
    assert version_of(text) == version
