"""The log under faults of server and network; after each, nothing acknowledged is lost and folds agree."""

import asyncio
import contextlib
import shutil
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest

from events.connection import Connection
from events.envelope import EXPECTED_SEQ
from events.jetstream import JetStreamLog
from events.log import Conflict, Draft, Fence, LogFull, OutcomeUnknown, Unavailable
from events.pull import PullTimes
from tests.support import drafts
from tests.support.aio import run, until
from tests.support.loghistory import Acknowledged, Fold, check, everything, resync
from tests.support.logstages import BUDGET, JetStreamStage, jetstream_stage

Scene = Callable[[JetStreamStage], Awaitable[None]]


def play(folder: Path, scene: Scene, timeout_s: float = 40.0) -> None:
    async def main() -> None:
        async with jetstream_stage(folder) as stage:
            await scene(stage)

    run(main(), timeout_s)


@contextlib.asynccontextmanager
async def folding(log: Any, filters: tuple[str, ...] = ("yard.evt.>",)) -> AsyncIterator[Fold]:
    """A fold fed by a follower of its own; a follower that fails, fails the test."""
    fold = Fold()
    follower = log.follow(filters)
    task = asyncio.create_task(fold.follow(follower))
    try:
        yield fold
        if task.done():
            task.result()
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        await follower.close()


async def api(connection: Connection, subject: str, body: Any = None) -> dict[str, Any]:
    raw = await connection.request(
        f"$JS.API.{subject}", b"" if body is None else msgspec.json.encode(body), timeout_s=2
    )
    answer: dict[str, Any] = msgspec.json.decode(raw)
    return answer


async def consumers(connection: Connection) -> list[str]:
    return (await api(connection, "CONSUMER.NAMES.YARD_EVENTS"))["consumers"] or []


async def audited(stage: JetStreamStage, count: int) -> bool:
    """Whether the audit holds that many messages."""
    return (await api(stage.direct, "STREAM.INFO.YARD_AUDIT"))["state"]["messages"] == count


async def write(
    log: Any, name: str, count: int, acknowledged: Acknowledged, pause_s: float = 0.0
) -> None:
    """Appends `count` revisions of one model, reloading after every doubt as a decider does."""
    seq, rev = 0, 0
    while rev < count:
        draft = drafts.model(name, seq, rev + 1)
        try:
            done = await log.append(draft, epoch=1)
            acknowledged.add([draft], done)
            seq, rev = done.seqs[0], rev + 1
        except (Unavailable, Conflict):
            with contextlib.suppress(Unavailable):
                last = await log.last(draft.subject)
                if last is not None:
                    seq, rev = last.seq, last.rev
            await asyncio.sleep(0.02)
        await asyncio.sleep(pause_s)


def test_log_01_a_server_killed_during_appends_loses_and_repeats_nothing(tmp_path: Path) -> None:
    async def scene(stage: JetStreamStage) -> None:
        acknowledged = Acknowledged()
        async with folding(stage.log) as mine, folding(stage.other) as others:
            writers = [
                asyncio.create_task(write(stage.log, f"m{n}", 40, acknowledged, 0.005))
                for n in range(4)
            ]
            for threshold in (30, 80, 120):
                await until(lambda t=threshold: len(acknowledged.events) >= t, "appends")
                await asyncio.to_thread(stage.server.restart)
            await asyncio.gather(*writers)
            await check(stage.other, acknowledged, mine, others)
            assert mine.disconnects >= 1
            assert mine.resets == 0

    play(tmp_path, scene)


