"""Hashes bytes in a thread of its own while the next ones are received; memory stays at a few buffers."""

import hashlib
import threading
from collections import deque
from typing import Final

BUFFER_BYTES: Final = 1024 * 1024
BUFFERS: Final = 3


class Digest:
    """A sha256 over what is lent out by `buffer` and given back by `add`, in that order. Close it."""

    def __init__(self) -> None:
        self._sha = hashlib.sha256()
        self._free = [bytearray(BUFFER_BYTES) for _ in range(BUFFERS)]
        self._full: deque[tuple[bytearray, int] | None] = deque()
        self._change = threading.Condition()
        self._hashed = 0
        self._added = 0
        self._thread = threading.Thread(target=self._run, name="mirror digest", daemon=True)
        self._thread.start()

    def buffer(self) -> bytearray:
        """One to fill, as soon as one is free. It has to come back by `add`."""
        with self._change:
            self._change.wait_for(lambda: self._free)
            return self._free.pop()

    def add(self, buffer: bytearray, count: int) -> None:
        """The first `count` bytes of a borrowed buffer are next; it may be read until then, not changed."""
        with self._change:
            self._full.append((buffer, count))
            self._added += count
            self._change.notify_all()

    def start_over(self) -> None:
        """Forgets everything that was added."""
        self.value()
        self._sha = hashlib.sha256()

    def value(self) -> str:
        """The sha256, in hex, of all that was added; waits for the thread."""
        with self._change:
            self._change.wait_for(lambda: self._hashed == self._added)
            return self._sha.hexdigest()

    def close(self) -> None:
        with self._change:
            self._full.append(None)
            self._change.notify_all()
        self._thread.join()

    def _run(self) -> None:
        while True:
            with self._change:
                self._change.wait_for(lambda: self._full)
                item = self._full.popleft()
            if item is None:
                return
            buffer, count = item
            self._sha.update(memoryview(buffer)[:count])
            with self._change:
                self._hashed += count
                self._free.append(buffer)
                self._change.notify_all()
