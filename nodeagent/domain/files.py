"""Decides which fetched files stay on a node, whether new ones fit, and when a fetch has failed.

What a replica here needs is never evicted, and nothing is admitted beyond the budget or into the bytes that
are kept free. It looks at no disk and moves no byte: figures, ages and faults are handed in.
"""

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from collections.abc import Set as AbstractSet
from datetime import datetime
from types import MappingProxyType
from typing import Final, Literal

from msgspec import Struct
from msgspec.structs import replace

from nodeagent.domain.leases import gib
from schemas import codes
from schemas.mirror import Manifest

MIRROR: Final = "mirror:"
"""How a source begins that names content on a mirror."""

WEIGHTS: Final = "adapter_model.safetensors"
"""What the first file of an adapter's set is called."""

FETCH_FAILED: Final = "fetch_failed"

NOTHING_KNOWN: Final[Mapping[str, str]] = MappingProxyType({})

_SHA256: Final = re.compile(r"[0-9a-f]{64}")
_NAME_BYTES: Final = 255
_ATTEMPTS: Final = 2
"""So often a file may arrive with other bytes than announced: once, and once more."""

_FIRST_PAUSE_S: Final = 0.5
_LONGEST_PAUSE_S: Final = 10.0


def key_of(source: str) -> str | None:
    """The key of the set a source names; None for a path on the node."""
    return source.removeprefix(MIRROR) if source.startswith(MIRROR) else None


def is_sha256(text: str) -> bool:
    """Whether this is a sha256 in small hex letters: a key or a content, and so a safe file name."""
    return _SHA256.fullmatch(text) is not None


def flaw(manifest: Manifest, key: str, known: Mapping[str, str] = NOTHING_KNOWN) -> str | None:
    """Why a manifest cannot be believed; None when it can. Its names become names on this disk.

    `known` are sha256 by name that the set must have, and no file besides; empty: whatever it says.
    """
    if manifest.key != key:
        return f"it tells of the set {manifest.key[:12]}, not of {key[:12]}"
    if not manifest.files:
        return "it names no file"
    names = [file.name for file in manifest.files]
    if len(set(names)) < len(names):
        return "two of its files have one name"
    for file in manifest.files:
        if file.name in ("", ".", "..") or "/" in file.name or "\0" in file.name:
            return f"{file.name!r} cannot be the name of a file"
        if len(file.name.encode()) > _NAME_BYTES:
            return f"{file.name[:40]!r}... is longer than a name of a file can be"
        if not is_sha256(file.sha256) or not is_sha256(file.key) or file.bytes < 0:
            return f"what it says of {file.name} is no sha256 and size"
    told = {file.name: file.sha256 for file in manifest.files}
    if known and told != known:
        names = sorted(n for n in {*told, *known} if told.get(n) != known.get(n))
        return f"it is not what the catalog says of {', '.join(names)}"
    return None


# Room on the disk.


class StoredSet(Struct, frozen=True, kw_only=True):
    """A set this node remembers, by key: its contents (sha256), and when a replica used it last.

    `adapter`: it is not what a model is started from, but what an engine loads besides.
    """

    key: str
    used_at: datetime
    contents: tuple[str, ...]
    adapter: bool = False


class Disk(Struct, frozen=True, kw_only=True):
    """What lies on the files' disk.

    `held_bytes` are bytes by content, whole or begun; 0 for one that a mirror's folder holds anyway.
    `promised_bytes` are those still to come of contents that are being fetched. `free_bytes` is free.
    """

    sets: tuple[StoredSet, ...]
    held_bytes: Mapping[str, int]
    promised_bytes: Mapping[str, int]
    free_bytes: int


class Limits(Struct, frozen=True, kw_only=True):
    """`budget_bytes` 0: as much as the disk has. `keep_free_bytes` of the disk are never used."""

    budget_bytes: int
    keep_free_bytes: int


