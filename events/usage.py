"""Follows YARD_USAGE from a position: what gateways say their requests used, in order, each message once.

It adds nothing up, and what it cannot read it hands over as such: a message nobody understands must not stop who counts.
"""

import logging

import msgspec

from events.codec import UNREADABLE, StoredMessage
from events.follower import MAX_ITEMS
from events.log import StoredUsage, StreamIdentity, Unavailable, UsagePage
from events.lookup import NoStream, StreamReads
from events.pull import Lost, StandingPull
from schemas.usage import UsageBatch

log = logging.getLogger(__name__)

SHORTEST_REST_S = 0.05
LONGEST_REST_S = 60.0
"""Between two looks for a stream that is not there: twice as long with each."""

_BATCH = msgspec.json.Decoder(UsageBatch)


def decode_usage(message: StoredMessage) -> StoredUsage:
    """One stored message, or why it cannot be read."""
    try:
        return StoredUsage(seq=message.seq, batch=_BATCH.decode(message.payload))
    except UNREADABLE as error:
        return StoredUsage(seq=message.seq, batch=None, problem=str(error))


def is_other(identity: StreamIdentity, known: StreamIdentity | None, position: int) -> bool:
    """Whether a stream is not the one that was read up to `position`: made anew, or put back to before it."""
    if position == 0:
        return False
    if known is None or identity.last_seq < position:
        return True
    return (known.stream_id, known.created) != (identity.stream_id, identity.created)


class JetStreamUsageFollower:
    """See events.log.UsageFollower."""

    def __init__(
        self,
        pull: StandingPull,
        reads: StreamReads,
        *,
        after: int,
        identity: StreamIdentity | None,
    ) -> None:
        self._pull = pull
        self._reads = reads
        self._position = after
        self._identity = identity
        self._open = False
        self._reset = False
        self._rest_s = SHORTEST_REST_S

    async def next(self) -> UsagePage:
        """See UsageFollower.next."""
        while True:
            if not self._open:
                page = await self._reopen()
                if page is not None:
                    return page
                continue
            try:
                taken, connected = await self._pull.take(MAX_ITEMS)
            except Lost as lost:
                log.info("usage follower reopens", extra={"why": str(lost)})
                self._open = False
                continue
            if not connected:
                self._open = False
                continue
            message, pending = taken[-1]
            self._position = message.seq
            return self._page(tuple(decode_usage(m) for m, _ in taken), synced=pending == 0)

    async def close(self) -> None:
        """Deletes the consumer."""
        await self._pull.close()

    async def _reopen(self) -> UsagePage | None:
        """A page without items when nothing was waiting or what was read so far is void; None: look again."""
        await self._pull.wait_connected()
        try:
            identity = await self._reads.identity()
            if is_other(identity, self._identity, self._position):
                log.warning("the usage stream was replaced, reading from the beginning")
                self._position = 0
                self._reset = True
            self._identity = identity
            pending = await self._pull.open(self._position + 1)
        except NoStream:
            # A server without room for it has none, and nothing but a new server or a person makes one.
            await self._pull.rest(self._rest_s)
            self._rest_s = min(self._rest_s * 2, LONGEST_REST_S)
            return None
        except (Lost, Unavailable) as error:
            log.debug("usage follower cannot open", extra={"why": str(error)})
            await self._pull.pause()
            return None
        self._open = True
        self._rest_s = SHORTEST_REST_S
        return self._page((), synced=pending == 0) if pending == 0 or self._reset else None

    def _page(self, items: tuple[StoredUsage, ...], *, synced: bool) -> UsagePage:
        assert self._identity is not None, "nothing is read of a stream that was not looked at"
        reset, self._reset = self._reset, False
        return UsagePage(
            items=items,
            position=self._position,
            identity=self._identity,
            synced=synced,
            reset=reset,
        )
