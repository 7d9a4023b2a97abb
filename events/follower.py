"""Follows events and commands: catch-up, live, resume after any break, and the alarm when history changed.

The follower owns the position and the decision what to read next; `events/pull.py` moves the bytes. It
applies nothing and remembers no state but what tells it where to go on.
"""

import logging
from collections.abc import Sequence
from typing import Final

from events.codec import StoredMessage, decode_command
from events.log import (
    Batch,
    Broken,
    Misconfigured,
    Recorded,
    StoredCommand,
    StreamIdentity,
    Unavailable,
)
from events.lookup import StreamReads
from events.pull import Lost, StandingPull
from events.reading import Reader

log = logging.getLogger(__name__)

MAX_ITEMS: Final = 1000


class EventFollower:
    """Follower of YARD_EVENTS; see events.log.Follower.

    What `open` does, in order:
    1 read the stream's identity; if it is another stream, lost its tail, or holds another event where this
      reader stopped: `reset`, and a first pass of the last message per subject
    2 nothing read yet and no position given: the first pass
    3 otherwise go on behind the position
    """

    def __init__(
        self,
        pull: StandingPull,
        reads: StreamReads,
        *,
        prefix: str,
        after: int | None,
        identity: StreamIdentity | None,
    ) -> None:
        self._pull = pull
        self._reads = reads
        self._reader = Reader(prefix)
        self._position = after
        self._identity = identity
        self._last_read: tuple[int, int] | None = None
        self._first_pass = after is None
        self._floor = 0
        self._reset = False
        self._synced = False
        self._told_down = False
        self._open = False
        self._taken: list[tuple[StoredMessage, int]] = []

    async def next(self) -> Batch:
        """Waits without a bound for the next batch; see Follower.next.

        May be cancelled without losing anything. Raises Misconfigured when this user may not read what
        the filters name.
        """
        while True:
            if not self._open:
                batch = await self._reopen()
                if batch is not None:
                    return batch
                continue
            if not self._taken:
                try:
                    self._taken, connected = await self._pull.take(MAX_ITEMS)
                except Lost as lost:
                    why = {"why": str(lost), "position": self._position}
                    log.info("follower reopens", extra=why)
                    self._open = False
                    continue
                if not connected:
                    self._open = False
                    continue
            # Kept until handed over: a caller that gives up waiting loses nothing.
            batch = await self._batch(self._taken)
            self._taken = []
            return batch

    async def close(self) -> None:
        """Deletes the consumer."""
        await self._pull.close()

    @property
    def backlog(self) -> int:
        """Messages received and not handed over yet; bounded whatever the stream holds."""
        return self._pull.backlog

    async def _reopen(self) -> Batch | None:
        """One attempt to open; a batch when there is something to tell."""
        if not self._pull.connected:
            if not self._told_down:
                self._told_down = True
                return Batch(items=(), position=self._position or 0, synced=False, connected=False)
            await self._pull.wait_connected()
            return None
        try:
            identity = await self._reads.identity()
            if await self._history_changed(identity):
                log.warning(
                    "the history was replaced, reading afresh",
                    extra={"position": self._position, "last_seq": identity.last_seq},
                )
                self._position = None
                self._last_read = None
                self._first_pass = True
                self._reset = True
                self._reader.forget()
            start = None if self._position is None else self._position + 1
            pending = await self._pull.open(start)
        except (Lost, Unavailable) as error:
            log.debug("follower cannot open", extra={"why": str(error)})
            await self._pull.pause()
            return None
        self._identity = identity
        self._floor = identity.last_seq
        self._open = True
        self._told_down = False
        self._synced = False
        return self._caught_up(()) if pending == 0 else None

    async def _history_changed(self, found: StreamIdentity) -> bool:
        """Whether what was read so far is no longer what the stream holds."""
        known, position = self._identity, self._position
        if position is None:
            return False
        if known is not None and (
            known.stream_id != found.stream_id or known.created != found.created
        ):
            return True
        if found.last_seq < position:
            # A consumer starting past the end would wait there in silence.
            return True
        if self._last_read is None:
            return False
        seq, digest = self._last_read
        try:
            stored = await self._reads.at(seq)
        except Misconfigured:
            # Some roles may not read single messages; the checks above must do for them.
            return False
        return stored is not None and hash(stored.payload) != digest

    async def _batch(self, taken: list[tuple[StoredMessage, int]]) -> Batch:
        items: list[Recorded | Broken] = []
        for message, _ in taken:
            item = self._reader.read(message)
            if isinstance(item, Broken):
                log.warning(
                    "broken event",
                    extra={"seq": item.seq, "subject": item.subject, "why": item.why},
                )
                if self._first_pass:
                    item = await self._with_previous(item)
            items.append(item)
        message, pending = taken[-1]
        self._position = message.seq
        self._last_read = (message.seq, hash(message.payload))
        if pending == 0:
            return self._caught_up(tuple(items))
        return self._told(Batch(items=tuple(items), position=message.seq, synced=False))

    def _caught_up(self, items: tuple[Recorded | Broken, ...]) -> Batch:
        """Everything the stream held at opening was read, also what the filters left out."""
        self._first_pass = False
        self._position = max(self._position or 0, self._floor)
        return self._told(Batch(items=items, position=self._position, synced=True))

    def _told(self, batch: Batch) -> Batch:
        if not self._reset:
            return batch
        self._reset = False
        return Batch(items=batch.items, position=batch.position, synced=batch.synced, reset=True)

    async def _with_previous(self, broken: Broken) -> Broken:
        """Junk as a subject's last message must not erase its state: look for the one before."""
        try:
            history = await self._reads.history(broken.subject, broken.seq)
        except (Unavailable, Misconfigured) as error:
            log.warning(
                "history not readable", extra={"subject": broken.subject, "why": str(error)}
            )
            return broken
        return self._reader.newest_valid(broken, history)


class JetStreamCommandFollower:
    """Follows YARD_COMMANDS from a position; see events.log.CommandFollower."""

    def __init__(self, pull: StandingPull, reads: StreamReads, *, prefix: str, after: int) -> None:
        self._pull = pull
        self._reads = reads
        self._prefix = prefix
        self._position = after
        self._open = False

    async def next(self) -> Sequence[StoredCommand]:
        """Waits without a bound for commands; silent while there is no connection."""
        while True:
            if not self._open:
                await self._reopen()
                continue
            try:
                taken, connected = await self._pull.take(MAX_ITEMS)
            except Lost as lost:
                log.info("command follower reopens", extra={"why": str(lost)})
                self._open = False
                continue
            if not connected:
                self._open = False
                continue
            self._position = taken[-1][0].seq
            return [decode_command(message, self._prefix) for message, _ in taken]

    async def close(self) -> None:
        """Deletes the consumer."""
        await self._pull.close()

    async def _reopen(self) -> None:
        await self._pull.wait_connected()
        try:
            last_seq = (await self._reads.identity()).last_seq
            if last_seq < self._position:
                # Another stream under that name. Commands seen before have their outcome, so reading
                # from its beginning repeats nothing.
                log.warning(
                    "the commands were replaced, reading from the beginning",
                    extra={"position": self._position, "last_seq": last_seq},
                )
                self._position = 0
            await self._pull.open(self._position + 1)
        except (Lost, Unavailable) as error:
            log.debug("command follower cannot open", extra={"why": str(error)})
            await self._pull.pause()
            return
        self._open = True
