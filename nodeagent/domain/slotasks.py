"""Says what the catalog, as this agent knows it, means for the adapters of a replica: which asks are wrong, what stays,
and what has to leave.

None of it is the adapter's fault: whoever asks, or this agent, may know an older catalog. It decides no place.
"""

from collections.abc import Callable, Mapping
from typing import Final, Literal

from nodeagent.domain.slots import Place, Refuse, State, Why
from schemas import codes
from schemas.adapter import Adapter
from schemas.adapternames import pin_name
from schemas.replica import Replica

LONGEST_WAIT_S: Final = 15.0
"""No ask is held for longer, so that its pin stands for a while after the answer."""


def wrong_with(name: str, version: str, adapter: Adapter | None, replica: Replica) -> Refuse | None:
    """Why `name` in this version cannot be loaded in this replica; None: it can. `version` empty: any.

    1. the catalog has no such adapter. 2. it belongs to another model, or to one that had this name before.
    3. its files are not there yet, or it was refused. 4. it has another version now.
    """
    if adapter is None:  # 1
        return _refuse(f"this node knows no adapter {name!r}")
    if (adapter.base, adapter.base_incarnation) != (replica.model, replica.incarnation):  # 2
        return _refuse(f"{name} is an adapter of {adapter.base}, and {replica.id} serves another")
    if adapter.phase != "ready":  # 3
        told = adapter.reason or "its files are not there yet"
        return _refuse(f"{name} is not ready: {told}")
    if version and pin_name(name, version) != pin_name(name, adapter.version):  # 4
        return _refuse(f"this node knows version {adapter.version} of {name}, not {version}")
    return None


def waits_for(state: State, why: Literal["leaving", "room"]) -> str:
    """What an ask without a place waits for, within a sentence; empty: every place is in use."""
    if why == "leaving":
        return "it is being unloaded"
    if any(place.phase == "unloading" for place in state.places.values()):
        return "another one is being unloaded"
    return ""


def standing(
    places: Mapping[str, Place], adapter_of: Callable[[str], Adapter | None], replica: Replica
) -> tuple[frozenset[str], dict[str, Why]]:
    """What the catalog says of what is there, by pin name: what a person pinned, which leaves for no other; and
    what the catalog has no more, and why. To be asked only once all of the catalog was read."""
    kept: list[str] = []
    stale: dict[str, Why] = {}
    for name, place in places.items():
        adapter = adapter_of(place.adapter)
        why = _why_stale(name, adapter, replica)
        if why is not None:
            stale[name] = why
        elif adapter is not None and adapter.pinned:
            kept.append(name)
    return frozenset(kept), stale


def _why_stale(name: str, adapter: Adapter | None, replica: Replica) -> Why | None:
    """1. removed, refused, or of another model now. 2. another version of it is ready. One that is being read
    again, or fetched, may turn out to be the same: it stays until that is known."""
    if (
        adapter is None
        or adapter.phase == "refused"
        or (adapter.base, adapter.base_incarnation) != (replica.model, replica.incarnation)
    ):
        return "removed"  # 1
    if adapter.phase == "ready" and pin_name(adapter.name, adapter.version) != name:
        return "version"  # 2
    return None


def _refuse(sentence: str) -> Refuse:
    return Refuse(code=codes.NOT_FOUND, sentence=sentence)
