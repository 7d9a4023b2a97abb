"""Decides whether a drained replica is parked or stopped, what its parked copy needs, and whether a park worked.

Parking has to pay: it is chosen when coming back from RAM is quicker than loading by what was measured, and
when the RAM is there. Pure arithmetic on bytes and seconds; it reads no card and ends nothing.
"""

from collections.abc import Mapping
from typing import Final

from msgspec import Struct

from nodeagent.domain.leases import gib
from schemas.model import EngineName, Parking, ParkWay
from schemas.plan import Launch, Stop

HEADROOM: Final = 1.1
"""A parked copy's lease on `cpu` is so much larger than what was measured or expected of it."""

_RESIDUE_SHARE: Final[dict[ParkWay, float]] = {"sleep": 0.5, "command": 0.5, "checkpoint": 0.1}
_RESIDUE_BYTES: Final[dict[ParkWay, int]] = {
    "sleep": 3 << 30,
    "command": 3 << 30,
    "checkpoint": 256 << 20,
}
"""What may stay on a card after a park: the engine's context, at most this share of what was there and at most
so many bytes. A sleeping vLLM keeps up to 2 GiB; a checkpointed process next to nothing."""


_STILL_BYTES: Final = 16 << 20


class ParkFacts(Struct, frozen=True, kw_only=True):
    """What is known when a drain is over and its stop lets the replica be parked.

    `parking` is what the launch says, filled in by `parking_of`; `ways` what this node has. `load_s` is what
    its start took, `resume_s` what its last resume took (None: never resumed). `ram_bytes` is what the copy is
    expected to need, with headroom; `ram_free_bytes` what `cpu` has, and `evict` the parked copies that would
    have to make way for it (None: not even that would do). `failed_ago_s`: since a park of this model failed here.
    `connected` and `silent`: whether gateways can be heard, and those that ended without a word (`unheard` of
    `domain/drains.py`).
    """

    stop: Stop
    parking: Parking
    ways: frozenset[ParkWay]
    enabled: bool
    on_gpu: bool
    load_s: float | None
    resume_s: float | None
    ram_bytes: int
    ram_free_bytes: int
    evict: tuple[str, ...] | None = None
    failed_ago_s: float | None = None
    again_s: float = 600.0
    connected: bool = True
    silent: tuple[str, ...] = ()


class Park(Struct, frozen=True, kw_only=True, tag=True):
    """Park it by `way`, with a lease of `ram_bytes` on `cpu`; the copies in `evict` go first."""

    way: ParkWay
    ram_bytes: int
    evict: tuple[str, ...]
    reason: str


class StopInstead(Struct, frozen=True, kw_only=True, tag=True):
    """Stop it; `reason` says with numbers why it is not parked, empty when nobody wanted that."""

    reason: str


class KeepInstead(Struct, frozen=True, kw_only=True, tag=True):
    """It was to be parked and nothing else, and cannot be: it serves on."""

    reason: str


Choice = Park | StopInstead | KeepInstead


def may_park(stop: Stop) -> bool:
    """Whether a stop leaves anything to choose: one that is forced, or forbids it, does not."""
    return stop.park != "never" and not stop.force


def parking_of(launch: Launch) -> Parking:
    """How this launch may be parked: as its profile says, else as its engine does by itself."""
    if launch.parking is not None:
        return launch.parking
    return Parking(way=_BY_ITSELF[launch.engine])


_BY_ITSELF: Final[dict[EngineName, ParkWay]] = {
    "vllm": "sleep",
    "llamacpp": "none",
    "command": "none",
}


