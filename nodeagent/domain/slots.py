"""Decides what becomes of each ask for an adapter in one replica, and keeps which adapters are in its engine.

An ask is answered by one synchronous step that also reserves what it grants, so two asks never load the same
adapter and nobody is promised a place twice. What leaves is decided by `domain/evicting.py`, what an engine's own
list means by `domain/listing.py`. It asks no engine and no clock: moments are handed in.

phase of a place   meaning
loading            the engine was asked to load it; nobody asks it again
loaded             the engine said so
unloading          chosen to leave: an ask for it waits until it is gone, for the two calls must not cross
"""

from collections.abc import Mapping
from datetime import datetime
from typing import Final, Literal

from msgspec import Struct
from msgspec.structs import replace

from nodeagent.domain import badloads
from nodeagent.domain.badloads import Bads, Fault
from schemas import codes
from schemas.adapternames import engine_name, of_engine_name, pin_name
from schemas.slots import MOST_SLOTS, How, Slot, Slots, Whose

ASKS_AGAIN_S: Final = 3.0
"""A waiting ask that was not repeated for so long has no turn any more."""

LATE_S: Final = 120.0
"""So long after it was given up a load may still come about."""

NEVER: Final = float("-inf")

Why = Literal["room", "person", "removed", "version"]


class Moment(Struct, frozen=True, kw_only=True):
    """Now: `at` on the agent's monotonic clock, in seconds, and `now` by the wall."""

    at: float
    now: datetime


class Place(Struct, frozen=True, kw_only=True):
    """One adapter in the engine, or on its way in or out.

    `used_at` is its last use as far as this agent saw, `changed_at` when its phase last changed. `leaving`: a
    person wants it unloaded once nobody uses it. `again`: of a loading one, the engine may have it already.
    `load_s` is how long its load took, where this agent saw it. `why` says of an unloading one what for. Nobody
    tries to unload it before `rest_until`, after `tries` that the engine did not follow. `restores`: it is loaded
    once more after it made way for a load that failed.
    """

    adapter: str
    version: str
    engine_name: str
    phase: Literal["loading", "loaded", "unloading"]
    since: datetime
    how: How
    used_at: float
    changed_at: float
    leaving: bool = False
    again: bool = False
    load_s: float | None = None
    why: Why = "room"
    rest_until: float = NEVER
    tries: int = 0
    restores: bool = False


class Waiting(Struct, frozen=True, kw_only=True):
    """An ask that found no place: since when, and when it last asked."""

    name: str
    since: float
    seen_at: float


class Gone(Struct, frozen=True, kw_only=True):
    """An engine-side name that is not loaded by what was said last: since when, and how many unloads of it in a row
    that was (0: a load of it failed)."""

    at: float
    tries: int = 0


class State(Struct, frozen=True, kw_only=True):
    """Everything the policy knows of one replica. `places` and `recalled` are by pin name.

    `limit` adapters are kept loaded; the engine's cache holds `room` (0: unknown, then no more than the limit).
    `strays` are engine-side names that may hold room although nobody knows: an unload of it failed, or a load
    had no answer in time. A list asked for after the time given with it tells. `foreign` adapters are listed and not ours; `taken` engine-side names stand for something else.
    `recalled` are pins asked back, with the time. `displaced` made way for a load that is not done yet.
    """

    limit: int
    room: int = 0
    places: Mapping[str, Place] = {}
    strays: Mapping[str, float] = {}
    gone: Mapping[str, Gone] = {}
    foreign: int = 0
    taken: frozenset[str] = frozenset()
    queue: tuple[Waiting, ...] = ()
    recalled: Mapping[str, float] = {}
    displaced: tuple[Place, ...] = ()
    bads: Bads = {}
    route_off: bool = False


class Hit(Struct, frozen=True, kw_only=True, tag=True):
    """It is loaded. `load_s` is how long that took, where this agent saw it."""

    engine_name: str
    load_s: float | None = None


class Join(Struct, frozen=True, kw_only=True, tag=True):
    """Its load is under way: wait for that one."""


class Load(Struct, frozen=True, kw_only=True, tag=True):
    """Ask the engine; the place is reserved."""

    place: Place


class Wait(Struct, frozen=True, kw_only=True, tag=True):
    """Look again when something changed: it is on its way out, or every place is taken."""

    why: Literal["leaving", "room"]


