"""Remembers which replica gave a response its id, so that it can be asked for again: only that engine holds it.

It is bounded and forgets the least lately used; nothing depends on it but such questions. Pure.
"""

import re
from typing import Final

from msgspec import Struct

MOST_KEPT: Final = 16 * 1024

_ID: Final = re.compile(rb'"id"[ \t\r\n]*:[ \t\r\n]*"(resp[A-Za-z0-9_-]{1,124})"')
_SEARCHED: Final = 16 * 1024


class Kept(Struct, frozen=True):
    """Where a response is: the model's or adapter's name as the client wrote it, and the replica. `owner` is the
    id of the key that asked for it, empty without keys."""

    name: str
    replica: str
    owner: str = ""


class ResponseIds:
    """Ids of responses, of one gateway's life."""

    __slots__ = ("_kept", "_most")

    def __init__(self, most: int = MOST_KEPT) -> None:
        self._most = most
        self._kept: dict[str, Kept] = {}

    def keep(self, response: str, kept: Kept) -> None:
        """A response with this id was begun there."""
        self._kept.pop(response, None)
        self._kept[response] = kept
        if len(self._kept) > self._most:
            del self._kept[next(iter(self._kept))]

    def find(self, response: str, owner: str = "") -> Kept | None:
        """Where it is; to any other key than the one that asked for it the id is unknown."""
        kept = self._kept.get(response)
        if kept is None or kept.owner != owner:
            return None
        self._kept[response] = self._kept.pop(response)
        return kept

    def __len__(self) -> int:
        return len(self._kept)


def id_in(block: bytes) -> str | None:
    """The id of the response that an answer begins with, whole or as a stream of events; None: it tells none there."""
    found = _ID.search(block, 0, _SEARCHED)
    return None if found is None else found[1].decode("ascii")
