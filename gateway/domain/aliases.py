"""Takes an entry out of a table of names, with the aliases that lead to it.

It must not judge whether a name may be given: that is the catalog's affair, which moves one in a batch of events.
"""

from collections.abc import Mapping
from typing import Protocol, TypeVar


class Named(Protocol):
    """An entry of the catalog, with the sequence of its last change."""

    @property
    def name(self) -> str: ...

    @property
    def aliases(self) -> tuple[str, ...]: ...

    @property
    def seq(self) -> int: ...


Entry = TypeVar("Entry", bound=Named)


def take_out(entries: dict[str, Entry], aliases: dict[str, str], name: str) -> None:
    """Removes the entry of `name`, if there is one. An alias of it that another entry has as well leads there from
    now on, to the one that changed last."""
    before = entries.pop(name, None)
    for alias in () if before is None else before.aliases:
        # One that moved to another entry in the same batch belongs to that one already.
        if aliases.get(alias) == name:
            _hand_on(entries, aliases, alias)


def _hand_on(entries: Mapping[str, Named], aliases: dict[str, str], alias: str) -> None:
    claims = [entry for entry in entries.values() if alias in entry.aliases]
    if claims:
        aliases[alias] = max(claims, key=lambda entry: entry.seq).name
    else:
        del aliases[alias]
