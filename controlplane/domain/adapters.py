"""Decides what becomes of an adapter of the catalog: whether it fits, when it is ready, why it is refused.

What people wish of adapters is adaptercommands.py's affair, how their files come to a mirror files.py's. It loads
none into an engine: agents do that, with what is ready.
"""

import hashlib
from collections.abc import Iterable, Mapping
from typing import Final

from msgspec.structs import replace

from controlplane.domain import catalog, files, needs, preflight
from controlplane.domain.decision import Change, Decision
from controlplane.domain.filesets import Refusal
from controlplane.domain.jobtexts import ERROR_BYTES, clipped
from controlplane.domain.quantities import show_bytes
from controlplane.domain.reports import AdapterRead, AdapterUnreadable
from controlplane.domain.scene import Scene
from schemas import codes
from schemas.adapter import (
    Adapter,
    AdapterChanged,
    AdapterChecked,
    AdapterEvent,
    AdapterPhase,
    AdapterReady,
    AdapterRefused,
)
from schemas.file import File, FileAbsent
from schemas.model import Model

VERSION_DIGITS: Final = 12
"""Hex digits of a version."""

TRAINED_ON_BYTES: Final = 300
"""How much of the base its configuration names an adapter's state tells."""

TRANSITIONS: Final[dict[tuple[AdapterPhase | None, str], AdapterPhase]] = {
    (None, "adapter.added"): "reading",
    # A refused one is replaced by a new one of its name.
    ("refused", "adapter.added"): "reading",
    ("reading", "adapter.checked"): "fetching",
    ("reading", "adapter.refused"): "refused",
    ("fetching", "adapter.ready"): "ready",
    ("fetching", "adapter.refused"): "refused",
    # What the log knew of its files is lost: it is read again.
    ("fetching", "adapter.changed"): "reading",
    # Its base is gone without it, by a repair.
    ("ready", "adapter.refused"): "refused",
}
"""(phase before, event) -> phase after. Pinning leaves the phase alone, and a tombstone may follow any."""


def fold(scene: Scene, report: AdapterRead | AdapterUnreadable) -> Decision | None:
    """What reading an adapter came to; None when it is of another adapter of that name, or told already.

    1. it cannot be read: refused; 2. its base is gone: refused; 3. it does not fit: refused;
    4. it fits: its files are to be fetched, and engines of its base are started for its rank from now on.
    """
    adapter = scene.world.adapters.get(report.adapter)
    if adapter is None or adapter.incarnation != report.incarnation or adapter.phase != "reading":
        return None
    if isinstance(report, AdapterUnreadable):  # 1
        return _refused(scene, adapter, report.code, report.sentence)
    base = base_of(scene.world.models, adapter)
    if base is None:  # 2
        return _baseless(scene, adapter)
    found = preflight.preflight(
        report.config,
        base,
        repo=needs.repo_of(scene.world.files, base.source),
        trust_base=adapter.trust_base,
    )
    if isinstance(found, Refusal):  # 3
        return _refused(scene, adapter, found.code, found.sentence)
    return _checked(scene, adapter, base, report, found)  # 4


def look_after(scene: Scene, name: str) -> Decision | None:
    """The first of these that applies to the adapter:

    1. its base is gone, which only a repair of the log can do: refused;
    2. the log does not know a file of it any more: it is read again;
    3. all its files are on the leader's mirror: ready;
    4. one of them failed for good: refused.
    """
    adapter = scene.world.adapters.get(name)
    if adapter is None or adapter.phase == "refused":
        return None
    if base_of(scene.world.models, adapter) is None:  # 1
        return _baseless(scene, adapter)
    if adapter.phase != "fetching":
        return None
    mirror = scene.live.mirror
    known = [scene.world.files.get(file.key) for file in adapter.files]
    here = [file for file in known if file is not None]
    if len(here) < len(known) or not known:  # 2
        after = replace(adapter, phase="reading", files=(), bytes=0, since=scene.now)
        event = AdapterChanged(by="system:control", fields=("phase", "files"))
        why = "the log knows its files no more, it is read again"
        return _decision(scene, adapter, (change(after, event, why),))
    if all(files.is_here(file, mirror) for file in here):  # 3
        return _ready(scene, adapter, here)
    for file in here:
        failed = files.failed_for_good(file, mirror)
        if failed is not None and failed.since >= adapter.since:  # 4
            sentence = f"{files.named(file)}: {failed.reason or failed.code}"
            return _refused(scene, adapter, failed.code, sentence)
    return None


