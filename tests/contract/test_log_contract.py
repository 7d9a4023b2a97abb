"""What every EventLog does with its events, run on the memory twin and on a real nats-server alike."""

import asyncio
from pathlib import Path

import msgspec
import pytest

from events.log import Batch, Broken, Conflict, Deposed, Draft, Misconfigured, Recorded, Unavailable
from schemas.commands import Command, ModelRemove
from schemas.model import Model, ModelAdded
from tests.support import drafts
from tests.support.aio import until
from tests.support.logstages import Play, Stage, lead, next_batch, player, read


@pytest.fixture(params=["memory", "jetstream"])
def play(request: pytest.FixtureRequest, tmp_path: Path) -> Play:
    """Runs a scene on a fresh stage."""
    return player(request.param, tmp_path)


# --- appending ---


def test_an_appended_event_is_the_last_of_its_subject(play: Play) -> None:
    async def scene(stage: Stage) -> None:
        done = await stage.log.append(drafts.model("qwen2.5", 0, actor="alice"), epoch=7)
        last = await stage.other.last(drafts.model_subject("qwen2.5"))
        assert isinstance(last, Recorded)
        assert (last.seq, last.id) == (done.seqs[0], done.ids[0])
        assert (last.noun, last.key, last.type) == ("model", ("qwen2.5",), "model.added")
        assert (last.rev, last.epoch, last.actor, last.source) == (1, 7, "alice", "/cp/1")
        assert last.event == ModelAdded(by="test")
        assert last.state == Model(name="qwen2.5", incarnation="i-1")
        assert await stage.log.last(drafts.model_subject("unknown")) is None

    play(scene)


def test_a_second_write_with_the_same_expectation_conflicts(play: Play) -> None:
    async def scene(stage: Stage) -> None:
        first = await stage.log.append(drafts.model("m", 0), epoch=1)
        with pytest.raises(Conflict) as refused:
            await stage.other.append(drafts.model("m", 0), epoch=1)
        assert refused.value.subject == drafts.model_subject("m")
        again = await stage.other.append(drafts.model("m", first.seqs[0], 2), epoch=1)
        assert again.seqs[0] > first.seqs[0]

    play(scene)


def test_an_expectation_ahead_of_the_subject_conflicts(play: Play) -> None:
    async def scene(stage: Stage) -> None:
        with pytest.raises(Conflict):
            await stage.log.append(drafts.model("m", 17, 2), epoch=1)

    play(scene)


@pytest.mark.parametrize("count", [1, 2, 5])
def test_log_05_a_lost_acknowledgement_stores_one_event_and_reports_success(
    play: Play, count: int
) -> None:
    async def scene(stage: Stage) -> None:
        seq = 0
        for rev in range(1, count + 1):
            stage.lose_next_ack()
            done = await stage.log.append(drafts.model("m", seq, rev), epoch=1)
            seq = done.seqs[0]
            last = await stage.other.last(drafts.model_subject("m"))
            assert isinstance(last, Recorded)
            assert (last.seq, last.id, last.rev) == (seq, done.ids[0], rev)
        assert (await stage.other.identity()).last_seq == count

    play(scene)


def test_log_05_a_lost_acknowledgement_of_a_batch_stores_it_once(play: Play) -> None:
    async def scene(stage: Stage) -> None:
        fence = await lead(stage)
        stage.lose_next_ack()
        batch = [drafts.model("a", 0), drafts.model("b", 0), drafts.line(fence.seq, 0)]
        done = await stage.log.append_batch(batch, epoch=fence.seq, fence=fence)
        assert done.seqs == (fence.seq + 1, fence.seq + 2, fence.seq + 3)
        for draft, seq, id_ in zip(batch, done.seqs, done.ids, strict=True):
            last = await stage.other.last(draft.subject)
            assert isinstance(last, Recorded)
            assert (last.seq, last.id) == (seq, id_)
        assert (await stage.other.identity()).last_seq == done.seqs[-1]

    play(scene)


def test_a_batch_has_consecutive_sequences_and_may_write_a_subject_twice(play: Play) -> None:
    async def scene(stage: Stage) -> None:
        fence = await lead(stage)
        done = await stage.log.append_batch(
            [
                drafts.model("a", 0),
                drafts.model("a", 0, 2),
                drafts.model("b", 0),
                drafts.line(fence.seq, 0),
            ],
            epoch=fence.seq,
            fence=fence,
        )
        assert done.seqs == tuple(range(fence.seq + 1, fence.seq + 5))
        last = await stage.log.last(drafts.model_subject("a"))
        assert isinstance(last, Recorded)
        assert last.rev == 2

    play(scene)


