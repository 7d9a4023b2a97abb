"""Says what is wrong with an ask about cards before anybody decides on it: its names, ids and numbers.

It knows no card and no lease. Whether an ask is granted is decided elsewhere, and never about one that is
wrong here.
"""

import re
import unicodedata
from typing import Final

from schemas.cardasks import (
    CardAsk,
    ClaimEnd,
    ClaimStart,
    LeaseAcquire,
    LeaseRelease,
    VmAttach,
    VmDetach,
)

NAME_LENGTH: Final = 64
MOST_CARDS: Final = 64
MOST_BYTES: Final = 2**60
LONGEST_DAYS: Final = 366
LONGEST_S: Final = LONGEST_DAYS * 86400.0
"""Of a wait or a life, in seconds; whoever wants longer gives none."""

_LEASE_ID: Final = re.compile(r"l-[a-z2-7]{10}")
_CLAIM_ID: Final = re.compile(r"c-[a-z2-7]{10}")
_UNFIT: Final = frozenset({"Cc", "Cs", "Zl", "Zp"})
"""Unicode categories that would break a line of a list, or are no text at all."""


def wrong_with(ask: CardAsk) -> str:
    """A sentence about the first thing wrong, empty when nothing is."""
    match ask:
        case LeaseAcquire():
            return (
                _id(ask.id, _LEASE_ID, "l-")
                or _name(ask.name, "name")
                or _cards(ask.cards)
                or _acquire(ask)
                or _pid(ask.process)
            )
        case ClaimStart():
            return (
                _id(ask.id, _CLAIM_ID, "c-")
                or _name(ask.name, "name")
                or _cards((ask.card,))
                or _pid(ask.process)
            )
        case VmAttach():
            return _name(ask.name, "name") or _cards((ask.card,)) or _wait(ask.wait_s)
        case VmDetach():
            return _cards((ask.card,)) or (_name(ask.name, "name") if ask.name else "")
        case LeaseRelease() | ClaimEnd():
            return _name(ask.what, "id or name")


def _id(id_: str, form: re.Pattern[str], prefix: str) -> str:
    if form.fullmatch(id_):
        return ""
    return f"an id is {prefix} and ten base32 characters (a-z, 2-7), not {_shown(id_)}"


def _name(name: str, what: str) -> str:
    if not name.strip():
        return f"the {what} is empty"
    if len(name) > NAME_LENGTH:
        return f"the {what} has {len(name)} characters, at most {NAME_LENGTH} are allowed"
    unfit = next((c for c in name if unicodedata.category(c) in _UNFIT), None)
    if unfit is not None:
        return f"the {what} holds the control character U+{ord(unfit):04X}"
    return ""


def _cards(cards: tuple[str, ...]) -> str:
    if not cards:
        return "no card is named"
    if len(cards) > MOST_CARDS:
        return f"{len(cards)} cards are named, at most {MOST_CARDS} are allowed"
    twice = next((card for card in cards if cards.count(card) > 1), None)
    if twice is not None:
        return f"card {_shown(twice)} is named twice"
    return next((said for card in cards if (said := _name(card, "name of a card"))), "")


def _acquire(ask: LeaseAcquire) -> str:
    if ask.memory_bytes is not None and not 0 < ask.memory_bytes <= MOST_BYTES:
        return f"memory of {ask.memory_bytes} bytes cannot be leased"
    if ask.ttl_s is not None and not 0 < ask.ttl_s <= LONGEST_S:
        return (
            f"a lease of {ask.ttl_s:g} s cannot be given: more than 0, {LONGEST_DAYS} days at most"
        )
    return _wait(ask.wait_s)


def _wait(wait_s: float) -> str:
    if 0 <= wait_s <= LONGEST_S:
        return ""
    return f"a wait of {wait_s:g} s is not possible: 0 or more, {LONGEST_DAYS} days at most"


def _pid(pid: int | None) -> str:
    return "" if pid is None or 0 < pid < 2**31 else f"{pid} is no process id"


def _shown(text: str) -> str:
    """Quoted, and short enough for a sentence."""
    return ascii(text if len(text) <= NAME_LENGTH else text[:NAME_LENGTH] + "...")
