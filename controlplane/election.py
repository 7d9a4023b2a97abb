"""Decides whether this instance follows, stands for leader or leads, from what it has seen.

Pure: no clock, no I/O. Silence is handed in as seconds on the observer's own monotonic clock, so no two
clocks are ever compared. A takeover too many is harmless: every decision carries the term as its fence.
"""

from typing import Literal

from msgspec import Struct

from schemas.leader import Leader


class Seen(Struct, frozen=True, kw_only=True):
    """What one instance knows when it asks whether to lead.

    `leader` and `term` are the last `leader.current` this instance has applied (None, 0: there was
    none). `candidacy` is what it last appended itself, or tried to. `elected_seq` is the sequence of its
    own append while the follower has not applied that far. `silent_s` counts since the last sign of
    the present leader: its beacon, or the moment its record, the connection or this process began.
    """

    synced: bool
    connected: bool
    writable: bool
    host: str
    leader: Leader | None
    term: int
    candidacy: Leader | None
    elected_seq: int | None
    holder_alive: bool
    leaving: bool
    silent_s: float
    silence_s: float


class Verdict(Struct, frozen=True, kw_only=True):
    """`again_in_s`: ask again then, if nothing happens before (None: only when something happens)."""

    act: Literal["follow", "stand", "lead"]
    why: str
    again_in_s: float | None = None


def judge(seen: Seen) -> Verdict:
    """Decides in this order:

    1. Not caught up, not connected, or `leader.current` cannot be read: follow.
    2. The record is this instance's own candidacy, applied: lead, with its sequence as the term.
    3. Its own append is on the way through the follower: follow until it arrives.
    4. There was never a leader: stand.
    5. The record names this host and a process that is gone: stand at once.
    6. The leader said that it is leaving: stand at once.
    7. The leader was silent for `silence_s`: stand.
    8. Otherwise follow until the silence would be long enough.
    """
    if not seen.synced or not seen.connected:
        return Verdict(act="follow", why="not caught up with the log")
    if not seen.writable:
        return Verdict(
            act="follow", why="leader.current was written by a newer version or is broken"
        )
    if seen.leader is not None and seen.leader == seen.candidacy:
        return Verdict(act="lead", why="elected")
    if seen.elected_seq is not None and seen.elected_seq > seen.term:
        return Verdict(act="follow", why="waiting for the own election to be applied")
    if seen.leader is None:
        return Verdict(act="stand", why="there is no leader")
    if seen.leader.host == seen.host and not seen.holder_alive:
        return Verdict(act="stand", why="the leader's process is gone")
    if seen.leaving:
        return Verdict(act="stand", why="the leader is leaving")
    if seen.silent_s >= seen.silence_s:
        return Verdict(act="stand", why=f"the leader was silent for {seen.silent_s:.1f} s")
    return Verdict(
        act="follow", why="the leader is heard", again_in_s=seen.silence_s - seen.silent_s
    )
