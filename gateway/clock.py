"""The gateway's two clocks: seconds that only grow, for waits, and wall time, for what others wrote.

Nothing else in this package asks the time, so tests can give another one.
"""

import asyncio
from datetime import UTC, datetime
from typing import Protocol


class Clock(Protocol):
    def now_s(self) -> float:
        """Seconds of the clock that timers of the running loop use."""
        ...

    def now(self) -> datetime:
        """Wall time, aware, UTC."""
        ...

    def wall_ms(self, at_s: float) -> float:
        """Wall time in milliseconds of a moment given in seconds of `now_s`."""
        ...


class LoopClock:
    """The running loop's clock; must be made inside the loop."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()

    def now_s(self) -> float:
        return self._loop.time()

    def now(self) -> datetime:
        return datetime.now(UTC)

    def wall_ms(self, at_s: float) -> float:
        return (self.now().timestamp() - (self._loop.time() - at_s)) * 1000
