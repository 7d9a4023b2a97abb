"""Decides which cards a node has and how much memory of each may be given out.

It computes from figures it is handed; reading them off the machine is the shell's affair.
"""

from collections.abc import Sequence

from msgspec.structs import replace

from schemas.node import CardInfo
from schemas.settings import NodeagentSettings, StaticCard

CPU_CARD = "cpu"
KEPT_BACK = 0.1
"""Part of the machine's memory that the `cpu` card never gives out."""


class BadInventory(ValueError):
    """The declared cards contradict each other."""


def cards_of(
    settings: NodeagentSettings,
    *,
    ram_bytes: int,
    cgroup_limit_bytes: int | None,
    found: Sequence[CardInfo] = (),
) -> tuple[CardInfo, ...]:
    """The `cpu` card, the `found` ones in their order, then the declared ones in order of configuration.

    A declared card takes the place of a found one of the same id: its memory is the declared one, and it
    is measured like any declared card. A gpu that is declared anew is still the same device.
    Raises BadInventory for a declared card named `cpu`, one declared twice, or one without memory.
    """
    limit = min(ram_bytes, cgroup_limit_bytes) if cgroup_limit_bytes else ram_bytes
    cpu_bytes = settings.cpu_memory_bytes or int(limit * (1 - KEPT_BACK))
    cards = {
        CPU_CARD: CardInfo(id=CPU_CARD, kind="cpu", memory_bytes=cpu_bytes, provider="cpu"),
        **{card.id: card for card in found},
    }
    seen = {CPU_CARD}
    for card in settings.cards:
        if card.id in seen:
            raise BadInventory(f"the card {card.id!r} is declared twice (`cpu` is always there)")
        if card.memory_bytes <= 0:
            raise BadInventory(f"the card {card.id!r} needs a memory above 0 bytes")
        seen.add(card.id)
        cards[card.id] = _declared(card, cards.get(card.id))
    return tuple(cards.values())


def given_out(cards: Sequence[CardInfo]) -> tuple[CardInfo, ...]:
    """The inventory as the agent grants by it: nothing of a card divided by MIG is given to anybody."""
    return tuple(replace(card, memory_bytes=0) if card.mig else card for card in cards)


def _declared(card: StaticCard, found: CardInfo | None) -> CardInfo:
    if found is None or card.kind != found.kind:
        return CardInfo(id=card.id, kind=card.kind, memory_bytes=card.memory_bytes)
    # Divided by MIG it stays: no declaration makes the whole of it usable.
    return replace(found, memory_bytes=card.memory_bytes, provider="static")
