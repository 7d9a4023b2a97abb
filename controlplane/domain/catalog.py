"""Decides what a command does to the catalog: the changes of one batch, or why there are none.

One namespace holds names and aliases. It never starts or stops anything; replicas of a changed or
removed model are the reconciler's affair, which sees that their revision or model is gone.
"""

from collections.abc import Collection, Mapping, Sequence
from difflib import get_close_matches
from typing import Final, assert_never

import msgspec

from controlplane.domain import entries, needs
from controlplane.domain.decision import Change, Ids, Rejected
from controlplane.domain.entries import ParsedEntry
from schemas import codes
from schemas.activation import ActivationDeleted
from schemas.commands import CatalogApply, ModelAdd, ModelRemove, ModelScale, Problem
from schemas.model import Model, ModelAdded, ModelChanged, ModelDeleted
from schemas.record import RecordDeleted

CatalogCommand = ModelAdd | CatalogApply | ModelRemove | ModelScale
Answer = tuple[Change, ...] | Rejected

TOMBSTONE_TTL_S: Final = 604_800
"""A week: any reader that was away for less still learns that the subject ended."""

initial: Final[Mapping[str, Model]] = {}
"""The catalog before the first event."""


def decide(
    models: Mapping[str, Model],
    body: CatalogCommand,
    *,
    actor: str,
    ids: Ids,
    activations: Collection[tuple[str, str]] = (),
    records: Collection[str] = (),
    files: Collection[str] = (),
) -> Answer:
    """The changes `body` asks for, all or nothing; an empty tuple when everything is so already.

    `activations` are the (model, scope) keys and `records` the model names that exist: a removed model
    ends with them in the same batch. `files` are the keys a source may name. A dry run decides the same changes; the caller does not append
    them.
    """
    match body:
        case ModelAdd():
            return _add(models, body, actor, ids, files)
        case CatalogApply():
            return _apply(models, body, actor, ids, activations, records, files)
        case ModelRemove():
            if body.model not in models:
                return not_found(models, body.model)
            return _endings(body.model, actor, activations, records)
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
    for model in models.values():
        if name in model.aliases:
            sentence = f"{name!r} is an alias; the model is called {model.name!r}"
            return Rejected(code=codes.NOT_FOUND, sentence=sentence)
    near = get_close_matches(name, models, n=1)
    hint = f"; did you mean {near[0]!r}?" if near else ""
    return Rejected(code=codes.NOT_FOUND, sentence=f"there is no model {name!r}{hint}")


def _add(
    models: Mapping[str, Model], body: ModelAdd, actor: str, ids: Ids, files: Collection[str]
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
    taken = _collisions(models, parsed)
    return taken if taken is not None else _put(models, parsed, actor, ids)


def _apply(
    models: Mapping[str, Model],
    body: CatalogApply,
    actor: str,
    ids: Ids,
    activations: Collection[tuple[str, str]],
    records: Collection[str],
    files: Collection[str],
) -> Answer:
    """Cases: 1 entries that are wrong; 2 names that are taken; 3 entries to add or change; 4 the rest
    is left alone, or ends when `prune`."""
    parsed = _parse(body.entries, files)
    if isinstance(parsed, Rejected):  # 1
        return parsed
    named = {entry.name for entry in parsed}
    gone = sorted(models.keys() - named) if body.prune else []
    left = {name: model for name, model in models.items() if name not in gone}
    taken = _collisions(left, parsed)  # 2
    if taken is not None:
        return taken
    changes = list(_put(models, parsed, actor, ids))  # 3
    for name in gone:  # 4
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


def _collisions(left: Mapping[str, Model], parsed: Sequence[ParsedEntry]) -> Rejected | None:
    """Names and aliases of `parsed` that a model they do not replace holds already."""
    named = {entry.name for entry in parsed}
    holders: dict[str, str] = {}
    for model in left.values():
        if model.name in named:
            continue
        holders[model.name] = f"{model.name!r} is a model already"
        for alias in model.aliases:
            holders[alias] = f"{alias!r} is an alias of {model.name!r} already"
    problems: list[Problem] = []
    for index, entry in enumerate(parsed):
        if entry.name in holders:
            problems.append(Problem(path=f"[{index}].name", sentence=holders[entry.name]))
        for place, alias in enumerate(entry.aliases):
            if alias in holders:
                path = f"[{index}].aliases[{place}]"
                problems.append(Problem(path=path, sentence=holders[alias]))
    if not problems:
        return None
    return Rejected(code=codes.EXISTS, sentence=_summary(problems), problems=tuple(problems))


def _put(
    models: Mapping[str, Model], parsed: Sequence[ParsedEntry], actor: str, ids: Ids
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
        new = entry.as_model(incarnation=old.incarnation, order=old.order)
        change = _changed(old, _with_reason(old, new), actor)
        if change is not None:
            changes.append(change)
    return tuple(changes)


def _with_reason(old: Model, new: Model) -> Model:
    """Why the control plane switched it off stays said for as long as nobody switches it on."""
    reason = old.off_reason if new.scaling.max <= 0 else ""
    return msgspec.structs.replace(new, off_reason=reason)


def _changed(old: Model, new: Model, actor: str) -> Change | None:
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
    change = _changed(old, new, actor)
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
