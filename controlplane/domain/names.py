"""Says what every name of the catalog stands for: models, adapters and their aliases share one namespace.

An adapter is also asked for as `BASE:NAME`, by every name of its base and every name of its own, so such a
pair is taken too. It refuses nothing by itself.
"""

from collections.abc import Iterable, Iterator, Mapping

from controlplane.domain.decision import Rejected
from schemas import codes
from schemas.adapter import Adapter
from schemas.model import Model

NAMED = 5
"""Names a sentence lists."""


def by_base(adapters: Mapping[str, Adapter]) -> dict[str, list[Adapter]]:
    """The adapters of each model that has any, by name."""
    found: dict[str, list[Adapter]] = {}
    for name in sorted(adapters):
        found.setdefault(adapters[name].base, []).append(adapters[name])
    return found


def model_called(models: Mapping[str, Model], name: str) -> Model | None:
    """The model of that name or alias; a name wins over an alias."""
    found = models.get(name)
    return found or next((model for model in models.values() if name in model.aliases), None)


def listed(names: Iterable[str]) -> str:
    """Names for a sentence, the first few of them."""
    known = list(names)
    more = len(known) - NAMED
    return ", ".join(known[:NAMED]) + (f" and {more} more" if more > 0 else "")


def pairs_of(base: Model, names: Iterable[str]) -> Iterator[tuple[str, str]]:
    """Each `BASE:NAME` that adapters called `names` are asked for as, with its name alone."""
    bases = (base.name, *base.aliases)
    for name in names:
        for one in bases:
            yield f"{one}:{name}", name


def holders(models: Iterable[Model], adapters: Iterable[Adapter]) -> dict[str, str]:
    """Every name and alias, with the sentence that says whose it is."""
    found: dict[str, str] = {}
    for model in models:
        found[model.name] = f"{model.name!r} is a model already"
        for alias in model.aliases:
            found[alias] = f"{alias!r} is an alias of {model.name!r} already"
    for adapter in adapters:
        found[adapter.name] = f"{adapter.name!r} is an adapter of {adapter.base!r} already"
        for alias in adapter.aliases:
            found[alias] = f"{alias!r} is an alias of the adapter {adapter.name!r} already"
    return found


def pairs(models: Mapping[str, Model], adapters: Iterable[Adapter]) -> dict[str, str]:
    """Every `BASE:NAME` that means an adapter, with the sentence that says which."""
    found: dict[str, str] = {}
    for adapter in adapters:
        base = models.get(adapter.base)
        if base is None:
            continue
        for pair, _ in pairs_of(base, (adapter.name, *adapter.aliases)):
            found[pair] = f"{pair!r} asks for the adapter {adapter.name!r} of {base.name!r} already"
    return found


def unknown_adapter(adapters: Mapping[str, Adapter], name: str, near: Iterable[str]) -> Rejected:
    """The refusal of a command about an adapter that does not exist; `near` are names like it."""
    for adapter in adapters.values():
        if name in adapter.aliases:
            sentence = f"{name!r} is an alias; the adapter is called {adapter.name!r}"
            return Rejected(code=codes.NOT_FOUND, sentence=sentence)
        if name == f"{adapter.base}:{adapter.name}":
            sentence = f"the adapter {name!r} of {adapter.base!r} is called {adapter.name!r}"
            return Rejected(code=codes.NOT_FOUND, sentence=sentence)
    hint = next((f"; did you mean {one!r}?" for one in near), "")
    return Rejected(code=codes.NOT_FOUND, sentence=f"there is no adapter {name!r}{hint}")
