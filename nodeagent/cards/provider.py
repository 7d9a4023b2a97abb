"""Says what a provider of cards and the meter over all of them are, for whoever reads or needs a reading.

Providers only measure. What a figure means (free, stuck, a stowaway to report) is decided elsewhere.
"""

from collections.abc import Collection, Mapping
from typing import Protocol

from msgspec import Struct

from schemas.card import Provider as ProviderName
from schemas.node import CardInfo


class Seen(Struct, frozen=True, kw_only=True):
    """A process the driver shows on a card. `here`: this machine's /proc shows it too; a process of
    another container may be seen by the driver alone."""

    pid: int
    name: str
    memory_bytes: int
    here: bool = True


class Reading(Struct, frozen=True, kw_only=True):
    """What one card shows at one moment. `of` is the use by holder (replica or lease id), as far as it can
    be told apart; `strangers` are processes that belong to no holder; `other_bytes` is all use that
    belongs to none (strangers, a display, the driver). `unexplained_bytes` is the part of `other_bytes`
    for which no process is shown."""

    card: str
    used_bytes: int
    of: Mapping[str, int] = {}
    other_bytes: int = 0
    strangers: tuple[Seen, ...] = ()
    unexplained_bytes: int = 0


class Left(Struct, frozen=True, kw_only=True):
    """What a holder still has on a card: `memory_bytes`, 0 when nothing is left, and in words what it is.

    A card that cannot be read has something left: nothing is known to be back.
    """

    memory_bytes: int
    told: str = ""


class Provider(Protocol):
    """One source of cards. Methods block (up to a second): call them in a thread, one at a time."""

    name: ProviderName

    def cards(self) -> tuple[CardInfo, ...]:
        """The cards it has, in a stable order; none where there is no driver."""
        ...

    def read(self, holders: Mapping[str, frozenset[int]]) -> dict[str, Reading]:
        """A reading of each of its cards that can be read. `holders` are the pids of every holder of this
        node: the live ones, and those of a holder that ended until its memory is back."""
        ...

    def let_go(self, cards: frozenset[str]) -> None:
        """From now on these cards are not read and nothing of them is kept open: they are a VM's."""
        ...

    def environment(self, cards: tuple[str, ...]) -> dict[str, str]:
        """What a process needs in its environment to see these cards of the node and no other."""
        ...

    def close(self) -> None: ...


class Meter(Protocol):
    """Reads all cards of the node (nodeagent/cards/meter.py)."""

    async def look(self) -> tuple[Reading, ...]:
        """One reading of every card that can be read."""
        ...

    def look_soon(self) -> None:
        """Something was given back or begun: the next look is taken at once instead of at its time."""
        ...

    async def held_by(self, holder: str, card: str) -> int:
        """Bytes `holder` has on `card` now; 0 when nothing is left. What a parked engine keeps in RAM
        counts on `cpu` and not on a card without a meter of its own."""
        ...

    async def use(self, holder: str) -> int:
        """Bytes `holder` has now on all cards where it is not parked, together."""
        ...

    async def left(self, holder: str, card: str) -> Left:
        """As `held_by`, and what it is in words, for who has to say why a lease is not free."""
        ...

    async def left_on(self, holder: str, cards: Collection[str]) -> dict[str, Left]:
        """As `left`, of several cards at once."""
        ...

    def environment(self, cards: tuple[str, ...]) -> dict[str, str]:
        """As `Provider.environment`, for cards of any provider; an engine on `cpu` sees no gpu."""
        ...