def test_log_01_a_server_killed_during_batches_stores_each_whole_or_not(tmp_path: Path) -> None:
    async def scene(stage: JetStreamStage) -> None:
        acknowledged = Acknowledged()
        won = await stage.log.append(drafts.elected("a", 0), epoch=0)
        fence = Fence(subject=drafts.LEADER, seq=won.seqs[0])
        seqs: dict[str, tuple[int, int]] = {}
        decided = 0

        async def reload(subject: str) -> None:
            while True:
                with contextlib.suppress(Unavailable):
                    last = await stage.log.last(subject)
                    seqs[subject] = (0, 0) if last is None else (last.seq, last.rev)  # type: ignore[union-attr]
                    return
                await asyncio.sleep(0.02)

        async def decide() -> None:
            nonlocal decided
            while decided < 45:
                batch: list[Draft] = []
                for name in ("a", "b", "c"):
                    seq, rev = seqs.get(drafts.model_subject(name), (0, 0))
                    batch.append(drafts.model(name, seq, rev + 1))
                seq, rev = seqs.get(drafts.LINE, (0, 0))
                batch.append(msgspec.structs.replace(drafts.line(fence.seq, seq), rev=rev + 1))
                try:
                    done = await stage.log.append_batch(batch, epoch=fence.seq, fence=fence)
                    acknowledged.add(batch, done)
                    for draft, stored in zip(batch, done.seqs, strict=True):
                        seqs[draft.subject] = (stored, draft.rev)
                    decided += 1
                except (Unavailable, Conflict, OutcomeUnknown):
                    for draft in batch:
                        await reload(draft.subject)
                    decided = max(decided, seqs[drafts.LINE][1])

        async with folding(stage.log) as fold:
            deciding = asyncio.create_task(decide())
            for threshold in (10, 30):
                await until(lambda t=threshold: decided >= t, "decisions")
                await asyncio.to_thread(stage.server.restart)
            await deciding
            await check(stage.other, acknowledged, fold)
        items = await everything(stage.other)
        # Every decision is four consecutive events: no part of one is there without the others.
        rest = [i.type.split(".")[0] for i in items[1:]]
        assert rest == ["model", "model", "model", "leader"] * (len(rest) // 4)

    play(tmp_path, scene)


def test_log_05_the_line_cut_before_the_acknowledgement(tmp_path: Path) -> None:
    async def scene(stage: JetStreamStage) -> None:
        acknowledged = Acknowledged()
        async with folding(stage.log) as fold:
            seq = 0
            for rev in range(1, 6):
                draft = drafts.model("m", seq, rev)
                stage.proxy.drop_next("down", _cut_on_ack(stage))
                done = await stage.log.append(draft, epoch=1)
                acknowledged.add([draft], done)
                seq = done.seqs[0]
            assert len(stage.proxy.dropped) == 5
            batch = [drafts.model("x", 0), drafts.model("y", 0)]
            stage.proxy.drop_next("down", _cut_on_ack(stage))
            acknowledged.add(batch, await stage.log.append_batch(batch, epoch=1))
            assert len(stage.proxy.dropped) == 6
            await check(stage.other, acknowledged, fold)
            assert len(acknowledged.events) == 7

    play(tmp_path, scene)


def _cut_on_ack(stage: JetStreamStage) -> Callable[[bytes], bool]:
    def cut(chunk: bytes) -> bool:
        if b'"seq":' not in chunk or b"YARD_EVENTS" not in chunk:
            return False
        stage.proxy.cut_once()
        return True

    return cut


def test_log_06_what_lay_in_a_dead_line_is_stored_once_at_most(tmp_path: Path) -> None:
    """The window no client can close: bytes in the socket. The expectation makes them harmless."""

    async def scene(stage: JetStreamStage) -> None:
        stage.proxy.blackhole("up")
        with pytest.raises(Unavailable):
            await stage.log.append(drafts.model("late", 0, note="zombie"), epoch=1)
        taken = await stage.other.append(drafts.model("late", 0, note="new"), epoch=1)
        stage.proxy.restore()
        assert await stage.connection.wait_connected(10)
        after = await stage.log.append(drafts.model("behind", 0), epoch=1)
        assert [i.seq for i in await everything(stage.other)] == [taken.seqs[0], after.seqs[0]]

    play(tmp_path, scene)


def test_log_11_a_reader_that_stalls_loses_nothing_and_holds_little(tmp_path: Path) -> None:
    async def scene(stage: JetStreamStage) -> None:
        times = PullTimes(
            batch=100,
            expires_s=0.5,
            heartbeat_s=0.2,
            inactive_threshold_s=1.0,
            request_timeout_s=0.5,
        )
        log = JetStreamLog(stage.connection, source="/cp/1", budget=BUDGET, times=times)
        follower = log.follow(["yard.evt.>"])
        await asyncio.wait_for(follower.next(), 5)
        for part in range(5):
            await stage.other.append_batch(
                [drafts.model(f"m{part}-{n}", 0) for n in range(1000)], epoch=1
            )

        async def is_forgotten() -> bool:
            return await consumers(stage.direct) == []

        # The reader does not read: its request ends, then the server forgets its consumer.
        await until(is_forgotten, "the consumer to expire", 10)
        assert follower.backlog <= 150
        seen: list[int] = []
        while len(seen) < 5000:
            batch = await asyncio.wait_for(follower.next(), 5)
            assert not batch.reset
            seen += [i.seq for i in batch.items]
            assert follower.backlog <= 150
        assert seen == list(range(1, 5001))
        await follower.close()

    play(tmp_path, scene)


def test_log_12_a_deleted_consumer_is_replaced_without_a_gap(tmp_path: Path) -> None:
    async def scene(stage: JetStreamStage) -> None:
        acknowledged = Acknowledged()
        async with folding(stage.log) as fold:
            writing = asyncio.create_task(write(stage.other, "m", 60, acknowledged, 0.01))
            for threshold in (10, 30):
                await until(lambda t=threshold: len(fold.seen) >= t, "events")
                for name in await consumers(stage.direct):
                    await api(stage.direct, f"CONSUMER.DELETE.YARD_EVENTS.{name}")
            await writing
            await check(stage.other, acknowledged, fold)
            assert fold.seen == list(range(1, 61))

    play(tmp_path, scene)


def test_log_13_the_last_message_before_a_disconnect_is_not_lost(tmp_path: Path) -> None:
    async def scene(stage: JetStreamStage) -> None:
        async with folding(stage.log) as fold:
            await stage.other.append(drafts.model("a", 0), epoch=1)
            await fold.reach(1)

            def last(chunk: bytes) -> bool:
                if b"yard.evt.model.last" not in chunk:
                    return False
                stage.proxy.cut_once()
                return True

            stage.proxy.drop_next("down", last)
            await stage.other.append(drafts.model("last", 0), epoch=1)
            await fold.reach(2)
            assert len(stage.proxy.dropped) == 1
            assert fold.seen == [1, 2]
            await resync(stage.other, fold)

    play(tmp_path, scene)


def test_log_14_a_swallowed_delivery_is_noticed_by_the_next_one(tmp_path: Path) -> None:
    async def scene(stage: JetStreamStage) -> None:
        async with folding(stage.log) as fold:
            await stage.other.append(drafts.model("a", 0), epoch=1)
            await fold.reach(1)
            stage.proxy.drop_next("down", lambda chunk: b"yard.evt.model.gap" in chunk)
            await stage.other.append(drafts.model("gap", 0), epoch=1)
            await until(lambda: len(stage.proxy.dropped) == 1, "the delivery to be swallowed")
            await stage.other.append(drafts.model("b", 0), epoch=1)
            await fold.reach(3)
            assert fold.seen == [1, 2, 3]
            await resync(stage.other, fold)

    play(tmp_path, scene)


def test_log_14_deliveries_in_the_wrong_order_are_not_folded(tmp_path: Path) -> None:
    async def scene(stage: JetStreamStage) -> None:
        async with folding(stage.log) as fold:
            await stage.other.append(drafts.model("a", 0), epoch=1)
            await fold.reach(1)
            for name in ("x", "y"):
                subject = drafts.model_subject(name).encode()
                stage.proxy.drop_next("down", lambda chunk, s=subject: s in chunk)
                await stage.other.append(drafts.model(name, 0), epoch=1)
                await until(
                    lambda n=name: len(stage.proxy.dropped) == (1 if n == "x" else 2), "a drop"
                )
            first, second = stage.proxy.dropped
            stage.proxy.inject_down(second + first)
            await fold.reach(3)
            assert fold.seen == [1, 2, 3]
            await resync(stage.other, fold)

    play(tmp_path, scene)


def test_log_15_a_full_stream_keeps_every_state_and_recovers(tmp_path: Path) -> None:
    async def scene(stage: JetStreamStage) -> None:
        acknowledged = Acknowledged()
        config = (await api(stage.direct, "STREAM.INFO.YARD_EVENTS"))["config"]
        await api(stage.direct, "STREAM.UPDATE.YARD_EVENTS", {**config, "max_bytes": 40_000})
        stored = 0
        async with folding(stage.log) as fold:
            refusal: LogFull | None = None
            while refusal is None and stored < 200:
                draft = drafts.model(f"m{stored}", 0)
                try:
                    acknowledged.add([draft], await stage.log.append(draft, epoch=1))
                    stored += 1
                except LogFull as full:
                    refusal = full
            assert refusal is not None
            assert refusal.err_code == 10077
            with pytest.raises(LogFull):
                await stage.log.append_batch([drafts.model("x", 0), drafts.model("y", 0)], epoch=1)
            assert 10 < stored < 200
            assert len(await everything(stage.other)) == stored  # nothing was pushed out
            await api(stage.direct, "STREAM.UPDATE.YARD_EVENTS", {**config, "max_bytes": 1 << 30})
            draft = drafts.model("after", 0)
            acknowledged.add([draft], await stage.log.append(draft, epoch=1))
            await check(stage.other, acknowledged, fold)

    play(tmp_path, scene)


def test_log_17_a_log_restored_from_an_old_backup_is_noticed(tmp_path: Path) -> None:
    async def scene(stage: JetStreamStage) -> None:
        backup = tmp_path / "backup"
        async with folding(stage.log) as fold:
            await write(stage.other, "kept", 3, Acknowledged())
            await fold.reach(3)
            await asyncio.to_thread(stage.server.stop)
            await asyncio.to_thread(shutil.copytree, stage.server.store, backup)
            await asyncio.to_thread(stage.server.start)
            assert await stage.direct.wait_connected(5)
            await until(lambda: stage.connection.connected, "the connection")
            await stage.other.append(drafts.model("lost", 0), epoch=1)
            await fold.reach(4)
            await asyncio.to_thread(stage.server.stop)
            await asyncio.to_thread(shutil.rmtree, stage.server.store)
            await asyncio.to_thread(shutil.copytree, backup, stage.server.store)
            await asyncio.to_thread(stage.server.start)
            await until(lambda: fold.resets == 1, "the reset")
            await until(lambda: stage.direct.connected, "the other connection")
            assert drafts.model_subject("lost") not in fold.states
            await resync(stage.other, fold)

    play(tmp_path, scene)


def test_log_17_a_restored_log_that_grew_past_the_position_is_noticed(tmp_path: Path) -> None:
    """The sequence fits again, but another event stands there."""

    async def scene(stage: JetStreamStage) -> None:
        backup = tmp_path / "backup"
        await stage.other.append(drafts.model("kept", 0), epoch=1)
        await asyncio.to_thread(stage.server.stop)
        await asyncio.to_thread(shutil.copytree, stage.server.store, backup)
        await asyncio.to_thread(stage.server.start)
        await until(lambda: stage.direct.connected and stage.connection.connected, "connections")
        async with folding(stage.log) as fold:
            await stage.other.append(drafts.model("lost", 0), epoch=1)
            await fold.reach(2)
            await stage.cut()
            await asyncio.to_thread(stage.server.stop)
            await asyncio.to_thread(shutil.rmtree, stage.server.store)
            await asyncio.to_thread(shutil.copytree, backup, stage.server.store)
            await asyncio.to_thread(stage.server.start)
            await until(lambda: stage.direct.connected, "the other connection")
            for n in range(3):
                await stage.other.append(drafts.model(f"new{n}", 0), epoch=1)
            await stage.restore()
            await fold.reach(4)
            assert fold.resets == 1
            await resync(stage.other, fold)

    play(tmp_path, scene)


def test_log_29_a_follower_that_was_away_learns_of_the_tombstone(tmp_path: Path) -> None:
    async def scene(stage: JetStreamStage) -> None:
        async with folding(stage.log) as fold:
            made = await stage.other.append(drafts.model("m", 0), epoch=1)
            more = await stage.other.append(drafts.model("m", made.seqs[0], 2), epoch=1)
            await fold.reach(2)
            # A rollup while the audit's source lags would cost the audit what it had not read.
            await until(lambda: audited(stage, 2), "the audit to catch up")
            await stage.cut()
            await stage.other.append(drafts.model_deleted("m", more.seqs[0], 3), epoch=1)
            await stage.restore()
            await fold.reach(3)
            assert fold.states == {}
            await resync(stage.other, fold)

        # The events stream forgot the history with the rollup; the audit kept every event of it.
        await until(lambda: audited(stage, 3), "three events of the model in the audit")

    play(tmp_path, scene)


def test_log_29_an_expired_tombstone_leaves_an_empty_subject(tmp_path: Path) -> None:
    async def scene(stage: JetStreamStage) -> None:
        subject = drafts.model_subject("m")
        made = await stage.other.append(drafts.model("m", 0), epoch=1)
        more = await stage.other.append(drafts.model("m", made.seqs[0], 2), epoch=1)
        # As the appender writes it, but with the shortest time the server takes.
        await stage.direct.request(
            subject,
            b"{}",
            headers={"Nats-Rollup": "sub", "Nats-TTL": "1", EXPECTED_SEQ: str(more.seqs[0])},
            timeout_s=2,
        )

        async def is_empty() -> bool:
            return await stage.other.last(subject) is None

        await until(is_empty, "the tombstone to expire")
        again = await stage.log.append(drafts.model("m", 0), epoch=1)
        assert [i.seq for i in await everything(stage.other)] == [again.seqs[0]]

    play(tmp_path, scene)


def test_log_30_a_half_open_line_is_given_up(tmp_path: Path) -> None:
    async def scene(stage: JetStreamStage) -> None:
        async with folding(stage.log) as fold:
            await stage.other.append(drafts.model("a", 0), epoch=1)
            await fold.reach(1)
            generation = stage.connection.generation
            stage.proxy.blackhole()
            await stage.other.append(drafts.model("b", 0), epoch=1)
            await until(lambda: fold.disconnects > 0, "the silence to be noticed", 15)
            stage.proxy.restore()
            await fold.reach(2, 15)
            assert stage.connection.generation > generation
            await resync(stage.other, fold)

    play(tmp_path, scene)


def test_log_31_a_batch_without_a_commit_is_never_seen(tmp_path: Path) -> None:
    async def scene(stage: JetStreamStage) -> None:
        async with folding(stage.log) as fold:
            batch = [drafts.model(f"m{n}", 0) for n in range(3)]

            def cut(chunk: bytes) -> bool:
                if b"Nats-Batch-Sequence: 2" not in chunk:
                    return False
                stage.proxy.cut_once()
                return True

            stage.proxy.drop_next("up", cut)
            appending = asyncio.create_task(stage.log.append_batch(batch, epoch=1))
            await until(lambda: len(stage.proxy.dropped) == 1, "the batch to be cut")
            visible = [i.seq for i in await everything(stage.other)]
            assert visible == ([1, 2, 3] if appending.done() else [])
            # The commit was on its way, so the appender settles it by itself after the reconnect.
            done = await appending
            assert done.seqs == (1, 2, 3)
            acknowledged = Acknowledged()
            acknowledged.add(batch, done)
            await check(stage.other, acknowledged, fold)

    play(tmp_path, scene)


def test_what_was_refused_never_shows_on_the_live_subjects(tmp_path: Path) -> None:
    async def scene(stage: JetStreamStage) -> None:
        shown: list[str] = []
        handle = await stage.direct.subscribe("yard.live.>", lambda m: shown.append(m.subject))
        await stage.other.append(drafts.model("first", 0), epoch=1)
        await until(lambda: shown == ["yard.live.model.first"], "the republished event")
        with pytest.raises(Conflict):
            await stage.log.append_batch(
                [drafts.model("never", 0), drafts.model("first", 0)], epoch=1
            )
        with pytest.raises(Conflict):
            await stage.log.append(drafts.model("first", 0), epoch=1)
        await stage.log.append_batch([drafts.model("a", 0), drafts.model("b", 0)], epoch=1)
        await until(lambda: len(shown) >= 3, "the batch")
        assert shown == ["yard.live.model.first", "yard.live.model.a", "yard.live.model.b"]
        await handle.close()

    play(tmp_path, scene)


def test_no_consumer_outlives_its_follower(tmp_path: Path) -> None:
    async def scene(stage: JetStreamStage) -> None:
        followers = [stage.log.follow(["yard.evt.>"]) for _ in range(20)]
        await asyncio.gather(*(f.next() for f in followers))
        assert len(await consumers(stage.direct)) == 20
        await asyncio.to_thread(stage.server.restart)
        for follower in followers:
            while not (batch := await asyncio.wait_for(follower.next(), 10)).synced:
                assert batch.items == ()
        await until(lambda: stage.direct.connected, "the other connection")
        await asyncio.gather(*(f.close() for f in followers))
        assert await consumers(stage.direct) == []

    play(tmp_path, scene)


def test_a_paused_server_stores_at_most_once(tmp_path: Path) -> None:
    async def scene(stage: JetStreamStage) -> None:
        stage.server.pause()
        try:
            with pytest.raises(Unavailable):
                await stage.log.append(drafts.model("m", 0), epoch=1)
        finally:
            stage.server.resume()
        await until(lambda: stage.connection.connected, "the connection")
        with contextlib.suppress(Conflict):
            await stage.log.append(drafts.model("m", 0), epoch=1)
        assert len(await everything(stage.other)) == 1

    play(tmp_path, scene)


def test_log_32_after_every_fault_in_a_row_a_fresh_pass_finds_nothing_to_repair(
    tmp_path: Path,
) -> None:
    async def scene(stage: JetStreamStage) -> None:
        acknowledged = Acknowledged()
        async with folding(stage.log) as mine, folding(stage.other, ("yard.evt.model.>",)) as other:
            writers = [
                asyncio.create_task(write(stage.log, f"mine{n}", 50, acknowledged, 0.01))
                for n in range(2)
            ]
            writers.append(asyncio.create_task(write(stage.other, "other", 50, acknowledged, 0.01)))

            async def delete_consumers() -> None:
                for name in await consumers(stage.direct):
                    await api(stage.direct, f"CONSUMER.DELETE.YARD_EVENTS.{name}")

            async def cut() -> None:
                stage.proxy.cut_once()

            async def swallow() -> None:
                stage.proxy.drop_next("down", lambda chunk: b"$JS.ACK" in chunk)

            async def restart() -> None:
                await asyncio.to_thread(stage.server.restart)
                await until(lambda: stage.direct.connected, "the other connection")

            for fault in (cut, delete_consumers, swallow, cut, restart, delete_consumers):
                before = len(acknowledged.events)
                await until(lambda b=before: len(acknowledged.events) >= b + 8, "more appends")
                await fault()
            await asyncio.gather(*writers)
            await check(stage.other, acknowledged, mine, other)

    play(tmp_path, scene)
