"""Judges stored messages in stream order: decoded, and measured against the epochs seen before.

One `Reader` per follower, real or in memory. It looks nothing up: where a first pass needs the state before
a broken message, the follower fetches that subject's history and asks `newest_valid`.
"""

from collections.abc import Iterable

import msgspec

from events.codec import StoredMessage, decode_event
from events.epochs import Epochs
from events.log import Broken, Recorded
from events.lookup import StreamReads
from events.subjects import PREFIX

STALE = "stale epoch"


class Reader:
    """Decodes one reader's messages; `forget` when the history was replaced."""

    def __init__(self, prefix: str = PREFIX) -> None:
        self._prefix = prefix
        self._epochs = Epochs()

    def read(self, message: StoredMessage) -> Recorded | Broken:
        """The message as an item; every message of the follower must pass here once, in order."""
        item = decode_event(message, self._prefix)
        if isinstance(item, Broken) or item.problem is not None:
            return item
        if self._epochs.is_stale(item):
            return Broken(seq=item.seq, subject=item.subject, why=f"{STALE} {item.epoch}")
        self._epochs.show(item)
        return item

    def newest_valid(self, broken: Broken, history: Iterable[StoredMessage]) -> Broken:
        """`broken` with the newest state before it that can be read and was not stale."""
        previous: Recorded | None = None
        for message in history:
            if message.seq >= broken.seq:
                break
            item = decode_event(message, self._prefix)
            if isinstance(item, Broken) or item.problem is not None:
                continue
            if not self._epochs.is_stale(item):
                previous = item
        if previous is None:
            return broken
        self._epochs.show(previous)
        return msgspec.structs.replace(broken, previous=previous)

    def forget(self) -> None:
        """Nothing read so far counts any more."""
        self._epochs.forget()


async def read_last(
    reads: StreamReads, subject: str, prefix: str = PREFIX
) -> Recorded | Broken | None:
    """A subject's last message; a broken one comes with the newest readable one before it."""
    message = await reads.last(subject)
    if message is None:
        return None
    item = decode_event(message, prefix)
    if isinstance(item, Recorded):
        return item
    return Reader(prefix).newest_valid(item, await reads.history(subject, message.seq))
