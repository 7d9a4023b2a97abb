"""Calls a library that may hang, in a thread that nobody has to wait for.

One call at a time. A call that takes too long is given up and its thread left behind; until it comes back, every
further call fails at once. It must not keep the process from ending.
"""

import asyncio
import contextlib
import threading
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")


class Hangs(Exception):
    """The call did not come back in time, or the one before it has not."""


class Aside:
    """One owner, one event loop."""

    def __init__(self, name: str, timeout_s: float = 10.0) -> None:
        self._name = name
        self._timeout_s = timeout_s
        self._running: asyncio.Future[object] | None = None

    async def call(self, work: Callable[[], T]) -> T:
        """What `work` returns or raises. Raises Hangs."""
        if self._running is not None and not self._running.done():
            raise Hangs(f"{self._name} has not answered an earlier question")
        loop = asyncio.get_running_loop()
        future: asyncio.Future[T] = loop.create_future()

        def settle(result: T | None, error: BaseException | None) -> None:
            if future.done():
                return
            if error is not None:
                future.set_exception(error)
                # Whoever asked may have given up by now.
                future.exception()
            else:
                future.set_result(result)  # pyright: ignore[reportArgumentType]

        def run() -> None:
            result: T | None = None
            error: BaseException | None = None
            try:
                result = work()
            except BaseException as raised:  # noqa: BLE001 (handed to who asked)
                error = raised
            # The loop may be closed by now; then nobody waits.
            with contextlib.suppress(RuntimeError):
                loop.call_soon_threadsafe(settle, result, error)

        self._running = future  # pyright: ignore[reportAttributeAccessIssue]
        threading.Thread(target=run, name=self._name, daemon=True).start()
        try:
            # Not wait_for: before Python 3.12 it loses a cancellation that comes with the answer.
            async with asyncio.timeout(self._timeout_s):
                return await asyncio.shield(future)
        except TimeoutError:
            raise Hangs(f"{self._name} did not answer within {self._timeout_s:g} s") from None
