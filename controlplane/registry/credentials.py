"""Holds the registry's token so that it shows in no log, repr or exception text.

It says nowhere when a token is used: listing.py and ranges.py send it, to the registry's own host alone.
"""

from typing import Final

HIDDEN: Final = "***"


class Token:
    """A token that was given; an empty one is none (see `read_token`)."""

    __slots__ = ("_text",)

    def __init__(self, text: str) -> None:
        self._text = text

    def reveal(self) -> str:
        """The token itself, for a request's header and nothing else."""
        return self._text

    @property
    def sendable(self) -> bool:
        """Whether it can stand in a header at all: one with spaces or other alphabets is no token."""
        return self._text.isascii() and self._text.isprintable() and " " not in self._text

    def hide(self, sentence: str) -> str:
        """`sentence` without the token, should a foreign text have repeated it."""
        return sentence.replace(self._text, HIDDEN)

    def __repr__(self) -> str:
        return f"Token({HIDDEN})"

    def __reduce__(self) -> str:
        raise TypeError("a token is not written anywhere")


def read_token(text: str | None) -> Token | None:
    """The token in `text`; None when there is only white space, or nothing."""
    given = (text or "").strip()
    return Token(given) if given else None
