"""Says what a way to park an engine is: how its weights leave the card while its process lives, and return.

A way does one engine's part and nothing else: it neither drains, nor reads a card, nor proves that the engine
answers again; `nodeagent/parking.py` does, for every way alike. Nor does it end what it cannot park.
"""

from typing import Protocol

from msgspec import Struct

from schemas.model import Parking, ParkWay


class ParkFault(Exception):
    """It was not parked, or not resumed, and its process counts as lost. The text is a sentence."""


class Parkable(Struct, frozen=True, kw_only=True):
    """One drained engine: where it answers, with which key, and its processes.

    `pid` is its main process, `pids` all of its launch.
    """

    replica: str
    model: str
    endpoint: str
    key: str
    pid: int
    pids: tuple[int, ...]
    parking: Parking


class Way(Protocol):
    """One way to park. Both steps may be cancelled; the caller bounds them. An engine is in one at a time."""

    name: ParkWay

    async def park(self, engine: Parkable) -> None:
        """Has the engine give its card back. Returns when it says it did. Raises ParkFault."""
        ...

    async def resume(self, engine: Parkable) -> None:
        """Has the engine take its card again; what is half done already is done again. Raises ParkFault."""
        ...
