"""Holds what of the catalog an agent follows: every model and adapter, as the log told them last.

A pass over the whole log replaces what was known only once it is complete, so nothing ever looks removed
that merely was not read yet. It decides nothing; what is wanted of it is `domain/adapterfiles.py`'s affair.
"""

from collections.abc import Iterator, Mapping
from typing import Generic, TypeVar

from msgspec import Struct

from events.log import Batch, Broken
from schemas.adapter import Adapter
from schemas.model import Model

S = TypeVar("S", bound=Struct)


class Shelf(Generic[S]):
    """The aggregates of one noun by name. `synced`: all of them were read once; it stays so in an outage."""

    def __init__(self, kind: type[S]) -> None:
        self._kind = kind
        self._building: dict[str, S] | None = {}
        self.states: Mapping[str, S] = {}
        self.synced = False

    def read_anew(self) -> None:
        """What comes next begins a pass over the whole log."""
        self._building = {}

    def take(self, batch: Batch) -> frozenset[str]:
        """Folds one batch; the names of those that are different now.

        1. it only reports a lost connection: what is known stays. 2. the history was replaced: a new pass
        begins beside what is known. 3. while a pass runs it is filled, and takes over when it is whole.
        4. otherwise the batch changes what is known.
        """
        if not batch.connected:  # 1
            return frozenset()
        if batch.reset:  # 2
            self._building = {}
        building = self._building
        if building is not None:  # 3
            for _ in self._folded(building, batch):
                pass
            if not batch.synced:
                return frozenset()
            before, self.states, self._building = self.states, building, None
            self.synced = True
            names = {*before, *building}
            return frozenset(n for n in names if before.get(n) != building.get(n))
        states = dict(self.states)  # 4
        before = self.states
        touched = frozenset(self._folded(states, batch))
        self.states = states
        return frozenset(n for n in touched if before.get(n) != states.get(n))

    def _folded(self, states: dict[str, S], batch: Batch) -> Iterator[str]:
        """Puts the batch into `states`; yields each name it tells of.

        An event nobody can read, or one of a newer version, leaves what its subject said before.
        """
        for item in batch.items:
            told = item.previous if isinstance(item, Broken) else item
            if told is None or told.problem is not None:
                continue
            name = told.key[0]
            if isinstance(told.state, self._kind):
                states[name] = told.state
            else:  # a tombstone
                states.pop(name, None)
            yield name


class Catalog:
    """Models and adapters as they stand. One event loop owns it; readers get the mappings of the moment."""

    def __init__(self) -> None:
        self.model_shelf: Shelf[Model] = Shelf(Model)
        self.adapter_shelf: Shelf[Adapter] = Shelf(Adapter)

    @property
    def synced(self) -> bool:
        """Whether both were read wholly once: until then something missing may only be unread."""
        return self.model_shelf.synced and self.adapter_shelf.synced

    @property
    def models(self) -> Mapping[str, Model]:
        return self.model_shelf.states

    @property
    def adapters(self) -> Mapping[str, Adapter]:
        return self.adapter_shelf.states