def test_a_batch_with_one_conflict_stores_nothing(play: Play) -> None:
    async def scene(stage: Stage) -> None:
        fence = await lead(stage)
        taken = await stage.other.append(drafts.model("b", 0), epoch=fence.seq)
        with pytest.raises(Conflict) as refused:
            await stage.log.append_batch(
                [drafts.model("a", 0), drafts.model("b", 0), drafts.line(fence.seq, 0)],
                epoch=fence.seq,
                fence=fence,
            )
        assert refused.value.subject == drafts.model_subject("b")
        assert await stage.log.last(drafts.model_subject("a")) is None
        assert (await stage.log.identity()).last_seq == taken.seqs[0]

    play(scene)


@pytest.mark.parametrize("others", [0, 1, 3])
def test_a_deposed_leader_stores_nothing_of_a_batch(play: Play, others: int) -> None:
    async def scene(stage: Stage) -> None:
        fence = await lead(stage)
        await stage.other.append(drafts.elected("b", fence.seq), epoch=fence.seq)
        batch = [drafts.model(f"m{n}", 0) for n in range(others)]
        with pytest.raises(Deposed):
            await stage.log.append_batch(
                [*batch, drafts.line(fence.seq, 0)], epoch=fence.seq, fence=fence
            )
        assert (await stage.log.identity()).last_seq == 2

    play(scene)


def test_a_deposed_leader_learns_that_its_last_batch_was_stored(play: Play) -> None:
    """The acknowledgement is lost, and another leads before the retry: it happened all the same."""

    async def scene(stage: Stage) -> None:
        fence = await lead(stage)
        stage.lose_next_ack()
        batch = [drafts.model("a", 0), drafts.line(fence.seq, 0)]
        stored = asyncio.create_task(stage.log.append_batch(batch, epoch=fence.seq, fence=fence))

        async def is_stored() -> bool:
            return await stage.other.last(drafts.LINE) is not None

        await until(is_stored, "the batch to be stored")
        await stage.other.append(drafts.elected("b", fence.seq), epoch=fence.seq)
        done = await stored
        assert done.seqs == (fence.seq + 1, fence.seq + 2)

    play(scene)


@pytest.mark.parametrize("size", [0, 1001])
def test_a_batch_of_impossible_size_is_a_fault(play: Play, size: int) -> None:
    async def scene(stage: Stage) -> None:
        with pytest.raises(Misconfigured):
            await stage.log.append_batch([drafts.model(f"m{n}", 0) for n in range(size)], epoch=1)

    play(scene)


def test_a_thousand_events_are_one_batch(play: Play) -> None:
    async def scene(stage: Stage) -> None:
        done = await stage.log.append_batch(
            [drafts.model(f"m{n}", 0) for n in range(1000)], epoch=1
        )
        assert done.seqs == tuple(range(1, 1001))

    play(scene)


def test_drafts_no_reader_would_accept_are_faults(play: Play) -> None:
    good = drafts.model("m", 0)
    wrong: list[Draft] = [
        msgspec.structs.replace(good, subject="yard.evt.replica.n.r"),
        msgspec.structs.replace(good, subject="yard.evt.model"),
        msgspec.structs.replace(good, subject="elsewhere.evt.model.m"),
        msgspec.structs.replace(good, subject="yard.evt.stranger.m"),
        msgspec.structs.replace(good, state=None),
        msgspec.structs.replace(good, state=drafts.node_started("n", 0).state),
        msgspec.structs.replace(good, state=Model(name="m", incarnation="x" * 300_000)),
    ]

    async def scene(stage: Stage) -> None:
        for draft in wrong:
            with pytest.raises(Misconfigured):
                await stage.log.append(draft, epoch=1)
        assert (await stage.log.identity()).last_seq == 0

    play(scene)


def test_log_10_of_fifty_writers_exactly_one_wins_each_round(play: Play) -> None:
    async def scene(stage: Stage) -> None:
        expected = 0
        for rev in range(1, 6):
            outcomes = await asyncio.gather(
                *(
                    (stage.log if n % 2 else stage.other).append(
                        drafts.model("m", expected, rev, note=str(n)), epoch=1
                    )
                    for n in range(50)
                ),
                return_exceptions=True,
            )
            won = [o for o in outcomes if not isinstance(o, BaseException)]
            assert len(won) == 1
            assert all(isinstance(o, Conflict) for o in outcomes if isinstance(o, BaseException))
            expected = won[0].seqs[0]
        assert (await stage.log.identity()).last_seq == 5

    play(scene)


