"""A yard whose catalog has LoRA adapters: its worker reads them from what a test says lies at each source.

`AdapterYard.sources` is by source. It decides nothing; what must hold of an adapter's moves it checks on the way.
"""

from dataclasses import dataclass, field
from typing import Any

from controlplane.domain import adapters, filesets, work
from controlplane.domain.decision import Change, Decision
from controlplane.domain.reports import AdapterConfig, AdapterRead, AdapterUnreadable, Report
from schemas import codes
from schemas.adapter import Adapter, AdapterDeleted, AdapterFile
from schemas.commands import AdapterAdd, AdapterPin, AdapterRemove, Outcome
from schemas.messages import tag_of
from schemas.model import Model, Profile
from tests.support.serving import COMMIT, ServeYard, join, sha_of
from tests.support.worlds import model, profile

Found = AdapterConfig | tuple[str, str]
"""What reading a source comes to: a configuration, or code and sentence of a refusal."""


def config(**fields: Any) -> AdapterConfig:
    """An ordinary configuration that fits `base_model`."""
    known: dict[str, Any] = {
        "r": 16,
        "base_model_name_or_path": "x/llama",
        "target_modules": ("q_proj", "v_proj"),
    }
    return AdapterConfig(**{**known, **fields})


def vllm(*args: str, name: str = "gpu", **fields: Any) -> Profile:
    return profile(name, engine="vllm", args=args, **fields)


def base_model(name: str = "llama", *args: str, **fields: Any) -> Model:
    """A model that keeps four adapters loaded."""
    known: dict[str, Any] = {"profiles": (vllm(*args),), "max_loaded_adapters": 4}
    return model(name, **{**known, **fields})


@dataclass
class AdapterYard(ServeYard):
    sources: dict[str, Found] = field(default_factory=dict)

    def check(self, decision: Decision) -> None:
        super().check(decision)
        for change in decision.changes:
            if change.noun == "adapter":
                self._check_adapter(change)

    def _check_adapter(self, change: Change) -> None:
        """It moves along the table, and says what its phase promises."""
        known = self.world.adapters.get(change.key[0])
        if isinstance(change.event, AdapterDeleted):
            assert known is not None
            assert change.ttl_s
            return
        state = change.state
        assert isinstance(state, Adapter)
        before = known.phase if known is not None else None
        if known is None or state.phase != known.phase:
            assert adapters.TRANSITIONS[(before, tag_of(change.event))] == state.phase
        if state.phase == "refused":
            assert state.code
            assert state.reason
        if state.phase == "ready":
            assert len(state.version) == adapters.VERSION_DIGITS
            assert all(file.sha256 for file in state.files)

    def _check_progress(self, change: Change, decision: Decision) -> None:
        if change.noun == "adapter":
            assert self.world.adapters.get(change.key[0]) != change.state, decision.what
        else:
            super()._check_progress(change, decision)

    def settle(self, bound: int = 2000) -> list[Decision]:
        """Hundreds of adapters are as many decisions."""
        return super().settle(bound)

    def perform(self, task: work.Task) -> Report:
        if not isinstance(task, work.ReadAdapter):
            return super().perform(task)
        nothing = (codes.NOT_AN_ADAPTER, "there is nothing")
        found = self.sources.get(task.source, nothing)
        if isinstance(found, tuple):
            return AdapterUnreadable(
                adapter=task.adapter,
                incarnation=task.incarnation,
                code=found[0],
                sentence=found[1],
            )
        return AdapterRead(
            adapter=task.adapter,
            incarnation=task.incarnation,
            repo=task.source,
            commit=COMMIT,
            config=found,
            files=adapter_files(task.source),
        )

    # -- what a person does

    def lay(self, source: str, **fields: Any) -> str:
        """An adapter of this configuration lies at `source`."""
        self.sources[source] = config(**fields)
        return source

    def add_adapter(self, name: str, base: str = "llama", **fields: Any) -> Outcome:
        """The command alone. Its source is `x/NAME` unless given, where an ordinary one lies unless told."""
        source = fields.pop("source", f"x/{name.replace(':', '-')}")
        self.sources.setdefault(source, config())
        return self.do(AdapterAdd(name=name, base=base, source=source, **fields))

    def have(self, name: str, base: str = "llama", **fields: Any) -> Adapter:
        """Adds it and lets the workers do all there is to be done."""
        outcome = self.add_adapter(name, base, **fields)
        assert outcome.status == "accepted", outcome.sentence
        self.run_workers()
        return self.adapter(name)

    def drop(self, name: str) -> Outcome:
        return self.do(AdapterRemove(adapter=name))

    def pin(self, name: str, pinned: bool = True) -> Outcome:
        return self.do(AdapterPin(adapter=name, pinned=pinned))

    def adapter(self, name: str) -> Adapter:
        return self.world.adapters[name]

    def reasons(self, name: str) -> list[str]:
        """Why each event of the adapter happened, in order."""
        return [i.reason for i in self.log if i.noun == "adapter" and i.key == (name,)]


def adapter_files(source: str) -> tuple[AdapterFile, ...]:
    """The two files of an adapter, of which only the registry's LFS tells a checksum before the fetch."""
    names = (filesets.ADAPTER_WEIGHTS, filesets.ADAPTER_CONFIG)
    return tuple(
        AdapterFile(
            key=filesets.file_key(source, COMMIT, name),
            name=name,
            bytes=1000 if at == 0 else 10,
            sha256=sha_of(name) if at == 0 else "",
        )
        for at, name in enumerate(names)
    )


def adapter_yard(*models: Model, gib: float = 16, **fields: Any) -> AdapterYard:
    """One node n1 with a card gpu0, and these models, `llama` when none is given."""
    made = AdapterYard(**fields)
    if gib > 0:
        join(made, "n1", gib=gib, gpu_gib=gib)
    made.add(*(models or (base_model(),)))
    made.settle()
    return made
