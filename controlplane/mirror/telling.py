"""Says how far one file is, at most once a second; what it says is decided in domain/pace.py."""

import asyncio
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from controlplane.mirror.domain import pace
from schemas.progress import FileProgress


class Teller:
    """For one file. `say` is called in the thread of whoever calls `tell`."""

    def __init__(self, key: str, total_bytes: int, say: Callable[[FileProgress], None]) -> None:
        self._key = key
        self._total_bytes = total_bytes
        self._say = say
        self._meter = pace.Meter()
        self._said_at: float | None = None
        self._what = ""

    def tell(self, what: str, count: int) -> None:
        """`count` bytes are done of what is being done now."""
        now = time.monotonic()
        if not pace.is_due(self._said_at, now):
            return
        if what != self._what:
            self._meter = pace.Meter()  # the rate of one thing says nothing of another
        self._meter = pace.measured(self._meter, now, count)
        self._said_at, self._what = now, what
        self._say(
            FileProgress(
                key=self._key,
                bytes=count,
                total_bytes=self._total_bytes,
                rate_bytes_s=pace.rate_bytes_s(self._meter),
                what=what,
            )
        )


def in_loop(loop: asyncio.AbstractEventLoop, call: Callable[..., None]) -> Callable[[Any], None]:
    """Lets a thread make a call with one argument in `loop`; nothing happens once the loop is closed."""

    def pass_on(argument: Any) -> None:
        with suppress(RuntimeError):
            loop.call_soon_threadsafe(call, argument)

    return pass_on
