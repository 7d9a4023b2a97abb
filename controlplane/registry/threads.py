"""Runs a blocking call beside the event loop, on a thread that never keeps the process from ending.

asyncio's own pool is waited for when the loop closes; a registry that does not answer would hold up a stop.
"""

import asyncio
import contextlib
import threading
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")


async def beside(call: Callable[[], T], name: str) -> T:
    """What `call` returns or raises. When this is cancelled, the call's result is dropped once it is there."""
    loop = asyncio.get_running_loop()
    result: asyncio.Future[T] = loop.create_future()

    def settle(value: T | None, error: BaseException | None) -> None:
        if result.done():
            return
        if error is not None:
            result.set_exception(error)
        else:
            result.set_result(value)  # pyright: ignore[reportArgumentType] - None may be a T

    def run() -> None:
        value: T | None = None
        error: BaseException | None = None
        try:
            value = call()
        except BaseException as raised:  # noqa: BLE001 - it is raised where it was called from
            error = raised
        # The loop may be closed by now: then nobody waits for it any more.
        with contextlib.suppress(RuntimeError):
            loop.call_soon_threadsafe(settle, value, error)

    threading.Thread(target=run, name=name, daemon=True).start()
    return await result
