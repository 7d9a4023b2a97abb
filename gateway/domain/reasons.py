"""Tells in headers which model and replica answered a request, and why it was that replica.

For people and for tests; nothing decides by it. Names go into a header as a URL writes them, for they may hold any
character.
"""

from functools import lru_cache
from urllib.parse import quote

from gateway.domain.routing import Why

HeaderPairs = tuple[tuple[bytes, bytes], ...]


@lru_cache(maxsize=4096)
def reason_headers(model: str, replica: str, why: Why, how: str = "") -> HeaderPairs:
    """`x-yard-model` (the catalog's name), `x-yard-replica` and `x-yard-why`; `x-yard-adapter` of an answer for one,
    `how` that came to be there."""
    adapter = ((b"x-yard-adapter", how.encode("ascii")),) if how else ()
    return (
        (b"x-yard-model", _written(model)),
        (b"x-yard-replica", _written(replica)),
        (b"x-yard-why", why.encode("ascii")),
        *adapter,
    )


def waited_header(waited_s: float) -> tuple[bytes, bytes]:
    """How long the request waited for its model or adapter; 0 for one that found it ready."""
    return b"x-yard-waited-ms", b"%d" % round(waited_s * 1000)


def _written(name: str) -> bytes:
    return quote(name, safe="/:@+,;=").encode("ascii")