class Refuse(Struct, frozen=True, kw_only=True, tag=True):
    """It will not be loaded here before `until`; whose fault that is, a code and a sentence."""

    code: str
    sentence: str
    whose: Whose = "replica"
    until: datetime | None = None
    known: bool = True


Verdict = Hit | Join | Load | Wait | Refuse


def adopt(limit: int, room: int, known: Slots | None, moment: Moment) -> State:
    """The state of an engine as the log or the journal told it; without that nothing is loaded."""
    if known is None:
        return State(limit=limit, room=room)
    places = {
        pin_name(slot.adapter, slot.version): Place(
            adapter=slot.adapter,
            version=slot.version,
            engine_name=slot.engine_name or engine_name(slot.adapter, slot.version),
            phase="loaded",
            since=slot.since,
            how=slot.how,
            used_at=moment.at - max((moment.now - slot.since).total_seconds(), 0.0),
            changed_at=NEVER,
            leaving=slot.leaving,
        )
        for slot in known.loaded
    }
    bads = {
        pin_name(bad.adapter, bad.version): badloads.Bad(
            adapter=bad.adapter,
            version=bad.version,
            code=bad.code,
            reason=bad.reason,
            until=bad.until,
            at=known.since,
            whose=bad.whose,
            known=bad.known,
            words=badloads.comparable(bad.reason, (engine_name(bad.adapter, bad.version),)),
        )
        for bad in known.bad
    }
    return State(limit=limit, room=room, places=places, bads=bads, foreign=known.foreign)


def ensure(
    state: State,
    adapter: str,
    version: str,
    moment: Moment,
    *,
    gone: str = "",
    how: How = "loaded",
) -> tuple[State, Verdict]:
    """Answers one ask; the first case that applies.

    1. loaded, and its asker was told by the engine that it is not: load it again.
    2. loaded: a hit. One that is leaving is waited for, unless a person wants it loaded: then it stays.
    3. loading: join it. 4. unloading: wait for the end of that.
    5. this engine's routes are off, or its limit is 0: no. 6. it failed here a moment ago: no, and nothing makes
    way for it. A person may try all the same.
    7. the engine has room and nobody waits for longer: load it, before anything leaves.
    8. wait for a place, in line.
    """
    name = pin_name(adapter, version)
    place = state.places.get(name)
    if place is not None and place.phase == "loaded":
        if gone and gone == place.engine_name and not place.leaving:  # 1
            place = replace(
                place, phase="loading", again=True, changed_at=moment.at, used_at=moment.at
            )
            return _put(state, name, place), Load(place=place)
        if place.leaving and how != "person":
            return state, Wait(why="leaving")
        used = replace(place, used_at=moment.at, leaving=False)  # 2
        return _left_line(_put(state, name, used), name), Hit(
            engine_name=place.engine_name, load_s=place.load_s
        )
    if place is not None:
        return state, Join() if place.phase == "loading" else Wait(why="leaving")  # 3, 4
    if state.limit <= 0:  # 5
        return state, Refuse(code=codes.NO_ADAPTERS, sentence="this replica loads no adapters")
    if state.route_off:
        return state, Refuse(
            code=codes.ROUTE_OFF,
            sentence="this engine has no routes to load adapters while it runs",
        )
    bad = badloads.standing(state.bads, name, moment.now)
    if bad is not None and how != "person":  # 6
        state = _left_line(state, name)
        return state, Refuse(
            code=bad.code,
            sentence=bad.reason,
            whose=bad.whose,
            until=bad.until,
            known=bad.known,
        )
    state = _in_line(state, name, moment.at)
    engine_side = _free_name(state, adapter, version)
    # What may still be there under this very name takes no other room than it will.
    strays = {other: at for other, at in state.strays.items() if other != engine_side}
    has_room = len(state.places) + len(strays) < room_of(state)
    if has_room and state.queue[0].name == name:  # 7
        place = Place(
            adapter=adapter,
            version=version,
            engine_name=engine_side,
            phase="loading",
            since=moment.now,
            how=how,
            used_at=moment.at,
            changed_at=moment.at,
        )
        state = _left_line(_put(replace(state, strays=strays), name, place), name)
        return state, Load(place=place)
    return state, Wait(why="room")  # 8


