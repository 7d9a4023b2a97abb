"""Decides whose a use of a card is that the driver ties to no known process, and who is a stranger there.

Pure: a reading, the card's state and who is alive go in, a reading comes out. What a driver ties to a process of
a holder is never taken from it here.
"""

from collections.abc import Mapping
from typing import Final

from msgspec.structs import replace

from nodeagent.cards.provider import Reading, Seen
from schemas.card import Card, Lease
from schemas.settings import MIB

SLACK_BYTES: Final = 64 * MIB
"""What a reading may move by without meaning anything."""

SLACK_PART: Final = 0.02
"""Of the card's memory, where that is less."""


def hidden_holders(
    reading: Reading, card: Card, alive: Mapping[str, frozenset[int]]
) -> tuple[Lease, ...]:
    """Leases whose holders live while the driver shows nothing of them here: they are about to begin, or
    run where its numbers mean nothing. A parked engine has nothing to show."""
    return tuple(
        lease
        for lease in card.leases
        if lease.kind != "parked" and alive.get(lease.holder) and not reading.of.get(lease.holder)
    )


def explained(
    reading: Reading, card: Card, alive: Mapping[str, frozenset[int]], usual_bytes: int
) -> Reading:
    """The reading with the use of the card tied to holders as far as it can be. `usual_bytes` were tied to
    nobody when nothing was hidden.

    1. A card that a claim or a VM keeps: whoever is there belongs to it, so nobody is a stranger.
    2. Holders with live processes of which the driver shows none: they run where its numbers mean
       nothing (a container). What it shows of processes that are not here, and what more than usual it
       ties to no process at all, is theirs, evenly and up to what they asked for.
    3. A named lease without a process: strangers are its, oldest lease first, as long as they fit in
       what it asked for; in a whole card everybody fits.
    """
    if card.claims or card.vm is not None:  # 1
        reading = replace(reading, strangers=())
    hidden = hidden_holders(reading, card, alive)
    if hidden:  # 2
        away = [seen for seen in reading.strangers if not seen.here]
        untied = max(reading.unexplained_bytes - usual_bytes, 0)
        share = (untied + sum(seen.memory_bytes for seen in away)) // len(hidden)
        shares = {
            lease.holder: share if lease.exclusive else min(share, lease.memory_bytes)
            for lease in hidden
        }
        reading = replace(
            reading,
            unexplained_bytes=max(reading.unexplained_bytes - min(untied, sum(shares.values())), 0),
        )
        reading = _given(reading, shares, away)
    for lease in card.leases:  # 3
        if lease.kind == "named" and lease.process is None:
            reading = _with_guests(reading, lease)
    return reading


def _with_guests(reading: Reading, lease: Lease) -> Reading:
    room = lease.memory_bytes - reading.of.get(lease.holder, 0)
    guests: list[Seen] = []
    for seen in sorted(reading.strangers, key=lambda one: one.pid):
        if lease.exclusive or seen.memory_bytes <= room:
            guests.append(seen)
            room -= seen.memory_bytes
    total = sum(seen.memory_bytes for seen in guests)
    return _given(reading, {lease.holder: total}, guests) if guests else reading


def _given(reading: Reading, shares: Mapping[str, int], gone: list[Seen]) -> Reading:
    """The reading with `shares` of what belonged to nobody given to holders, and `gone` no strangers."""
    of = dict(reading.of)
    for holder, share in shares.items():
        if share:
            of[holder] = of.get(holder, 0) + share
    given = sum(shares.values())
    return replace(
        reading,
        of=of,
        other_bytes=max(reading.other_bytes - given, 0),
        strangers=tuple(seen for seen in reading.strangers if seen not in gone),
    )


def lasting(before: Reading | None, now: Reading) -> tuple[Seen, ...]:
    """The strangers of two readings in a row: one that only flickers through is none worth a word."""
    pids = {seen.pid for seen in before.strangers} if before is not None else set[int]()
    return tuple(seen for seen in now.strangers if seen.pid in pids)


def slack_bytes(card: Card) -> int:
    """How much a figure of this card may move without anybody being told: the smaller of the two."""
    part = int(SLACK_PART * card.memory_bytes) if card.memory_bytes else SLACK_BYTES
    return min(SLACK_BYTES, part)


def still_held_bytes(
    holder: str, reading: Reading, unexplained_before_bytes: int, had_bytes: int, slack: int
) -> int:
    """What a holder that ended still has on the card.

    What is tied to its processes; and what nobody is shown for and was not so before, up to what it had:
    a process that is being taken down disappears from the list before its memory is back.
    """
    tied = reading.of.get(holder, 0)
    grown = reading.unexplained_bytes - unexplained_before_bytes
    return tied + (min(grown, had_bytes) if grown > slack else 0)
