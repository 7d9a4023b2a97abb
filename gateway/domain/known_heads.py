"""Recognises a message head that differs from one that was read before by the digits of its Content-Length alone.

Senders write the same head again and again on one connection; what it means need not be worked out again. An answer's
Date may differ too, for it goes nowhere. Any other difference, by one byte, and the head is read anew: this decides
nothing about what is accepted.
"""

import re
from typing import Final

from gateway.domain.http_rules import MAX_LENGTH_DIGITS

_VARIES: Final = re.compile(
    rb"\r\n(?:(content-length):[ \t]*([0-9]+)[ \t]*|date:[ \t]*([A-Za-z0-9,: ]{29}))(?=\r\n)",
    re.IGNORECASE,
)
_DATE_BYTES: Final = 29
_NOT_IN_DATES: Final = bytes(range(256)).translate(
    None, b"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789,: "
)


class KnownHead:
    """One head that was accepted, cut at what may differ. Made by `known_head`."""

    __slots__ = ("_after", "_before", "_between", "_date_first", "_fixed", "_start")

    def __init__(
        self, before: bytes, between: bytes, after: bytes, date_first: bool | None
    ) -> None:
        """`date_first`: the date stands before the length; None: no date may differ, `between` is empty."""
        self._before = before
        self._between = between
        self._after = after
        self._date_first = date_first
        self._fixed = len(before) + len(between) + len(after)
        if date_first is not None:
            self._fixed += _DATE_BYTES
        self._start = len(before)  # of the digits
        if date_first:
            self._start += _DATE_BYTES + len(between)

    def length_in(self, head: bytes) -> int:
        """The Content-Length of `head` when it is this one but for that (and the date); -1 when it is not."""
        count = len(head) - self._fixed
        if not 0 < count <= MAX_LENGTH_DIGITS:
            return -1
        start = self._start
        digits = head[start : start + count]
        if not (digits.isdigit() and head.startswith(self._before) and head.endswith(self._after)):
            return -1
        if self._date_first is None:
            return int(digits)
        if self._date_first:
            date = len(self._before)
            between = head[date + _DATE_BYTES : start]
        else:
            date = start + count + len(self._between)
            between = head[start + count : date]
        when = head[date : date + _DATE_BYTES]
        if between != self._between or when.translate(None, _NOT_IN_DATES) != when:
            return -1
        return int(digits)


def known_head(head: bytes, *, date: bool = False) -> KnownHead | None:
    """`head`, which was read and accepted, for the next one like it; None for one without a length to differ by.

    `date`: that of its Date header may differ too.
    """
    length: tuple[int, int] | None = None
    when: tuple[int, int] | None = None
    for match in _VARIES.finditer(head):
        if match[1] is not None:
            if length is not None:
                return None
            length = match.span(2)
        elif date:
            if when is not None:
                return None
            when = match.span(3)
    if length is None:
        return None
    if when is None:
        return KnownHead(head[: length[0]], b"", head[length[1] :], None)
    first, second = sorted((length, when))
    return KnownHead(head[: first[0]], head[first[1] : second[0]], head[second[1] :], first is when)
