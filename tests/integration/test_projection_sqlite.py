"""The sqlite projection: kills, damage, deletion and replaced histories end in the log's own state."""

import asyncio
import contextlib
import signal
import sqlite3
import subprocess
import sys
from collections.abc import AsyncIterator, Sequence
from datetime import timedelta
from pathlib import Path

import msgspec
import pytest

from controlplane.domain.world import World
from controlplane.projections import readmodel
from controlplane.projections.database import Checkpoint, Database
from controlplane.projections.readmodel import Entry, NotSynced, ReadModel
from controlplane.projections.tables import LIVE, Statement
from events.ids import utc_now
from events.log import Draft, Recorded
from events.memory import MemoryLog
from events.memory_broker import MemoryBroker
from schemas.messages import NOUNS
from schemas.model import Model, ModelChanged, ModelDeleted
from tests.support.aio import run, until
from tests.support.projection_killer import fill, read_model


async def change(log: MemoryLog, name: str, *, description: str = "", end: bool = False) -> int:
    """Appends one event to a model, whatever came before."""
    subject = f"yard.evt.model.{name}"
    last = await log.last(subject)
    appended = await log.append(
        Draft(
            subject=subject,
            event=ModelDeleted() if end else ModelChanged(by="x", fields=()),
            state=None if end else Model(name=name, incarnation="i", description=description),
            expected_seq=last.seq if last else 0,
            rev=1 if not isinstance(last, Recorded) else last.rev + 1,
        ),
        epoch=1,
    )
    return appended.seqs[0]


@contextlib.asynccontextmanager
async def opened(log: MemoryLog, path: Path, *, synced: bool = True) -> AsyncIterator[ReadModel]:
    model = read_model(log, path)
    await model.open()
    task = asyncio.create_task(model.run())
    try:
        if synced:
            await until(lambda: model.synced or task.done(), "a synced projection")
        yield model
        if task.done():
            task.result()
    finally:
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task
        await model.close()


async def from_the_log(log: MemoryLog) -> dict[str, tuple[int, bytes]]:
    """What the log itself says, read afresh: subject -> (sequence, state)."""
    follower = log.follow(["yard.evt.>"])
    world: dict[str, tuple[int, bytes]] = {}
    try:
        while True:
            batch = await follower.next()
            for item in batch.items:
                assert isinstance(item, Recorded)
                if item.state is not None:
                    world[item.subject] = (item.seq, msgspec.json.encode(item.state))
            if batch.synced:
                return world
    finally:
        await follower.close()


async def shown(model: ReadModel) -> dict[str, tuple[int, bytes]]:
    entries: list[Entry] = []
    for noun in NOUNS:
        entries += (await model.entries(noun))[0]
    return {e.subject: (e.seq, bytes(e.state or b"")) for e in entries}


def rebuilds(model: ReadModel) -> dict[str, float]:
    metric = next(iter(model._metrics.rebuilds.collect()))
    return {s.labels["why"]: s.value for s in metric.samples if s.name.endswith("_total")}


def rows_and_checkpoint(path: Path) -> tuple[int, int, int]:
    """Rows, highest sequence among them, applied sequence: read by a process of its own."""
    with contextlib.closing(sqlite3.connect(path)) as connection:
        count, top = connection.execute(f"SELECT count(*), max(seq) FROM {LIVE}").fetchone()
        mark = connection.execute("SELECT applied_seq FROM checkpoint").fetchone()
    return count, top or 0, mark[0] if mark else 0


@pytest.mark.parametrize(
    ("commits", "kind"), [(1, "first"), (2, "first"), (3, "first"), (4, "live"), (9, "live")]
)
def test_log_26_killed_between_fold_and_commit_it_resumes_to_the_same_state(
    tmp_path: Path, commits: int, kind: str
) -> None:
    path = tmp_path / "projection.sqlite"
    ended = subprocess.run(
        [sys.executable, "-m", "tests.support.projection_killer", str(path), str(commits), kind],
        check=False,
        timeout=50,
    )
    assert ended.returncode == -signal.SIGKILL
    _, top, applied = rows_and_checkpoint(path)
    assert top <= 3000
    assert applied == top  # neither ahead of the other

    async def story() -> None:
        log = MemoryLog(MemoryBroker(mint=lambda: "the-stream"))
        await fill(log, 3000)
        async with opened(log, path) as model:
            await model.reached(3000, 10)
            assert await shown(model) == await from_the_log(log)

    run(story(), 40)


def test_inv_7_deleting_the_file_loses_nothing(tmp_path: Path) -> None:
    async def story() -> None:
        path = tmp_path / "projection.sqlite"
        log = MemoryLog(MemoryBroker())
        await fill(log, 20)
        async with opened(log, path) as model:
            before = await shown(model)
        Database.throw_away(path)
        async with opened(log, path) as model:
            assert await shown(model) == before == await from_the_log(log)

    run(story())


