"""A snapshot gives the table back that it was taken of."""

import asyncio
import os
import stat
import threading
from pathlib import Path

import pytest

from events.log import StreamIdentity
from gateway.clock import LoopClock
from gateway.domain.snapshot import BadSnapshot, Snapshot, decode, encode, restore, take
from gateway.domain.table import Table
from gateway.gateway import Gateway
from gateway.metrics import Metrics
from gateway.snapshot import SnapshotWriter, read_snapshot, write_snapshot
from schemas.model import Scaling
from schemas.settings import GatewaySettings
from tests.support.aio import run, until
from tests.support.gateway_world import Story, folded


def a_table() -> Table:
    story = Story()
    return folded(
        story.model(aliases=("x",)),
        story.model("b", scaling=Scaling(min=1, max=2)),
        story.replica("r-1"),
        story.replica("r-2", "starting", model="b"),
        story.activation("loading", model="b"),
        story.activation_gone(),
        story.record(),
        story.cleared(),
        story.node(reach="unreachable"),
    )


def test_what_is_restored_is_what_was_taken() -> None:
    table = a_table()
    again = restore(decode(encode(take(table, stream_id="s", stream_created="c"))))
    for name in ("position", "models", "aliases", "activations", "records", "replicas"):
        assert getattr(again, name) == getattr(table, name), name
    assert again.nodestates == table.nodestates
    assert [r.id for r in again.routable("m")] == ["r-1"]
    assert again.activation("m").rev == 1
    assert again.records["m"].cleared_seq == 8


def test_an_alias_that_two_entries_name_stays_with_the_later_one() -> None:
    story = Story()
    table = folded(story.model("b", aliases=("x",)), story.model("a", aliases=("x",)))
    again = restore(take(table, stream_id="s", stream_created="c"))
    assert again.aliases == table.aliases == {"x": "a"}


def test_equal_tables_give_equal_files() -> None:
    one = encode(take(a_table(), stream_id="s", stream_created="c"))
    assert one == encode(take(a_table(), stream_id="s", stream_created="c"))


@pytest.mark.parametrize(
    "raw", [b"", b"[]", b'{"format": 1}', b"\xff", b'{"format":2,"stream_id":"s"}']
)
def test_another_file_is_no_snapshot(raw: bytes) -> None:
    with pytest.raises(BadSnapshot):
        decode(raw)


def test_a_snapshot_of_another_format_says_which() -> None:
    snapshot = take(a_table(), stream_id="s", stream_created="c")
    raw = encode(snapshot).replace(b'"format":2', b'"format":1')
    with pytest.raises(BadSnapshot, match="format 1, this program reads 2"):
        decode(raw)


def test_the_file_is_replaced_whole_and_a_missing_one_is_none(tmp_path: Path) -> None:
    path = tmp_path / "gateway" / "gw" / "routes.json"
    assert read_snapshot(path) is None
    first = take(a_table(), stream_id="s", stream_created="c")
    write_snapshot(path, first)
    assert read_snapshot(path) == first
    second = take(Table(), stream_id="s2", stream_created="c")
    write_snapshot(path, second)
    assert read_snapshot(path) == second
    assert [p.name for p in path.parent.iterdir()] == ["routes.json"]
    path.write_bytes(b"junk")
    assert read_snapshot(path) is None


def test_the_file_is_for_its_owner_alone(tmp_path: Path) -> None:
    """It holds the hashes of keys."""
    path = tmp_path / "gateway" / "gw" / "routes.json"
    before = os.umask(0)
    try:
        write_snapshot(path, take(a_table(), stream_id="s", stream_created="c"))
    finally:
        os.umask(before)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700


def test_the_last_write_of_a_gateway_waits_for_the_one_that_is_under_way(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They have one draft: two at once would leave neither of two tables in the file."""
    path = tmp_path / "routes.json"
    go = threading.Event()
    writing: list[int] = []
    at_once: list[int] = []

    def slowly(to: Path, snapshot: Snapshot) -> None:
        writing.append(snapshot.position)
        at_once.append(len(writing))
        go.wait(20)
        write_snapshot(to, snapshot)
        writing.remove(snapshot.position)

    monkeypatch.setattr("gateway.snapshot.write_snapshot", slowly)

    async def story() -> None:
        gateway = Gateway("gw", GatewaySettings(), LoopClock())
        table = a_table()
        gateway.install(table, synced=True)
        writer = SnapshotWriter(gateway, path, Metrics())
        writer.identify(StreamIdentity(stream_id="s", created="c", last_seq=9, schema=1))
        regular = asyncio.create_task(writer.write_now())
        await until(lambda: bool(at_once), "a write")
        table.advance(table.position + 1)
        last = asyncio.create_task(writer.write_now())
        for _ in range(20):  # whatever it would give to a thread has begun there
            await asyncio.to_thread(lambda: None)
        go.set()
        await asyncio.gather(regular, last)
        kept = read_snapshot(path)
        assert kept is not None
        assert kept.position == table.position

    run(story())
    assert at_once == [1, 1]
