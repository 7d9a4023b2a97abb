"""Decides what an engine's own list of adapters means: what is gone that was loaded, and what is there that was not.

A list is older than its answer: whatever changed here since it was asked for is left as it is, in both
directions. An adapter in use is never taken for gone. It neither loads nor unloads.
"""

from collections.abc import Mapping
from typing import Final, Literal

from msgspec import Struct
from msgspec.structs import replace

from nodeagent.domain.evicting import Facts
from nodeagent.domain.pins import UNUSED
from nodeagent.domain.slots import NEVER, Moment, Place, State
from schemas.adapternames import pin_name

REMEMBERED_S: Final = 3600.0
"""So long it is remembered that a name was unloaded, and how often that had no effect."""

FIRST_REST_S: Final = 5.0
LONGEST_REST_S: Final = 600.0
"""An unload that had no effect is tried again after a while, which doubles."""

MOST_TRIES: Final = 20


class Seen(Struct, frozen=True, kw_only=True):
    """One adapter an engine lists. `adapter` empty: its name is none of ours.

    `root`: whether it was loaded from where it should have been; `unknown` where the engine or the agent
    cannot tell.
    """

    engine_name: str
    adapter: str = ""
    version: str = ""
    root: Literal["right", "wrong", "unknown"] = "unknown"


class Drift(Struct, frozen=True, kw_only=True):
    """What was not as it was known, by pin name."""

    lost: tuple[str, ...] = ()
    found: tuple[str, ...] = ()

    def __bool__(self) -> bool:
        return bool(self.lost or self.found)


def listed(
    state: State, seen: tuple[Seen, ...], began_at: float, facts: Facts, moment: Moment
) -> tuple[State, Drift]:
    """Compares what the engine listed, asked at `began_at`, with what is known.

    1. loading, unloading, or changed since `began_at`: the list says nothing about it.
    2. loaded and listed from the right place: so it is. From the wrong one: that name stands for something else,
       and nobody may be answered by it.
    3. loaded and not listed: it is gone, unless requests run on it.
    4. listed under a name of ours that nobody loaded: found, first in line to leave. Not when it was unloaded
       since `began_at` or its load failed since, nor when the same version is here under another name.
    5. everything else that is listed is none of ours: counted and left alone.
    """
    by_name = {one.engine_name: one for one in seen}
    places = dict(state.places)
    lost: list[str] = []
    for name, place in state.places.items():
        if place.phase != "loaded" or place.changed_at >= began_at:  # 1
            continue
        there = by_name.get(place.engine_name)
        use = facts.uses.get(name, UNUSED)
        is_another = there is not None and there.root == "wrong"  # 2
        if is_another or (there is None and not (use.uses or use.silent)):  # 3
            del places[name]
            lost.append(name)
    known = {place.engine_name for place in places.values()}
    known |= {p.engine_name for p in state.places.values() if p.changed_at >= began_at}
    found: list[str] = []
    foreign = 0
    for one in seen:  # 4, 5
        gone = state.gone.get(one.engine_name)
        if one.engine_name in known or (gone is not None and gone.at >= began_at):
            continue
        name = pin_name(one.adapter, one.version) if one.adapter else ""
        if not one.adapter or one.root == "wrong" or name in places:
            foreign += 1
            continue
        tries = min(gone.tries, MOST_TRIES) if gone is not None else 0
        places[name] = Place(
            adapter=one.adapter,
            version=one.version,
            engine_name=one.engine_name,
            phase="loaded",
            since=moment.now,
            how="found",
            used_at=NEVER,
            changed_at=moment.at,
            tries=tries,
            rest_until=moment.at + _rest_s(tries) if tries else NEVER,
        )
        found.append(name)
    after = replace(
        state,
        places=places,
        strays=_still_unknown(state, by_name, began_at),
        gone={n: g for n, g in state.gone.items() if moment.at - g.at < REMEMBERED_S},
        foreign=foreign,
        taken=frozenset(one.engine_name for one in seen if one.adapter and one.root == "wrong"),
        recalled={name: at for name, at in state.recalled.items() if name in places},
    )
    return after, Drift(lost=tuple(sorted(lost)), found=tuple(sorted(found)))


def _still_unknown(state: State, by_name: Mapping[str, Seen], began_at: float) -> dict[str, float]:
    """Names whose call had no clear end, as far as this list is too old, or too early, to tell."""
    return {
        name: until
        for name, until in state.strays.items()
        if began_at <= until
        and (name not in by_name or ((g := state.gone.get(name)) is not None and g.at >= began_at))
    }


def _rest_s(tries: int) -> float:
    return min(FIRST_REST_S * 2.0 ** (tries - 1), LONGEST_REST_S)
