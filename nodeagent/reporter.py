"""Appends the agent's events to the log, in the order they happened, what is one change in one atomic batch.

It waits out every outage and never drops, reorders or merges. It knows where each of the agent's subjects
stands; it does not know what an event means, and it never starts or stops anything.
"""

import asyncio
import itertools
import logging
from collections import deque
from collections.abc import Callable

from msgspec.structs import replace

from events.log import (
    Appended,
    Broken,
    Conflict,
    Draft,
    EventLog,
    LogFull,
    OutcomeUnknown,
    Recorded,
    Unavailable,
)
from nodeagent.journal import Entry, Journal, Sent
from nodeagent.ownlog import Head, read_subjects
from schemas.card import CardDeleted
from schemas.messages import tag_of
from schemas.replica import ReplicaDeleted
from schemas.slots import SlotsDeleted

LOG = logging.getLogger(__name__)

Stored = Callable[[Entry, int], None]
"""Told of each entry when the log has it, with its sequence."""


class Deposed(Exception):
    """Another agent took over this node: it registered later, with a higher epoch."""

    def __init__(self, node: str, epoch: int, other: int) -> None:
        super().__init__(
            f"another agent runs the node {node!r} since epoch {other} (mine was {epoch}):"
            " this one stops and leaves its engines as they are"
        )


