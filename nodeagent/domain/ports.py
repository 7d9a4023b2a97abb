"""Chooses the port of the next engine: round robin over a range, none again before it has rested.

A client of a dead engine may still hold its address; a port given again at once would hand that
client another engine's answers. Whether a port is in use right now is told by the caller.
"""

from collections.abc import Callable
from datetime import datetime, timedelta

from msgspec import Struct
from msgspec.structs import replace


class PortBook(Struct, frozen=True, kw_only=True):
    """What was given: `cursor` is the port to try next, `given` when each resting port was given last."""

    first: int
    last: int
    rest_s: float
    cursor: int = 0
    given: dict[int, datetime] = {}


class NoPort(Exception):
    """Every port of the range is in use or resting."""


def give(book: PortBook, now: datetime, is_free: Callable[[int], bool]) -> tuple[int, PortBook]:
    """The next port and the book that remembers it.

    `is_free` is asked for a candidate only, in order. Raises NoPort when a whole round found none.
    """
    rested = timedelta(seconds=book.rest_s)
    given = {port: at for port, at in book.given.items() if now - at < rested}
    count = book.last - book.first + 1
    start = book.cursor if book.first <= book.cursor <= book.last else book.first
    for step in range(count):
        port = book.first + (start - book.first + step) % count
        if port in given or not is_free(port):
            continue
        after = book.first + (port - book.first + 1) % count
        return port, replace(book, cursor=after, given={**given, port: now})
    raise NoPort(
        f"none of the {count} ports {book.first}-{book.last} is free and rested for {book.rest_s:g} s"
    )


def keep_resting(book: PortBook, port: int, now: datetime) -> PortBook:
    """The book after the engine on `port` ended at `now`: its rest begins again."""
    return replace(book, given={**book.given, port: now})