@pytest.mark.parametrize("damage", ["garbage", "torn", "version"])
def test_log_26_a_damaged_file_is_replaced_and_read_anew(tmp_path: Path, damage: str) -> None:
    async def story() -> None:
        path = tmp_path / "projection.sqlite"
        log = MemoryLog(MemoryBroker())
        await fill(log, 200)
        async with opened(log, path) as model:
            before = await shown(model)
        match damage:
            case "garbage":
                path.write_bytes(b"this is no database" * 1000)
            case "torn":
                content = bytearray(path.read_bytes())
                content[4096:] = bytes(len(content) - 4096)
                path.write_bytes(content)
            case _:
                with contextlib.closing(sqlite3.connect(path)) as connection:
                    connection.execute("PRAGMA user_version = 99")
        async with opened(log, path) as model:
            assert await shown(model) == before
            assert rebuilds(model) == {"file": 1.0, "empty": 1.0}

    run(story())


def test_a_restart_goes_on_from_the_checkpoint(tmp_path: Path) -> None:
    async def story() -> None:
        path = tmp_path / "projection.sqlite"
        log = MemoryLog(MemoryBroker())
        await fill(log, 20)
        async with opened(log, path):
            pass
        await change(log, "m00003", description="new")
        await change(log, "m00004", end=True)
        before = read_model(log, path)
        await before.open()
        assert (await before.entry("model", "m00004"))[0] is not None  # old, and says so
        assert (await before.entries("model"))[1] == 20
        await before.close()
        async with opened(log, path) as model:
            assert await shown(model) == await from_the_log(log)
            assert model.position == 22
            assert rebuilds(model) == {}

    run(story())


