"""Decides whether requests need a key, and whether a gateway may listen where it was told to.

Open is only who was told to be, and a gateway of a yard without keys that nobody but this machine can reach.
"""

import ipaddress
from collections.abc import Iterable
from typing import Literal

KeysNeeded = Literal["auto", "required", "off"]

LOOPBACK_NAMES = frozenset({"localhost", "ip6-localhost", "localhost.localdomain"})


def is_loopback(host: str) -> bool:
    """Whether only this machine reaches an address; of a name that is no address only those of the machine itself."""
    bare = host.strip("[]").partition("%")[0]
    try:
        address = ipaddress.ip_address(bare)
    except ValueError:
        return bare.lower().rstrip(".") in LOOPBACK_NAMES
    mapped = getattr(address, "ipv4_mapped", None)
    return (mapped or address).is_loopback


def needs_key(setting: KeysNeeded, *, any_key: bool, beyond_loopback: bool) -> bool:
    """Whether who sends a request must say who they are. `any_key`: the log holds a key or once held one."""
    if setting == "auto":
        return any_key or beyond_loopback
    return setting == "required"


def why_not_listen(hosts: Iterable[str], setting: KeysNeeded, *, any_key: bool) -> str | None:
    """Why the port is not opened: others could reach it, nobody has a key, and nobody said that it shall be open."""
    beyond = [host or "every address" for host in hosts if not is_loopback(host)]
    if not beyond or setting == "off" or any_key:
        return None
    return (
        f"The gateway does not listen on {', '.join(beyond)} while the yard has no API key: make one with "
        "`yardctl key create --name NAME`, or set `gateway.keys: off` if everybody who reaches this address may use "
        "every model."
    )
