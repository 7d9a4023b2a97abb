"""Reads this machine's figures: its memory, what its cgroup allows, and whether a port is taken.

It only measures; what follows from a figure is decided in `domain/`.
"""

import errno
import socket
from pathlib import Path

import psutil

_V2_LIMIT = Path("/sys/fs/cgroup/memory.max")
_V1_LIMIT = Path("/sys/fs/cgroup/memory/memory.limit_in_bytes")
# What cgroup v1 writes for "no limit" is the largest page-aligned number, far above any machine.
_NO_LIMIT = 1 << 60


def ram_bytes() -> int:
    """Physical memory of the machine."""
    return int(psutil.virtual_memory().total)


def cgroup_limit_bytes() -> int | None:
    """The memory limit of this process's control group, None when there is none.

    Looks at the group's own folder first, then at the root of the hierarchy as containers see it.
    """
    limits = [limit for path in _limit_files() if (limit := _read_limit(path)) is not None]
    return min(limits, default=None)


def port_is_free(port: int, host: str = "127.0.0.1") -> bool:
    """Whether nobody listens on the port now. Said by the kernel at this moment, not promised."""
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        # Like a server would: connections of the last user that still linger do not count.
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError as error:
            if error.errno in (errno.EADDRINUSE, errno.EACCES):
                return False
            raise
    return True


def _limit_files() -> list[Path]:
    files = [_V2_LIMIT, _V1_LIMIT]
    try:
        lines = Path("/proc/self/cgroup").read_text(encoding="ascii").splitlines()
    except OSError:
        return files
    for line in lines:
        _, controllers, group = line.split(":", 2)
        if not controllers:
            folder = Path("/sys/fs/cgroup") / group.lstrip("/")
            # A limit of any folder above binds as well.
            files.extend(parent / "memory.max" for parent in (folder, *folder.parents))
        elif "memory" in controllers.split(","):
            folder = Path("/sys/fs/cgroup/memory") / group.lstrip("/")
            files.append(folder / "memory.limit_in_bytes")
    return files


def _read_limit(path: Path) -> int | None:
    try:
        text = path.read_text(encoding="ascii").strip()
    except OSError:
        return None
    if not text.isdecimal() or int(text) >= _NO_LIMIT:
        return None
    return int(text)
