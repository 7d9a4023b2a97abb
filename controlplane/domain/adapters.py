"""Decides what becomes of LoRA adapters in the catalog: added, judged, fetched and ready, refused, pinned, removed.

It loads none into an engine: agents do that, from what is ready. Whether one fits its base is preflight's to say,
how its files come to a mirror is files.py's.
"""

import hashlib
from collections.abc import Iterable, Mapping
from difflib import get_close_matches
from typing import Final, assert_never

import msgspec
from msgspec.structs import replace

from controlplane.domain import adaptersources, catalog, entries, files, names, needs, preflight
from controlplane.domain.catalog import TOMBSTONE_TTL_S
from controlplane.domain.decision import Accepted, Change, Decision, Rejected
from controlplane.domain.filesets import Refusal
from controlplane.domain.jobtexts import ERROR_BYTES, clipped
from controlplane.domain.quantities import show_bytes
from controlplane.domain.reports import AdapterRead, AdapterUnreadable
from controlplane.domain.scene import Scene
from schemas import adapternames, codes
from schemas.adapter import (
    Adapter,
    AdapterAdded,
    AdapterChanged,
    AdapterChecked,
    AdapterDeleted,
    AdapterEvent,
    AdapterPhase,
    AdapterReady,
    AdapterRefused,
)
from schemas.commands import AdapterAdd, AdapterPin, AdapterRemove, Problem
from schemas.file import File, FileAbsent
from schemas.model import Model

AdapterCommand = AdapterAdd | AdapterRemove | AdapterPin

VERSION_DIGITS: Final = 12
"""Hex digits of a version."""

GIVEN_BYTES: Final = 3072
"""What its names and source may take: with what is read of it the whole state stays below 8 KiB."""

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


def decide(scene: Scene, actor: str, body: AdapterCommand) -> Accepted | Rejected:
    """What a person's wish about an adapter does, all or nothing."""
    match body:
        case AdapterAdd():
            return _add(scene, actor, body)
        case AdapterRemove():
            return _remove(scene, actor, body)
        case AdapterPin():
            return _pin(scene, actor, body)
        case _:
            assert_never(body)


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
        report.config, base, repo=_repo_of(scene, base), trust_base=adapter.trust_base
    )
    if isinstance(found, preflight.Refusal):  # 3
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
        event = AdapterChanged(by="control", fields=("phase", "files"))
        why = "the log knows its files no more, it is read again"
        return _decision(scene, adapter, (_change(after, event, why),))
    if mirror and all(files.is_here(file, mirror) for file in here):  # 3
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


def _add(scene: Scene, actor: str, body: AdapterAdd) -> Accepted | Rejected:
    """1. name, aliases or source are wrong; 2. its base is not there, or loads no adapters; 3. a name is taken;
    4. it is to be read. A refused one of that name makes room for it, with another incarnation."""
    world = scene.world
    problems = _problems(body)
    source = adaptersources.read_source(body.source)
    if isinstance(source, Refusal):
        problems.append(Problem(path="source", sentence=source.sentence))
    if problems:  # 1
        sentence = f"{problems[0].path}: {problems[0].sentence}"
        return Rejected(code=codes.INVALID, sentence=sentence, problems=tuple(problems))
    base = world.models.get(body.base)
    if base is None:  # 2
        return catalog.not_found(world.models, body.base)
    if base.max_loaded_adapters <= 0:
        return Rejected(
            code=codes.NO_ADAPTERS,
            sentence=f"the model {base.name!r} loads no adapters: give its entry max_loaded_adapters",
        )
    before = world.adapters.get(body.name)
    if before is not None and before.phase != "refused":  # 3
        sentence = (
            f"{body.name!r} is an adapter of {before.base!r} already; "
            "remove it first with `yardctl adapter rm`"
        )
        return Rejected(code=codes.EXISTS, sentence=sentence)
    taken = _taken(scene, body, base)
    if taken:
        return Rejected(code=codes.EXISTS, sentence=taken)
    if body.pinned:
        full = _pins_full(scene, base, body.name)
        if full is not None:
            return full
    order = max((one.order for one in world.adapters.values()), default=-1) + 1
    adapter = Adapter(  # 4
        name=body.name,
        incarnation=scene.ids.incarnation(),
        base=base.name,
        base_incarnation=base.incarnation,
        phase="reading",
        since=scene.now,
        by=actor,
        source=body.source.strip(),
        aliases=tuple(body.aliases),
        pinned=body.pinned,
        trust_base=body.trust_base,
        order=order if before is None else before.order,
    )
    size = len(msgspec.json.encode(adapter))
    if size > GIVEN_BYTES:
        sentence = (
            f"names and source take {show_bytes(size)}; every event carries them, "
            f"at most {show_bytes(GIVEN_BYTES)}"
        )
        return Rejected(code=codes.INVALID, sentence=sentence)
    why = f"added by {actor}" if before is None else f"added by {actor} in place of the refused one"
    change = _change(adapter, AdapterAdded(by=actor), why)
    return Accepted(
        changes=(change,),
        sentence=f"{adapter.name} added to {base.name}, to be read from {adapter.source}",
    )


def _problems(body: AdapterAdd) -> list[Problem]:
    """What is wrong with its names, each by itself."""
    found: list[Problem] = []
    spellings = [("name", body.name)]
    spellings += [(f"aliases[{at}]", alias) for at, alias in enumerate(body.aliases)]
    seen: set[str] = set()
    for path, name in spellings:
        wrong = entries.name_problem(name)
        if not wrong and adapternames.of_engine_name(name) is not None:
            wrong = f"{name!r} is how engines are told a version of an adapter; leave the end out"
        if not wrong and name in seen:
            wrong = f"{name!r} is given twice"
        seen.add(name)
        if wrong:
            found.append(Problem(path=path, sentence=wrong))
    return found