class Reporter:
    """The one writer of replica, card and slots events of this node. `run` must be a live task."""

    def __init__(
        self,
        log: EventLog,
        journal: Journal,
        *,
        node: str,
        actor: str,
        retry_s: float = 1.0,
        full_retry_s: float = 5.0,
    ) -> None:
        self._log = log
        self._journal = journal
        self._node = node
        self._actor = actor
        self._retry_s = retry_s
        self._full_retry_s = full_retry_s
        self._queue: deque[tuple[Entry, asyncio.Future[None] | None]] = deque()
        self._changed = asyncio.Event()
        self._listeners: list[Stored] = []
        self._heads: dict[str, Head] = {}
        self._epoch = 0

    @property
    def epoch(self) -> int:
        """The epoch events are written under; 0 while the node is not registered."""
        return self._epoch

    @property
    def backlog(self) -> int:
        """How many events the log does not have yet."""
        return len(self._queue)

    def unreported(self) -> frozenset[str]:
        """Replicas with events of their own that the log does not have yet."""
        return frozenset(
            entry.subject.rsplit(".", 1)[-1] if entry.replica is None else entry.replica.id
            for entry, _ in self._queue
            if entry.slots is None and not isinstance(entry.event, SlotsDeleted)
        )

    def on_stored(self, listener: Stored) -> None:
        self._listeners.append(listener)

    def register(self, epoch: int, heads: dict[str, Head]) -> None:
        """From now on events are written, under `epoch` and onto `heads`."""
        self._heads = dict(heads)
        self._epoch = epoch
        self._changed.set()

    def suspend(self) -> None:
        """Writes nothing more until registered anew: the log was replaced."""
        self._epoch = 0

    def put(self, entry: Entry, durable: "asyncio.Future[None] | None") -> None:
        """Queues one event. It is appended after `durable`, so that the log never knows more than the
        journal does."""
        self._queue.append((entry, durable))
        self._changed.set()

    async def run(self) -> None:
        """Appends until cancelled. Raises Deposed, Misconfigured."""
        while True:
            while not self._queue or not self._epoch:
                self._changed.clear()
                await self._changed.wait()
            entries, durable = self._first()
            if durable is not None:
                await durable
            seqs = await self._deliver(entries)
            if seqs is None:  # suspended meanwhile: the same entries come again after registering
                continue
            for _ in entries:
                self._queue.popleft()
            marked: asyncio.Future[None] | None = None
            sent = tuple(Sent(n=entry.n) for entry in entries)
            if self._queue:
                marked = self._journal.write(*sent)
            else:
                # What comes next is journalled behind it and before it is appended, so that never more
                # than one stored change is taken for unsent: the one that is found where it was put.
                self._journal.later(*sent)
            for entry, seq in zip(entries, seqs, strict=True):
                for listener in self._listeners:
                    listener(entry, seq)
            self._changed.set()
            if marked is not None:
                # What comes next is journalled already: killed with both unmarked, our successor would
                # tell this one again, after the next.
                await marked

    def _first(self) -> "tuple[tuple[Entry, ...], asyncio.Future[None] | None]":
        """The entries of the next change, and the future of the last of them to become durable."""
        first, durable = self._queue[0]
        entries = [first]
        for entry, later in itertools.islice(self._queue, 1, None):
            if not first.batch or entry.batch != first.batch:
                break
            entries.append(entry)
            durable = later
        return tuple(entries), durable

    async def drained(self) -> None:
        """Returns when the log has every event; without a bound."""
        while self._queue:
            self._changed.clear()
            await self._changed.wait()

    async def _deliver(self, entries: tuple[Entry, ...]) -> tuple[int, ...] | None:
        """Appends what is one change, however long it takes; its sequences, or None when writing was
        suspended."""
        told = False
        while (epoch := self._epoch) != 0:
            heads = [self._heads.get(entry.subject, Head()) for entry in entries]
            writable = tuple(e for e, head in zip(entries, heads, strict=True) if head.writable)
            if len(writable) < len(entries):
                # Nobody writes over what he cannot read; an operator repairs it.
                self._dropped(entries, heads)
                found = await self._deliver(writable) if writable else ()
                return None if found is None else self._seqs(entries, heads)
            if all(
                (head.type, head.time) == (tag_of(entry.event), entry.time)
                for entry, head in zip(entries, heads, strict=True)
            ):
                # The agent before was killed between storing this and remembering that.
                for entry, head in zip(entries, heads, strict=True):
                    self._advance(entry, head.seq, head.rev)
                return tuple(head.seq for head in heads)
            drafts = self._drafts(entries, epoch)
            try:
                stored: Appended = await self._append(drafts, epoch)
            except Conflict:
                seqs = await self._settle(drafts, epoch)
                if seqs is not None:
                    for entry, draft, seq in zip(entries, drafts, seqs, strict=True):
                        self._advance(entry, seq, draft.rev)
                    return seqs
            except (Unavailable, OutcomeUnknown) as error:
                if not told:
                    told = True
                    LOG.warning(
                        "the log is away, events wait",
                        extra={"waiting": len(self._queue), "problem": str(error)},
                    )
                await asyncio.sleep(self._retry_s)
            except LogFull as error:
                LOG.error(
                    "the log is full, events wait",
                    extra={"waiting": len(self._queue), "problem": str(error)},
                )
                await asyncio.sleep(self._full_retry_s)
            else:
                for entry, draft, seq in zip(entries, drafts, stored.seqs, strict=True):
                    self._advance(entry, seq, draft.rev)
                return stored.seqs
        return None

    async def _append(self, drafts: tuple[Draft, ...], epoch: int) -> Appended:
        if len(drafts) == 1:
            return await self._log.append(drafts[0], epoch=epoch)
        return await self._log.append_batch(drafts, epoch=epoch)

    def _dropped(self, entries: tuple[Entry, ...], heads: list[Head]) -> None:
        for entry, head in zip(entries, heads, strict=True):
            if not head.writable:
                LOG.error(
                    "event dropped: its subject holds something unreadable",
                    extra={"subject": entry.subject, "problem": head.problem},
                )

    def _seqs(self, entries: tuple[Entry, ...], heads: list[Head]) -> tuple[int, ...]:
        """Where each subject stands now; a dropped event counts as where it was dropped."""
        return tuple(
            self._heads.get(entry.subject, head).seq
            for entry, head in zip(entries, heads, strict=True)
        )

    def _drafts(self, entries: tuple[Entry, ...], epoch: int) -> tuple[Draft, ...]:
        heads = dict(self._heads)
        drafts: list[Draft] = []
        for entry in entries:
            draft = self._draft(entry, heads.get(entry.subject, Head()), epoch)
            # The server checks a subject once a batch; the revision goes on.
            heads[entry.subject] = Head(seq=draft.expected_seq, rev=draft.rev)
            drafts.append(draft)
        return tuple(drafts)

    def _draft(self, entry: Entry, head: Head, epoch: int) -> Draft:
        state = entry.replica or entry.card or entry.slots
        return Draft(
            subject=entry.subject,
            event=entry.event,
            # What waited through a restart is told by the agent that lives now.
            state=replace(state, epoch=epoch) if state is not None else None,
            expected_seq=head.seq,
            rev=head.rev + 1,
            reason=entry.reason,
            actor=self._actor,
            causationid=entry.causationid,
            time=entry.time,
        )

    def _advance(self, entry: Entry, seq: int, rev: int) -> None:
        ends = isinstance(entry.event, ReplicaDeleted | CardDeleted | SlotsDeleted)
        if ends:
            self._heads.pop(entry.subject, None)
        else:
            self._heads[entry.subject] = Head(seq=seq, rev=rev)

    async def _settle(self, drafts: tuple[Draft, ...], epoch: int) -> tuple[int, ...] | None:
        """After a conflict: the sequences when what is stored are these very events, None to try again.

        1. nothing there, or an older agent's late word: go on from where the subject stands.
        2. my own words of an earlier try whose answer was lost: they are stored, all of them.
        3. a newer agent's: raises Deposed.
        """
        mine: list[int] = []
        for draft in drafts:
            found = await read_subjects(self._log, draft.subject)
            if not found:  # 1
                self._heads.pop(draft.subject, None)
                continue
            last = found[-1]
            if isinstance(last, Broken):
                self._heads[draft.subject] = Head(seq=last.seq, writable=False, problem=last.why)
                continue
            if last.epoch > epoch:  # 3
                raise Deposed(self._node, epoch, last.epoch)
            self._heads[draft.subject] = Head.of(last)
            if last.epoch == epoch and _same(last, draft):  # 2
                mine.append(last.seq)
        return tuple(mine) if len(mine) == len(drafts) else None


def _same(stored: Recorded, draft: Draft) -> bool:
    """Whether a stored event says what the draft says."""
    return (
        stored.rev == draft.rev
        and stored.event is not None
        and tag_of(stored.event) == tag_of(draft.event)
        and stored.state == draft.state
    )
