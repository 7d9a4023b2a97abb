"""Decides what a command does to the catalog: the changes of one batch, or why there are none.

One namespace holds names and aliases, those of adapters too (names.py). It never starts or stops anything; replicas of a changed or
removed model are the reconciler's affair, which sees that their revision or model is gone.
"""

from collections.abc import Collection, Iterable, Mapping, Sequence
from difflib import get_close_matches
from typing import Final, assert_never

import msgspec

from controlplane.domain import entries, names, needs, preflight
from controlplane.domain.decision import Change, Ids, Rejected
from controlplane.domain.entries import ParsedEntry
from schemas import codes
from schemas.activation import ActivationDeleted
from schemas.adapter import Adapter
from schemas.commands import CatalogApply, ModelAdd, ModelRemove, ModelScale, Problem
from schemas.file import File
from schemas.model import Model, ModelAdded, ModelChanged, ModelDeleted
from schemas.record import RecordDeleted

CatalogCommand = ModelAdd | CatalogApply | ModelRemove | ModelScale
Answer = tuple[Change, ...] | Rejected

TOMBSTONE_TTL_S: Final = 604_800
"""A week: any reader that was away for less still learns that the subject ended."""

initial: Final[Mapping[str, Model]] = {}
"""The catalog before the first event."""

NO_ADAPTERS: Final[Mapping[str, Adapter]] = {}
NO_FILES: Final[Mapping[str, File]] = {}

Adapters = Mapping[str, Sequence[Adapter]]
"""By their base."""


def decide(
    models: Mapping[str, Model],
    body: CatalogCommand,
    *,
    actor: str,
    ids: Ids,
    activations: Collection[tuple[str, str]] = (),
    records: Collection[str] = (),
    files: Mapping[str, File] = NO_FILES,
    adapters: Mapping[str, Adapter] = NO_ADAPTERS,
) -> Answer:
    """The changes `body` asks for, all or nothing; an empty tuple when everything is so already.

    `activations` are the (model, scope) keys and `records` the model names that exist: a removed model
    ends with them in the same batch. `files` are those a source may name, by key. `adapters` have names of their own
    and need their base as it is. A dry run decides the same changes; the caller does not append them.
    """
    match body:
        case ModelAdd():
            return _add(models, body, actor, ids, files, adapters)
        case CatalogApply():
            return _apply(models, body, actor, ids, activations, records, files, adapters)
        case ModelRemove():
            if body.model not in models:
                return not_found(models, body.model)
            used = _in_use(names.by_base(adapters), (body.model,))
            return used if used is not None else _endings(body.model, actor, activations, records)
        case ModelScale():
            return _scale(models, body, actor)
        case _:
            assert_never(body)


def evolve(models: Mapping[str, Model], change: Change) -> Mapping[str, Model]:
    """The catalog after one change; changes of other nouns leave it alone."""
    if change.noun != "model":
        return models
    after = dict(models)
    if isinstance(change.state, Model):
        after[change.key[0]] = change.state
    else:
        after.pop(change.key[0], None)
    return after


def not_found(models: Mapping[str, Model], name: str) -> Rejected:
    """The refusal of a command about a model that does not exist."""
    model = names.model_called(models, name)
    if model is not None:
        sentence = f"{name!r} is an alias; the model is called {model.name!r}"
        return Rejected(code=codes.NOT_FOUND, sentence=sentence)
    near = get_close_matches(name, models, n=1)
    hint = f"; did you mean {near[0]!r}?" if near else ""
    return Rejected(code=codes.NOT_FOUND, sentence=f"there is no model {name!r}{hint}")