def _taken(scene: Scene, body: AdapterAdd, base: Model) -> str:
    """Why the adapter may not have its names, empty when it may: one of them, or one of the pairs with a name of
    its base, has a meaning already, or a running job is about to give it one."""
    world = scene.world
    others = [one for one in world.adapters.values() if one.name != body.name]
    own = (body.name, *body.aliases)
    holders = names.holders(world.models.values(), others)
    pairs = names.pairs(world.models, others)
    for name in own:
        said = holders.get(name) or pairs.get(name)
        if said is not None:
            return f"{said}; give another name"
    for pair, name in names.pairs_of(base, own):
        said = holders.get(pair) or pairs.get(pair)
        if said is not None:
            return f"{pair!r} would ask for {name!r}, but {said}; give another name"
    for id_ in sorted(world.running_jobs):
        job = world.jobs[id_]
        for name in own:
            if name in (job.model, *job.request.aliases):
                return f"job {id_} is serving a model as {name!r} already; give another name"
    return ""


def _pins_full(scene: Scene, base: Model, name: str) -> Rejected | None:
    """The refusal of a pin that leaves no place: pinned adapters are never given up for others."""
    pinned = [
        one.name
        for _, one in sorted(scene.world.adapters.items())
        if one.base == base.name and one.pinned and one.phase != "refused" and one.name != name
    ]
    if len(pinned) < base.max_loaded_adapters:
        return None
    sentence = (
        f"{len(pinned)} adapters of {base.name!r} are pinned already ({names.listed(pinned)}), and it keeps "
        f"{base.max_loaded_adapters} loaded (max_loaded_adapters)"
    )
    return Rejected(code=codes.CONFLICT, sentence=sentence)


def _not_found(scene: Scene, name: str) -> Rejected:
    near = get_close_matches(name, scene.world.adapters, n=1)
    return names.unknown_adapter(scene.world.adapters, name, near)


def _remove(scene: Scene, actor: str, body: AdapterRemove) -> Accepted | Rejected:
    """Its subject ends at once. Engines that have it unload it once no request uses it."""
    adapter = scene.world.adapters.get(body.adapter)
    if adapter is None:
        return _not_found(scene, body.adapter)
    change = Change(
        noun="adapter",
        key=(adapter.name,),
        event=AdapterDeleted(),
        state=None,
        reason=f"removed by {actor}",
        ttl_s=TOMBSTONE_TTL_S,
    )
    held = [
        f"{slots.replica} on {slots.node} unloads it once no request uses it"
        for _, slots in sorted(scene.world.slots.items())
        if any(slot.adapter == adapter.name for slot in slots.loaded)
    ]
    return Accepted(changes=(change,), sentence=f"{adapter.name} removed", lines=tuple(held))


def _pin(scene: Scene, actor: str, body: AdapterPin) -> Accepted | Rejected:
    adapter = scene.world.adapters.get(body.adapter)
    if adapter is None:
        return _not_found(scene, body.adapter)
    wish = "pinned" if body.pinned else "not pinned"
    if adapter.pinned == body.pinned:
        return Accepted(sentence=f"{adapter.name} is {wish} already")
    if body.pinned:
        if adapter.phase == "refused":
            sentence = f"{adapter.name} is refused, no replica loads it: {adapter.reason}"
            return Rejected(code=codes.CONFLICT, sentence=sentence)
        base = base_of(scene.world.models, adapter)
        full = _pins_full(scene, base, adapter.name) if base is not None else None
        if full is not None:
            return full
    event = AdapterChanged(by=actor, fields=("pinned",))
    change = _change(replace(adapter, pinned=body.pinned), event, f"{wish} by {actor}")
    return Accepted(changes=(change,), sentence=f"{adapter.name} is {wish}")


def _repo_of(scene: Scene, base: Model) -> str:
    """The repository the base's weights came from, where the mirrors know it."""
    file = scene.world.files.get(needs.key_of_source(base.source) or "")
    return file.repo if file is not None else ""


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
    change = catalog.changed(base, raised, f"adapter {adapter.name}")
    if change is not None:
        raise_why = f"its adapter {adapter.name!r} has rank {found.rank}, engines start for {raised.lora_rank}"
        changes.append(replace(change, reason=raise_why))
    said = f"rank {found.rank}, {show_bytes(size)}"
    said = "; ".join((said, *found.warnings))
    changes.append(_change(after, AdapterChecked(rank=found.rank), clipped(said, ERROR_BYTES)))
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
    change = _change(after, AdapterReady(version=version), f"version {version}, its files are here")
    return _decision(scene, adapter, (change,))


def _refused(scene: Scene, adapter: Adapter, code: str, sentence: str) -> Decision:
    reason = clipped(sentence, ERROR_BYTES) or code
    after = replace(adapter, phase="refused", since=scene.now, code=code, reason=reason)
    return _decision(scene, adapter, (_change(after, AdapterRefused(code=code), reason),))


def _baseless(scene: Scene, adapter: Adapter) -> Decision:
    sentence = f"its base {adapter.base!r} is not in the catalog any more"
    return _refused(scene, adapter, codes.NOT_FOUND, sentence)


def _change(adapter: Adapter, event: AdapterEvent, reason: str) -> Change:
    return Change(noun="adapter", key=(adapter.name,), event=event, state=adapter, reason=reason)


def _decision(scene: Scene, adapter: Adapter, changes: tuple[Change, ...]) -> Decision:
    last = changes[-1]
    return Decision(
        changes=changes,
        what=f"adapter {adapter.name}: {last.event.__struct_config__.tag}, {last.reason}",
        cause=scene.world.head("adapter", adapter.name).id,
    )
