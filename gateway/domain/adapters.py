"""Chooses the replica a request for an adapter goes to, so that all gateways choose alike.

Pure and total: the same facts give the same replica. It must not decide whether the request may go there without
asking (pins.py) nor ask anybody (gateway/adapters.py).
"""

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from datetime import datetime
from functools import lru_cache
from hashlib import blake2b
from typing import Final

from msgspec import Struct

from gateway.domain.adaptertable import Places
from gateway.domain.pins import Held
from schemas.replica import Replica
from schemas.slots import BadAdapter

BUSY: Final = 32
"""A holder with so many requests more than the least loaded replica binds nobody: a second one loads it too."""

ALIKE: Final = 8
"""Loads that differ by less count as equal. Each gateway sees its own requests only: were one request enough to
tip the choice, each of them would load a cold adapter somewhere else."""


def _none_besides(_: str, __: Collection[str]) -> int:
    return 0


class Known(Struct, frozen=True, kw_only=True):
    """What this gateway knows of its own: replicas where it has the adapter, and where it asks for it now.

    `pinned` may be sent to without asking. `held`: its agent said it is loaded, or is being asked.
    `besides`: how many it has in a replica, or is having loaded there, besides those of these pin names; asked for
    only where it matters.
    """

    pinned: Collection[str] = ()
    held: Collection[str] = ()
    besides: Callable[[str, Collection[str]], int] = _none_besides


class Shun(Struct, frozen=True, kw_only=True):
    """Replicas this one request does not go to, and those it goes to last.

    `refused` said no to it, with what they said. `later` could not be asked, or have no place now.
    """

    refused: Mapping[str, BadAdapter] = {}
    later: Collection[str] = ()


NOBODY: Final = Shun()


class Chosen(Struct, frozen=True, kw_only=True):
    """`holds`: the adapter is there or on its way. `others`: how many more may be tried."""

    replica: Replica
    holds: bool
    others: int = 0


class AdapterAtFault(Struct, frozen=True, kw_only=True):
    """The load failed for a reason of the adapter's: no replica would take it. Nobody is asked."""

    bad: BadAdapter


class NoneLeft(Struct, frozen=True, kw_only=True):
    """Every candidate refused. `bad` is of the one that may be tried first again; None: there was no candidate."""

    bad: BadAdapter | None = None


def only_holder(
    candidates: Sequence[Replica],
    held: Sequence[Held | None],
    *,
    pin: str,
    places: Mapping[str, Places],
    now_s: float,
) -> tuple[Replica, Held] | None:
    """Whom `choose` chooses when one replica alone has the adapter and needs not be asked, with our pin there; unless
    more than `BUSY` requests run there. Else None.

    `held` are the pins that this gateway has in the candidates.
    """
    found: tuple[Replica, Held] | None = None
    for replica, known in zip(candidates, held, strict=True):
        here = places.get(replica.id)
        slot = None if here is None else here.loaded.get(pin)
        if known is not None and known.is_trusted(now_s):
            if found is not None or (slot is not None and slot.leaving):
                return None
            found = replica, known
        elif (slot is not None and not slot.leaving) or (
            known is not None and (known.engine_name or known.asks)
        ):
            return None
    return found