def test_log_06_without_a_connection_an_append_fails_at_once_and_is_never_stored(
    play: Play,
) -> None:
    async def scene(stage: Stage) -> None:
        await stage.cut()
        assert not stage.log.connected
        with pytest.raises(Unavailable):
            await stage.log.append(drafts.model("zombie", 0), epoch=1)
        with pytest.raises(Unavailable):
            await stage.log.append_batch([drafts.model("z", 0), drafts.model("y", 0)], epoch=1)
        with pytest.raises(Unavailable):
            await stage.log.send("a", Command(id="c", body=ModelRemove(model="m")))
        with pytest.raises(Unavailable):
            await stage.log.last(drafts.LEADER)
        await stage.restore()
        # What goes over the same line afterwards is stored behind anything left in it.
        done = await stage.log.append(drafts.model("after", 0), epoch=1)
        assert done.seqs == (1,)
        assert await stage.log.send("a", Command(id="d", body=ModelRemove(model="m"))) == 1

    play(scene)


# --- following ---


def test_a_new_follower_gets_the_last_event_of_each_subject_then_what_comes(play: Play) -> None:
    async def scene(stage: Stage) -> None:
        first = await stage.log.append(drafts.model("a", 0), epoch=1)
        await stage.log.append(drafts.model("b", 0), epoch=1)
        await stage.log.append(drafts.model("a", first.seqs[0], 2), epoch=1)
        follower = stage.other.follow(["yard.evt.>"])
        items = await read(follower, 3)
        assert [(i.seq, i.subject) for i in items] == [
            (2, drafts.model_subject("b")),
            (3, drafts.model_subject("a")),
        ]
        await stage.log.append(drafts.model("c", 0), epoch=1)
        live = await next_batch(follower)
        assert [i.seq for i in live.items] == [4]
        assert live.synced
        assert not live.reset
        await follower.close()

    play(scene)


def test_an_empty_log_is_synced_at_once(play: Play) -> None:
    async def scene(stage: Stage) -> None:
        follower = stage.log.follow(["yard.evt.>"])
        batch = await next_batch(follower)
        assert batch == Batch(items=(), position=0, synced=True)
        await follower.close()

    play(scene)


def test_filters_let_through_what_they_name_and_the_position_passes_the_rest(play: Play) -> None:
    async def scene(stage: Stage) -> None:
        await stage.log.append(drafts.node_started("n1", 0), epoch=0)
        await stage.log.append(drafts.replica_ready("n1", "r1", 0), epoch=1)
        await stage.log.append(drafts.replica_ready("n2", "r2", 0), epoch=1)
        await stage.log.append(drafts.model("m", 0), epoch=1)
        for filters, seqs in (
            (["yard.evt.replica.n1.*"], [2]),
            (["yard.evt.model.>", "yard.evt.replica.>"], [2, 3, 4]),
            ([drafts.model_subject("m")], [4]),
            (["yard.evt.card.>"], []),
        ):
            follower = stage.other.follow(filters)
            assert [i.seq for i in await read(follower, 4)] == seqs
            await follower.close()

    play(scene)


def test_a_follower_goes_on_behind_a_position_of_the_same_history(play: Play) -> None:
    async def scene(stage: Stage) -> None:
        for n in range(5):
            await stage.log.append(drafts.model(f"m{n}", 0), epoch=1)
        identity = await stage.log.identity()
        follower = stage.other.follow(["yard.evt.>"], after=3, identity=identity)
        batch = await next_batch(follower)
        assert [i.seq for i in batch.items] == [4, 5]
        assert not batch.reset
        assert batch.synced
        await follower.close()
        at_end = stage.other.follow(["yard.evt.>"], after=5, identity=identity)
        assert await next_batch(at_end) == Batch(items=(), position=5, synced=True)
        await at_end.close()

    play(scene)