@pytest.mark.parametrize("how", ["replaced", "lost tail", "other event", "too old"])
def test_log_17_another_history_is_noticed_at_start(
    tmp_path: Path, how: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def story() -> None:
        path = tmp_path / "projection.sqlite"
        broker = MemoryBroker()
        log = MemoryLog(broker)
        await fill(log, 20)
        async with opened(log, path):
            pass
        match how:
            case "replaced":
                broker.replace_events()
                await fill(log, 5)
            case "lost tail":
                broker.lose_tail(10)
            case "other event":
                broker.lose_tail(19)
                await change(log, "another")
            case _:
                monkeypatch.setattr(readmodel, "TOMBSTONE_TTL_S", -1)
        async with opened(log, path) as model:
            assert await shown(model) == await from_the_log(log)
            assert rebuilds(model) == {"checkpoint": 1.0}

    run(story())


def test_log_17_a_history_replaced_while_running_is_read_anew_and_readers_see_one_or_the_other(
    tmp_path: Path,
) -> None:
    async def story() -> None:
        broker = MemoryBroker()
        log = MemoryLog(broker)
        await fill(log, 20)
        async with opened(log, tmp_path / "projection.sqlite") as model:
            old = await shown(model)
            broker.replace_events()
            await fill(log, 5)
            while len(now := await shown(model)) != 5:
                assert now == old
                await asyncio.sleep(0)
            assert now == await from_the_log(log)
            assert model.position == 5

    run(story())


def test_rows_and_position_come_from_one_snapshot(tmp_path: Path) -> None:
    async def story() -> None:
        log = MemoryLog(MemoryBroker())
        await fill(log, 1)
        async with opened(log, tmp_path / "projection.sqlite") as model:

            async def write() -> None:
                for n in range(100):
                    await change(log, "m00000", description=str(n))

            writing = asyncio.create_task(write())
            while not writing.done():
                (entry,), position = await model.entries("model")
                assert entry.seq == position
            await writing

    run(story())


def test_events_gather_for_one_commit_unless_somebody_waits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(readmodel, "REST_S", 30.0)
    commits: list[int] = []
    commit = Database.commit

    async def counted(
        self: Database, statements: Sequence[Statement], checkpoint: Checkpoint
    ) -> None:
        commits.append(len(statements))
        await commit(self, statements, checkpoint)

    monkeypatch.setattr(Database, "commit", counted)

    async def story() -> None:
        log = MemoryLog(MemoryBroker())
        await fill(log, 1)
        async with opened(log, tmp_path / "projection.sqlite") as model:
            last = 0
            for n in range(20):
                last = await change(log, f"m{n:05d}")
            # Nobody waits yet; the first who does is not kept for the half minute.
            assert await model.reached(last, 5)
            assert sum(commits) == 20
            assert len(commits) <= 3

    run(story())


def test_a_tombstone_removes_and_does_not_come_back(tmp_path: Path) -> None:
    async def story() -> None:
        path = tmp_path / "projection.sqlite"
        log = MemoryLog(MemoryBroker())
        await fill(log, 3)
        async with opened(log, path) as model:
            seq = await change(log, "m00001", end=True)
            assert await model.reached(seq, 5)
            names = [e.name for e in (await model.entries("model"))[0]]
            assert names == ["m00000", "m00002"]
        path.unlink()
        async with opened(log, path) as model:
            assert [e.name for e in (await model.entries("model"))[0]] == ["m00000", "m00002"]

    run(story())


def test_log_22_junk_as_the_last_message_keeps_the_state_and_marks_it(tmp_path: Path) -> None:
    async def story() -> None:
        path = tmp_path / "projection.sqlite"
        broker = MemoryBroker()
        log = MemoryLog(broker)
        await fill(log, 2)
        async with opened(log, path) as model:
            seq = broker.put("yard.evt.model.m00001", b"junk")
            assert await model.reached(seq, 5)
            await expect_marked(model)
        path.unlink()
        async with opened(log, path) as model:  # the state is looked up behind the junk
            await expect_marked(model)

    async def expect_marked(model: ReadModel) -> None:
        (problem,) = (await model.problems())[0]
        assert (problem.name, problem.seq) == ("m00001", 3)
        assert problem.state is not None
        assert msgspec.json.decode(problem.state)["name"] == "m00001"

    run(story())


def test_a_fold_that_raises_stops_this_projection_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def story() -> None:
        log = MemoryLog(MemoryBroker())
        await fill(log, 3)
        async with opened(log, tmp_path / "projection.sqlite") as model:

            def bug(*_: object) -> None:
                raise ZeroDivisionError("bug")

            monkeypatch.setattr(readmodel, "fold", bug)
            await change(log, "m00001")
            await until(lambda: model.stopped is not None, "the stop")
            assert "folding events 4..4 failed" in (model.stopped or "")
            entries, position = await model.entries("model")  # reads go on, on what was committed
            assert (len(entries), position) == (3, 3)

    run(story())


def test_nothing_is_shown_before_the_first_reading(tmp_path: Path) -> None:
    async def story() -> None:
        log = MemoryLog(MemoryBroker())
        log.connection.disconnect()
        async with opened(log, tmp_path / "projection.sqlite", synced=False) as model:
            with pytest.raises(NotSynced):
                await model.entries("model")

    run(story())


def test_outcomes_past_their_time_are_dropped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def story() -> None:
        log = MemoryLog(MemoryBroker())
        await fill(log, 1)
        async with opened(log, tmp_path / "projection.sqlite") as model:
            database = model._database
            assert database is not None
            mark = await database.checkpoint()
            assert mark is not None
            old = (utc_now() - timedelta(days=8)).isoformat()
            values = ("yard.evt.command.c", "command", "c", 1, 1, "command.accepted", "i", old)
            await database.commit(
                [
                    (
                        f"INSERT INTO {LIVE} VALUES (?,?,?,?,?,?,?,?,'a','',NULL,NULL,NULL,'{{}}',NULL)",
                        values,
                    )
                ],
                mark,
            )
            monkeypatch.setattr(readmodel, "HOUSEKEEPING_S", 0.0)
            assert (await model.entry("command", "c"))[0] is not None
            assert await model.reached(await change(log, "m00000"), 5)

            async def gone() -> bool:
                return (await model.entry("command", "c"))[0] is None

            await until(gone, "housekeeping")

    run(story())


def test_log_26_a_full_disk_keeps_what_is_committed_and_goes_on_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def story() -> None:
        monkeypatch.setattr(readmodel, "RETRY_S", 0.05)
        log = MemoryLog(MemoryBroker())
        await fill(log, 3)
        async with opened(log, tmp_path / "projection.sqlite") as model:
            database = model._database
            assert database is not None
            original = database.commit
            failed = asyncio.Event()

            async def full(*_: object) -> None:
                failed.set()
                raise sqlite3.OperationalError("database or disk is full")

            monkeypatch.setattr(database, "commit", full)
            seq = await change(log, "m00001", description="later")
            await asyncio.wait_for(failed.wait(), 5)
            assert model.position == 3
            monkeypatch.setattr(database, "commit", original)
            assert await model.reached(seq, 5)
            assert await shown(model) == await from_the_log(log)
            await until(lambda: model.synced, "a synced projection")

    run(story())


def test_the_world_and_the_projection_hold_the_same(tmp_path: Path) -> None:
    async def story() -> None:
        log = MemoryLog(MemoryBroker())
        await fill(log, 30)
        world = World()
        async with opened(log, tmp_path / "projection.sqlite") as model:
            for n in range(0, 30, 3):
                await change(log, f"m{n:05}", end=n % 2 == 0)
            follower = log.follow(["yard.evt.>"])
            batch = await follower.next()
            for item in batch.items:
                world.apply(item)
            await follower.close()
            assert await model.reached(batch.position, 5)
            entries = (await model.entries("model"))[0]
            assert {e.name: bytes(e.state or b"") for e in entries} == {
                name: msgspec.json.encode(state) for name, state in world.models.items()
            }

    run(story())
