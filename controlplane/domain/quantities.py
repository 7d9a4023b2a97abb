"""Reads sizes and durations as people write them in a catalog; it decides nothing about their use."""

import re
from collections.abc import Mapping
from typing import Final

_BYTES: Final[dict[str, int]] = {
    "": 1,
    "b": 1,
    "kib": 1024,
    "mib": 1024**2,
    "gib": 1024**3,
    "tib": 1024**4,
    "kb": 1000,
    "mb": 1000**2,
    "gb": 1000**3,
    "tb": 1000**4,
}
_SECONDS: Final[dict[str, float]] = {
    "": 1.0,
    "ms": 0.001,
    "s": 1.0,
    "m": 60.0,
    "h": 3600.0,
    "d": 86400.0,
}
_QUANTITY: Final = re.compile(r"(\d+(?:\.\d+)?) ?([A-Za-z]*)", re.ASCII)

SIZE: Final = "a size such as 512MiB or 8GiB"
DURATION: Final = "a duration such as 5s, 15m or 8h"

_LARGEST: Final = 2.0**53
"""Beyond this a float no longer tells neighbouring whole numbers apart; nothing real is larger."""


def read_bytes(given: object) -> int | None:
    """Whole bytes of `8GiB`, `500MB` or a number; None when it is neither."""
    found = _read(given, _BYTES)
    return None if found is None else round(found)


def read_seconds(given: object) -> float | None:
    """Seconds of `5s`, `15m`, `250ms` or a number; None when it is neither."""
    return _read(given, _SECONDS)


def _read(given: object, units: Mapping[str, float]) -> float | None:
    # bool is an int in Python; `memory: yes` is a mistake and not one byte.
    if isinstance(given, bool):
        return None
    if isinstance(given, int | float):
        return float(given) if 0 <= given <= _LARGEST else None
    if not isinstance(given, str):
        return None
    found = _QUANTITY.fullmatch(given.strip())
    if found is None or found[2].lower() not in units:
        return None
    value = float(found[1]) * units[found[2].lower()]
    return value if value <= _LARGEST else None


def show_bytes(size: int) -> str:
    """`1.5 GiB`: one figure for a person, in binary units."""
    amount, unit = float(size), "B"
    for larger in ("KiB", "MiB", "GiB", "TiB"):
        if amount < 1024:
            break
        amount, unit = amount / 1024, larger
    return f"{amount:.1f} {unit}".replace(".0 ", " ")


def show_seconds(seconds: float) -> str:
    """`90 s`, `15 min`, `8 h`: the largest unit that stays whole."""
    for unit, length in (("h", 3600), ("min", 60)):
        if seconds >= length and seconds % length == 0:
            return f"{seconds / length:.0f} {unit}"
    return f"{seconds:g} s"