class Stays(Struct, frozen=True, kw_only=True):
    """What must not be evicted: sets by key, and every adapter's while it is not known which are in use."""

    keys: frozenset[str]
    every_adapter: bool = False

    def also(self, keys: AbstractSet[str]) -> "Stays":
        """And these."""
        return replace(self, keys=self.keys | keys)

    def among(self, disk: Disk) -> frozenset[str]:
        """The keys of the sets that stay, on this disk or still to come."""
        if not self.every_adapter:
            return self.keys
        return self.keys | {stored.key for stored in disk.sets if stored.adapter}


class Room(Struct, frozen=True, kw_only=True, tag=True):
    """It fits once these are gone: sets by key in order, and contents with nobody's name on them."""

    sets: tuple[str, ...] = ()
    contents: tuple[str, ...] = ()


class NoRoom(Struct, frozen=True, kw_only=True, tag=True):
    """It does not fit whatever is evicted; `sentence` says so with numbers."""

    sentence: str


def make_room(
    wanted_bytes: Mapping[str, int],
    disk: Disk,
    needed: AbstractSet[str],
    limits: Limits,
    beside: AbstractSet[str] = frozenset(),
) -> Room | NoRoom:
    """What to evict so that the `wanted_bytes` (whole sizes by content) fit, or why they cannot.

    `beside` are contents of the same set that are here: one that went with another set would have to be fetched
    into room nobody made. 1. nothing is to be written: nothing goes. 2. when all that may go would not be enough nothing goes.
    """
    new_bytes = sum(
        max(size - disk.held_bytes.get(content, 0), 0)
        for content, size in wanted_bytes.items()
        if content not in disk.promised_bytes
    )
    if not new_bytes:  # 1
        return Room()
    promised = sum(disk.promised_bytes.values())
    taken = sum(disk.held_bytes.values()) + promised
    over_budget = taken + new_bytes - limits.budget_bytes if limits.budget_bytes else 0
    short = limits.keep_free_bytes - (disk.free_bytes - promised - new_bytes)
    goal = max(over_budget, short, 0)
    staying = {*wanted_bytes, *beside, *disk.promised_bytes}
    room, freed = _evict(goal, disk, needed, staying)
    if freed < goal:  # 2
        return NoRoom(sentence=_no_room(new_bytes, freed, taken, promised, disk, limits))
    return room


def excess(disk: Disk, needed: AbstractSet[str], limits: Limits) -> Room:
    """What to evict because more is held than the budget allows: it was made smaller, or a mirror removed
    what was only linked here. As far as that goes: what replicas need stays in any case.
    """
    taken = sum(disk.held_bytes.values()) + sum(disk.promised_bytes.values())
    goal = max(taken - limits.budget_bytes, 0) if limits.budget_bytes else 0
    return _evict(goal, disk, needed, frozenset(disk.promised_bytes))[0]


def _evict(
    goal: int, disk: Disk, needed: AbstractSet[str], staying: AbstractSet[str]
) -> tuple[Room, int]:
    """What goes until `goal` bytes came back, and how many do; all that may go when they never do.

    1. contents of no set go first, by name. 2. then sets no replica needs, least recently used first, ties
    by key; a content goes with its last set, unless it is among those `staying`. 3. a set whose going
    turned out to give nothing stays.
    """
    named = {content for stored in disk.sets for content in stored.contents}
    strays: list[str] = []
    stray_bytes = 0
    for content in sorted(disk.held_bytes.keys() - named - staying):  # 1
        if stray_bytes < goal:
            strays.append(content)
            stray_bytes += disk.held_bytes[content]
    names = Counter(content for stored in disk.sets for content in set(stored.contents))
    freed = 0
    leaving: list[StoredSet] = []
    for stored in sorted(disk.sets, key=lambda stored: (stored.used_at, stored.key)):  # 2
        if stray_bytes + freed >= goal:
            break
        if stored.key not in needed:
            leaving.append(stored)
            for content in set(stored.contents):
                names[content] -= 1
                if not names[content] and content not in staying:
                    freed += disk.held_bytes.get(content, 0)
    enough = min(goal, stray_bytes + freed)
    going = {stored.key for stored in leaving}
    for stored in reversed(leaving):  # 3
        gives = sum(
            disk.held_bytes.get(content, 0)
            for content in set(stored.contents)
            if not names[content] and content not in staying
        )
        if stray_bytes + freed - gives >= enough:
            going.remove(stored.key)
            names.update(set(stored.contents))
            freed -= gives
    room = Room(
        sets=tuple(stored.key for stored in leaving if stored.key in going),
        contents=tuple(strays),
    )
    return room, stray_bytes + freed


