"""The gateway's two clocks: seconds that only grow, for waits, and wall time, for what others wrote.

Nothing else in this package asks the time, so tests can give another one.
"""

import time
from datetime import UTC, datetime
from functools import partial
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
    """The clock behind the running loop's own.

    `loop.time()` would do, but uvloop's stands still while callbacks run and counts milliseconds.
    """

    # Asked several times by every request, so without a call of ours around them.
    now_s = staticmethod(time.monotonic)
    now = staticmethod(partial(datetime.now, UTC))

    def wall_ms(self, at_s: float) -> float:
        return (self.now().timestamp() - (time.monotonic() - at_s)) * 1000
