"""`yardctl events`: what is shown of the log, how a line looks, where it starts and ends."""

import json
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from rich.console import Console

from controlplane.ctl import tail
from controlplane.ctl.failures import CtlError, UsageMistake
from events.lines import line_of, models_of
from events.log import Broken, Draft, Recorded
from events.memory import MemoryLog
from events.memory_broker import MemoryBroker
from events.subjects import event_subject
from schemas.activation import Activation, ActivationReady
from schemas.adapter import Adapter, AdapterReady
from schemas.model import Model, ModelAdded, ModelDeleted
from schemas.replica import Replica, ReplicaFailed, ReplicaReady
from schemas.slots import Slots, SlotsLoaded
from tests.support.aio import run

NOW = datetime(2026, 1, 1, 12, tzinfo=UTC)


def replica(**over: Any) -> Replica:
    return Replica(
        **{
            "id": "r-1",
            "node": "n",
            "model": "a",
            "incarnation": "i",
            "profile": "p",
            "revision": "v",
            "engine": "command",
            "phase": "ready",
            "since": NOW,
            "epoch": 1,
        }
        | over
    )


def recorded(**over: Any) -> Recorded:
    return Recorded(
        **{
            "seq": 7,
            "subject": "yard.evt.replica.n.r-1",
            "noun": "replica",
            "key": ("n", "r-1"),
            "id": "01",
            "type": "replica.ready",
            "time": NOW,
            "stored_at": NOW,
            "rev": 1,
            "epoch": 1,
            "actor": "agent-n",
            "reason": "answers",
            "event": ReplicaReady(load_s=0.4321),
            "state": replica(),
        }
        | over
    )


BROKEN = Broken(seq=9, subject="yard.evt.model.x", why="not JSON")


# What is asked for ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("yard.evt.replica.>", "yard.evt.replica.>"),
        ("yard.live.replica.n.*", "yard.evt.replica.n.*"),
        ("replica.>", "yard.evt.replica.>"),
        ("model.qwen2%2E5", "yard.evt.model.qwen2%2E5"),
    ],
)
def test_a_subject_may_be_spelled_in_three_ways(text: str, expected: str) -> None:
    assert tail.parse_subject(text, "yard") == expected


@pytest.mark.parametrize("text", ["", "a..b", "a b", ">.a", "yard.evt."])
def test_what_is_no_subject_is_refused(text: str) -> None:
    with pytest.raises(UsageMistake):
        tail.parse_subject(text, "yard")


def test_since_is_a_duration_or_a_time() -> None:
    assert tail.parse_moment("10m", NOW) == NOW - timedelta(minutes=10)
    assert tail.parse_moment("2026-01-01T11:00:00Z", NOW) == NOW - timedelta(hours=1)
    assert tail.parse_moment("2026-01-01T11:00:00", NOW) == NOW - timedelta(hours=1)
    with pytest.raises(UsageMistake, match="10m"):
        tail.parse_moment("yesterday", NOW)


def asked(**over: Any) -> tail.Query:
    return tail.Query(subjects=("yard.evt.>",), **over)


@pytest.mark.parametrize(
    ("query", "expected"),
    [
        (asked(), True),
        (asked(types=("replica.*",)), True),
        (asked(types=("replica.failed", "model.*")), False),
        (asked(model="a"), True),
        (asked(model="b"), False),
        (asked(node="n"), True),
        (asked(node="m"), False),
        (asked(since=NOW), True),
        (asked(since=NOW + timedelta(seconds=1)), False),
        (asked(until=NOW - timedelta(seconds=1)), False),
        (asked(model="a", types=("activation.*",)), False),
    ],
)
def test_filters_beyond_the_subject(query: tail.Query, expected: bool) -> None:
    assert tail.wanted(recorded(), query) is expected


def test_what_cannot_be_read_is_always_told() -> None:
    assert tail.wanted(BROKEN, asked(model="b", types=("x",)))


def test_an_event_concerns_the_model_of_its_key_or_state() -> None:
    assert models_of(recorded()) == {"a"}
    added = recorded(noun="model", key=("m",), state=None, event=None)
    assert models_of(added) == {"m"}
    assert models_of(recorded(noun="node", key=("n",), state=None)) == set()


