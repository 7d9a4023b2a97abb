"""Decides on which address `yardctl up` lets its gateway listen: this machine alone, or every one it has.

It opens nothing. Whether a key is needed there is for the gateway to say.
"""

from typing import Final

HERE: Final = "127.0.0.1"
EVERYWHERE: Final = "0.0.0.0"  # noqa: S104 - where a gateway listens when somebody wrote so


def gateway_host(listen: str) -> str:
    """The host of the setting `gateway.listen`; its port is that of --gateway-port. Raises ValueError.

    `up` itself, doctor and the demo ask the gateway on 127.0.0.1, so it must be there too.
    """
    host = listen.rpartition(":")[0]
    if host in (HERE, "localhost"):
        return HERE
    if host in (EVERYWHERE, ""):
        return EVERYWHERE
    raise ValueError(
        f"gateway.listen: `up` serves on {HERE} or on {EVERYWHERE}, not on {host};"
        " `python -m gateway --listen` serves on any address"
    )
