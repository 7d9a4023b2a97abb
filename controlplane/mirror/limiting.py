"""Keeps all fetches of a mirror together within one bandwidth; how is decided in domain/pace.py."""

import threading
import time

from controlplane.mirror.connecting import Line
from controlplane.mirror.domain import pace


class Limiter:
    """`rate_bytes_s` 0: no limit."""

    def __init__(self, rate_bytes_s: int) -> None:
        self.rate_bytes_s = rate_bytes_s
        self._bucket = pace.Bucket(at=time.monotonic())
        self._lock = threading.Lock()

    def spend(self, amount: int, line: Line) -> None:
        """Waits until what came after these `amount` bytes may come. Raises Stopped."""
        if self.rate_bytes_s <= 0:
            return
        with self._lock:
            self._bucket, wait_s = pace.spend(
                self._bucket, time.monotonic(), amount, self.rate_bytes_s
            )
        if wait_s > 0:
            line.pause(wait_s)
