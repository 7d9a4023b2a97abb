"""Gives out ports that no other test of its run is given, and that the kernel gives to nobody by itself.

A port is looked at, let go, and bound again only when the program it is for has started. Of ports the kernel
chooses, another test beside this one could have that by then. So each worker has ports of its own below
those. It holds none: what another program of this machine takes meanwhile is taken.
"""

import errno
import os
import random
import socket
from collections.abc import Sequence
from typing import Final

SERVERS: Final = range(10000, 20000)
"""For what listens in tests. A yard's engines begin above them, the kernel's own choice at 32768."""

ENGINES: Final = range(20000, 30000, 100)
"""Where the ports of one agent's engines begin, of those that an agent has that was told nothing."""


def worker() -> tuple[int, int]:
    """Which worker of a run this is, counted from 0, and how many there are."""
    name = os.environ.get("PYTEST_XDIST_WORKER", "gw0")
    return int(name.removeprefix("gw")), int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1"))


def share(ports: range, number: int, count: int) -> range:
    """The part of `ports` that belongs to the worker `number` of `count`; no two parts have a port in common."""
    size = len(ports) // count
    return ports[number * size : (number + 1) * size]


def is_free(port: int) -> bool:
    """Whether nobody listens there now. An address in TIME_WAIT does not count as taken, as for servers."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", port))
        except OSError as error:
            if error.errno != errno.EADDRINUSE:
                raise
            return False
        return True


class Ports:
    """One worker's ports, given out in turn; the same one comes again only when all have been given."""

    def __init__(self, ports: range) -> None:
        self._ports = ports
        # Anywhere: other runs on this machine have the same ports.
        self._next = random.SystemRandom().randrange(len(ports))

    def take(self, count: int, not_these: Sequence[int] = ()) -> list[int]:
        """So many free ports, all different and none of `not_these`."""
        found: list[int] = []
        for _ in self._ports:
            port = self._ports[self._next]
            self._next = (self._next + 1) % len(self._ports)
            if port not in not_these and is_free(port):
                found.append(port)
            if len(found) == count:
                return found
        raise AssertionError(f"no {count} free ports in {self._ports}")


PORTS: Final = Ports(share(SERVERS, *worker()))
ROWS: Final = Ports(share(ENGINES, *worker()))


def free_port() -> int:
    """A port of this worker's on which nobody listens now."""
    return PORTS.take(1)[0]


def engine_ports() -> range:
    """Ports for the engines of one agent, which other agents hardly use: an engine binds its port only after
    its load, and until then another's engine could answer in its place."""
    (first,) = ROWS.take(1)
    return range(first, first + ENGINES.step)


def engine_environment() -> dict[str, str]:
    """The same for an agent that is told by its environment."""
    ports = engine_ports()
    return {
        "YARD_NODEAGENT_PORT_FIRST": str(ports[0]),
        "YARD_NODEAGENT_PORT_LAST": str(ports[-1]),
    }
