"""A replica as its agent holds it. Values only: what should happen to it is decided elsewhere."""

from msgspec import Struct

from schemas.plan import Launch, Stop
from schemas.replica import Replica


class Held(Struct, frozen=True, kw_only=True):
    """A replica as this agent holds it: the state it reported last, and what is being done to it.

    `launch` is what to start and how to ask it. `stop` is the wish being carried out; `ending` tells
    that the process was told to end, from where there is no way back. `resuming`: it comes back from being
    parked. `port` is the engine's, `cause` what led to the start.
    """

    replica: Replica
    launch: Launch | None = None
    port: int = 0
    cause: str = ""
    stop: Stop | None = None
    ending: bool = False
    resuming: bool = False
