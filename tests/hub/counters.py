"""Counts what the hub was asked for and what it sent: a test's proof of what was downloaded, and how often.

Everything is counted before the reader can see it, so a test may look as soon as it has its answer.
"""

import collections
import threading

from msgspec import Struct
from msgspec.structs import replace

KEPT = 10_000


class Request(Struct, frozen=True, kw_only=True):
    """One request, once the head of its answer is on its way.

    `at` is api, resolve or cdn; `path` the repository or `repo/path`. `sent` counts bytes of a file's body;
    `status` is 0 when the reader went away before there was an answer. `authorized`: it carried an
    Authorization header.
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

    `requests` are the last KEPT, in order of their answers.
    """

    bytes: dict[str, int]
    requests: tuple[Request, ...]


class Exchanged:
    """A request and how much of its answer went out; `Counters` alone writes it."""

    def __init__(self, request: Request) -> None:
        self.request = request
        self.sent = 0


class Counters:
    """Safe to use from any thread."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._bytes: collections.Counter[str] = collections.Counter()
        self._requests: collections.deque[Exchanged] = collections.deque(maxlen=KEPT)

    def answered(self, request: Request) -> Exchanged:
        """The head of its answer is about to be sent."""
        exchanged = Exchanged(request)
        with self._changed:
            self._requests.append(exchanged)
            self._changed.notify_all()
        return exchanged

    def sent(self, exchanged: Exchanged, count: int) -> None:
        """`count` bytes are about to be sent; less than none: so many were not, after all."""
        with self._changed:
            exchanged.sent += count
            self._bytes[exchanged.request.path] += count
            self._changed.notify_all()

    def counts(self) -> Counts:
        with self._changed:
            return Counts(
                bytes=dict(self._bytes),
                requests=tuple(replace(one.request, sent=one.sent) for one in self._requests),
            )

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
