"""Counts what the hub was asked for and what it sent: a test's proof of what was downloaded, and how often."""

import collections
import threading

from msgspec import Struct

KEPT = 10_000


class Request(Struct, frozen=True, kw_only=True):
    """One request that was answered, or given up.

    `at` is api, resolve or cdn; `path` the repository or `repo/path`. `sent` counts bytes of the body.
    `authorized`: it carried an Authorization header.
    """

    at: str
    method: str
    path: str
    status: int
    range: str = ""
    sent: int = 0
    authorized: bool = False


class Counts(Struct, frozen=True, kw_only=True):
    """`bytes` by `repo/path`: those of the file's body that the hub's kernel took, all requests together.

    `requests` are the last KEPT, in order of their end.
    """

    bytes: dict[str, int]
    requests: tuple[Request, ...]


class Counters:
    """Safe to use from any thread."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._bytes: collections.Counter[str] = collections.Counter()
        self._requests: collections.deque[Request] = collections.deque(maxlen=KEPT)

    def sent(self, path: str, count: int) -> None:
        with self._changed:
            self._bytes[path] += count
            self._changed.notify_all()

    def done(self, request: Request) -> None:
        with self._changed:
            self._requests.append(request)
            self._changed.notify_all()

    def counts(self) -> Counts:
        with self._changed:
            return Counts(bytes=dict(self._bytes), requests=tuple(self._requests))

    def bytes_of(self, path: str) -> int:
        with self._changed:
            return self._bytes[path]

    def wait_bytes(self, path: str, count: int, timeout_s: float) -> bool:
        """Whether `count` bytes of `path` were sent within `timeout_s`."""
        with self._changed:
            return self._changed.wait_for(lambda: self._bytes[path] >= count, timeout_s)

    def reset(self) -> None:
        with self._changed:
            self._bytes.clear()
            self._requests.clear()