def _add(
    models: Mapping[str, Model],
    body: ModelAdd,
    actor: str,
    ids: Ids,
    files: Mapping[str, File],
    adapters: Mapping[str, Adapter],
) -> Answer:
    parsed = _parse((body.entry,), files)
    if isinstance(parsed, Rejected):
        return parsed
    (entry,) = parsed
    if entry.name in models:
        sentence = (
            f"there is a model {entry.name!r} already; change it with `yardctl apply`, "
            "or remove it first"
        )
        where = (Problem(path="[0].name", sentence=sentence),)
        return Rejected(code=codes.EXISTS, sentence=sentence, problems=where)
    taken = _collisions(models, parsed, adapters)
    return taken if taken is not None else _put(models, parsed, actor, ids, {})


def _apply(
    models: Mapping[str, Model],
    body: CatalogApply,
    actor: str,
    ids: Ids,
    activations: Collection[tuple[str, str]],
    records: Collection[str],
    files: Mapping[str, File],
    adapters: Mapping[str, Adapter],
) -> Answer:
    """Cases: 1 entries that are wrong; 2 names that are taken; 3 adapters that would lose their base, or would
    not fit it any more; 4 entries to add or change; 5 the rest is left alone, or ends when `prune`."""
    parsed = _parse(body.entries, files)
    if isinstance(parsed, Rejected):  # 1
        return parsed
    named = {entry.name for entry in parsed}
    gone = sorted(models.keys() - named) if body.prune else []
    left = {name: model for name, model in models.items() if name not in gone}
    refused = _collisions(left, parsed, adapters)  # 2
    here = names.by_base(adapters)
    refused = refused or _in_use(here, gone) or _misfits(models, parsed, here, files)  # 3
    if refused is not None:
        return refused
    changes = list(_put(models, parsed, actor, ids, here))  # 4
    for name in gone:  # 5
        changes.extend(_endings(name, actor, activations, records))
    return tuple(changes)


def _parse(raw: Sequence[object], files: Collection[str]) -> tuple[ParsedEntry, ...] | Rejected:
    """All entries checked, each by itself, for names given twice and for content no mirror knows."""
    found: list[ParsedEntry] = []
    problems: list[Problem] = []
    places: dict[str, str] = {}
    for index, one in enumerate(raw):
        path = f"[{index}]"
        entry = entries.parse(one, path)
        if not isinstance(entry, ParsedEntry):
            problems.extend(entry)
            continue
        spellings = [(f"{path}.name", entry.name)]
        spellings += [(f"{path}.aliases[{i}]", alias) for i, alias in enumerate(entry.aliases)]
        for place, name in spellings:
            if name in places:
                sentence = (
                    f"{name!r} is given at {places[name]} already; a name stands for one model"
                )
                problems.append(Problem(path=place, sentence=sentence))
            places.setdefault(name, place)
        first = needs.key_of_source(entry.source)
        if first is not None and first not in files:
            sentence = (
                f"{entry.source} names no file of the mirrors; `yardctl mirror list` shows them"
            )
            problems.append(Problem(path=f"{path}.source", sentence=sentence))
        found.append(entry)
    if problems:
        return Rejected(
            code=entries.code_of(problems), sentence=_summary(problems), problems=tuple(problems)
        )
    return tuple(found)


def _summary(problems: Sequence[Problem]) -> str:
    first = f"{problems[0].path}: {problems[0].sentence}"
    more = len(problems) - 1
    return first if not more else f"{first} (and {more} more)"


def _collisions(
    left: Mapping[str, Model], parsed: Sequence[ParsedEntry], adapters: Mapping[str, Adapter]
) -> Rejected | None:
    """Names and aliases of `parsed` that a model they do not replace, or an adapter, holds already: as a name
    (1), or as a `BASE:NAME` an adapter is asked for as (2); and such pairs that new aliases of a base would make
    of a name (3)."""
    named = {entry.name for entry in parsed}
    others = {name: model for name, model in left.items() if name not in named}
    holders = names.holders(others.values(), adapters.values())
    after = {**others, **{one.name: one.as_model(incarnation="", order=0) for one in parsed}}
    pairs = names.pairs(after, adapters.values()) if adapters else {}
    here = names.by_base(adapters)
    problems: list[Problem] = []
    for index, entry in enumerate(parsed):
        places = [(f"[{index}].name", entry.name)]
        places += [(f"[{index}].aliases[{at}]", alias) for at, alias in enumerate(entry.aliases)]
        meant = _meant_elsewhere(entry.name, after, here) if entry.name in here else {}
        own = _own_pairs(after[entry.name], here.get(entry.name, ()))
        for path, name in places:
            taken = holders.get(name) or pairs.get(name)  # 1, 2
            if taken is None and meant:
                taken = _pair_taken(name, here[entry.name], meant, own)  # 3
            if taken is not None:
                problems.append(Problem(path=path, sentence=taken))
    if not problems:
        return None
    return Rejected(code=codes.EXISTS, sentence=_summary(problems), problems=tuple(problems))


