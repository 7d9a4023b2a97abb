"""What a placement decided and why: the chosen candidate, the nearest misses, counts of reasons."""

from msgspec import Struct


class Candidate(Struct, frozen=True, kw_only=True):
    """A profile on a set of cards of one node. `rank` is None when a filter excluded it.

    Ranks: 1 parked copy, 2 free, 3 shared room, 4 drain of holders, 5 kept (waits).
    `reason` is a sentence with numbers: "gpu0: needs 9.2 GiB, 7.9 GiB free".
    """

    profile: str
    node: str
    cards: tuple[str, ...]
    rank: int | None = None
    reason: str = ""
    victims: tuple[str, ...] = ()
    resumes: str = ""
    """The parked replica this candidate would bring back."""
    waiting_for: tuple[str, ...] = ()
    """Rank 4 and 5: who has to go first (replicas, leases, claims, the VM)."""


class PlacementReport(Struct, frozen=True, kw_only=True):
    """Kept in the activation: the full list can be recomputed at `position` by `policy_version`."""

    chosen: Candidate | None = None
    misses: tuple[Candidate, ...] = ()
    counts: dict[str, int] = {}
    position: int = 0
    policy_version: int = 2