def base_of(models: Mapping[str, Model], adapter: Adapter) -> Model | None:
    """The very model the adapter was added to, None when it is gone."""
    base = models.get(adapter.base)
    return base if base is not None and base.incarnation == adapter.base_incarnation else None


def version_of(sums: Iterable[tuple[str, str]]) -> str:
    """What names the contents of an adapter's files, from their names and sha256 sums in any order."""
    lines = "".join(f"{name} {sha256}\n" for name, sha256 in sorted(sums))
    return hashlib.sha256(lines.encode()).hexdigest()[:VERSION_DIGITS]


def _checked(
    scene: Scene, adapter: Adapter, base: Model, report: AdapterRead, found: preflight.Fits
) -> Decision:
    """`adapter.checked` with its files, and `model.changed` when its rank is the highest so far."""
    config = report.config
    size = sum(file.bytes for file in report.files)
    after = replace(
        adapter,
        phase="fetching",
        since=scene.now,
        commit=report.commit,
        rank=found.rank,
        trained_on=clipped(config.base_model_name_or_path, TRAINED_ON_BYTES),
        target_modules=preflight.modules_of(config),
        targets_by_pattern=config.targets_by_pattern,
        files=report.files,
        bytes=size,
    )
    why = f"adapter {adapter.name!r} needs it"
    fresh = [f for f in files.of_adapter(report) if f.key not in scene.world.files]
    changes = [files.written(file, FileAbsent(), why) for file in fresh]
    # What failed for a former adapter of this name is no failure of this one.
    changes += files.fetched_again(scene, (file.key for file in report.files), why)
    raised = preflight.with_rank(base, (found.rank,))
    grown = catalog.changed(base, raised, f"adapter {adapter.name}")
    if grown is not None:
        raise_why = f"its adapter {adapter.name!r} has rank {found.rank}, engines start for {raised.lora_rank}"
        changes.append(replace(grown, reason=raise_why))
    said = f"rank {found.rank}, {show_bytes(size)}"
    said = "; ".join((said, *found.warnings))
    changes.append(change(after, AdapterChecked(rank=found.rank), clipped(said, ERROR_BYTES)))
    return _decision(scene, adapter, tuple(changes))


def _ready(scene: Scene, adapter: Adapter, here: list[File]) -> Decision:
    """The version is told by what the files hold, so the same contents from elsewhere are the same version."""
    known = {file.key: file for file in here}
    told = tuple(
        replace(
            file,
            sha256=known[file.key].sha256 or "",
            bytes=known[file.key].bytes or file.bytes,
        )
        for file in adapter.files
    )
    version = version_of((file.name, file.sha256) for file in told)
    after = replace(
        adapter,
        phase="ready",
        since=scene.now,
        version=version,
        files=told,
        bytes=sum(file.bytes for file in told),
    )
    ready = change(after, AdapterReady(version=version), f"version {version}, its files are here")
    return _decision(scene, adapter, (ready,))


def _refused(scene: Scene, adapter: Adapter, code: str, sentence: str) -> Decision:
    reason = clipped(sentence, ERROR_BYTES) or code
    after = replace(adapter, phase="refused", since=scene.now, code=code, reason=reason)
    return _decision(scene, adapter, (change(after, AdapterRefused(code=code), reason),))


def _baseless(scene: Scene, adapter: Adapter) -> Decision:
    sentence = f"its base {adapter.base!r} is not in the catalog any more"
    return _refused(scene, adapter, codes.NOT_FOUND, sentence)


def change(adapter: Adapter, event: AdapterEvent, reason: str) -> Change:
    """An event of the adapter with the state after it."""
    return Change(noun="adapter", key=(adapter.name,), event=event, state=adapter, reason=reason)


def _decision(scene: Scene, adapter: Adapter, changes: tuple[Change, ...]) -> Decision:
    last = changes[-1]
    return Decision(
        changes=changes,
        what=f"adapter {adapter.name}: {last.event.__struct_config__.tag}, {last.reason}",
        cause=scene.world.head("adapter", adapter.name).id,
    )
