"""Checks a log after faults: acknowledged events are there once, revisions have no gap, folds agree.

The oracle of every fault test. `Fold` is the simplest projection there is; a follower that lost, repeated
or reordered anything makes it differ from a fresh pass of the last event per subject.
"""

import asyncio
from collections import defaultdict
from typing import Any

from events.log import Appended, Broken, Draft, EventLog, Follower, Recorded


class Fold:
    """State by subject as one follower told it. `seen` are the sequences in the order they came."""

    def __init__(self) -> None:
        self.states: dict[str, tuple[int, str, Any]] = {}
        self.seen: list[int] = []
        self.position = 0
        self.resets = 0
        self.disconnects = 0
        self.synced = asyncio.Event()

    def apply(self, item: Recorded | Broken) -> None:
        self.seen.append(item.seq)
        if isinstance(item, Broken):
            return
        known = self.states.get(item.subject)
        assert known is None or known[0] < item.seq, f"{item.subject} went back to {item.seq}"
        if item.state is None:
            self.states.pop(item.subject, None)
        else:
            self.states[item.subject] = (item.seq, item.id, item.state)

    async def follow(self, follower: Follower) -> None:
        """Applies batches for as long as it is let."""
        while True:
            batch = await follower.next()
            if batch.reset:
                self.states.clear()
                self.seen.clear()
                self.resets += 1
            if not batch.connected:
                self.disconnects += 1
            for item in batch.items:
                self.apply(item)
            self.position = batch.position
            if batch.synced:
                self.synced.set()
            else:
                self.synced.clear()

    async def reach(self, position: int, timeout_s: float = 10.0) -> None:
        """Until everything up to a position was applied."""
        loop = asyncio.get_running_loop()
        deadline = loop.time() + timeout_s
        while self.position < position or not self.synced.is_set():
            assert loop.time() < deadline, f"at {self.position} of {position} after {timeout_s} s"
            await asyncio.sleep(0.005)


class Acknowledged:
    """What writers were told is stored."""

    def __init__(self) -> None:
        self.events: dict[str, tuple[int, str]] = {}

    def add(self, drafts: list[Draft], done: Appended) -> None:
        for draft, seq, id_ in zip(drafts, done.seqs, done.ids, strict=True):
            self.events[id_] = (seq, draft.subject)


async def everything(log: EventLog, filters: tuple[str, ...] = ("yard.evt.>",)) -> list[Recorded]:
    """Every message the stream still holds, oldest first."""
    identity = await log.identity()
    follower = log.follow(filters, after=0, identity=identity)
    items: list[Recorded] = []
    try:
        while True:
            batch = await asyncio.wait_for(follower.next(), 10)
            for item in batch.items:
                assert isinstance(item, Recorded), item
                items.append(item)
            if batch.synced and batch.position >= identity.last_seq:
                return items
    finally:
        await follower.close()


async def check(log: EventLog, acknowledged: Acknowledged, *folds: Fold) -> None:
    """The history checker; fails with what is wrong. Histories under 64 events per subject only."""
    items = await everything(log)
    by_id: dict[str, list[Recorded]] = defaultdict(list)
    for item in items:
        by_id[item.id].append(item)
    for id_, copies in by_id.items():
        assert len(copies) == 1, f"{id_} is stored {len(copies)} times"
    for id_, (seq, subject) in acknowledged.events.items():
        assert id_ in by_id, f"{id_} on {subject} was acknowledged at {seq} and is gone"
        assert (by_id[id_][0].seq, by_id[id_][0].subject) == (seq, subject)
    revs: dict[str, int] = {}
    for item in items:
        assert item.rev == revs.get(item.subject, item.rev - 1) + 1, f"{item.subject} has a gap"
        revs[item.subject] = item.rev
    last = (await log.identity()).last_seq
    for fold in folds:
        await fold.reach(last)
        assert fold.seen == sorted(set(fold.seen)), "something came twice or out of order"
        await resync(log, fold)


async def resync(log: EventLog, fold: Fold) -> None:
    """test_log_32: a pass of the last event per subject finds nothing to repair in memory."""
    fresh = Fold()
    follower = log.follow(["yard.evt.>"])
    task = asyncio.create_task(fresh.follow(follower))
    await fresh.reach((await log.identity()).last_seq)
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    await follower.close()
    repairs = {
        s: (fold.states.get(s), fresh.states.get(s))
        for s in fold.states.keys() | fresh.states.keys()
        if fold.states.get(s) != fresh.states.get(s)
    }
    assert not repairs, repairs