def test_log_17_a_position_of_another_history_begins_afresh(play: Play) -> None:
    async def scene(stage: Stage) -> None:
        for n in range(3):
            await stage.log.append(drafts.model(f"m{n}", 0), epoch=1)
        identity = await stage.log.identity()
        strangers = [
            (2, msgspec.structs.replace(identity, stream_id="another")),
            (2, msgspec.structs.replace(identity, created="another")),
            (9, identity),  # the log lost its tail: a consumer would wait past the end in silence
        ]
        for after, known in strangers:
            follower = stage.other.follow(["yard.evt.>"], after=after, identity=known)
            batch = await next_batch(follower)
            assert batch.reset, known
            assert [i.seq for i in batch.items] == [1, 2, 3]
            await follower.close()

    play(scene)


def test_log_17_a_running_follower_notices_that_the_stream_was_replaced(play: Play) -> None:
    async def scene(stage: Stage) -> None:
        follower = stage.log.follow(["yard.evt.>"])
        for n in range(3):
            await stage.other.append(drafts.model(f"m{n}", 0), epoch=1)
        assert len(await read(follower, 3)) == 3
        await stage.replace_history()
        await stage.other.append(drafts.model("new", 0), epoch=1)
        while not (batch := await next_batch(follower)).reset:
            assert batch.items == ()
        items = list(batch.items)
        while not items:
            items += (await next_batch(follower)).items
        assert [(i.seq, i.subject) for i in items] == [(1, drafts.model_subject("new"))]
        await follower.close()

    play(scene)


def test_a_lost_connection_is_told_once_and_nothing_is_missed_after_it(play: Play) -> None:
    async def scene(stage: Stage) -> None:
        follower = stage.log.follow(["yard.evt.>"])
        await stage.log.append(drafts.model("a", 0), epoch=1)
        await read(follower, 1)
        await stage.cut()
        told = await next_batch(follower)
        assert told == Batch(items=(), position=1, synced=False, connected=False)
        for n in range(3):
            await stage.other.append(drafts.model(f"m{n}", 0), epoch=1)
        await stage.restore()
        items = await read(follower, 4)
        assert [i.seq for i in items] == [2, 3, 4]
        await follower.close()

    play(scene)


def test_a_reader_that_gives_up_waiting_again_and_again_misses_nothing(play: Play) -> None:
    async def scene(stage: Stage) -> None:
        follower = stage.log.follow(["yard.evt.>"])
        items: list[Recorded | Broken] = []

        async def write() -> None:
            for n in range(150):
                await stage.other.append(drafts.model(f"m{n}", 0), epoch=1)

        writing = asyncio.create_task(write())
        loop = asyncio.get_running_loop()
        deadline = loop.time() + 10
        patience = 0.0
        while len(items) < 150:
            assert loop.time() < deadline, len(items)
            patience = (patience + 0.0007) % 0.004
            reading = asyncio.create_task(follower.next())
            await asyncio.wait({reading}, timeout=patience)
            reading.cancel()
            try:
                items += (await reading).items
            except asyncio.CancelledError:
                continue
        await writing
        assert [i.seq for i in items] == list(range(1, 151))
        await follower.close()

    play(scene)


# --- endings ---


def test_log_29_a_tombstone_is_the_only_thing_left_of_its_subject(play: Play) -> None:
    async def scene(stage: Stage) -> None:
        fence = await lead(stage)
        made = await stage.log.append(drafts.model("m", 0), epoch=fence.seq)
        more = await stage.log.append(drafts.model("m", made.seqs[0], 2), epoch=fence.seq)
        ended = await stage.log.append_batch(
            [drafts.model_deleted("m", more.seqs[0], 3), drafts.line(fence.seq, 0)],
            epoch=fence.seq,
            fence=fence,
        )
        follower = stage.other.follow(["yard.evt.model.>"])
        items = await read(follower, ended.seqs[-1])
        assert len(items) == 1
        tombstone = items[0]
        assert isinstance(tombstone, Recorded)
        assert (tombstone.seq, tombstone.type, tombstone.state) == (
            ended.seqs[0],
            "model.deleted",
            None,
        )
        await follower.close()
        # The history went with it: nothing can come back when the tombstone itself expires.
        everything = stage.other.follow(
            [drafts.model_subject("m")], after=0, identity=await stage.other.identity()
        )
        assert [i.seq for i in await read(everything, ended.seqs[-1])] == [ended.seqs[0]]
        await everything.close()
        again = await stage.log.append(drafts.model("m", ended.seqs[0], 1), epoch=fence.seq)
        assert again.seqs[0] > ended.seqs[1]

    play(scene)