def occupied(state: State) -> int:
    """Places in the engine that are taken: also by what is on its way out, or may not have left."""
    return len(state.places) + len(state.strays)


def room_of(state: State) -> int:
    """How many may be in the engine at once. What others loaded there takes of the room above the limit only."""
    room = min(state.room or state.limit, MOST_SLOTS + 1)
    return max(room - state.foreign, min(state.limit, room))


def waiting(state: State, at: float) -> tuple[Waiting, ...]:
    """Asks that still wait for a place, the first in line first."""
    return tuple(w for w in state.queue if at - w.seen_at <= ASKS_AGAIN_S)


def is_at_rest(state: State) -> bool:
    """Whether nothing here has to leave for anybody: no more is loaded than the limit, nobody waits for a place,
    and nobody wants anything gone."""
    return (
        not state.queue
        and not state.recalled
        and len(state.places) <= state.limit
        and not any(place.leaving for place in state.places.values())
    )


# What became of what was begun.


def loaded(
    state: State, name: str, moment: Moment, *, engine_name: str, load_s: float | None = None
) -> State:
    """The engine said that it has it, under this name, after `load_s`."""
    before = state.places[name]
    place = replace(
        before,
        phase="loaded",
        engine_name=engine_name,
        since=moment.now,
        used_at=moment.at,
        changed_at=moment.at,
        again=False,
        load_s=load_s,
        restores=False,
    )
    state = _put(state, name, place)
    state = replace(state, bads=badloads.forgiven(state.bads, name))
    if not before.restores:
        # What comes back made way for a load that is over; others may still need what left for them.
        state = replace(state, displaced=state.displaced[1:])
    return state


def renamed(state: State, name: str) -> State:
    """Its engine-side name stands for something else there: load it under the next one."""
    place = state.places[name]
    state = replace(state, taken=state.taken | {place.engine_name})
    again = replace(place, engine_name=_free_name(state, place.adapter, place.version))
    return _put(state, name, again)


def load_failed(
    state: State,
    name: str,
    fault: Fault,
    others: tuple[Bads, ...],
    strip: tuple[str, ...],
    moment: Moment,
) -> tuple[State, badloads.Bad, tuple[Place, ...]]:
    """Its place is free again, the failure is remembered, and what had made way for it comes back.

    The places that are given back are loading already.
    """
    place = state.places[name]
    bads, bad = badloads.failed(
        state.bads,
        others,
        name,
        adapter=place.adapter,
        version=place.version,
        fault=fault,
        strip=(*strip, place.engine_name),
        now=moment.now,
    )
    # An engine may list it before it failed.
    gone = {**state.gone, place.engine_name: Gone(at=moment.at)}
    state = replace(_without(state, name), bads=bads, gone=gone)
    if fault.late or place.again:
        # The engine may have it in a moment, or still: its room counts until a later list says otherwise.
        until = moment.at + (LATE_S if fault.late else 0.0)
        state = replace(state, strays={**state.strays, place.engine_name: until})
    restored: list[Place] = []
    for other in () if place.restores else state.displaced:
        of = pin_name(other.adapter, other.version)
        if of in state.places or waiting(state, moment.at) or occupied(state) >= room_of(state):
            continue
        back = replace(
            other,
            phase="loading",
            engine_name=_free_name(state, other.adapter, other.version),
            changed_at=moment.at,
            restores=True,
        )
        state = _put(state, of, back)
        restored.append(back)
    return replace(state, displaced=()), bad, tuple(restored)


def unloaded(state: State, name: str, at: float) -> State:
    """The engine said that it has it no more."""
    place = state.places[name]
    gone = {**state.gone, place.engine_name: Gone(at=at, tries=place.tries + 1)}
    state = replace(_without(state, name), gone=gone)
    if place.why == "room" and room_of(state) <= state.limit:
        # There is no room to load before something leaves: a load that fails gives this place back.
        state = replace(state, displaced=(*state.displaced, place)[-state.limit :])
    return state


def unload_failed(state: State, name: str, at: float) -> State:
    """Whether the engine still has it nobody knows until its list was read; nobody is sent there for it."""
    place = state.places[name]
    return replace(
        _without(state, name),
        strays={**state.strays, place.engine_name: at},
        gone={**state.gone, place.engine_name: Gone(at=at, tries=place.tries + 1)},
    )


