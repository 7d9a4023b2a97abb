"""A card: one accelerator (`cpu` is one too), who has it and who waits for it, told by its agent.

What a state means (free, kept, how much may be given) is said once, in schemas/cardstate.py.
"""

from datetime import datetime
from typing import Final, Literal

from msgspec import Struct

CardKind = Literal["cpu", "gpu"]
Provider = Literal["cpu", "static", "nvml"]
"""Where the figures of a card come from: this machine's RAM, the configuration, or the driver."""

Priority = Literal["hold", "foreground", "interactive", "batch"]

PRIORITIES: Final[tuple[Priority, ...]] = ("hold", "foreground", "interactive", "batch")
"""The most urgent first. A plain request for a model counts as `interactive`."""

LeaseKind = Literal["replica", "parked", "named"]
ClaimKind = Literal["game", "app"]


class ProcessRef(Struct, frozen=True, kw_only=True):
    """One process and no other that gets its pid later: `started` in clock ticks since boot `boot`."""

    pid: int
    started: int
    boot: str


class Lease(Struct, frozen=True, kw_only=True):
    """Memory of the card that somebody holds. `fence` is the card revision it was granted at.

    kind      holder                  memory_bytes
    replica   a replica id            reserved for its engine
    parked    a replica id            what a parked engine keeps on a gpu, or its RAM on `cpu`
    named     a lease id (`l-...`)    asked for under `name`; the whole card when `exclusive`

    `returning`: its holder is gone, the memory not yet read back; `why` says why it ended, and `stuck` what
    is still there.
    `leaving`: it was asked to make room, for that holder. A named lease ends with its `process`, at
    `expires_at`, or by a release, whichever comes first. `by` is who asked for it.
    """

    holder: str
    memory_bytes: int
    fence: int
    since: datetime
    returning: bool = False
    kind: LeaseKind = "replica"
    name: str = ""
    exclusive: bool = False
    pinned: bool = False
    priority: Priority = "interactive"
    expires_at: datetime | None = None
    process: ProcessRef | None = None
    by: str = ""
    leaving: str = ""
    stuck: str = ""
    why: str = ""


class Waiter(Struct, frozen=True, kw_only=True):
    """Somebody in line for a card: the lease it will get, and who has to leave first.

    `id` is the holder of the lease to come: a lease id, or a replica id for an engine that was planned
    here. `cards` are all the cards it wants at once. It gives up at `expires_at`; the lease it gets
    ends `ttl_s` after the grant (None: not by time).
    """

    id: str
    since: datetime
    memory_bytes: int
    kind: Literal["replica", "named"] = "named"
    name: str = ""
    cards: tuple[str, ...] = ()
    exclusive: bool = False
    pinned: bool = False
    priority: Priority = "interactive"
    expires_at: datetime | None = None
    ttl_s: float | None = None
    process: ProcessRef | None = None
    by: str = ""
    waiting_for: tuple[str, ...] = ()


class Claim(Struct, frozen=True, kw_only=True):
    """A game or a desktop app that announced itself: the card is kept for it from that moment.

    `game`: running requests there end at once; `app`: they may finish within a bound.
    """

    id: str
    name: str
    kind: ClaimKind
    since: datetime
    process: ProcessRef | None = None
    by: str = ""


class Vm(Struct, frozen=True, kw_only=True):
    """A virtual machine the card is handed to. Not `attached` while engines still leave it; if they have not
    by `expires_at`, it does not get the card."""

    name: str
    since: datetime
    attached: bool = False
    by: str = ""
    expires_at: datetime | None = None


class Stowaway(Struct, frozen=True, kw_only=True):
    """A process that uses the card without a lease. It is reported and never killed."""

    pid: int
    name: str
    memory_bytes: int
    since: datetime


