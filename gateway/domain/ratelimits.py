"""Counts what a key used in the last 60 seconds, and says what of its limits is told to who asks.

It must not decide who may go on (shares.py) and never asks a clock: times are seconds of the gateway's own.
"""

from functools import lru_cache
from typing import Final, Literal

from msgspec import Struct

from gateway.domain.answers import RETRY_MAX_S, RETRY_MIN_S, Answer, answer
from schemas.key import Key

SPAN_S: Final = 60
"""A limit is of any 60 seconds, wherever they begin."""

_BUCKETS: Final = SPAN_S + 1
"""The second that runs now and 60 whole ones: all that 60 seconds ending at any moment can touch. What is counted
leaves up to a second late, never early."""

NOT_YET_S: Final = _BUCKETS
"""In so many seconds all has left of what is used in the second that runs."""

What = Literal["requests", "tokens", "parallel"]


class Window:
    """A sum over the last 60 seconds, in buckets of one second. `total` is right after `move`."""

    __slots__ = ("_at", "_buckets", "_newest", "total")

    def __init__(self) -> None:
        self._at = 0
        self._newest = 0
        self._buckets = [0] * _BUCKETS
        self.total = 0

    def move(self, second: int) -> None:
        """Lets go of what is over 60 seconds old at this second."""
        steps = second - self._at
        if steps <= 0:
            return
        if self.total:
            buckets = self._buckets
            if steps >= _BUCKETS:
                self._buckets = [0] * _BUCKETS
                self.total = 0
            else:
                for gone in range(self._at + 1, second + 1):
                    self.total -= buckets[gone % _BUCKETS]
                    buckets[gone % _BUCKETS] = 0
        self._at = second

    def add(self, amount: int) -> None:
        """Counts `amount` in the second of the last `move`."""
        at = self._newest = self._at
        self._buckets[at % _BUCKETS] += amount
        self.total += amount

    def frees_s(self, amount: int) -> int:
        """In how many seconds at least `amount` of it has left; 61 when there is not so much in it."""
        freed = 0
        for step in range(1, _BUCKETS + 1):
            # The bucket that leaves next is the one this second's successor takes.
            freed += self._buckets[(self._at + step) % _BUCKETS]
            if freed >= amount:
                return step
        return _BUCKETS

    @property
    def empties_s(self) -> int:
        """In how many seconds all of it has left."""
        return _BUCKETS - (self._at - self._newest) if self.total else 0


class Refused(Struct, frozen=True, kw_only=True):
    """Which limit of a key has no room, and in how many seconds it has; None: when another request ends.

    `wanted` is what the request would have taken of it. `asks`: what other gateways say next may make room.
    """

    what: What
    limit: int
    wanted: int = 1
    frees_s: int | None = None
    asks: bool = False


class Reading(Struct, frozen=True, kw_only=True):
    """What is used of a key's limits as far as this gateway knows; `…_reset_s` until nothing is."""

    requests: int
    requests_reset_s: int
    tokens: int
    tokens_reset_s: int


UNUSED: Final = Reading(requests=0, requests_reset_s=0, tokens=0, tokens_reset_s=0)


def refusal(key: Key, refused: Refused) -> Answer:
    """429, with the sentence that says which limit it was and when there is room."""
    if refused.frees_s is None:
        left_s, when = RETRY_MIN_S, "when one of them ends"
    else:
        left_s = max(RETRY_MIN_S, min(RETRY_MAX_S, refused.frees_s))
        when = f"in {left_s} s"
    match refused.what:
        case "requests":
            limit = f"{_many(refused.limit, 'request')} in 60 s; there is room again {when}"
        case "tokens":
            limit = (
                f"{_many(refused.limit, 'token')} in 60 s, and this request may take {refused.wanted}; "
                f"there is room again {when}"
            )
        case "parallel":
            limit = f"{_many(refused.limit, 'request')} at once; there is room again {when}"
    return answer(
        "rate_limit_exceeded", f"The API key {key.name!r} is limited to {limit}.", retry_s=left_s
    )


def _many(count: int, what: str) -> str:
    return f"{count} {what}" if count == 1 else f"{count} {what}s"


def limit_headers(key: Key, reading: Reading) -> list[tuple[bytes, bytes]]:
    """`x-ratelimit-*` as OpenAI spells them, for the limits this key has."""
    return list(zip(_names(bool(key.rpm), bool(key.tpm)), _values(key, reading), strict=True))


def limit_lines(key: Key, reading: Reading) -> bytes:
    """The same, as lines of a head."""
    return _lines(bool(key.rpm), bool(key.tpm)) % _values(key, reading)


def _values(key: Key, reading: Reading) -> tuple[bytes, ...]:
    """What stands behind the `_names`, in their order."""
    found: tuple[bytes, ...] = ()
    if key.rpm:
        left = max(0, key.rpm - reading.requests)
        found = (b"%d" % key.rpm, b"%d" % left, _DURATIONS[reading.requests_reset_s])
    if key.tpm:
        left = max(0, key.tpm - reading.tokens)
        found += (b"%d" % key.tpm, b"%d" % left, _DURATIONS[reading.tokens_reset_s])
    return found


@lru_cache(maxsize=4)
def _names(requests: bool, tokens: bool) -> tuple[bytes, ...]:
    """The headers of a key whose limits are these."""
    limited = [
        what for what, is_limited in ((b"requests", requests), (b"tokens", tokens)) if is_limited
    ]
    told = (b"limit", b"remaining", b"reset")
    return tuple(b"x-ratelimit-%b-%b" % (of, what) for what in limited for of in told)


@lru_cache(maxsize=4)
def _lines(requests: bool, tokens: bool) -> bytes:
    """The same as lines without their values."""
    return b"".join(b"%b: %%b\r\n" % name for name in _names(requests, tokens))


_DURATIONS: Final = tuple(
    b"%ds" % s if s < 60 else b"%dm%ds" % divmod(s, 60) for s in range(_BUCKETS + 1)
)
