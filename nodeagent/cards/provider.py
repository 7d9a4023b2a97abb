"""Says what a provider of cards and the meter over all of them are, for whoever reads or needs a reading.

Providers only measure. What a figure means (free, stuck, a stowaway to report) is decided elsewhere.
"""

from collections.abc import Mapping
from typing import Protocol

from msgspec import Struct

from schemas.card import Provider as ProviderName
from schemas.node import CardInfo


class Seen(Struct, frozen=True, kw_only=True):
    """A process the driver shows on a card."""

    pid: int
    name: str
    memory_bytes: int


class Reading(Struct, frozen=True, kw_only=True):
    """What one card shows at one moment. `of` is the use by holder (replica or lease id), as far as it can
    be told apart; `strangers` are processes that belong to no holder; `other_bytes` is all use that
    belongs to none (strangers, a display, the driver)."""

    card: str
    used_bytes: int
    of: Mapping[str, int] = {}
    other_bytes: int = 0
    strangers: tuple[Seen, ...] = ()


class Provider(Protocol):
    """One source of cards. Methods block (up to a second): call them in a thread."""

    name: ProviderName

    def cards(self) -> tuple[CardInfo, ...]:
        """The cards it has, in a stable order; none where there is no driver."""
        ...

    def read(self, holders: Mapping[str, frozenset[int]]) -> dict[str, Reading]:
        """A reading of each of its cards. `holders` are the live pids of every holder of this node."""
        ...

    def environment(self, cards: tuple[str, ...]) -> dict[str, str]:
        """What a process needs in its environment to see these cards of the node and no other."""
        ...

    def close(self) -> None: ...


class Meter(Protocol):
    """Reads all cards of the node (nodeagent/cards/meter.py)."""

    async def look(self) -> tuple[Reading, ...]:
        """One reading of every card."""
        ...

    async def held_by(self, holder: str, card: str) -> int:
        """Bytes `holder` has on `card` now; 0 when nothing is left. What a parked engine keeps in RAM
        counts on `cpu` and not on a card without a meter of its own."""
        ...

    def environment(self, cards: tuple[str, ...]) -> dict[str, str]:
        """As `Provider.environment`, for cards of any provider; an engine on `cpu` sees no gpu."""
        ...