class Card(Struct, frozen=True, kw_only=True):
    """The state of `yard.evt.card.<node>.<card>`.

    `rev` grows with every change of what may be given here: leases, waiters, claims, VM, stowaways.
    `used_bytes` is the measured use at `measured_at`: what the driver says, or on `cpu` and static cards
    the PSS of the process groups started there. `other_bytes` is the part of it that no lease explains.
    """

    node: str
    id: str
    kind: CardKind
    memory_bytes: int
    rev: int
    leases: tuple[Lease, ...] = ()
    used_bytes: int = 0
    measured_at: datetime | None = None
    epoch: int = 0
    waiters: tuple[Waiter, ...] = ()
    claims: tuple[Claim, ...] = ()
    vm: Vm | None = None
    stowaways: tuple[Stowaway, ...] = ()
    other_bytes: int = 0
    provider: Provider = "static"
    device: str = ""
    """The driver's UUID of the card, empty for one that has none."""
    mig: bool = False
    """Divided by MIG: shown and left alone, nothing of it is given."""


class CardMeasured(Struct, frozen=True, kw_only=True, tag_field="type", tag="card.measured"):
    used_bytes: int
    other_bytes: int = 0


class CardLeased(Struct, frozen=True, kw_only=True, tag_field="type", tag="card.leased"):
    holder: str
    memory_bytes: int
    fence: int
    name: str = ""


class CardReleased(Struct, frozen=True, kw_only=True, tag_field="type", tag="card.released"):
    """The memory of `holder` was read back after its stop: `used_bytes` before and after.

    `why`: released, expired, process ended, drained, stopped.
    """

    holder: str
    memory_bytes: int
    used_before_bytes: int = 0
    used_after_bytes: int = 0
    why: str = ""


class CardStuck(Struct, frozen=True, kw_only=True, tag_field="type", tag="card.stuck"):
    """The holder is gone and its memory is not back: the lease stays, and says why."""

    holder: str


class CardQueued(Struct, frozen=True, kw_only=True, tag_field="type", tag="card.queued"):
    waiter: str
    waiting_for: tuple[str, ...] = ()


class CardDequeued(Struct, frozen=True, kw_only=True, tag_field="type", tag="card.dequeued"):
    """It no longer waits and got nothing: `why` is withdrawn, expired, or its process ended."""

    waiter: str
    why: str = ""


class CardDraining(Struct, frozen=True, kw_only=True, tag_field="type", tag="card.draining"):
    """`holders` were asked to leave for somebody (`for_holder`: a waiter, a claim, the VM)."""

    holders: tuple[str, ...]
    for_holder: str


class CardParked(Struct, frozen=True, kw_only=True, tag_field="type", tag="card.parked"):
    """A parked engine's lease here is now what it keeps (`memory_bytes`) while it is parked."""

    holder: str
    memory_bytes: int


class CardClaimed(Struct, frozen=True, kw_only=True, tag_field="type", tag="card.claimed"):
    claim: str
    name: str


class CardClaimEnded(Struct, frozen=True, kw_only=True, tag_field="type", tag="card.claim_ended"):
    claim: str
    why: str = ""


class CardVmAttaching(Struct, frozen=True, kw_only=True, tag_field="type", tag="card.vm_attaching"):
    name: str


class CardVmAttached(Struct, frozen=True, kw_only=True, tag_field="type", tag="card.vm_attached"):
    name: str


class CardVmDetached(Struct, frozen=True, kw_only=True, tag_field="type", tag="card.vm_detached"):
    name: str


class CardStowawaySeen(
    Struct, frozen=True, kw_only=True, tag_field="type", tag="card.stowaway_seen"
):
    pid: int
    name: str = ""
    memory_bytes: int = 0


class CardStowawayGone(
    Struct, frozen=True, kw_only=True, tag_field="type", tag="card.stowaway_gone"
):
    pid: int


class CardDeleted(Struct, frozen=True, kw_only=True, tag_field="type", tag="card.deleted"):
    """A tombstone."""


CardEvent = (
    CardMeasured
    | CardLeased
    | CardReleased
    | CardStuck
    | CardQueued
    | CardDequeued
    | CardDraining
    | CardParked
    | CardClaimed
    | CardClaimEnded
    | CardVmAttaching
    | CardVmAttached
    | CardVmDetached
    | CardStowawaySeen
    | CardStowawayGone
    | CardDeleted
)
