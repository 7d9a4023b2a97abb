"""Decides whose fault a failed load is and for how long nobody tries it again.

An answer of the engine that nobody knows is the replica's fault, until another replica of this node gives the
same answer for the same adapter: then it is the adapter's. It never unloads anything: a failed load costs
nobody his place.
"""

import re
from collections.abc import Mapping
from datetime import datetime, timedelta
from typing import Final

from msgspec import Struct

from schemas.slots import MOST_BAD, BadAdapter, Whose

REPLICA_FIRST_S: Final = 15.0
REPLICA_LONGEST_S: Final = 300.0
ADAPTER_FIRST_S: Final = 60.0
ADAPTER_LONGEST_S: Final = 1800.0
"""How long a failure is remembered at first, and at most: it doubles with each one in a row."""

MOST_KEPT: Final = 256
"""Failures remembered of one replica; the newest ones."""

LONGEST_TEXT: Final = 400
"""Characters of an engine's words that are kept."""

_SPACE = re.compile(r"\s+")
_ADDRESS = re.compile(r"0x[0-9a-f]+")


class Fault(Struct, frozen=True, kw_only=True):
    """Why a load did not come about: whose fault by the engine's answer, a code of `schemas.codes`, its words.

    `known` False: nobody knows this answer. `late`: the engine may still have loaded it.
    """

    whose: Whose
    code: str
    text: str
    known: bool = True
    late: bool = False


class Bad(Struct, frozen=True, kw_only=True):
    """A load that failed in one replica. `tries` failures in a row; `words` is what to compare with others'."""

    adapter: str
    version: str
    code: str
    reason: str
    until: datetime
    at: datetime
    whose: Whose = "replica"
    tries: int = 1
    known: bool = True
    words: str = ""


Bads = Mapping[str, Bad]
"""The failures of one replica by pin name."""


def failed(
    bads: Bads,
    others: tuple[Bads, ...],
    name: str,
    *,
    adapter: str,
    version: str,
    fault: Fault,
    strip: tuple[str, ...],
    now: datetime,
) -> tuple[Bads, Bad]:
    """Remembers a failure. `others` are the failures of the node's other replicas of the model, `strip` what of the
    engine's words is this load's alone (names and paths)."""
    words = comparable(fault.text, strip)
    whose: Whose = fault.whose
    if not fault.known and any(
        (said := other.get(name)) is not None and not said.known and said.words == words
        for other in others
    ):
        whose = "adapter"
    before = bads.get(name)
    tries = before.tries + 1 if before is not None else 1
    bad = Bad(
        adapter=adapter,
        version=version,
        code=fault.code,
        reason=fault.text[:LONGEST_TEXT],
        until=now + timedelta(seconds=_rest_s(whose, tries)),
        at=now,
        whose=whose,
        tries=tries,
        known=fault.known,
        words=words,
    )
    kept = {**{other: b for other, b in bads.items() if other != name}, name: bad}
    while len(kept) > MOST_KEPT:
        del kept[next(iter(kept))]
    return kept, bad


def standing(bads: Bads, name: str, now: datetime) -> Bad | None:
    """The failure that keeps this load from being tried now."""
    bad = bads.get(name)
    return bad if bad is not None and now < bad.until else None


def forgiven(bads: Bads, name: str) -> Bads:
    """It was loaded after all, or a person wants it tried."""
    return {other: b for other, b in bads.items() if other != name} if name in bads else bads


def told(bads: Bads, now: datetime) -> tuple[BadAdapter, ...]:
    """The failures an event tells: those that still count, the newest ones."""
    counting = [bad for bad in bads.values() if now < bad.until]
    return tuple(
        BadAdapter(
            adapter=bad.adapter,
            version=bad.version,
            code=bad.code,
            reason=bad.reason,
            until=bad.until,
            whose=bad.whose,
            known=bad.known,
        )
        for bad in sorted(counting, key=lambda b: (b.at, b.adapter, b.version))[-MOST_BAD:]
    )


def comparable(text: str, strip: tuple[str, ...]) -> str:
    """An engine's words without what differs from one replica to the next for the same fault."""
    for own in sorted(strip, key=len, reverse=True):
        if own:
            text = text.replace(own, "…")
    return _SPACE.sub(" ", _ADDRESS.sub("…", text.lower())).strip()


def _rest_s(whose: Whose, tries: int) -> float:
    first, longest = (
        (ADAPTER_FIRST_S, ADAPTER_LONGEST_S)
        if whose == "adapter"
        else (REPLICA_FIRST_S, REPLICA_LONGEST_S)
    )
    return min(first * 2.0 ** min(tries - 1, 20), longest)
