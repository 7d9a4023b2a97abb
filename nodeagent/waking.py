"""Waits that an event cuts short: for a while, or for a piece of work. The event is left set."""

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

T = TypeVar("T")


async def pause(wake: asyncio.Event, seconds: float) -> None:
    """Waits that long, or until `wake` is set."""
    try:
        async with asyncio.timeout(seconds):
            await wake.wait()
    except TimeoutError:
        return


async def unless_woken(wake: asyncio.Event, work: Coroutine[Any, Any, T]) -> T | None:
    """The result of `work`, or None when `wake` was set before there was one; it is then cancelled."""
    doing = asyncio.ensure_future(work)
    woken = asyncio.ensure_future(wake.wait())
    try:
        await asyncio.wait({doing, woken}, return_when=asyncio.FIRST_COMPLETED)
        return doing.result() if doing.done() else None
    finally:
        for task in (doing, woken):
            task.cancel()
        await asyncio.gather(doing, woken, return_exceptions=True)
