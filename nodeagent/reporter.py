"""Appends the agent's events to the log, one after another in the order they happened.

It waits out every outage and never drops, reorders or merges. It knows where each of the agent's subjects
stands; it does not know what an event means, and it never starts or stops anything.
"""

import asyncio
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
    """The one writer of replica and card events of this node. `run` must be a live task."""

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
        """Replicas with events that the log does not have yet."""
        return frozenset(
            entry.subject.rsplit(".", 1)[-1] if entry.replica is None else entry.replica.id
            for entry, _ in self._queue
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
            entry, durable = self._queue[0]
            if durable is not None:
                await durable
            seq = await self._deliver(entry)
            if seq is None:  # suspended meanwhile: the same entry comes again after registering
                continue
            self._queue.popleft()
            if self._queue:
                self._journal.write(Sent(n=entry.n))
            else:
                # What comes next is journalled behind it and before it is appended, so that never more
                # than one stored entry is taken for unsent: the one that is found where it was put.
                self._journal.later(Sent(n=entry.n))
            for listener in self._listeners:
                listener(entry, seq)
            self._changed.set()

    async def drained(self) -> None:
        """Returns when the log has every event; without a bound."""
        while self._queue:
            self._changed.clear()
            await self._changed.wait()

    async def _deliver(self, entry: Entry) -> int | None:
        """Appends one entry however long it takes; its sequence, or None when writing was suspended."""
        told = False
        while (epoch := self._epoch) != 0:
            head = self._heads.get(entry.subject, Head())
            if not head.writable:
                # Nobody writes over what he cannot read; an operator repairs it.
                LOG.error(
                    "event dropped: its subject holds something unreadable",
                    extra={"subject": entry.subject, "problem": head.problem},
                )
                return head.seq
            if (head.type, head.time) == (tag_of(entry.event), entry.time):
                # The agent before was killed between storing this event and remembering that.
                self._advance(entry, head.seq, head.rev)
                return head.seq
            draft = self._draft(entry, head, epoch)
            try:
                stored: Appended = await self._log.append(draft, epoch=epoch)
            except Conflict:
                seq = await self._settle(draft, epoch)
                if seq is not None:
                    self._advance(entry, seq, draft.rev)
                    return seq
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
                self._advance(entry, stored.seqs[0], draft.rev)
                return stored.seqs[0]
        return None

    def _draft(self, entry: Entry, head: Head, epoch: int) -> Draft:
        state = entry.replica if entry.replica is not None else entry.card
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
        ends = isinstance(entry.event, ReplicaDeleted | CardDeleted)
        if ends:
            self._heads.pop(entry.subject, None)
        else:
            self._heads[entry.subject] = Head(seq=seq, rev=rev)

    async def _settle(self, draft: Draft, epoch: int) -> int | None:
        """After a conflict: the sequence when the stored event is this very one, None to try again.

        1. nothing there, or an older agent's late word: go on from where the subject stands.
        2. my own word of an earlier try whose answer was lost: it is stored.
        3. a newer agent's: raises Deposed.
        """
        found = await read_subjects(self._log, draft.subject)
        if not found:  # 1
            self._heads.pop(draft.subject, None)
            return None
        last = found[-1]
        if isinstance(last, Broken):
            self._heads[draft.subject] = Head(seq=last.seq, writable=False, problem=last.why)
            return None
        if last.epoch > epoch:  # 3
            raise Deposed(self._node, epoch, last.epoch)
        self._heads[draft.subject] = Head.of(last)
        if last.epoch == epoch and _same(last, draft):  # 2
            return last.seq
        return None


def _same(stored: Recorded, draft: Draft) -> bool:
    """Whether a stored event says what the draft says."""
    return (
        stored.rev == draft.rev
        and stored.event is not None
        and tag_of(stored.event) == tag_of(draft.event)
        and stored.state == draft.state
    )
