"""Says what a name of a card means: its scope in the log, and whether a profile is meant for it.

One definition for the control plane that places and the gateway that routes and lists (they may not import
one another). Pure; it knows no state of a card, that is schemas/cardstate.py.
"""

from collections.abc import Iterator
from fnmatch import fnmatchcase
from typing import Final

from schemas.model import Profile

ANY_SCOPE: Final = "any"
"""The scope of a request that names no card."""


def scope_of(node: str, card: str) -> str:
    """The scope of demands that only this card may answer."""
    return f"{node}~{card}"


def readings(scope: str) -> Iterator[tuple[str, str]]:
    """Every (node, card) a scope may mean: names may hold a `~` themselves. None for the scope of no card."""
    for at, sign in enumerate(scope):
        if sign == "~":
            yield scope[:at], scope[at + 1 :]


def is_named(wish: str, node: str, card: str) -> bool:
    """Whether a pattern of `node/card` names this card; a kind names none."""
    return "/" in wish and fnmatchcase(f"{node}/{card}", wish)


def suits(profile: Profile, node: str, card: str, kind: str) -> bool:
    """Whether the profile's `card` names this card by kind or by a pattern of `node/card`."""
    return any(wish == kind or is_named(wish, node, card) for wish in profile.card)