def choose(facts: ParkFacts) -> Choice:
    """Decides in this order; the first case that applies wins. With a stop that says `must`, a no means that
    the replica is kept, and 6 and 7 do not apply: whoever asks for it knows.

    1. the stop is none that parks, or it is forced: stop.
    2. the node does not park. 3. neither profile nor engine has a way. 4. this node lacks the way.
    5. it is on no gpu: its memory is RAM already. 5b. a VM takes the card, and only a checkpoint lets go of it.
    5c. a gateway may not know and send on: a stopped engine refuses that, a parked one would be silent.
    6. a park of this model failed here not long ago.
    7. resuming took as long as loading, by measured times.
    8. the RAM is not there, not even without the other parked copies.
    9. park; an unknown resume counts as quicker than a load, once.
    """
    stop, parking = facts.stop, facts.parking
    must = stop.park == "must"
    if not may_park(stop):  # 1
        return StopInstead(reason="")
    reason = ""
    if not facts.enabled:  # 2
        reason = "this node does not park (its setting parking is false)"
    elif parking.way == "none":  # 3
        reason = "neither its profile nor its engine has a way to park"
    elif parking.way not in facts.ways:  # 4
        reason = f"this node has no way {parking.way} to park"
    elif not facts.on_gpu:  # 5
        reason = "it is in RAM already"
    elif stop.reason == "vm" and parking.way != "checkpoint":  # 5b
        reason = f"an engine parked by {parking.way} still holds the device a VM wants"
    elif not facts.connected:  # 5c
        reason = "no connection: gateways may not know of it"
    elif facts.silent:
        reason = f"{', '.join(facts.silent)} fell silent and may not know of it"
    elif not must and facts.failed_ago_s is not None and facts.failed_ago_s < facts.again_s:  # 6
        reason = (
            f"a park failed {facts.failed_ago_s:.0f} s ago, tried again after {facts.again_s:g} s"
        )
    elif not must and not _pays(facts):  # 7
        reason = f"resuming took {facts.resume_s:.1f} s, loading {facts.load_s:.1f} s"
    elif facts.evict is None:  # 8
        reason = (
            f"cpu: its parked copy needs {gib(facts.ram_bytes)}, {gib(facts.ram_free_bytes)} free"
        )
    if reason:
        return KeepInstead(reason=f"not parked: {reason}") if must else StopInstead(reason=reason)
    return Park(  # 9
        way=parking.way,
        ram_bytes=facts.ram_bytes,
        evict=facts.evict or (),
        reason=_why(facts),
    )


def _pays(facts: ParkFacts) -> bool:
    if facts.resume_s is None or facts.load_s is None:
        return True
    return facts.resume_s < facts.load_s


def _why(facts: ParkFacts) -> str:
    told = f"parked by {facts.parking.way}, {gib(facts.ram_bytes)} of RAM set aside"
    if facts.resume_s is None or facts.load_s is None:
        return told
    return f"{told}: resuming took {facts.resume_s:.1f} s, loading {facts.load_s:.1f} s"


def ram_needed(
    *, known_bytes: int | None, host_bytes: int, device_bytes: int, weights_bytes: int | None
) -> int:
    """RAM a parked copy is expected to need, with headroom.

    What a copy of this model was measured to need here before (`known_bytes`), else what its processes have in
    RAM now (`host_bytes`) and what moves there: its weights where their size is known and only they move, else
    all it has on its cards (`device_bytes`).
    """
    if known_bytes is not None:
        return with_headroom(known_bytes)
    moves = device_bytes if weights_bytes is None else min(weights_bytes, device_bytes)
    return with_headroom(host_bytes + moves)


def ram_of_copy(
    way: ParkWay, *, host_bytes: int, freed_bytes: int, weights_bytes: int | None
) -> int:
    """RAM a parked copy has, without headroom: what its processes show (`host_bytes`), but no less than what
    must have moved there. Pinned memory is not always counted to a process.

    A checkpoint moves all it freed; vLLM's sleep its weights, where their size is known.
    """
    if way == "checkpoint":
        return max(host_bytes, freed_bytes)
    if way == "sleep" and weights_bytes is not None:
        return max(host_bytes, min(weights_bytes, freed_bytes))
    return host_bytes


def with_headroom(count: int) -> int:
    """Bytes to lease for a copy that was measured at `count`."""
    return int(count * HEADROOM)


def is_back(way: ParkWay, before_bytes: int, now_bytes: int) -> bool:
    """Whether a card shows the memory of a parked engine back, but for what the way leaves there."""
    allowed = min(int(before_bytes * _RESIDUE_SHARE.get(way, 0.0)), _RESIDUE_BYTES.get(way, 0))
    return now_bytes <= allowed


def is_still(before: Mapping[str, int], now: Mapping[str, int]) -> bool:
    """Whether two readings in a row of an engine's cards agree: what is there now is what stays."""
    return before.keys() == now.keys() and all(
        abs(before[card] - now[card]) <= _STILL_BYTES for card in now
    )


def not_back(card: str, way: ParkWay, before_bytes: int, now_bytes: int) -> str:
    """The sentence for a park that gave too little back."""
    return (
        f"{card} still shows {gib(now_bytes)} of {gib(before_bytes)} after its {way}:"
        " the memory did not come back"
    )
