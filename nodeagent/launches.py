"""What can be said of a launch of an engine: that it runs, is ready, has ended, was stopped.

Values only, and how the launcher's own files become such values. It must not touch a process.
"""

import json
import re
from pathlib import Path
from typing import Any, Literal

from msgspec import Struct

EndCode = Literal["exited", "spawn_failed", "lost"]
"""exited: the engine ended by itself or by a signal. spawn_failed: it never ran (no such program).
lost: the launcher was killed, its engine with it, and nobody saw the exit status."""


class Running(Struct, frozen=True, kw_only=True):
    """A live engine. `pid` is the engine's main process, `start_time` its start in clock ticks
    since boot: together they name one process for good. `ready`: it said so over its pipe
    already, so no `LaunchReady` follows; `load_s` then is the time from spawn to ready."""

    replica: str
    pid: int
    pgid: int
    start_time: int
    launcher_pid: int
    ready: bool = False
    load_s: float | None = None


class Ended(Struct, frozen=True, kw_only=True):
    """An engine that is gone, with its whole process group unless `survivors` says otherwise.

    `exit_status`: 0..255, or -N when signal N ended it; None when nobody saw it (lost,
    spawn_failed). `last_line`: the last non-empty line it printed, at most 500 characters.
    `killed`: a stop's grace passed and SIGKILL was needed.
    """

    replica: str
    exit_status: int | None
    last_line: str
    code: EndCode = "exited"
    was_ready: bool = False
    survivors: tuple[int, ...] = ()
    killed: bool = False


class LaunchReady(Struct, frozen=True, kw_only=True):
    """The engine reported ready over its pipe, `load_s` after its spawn. Sent once per launch."""

    replica: str
    load_s: float


class LaunchEnded(Struct, frozen=True, kw_only=True):
    """The engine is gone without `stop` having been called. Sent once per launch."""

    replica: str
    exit_status: int | None
    last_line: str
    code: EndCode = "exited"
    was_ready: bool = False
    survivors: tuple[int, ...] = ()


LaunchEvent = LaunchReady | LaunchEnded


class StopResult(Struct, frozen=True, kw_only=True):
    """What a stop left: the engine's exit status (None: not seen) and the pids that would not go.

    `killed`: the grace passed and SIGKILL was needed.
    """

    exit_status: int | None
    survivors: tuple[int, ...] = ()
    killed: bool = False
    last_line: str = ""


class LogPart(Struct, frozen=True, kw_only=True):
    """A piece of an engine's log. Offsets count all bytes since the start, over turned-over files.

    `offset` is where `text` really begins: later than asked when older bytes were dropped.
    `ended`: the process is gone and nothing follows `next_offset`.
    """

    text: str
    offset: int
    next_offset: int
    ended: bool = False


class LaunchFault(Exception):
    """The launcher itself did not do its part (could not be spawned, never reported)."""


def ended(replica: str, content: dict[str, Any]) -> Ended:
    """What the launcher wrote at the end."""
    return Ended(
        replica=replica,
        exit_status=content["status"],
        last_line=plain(content["last_line"]),
        code=content["code"],
        was_ready=content.get("was_ready", False),
        survivors=tuple(content.get("survivors", ())),
        killed=content.get("killed", False),
    )


def read_file(path: Path) -> dict[str, Any] | None:
    """One of the launcher's files; None when it is not there. They are put in place whole."""
    try:
        return json.loads(path.read_bytes())
    except (OSError, ValueError):
        return None


_CONTROL = re.compile(r"\x1b\[[0-9;?]*[ -/]*[@-~]|[\x00-\x08\x0b-\x1f\x7f]")


def plain(line: str) -> str:
    """A terminal's colours and control characters taken out: the line goes into an event."""
    return _CONTROL.sub("", line).strip()
