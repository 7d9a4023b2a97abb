"""Says how much memory a start needs and how an amount reads; it knows nothing of cards or rank."""

from typing import Final

from schemas.model import Profile
from schemas.record import Measured, Record

MARGIN_PERCENT: Final = 110
"""A measured use is reserved with a tenth more: the next load is rarely byte for byte the same."""

_GIB: Final = 1024**3
_MIB: Final = 1024**2


def amount(size_bytes: int) -> str:
    """An amount of memory for a person: `9.2 GiB`, or `512 MiB` below one."""
    if size_bytes >= _GIB:
        return f"{size_bytes / _GIB:.1f} GiB"
    return f"{size_bytes / _MIB:.0f} MiB"


def measured(record: Record | None, profile: str, card_kind: str) -> Measured | None:
    """What the record knows of this profile on this kind of card."""
    if record is None:
        return None
    for entry in record.measured:
        if entry.profile == profile and entry.card_kind == card_kind:
            return entry
    return None


def needed_bytes(profile: Profile, card_kind: str, record: Record | None) -> int:
    """Bytes on each card: 1.1 x the measured use when there is one, else what the profile states.

    What was measured of a replica on several cards is shared among them, and no less than what is stated:
    they need not be equal.
    """
    known = measured(record, profile.name, card_kind)
    if known is None or known.memory_bytes <= 0:
        return profile.memory_bytes
    if profile.cards == 1:
        return known.memory_bytes * MARGIN_PERCENT // 100
    share = -(-known.memory_bytes // profile.cards)
    return max(profile.memory_bytes, share * MARGIN_PERCENT // 100)


def expected_load_s(record: Record | None, profile: str, card_kind: str) -> float | None:
    """The median of the last load times, None when nothing was loaded yet."""
    known = measured(record, profile, card_kind)
    return _median(known.load_s) if known is not None else None


def expected_resume_s(record: Record | None, profile: str, card_kind: str) -> float | None:
    """The median of the last times it took to bring a parked replica back, None when none did yet."""
    known = measured(record, profile, card_kind)
    return _median(known.resume_s) if known is not None else None


def _median(times: tuple[float, ...]) -> float | None:
    return sorted(times)[len(times) // 2] if times else None
