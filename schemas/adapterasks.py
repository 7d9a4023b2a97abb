"""What a node's agent is asked about adapters by request/reply, and what it answers.

`yard.rpc.adapters.<node>` (gateways, people): an Ensure. `yard.rpc.slots.<node>` (people): a SlotsRequest.
An answer comes within `wait_s` whatever happens; `loading` and `waiting` mean: ask again.
"""

from datetime import datetime
from typing import Literal

from msgspec import Struct

from schemas.slots import How, Whose


class Ensure(Struct, frozen=True, kw_only=True):
    """Have `adapter` loaded in `replica` and keep it there for this gateway.

    `version` is the one the gateway's table has; an agent that knows another answers `refused`. `n` is the number of
    the last beacon this gateway sent before: beacons after it list the pin. `gone`: the engine-side name that the
    engine said it does not know.
    """

    replica: str
    adapter: str
    version: str
    gateway: str
    incarnation: str
    n: int
    gone: str = ""
    wait_s: float = 5.0
    request: str = ""
    """The id of the request it is for; it becomes the cause of the events."""


Outcome = Literal["hit", "joined", "loaded"]
"""hit: it was there. joined: somebody else's load was under way. loaded: this ask started the load."""


class EnsureAnswer(Struct, frozen=True, kw_only=True):
    """`ready`: it is loaded under `engine_name` and pinned for the asker. `loading`: a load is under way; `waiting`:
    every place is in use; ask again in both cases. `waiting` with `in_use`: a person has it unloaded, which waits for
    the end of its uses; whoever asks counts on it no more, and asks again. `sentence` of a waiting one says what for, where
    that is not that every place is in use. `refused`: `whose` fault, `code`, `sentence`, and when it may be
    tried again there. `not_here`: this replica is not ready, or not this agent's.
    """

    status: Literal["ready", "loading", "waiting", "refused", "not_here"]
    engine_name: str = ""
    how: Outcome = "hit"
    load_s: float | None = None
    whose: Whose = "replica"
    code: str = ""
    sentence: str = ""
    until: datetime | None = None
    known: bool = True
    """Of a refusal: as in `schemas.slots.BadAdapter`."""


class LoadAdapter(Struct, frozen=True, kw_only=True, tag_field="do", tag="load"):
    """A person's load into one replica; nobody is pinned by it."""

    replica: str
    adapter: str


class UnloadAdapter(Struct, frozen=True, kw_only=True, tag_field="do", tag="unload"):
    """Unload it from `replica` once no request uses it; `force`: at once."""

    replica: str
    adapter: str
    force: bool = False


class AdapterHolders(Struct, frozen=True, kw_only=True, tag_field="do", tag="holders"):
    """Where on this node `adapter` is loaded; empty: every adapter."""

    adapter: str = ""


class SlotsRequest(Struct, frozen=True, kw_only=True):
    """`wait_s` bounds the answer: a load or an unload that takes longer answers `loading` or `waiting`, and goes on."""

    ask: LoadAdapter | UnloadAdapter | AdapterHolders
    wait_s: float = 5.0


class Holder(Struct, frozen=True, kw_only=True):
    """One place an adapter is in. `uses` are requests running under pins, `idle_s` since the last use (None: never
    used), `gateways` those that have a pin on it."""

    replica: str
    model: str
    adapter: str
    version: str
    state: Literal["loading", "loaded", "leaving", "unloading"]
    since: datetime
    how: How
    uses: int = 0
    idle_s: float | None = None
    gateways: tuple[str, ...] = ()


class SlotsAnswer(Struct, frozen=True, kw_only=True):
    status: Literal["done", "loading", "waiting", "refused"]
    holders: tuple[Holder, ...] = ()
    code: str = ""
    sentence: str = ""
