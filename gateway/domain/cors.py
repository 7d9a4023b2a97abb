"""Decides which CORS headers an answer carries, so that a browser may call the gateway from a page.

Every real answer gets them, refusals and streams included: without them a browser hides the reason
of a 503 from its page. Pure.
"""

from collections.abc import Sequence
from typing import Final

HeaderPairs = tuple[tuple[bytes, bytes], ...]

_TOKEN: Final = frozenset(
    b"!#$%&'*+-.^_`|~0123456789abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ"
)
_MAX_NAMES: Final = 64
_EXPOSED: Final = b", ".join(
    (
        b"x-request-id, request-id, retry-after, x-should-retry, x-yard-waited-ms, x-yard-adapter",
        b"x-yard-model, x-yard-replica, x-yard-why, x-yard-loading",
        b"x-ratelimit-limit-requests, x-ratelimit-remaining-requests, x-ratelimit-reset-requests",
        b"x-ratelimit-limit-tokens, x-ratelimit-remaining-tokens, x-ratelimit-reset-tokens",
    )
)
_MAX_AGE_S: Final = b"600"


def allowed_origin(origin: bytes | None, allowed: Sequence[str]) -> bytes | None:
    """What to answer as the allowed origin; None: no CORS headers at all."""
    if origin is None:
        return None
    if "*" in allowed:
        return b"*"
    return origin if origin.decode("latin-1") in allowed else None


def answer_headers(origin: bytes | None, allowed: Sequence[str]) -> HeaderPairs:
    """The headers of a real answer."""
    permitted = allowed_origin(origin, allowed)
    if permitted is None:
        return ()
    headers: HeaderPairs = (
        (b"access-control-allow-origin", permitted),
        (b"access-control-expose-headers", _EXPOSED),
    )
    return headers if permitted == b"*" else (*headers, (b"vary", b"origin"))


def preflight_headers(requested: bytes | None) -> HeaderPairs:
    """The headers a preflight adds: methods, and the requested header names that are header names.

    Echoing is safe because no header of a browser carries an authority of its own here; checking
    keeps a crafted list from splitting the answer.
    """
    names = [n.strip().lower() for n in (requested or b"").split(b",")]
    valid = [n for n in names if n and _TOKEN.issuperset(n)][:_MAX_NAMES]
    headers: HeaderPairs = (
        (b"access-control-allow-methods", b"GET, HEAD, POST, DELETE, OPTIONS"),
        (b"access-control-max-age", _MAX_AGE_S),
        (b"vary", b"origin, access-control-request-headers"),
    )
    if valid:
        headers = (*headers, (b"access-control-allow-headers", b", ".join(valid)))
    return headers
