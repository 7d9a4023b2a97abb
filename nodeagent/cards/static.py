"""Measures cards that no driver tells of: the machine's RAM, and cards that were declared by hand.

Their use is what the processes started there hold in RAM, shared pages divided among those who share them.
It must not decide which holder counts where: it is told.
"""

import os
from collections.abc import Callable, Mapping, Sequence
from typing import Final

from msgspec import Struct

from nodeagent import processes
from nodeagent.cards.provider import Reading
from schemas.card import Provider as ProviderName
from schemas.node import CardInfo
from schemas.settings import MIB

MOVED_BYTES: Final = 32 * MIB
MOVED_PART: Final = 0.01
"""A holder's PSS is read anew when its resident memory moved by more than the smaller of the two. Reading
it walks every page the processes have: of a large model that takes a tenth of a second, each time."""


class _Last(Struct, frozen=True, kw_only=True):
    pids: frozenset[int]
    resident_bytes: int
    company: frozenset[str]
    bytes: int


class Static:
    """The `cpu` card and the declared ones. Not to be used from two threads at once."""

    name: ProviderName = "static"

    def __init__(
        self, infos: Sequence[CardInfo], placed: Callable[[], Mapping[str, tuple[str, ...]]]
    ) -> None:
        """`placed` tells on which of these cards each holder counts; it is called from a thread."""
        self._infos = tuple(infos)
        self._placed = placed
        self._last: dict[str, _Last] = {}

    def cards(self) -> tuple[CardInfo, ...]:
        return self._infos

    def read(self, holders: Mapping[str, frozenset[int]]) -> dict[str, Reading]:
        """A reading of each card: the sum over its holders, each split evenly over its cards."""
        of: dict[str, dict[str, int]] = {info.id: {} for info in self._infos}
        placed = {holder: on for holder, on in self._placed().items() if holders.get(holder)}
        company = frozenset(placed)
        self._last = {holder: last for holder, last in self._last.items() if holder in placed}
        for holder, on in placed.items():
            total = self._bytes(holder, holders[holder], company)
            for card in on:
                if card in of and total:
                    of[card][holder] = total // len(on)
        return {
            card: Reading(card=card, used_bytes=sum(parts.values()), of=parts)
            for card, parts in of.items()
        }

    def let_go(self, cards: frozenset[str]) -> None:
        """Nothing is kept open."""

    def environment(self, cards: tuple[str, ...]) -> dict[str, str]:
        """A declared gpu is the device the driver knows under the same id, if there is one."""
        devices = [info.device for info in self._infos if info.id in cards and info.device]
        return {"CUDA_VISIBLE_DEVICES": ",".join(devices)} if devices else {}

    def close(self) -> None:
        self._last.clear()

    def _bytes(self, holder: str, pids: frozenset[int], company: frozenset[str]) -> int:
        resident = sum(processes.resident_bytes(pid) for pid in pids)
        last = self._last.get(holder)
        if last is not None and last.pids == pids and last.company == company:
            moved = abs(resident - last.resident_bytes)
            if moved <= min(MOVED_BYTES, MOVED_PART * last.resident_bytes):
                return last.bytes
        found = sum(processes.proportional_bytes(pid) for pid in pids) if resident else 0
        self._last[holder] = _Last(pids=pids, resident_bytes=resident, company=company, bytes=found)
        return found


def ram_of(pids: frozenset[int]) -> int:
    """The proportional set size of these processes together; dead ones count as 0."""
    return sum(processes.proportional_bytes(pid) for pid in pids if os.path.exists(f"/proc/{pid}"))