def choose(
    candidates: Sequence[Replica],
    *,
    adapter: str,
    pin: str,
    places: Mapping[str, Places],
    known: Known,
    inflight: Mapping[str, int],
    now: datetime,
    shun: Shun = NOBODY,
) -> Chosen | AdapterAtFault | NoneLeft:
    """The replica for a request; ties go by the rendezvous order of adapter and replica, id last.

    0. one that refused, or where a load failed lately, is no candidate; a failure that is the adapter's own, or
       that two replicas told in the same unknown words, ends the matter when nobody holds it
    1. who has it or is loading it, unless that one is far busier than the least loaded; not one it leaves
    2. a place that is free; what is not known counts as free
    3. the least loaded. 4. the rendezvous order
    Those shunned for now come last in each case, but before nobody.
    """
    failed: list[BadAdapter] = []
    left: list[tuple[Replica, Places | None]] = []
    for replica in candidates:
        here = places.get(replica.id)
        if replica.id in shun.refused:  # 0
            failed.append(shun.refused[replica.id])
            continue
        bad = None if here is None or pin in here.loaded else here.bad.get(pin)
        if bad is not None and bad.until > now and replica.id not in known.held:
            failed.append(bad)  # 0
            continue
        left.append((replica, here))
    holds = {r.id for r, here in left if _holds(r.id, here, pin, known)}
    if failed and not holds:
        own = [b for b in failed if b.whose == "adapter"]
        twice = said_twice(failed)
        if own or twice is not None:  # 0
            return AdapterAtFault(bad=twice or max(own, key=lambda b: b.until))
    if not left:
        return NoneLeft(bad=min(failed, key=lambda b: b.until) if failed else None)
    replica, _ = left[0] if len(left) == 1 else _best(left, adapter, holds, known, inflight, shun)
    return Chosen(
        replica=replica,
        holds=replica.id in holds,
        others=len(left) - 1,
    )


_Candidate = tuple[Replica, Places | None]


def _best(
    left: list[_Candidate],
    adapter: str,
    holds: Collection[str],
    known: Known,
    inflight: Mapping[str, int],
    shun: Shun,
) -> _Candidate:
    """1 to 4 of `choose` among several."""
    least = min(inflight.get(r.id, 0) for r, _ in left)
    pool = [item for item in left if item[0].id not in shun.later] or left

    def load(replica: Replica) -> int:
        return (inflight.get(replica.id, 0) + 1) // max(replica.weight, 1) // ALIKE

    def among_holders(item: _Candidate) -> tuple[int, bool, bytes, str]:
        replica = item[0]
        # Of those that hold it, one that need not be asked.
        asks = replica.id not in known.pinned
        return load(replica), asks, rendezvous(adapter, replica.id), replica.id

    def among_others(item: _Candidate) -> tuple[bool, int, bytes, str]:
        replica, here = item
        # A holder that is too busy takes it no better than one that had to make room.
        crowded = replica.id in holds or not _has_room(replica, here, known)  # 2
        return crowded, load(replica), rendezvous(adapter, replica.id), replica.id

    binding = [
        item for item in pool if item[0].id in holds and inflight.get(item[0].id, 0) - least <= BUSY
    ]
    if binding:  # 1
        return binding[0] if len(binding) == 1 else min(binding, key=among_holders)
    return min(pool, key=among_others)


def _holds(replica: str, here: Places | None, pin: str, known: Known) -> bool:
    """Loaded or on its way. What a person has unloaded is neither, whoever still has a pin on it."""
    slot = None if here is None else here.loaded.get(pin)
    if slot is not None and slot.leaving:
        return False
    return slot is not None or replica in known.held


def _has_room(replica: Replica, here: Places | None, known: Known) -> bool:
    """Whether a load would push nobody out, by what is known. What the log does not tell yet has its place already;
    what it tells while it is asked for has one place, not two.
    """
    loaded: Collection[str] = () if here is None else here.loaded
    limit = replica.adapter_slots if here is None else here.slots.limit or replica.adapter_slots
    return len(loaded) + known.besides(replica.id, loaded) < limit


def said_twice(failures: Iterable[BadAdapter]) -> BadAdapter | None:
    """A failure nobody knows that two replicas told in the same words: then it is the adapter's.

    What is known to be a replica's own stays that, however many of them have it.
    """
    told: set[str] = set()
    for bad in failures:
        if bad.known:
            continue
        words = " ".join(bad.reason.lower().split())
        if words in told:
            return bad
        told.add(words)
    return None


@lru_cache(maxsize=16384)
def rendezvous(adapter: str, replica: str) -> bytes:
    """The same order of replicas for an adapter on every gateway, another one for each adapter."""
    return blake2b(f"{adapter}\0{replica}".encode(), digest_size=8).digest()
