"""Names a card as a URL or a scope does, and tells who a request on a card is for.

Pure values; whether such a card exists is what the table says (gateway/domain/table.py).
"""

from typing import Final

from msgspec import Struct

from schemas.cardnames import scope_of, suits
from schemas.model import Model
from schemas.node import CardInfo

MOST_NAMED: Final = 8
"""So many cards of a node a sentence lists."""


class CardRef(Struct, frozen=True, kw_only=True):
    """A card as a client named it: `/cards/<node>/<card>/...`, both decoded."""

    node: str
    card: str

    @property
    def scope(self) -> str:
        return scope_of(self.node, self.card)


class NodeCards(Struct, frozen=True, kw_only=True):
    """What of a machine's inventory a gateway needs: engines and memory are no request's business."""

    node: str
    cards: tuple[CardInfo, ...]


class KnownCard(Struct, frozen=True, kw_only=True):
    """A card that an agent reported."""

    ref: CardRef
    info: CardInfo


def serves(model: Model, known: KnownCard) -> bool:
    """Whether the model has a profile for that card; a card divided by MIG is left alone."""
    if known.info.mig:
        return False
    ref = known.ref
    return any(suits(p, ref.node, ref.card, known.info.kind) for p in model.profiles)


def listed(names: list[str]) -> str:
    """A few of the names for a sentence: `cpu, gpu0`; the rest as a number."""
    shown = ", ".join(names[:MOST_NAMED])
    more = len(names) - MOST_NAMED
    return f"{shown} and {more} more" if more > 0 else shown
