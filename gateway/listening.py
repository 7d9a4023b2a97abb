"""Where a gateway's listening socket comes from: bound here, or inherited from whoever started the process.

It accepts nothing: an address that is only bound refuses connections until a server listens on it.
"""

import os
import socket
from collections.abc import MutableMapping
from typing import Final

from events.service import FatalError

FIRST_FD: Final = 3
"""The first descriptor of those that LISTEN_FDS counts (sd_listen_fds(3))."""


def inherited_socket(environment: MutableMapping[str, str]) -> socket.socket | None:
    """The socket a service manager left for this process; None: it left none.

    What says so is taken out of `environment`: what this process starts did not inherit it. Raises FatalError when
    it is no socket a gateway can serve on.
    """
    count = environment.pop("LISTEN_FDS", "")
    pid = environment.pop("LISTEN_PID", "")
    environment.pop("LISTEN_FDNAMES", None)
    if not count or pid != str(os.getpid()):
        return None  # Left for another process, which has passed its environment on.
    if count != "1":
        raise FatalError(f"one listening socket was expected, {count} were inherited")
    return socket_of(FIRST_FD)


def socket_of(descriptor: int) -> socket.socket:
    """An inherited descriptor as a socket. Raises FatalError when it is no TCP socket with an address."""
    try:
        found = socket.socket(fileno=descriptor)
    except OSError as problem:
        raise FatalError(f"the inherited descriptor {descriptor} is no socket: {problem}") from None
    kind = found.type
    if found.family not in (socket.AF_INET, socket.AF_INET6) or kind != socket.SOCK_STREAM:
        found.close()
        raise FatalError(f"the inherited descriptor {descriptor} is no TCP socket")
    found.setblocking(False)
    os.set_inheritable(descriptor, False)
    return found


def bound_socket(listen: str) -> socket.socket:
    """A socket bound to `HOST:PORT`, not listening yet. Raises FatalError when that address is not to be had."""
    host, _, port = listen.rpartition(":")
    try:
        family, kind, proto, _, address = socket.getaddrinfo(
            host.strip("[]") or None, int(port), type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        made = socket.socket(family, kind, proto)
    except OSError as problem:
        raise FatalError(f"cannot listen on {listen}: {problem}") from None
    try:
        made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        made.bind(address)
    except OSError as problem:
        made.close()
        raise FatalError(f"cannot listen on {listen}: {problem}") from None
    made.setblocking(False)
    return made