def _no_room(
    new_bytes: int, freeable: int, taken: int, promised: int, disk: Disk, limits: Limits
) -> str:
    """The limit that is in the way, with every number of it and what a person can do."""
    could_go = f"{gib(freeable)} that nothing here needs could go"
    left = limits.budget_bytes - (taken - freeable)
    if limits.budget_bytes and new_bytes > left:
        return (
            f"its files need {gib(new_bytes)} more, and this node keeps at most"
            f" {gib(limits.budget_bytes)} of files: {gib(taken)} are taken, of which {could_go};"
            " raise files_budget_bytes or stop a model here"
        )
    others = f", {gib(promised)} promised to other fetches" if promised else ""
    return (
        f"its files need {gib(new_bytes)} more, and this node's disk has {gib(disk.free_bytes)} free"
        f"{others}, of which {gib(limits.keep_free_bytes)} are never used; {could_go}; make room there"
    )


# Faults of a fetch.

FaultKind = Literal["away", "gone", "refused", "wrong", "disk"]
"""away: no answer, cut or stalled. gone: it does not have it. refused: not for this node.
wrong: other bytes than announced. disk: this node could not write."""


class Fault(Struct, frozen=True, kw_only=True):
    """What one attempt came to; `sentence` names the mirror, `full` tells of a full disk."""

    kind: FaultKind
    sentence: str
    source: str = ""
    full: bool = False


class Tried(Struct, frozen=True, kw_only=True):
    """What is remembered of the attempts for one thing (a file, a manifest)."""

    wrong: int = 0
    refused: frozenset[str] = frozenset()
    last: str = ""
    rounds: int = 0


class GiveUp(Struct, frozen=True, kw_only=True):
    """The fetch failed: a code for programs and a sentence for people."""

    code: str
    sentence: str


def after(tried: Tried, fault: Fault) -> Tried | GiveUp:
    """What is known after one attempt.

    1. this node's own disk: no mirror can help. 2. wrong bytes a second time: neither. 3. else another
    mirror, or the same one later, may.
    """
    if fault.kind == "disk":  # 1
        return GiveUp(code=codes.DISK_FULL if fault.full else FETCH_FAILED, sentence=fault.sentence)
    wrong = tried.wrong + (fault.kind == "wrong")
    if wrong >= _ATTEMPTS:  # 2
        return GiveUp(code=FETCH_FAILED, sentence=fault.sentence)
    refused = tried.refused | {fault.source} if fault.kind == "refused" else tried.refused
    last = fault.sentence or tried.last
    return replace(tried, wrong=wrong, refused=refused, last=last)  # 3


def next_pause_s(
    tried: Tried, sources: Sequence[str], silent_s: float, no_progress_s: float
) -> float | GiveUp:
    """Seconds until the next round over the mirrors, or why there is none.

    `sources` are those that were asked in this round. 1. every one of them refuses this node. 2. no new
    byte for `no_progress_s`. 3. soon at first, then less often.
    """
    if sources and tried.refused.issuperset(sources):  # 1
        return GiveUp(code=FETCH_FAILED, sentence=tried.last)
    if silent_s >= no_progress_s:  # 2
        told = tried.last or (
            "no mirror was heard of; is a control plane running, and does this node reach its NATS?"
        )
        return GiveUp(code=FETCH_FAILED, sentence=f"no new byte for {no_progress_s:g} s: {told}")
    pause_s = min(_FIRST_PAUSE_S * 2 ** min(tried.rounds, 10), _LONGEST_PAUSE_S)
    return min(pause_s, no_progress_s - silent_s)  # 3


def rate_bytes_s(samples: Sequence[tuple[float, int]]) -> float:
    """Bytes per second over samples of (monotonic second, bytes so far), oldest first."""
    if len(samples) < 2:
        return 0.0
    (began, first), (ended, last) = samples[0], samples[-1]
    return max(last - first, 0) / (ended - began) if ended > began else 0.0
