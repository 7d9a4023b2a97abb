"""What every provider of cards must do, as checks on one rig: a provider and a way to use its card.

The same checks run on declared cards, on a driver made up of a file, and on a real one.
"""

import time
from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack
from typing import Protocol

from nodeagent.cards.provider import Provider, Reading

WAIT_S = 20.0
MIB = 1 << 20


class Rig(Protocol):
    """A provider under test. `card` is one of its cards; `slack_bytes` is what a process uses besides."""

    provider: Provider
    card: str
    slack_bytes: int
    ties: bool
    """Whether this machine lets uses be tied to processes: a driver seen from a container may not."""

    def using(self, memory_bytes: int) -> AbstractContextManager[int]:
        """A process that uses so much of the card; its pid. It is gone afterwards."""
        ...

    def holds(self, holder: str) -> None:
        """`holder` has a lease on the card."""
        ...


def until(condition: Callable[[], bool], what: str) -> None:
    """Waits for something the kernel or the driver has no event for."""
    deadline = time.monotonic() + WAIT_S
    while not condition():
        assert time.monotonic() < deadline, f"waited {WAIT_S:g} s until {what}"
        time.sleep(0.02)


def its_cards_stay_the_same(rig: Rig) -> None:
    cards = rig.provider.cards()
    assert rig.card in {card.id for card in cards}
    assert len({card.id for card in cards}) == len(cards)
    assert all(card.memory_bytes > 0 for card in cards)
    assert rig.provider.cards() == cards


def a_reading_adds_up(rig: Rig) -> None:
    readings = rig.provider.read({})
    assert set(readings) == {card.id for card in rig.provider.cards()}
    for card, reading in readings.items():
        assert reading.card == card
        _adds_up(reading)


def a_holders_use_is_seen_and_gone_with_its_process(rig: Rig) -> None:
    size = 96 * MIB
    rig.holds("one")
    before = rig.provider.read({})[rig.card].used_bytes
    with rig.using(size) as pid:
        reading = rig.provider.read({"one": frozenset((pid,))})[rig.card]
        _adds_up(reading)
        assert reading.used_bytes >= before + size
        if rig.ties:
            assert size <= reading.of["one"] <= size + rig.slack_bytes
            assert pid not in {seen.pid for seen in reading.strangers}
    until(lambda: _use(rig, "one", pid) == 0, "nothing is tied to a process that ended")
    until(
        lambda: rig.provider.read({})[rig.card].used_bytes < before + size,
        "the memory is back",
    )


def two_holders_are_told_apart(rig: Rig) -> None:
    rig.holds("one")
    rig.holds("two")
    with ExitStack() as both:
        first = both.enter_context(rig.using(48 * MIB))
        second = both.enter_context(rig.using(144 * MIB))
        pids = {"one": frozenset((first,)), "two": frozenset((second,))}
        reading = rig.provider.read(pids)[rig.card]
        _adds_up(reading)
        if rig.ties:
            assert 48 * MIB <= reading.of["one"] <= 48 * MIB + rig.slack_bytes
            assert 144 * MIB <= reading.of["two"] <= 144 * MIB + rig.slack_bytes


def it_goes_on_after_it_was_closed(rig: Rig) -> None:
    rig.provider.close()
    rig.provider.close()
    assert rig.card in rig.provider.read({})


CHECKS: tuple[Callable[[Rig], None], ...] = (
    its_cards_stay_the_same,
    a_reading_adds_up,
    a_holders_use_is_seen_and_gone_with_its_process,
    two_holders_are_told_apart,
    it_goes_on_after_it_was_closed,
)


def _use(rig: Rig, holder: str, pid: int) -> int:
    return rig.provider.read({holder: frozenset((pid,))})[rig.card].of.get(holder, 0)


def _adds_up(reading: Reading) -> None:
    assert reading.other_bytes == reading.used_bytes - sum(reading.of.values())
    assert 0 <= reading.unexplained_bytes <= reading.other_bytes
    assert sum(seen.memory_bytes for seen in reading.strangers) <= reading.other_bytes
