"""A card: one accelerator (`cpu` is one too), its leases and its measured memory, told by its agent."""

from datetime import datetime
from typing import Literal

from msgspec import Struct


class Lease(Struct, frozen=True, kw_only=True):
    """Memory of the card held by a replica. `returning` = stopped, the memory not yet read back.

    `fence` is the card revision the lease was granted at.
    """

    holder: str
    memory_bytes: int
    fence: int
    since: datetime
    returning: bool = False


class Card(Struct, frozen=True, kw_only=True):
    """The state of `yard.evt.card.<node>.<card>`. `rev` grows with every change of `leases`.

    `used_bytes` is the measured use (PSS of the process groups started there), at `measured_at`.
    """

    node: str
    id: str
    kind: Literal["cpu", "gpu"]
    memory_bytes: int
    rev: int
    leases: tuple[Lease, ...] = ()
    used_bytes: int = 0
    measured_at: datetime | None = None
    epoch: int = 0


class CardMeasured(Struct, frozen=True, kw_only=True, tag_field="type", tag="card.measured"):
    used_bytes: int


class CardLeased(Struct, frozen=True, kw_only=True, tag_field="type", tag="card.leased"):
    holder: str
    memory_bytes: int
    fence: int


class CardReleased(Struct, frozen=True, kw_only=True, tag_field="type", tag="card.released"):
    """The memory of `holder` was read back after its stop: `used_bytes` before and after."""

    holder: str
    memory_bytes: int
    used_before_bytes: int = 0
    used_after_bytes: int = 0


class CardDeleted(Struct, frozen=True, kw_only=True, tag_field="type", tag="card.deleted"):
    """A tombstone."""


CardEvent = CardMeasured | CardLeased | CardReleased | CardDeleted
