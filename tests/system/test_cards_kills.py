"""kill -9 of each part with leases held and others in line: nothing is given twice or lost, who waits is served."""

import asyncio
import json
import random
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from controlplane.ctl.cardasking import new_id
from schemas.card import PRIORITIES
from schemas.cardasks import CardAsk, ClaimEnd, ClaimStart, LeaseAcquire, LeaseRelease
from tests.support.aio import run
from tests.system.cards import (
    CARD_BYTES,
    CARDS,
    answered_on,
    asked,
    assert_nothing_double,
    back,
    card_is,
    card_now,
    gathered,
    last_replica,
    names,
    on_scripted,
    two_cards,
)
from tests.system.hubs import seed, tell
from tests.system.load import Loop
from tests.system.yard import SystemYard, client, system_yard

PARTS = ("nodeagent", "controlplane", "nats")
ASKERS = 8
TURNS = 4


def a_lease(name: str, *cards: str, **more: Any) -> LeaseAcquire:
    given: dict[str, Any] = {"id": new_id("l"), "wait_s": 60.0, **more}
    return LeaseAcquire(name=name, cards=cards, **given)


async def killed(yard: SystemYard, part: str) -> None:
    """kill -9, and waits until its successor runs."""
    await back(yard, part, yard.kill(part, signal.SIGKILL))


@asynccontextmanager
async def waiting(
    yard: SystemYard, *asks: LeaseAcquire
) -> AsyncIterator["list[asyncio.Task[Any]]"]:
    """These asks, each in line by the time the body runs, in this order."""
    tasks = []
    try:
        for ask in asks:
            tasks.append(asyncio.create_task(asked(yard, ask)))
            card = ask.cards[0]
            await card_is(
                yard,
                card,
                lambda c, ask=ask: ask.id in {w.id for w in c.waiters},
                f"{ask.name} in line",
            )
        yield tasks
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


@pytest.mark.timeout(120)
@pytest.mark.parametrize("part", PARTS)
def test_inv_6_who_holds_a_card_keeps_it_and_who_waits_gets_it_whatever_is_killed(
    part: str, tmp_path: Path
) -> None:
    async def story() -> None:
        async with (
            system_yard(tmp_path, settings=two_cards()) as yard,
            client(yard.gateway()) as http,
        ):
            holder = a_lease("job", "gpu0", pinned=True)
            granted = await asked(yard, holder)
            assert granted.status == "granted"
            await yard.add(on_scripted("steady"))
            assert await answered_on(yard, http, "steady") == "gpu1"
            engine = last_replica(yard, "steady").state.pid
            first = a_lease("first", "gpu0", priority="batch")
            second = a_lease("second", "gpu0")
            async with (
                waiting(yard, first, second) as lines,
                Loop(yard.gateway(), "steady", rate=5.0) as load,
            ):
                before = yard.position
                await killed(yard, part)
                if part == "nodeagent":
                    await yard.event("node.started", after=before, timeout_s=40)
                await load.more_answers(3)
                # The one who has it has it still, under the same number.
                assert (await asked(yard, holder)).fences == granted.fences
                assert not any(line.done() for line in lines)
                before = yard.position
                await asked(yard, LeaseRelease(what="job"))
                # `second` came later and is more urgent.
                served = await asyncio.wait_for(lines[1], 20)
                assert (served.status, served.id) == ("granted", second.id)
                assert served.fences["gpu0"] > granted.fences["gpu0"]
                await card_is(yard, "gpu0", lambda c: names(c) == {"second"}, "second's")
                assert not lines[0].done()
                await asked(yard, LeaseRelease(what=second.id))
                assert (await asyncio.wait_for(lines[0], 20)).status == "granted"
                await card_is(
                    yard,
                    "gpu0",
                    lambda c: names(c) == {"first"} and not c.waiters,
                    "first's",
                    after=before,
                )
            assert load.bad() == []
            assert last_replica(yard, "steady").state.pid == engine
            assert_nothing_double(yard)

    run(story(), 110)


class Asker:
    """One of many who take a lease or claim a card, keep it for a moment, and give it back."""

    def __init__(self, yard: SystemYard, number: int, chance: random.Random) -> None:
        self._yard = yard
        self._name = f"asker-{number}"
        self._chance = chance
        self.served = 0

    async def turns(self) -> None:
        for turn in range(TURNS):
            await self._turn(f"{self._name}-{turn}")
            self.served += 1

    async def _turn(self, name: str) -> None:
        chance = self._chance
        if chance.random() < 0.2:
            claim = ClaimStart(id=new_id("c"), name=name, card=chance.choice(CARDS), kind="app")
            assert (await asked(self._yard, claim)).status == "granted"
            ends: CardAsk = ClaimEnd(what=claim.id)
        else:
            cards = chance.choice([("gpu0",), ("gpu1",), CARDS])
            share = chance.choice([None, None, CARD_BYTES // 2, CARD_BYTES // 4])
            priority = chance.choice(PRIORITIES)
            lease = a_lease(name, *cards, memory_bytes=share, priority=priority, pinned=True)
            answer = await asked(self._yard, lease)
            assert answer.status == "granted", answer
            assert set(answer.fences) == set(cards)
            ends = LeaseRelease(what=lease.id)
        # While it has it, the log must come to say so; then others may.
        await self._yard.when(
            lambda e: e.noun == "card" and name in str(e.state), f"{name} in the log", timeout_s=40
        )
        assert (await asked(self._yard, ends)).status == "done"


@pytest.mark.timeout(150)
def test_inv_6_many_ask_at_once_while_parts_are_killed_and_nothing_is_given_twice(
    tmp_path: Path,
) -> None:
    tell(f"YARD_SEED={seed()}")
    chance = random.Random(seed())

    async def story() -> None:
        async with system_yard(tmp_path, settings=two_cards()) as yard:
            askers = [Asker(yard, n, random.Random(chance.random())) for n in range(ASKERS)]
            asking = asyncio.create_task(gathered(*(asker.turns() for asker in askers)))
            for part in chance.sample(PARTS * 2, 6):
                before = len(yard.of("card.leased"))
                await killed(yard, part)
                if not asking.done():
                    # Some more are served before the next one dies.
                    await yard.when(
                        lambda e, before=before: (
                            len(yard.of("card.leased")) > before + 2 or asking.done()
                        ),
                        f"more leases after {part} was killed",
                        timeout_s=40,
                    )
            await asyncio.wait_for(asking, 90)
            assert [asker.served for asker in askers] == [TURNS] * ASKERS
            for card in CARDS:
                await yard.when(
                    lambda e, card=card: (
                        not card_now(yard, card).leases
                        and not card_now(yard, card).waiters
                        and not card_now(yard, card).claims
                    ),
                    f"{card} to be empty again",
                )
            assert_nothing_double(yard)
            # What yardctl reads comes to say the same, of a control plane that may have begun just now.
            async with asyncio.timeout(20):
                while json.loads(await yard.ctl("lease", "list", "-o", "json")):
                    pass

    run(story(), 140)
