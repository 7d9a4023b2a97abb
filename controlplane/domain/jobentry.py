"""Words the catalog entry of a serve job, and says who has its name already.

The entry goes through the same reading as one a person wrote (entries.py); it is added elsewhere.
"""

import hashlib
from collections.abc import Iterable
from typing import Any, Final

import msgspec
from msgspec import Struct
from msgspec.structs import replace

from controlplane.domain import entries, filesets, needs
from controlplane.domain import names as naming
from controlplane.domain.entries import ParsedEntry
from controlplane.domain.scene import is_off
from controlplane.domain.world import World
from schemas.commands import Problem
from schemas.job import FileSet, Job, ServeRequest
from schemas.model import Model, Scaling
from schemas.node import Node

GIB: Final = 1024**3
MAX_OUTPUT: Final = 1024
SLOTS: Final = 4
"""How many requests an engine answers at once; they divide the pool of tokens."""

CPU_PRIORITY: Final = 100
GPU_PRIORITY: Final = 200
"""Higher is tried first: a card of its own before the machine's memory."""

ALL_LAYERS: Final = "999"
UNMAPPED: Final = ("--load-mode", "none")
"""On a processor llama.cpp keeps a second copy of some quantisations (Q4_0, Q4_K, …) in an order that suits it.
Read instead of mapped, there is the one copy only: half the memory, for a load that is no longer."""


class Wanted(Struct, frozen=True, kw_only=True):
    """What a job's entry is made of. `first` is the key of the set's first file."""

    model: str
    first: str
    request: ServeRequest
    context_length: int
    generates: bool = True
    unmapped: bool = False
    gpus: bool = False


def wanted_of(world: World, job: Job) -> Wanted:
    """The entry of a job whose repository was read."""
    request = job.request
    return Wanted(
        model=job.model,
        first=needs.keys_of_job(job)[0],
        request=request,
        context_length=job.context_length or request.context_length,
        generates=job.generates,
        unmapped=job.unmapped,
        gpus=has_gpus(world.nodes.values()),
    )


def has_gpus(nodes: Iterable[Node]) -> bool:
    """Whether some node has a card of kind gpu and a llama.cpp that can use it."""
    return any(
        any(card.kind == "gpu" for card in node.cards)
        and any(e.name == "llamacpp" and "gpu" in e.card_kinds for e in node.engines)
        for node in nodes
    )


