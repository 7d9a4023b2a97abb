"""What a gateway has in hand of one request: its run at a replica, what it asked for, its place in the waiting room.

Data only: who makes, counts and ends them is gateway/gateway.py, and for tickets gateway/waits.py.
"""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field

from gateway.adapterdesk import Adapted, Seeking
from gateway.domain.affinity import Affinity
from gateway.domain.answers import Answer
from gateway.domain.cards import CardRef
from gateway.domain.keytable import ANYBODY, Caller
from gateway.domain.pins import Held
from gateway.domain.routing import Loss, Why
from gateway.domain.waitingroom import Waiter
from schemas.replica import Replica


@dataclass(slots=True, eq=False)
class Run:
    """One request at one replica, counted as in use until `Gateway.finish`.

    `abort` closes the engine's connection; `lost` says how the log ended it, when it did. `model` is the
    catalog's. A request for an adapter of it counts under the pin `held` there; `adapted` is what it takes to have that
    loaded, None for a hit that nobody need see to. `why` it was this replica. `shares`: the replica runs only so many
    at once.
    """

    model: str
    replica: Replica
    abort: Callable[[str], None]
    has_byte: bool = False
    lost: Loss | None = None
    held: Held | None = None
    adapted: Adapted | None = None
    why: Why = "only"
    shares: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """What a waiting request will ask of an engine; `abort` as in Run.

    `seeking` is what one for an adapter has met so far; `caller` whose rights it has; `priority` is the header by
    which it lowers its own, `traceparent` its trace; `affinity` finds what ties it to a replica.
    """

    name: str
    path: str
    abort: Callable[[str], None]
    on: CardRef | None = None
    seeking: Seeking | None = None
    caller: Caller = ANYBODY
    priority: bytes | None = None
    traceparent: str = ""
    affinity: "Callable[[], Affinity | None] | None" = None

    @property
    def want(self) -> tuple[str, str, CardRef | None]:
        """What decides which replicas can serve it."""
        return (self.name, self.path, self.on)


@dataclass(slots=True)
class Ticket:
    """A place in the waiting room. `outcome` comes exactly once: the run that was begun for it, the answer,
    or None (look again).

    `on_asked` is called when a wish for its model goes out while it waits.
    """

    waiter: Waiter
    asked: Asked | None
    on_asked: Callable[[], None]
    outcome: "asyncio.Future[Run | Answer | None]" = field(repr=False)
