"""Adapters, their models and a catalog in the log, for tests of their files on nodes."""

from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Any

import msgspec

from events.log import Batch, Draft, EventLog, Recorded
from events.subjects import event_subject
from schemas.adapter import Adapter, AdapterDeleted, AdapterFile, AdapterReady
from schemas.mirror import Manifest
from schemas.model import Model, ModelAdded, ModelDeleted, Profile, Scaling
from schemas.node import CardInfo, EngineInfo, Node
from schemas.settings import GIB
from tests.support.scripted_mirror import a_manifest, some_bytes

LONG_AGO = datetime(2026, 1, 1, tzinfo=UTC)
NAMES = ("adapter_model.safetensors", "adapter_config.json")


def a_profile(name: str = "p", **fields: Any) -> Profile:
    given: dict[str, Any] = {"engine": "vllm", "memory_bytes": GIB, "card": ("gpu",), **fields}
    return Profile(name=name, **given)


def a_base(name: str = "m", **fields: Any) -> Model:
    """A model that loads adapters."""
    given: dict[str, Any] = {
        "incarnation": f"i-{name}",
        "scaling": Scaling(min=0, max=1),
        "profiles": (a_profile(),),
        "max_loaded_adapters": 8,
        **fields,
    }
    return Model(name=name, **given)


def an_adapter(name: str, manifest: Manifest | None = None, **fields: Any) -> Adapter:
    """A ready adapter with the files of `manifest`, or of a small one made up for its name."""
    manifest = manifest or adapter_set(name)[0]
    base = fields.get("base", "m")
    given: dict[str, Any] = {
        "incarnation": f"i-{name}",
        "base": base,
        "base_incarnation": f"i-{base}",
        "phase": "ready",
        "since": LONG_AGO,
        "files": tuple(
            AdapterFile(key=f.key, name=f.name, bytes=f.bytes, sha256=f.sha256)
            for f in manifest.files
        ),
        "bytes": sum(f.bytes for f in manifest.files),
        "version": "0123456789ab",
        **fields,
    }
    return Adapter(name=name, **given)


def adapter_set(name: str, weights: int = 1000) -> tuple[Manifest, bytes, bytes]:
    """The set of files of an adapter whose weights have so many bytes, and their contents."""
    seed = sum(ord(c) * 31**i for i, c in enumerate(name)) % (1 << 30)
    contents = (some_bytes(weights, seed), msgspec.json.encode({"r": 8, "of": name}))
    return a_manifest(name, *contents, names=NAMES), *contents


def gpu_node(id: str = "n1", **fields: Any) -> Node:
    """A node whose vllm loads adapters."""
    given: dict[str, Any] = {
        "running": True,
        "started_at": LONG_AGO,
        "cards": (
            CardInfo(id="cpu", kind="cpu", memory_bytes=4 * GIB),
            CardInfo(id="gpu0", kind="gpu", memory_bytes=24 * GIB),
        ),
        "engines": (
            EngineInfo(name="llamacpp", version="1"),
            EngineInfo(name="vllm", version="1", card_kinds=("gpu",), adapters=True),
        ),
        **fields,
    }
    return Node(id=id, **given)


def told(
    noun: str, name: str, state: Model | Adapter | None, seq: int = 1, **fields: Any
) -> Recorded:
    """An event as a follower hands it over; `state` None is a tombstone."""
    given: dict[str, Any] = {
        "subject": event_subject(noun, name),
        "noun": noun,
        "key": (name,),
        "id": f"e-{seq}",
        "type": f"{noun}.changed" if state is not None else f"{noun}.deleted",
        "time": LONG_AGO,
        "stored_at": LONG_AGO,
        "rev": 1,
        "epoch": 1,
        "actor": "admin",
        "reason": "",
        "event": AdapterReady(version="0123456789ab"),
        "state": state,
        **fields,
    }
    return Recorded(seq=seq, **given)


def a_batch(*items: Any, synced: bool = True, **fields: Any) -> Batch:
    return Batch(items=tuple(items), position=9, synced=synced, **fields)


class Editor:
    """Writes models and adapters into a log, as a control plane does."""

    def __init__(self, log: EventLog) -> None:
        self._log = log
        self._heads: dict[str, tuple[int, int]] = {}

    async def write(self, *states: Model | Adapter) -> None:
        for state in states:
            is_model = isinstance(state, Model)
            await self._append(
                "model" if is_model else "adapter",
                state.name,
                ModelAdded(by="admin") if is_model else AdapterReady(version=state.version),
                state,
            )

    async def end(self, noun: str, *names: str) -> None:
        for name in names:
            event = ModelDeleted() if noun == "model" else AdapterDeleted()
            await self._append(noun, name, event, None)

    async def _append(self, noun: str, name: str, event: Any, state: Any) -> None:
        subject = event_subject(noun, name)
        seq, rev = self._heads.get(subject, (0, 0))
        stored = await self._log.append(
            Draft(subject=subject, event=event, state=state, expected_seq=seq, rev=rev + 1), epoch=1
        )
        self._heads[subject] = (stored.seqs[0], rev + 1)


def names_of(adapters: Sequence[Adapter]) -> list[str]:
    return [adapter.name for adapter in adapters]
