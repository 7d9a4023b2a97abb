"""Decides which cards a node has and how much memory of each may be given out.

It computes from figures it is handed; reading them off the machine is the shell's affair.
"""

from schemas.node import CardInfo
from schemas.settings import NodeagentSettings

CPU_CARD = "cpu"
KEPT_BACK = 0.1
"""Part of the machine's memory that the `cpu` card never gives out."""


class BadInventory(ValueError):
    """The declared cards contradict each other."""


def cards_of(
    settings: NodeagentSettings, *, ram_bytes: int, cgroup_limit_bytes: int | None
) -> tuple[CardInfo, ...]:
    """The `cpu` card, then the declared ones in order of configuration.

    Raises BadInventory for a declared card named `cpu`, one declared twice, or one without memory.
    """
    limit = min(ram_bytes, cgroup_limit_bytes) if cgroup_limit_bytes else ram_bytes
    cpu_bytes = settings.cpu_memory_bytes or int(limit * (1 - KEPT_BACK))
    cards = [CardInfo(id=CPU_CARD, kind="cpu", memory_bytes=cpu_bytes)]
    seen = {CPU_CARD}
    for card in settings.cards:
        if card.id in seen:
            raise BadInventory(f"the card {card.id!r} is declared twice (`cpu` is always there)")
        if card.memory_bytes <= 0:
            raise BadInventory(f"the card {card.id!r} needs a memory above 0 bytes")
        seen.add(card.id)
        cards.append(CardInfo(id=card.id, kind=card.kind, memory_bytes=card.memory_bytes))
    return tuple(cards)