def test_what_happens_to_an_adapter_concerns_its_base() -> None:
    sql = Adapter(
        name="sql", incarnation="i", base="a", base_incarnation="m", phase="ready", since=NOW
    )
    ready = recorded(
        noun="adapter", key=("sql",), state=sql, event=AdapterReady(version="0123abcd4567"),
        type="adapter.ready", reason="",
    )  # fmt: skip
    assert models_of(ready) == {"a"}
    assert not tail.wanted(ready, asked(node="n"))
    assert tail.pretty(ready).plain.endswith("sql  of a version=0123abcd4567  (agent-n)")
    slots = Slots(node="n", replica="r-1", model="a", epoch=1, limit=4, since=NOW)
    loaded = recorded(
        noun="slots", state=slots, event=SlotsLoaded(adapter="sql", version="0123abcd4567"),
        type="slots.loaded",
    )  # fmt: skip
    assert models_of(loaded) == {"a"}
    assert tail.wanted(loaded, asked(node="n", model="a"))
    assert "n/r-1  a adapter=sql version=0123abcd4567 how=loaded" in tail.pretty(loaded).plain


def test_a_long_type_is_shortened_for_filters() -> None:
    item = recorded(type="dev.modelyard.replica.ready")
    assert tail.short(item) == "replica.ready"
    assert tail.wanted(item, asked(types=("replica.*",)))


# How a line looks -------------------------------------------------------------------------------------


def test_a_pretty_line_tells_time_type_key_what_and_why() -> None:
    line = tail.pretty(recorded()).plain
    local = NOW.astimezone().strftime("%H:%M:%S.000")
    assert line.startswith(f"{local}  replica.ready")
    assert line.endswith("n/r-1  a load_s=0.432  answers  (agent-n)")


def test_the_systems_own_name_is_left_out() -> None:
    assert "system" not in tail.pretty(recorded(actor="system:control")).plain


def test_a_broken_event_says_why_it_cannot_be_read() -> None:
    assert tail.pretty(BROKEN).plain == "seq 9  yard.evt.model.x  cannot be read: not JSON"


def test_a_json_line_has_the_sequence_to_resume_from() -> None:
    line = json.loads(tail.jsonl(line_of(recorded())))
    assert line["seq"] == 7
    assert line["type"] == "replica.ready"
    assert line["state"]["model"] == "a"
    assert line["change"]["load_s"] == 0.4321
    assert json.loads(tail.jsonl(line_of(BROKEN)))["problem"] == "not JSON"


# Reading the log --------------------------------------------------------------------------------------


async def filled() -> MemoryLog:
    log = MemoryLog(MemoryBroker())
    drafts = (
        ("model", ("a",), ModelAdded(by="x"), Model(name="a", incarnation="i")),
        (
            "activation",
            ("a", "any"),
            ActivationReady(replica="r-1"),
            Activation(model="a", incarnation="i", phase="ready", wanted_at=NOW, since=NOW),
        ),
        ("replica", ("n", "r-1"), ReplicaFailed(code="exited"), replica(phase="failed")),
    )
    for noun, key, event, state in drafts:
        draft = Draft(
            subject=event_subject(noun, *key), event=event, state=state, expected_seq=0, rev=1
        )
        await log.append(draft, epoch=1)
    return log


def told(capsys: pytest.CaptureFixture[str], **over: Any) -> list[Any]:
    async def story() -> None:
        await tail.tail(await filled(), asked(**over), "jsonl", Console())

    run(story())
    return [json.loads(line) for line in capsys.readouterr().out.splitlines()]


def test_without_following_all_that_is_stored_is_told(capsys: pytest.CaptureFixture[str]) -> None:
    assert [line["type"].rpartition(".")[2] for line in told(capsys, after=0)] == [
        "added",
        "ready",
        "failed",
    ]


def test_a_sequence_resumes_behind_it(capsys: pytest.CaptureFixture[str]) -> None:
    assert [line["seq"] for line in told(capsys, after=2)] == [3]


def test_a_filter_of_types_holds(capsys: pytest.CaptureFixture[str]) -> None:
    assert [line["seq"] for line in told(capsys, after=0, types=("replica.*",))] == [3]


def test_nats_going_away_before_the_end_is_no_success(capsys: pytest.CaptureFixture[str]) -> None:
    async def story() -> None:
        log = await filled()
        log.connection.disconnect()
        await tail.tail(log, asked(after=0), "jsonl", Console())

    with pytest.raises(CtlError, match="NATS went away"):
        run(story())


def test_events_of_a_subject_that_ended_are_told(capsys: pytest.CaptureFixture[str]) -> None:
    async def story() -> None:
        log = await filled()
        ended = Draft(
            subject=event_subject("model", "a"),
            event=ModelDeleted(),
            state=None,
            expected_seq=1,
            rev=2,
        )
        await log.append(ended, epoch=1)
        await tail.tail(log, asked(after=0, model="a", types=("model.*",)), "jsonl", Console())

    run(story())
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [line["seq"] for line in lines] == [1, 4]
