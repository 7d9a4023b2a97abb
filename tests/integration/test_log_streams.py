"""Streams on a real server: made once, put right without loss, never deleted, refused when not ours."""

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest

from events.connection import Connection
from events.jetstream import JetStreamLog
from events.log import LogFull, Misconfigured
from events.lookup import NoStream, StreamReads
from events.provision import ensure_streams
from events.streams import CONFIG_REV, stream_specs
from tests.support import drafts
from tests.support.aio import run
from tests.support.logstages import BUDGET, TIMES, open_connection
from tests.support.natsserver import NatsServer


def play(
    folder: Path, scene: Callable[[Connection], Awaitable[None]], max_file_store: str = "6GB"
) -> None:
    async def main() -> None:
        with NatsServer(folder, max_file_store=max_file_store) as server:
            connection = await open_connection(server.url, "cp")
            try:
                await scene(connection)
            finally:
                await connection.close()

    run(main())


async def api(connection: Connection, subject: str, body: Any = None) -> dict[str, Any]:
    raw = await connection.request(
        f"$JS.API.{subject}", b"" if body is None else msgspec.json.encode(body), timeout_s=2
    )
    answer: dict[str, Any] = msgspec.json.decode(raw)
    return answer


async def config_of(connection: Connection, stream: str) -> dict[str, Any]:
    config: dict[str, Any] = (await api(connection, f"STREAM.INFO.{stream}"))["config"]
    return config


def test_every_stream_is_made_once_and_then_left_alone(tmp_path: Path) -> None:
    async def scene(connection: Connection) -> None:
        await ensure_streams(connection, "yard-1", 1)
        before = [await api(connection, f"STREAM.INFO.{s.name}") for s in stream_specs()]
        await ensure_streams(connection, "yard-1", 1)
        after = [await api(connection, f"STREAM.INFO.{s.name}") for s in stream_specs()]
        for first, second in zip(before, after, strict=True):
            assert first["created"] == second["created"]
            assert first["config"] == second["config"]
        events = before[0]["config"]
        assert events["allow_atomic"]
        assert events["allow_msg_ttl"]
        assert events["allow_rollup_hdrs"]
        assert events["discard"] == "new"
        assert events.get("max_age", 0) == 0
        assert not events.get("allow_direct", False)
        assert events["metadata"]["yard.id"] == "yard-1"
        assert events["metadata"]["yard.schema"] == "1"
        assert events["metadata"]["yard.config_rev"] == str(CONFIG_REV)
        assert len({b["config"]["metadata"]["yard.stream_id"] for b in before}) == len(before)

    play(tmp_path, scene)


def test_two_instances_may_make_them_at_once(tmp_path: Path) -> None:
    async def scene(connection: Connection) -> None:
        await asyncio.gather(*(ensure_streams(connection, "yard-1", 1) for _ in range(4)))

    play(tmp_path, scene)


def test_a_drifted_setting_is_put_right_and_nothing_is_lost(tmp_path: Path) -> None:
    async def scene(connection: Connection) -> None:
        await ensure_streams(connection, "yard-1", 1)
        log = JetStreamLog(connection, source="/cp/1", budget=BUDGET, times=TIMES)
        await log.append(drafts.model("m", 0), epoch=1)
        identity = await log.identity()
        config = await config_of(connection, "YARD_EVENTS")
        drifted = {
            **config,
            "discard": "old",
            "max_msgs_per_subject": 100,
            "max_bytes": 1 << 28,
            "description": "set by an operator",
        }
        answer = await api(connection, "STREAM.UPDATE.YARD_EVENTS", drifted)
        assert "error" not in answer
        await ensure_streams(connection, "yard-1", 2)
        config = await config_of(connection, "YARD_EVENTS")
        assert (config["discard"], config["max_msgs_per_subject"]) == ("new", 64)
        assert (config["max_bytes"], config["description"]) == (1 << 28, "set by an operator")
        assert config["metadata"]["yard.schema"] == "2"
        assert msgspec.structs.replace(await log.identity(), schema=1) == identity

    play(tmp_path, scene)


def test_another_yards_streams_are_refused(tmp_path: Path) -> None:
    async def scene(connection: Connection) -> None:
        await ensure_streams(connection, "yard-1", 1)
        with pytest.raises(Misconfigured, match="yard-1"):
            await ensure_streams(connection, "yard-2", 1)

    play(tmp_path, scene)


def test_a_stream_that_could_only_be_made_anew_is_refused_and_kept(tmp_path: Path) -> None:
    async def scene(connection: Connection) -> None:
        made = await api(
            connection,
            "STREAM.CREATE.YARD_EVENTS",
            {"name": "YARD_EVENTS", "subjects": ["yard.evt.>"], "storage": "memory"},
        )
        with pytest.raises(Misconfigured, match="storage"):
            await ensure_streams(connection, "yard-1", 1)
        assert (await api(connection, "STREAM.INFO.YARD_EVENTS"))["created"] == made["created"]

    play(tmp_path, scene)


def test_a_server_without_room_for_them_says_so(tmp_path: Path) -> None:
    async def scene(connection: Connection) -> None:
        with pytest.raises(LogFull) as full:
            await ensure_streams(connection, "yard-1", 1)
        assert full.value.err_code == 10047

    play(tmp_path, scene, max_file_store="1GB")


def test_a_server_without_room_for_usage_alone_goes_without_it(tmp_path: Path) -> None:
    async def scene(connection: Connection) -> None:
        await ensure_streams(connection, "yard-1", 1)
        await config_of(connection, "YARD_EVENTS")
        assert "error" in await api(connection, "STREAM.INFO.YARD_USAGE")
        with pytest.raises(NoStream):
            await StreamReads(connection, "YARD_USAGE").identity()

    play(tmp_path, scene, max_file_store="4400MB")


def test_a_yard_of_the_revision_before_gets_a_stream_for_usage_and_keeps_the_others(
    tmp_path: Path,
) -> None:
    async def scene(connection: Connection) -> None:
        await ensure_streams(connection, "yard-1", 1)
        await api(connection, "STREAM.DELETE.YARD_USAGE")
        config = await config_of(connection, "YARD_AUDIT")
        config["metadata"]["yard.config_rev"] = "1"
        await api(connection, "STREAM.UPDATE.YARD_AUDIT", config)
        await ensure_streams(connection, "yard-1", 1)
        after = await config_of(connection, "YARD_AUDIT")
        assert after["metadata"]["yard.config_rev"] == str(CONFIG_REV)
        usage = await config_of(connection, "YARD_USAGE")
        assert (usage["subjects"], usage["discard"]) == (["yard.use.>"], "old")
        assert usage["max_bytes"] > 0

    play(tmp_path, scene)


def test_a_server_too_old_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def scene(connection: Connection) -> None:
        monkeypatch.setattr(Connection, "server_version", property(lambda _: "2.12.2"))
        with pytest.raises(Misconfigured, match=r"2\.12\.3"):
            await ensure_streams(connection, "yard-1", 1)
        monkeypatch.setattr(Connection, "server_version", property(lambda _: "2.12.3"))
        await ensure_streams(connection, "yard-1", 1)

    play(tmp_path, scene)
