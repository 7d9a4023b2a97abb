"""GET /v1/events: SSE and lines, resume, filters, and clients that leave."""

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import httpx
import pytest

from controlplane import events_api
from controlplane.events_api import BadQuery, parse_query, parse_since
from events.log import Draft
from schemas.model import ModelDeleted
from tests.integration.test_api_reads import Yard, at_work, tell
from tests.support.aio import run, until

NOW = datetime(2026, 1, 2, tzinfo=UTC)


@contextlib.asynccontextmanager
async def lines(
    client: httpx.AsyncClient, sse: bool = False, **params: Any
) -> AsyncIterator[AsyncIterator[str]]:
    headers = {"Accept": "text/event-stream"} if sse else {}
    last = params.pop("last_event_id", None)
    if last is not None:
        headers["Last-Event-ID"] = str(last)
    async with client.stream("GET", "/v1/events", params=params, headers=headers) as answer:
        assert answer.status_code == 200
        wanted = "text/event-stream" if sse else "application/x-ndjson"
        assert answer.headers["content-type"].startswith(wanted)
        yield answer.aiter_lines()


async def next_event(source: AsyncIterator[str]) -> dict[str, Any]:
    """The next line that is an event."""
    while True:
        line = await asyncio.wait_for(anext(source), 5)
        if line.strip() not in ("", "{}"):
            event: dict[str, Any] = json.loads(line)
            return event


async def everything(client: httpx.AsyncClient, **params: Any) -> list[dict[str, Any]]:
    """All that the log holds now."""
    async with lines(client, follow=False, **params) as source:
        return [json.loads(line) async for line in source if line.strip() not in ("", "{}")]


def test_without_a_position_only_new_events_come(tmp_path: Path) -> None:
    async def story(yard: Yard, client: httpx.AsyncClient) -> None:
        await yard.add("old")
        async with lines(client) as source:
            await until(lambda: yard.plane._streams._open == 1, "the stream")
            await yard.add("new")
            event = await next_event(source)
            assert (event["type"], event["state"]["name"]) == ("model.added", "new")
            assert (event["actor"], event["rev"]) == ("anna", 1)
            assert event["change"]["by"] == "anna"

    tell(tmp_path, story)


def test_sse_carries_the_sequence_and_resumes_behind_it(tmp_path: Path) -> None:
    async def story(yard: Yard, client: httpx.AsyncClient) -> None:
        seq = await yard.add("a")
        async with lines(client, sse=True, from_seq=seq) as source:
            seen = [line async for line in first(source, 5)]
        assert seen[:2] == ["retry: 2000", ""]
        assert seen[2] == f"id: {seq}"
        assert seen[3] == "event: command.accepted"
        assert json.loads(seen[4].removeprefix("data: "))["seq"] == seq
        await yard.add("b")
        async with lines(client, last_event_id=seq, from_seq=1) as source:
            assert (await next_event(source))["seq"] == seq + 1

    async def first(source: AsyncIterator[str], count: int) -> AsyncIterator[str]:
        for _ in range(count):
            yield await asyncio.wait_for(anext(source), 5)

    tell(tmp_path, story)


def test_events_of_a_subject_that_ended_are_told(tmp_path: Path) -> None:
    async def story(yard: Yard, client: httpx.AsyncClient) -> None:
        seq = await yard.add("a")
        head = await yard.log.last("yard.evt.model.a")
        assert head is not None
        ended = Draft(
            subject=head.subject, event=ModelDeleted(), state=None, expected_seq=head.seq, rev=2
        )
        last = (await yard.log.append(ended, epoch=seq)).seqs[0]
        told = await everything(client, subject="yard.evt.model.a")
        assert [event["seq"] for event in told] == [head.seq, last]
        later = await everything(client, subject="yard.evt.model.a", from_seq=head.seq + 1)
        assert [event["seq"] for event in later] == [last]

    tell(tmp_path, story)


def test_filters_choose_by_subject_type_and_model(tmp_path: Path) -> None:
    async def story(yard: Yard, client: httpx.AsyncClient) -> None:
        await yard.add("a")
        await yard.add("b")
        assert {e["type"] for e in await everything(client)} == {
            "leader.elected",
            "leader.decided",
            "model.added",
            "command.accepted",
        }
        models = await everything(client, subject="yard.evt.model.>")
        assert [e["key"] if "key" in e else e["subject"] for e in models] == [
            "yard.evt.model.a",
            "yard.evt.model.b",
        ]
        assert models == await everything(client, subject="yard.live.model.>")
        two = await everything(client, subject=["yard.evt.model.a", "yard.evt.leader.current"])
        assert [e["type"] for e in two] == ["leader.elected", "model.added"]
        assert {e["type"] for e in await everything(client, type="command.*")} == {
            "command.accepted"
        }
        assert [e["subject"] for e in await everything(client, model="b")] == ["yard.evt.model.b"]

    tell(tmp_path, story)


def test_since_and_state_and_the_end(tmp_path: Path) -> None:
    async def story(yard: Yard, client: httpx.AsyncClient) -> None:
        await yard.add("a")
        await yard.add("b")
        assert len(await everything(client, since="10m")) == 7
        future = (datetime.now(UTC) + timedelta(hours=1)).isoformat()
        assert await everything(client, since=future) == []
        state = await everything(client, state=True, subject="yard.evt.leader.>")
        assert [e["type"] for e in state] == ["leader.elected", "leader.decided"]

    tell(tmp_path, story)


