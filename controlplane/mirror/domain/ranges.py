"""Reads the two headers that speak of parts of a file: Range (asked of us) and Content-Range (answered to us)."""

import re
from typing import Final

from msgspec import Struct

_RANGE: Final = re.compile(r"\s*bytes\s*=\s*(\d*)\s*-\s*(\d*)\s*", re.IGNORECASE | re.ASCII)
_CONTENT: Final = re.compile(r"bytes\s+(\d+)-(\d+)/(\d+|\*)", re.IGNORECASE | re.ASCII)
_UNSATISFIED: Final = re.compile(r"bytes\s+\*/(\d+)", re.IGNORECASE | re.ASCII)
_DIGITS: Final = 19
"""Longer numbers are no position in a file, and int() takes ever longer over them."""


class Part(Struct, frozen=True, kw_only=True):
    """The bytes from `first` up to, not including, `end`."""

    first: int
    end: int

    @property
    def length(self) -> int:
        return self.end - self.first


class Unsatisfiable(Struct, frozen=True, kw_only=True):
    """A range that begins behind the end of the file: the answer is 416."""


def asked_part(header: str | None, size: int) -> Part | Unsatisfiable | None:
    """What a Range header asks of a file of `size` bytes; None: the whole file.

    1 no header, another unit, several ranges, nonsense: the whole, as RFC 9110 allows
    2 `a-b`, `a-`: from a, at most to the end   3 `-n`: the last n   4 nothing left of it: Unsatisfiable
    """
    match = _RANGE.fullmatch(header) if header is not None else None
    if match is None:  # 1
        return None
    first, last = match.group(1), match.group(2)
    if max(len(first), len(last)) > _DIGITS or not (first or last):
        return None
    if first:
        if last and int(last) < int(first):
            return None
        if int(first) >= size:  # 4
            return Unsatisfiable()
        return Part(first=int(first), end=min(int(last) + 1, size) if last else size)  # 2
    if int(last) == 0 or size == 0:  # 4
        return Unsatisfiable()
    return Part(first=max(0, size - int(last)), end=size)  # 3


def if_range_holds(header: str | None, etag: str) -> bool:
    """Whether the part may be sent. A date, a weak or another tag means: send the whole."""
    return header is None or header.strip() == etag


def tags_match(header: str | None, etag: str) -> bool:
    """Whether If-None-Match names `etag`; weak tags compare equal here, as RFC 9110 says."""
    if header is None:
        return False
    tags = [tag.strip().removeprefix("W/") for tag in header.split(",")]
    return etag in tags or "*" in tags


class ContentRange(Struct, frozen=True, kw_only=True):
    """What a 206 says it holds. `total` None: it does not say how long the file is."""

    part: Part
    total: int | None


def content_range(header: str | None) -> ContentRange | None:
    """None for a header that is missing or says nothing that could be true."""
    match = _CONTENT.fullmatch(header.strip()) if header is not None else None
    if match is None or max(map(len, match.groups())) > _DIGITS:
        return None
    first, last = int(match.group(1)), int(match.group(2))
    total = None if match.group(3) == "*" else int(match.group(3))
    if last < first or (total is not None and last >= total):
        return None
    return ContentRange(part=Part(first=first, end=last + 1), total=total)


def unsatisfied_total(header: str | None) -> int | None:
    """The size of the file a 416 tells in `bytes */n`."""
    match = _UNSATISFIED.fullmatch(header.strip()) if header is not None else None
    return None if match is None or len(match.group(1)) > _DIGITS else int(match.group(1))
