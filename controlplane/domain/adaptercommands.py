"""Decides what a person's wish about an adapter does: add it, remove it, pin it, or not.

It judges names, source and base alone; what is in the adapter's files is not known yet (adapters.py).
"""

from difflib import get_close_matches
from typing import Final, assert_never

import msgspec
from msgspec.structs import replace

from controlplane.domain import adapters, adaptersources, catalog, entries, names
from controlplane.domain.catalog import TOMBSTONE_TTL_S
from controlplane.domain.decision import Accepted, Change, Rejected
from controlplane.domain.filesets import Refusal
from controlplane.domain.quantities import show_bytes
from controlplane.domain.scene import Scene
from schemas import adapternames, codes
from schemas.adapter import Adapter, AdapterAdded, AdapterChanged, AdapterDeleted
from schemas.commands import AdapterAdd, AdapterPin, AdapterRemove, Problem
from schemas.model import Model
from schemas.replica import TERMINAL_PHASES

AdapterCommand = AdapterAdd | AdapterRemove | AdapterPin

GIVEN_BYTES: Final = 3072
"""What its names and source may take: with what is read of it the whole state stays below 8 KiB."""


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
    base = names.model_called(world.models, body.base)
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
    written = adapters.change(adapter, AdapterAdded(by=actor), why)
    return Accepted(
        changes=(written,),
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
    made = dict(names.pairs_of(base, own))
    for pair, name in made.items():
        said = holders.get(pair) or pairs.get(pair)
        if said is not None:
            return f"{pair!r} would ask for {name!r}, but {said}; give another name"
    engine_side = adapternames.of_engine_name(base.name)
    if engine_side is not None and engine_side[0] == body.name:
        return (
            f"an engine could be told {base.name!r} for it, and that is its base; give another name"
        )
    for id_ in sorted(world.running_jobs):
        job = world.jobs[id_]
        for name in (*own, *made):
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
    ended = Change(
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
        and not _is_over(scene, slots.replica)
    ]
    return Accepted(changes=(ended,), sentence=f"{adapter.name} removed", lines=tuple(held))


def _is_over(scene: Scene, replica: str) -> bool:
    """Whether its engine is gone. What it had loaded is told for a day after that."""
    known = scene.world.replicas.get(replica)
    return known is not None and known.phase in TERMINAL_PHASES


def _pin(scene: Scene, actor: str, body: AdapterPin) -> Accepted | Rejected:
    adapter = scene.world.adapters.get(body.adapter)
    if adapter is None:
        return _not_found(scene, body.adapter)
    if adapter.pinned == body.pinned:
        said = "is pinned already" if body.pinned else "was not pinned"
        return Accepted(sentence=f"{adapter.name} {said}")
    if body.pinned:
        if adapter.phase == "refused":
            sentence = f"{adapter.name} is refused, no replica loads it: {adapter.reason}"
            return Rejected(code=codes.CONFLICT, sentence=sentence)
        base = adapters.base_of(scene.world.models, adapter)
        full = _pins_full(scene, base, adapter.name) if base is not None else None
        if full is not None:
            return full
    wish = "pinned" if body.pinned else "pinned no more"
    event = AdapterChanged(by=actor, fields=("pinned",))
    written = adapters.change(replace(adapter, pinned=body.pinned), event, f"{wish} by {actor}")
    return Accepted(changes=(written,), sentence=f"{adapter.name} is {wish}")