def _meant_elsewhere(base: str, after: Mapping[str, Model], adapters: Adapters) -> dict[str, str]:
    """What has a meaning besides the pairs of `base` itself: names, aliases, and the pairs of other bases."""
    others = [one for other, here in adapters.items() if other != base for one in here]
    return names.pairs(after, others) | names.holders(after.values(), (*others, *adapters[base]))


def _own_pairs(base: Model, adapters: Sequence[Adapter]) -> dict[str, str]:
    """Every pair that asks for one of the adapters of `base`, with the last of those it would ask for."""
    return {
        pair: adapter.name
        for adapter in adapters
        for pair, _ in names.pairs_of(base, (adapter.name, *adapter.aliases))
    }


def _pair_taken(
    name: str, adapters: Sequence[Adapter], meant: Mapping[str, str], own: Mapping[str, str]
) -> str | None:
    """Why a model with these adapters may not be called `name` although nobody else is: with one of them that
    would make a pair that means something else already, or another one of them (`own`)."""
    for adapter in adapters:
        for pair in (f"{name}:{one}" for one in (adapter.name, *adapter.aliases)):
            if pair in meant:
                return f"{pair!r} would ask for the adapter {adapter.name!r}, but {meant[pair]}"
            if own[pair] != adapter.name:
                return f"{pair!r} would ask for the adapter {adapter.name!r} and for {own[pair]!r}"
    return None


def _in_use(adapters: Adapters, gone: Iterable[str]) -> Rejected | None:
    """The refusal to remove models that have adapters."""
    for base in gone:
        found = [one.name for one in adapters.get(base, ())]
        if found:
            many = "an adapter" if len(found) == 1 else f"{len(found)} adapters"
            sentence = (
                f"the model {base!r} has {many}: {names.listed(found)}; "
                "remove them first with `yardctl adapter rm`"
            )
            return Rejected(code=codes.IN_USE, sentence=sentence)
    return None


def _misfits(
    models: Mapping[str, Model],
    parsed: Sequence[ParsedEntry],
    adapters: Adapters,
    files: Mapping[str, File],
) -> Rejected | None:
    """The refusal of changed entries that adapters which fit them as they were do not fit any more."""
    problems: list[Problem] = []
    for index, entry in enumerate(parsed):
        old = models.get(entry.name)
        if old is None or entry.name not in adapters:
            continue
        new = _renewed(old, entry, adapters)
        repo = needs.repo_of(files, new.source)
        lost: dict[str, list[str]] = {}
        pinned = 0
        for adapter in adapters[entry.name]:
            if adapter.phase == "refused":
                continue
            pinned += adapter.pinned
            found = preflight.misfit(adapter, new)
            if found is None or preflight.misfit(adapter, old) is not None:
                found = preflight.loses_base(adapter, old, new, repo=repo)
            if found is not None:
                lost.setdefault(found.sentence, []).append(adapter.name)
        for sentence, whose in lost.items():
            said = f"{names.listed(whose)} would not fit any more: {sentence}"
            problems.append(Problem(path=f"[{index}]", sentence=said))
        if 0 < new.max_loaded_adapters < min(pinned, old.max_loaded_adapters):
            sentence = (
                f"{pinned} of its adapters are pinned and max_loaded_adapters would be "
                f"{new.max_loaded_adapters}; unpin some first with `yardctl adapter unpin`"
            )
            problems.append(Problem(path=f"[{index}].max_loaded_adapters", sentence=sentence))
    if not problems:
        return None
    return Rejected(code=codes.CONFLICT, sentence=_summary(problems), problems=tuple(problems))


