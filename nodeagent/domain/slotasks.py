"""Says what is wrong with an ask for an adapter in a replica, by the catalog as this agent knows it.

None of it is the adapter's fault: whoever asks, or this agent, may know an older catalog. It decides no place.
"""

from typing import Final

from nodeagent.domain.slots import Refuse
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


def _refuse(sentence: str) -> Refuse:
    return Refuse(code=codes.NOT_FOUND, sentence=sentence)
