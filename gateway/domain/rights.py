"""Decides which models and adapters the holder of a key may name, see and start.

It is asked before anybody says whether a name exists, and it must not choose what serves a request.
"""

from collections.abc import Iterable
from functools import lru_cache
from typing import Final

from msgspec import structs

from gateway.domain.admission import ON_ITS_WAY
from gateway.domain.answers import Answer, answer
from gateway.domain.demand import is_pending
from gateway.domain.keytable import Caller
from gateway.domain.status import ModelCard
from gateway.domain.table import Table

_MOST_RULES: Final = 4096
"""Sets of patterns whose meaning is remembered: about one for each key."""


class Allowed:
    """The names one list of patterns allows; `*` stands for any text, nothing else is special."""

    __slots__ = ("_names", "_patterns")

    def __init__(self, patterns: tuple[str, ...]) -> None:
        self._names = frozenset(p for p in patterns if "*" not in p)
        self._patterns = tuple(tuple(p.split("*")) for p in patterns if "*" in p)

    def __contains__(self, name: str) -> bool:
        return name in self._names or any(_fits(name, pieces) for pieces in self._patterns)


def _fits(name: str, pieces: tuple[str, ...]) -> bool:
    """Whether the name is these pieces, in order, with anything between them.

    Each is looked for once, behind the one before: of a name as long as its sender likes, a regular expression
    with several `.*` might try every way to cut it.
    """
    first, *middle, last = pieces
    if len(name) < len(first) + len(last) or not name.startswith(first) or not name.endswith(last):
        return False
    at, end = len(first), len(name) - len(last)
    for piece in middle:
        found = name.find(piece, at, end)
        if found < 0:
            return False
        at = found + len(piece)
    return True


@lru_cache(maxsize=_MOST_RULES)
def allowed(patterns: tuple[str, ...]) -> Allowed:
    """What a key's `models` allow."""
    return Allowed(patterns)


def forbidden(caller: Caller, name: str, table: Table | None) -> Answer | None:
    """403 when the caller's key may not ask for `name`; None: it may, whether there is such a thing or not.

    1. nobody had to say who they are, or the key is for everything
    2. the name as it was asked
    3. an alias: the model's own name
    4. an adapter: its own name, and `base:adapter` with the names of both
    """
    key = caller.key
    if key is None or not key.models:  # 1
        return None
    names = allowed(key.models)
    if name in names:  # 2
        return None
    if table is not None:
        model = table.model(name)
        if model is not None:
            if model.name in names:  # 3
                return None
        else:
            entry = table.adapter(name)
            if entry is not None and (
                entry.name in names or _full_name(entry.adapter.base, entry.name) in names
            ):  # 4
                return None
    return answer(
        "key_not_allowed",
        f"The API key {key.name!r} may not be used for {name!r}.",
        param="model",
    )


def _full_name(base: str, adapter: str) -> str:
    return f"{base}:{adapter}"


def visible(caller: Caller, cards: Iterable[ModelCard]) -> tuple[ModelCard, ...]:
    """Of a list of models those the caller may name; one that may only be asked for by an alias goes by that."""
    key = caller.key
    if key is None or not key.models:
        return tuple(cards)
    names = allowed(key.models)
    seen: list[ModelCard] = []
    for card in cards:
        own = card.model in names
        if card.parent is not None:
            own = own or _full_name(card.parent, card.model) in names
        if own:
            seen.append(card)
            continue
        aliases = tuple(alias for alias in card.aliases if alias in names)
        if aliases:
            seen.append(structs.replace(card, id=aliases[0], aliases=aliases))
    return tuple(seen)


def may_not_wait(caller: Caller, table: Table, key: tuple[str, str]) -> Answer | None:
    """403 for who may not start models and would wait for one, in a scope, that nobody starts. One that runs, and
    only does not answer this gateway, or that is on its way for somebody else may be waited for."""
    own = caller.key
    if own is None or own.may_activate:
        return None
    model, scope = key
    if (
        is_pending(table.activation(model, scope))
        or table.routable(model, scope)
        or any(r.phase in ON_ITS_WAY for r in table.replicas_of(model, scope))
    ):
        return None
    return answer(
        "key_may_not_activate",
        f"The model {model!r} is not running, and the API key {own.name!r} may not start it.",
        param="model",
    )
