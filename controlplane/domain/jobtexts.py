"""Keeps what a job says small and printable: its whole state goes into every event of it.

It words nothing itself.
"""

from typing import Final

import msgspec

DETAIL_BYTES: Final = 300
"""Of a step that is under way or done."""

ERROR_BYTES: Final = 700
"""Of what a job failed with; it stands on the step and on the job."""

REPLY_BYTES: Final = 800
REQUEST_BYTES: Final = 1600
"""Of all that was asked for, as JSON; the state of a job stays below 8 KiB."""

_PLAIN: Final = frozenset("\n")


def size_of(text: str) -> int:
    """Bytes of the text in an event."""
    return len(msgspec.json.encode(text)) - 2


def clipped(text: str, most: int) -> str:
    """At most `most` bytes of the text as an event holds it, cut with an ellipsis.

    What no terminal should get (control characters but the line break, halves of surrogate pairs) becomes
    a space.
    """
    plain = "".join(c if c.isprintable() or c in _PLAIN else " " for c in text).strip()
    if size_of(plain) <= most:
        return plain
    kept: list[str] = []
    left = most - size_of("…")
    for character in plain:
        left -= size_of(character)
        if left < 0:
            break
        kept.append(character)
    return "".join(kept).rstrip() + "…"


def files(count: int) -> str:
    return "1 file" if count == 1 else f"{count} files"


def replicas(count: int) -> str:
    return "1 replica" if count == 1 else f"{count} replicas"
