"""Decides which adapters' files a node has before anybody asks for them, in which order, and what they may cost.

Fetching ahead never takes the place of anything a replica or a loaded adapter needs, nor of a model's own
files. It looks at no disk and moves no byte: the catalog, the inventory and figures are handed in.
"""

from collections.abc import Collection, Iterable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from typing import Final

from msgspec import Struct

from nodeagent.domain.catalog import Catalog
from nodeagent.domain.files import Disk, Limits, key_of
from nodeagent.domain.held import Held
from schemas.adapter import Adapter
from schemas.cardnames import suits
from schemas.model import Model, Profile
from schemas.node import Node
from schemas.replica import RUNNING_PHASES

SERVING_PHASES: Final = frozenset({"ready", "draining", "parked"})
"""An engine is there that may have adapters loaded."""

_FIRST_AGAIN_S: Final = 15.0
_LONGEST_AGAIN_S: Final = 120.0


def set_of(adapter: Adapter) -> str:
    """The key of its set of files, which is that of its weights; empty while they are not known."""
    return adapter.files[0].key if adapter.files else ""


def contents_of(adapter: Adapter) -> dict[str, str]:
    """The sha256 of its files by name; empty unless the catalog knows all of them."""
    if not all(file.sha256 for file in adapter.files):
        return {}
    return {file.name: file.sha256 for file in adapter.files}


# What is wanted.


def may_run(profile: Profile, node: Node) -> bool:
    """Whether this node has what the profile asks for to run with adapters: an engine that loads them, cards
    it is meant for and as many as it takes, and leave to run commands if it is one.

    Placement asks for no more than that, but for memory, which changes by the minute.
    """
    if profile.engine == "command" and not node.allow_commands:
        return False
    engine = next((e for e in node.engines if e.name == profile.engine), None)
    if engine is None or not engine.adapters:
        return False
    fitting = [
        card for card in node.cards if not card.mig and suits(profile, node.id, card.id, card.kind)
    ]
    return len(fitting) >= profile.cards


def may_serve(model: Model, node: Node) -> bool:
    """Whether adapters of this model may ever be loaded on this node, as catalog and inventory stand."""
    return (
        model.max_loaded_adapters > 0
        and model.scaling.max > 0
        and any(may_run(profile, node) for profile in model.profiles)
    )


def running_models(held: Iterable[Held]) -> frozenset[str]:
    """The models that have a process here, or are about to."""
    phases = RUNNING_PHASES | {"fetching"}
    return frozenset(one.replica.model for one in held if one.replica.phase in phases)


def wanted(catalog: Catalog, node: Node, running: AbstractSet[str]) -> tuple[Adapter, ...]:
    """The adapters whose files shall be here, most wanted first: ready ones of models that may run here.

    Models that run here come first, then pinned adapters, then the order of the catalog, names last.
    """
    served = {
        name: model.incarnation for name, model in catalog.models.items() if may_serve(model, node)
    }
    found = (
        adapter
        for adapter in catalog.adapters.values()
        if adapter.phase == "ready"
        and adapter.files
        and served.get(adapter.base) == adapter.base_incarnation
    )
    return tuple(
        sorted(
            found,
            key=lambda a: (
                a.base not in running,
                not a.pinned,
                catalog.models[a.base].order,
                a.order,
                a.name,
            ),
        )
    )


def model_sets(catalog: Catalog) -> frozenset[str]:
    """The keys of the sets that models of the catalog are started from."""
    keys = (key_of(model.source) for model in catalog.models.values())
    return frozenset(key for key in keys if key is not None)


# What fits.


class Ahead(Struct, frozen=True, kw_only=True):
    """What to fetch before it is asked for.

    `fetch` in order; `spare` are keys of sets that must not go for it; `left` found no room, `left_bytes` is
    what they would have taken.
    """

    fetch: tuple[Adapter, ...] = ()
    spare: frozenset[str] = frozenset()
    left: tuple[Adapter, ...] = ()
    left_bytes: int = 0


def plan(
    wishes: Sequence[Adapter],
    disk: Disk,
    *,
    here: AbstractSet[str],
    beside: AbstractSet[str],
    spared: AbstractSet[str],
    limits: Limits,
) -> Ahead:
    """Which wishes to fetch, such that carrying it out leads to a plan with nothing to fetch.

    `here` are keys of sets that are whole on this node, `beside` contents that are a link away and so cost
    nothing. `spared` are keys of sets that stay in any case. 1. what is spared, and what others were promised,
    is not to be had. 2. everything else may go, except for wishes that come before; each is taken or left as a
    whole, and one that is left does not keep a smaller one from being taken.
    """
    kept = {c for stored in disk.sets if stored.key in spared for c in stored.contents}
    kept |= disk.promised_bytes.keys()
    kept_bytes = sum(disk.held_bytes.get(content, 0) for content in kept)
    promised = sum(disk.promised_bytes.values())
    may_go = sum(size for content, size in disk.held_bytes.items() if content not in kept)
    room = disk.free_bytes - limits.keep_free_bytes - promised + may_go  # 1
    if limits.budget_bytes:
        room = min(room, limits.budget_bytes - kept_bytes - promised)
    fetch: list[Adapter] = []
    taken: list[str] = []
    left: list[Adapter] = []
    left_bytes = 0
    for wish in wishes:  # 2
        key = set_of(wish)
        costs = {
            content: cost
            for content, cost in _costs(wish, disk, here, beside).items()
            if content not in kept
        }
        cost = sum(costs.values())
        if cost and cost > room:
            left.append(wish)
            left_bytes += cost
            continue
        room -= cost
        kept.update(costs)
        taken.append(key)
        if key not in here:
            fetch.append(wish)
    return Ahead(
        fetch=tuple(fetch),
        spare=frozenset({*spared, *taken}),
        left=tuple(left),
        left_bytes=left_bytes,
    )


def _costs(
    wish: Adapter, disk: Disk, here: AbstractSet[str], beside: AbstractSet[str]
) -> Mapping[str, int]:
    """Bytes of this disk that each content of an adapter takes once it is here."""
    is_here = set_of(wish) in here
    costs: dict[str, int] = {}
    for file in wish.files:
        content = file.sha256 or file.key
        if is_here and content in disk.held_bytes:
            costs[content] = disk.held_bytes[content]
        else:
            costs[content] = 0 if content in beside else file.bytes
    return costs


def again_s(failures: int) -> float:
    """Seconds until a set that failed so often in a row is tried again ahead of time."""
    return min(_FIRST_AGAIN_S * 2 ** min(max(failures, 1) - 1, 10), _LONGEST_AGAIN_S)


# What stays.


def is_settled(held: Iterable[Held], told: Collection[str]) -> bool:
    """Whether it is known of every engine here which adapters it has loaded: `told` are the replicas of
    which somebody said so. Until then the files of any adapter may be in use.
    """
    return all(
        one.replica.id in told
        for one in held
        if one.replica.phase in SERVING_PHASES and _loads(one)
    )


def _loads(one: Held) -> bool:
    return one.replica.adapter_slots > 0 or (one.launch is not None and one.launch.adapters > 0)


def still_kept(kept: Mapping[str, frozenset[str]], held: Mapping[str, Held]) -> frozenset[str]:
    """The keys of the sets that loaded adapters need. What somebody forgot to give back ends with the replica."""
    sets = (
        keys
        for replica, keys in kept.items()
        if replica in held and held[replica].replica.phase in RUNNING_PHASES
    )
    return frozenset(key for keys in sets for key in keys)
