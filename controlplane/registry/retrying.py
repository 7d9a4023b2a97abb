"""Asks again when a fault is transient, waiting longer each time, within a bound over all tries.

It does not know what is asked. What is not transient is told at once.
"""

import asyncio
from collections.abc import Awaitable, Callable
from typing import Final, TypeVar

from controlplane.registry.faults import RegistryFault

T = TypeVar("T")

FIRST_WAIT_S: Final = 0.5
LONGEST_WAIT_S: Final = 8.0


async def retried(
    attempt: Callable[[], Awaitable[T]], for_s: float, first_wait_s: float = FIRST_WAIT_S
) -> T:
    """What `attempt` returns. Raises its RegistryFault when it is not transient, or when waiting once more
    (as long as the registry asked for, at least) would end later than `for_s` seconds after the first try.
    """
    loop = asyncio.get_running_loop()
    ends_at = loop.time() + for_s
    wait_s = first_wait_s
    tries = 0
    while True:
        tries += 1
        try:
            return await attempt()
        except RegistryFault as fault:
            pause_s = max(wait_s, fault.wait_s or 0.0)
            if not fault.transient or loop.time() + pause_s > ends_at:
                raise fault.after(tries) from None
        await asyncio.sleep(pause_s)
        wait_s = min(LONGEST_WAIT_S, wait_s * 2)
