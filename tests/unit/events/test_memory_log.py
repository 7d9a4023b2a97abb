"""What only the twin can show: time that a test moves, and switches that are used up."""

from datetime import UTC, datetime, timedelta

from events.envelope import TOMBSTONE_TTL_S
from events.log import Recorded
from events.memory import MemoryLog
from events.memory_broker import MAX_PER_SUBJECT, MemoryBroker
from schemas.commands import Command, ModelActivate
from tests.support import drafts
from tests.support.aio import run


class Clock:
    def __init__(self) -> None:
        self.now = datetime(2026, 1, 1, tzinfo=UTC)

    def __call__(self) -> datetime:
        return self.now


def test_log_29_a_tombstone_goes_after_a_week_and_nothing_comes_back() -> None:
    async def main() -> None:
        clock = Clock()
        log = MemoryLog(MemoryBroker(clock=clock))
        subject = drafts.model_subject("m")
        made = await log.append(drafts.model("m", 0), epoch=1)
        more = await log.append(drafts.model("m", made.seqs[0], 2), epoch=1)
        await log.append(drafts.model_deleted("m", more.seqs[0], 3), epoch=1)
        clock.now += timedelta(seconds=TOMBSTONE_TTL_S - 1)
        last = await log.last(subject)
        assert isinstance(last, Recorded)
        assert last.state is None
        clock.now += timedelta(seconds=1)
        assert await log.last(subject) is None
        follower = log.follow(["yard.evt.>"])
        assert (await follower.next()).items == ()
        await follower.close()
        again = await log.append(drafts.model("m", 0), epoch=1)
        assert again.seqs == (4,)

    run(main())


def test_a_command_is_forgotten_when_its_time_is_over() -> None:
    async def main() -> None:
        clock = Clock()
        log = MemoryLog(MemoryBroker(clock=clock))
        command = Command(id="1", body=ModelActivate(model="m"))
        await log.send("gateway", command, ttl_s=60)
        clock.now += timedelta(seconds=60)
        await log.send("gateway", Command(id="2", body=ModelActivate(model="m")), ttl_s=60)
        follower = log.follow_commands(after=0)
        assert [c.id for c in await follower.next()] == ["2"]
        await follower.close()

    run(main())


def test_a_subject_keeps_its_newest_events_only() -> None:
    async def main() -> None:
        log = MemoryLog(MemoryBroker())
        seq = 0
        for rev in range(1, MAX_PER_SUBJECT + 11):
            seq = (await log.append(drafts.model("m", seq, rev), epoch=1)).seqs[0]
        follower = log.follow(["yard.evt.>"], after=0, identity=await log.identity())
        items = (await follower.next()).items
        assert [i.seq for i in items] == list(range(11, MAX_PER_SUBJECT + 11))
        await follower.close()

    run(main())
