"""Folds what the log says of adapters and of the places they have in replicas, and finds an adapter by its name.

A part of the gateway's table, under the same rules: it must not ask a clock, do I/O or remember anything about
requests, so that one rebuilt from the log or from a snapshot is equal to the one before.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import datetime

from msgspec import Struct

from gateway.domain.aliases import take_out
from schemas.adapter import Adapter
from schemas.adapternames import pin_name, readings
from schemas.slots import BadAdapter, Slot, Slots


class AdapterEntry(Struct, frozen=True, kw_only=True):
    """An adapter of the catalog, when its name was added, and the sequence of its last change."""

    adapter: Adapter
    created: datetime
    seq: int

    @property
    def name(self) -> str:
        return self.adapter.name

    @property
    def aliases(self) -> tuple[str, ...]:
        return self.adapter.aliases

    @property
    def pin(self) -> str:
        """What names the version that is served now in beacons and in `Places`."""
        return pin_name(self.adapter.name, self.adapter.version)


class Places(Struct, frozen=True, kw_only=True):
    """What one replica has loaded and what failed there, by `schemas.adapternames.pin_name`."""

    slots: Slots
    loaded: dict[str, Slot]
    bad: dict[str, BadAdapter]

    def serves(self, pin: str) -> bool:
        """Whether it is loaded and new requests may go to it."""
        slot = self.loaded.get(pin)
        return slot is not None and not slot.leaving


def places_of(slots: Slots) -> Places:
    return Places(
        slots=slots,
        loaded={pin_name(s.adapter, s.version): s for s in slots.loaded},
        # A state tells its failures oldest first: the later of two about one version counts.
        bad={pin_name(b.adapter, b.version): b for b in slots.bad},
    )


@dataclass(slots=True)
class AdapterTable:
    """Adapters by name, their aliases, those of each base, and the places of each replica by its id."""

    entries: dict[str, AdapterEntry] = field(default_factory=dict)
    aliases: dict[str, str] = field(default_factory=dict)
    places: dict[str, Places] = field(default_factory=dict)
    _pins: dict[str, str] = field(default_factory=dict)

    # -- reading ---------------------------------------------------------------------------------

    def named(self, name: str) -> AdapterEntry | None:
        """The adapter of that name or alias; a name wins over an alias."""
        return self.entries.get(name) or self.entries.get(self.aliases.get(name, ""))

    def find(self, name: str, base_of: Callable[[str], str | None]) -> AdapterEntry | None:
        """The adapter a client means by `name`; `base_of` is the model of a name or alias.

        1. a name or alias of its own
        2. `BASE:NAME`, at whichever colon both sides make one that belongs together; of several, the first
        """
        found = self.named(name)  # 1
        if found is not None or ":" not in name:
            return found
        for base, rest in readings(name):  # 2
            entry = self.named(rest)
            if entry is not None and base_of(base) == entry.adapter.base:
                return entry
        return None

    def pin(self, entry: AdapterEntry) -> str:
        """`entry.pin`, made once for each change of the entry."""
        name = entry.adapter.name
        if self.entries.get(name) is entry:
            return self._pins[name]
        return entry.pin

    def serves(self, replica: str, pin: str) -> bool:
        """Whether the log knows it loaded there and new requests may go to it."""
        places = self.places.get(replica)
        return places is not None and places.serves(pin)

    # -- folding ---------------------------------------------------------------------------------

    def fold_adapter(self, name: str, adapter: Adapter | None, time: datetime, seq: int) -> None:
        """One adapter's state after an event at `time`; None: the name ended."""
        if adapter is None:
            self.drop(name)
            return
        before = self.entries.get(name)
        same = before is not None and before.adapter.incarnation == adapter.incarnation
        created = before.created if before is not None and same else time
        self.put(AdapterEntry(adapter=adapter, created=created, seq=seq))

    def put(self, entry: AdapterEntry) -> None:
        """Sets one entry and its aliases in place of what it had before."""
        name = entry.adapter.name
        self.drop(name)
        self.entries[name] = entry
        self._pins[name] = entry.pin
        self.aliases.update(dict.fromkeys(entry.adapter.aliases, name))

    def drop(self, name: str) -> None:
        take_out(self.entries, self.aliases, name)
        self._pins.pop(name, None)

    def fold_slots(self, replica: str, slots: Slots | None) -> None:
        """What one replica has loaded after an event; None: its aggregate ended."""
        if slots is None:
            self.places.pop(replica, None)
        else:
            self.places[replica] = places_of(slots)
