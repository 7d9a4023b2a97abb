"""What a real driver and a real card say: the provider's contract, what an engine sees, and memory that comes back."""

import asyncio
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from msgspec.structs import replace

from events.ids import utc_now
from nodeagent import census
from nodeagent.cards.meter import CardMeter
from nodeagent.cards.nvml import Nvml
from nodeagent.cards.provider import Provider, Reading
from schemas.card import Card, Lease
from tests.support import aio
from tests.support.provider_contract import CHECKS, MIB, Rig, until

HOLDING = Path(__file__).with_name("holding.py")
CONTEXT_BYTES = 2048 * MIB
"""What CUDA may keep for a process besides what it asked for."""


@contextmanager
def holding(provider: Nvml, card: str, memory_bytes: int) -> Iterator[int]:
    with subprocess.Popen(
        [sys.executable, "-I", "-S", str(HOLDING), str(memory_bytes)],
        stdout=subprocess.PIPE,
        env={**os.environ, **provider.environment((card,))},
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"holds\n"
        try:
            yield process.pid
        finally:
            process.kill()


class RealRig:
    """The first card of this machine."""

    card = "gpu0"
    slack_bytes = CONTEXT_BYTES

    def __init__(self) -> None:
        self.nvml = Nvml()
        self.provider: Provider = self.nvml
        assert self.provider.cards(), "this machine shows no NVIDIA card; its log says why"
        self.ties = self._ties()

    def _ties(self) -> bool:
        with holding(self.nvml, self.card, MIB) as pid:
            return bool(self.provider.read({"x": frozenset((pid,))})[self.card].of)

    def holds(self, holder: str) -> None:
        pass

    def using(self, memory_bytes: int):
        return holding(self.nvml, self.card, memory_bytes)


@pytest.fixture(scope="module")
def rig() -> Iterator[RealRig]:
    made = RealRig()
    yield made
    made.provider.close()


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
def test_the_contract_holds_on_a_real_card(check: Callable[[Rig], None], rig: RealRig) -> None:
    check(rig)


def test_a_card_has_its_uuid_its_address_and_what_the_driver_leaves_of_its_memory(
    rig: Rig,
) -> None:
    for number, card in enumerate(rig.provider.cards()):
        assert card.id == f"gpu{number}"
        assert card.device.startswith("GPU-")
        assert card.pci
        assert card.name
        assert card.memory_bytes > 1 << 30


@pytest.mark.parametrize(("cards", "seen"), [(("gpu0",), 1), ((), 0)])
def test_an_engine_sees_its_cards_and_no_other(
    cards: tuple[str, ...], seen: int, rig: RealRig
) -> None:
    shown = subprocess.run(
        [sys.executable, "-I", "-S", str(HOLDING)],
        capture_output=True,
        text=True,
        timeout=60,
        env={**os.environ, **rig.provider.environment(cards)},
    )
    assert shown.stdout.strip() == f"cards {seen}", shown.stderr


def test_a_card_that_is_let_go_is_not_kept_open(rig: RealRig) -> None:
    """A VM gets the card only from a machine where nobody has it open."""
    rig.provider.read({})
    assert _open_cards()
    rig.provider.let_go(frozenset(card.id for card in rig.provider.cards()))
    try:
        assert rig.provider.read({}) == {}
        until(lambda: not _open_cards(), "no card is open in this process")
    finally:
        rig.provider.let_go(frozenset())
    assert rig.card in rig.provider.read({})


def _open_cards() -> list[str]:
    names = [os.readlink(f"/proc/self/fd/{fd}") for fd in os.listdir("/proc/self/fd") if _is(fd)]
    return [name for name in names if name.removeprefix("/dev/nvidia").isdecimal()]


def _is(fd: str) -> bool:
    return os.path.islink(f"/proc/self/fd/{fd}")


def test_the_memory_of_an_engine_that_ended_is_seen_to_be_back(rig: RealRig) -> None:
    """The figures of the meter through a life: nothing, all of it, a stop, nothing again."""
    info = next(card for card in rig.provider.cards() if card.id == rig.card)
    size = 1024 * MIB
    now = utc_now()
    lease = Lease(holder="r-1", memory_bytes=size + CONTEXT_BYTES, fence=1, since=now)
    card = Card(
        node="n", id=rig.card, kind="gpu", memory_bytes=info.memory_bytes, rev=1, leases=(lease,)
    )
    told: list[Reading] = []
    pids: set[int] = set()
    returning = False

    async def look_at_all(*_) -> census.Census:
        seen = await asyncio.to_thread(census.take, {}, {})
        return seen._replace(launches={"r-1": frozenset(pids)})

    def cards() -> dict[str, Card]:
        return {rig.card: replace(card, leases=(replace(lease, returning=returning),))}

    meter = CardMeter(
        infos=(info,),
        providers=(rig.provider,),
        census=look_at_all,
        cards=cards,
        tell=told.append,
        look_s=1.0,
    )

    async def life() -> None:
        nonlocal returning
        await meter.look()
        with holding(rig.nvml, rig.card, size) as pid:
            pids.add(pid)
            await meter.look()
            held = await meter.held_by("r-1", rig.card)
            assert held >= size
        returning = True

        async def is_back() -> bool:
            return await meter.held_by("r-1", rig.card) == 0

        await aio.until(is_back, "the memory is back")

    aio.run(life(), 60.0)
    assert told