def test_a_broken_event_is_told_as_such(tmp_path: Path) -> None:
    async def story(yard: Yard, client: httpx.AsyncClient) -> None:
        seq = yard.broker.put("yard.evt.model.x", b"junk")
        (event,) = await everything(client, from_seq=seq)
        assert (event["seq"], event["type"]) == (seq, "broken")
        assert "envelope" in event["problem"]

    tell(tmp_path, story)


def test_a_replaced_history_is_said_aloud(tmp_path: Path) -> None:
    async def story(yard: Yard, client: httpx.AsyncClient) -> None:
        await yard.add("a")
        async with lines(client, from_seq=1) as source:
            await next_event(source)
            yard.broker.replace_events()
            while "gap" not in (event := await next_event(source)):
                pass
            assert "replaced" in event["gap"]

    tell(tmp_path, story)


def test_signs_of_life_come_while_nothing_happens(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def story(yard: Yard, client: httpx.AsyncClient) -> None:
        yard.plane._streams._keep_alive_s = 0.05
        async with lines(client) as source:
            assert await asyncio.wait_for(anext(source), 5) == "{}"
        async with lines(client, sse=True) as source:
            while await asyncio.wait_for(anext(source), 5) != ": keep-alive":
                pass

    tell(tmp_path, story)


def test_a_client_that_leaves_leaves_nothing_behind(tmp_path: Path) -> None:
    async def story(yard: Yard, client: httpx.AsyncClient) -> None:
        streams = yard.plane._streams
        watching = yard.log.connection._watching
        # Its own: world, projection, usage and, a little after it leads, commands.
        await until(lambda: len(watching) == 4, "the control plane's followers")
        for _ in range(20):
            async with lines(client, from_seq=1) as source:
                await next_event(source)
        await until(lambda: streams._open == 0 and not streams._closers, "all streams closed")
        assert len(watching) == 4

    tell(tmp_path, story)


def test_too_many_clients_are_refused_with_a_code(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(events_api, "MOST_STREAMS", 1)

    async def story(yard: Yard, client: httpx.AsyncClient) -> None:
        async with lines(client):
            await until(lambda: yard.plane._streams._open == 1, "the stream")
            refused = await client.get("/v1/events")
            assert (refused.status_code, refused.json()["error"]["code"]) == (
                503,
                "too_many_streams",
            )

    tell(tmp_path, story)


def test_a_stopping_control_plane_ends_its_streams(tmp_path: Path) -> None:
    async def story() -> None:
        yard = Yard(tmp_path)
        async with contextlib.AsyncExitStack() as stack:
            client = await stack.enter_async_context(at_work(yard))
            source = await stack.enter_async_context(lines(client, from_seq=1))
            await next_event(source)
            stopping = asyncio.create_task(yard.plane._streams.close())
            rest = [line async for line in source if line.strip()]
            assert all(json.loads(line) for line in rest)
            await asyncio.wait_for(stopping, 5)

    run(story())


def test_the_history_of_one_aggregate_comes_from_the_events(tmp_path: Path) -> None:
    async def story(yard: Yard, client: httpx.AsyncClient) -> None:
        for name in ("a", "b", "c"):
            await yard.add(name)
        decided = await everything(client, subject="yard.evt.leader.log")
        assert [e["rev"] for e in decided] == [1, 2, 3]
        assert [e["state"]["commands_position"] for e in decided] == [1, 2, 3]

    tell(tmp_path, story)


def query(**given: Any) -> Any:
    defaults: dict[str, Any] = {
        "subjects": [], "types": [], "model": None, "from_seq": None, "since": None,
        "state": False, "follow": True, "last_event_id": None, "prefix": "yard", "now": NOW,
    }  # fmt: skip
    return parse_query(**{**defaults, **given})


def test_the_first_given_position_wins() -> None:
    assert query().live
    assert not query(follow=False).live
    assert query(follow=False).after == 0
    assert query(state=True).after is None
    assert query(from_seq=7).after == 6
    assert query(from_seq=0).after == 0
    assert query(from_seq=7, last_event_id="9").after == 9
    assert query(since="1h", from_seq=7).since is None
    assert query(since="1h").since == NOW - timedelta(hours=1)


@pytest.mark.parametrize(
    "given",
    [
        {"last_event_id": "x"},
        {"subjects": ["yard.evt"]},
        {"subjects": ["yard.evt."]},
        {"subjects": ["yard.evt.a b"]},
        {"subjects": ["$JS.API.>"]},
        {"subjects": [">"]},
    ],
)
def test_a_query_without_sense_is_refused(given: dict[str, Any]) -> None:
    with pytest.raises(BadQuery):
        query(**given)


def test_since_is_a_duration_or_a_time() -> None:
    assert parse_since("90s", NOW) == NOW - timedelta(seconds=90)
    assert parse_since("2026-01-01T00:00:00Z", NOW) == datetime(2026, 1, 1, tzinfo=UTC)
    assert parse_since("2026-01-01T00:00:00", NOW).tzinfo is UTC
