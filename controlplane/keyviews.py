"""Says how the read API shows API keys: found by id or name, and without the hash of the secret.

Nothing can be done with a hash; but who reads a list has no use for it either, and so it is not passed on. It
changes nothing.
"""

from collections.abc import Iterable, Sequence
from datetime import datetime

import msgspec
from msgspec import Raw
from msgspec.structs import replace

from controlplane.domain import keys
from controlplane.projections.readmodel import Entry
from schemas.key import Key


def shown(entries: Iterable[Entry]) -> list[Entry]:
    """The entries of keys as they are answered."""
    return [
        entry if entry.state is None else replace(entry, state=_without_hash(entry.state))
        for entry in entries
    ]


def _without_hash(state: Raw) -> Raw:
    fields = msgspec.json.decode(state)
    fields.pop("hash", None)
    return Raw(msgspec.json.encode(fields))


def named(entries: Sequence[Entry], name: str, now: datetime) -> Entry | None:
    """The entry of the key that a command about `name` would mean; None: there is none."""
    states = {
        entry.name: msgspec.json.decode(entry.state, type=Key)
        for entry in entries
        if entry.state is not None
    }
    found = keys.find(states, name, now)
    return next((e for e in entries if found is not None and e.name == found.id), None)
