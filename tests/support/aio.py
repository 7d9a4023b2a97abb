"""Runs a coroutine of a test with a deadline; a test that hangs says so instead of standing still."""

import asyncio
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any, TypeVar

T = TypeVar("T")


def run(coroutine: Coroutine[Any, Any, T], timeout_s: float = 20.0) -> T:
    """The coroutine's result; raises TimeoutError after `timeout_s`."""

    async def bounded() -> T:
        return await asyncio.wait_for(coroutine, timeout_s)

    return asyncio.run(bounded())


async def until(
    condition: Callable[[], bool | Awaitable[bool]], what: str, timeout_s: float = 10.0
) -> None:
    """Waits until `condition` holds, looking every 5 ms; fails naming `what` after the deadline.

    For state that has no event to wait for (files, processes, counters of another thread).
    """
    loop = asyncio.get_running_loop()
    deadline = loop.time() + timeout_s
    while True:
        result = condition()
        if isinstance(result, Awaitable):
            result = await result
        if result:
            return
        if loop.time() > deadline:
            raise AssertionError(f"waited {timeout_s} s for {what}")
        await asyncio.sleep(0.005)
