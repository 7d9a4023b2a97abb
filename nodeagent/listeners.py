"""Reads from /proc which launch a listening port belongs to.

An engine that cannot have its port ends a moment later; meanwhile another launch's engine may answer on
it. It must not guess: a listener of no launch (a container's proxy, say) is nobody's in particular.
"""

import os
from typing import Final

from nodeagent.processes import Mark, mark_of

_LISTEN: Final = b"0A"


def _sockets(port: int) -> set[str]:
    """The inodes of TCP sockets that listen on this port, on any address."""
    wanted = b"%04X" % port
    inodes: set[str] = set()
    for table in ("/proc/net/tcp", "/proc/net/tcp6"):
        try:
            with open(table, "rb") as file:
                lines = file.read().splitlines()[1:]
        except OSError:
            continue
        for line in lines:
            fields = line.split()
            if fields[3] == _LISTEN and fields[1].rpartition(b":")[2] == wanted:
                inodes.add(fields[9].decode())
    return inodes


def _holds(pid: int, inodes: set[str]) -> bool:
    try:
        handles = os.listdir(f"/proc/{pid}/fd")
    except OSError:
        return False
    for handle in handles:
        try:
            target = os.readlink(f"/proc/{pid}/fd/{handle}")
        except OSError:
            continue
        if target.startswith("socket:[") and target[8:-1] in inodes:
            return True
    return False


def is_anothers(port: int, mark: Mark, likely: int = 0) -> bool:
    """Whether only processes of other launches listen on `port`.

    False when one of this launch does, when nobody does, and when no launch is known to. `likely` is
    looked at first: a load ends with this question, and nearly always that process is the answer.
    """
    inodes = _sockets(port)
    if not inodes or (likely and _holds(likely, inodes)):
        return False
    found_another = False
    for name in os.listdir("/proc"):
        if not name.isdigit():
            continue
        carried = mark_of(int(name))
        if carried is None or not _holds(int(name), inodes):
            continue
        if carried == mark:
            return False
        found_another = True
    return found_another