def _put(
    models: Mapping[str, Model],
    parsed: Sequence[ParsedEntry],
    actor: str,
    ids: Ids,
    adapters: Adapters,
) -> tuple[Change, ...]:
    """Added and changed models in the order of the file; an equal entry makes no change."""
    changes: list[Change] = []
    order = max((model.order for model in models.values()), default=-1)
    for entry in parsed:
        old = models.get(entry.name)
        if old is None:
            order += 1
            new = entry.as_model(incarnation=ids.incarnation(), order=order)
            changes.append(
                Change(
                    noun="model",
                    key=(new.name,),
                    event=ModelAdded(by=actor),
                    state=new,
                    reason=f"added by {actor}",
                )
            )
            continue
        change = changed(old, _renewed(old, entry, adapters), actor)
        if change is not None:
            changes.append(change)
    return tuple(changes)


def _renewed(old: Model, entry: ParsedEntry, adapters: Adapters) -> Model:
    """The model with its entry as given; what the control plane keeps in it stays, and grows where adapters it
    has need that now."""
    new = entry.as_model(incarnation=old.incarnation, order=old.order)
    new = _with_reason(old, msgspec.structs.replace(new, lora_rank=old.lora_rank))
    here = adapters.get(new.name, ())
    return preflight.with_rank(new, (one.rank for one in here if one.phase != "refused"))


def _with_reason(old: Model, new: Model) -> Model:
    """Why the control plane switched it off stays said for as long as nobody switches it on."""
    reason = old.off_reason if new.scaling.max <= 0 else ""
    return msgspec.structs.replace(new, off_reason=reason)


def changed(old: Model, new: Model, actor: str) -> Change | None:
    """`model.changed` with the fields that differ, None when none does."""
    fields = tuple(
        field.name
        for field in msgspec.structs.fields(Model)
        if getattr(old, field.name) != getattr(new, field.name)
    )
    if not fields:
        return None
    return Change(
        noun="model",
        key=(new.name,),
        event=ModelChanged(by=actor, fields=fields),
        state=new,
        reason=f"{', '.join(fields)} changed by {actor}",
    )


def _scale(models: Mapping[str, Model], body: ModelScale, actor: str) -> Answer:
    old = models.get(body.model)
    if old is None:
        return not_found(models, body.model)
    if body.min < 0 or body.max < 0:
        sentence = f"min and max are whole numbers of at least 0, got {body.min} and {body.max}"
        return Rejected(code=codes.INVALID, sentence=sentence)
    wrong = entries.check_scaling(body.min, body.max)
    if wrong is not None:
        return Rejected(code=codes.INVALID, sentence=wrong)
    scaling = msgspec.structs.replace(old.scaling, min=body.min, max=body.max)
    new = _with_reason(old, msgspec.structs.replace(old, scaling=scaling))
    change = changed(old, new, actor)
    return () if change is None else (change,)


def _endings(
    name: str, actor: str, activations: Collection[tuple[str, str]], records: Collection[str]
) -> tuple[Change, ...]:
    """The tombstones of a model, its activations and its record, to be stored in one batch."""
    reason = f"removed by {actor}"
    ends = [Change(noun="model", key=(name,), event=ModelDeleted(), state=None)]
    ends += [
        Change(noun="activation", key=key, event=ActivationDeleted(), state=None)
        for key in sorted(activations)
        if key[0] == name
    ]
    if name in records:
        ends.append(Change(noun="record", key=(name,), event=RecordDeleted(), state=None))
    return tuple(msgspec.structs.replace(end, reason=reason, ttl_s=TOMBSTONE_TTL_S) for end in ends)
