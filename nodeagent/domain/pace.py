"""Decides whether one more event about a replica's adapters may be told now, or is told with a later one.

Clients decide how often adapters are swapped, so without a bound their traffic would fill the log and delay what
the agent has to say of other replicas. It decides when, never what; moments are handed in.
"""

from typing import Final

from msgspec import Struct

AT_ONCE: Final = 20
"""So many are told one after the other as they happen; whoever watches a quiet yard misses nothing."""

EVERY_S: Final = 1.0
"""Beyond those one is told each second: every event holds the whole state, so the newest says it all."""


class Pace(Struct, frozen=True, kw_only=True):
    """`left` may be told at once as of `at`, in seconds of the agent's monotonic clock."""

    at: float
    left: float = AT_ONCE


def take(pace: Pace, at: float) -> tuple[Pace, float]:
    """The pace after one that wants to be told at `at`, and in how many seconds it may: 0.0 is now, and counted.

    >>> take(Pace(at=0.0, left=1.0), 0.0)
    (Pace(at=0.0, left=0.0), 0.0)
    >>> take(Pace(at=0.0, left=0.0), 0.25)
    (Pace(at=0.25, left=0.25), 0.75)
    """
    left = min(pace.left + max(at - pace.at, 0.0) / EVERY_S, float(AT_ONCE))
    if left < 1.0:
        return Pace(at=at, left=left), (1.0 - left) * EVERY_S
    return Pace(at=at, left=left - 1.0), 0.0
