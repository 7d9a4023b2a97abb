"""The adapters loaded in one replica's engine, as its node's agent tells it.

The agent alone loads and evicts. What is here was said by the engine; a load is told after it is answered.
"""

from datetime import datetime
from typing import Literal

from msgspec import Struct

How = Literal["loaded", "found", "person"]
"""loaded: a request asked for it. found: the engine had it when the agent looked. person: `adapter load`."""

Whose = Literal["adapter", "replica"]
"""Whose fault a failed load is: every replica would refuse it too, or another one may take it."""

MOST_SLOTS = 64
"""The largest `max_loaded_adapters`: a state with so many still fits one event."""

MOST_BAD = 8
"""Failures a state tells; the newest ones."""


class Slot(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One loaded adapter. `engine_name` empty: the usual one, `schemas.adapternames.engine_name`.

    `leaving`: a person had it unloaded; no gateway sends anything new there.
    """

    adapter: str
    version: str
    since: datetime
    how: How = "loaded"
    engine_name: str = ""
    leaving: bool = False


class BadAdapter(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A load that failed: nobody tries this version again here before `until`."""

    adapter: str
    version: str
    code: str
    reason: str
    until: datetime
    whose: Whose = "replica"
    known: bool = True
    """False: nobody knows these words of an engine. Two replicas that say them make it the adapter's fault."""


class Slots(Struct, frozen=True, kw_only=True):
    """The state of `yard.evt.slots.<node>.<replica>`.

    `limit` is how many the agent keeps loaded, `room` how many the engine's own cache holds (0: unknown).
    `foreign` counts adapters that the engine lists and nobody here loaded; they are left alone.
    """

    node: str
    replica: str
    model: str
    epoch: int
    limit: int
    since: datetime
    room: int = 0
    loaded: tuple[Slot, ...] = ()
    bad: tuple[BadAdapter, ...] = ()
    foreign: int = 0


class SlotsLoaded(Struct, frozen=True, kw_only=True, tag_field="type", tag="slots.loaded"):
    adapter: str
    version: str
    how: How = "loaded"
    load_s: float | None = None


class SlotsEvicted(Struct, frozen=True, kw_only=True, tag_field="type", tag="slots.evicted"):
    """`why`: room (another one needed its place), person, removed (from the catalog), version (a newer one)."""

    adapter: str
    version: str
    why: Literal["room", "person", "removed", "version"]


class SlotsLeaving(Struct, frozen=True, kw_only=True, tag_field="type", tag="slots.leaving"):
    """It is to be unloaded once nobody uses it; `taken_back` ends that."""

    adapter: str
    version: str
    taken_back: bool = False


class SlotsFailed(Struct, frozen=True, kw_only=True, tag_field="type", tag="slots.failed"):
    """`what`: the load or the unload of it failed. Of an unload only the engine's room is unknown."""

    adapter: str
    version: str
    code: str
    whose: Whose = "replica"
    what: Literal["load", "unload"] = "load"


class SlotsDrifted(Struct, frozen=True, kw_only=True, tag_field="type", tag="slots.drifted"):
    """The engine's list was not what the agent knew: `lost` are gone, `found` were there (`NAME@VERSION`)."""

    lost: tuple[str, ...] = ()
    found: tuple[str, ...] = ()


class SlotsDeleted(Struct, frozen=True, kw_only=True, tag_field="type", tag="slots.deleted"):
    """A tombstone."""


SlotsEvent = SlotsLoaded | SlotsEvicted | SlotsLeaving | SlotsFailed | SlotsDrifted | SlotsDeleted
