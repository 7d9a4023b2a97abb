"""What of a table goes into `routes.json` and comes back: plain data and the log position it belongs to.

A snapshot lets a gateway serve while NATS is away; it is a cache and may always be deleted. Pure: the
shell (gateway/snapshot.py) reads and writes the file.
"""

from typing import Final

import msgspec
from msgspec import Struct

from gateway.domain.adaptertable import AdapterEntry
from gateway.domain.cards import NodeCards
from gateway.domain.table import ActivationEntry, ModelEntry, RecordEntry, Table
from schemas.key import Key
from schemas.node import NodeState
from schemas.replica import Replica
from schemas.slots import Slots

FORMAT: Final = 2
"""Grows when the file's meaning changes; another number is treated like no file. One of format 1 tells nothing of keys:
served from it, a yard that asks for one would be open."""


class Snapshot(Struct, frozen=True, kw_only=True):
    """A table at `position` of the stream `stream_id` that was created at `stream_created`."""

    format: int
    stream_id: str
    stream_created: str
    position: int
    models: tuple[ModelEntry, ...] = ()
    activations: tuple[tuple[str, str, ActivationEntry], ...] = ()
    records: tuple[RecordEntry, ...] = ()
    replicas: tuple[Replica, ...] = ()
    nodestates: tuple[NodeState, ...] = ()
    nodes: tuple[NodeCards, ...] = ()
    adapters: tuple[AdapterEntry, ...] = ()
    slots: tuple[Slots, ...] = ()
    keys: tuple[Key, ...] = ()
    unreadable_keys: tuple[str, ...] = ()


class BadSnapshot(Exception):
    """The file is no snapshot of this version; the sentence says why."""


def take(table: Table, *, stream_id: str, stream_created: str) -> Snapshot:
    """The table as data, everything by its key, so that equal tables give equal files."""
    return Snapshot(
        format=FORMAT,
        stream_id=stream_id,
        stream_created=stream_created,
        position=table.position,
        models=tuple(e for _, e in sorted(table.models.items())),
        activations=tuple(
            (model, scope, e) for (model, scope), e in sorted(table.activations.items())
        ),
        records=tuple(e for _, e in sorted(table.records.items())),
        replicas=tuple(r for _, r in sorted(table.replicas.items())),
        nodestates=tuple(n for _, n in sorted(table.nodestates.items())),
        nodes=tuple(n for _, n in sorted(table.nodes.items())),
        adapters=tuple(e for _, e in sorted(table.adapters.entries.items())),
        slots=tuple(p.slots for _, p in sorted(table.adapters.places.items())),
        keys=tuple(k for _, k in sorted(table.keys.keys.items())),
        unreadable_keys=tuple(sorted(table.keys.unreadable)),
    )


def restore(snapshot: Snapshot) -> Table:
    """The table the snapshot was taken of (but for what it had counted as broken or unknown)."""
    table = Table(position=snapshot.position)
    # As the log told them: an alias that two entries name belongs to the later one.
    for entry in sorted(snapshot.models, key=lambda e: e.seq):
        table.put_model(entry)
    for model, scope, activation in snapshot.activations:
        table.activations[model, scope] = activation
    for record in snapshot.records:
        table.records[record.record.model] = record
    for replica in snapshot.replicas:
        table.put_replica(replica)
    for state in snapshot.nodestates:
        table.nodestates[state.node] = state
    for node in snapshot.nodes:
        table.nodes[node.node] = node
    for adapter in sorted(snapshot.adapters, key=lambda e: e.seq):
        table.adapters.put(adapter)
    for slots in snapshot.slots:
        table.adapters.fold_slots(slots.replica, slots)
    for key in snapshot.keys:
        table.keys.put(key)
    for id in snapshot.unreadable_keys:
        table.keys.not_read(id)
    return table


def encode(snapshot: Snapshot) -> bytes:
    return msgspec.json.encode(snapshot)


def decode(raw: bytes) -> Snapshot:
    """Raises BadSnapshot."""
    try:
        found = msgspec.json.decode(raw, type=Snapshot)
    except msgspec.MsgspecError as error:
        raise BadSnapshot(f"the file does not read as a snapshot: {error}") from error
    if found.format != FORMAT:
        raise BadSnapshot(f"the file has format {found.format}, this program reads {FORMAT}")
    return found
