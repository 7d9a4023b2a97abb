"""Decides which adapters leave a replica: for others, because a person said so, or because the catalog has them no more.

An adapter that any gateway counts on is asked back first and leaves only once it was given up; one in use never
leaves. What was chosen is reserved in the same step. It unloads nothing itself, and knows nobody's clock but the
agent's own.
"""

from collections.abc import Mapping
from typing import Final

from msgspec import Struct
from msgspec.structs import replace

from nodeagent.domain.pins import UNUSED, Use
from nodeagent.domain.slots import Place, State, Why, occupied, room_of, waiting

RECALL_S: Final = 1.0
"""So long a gateway has to give an idle pin back before the next adapter in line is asked for too."""


class Facts(Struct, frozen=True, kw_only=True):
    """What is known beside the replica's own state; all by pin name.

    `uses` are gateways' pins. `kept` are pinned by a person. `stale` are no versions of the catalog any more,
    and why. `calm`: every pin that any gateway may trust is known here.
    """

    uses: Mapping[str, Use] = {}
    kept: frozenset[str] = frozenset()
    stale: Mapping[str, Why] = {}
    calm: bool = True


class Evict(Struct, frozen=True, kw_only=True):
    """Unload it. `must_know`: only if the engine tells that no request runs on it."""

    name: str
    place: Place
    must_know: bool


class Settled(Struct, frozen=True, kw_only=True):
    """What to do now. `recall` are the pins to ask back, all of them; `look_at` is when time alone may change this."""

    evict: tuple[Evict, ...] = ()
    recall: tuple[str, ...] = ()
    look_at: float | None = None


def settle(state: State, facts: Facts, at: float) -> tuple[State, Settled]:
    """Chooses what leaves, in this order.

    1. Nothing while not every pin is known.
    2. Whatever a person wants unloaded, and what the catalog has no more: as soon as nobody uses it.
    3. For room: as many as are above the limit, or as asks in line need places, whichever is more. Least recently
       used first, then by name; never one that is pinned by a person.
    One with idle pins is asked back and waited for a moment, then the next in line is asked for as well.
    """
    if not facts.calm:  # 1
        return replace(state, recalled={}), Settled()
    chosen: dict[str, Why] = {}
    recalled: dict[str, float] = {}
    wakes: list[float] = []
    loaded = {name: place for name, place in state.places.items() if place.phase == "loaded"}
    for name, place in sorted(loaded.items()):  # 2
        why: Why | None = "person" if place.leaving else facts.stale.get(name)
        if why is None:
            continue
        if place.rest_until > at:
            wakes.append(place.rest_until)
        elif _is_free(facts.uses.get(name, UNUSED)):
            chosen[name] = why
        elif _is_idle(facts.uses.get(name, UNUSED)):
            recalled[name] = state.recalled.get(name, at)
    going = len(chosen) + sum(at - asked_at < RECALL_S for asked_at in recalled.values())
    wakes += [asked_at + RECALL_S for asked_at in recalled.values() if at < asked_at + RECALL_S]
    missing = _missing(state, len(loaded) - going, going, at)  # 3
    for name in _line(loaded, facts, chosen, recalled):
        if missing <= 0:
            break
        place, use = loaded[name], facts.uses.get(name, UNUSED)
        if place.rest_until > at:
            wakes.append(place.rest_until)
        elif _is_free(use):
            chosen[name] = "room"
            missing -= 1
        elif _is_idle(use):
            asked_at = recalled[name] = state.recalled.get(name, at)
            if at - asked_at < RECALL_S:
                wakes.append(asked_at + RECALL_S)
                missing -= 1
    places = dict(state.places)
    evict: list[Evict] = []
    for name, why in chosen.items():
        place = replace(places[name], phase="unloading", why=why, changed_at=at)
        places[name] = place
        must_know = facts.uses.get(name, UNUSED).silent > 0
        evict.append(Evict(name=name, place=place, must_know=must_know))
    settled = Settled(
        evict=tuple(evict),
        recall=tuple(sorted(recalled)),
        look_at=min(wakes, default=None),
    )
    return replace(state, places=places, recalled=recalled), settled


def _missing(state: State, loaded: int, going: int, at: float) -> int:
    """How many more have to leave, when `loaded` are left after `going` are gone.

    A load that is under way counts only once it is done: if it fails, nobody made way for it.
    """
    above = loaded - state.limit
    in_line = len(waiting(state, at))
    if not in_line:
        return max(above, 0)
    on_the_way = going + sum(p.phase == "unloading" for p in state.places.values())
    short = occupied(state) - on_the_way + in_line - room_of(state)
    return max(above, short, 0)


def _line(
    loaded: Mapping[str, Place],
    facts: Facts,
    chosen: Mapping[str, Why],
    recalled: Mapping[str, float],
) -> list[str]:
    """Who leaves first for others: least recently used, then by name."""
    taken = {*facts.kept, *chosen, *recalled}
    return sorted(
        (name for name in loaded if name not in taken),
        key=lambda name: (
            max(loaded[name].used_at, facts.uses.get(name, UNUSED).used_at),
            name,
        ),
    )


def _is_free(use: Use) -> bool:
    """Nobody counts on it."""
    return not use.gateways


def _is_idle(use: Use) -> bool:
    """Gateways count on it and none uses it now."""
    return not use.uses
