"""Decides after a failed attempt: wait and try again, or give up; one bound, from the last new byte on."""

from typing import Final

from msgspec import Struct

FIRST_DELAY_S: Final = 0.25
LONGEST_DELAY_S: Final = 30.0
LONGEST_SILENCE_S: Final = 30.0
TRIES_OF_A_MIRROR: Final = 3
"""Failures in a row without a byte after which another mirror is given up; the last source has the bound."""


class Again(Struct, frozen=True, kw_only=True):
    """Try again after `wait_s` seconds."""

    wait_s: float


class Enough(Struct, frozen=True, kw_only=True):
    """No more tries: the bound has passed, or the next one would lie behind it."""


def delay_s(failures: int, chance: float) -> float:
    """Doubles with each of `failures` (at least 1) in a row; `chance` in [0, 1] spreads over its upper half."""
    longest = min(LONGEST_DELAY_S, FIRST_DELAY_S * 2 ** min(failures - 1, 16))
    return longest * (0.5 + chance / 2)


def after_failure(
    *,
    silent_s: float,
    bound_s: float,
    failures: int,
    chance: float,
    retry_after_s: float | None = None,
    last_source: bool = True,
) -> Again | Enough:
    """What comes after the `failures`-th failure in a row, `silent_s` seconds after the last new byte.

    1 the bound has passed, or a source that is not the last used up its tries: enough
    2 the server asks for a pause longer than what is left: enough, waiting would be in vain
    3 the server's pause, if it names one, else the backoff; at most what is left, for one last try
    """
    left_s = bound_s - silent_s
    if left_s <= 0 or (not last_source and failures >= TRIES_OF_A_MIRROR):  # 1
        return Enough()
    if retry_after_s is not None:
        return Again(wait_s=retry_after_s) if retry_after_s < left_s else Enough()  # 2, 3
    return Again(wait_s=min(delay_s(failures, chance), left_s))  # 3


def longest_silence_s(bound_s: float) -> float:
    """How long a connection may stand still before another is tried, well within the bound."""
    return min(LONGEST_SILENCE_S, bound_s / 3)