def slots_of(ctx_pool: int, context_length: int) -> int:
    """As many as leave each request the context it was promised."""
    return max(1, min(SLOTS, ctx_pool // max(context_length, 1)))


def arguments(wanted: Wanted) -> tuple[str, ...]:
    """The engine's arguments. The number of slots is passed, because engines differ in their default."""
    slots = slots_of(wanted.request.ctx_pool, wanted.context_length)
    args = ("--ctx-size", str(wanted.request.ctx_pool), "--parallel", str(slots))
    return args if wanted.generates else (*args, "--embeddings")


def scaling_of(request: ServeRequest) -> tuple[int, int]:
    """`min` and `max`; 0 replicas means on demand."""
    return request.replicas, max(request.replicas, 1)


def entry_of(wanted: Wanted, memory_bytes: int) -> dict[str, Any]:
    """The entry as a person would write it; `memory_bytes` is rounded up to whole GiB."""
    request = wanted.request
    low, high = scaling_of(request)
    memory = f"{-(-memory_bytes // GIB)}GiB"
    args = list(arguments(wanted))
    on_cpu = [*args, *UNMAPPED] if wanted.unmapped else args
    common: dict[str, Any] = {"engine": "llamacpp", "weight": 1, "memory": memory}
    profiles = [
        {"name": "cpu", **common, "priority": CPU_PRIORITY, "card": ["cpu"], "args": on_cpu}
    ]
    if wanted.gpus:
        on_gpu = [*args, "--n-gpu-layers", ALL_LAYERS]
        profiles.append(
            {"name": "gpu", **common, "priority": GPU_PRIORITY, "card": ["gpu"], "args": on_gpu}
        )
    return {
        "name": wanted.model,
        "aliases": list(request.aliases),
        "description": request.description,
        "source": needs.source_of(wanted.first),
        "context_length": wanted.context_length,
        "max_output": min(MAX_OUTPUT, wanted.context_length),
        "scaling": {"min": low, "max": high},
        "profiles": profiles,
    }


def model_of(wanted: Wanted, memory_bytes: int) -> Model | tuple[Problem, ...]:
    """The model the entry would become, for looking where it would fit; or what is wrong with the entry."""
    entry = entries.parse(entry_of(wanted, memory_bytes), "")
    if not isinstance(entry, ParsedEntry):
        return entry
    return entry.as_model(incarnation="", order=0)


def differences(model: Model, wanted: Wanted) -> tuple[str, ...]:
    """In what an entry is not the one the job would add; empty: it is that one.

    Memory and scaling are left out: the first is an estimate, the second anybody's to change.
    """
    request = wanted.request
    found: list[str] = []
    if model.source != needs.source_of(wanted.first):
        found.append("source")
    if set(model.aliases) != set(request.aliases):
        found.append("aliases")
    if model.description != request.description:
        found.append("description")
    pools = {_argument(p.args, "--ctx-size") for p in model.profiles}
    if pools != {str(request.ctx_pool)}:
        found.append("ctx_pool")
    same_context = model.context_length == wanted.context_length or (
        not request.context_given and (model.context_length or 0) <= request.context_length
    )
    if not same_context:
        found.append("context_length")
    return tuple(found)


def _argument(args: tuple[str, ...], flag: str) -> str | None:
    for at, one in enumerate(args[:-1]):
        if one == flag:
            return args[at + 1]
    return None


def taken(world: World, job: str, wanted: Wanted, incarnation: str = "") -> str:
    """Why the job may not have its name and aliases, empty when it may.

    1. A model of that name that differs. The very same entry is no hindrance: it is this one. Nor is the
       one the job added itself (`incarnation`), whatever somebody changed in it since.
    2. An alias of another model, or a model that has one of the aliases as its name.
    3. An adapter, one of its aliases, or a `BASE:NAME` it is asked for as. 4. A running job that is about to add
       such an entry.
    """
    asked = (wanted.model, *wanted.request.aliases)
    for name in asked:
        option = "--name" if name == wanted.model else "--alias"
        model = world.models.get(name)
        if model is not None and name == wanted.model:
            if model.incarnation == incarnation:
                continue
            differs = differences(model, wanted)
            if "source" in differs:  # 1
                return (
                    f"{name!r} is another model already; give this one another name with --name, or "
                    f"remove that one first: yardctl model rm {name}"
                )
            if differs:
                return (
                    f"{name!r} is in the catalog already with another {', '.join(differs)}; "
                    "change that with `yardctl apply`, or give this one another name with --name"
                )
        elif model is not None:  # 2
            return f"{name!r} is a model already; give another {option}"
    names = set(asked)
    for model in world.models.values():
        for alias in model.aliases:
            if alias in names and model.name != wanted.model:  # 2
                option = "--name" if alias == wanted.model else "--alias"
                return f"{alias!r} is an alias of {model.name!r} already; give another {option}"
    if world.adapters:
        adapters = world.adapters.values()
        held = naming.pairs(world.models, adapters) | naming.holders((), adapters)
        for name in asked:
            if name in held:  # 3
                option = "--name" if name == wanted.model else "--alias"
                return f"{held[name]}; give another {option}"
    for id_ in sorted(world.running_jobs):
        other = world.jobs[id_]
        if id_ == job or not other.key:
            continue
        common = sorted(names & {other.model, *other.request.aliases})
        if common:  # 4
            option = "--name" if common[0] == wanted.model else "--alias"
            return f"job {id_} is serving a model as {common[0]!r} already; give another {option}"
    return ""


def name_of(request: ServeRequest, suggested: str, repo: str) -> str:
    """The name asked for, else the one the registry package suggests, made fit for a catalog."""
    if request.name:
        return request.name
    for candidate in (suggested, filesets.suggest_name(repo), repo.rpartition("/")[2]):
        name = "".join(c if c.isprintable() else "-" for c in candidate).strip()
        if name:
            return name[: entries.NAME_LENGTH].strip()
    return "model"


def raised(model: Model, request: ServeRequest) -> Model | None:
    """The entry with at least the scaling the job asked for, None when it has that already."""
    low, high = scaling_of(request)
    known = model.scaling
    if known.min >= low and not is_off(model):
        return None
    scaling = Scaling(
        min=max(known.min, low), max=max(known.max, high), idle_timeout_s=known.idle_timeout_s
    )
    return replace(model, scaling=scaling, off_reason="")


def key_of(repo: str, commit: str, file_set: FileSet, model: str) -> str:
    """What two jobs have in common that do the same: sha256, in hex, because every event of a job carries it
    and the names may be long."""
    return hashlib.sha256(f"{repo}@{commit} {file_set.name} as {model}".encode()).hexdigest()


def fits_event(request: ServeRequest, most: int) -> bool:
    return len(msgspec.json.encode(request)) <= most
