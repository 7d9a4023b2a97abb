"""Says what the state of a card means: whether it is free, who keeps it, how much of it may be given.

One definition of each for the agent that grants and the control plane that ranks (they may not import one
another). Pure reading of a state; it decides nothing.
"""

from collections.abc import Mapping

from schemas.card import PRIORITIES, Card, Lease, Priority

_NONE: Mapping[str, int] = {}


def is_free(card: Card) -> bool:
    """No lease of an engine or a name, no waiter, no stowaway, no claim, no VM: all five.

    What a parked engine keeps is memory that cannot be given, and no hold on the card.
    """
    return not (
        any(lease.kind != "parked" for lease in card.leases)
        or card.waiters
        or card.stowaways
        or card.claims
        or card.vm is not None
    )


def kept_by(card: Card, priority: Priority = "interactive") -> str:
    """Who keeps the card out of reach of a request of `priority`, in words; empty when nobody does.

    1. a VM; 2. a claim; 3. a pinned lease of the whole card; 4. a lease of the whole card of a higher
    priority. A pinned lease of a part only keeps that part.
    """
    if card.vm is not None:  # 1
        return f"vm {card.vm.name}"
    if card.claims:  # 2
        return f"claim {card.claims[0].name}"
    for lease in card.leases:  # 3, 4
        if lease.exclusive and is_kept(lease, priority):
            return f"lease {lease.name or lease.holder}"
    return ""


def is_kept(lease: Lease, priority: Priority = "interactive") -> bool:
    """Whether a lease stays whoever of `priority` asks: pinned, or of a higher priority."""
    if lease.kind != "named":
        return False
    return lease.pinned or PRIORITIES.index(lease.priority) < PRIORITIES.index(priority)


def held_bytes(card: Card, measured: Mapping[str, int] = _NONE) -> int:
    """Bytes that are spoken for: per lease the larger of what was reserved and `measured` of its holder,
    and what no lease explains."""
    leased = sum(
        lease.memory_bytes
        if lease.kind == "parked"
        else max(lease.memory_bytes, measured.get(lease.holder, 0))
        for lease in card.leases
    )
    return leased + card.other_bytes


def free_bytes(card: Card, measured: Mapping[str, int] = _NONE) -> int:
    """Bytes that may be given now, never below 0; none while somebody has the whole card."""
    if card.vm is not None or card.claims or any(lease.exclusive for lease in card.leases):
        return 0
    return max(card.memory_bytes - held_bytes(card, measured), 0)
