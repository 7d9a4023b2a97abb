"""How often gateways tell each other what keys used: soon where somebody waits for it, and never most of the time."""

import asyncio
import itertools
import time
from pathlib import Path
from unittest.mock import patch

from schemas.beacons import LimitsBeacon
from tests.support.aio import run
from tests.support.gateway_yard import memory_yard

TELLING_S = 0.03
"""As long as a beacon of a few thousand keys takes."""


def test_however_many_requests_press_most_of_the_time_is_for_requests(tmp_path: Path) -> None:
    async def story() -> None:
        async with memory_yard(tmp_path) as yard:
            gateway = await yard.gateway()
            ledger = gateway.limits.ledger
            told: list[float] = []
            tell = ledger.tell

            def slow(*given: object, **more: object) -> LimitsBeacon:
                time.sleep(TELLING_S)
                told.append(time.monotonic())
                return tell(*given, **more)  # pyright: ignore[reportArgumentType]

            with patch.object(ledger, "tell", slow):
                began_s = time.monotonic()
                while len(told) < 6:
                    gateway.limits.on_pressed()
                    await asyncio.sleep(0.001)
                    assert time.monotonic() - began_s < 10, "beacons stopped"
            # The first may have been due already, and behind it a rest of no length that is known.
            gaps = [after - before for before, after in itertools.pairwise(told[1:])]
            assert min(gaps) >= 4 * TELLING_S, gaps

    run(story())