def spared(state: State, name: str, at: float, *, rest_s: float) -> State:
    """The engine itself says that requests run on it, or does not say that none do: it stays, for now."""
    place = replace(
        state.places[name], phase="loaded", used_at=at, changed_at=at, rest_until=at + rest_s
    )
    return _put(state, name, place)


def used(state: State, uses: Mapping[str, float]) -> State:
    """Takes over last uses by pin name, as gateways tell them."""
    places = dict(state.places)
    for name, at in uses.items():
        place = places.get(name)
        if place is not None and at > place.used_at:
            places[name] = replace(place, used_at=at)
    return replace(state, places=places)


# What a person wants.


def names_of(state: State, adapter: str) -> tuple[str, ...]:
    """The pin names of every version of an adapter that is here, whatever its phase."""
    return tuple(sorted(n for n, place in state.places.items() if place.adapter == adapter))


def is_gone(state: State, adapter: str, *, since: float, read_at: float) -> bool:
    """Whether what was here of an adapter at `since` left, by a list of the engine asked for at `read_at`, behind
    its unloads. What requests had loaded anew meanwhile is another matter."""
    unloads = [
        gone.at
        for name, gone in state.gone.items()
        if gone.tries and (of_engine_name(name) or ("",))[0] == adapter
    ]
    here = (place for place in state.places.values() if place.adapter == adapter)
    return read_at >= max((since, *unloads)) and not any(
        place.leaving
        or place.phase == "unloading"
        or place.how == "found"
        or place.changed_at < since
        for place in here
    )


def leaving(state: State, name: str) -> State:
    """A person wants it unloaded once nobody uses it."""
    return _put(state, name, replace(state.places[name], leaving=True))


def staying(state: State, name: str) -> State:
    """A person wants it loaded after all."""
    return _put(state, name, replace(state.places[name], leaving=False))


def routes(state: State, *, is_off: bool) -> State:
    """Whether the engine has routes to load adapters at all."""
    return replace(state, route_off=is_off)


def forced(state: State, name: str, at: float) -> State:
    """A person wants it unloaded now, whatever runs on it."""
    place = replace(state.places[name], phase="unloading", why="person", changed_at=at)
    return _put(state, name, place)


# What is told.


def told(state: State, before: Slots, moment: Moment, epoch: int) -> Slots:
    """The state of the replica's `slots` subject: what is loaded and stays for now, and what failed."""
    loaded = sorted(
        (p for p in state.places.values() if p.phase == "loaded"),
        key=lambda p: (p.since, p.adapter, p.version),
    )
    return replace(
        before,
        epoch=epoch,
        limit=state.limit,
        room=state.room,
        since=moment.now,
        loaded=tuple(
            Slot(
                adapter=p.adapter,
                version=p.version,
                since=p.since,
                how=p.how,
                engine_name=p.engine_name if p.engine_name != _usual(p) else "",
                leaving=p.leaving,
            )
            for p in loaded
        ),
        bad=badloads.told(state.bads, moment.now),
        foreign=state.foreign,
    )


def _usual(place: Place) -> str:
    return engine_name(place.adapter, place.version)


def _free_name(state: State, adapter: str, version: str) -> str:
    """The first engine-side name of this version that stands for nothing else there."""
    again = 0
    while (name := engine_name(adapter, version, again)) in state.taken:
        again += 1
    return name


def _put(state: State, name: str, place: Place) -> State:
    return replace(state, places={**state.places, name: place})


def _without(state: State, name: str) -> State:
    return replace(
        state,
        places={other: p for other, p in state.places.items() if other != name},
        recalled={other: at for other, at in state.recalled.items() if other != name},
    )


def _in_line(state: State, name: str, at: float) -> State:
    """The ask waits, where it waited before; those who ask no more are out of line."""
    standing = waiting(state, at)
    if any(w.name == name for w in standing):
        queue = tuple(replace(w, seen_at=at) if w.name == name else w for w in standing)
    else:
        queue = (*standing, Waiting(name=name, since=at, seen_at=at))
    return replace(state, queue=queue)


def _left_line(state: State, name: str) -> State:
    return replace(state, queue=tuple(w for w in state.queue if w.name != name))
