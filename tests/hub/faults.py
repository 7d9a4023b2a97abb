"""What goes wrong at the hub, as a test tells it: which requests, how often, and how.

It decides nothing about a request that no fault names.
"""

import threading
from typing import Literal

from msgspec import Struct

Where = Literal["api", "resolve", "cdn"]


class Fault(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One thing that goes wrong. Bytes are counted from the start of the file, whatever range was asked for.

    `at` the listing, the address of a file, or the bytes themselves. `path` is the repository for `api`, the
    file's path else; empty: any. The first `skip` requests pass, the next `times` are hit (0: all of them).

    status          answered instead, with `headers` and `body`
    redirect        answered instead: 302 to this address
    delay_s         before the head of the answer
    stall_at        sends nothing from this byte on, until the fault is cleared
    cut_at          closes the connection before this byte
    wrong_at        this byte is another one
    short_at        the file ends here, and its length says so
    html            200 and a page of HTML instead of the bytes
    ignore_range    200 and the whole file, whatever range was asked for
    lie_range       206 of the right length from the start of the file, whatever range was asked for
    """

    at: Where
    path: str = ""
    skip: int = 0
    times: int = 0
    status: int = 0
    headers: dict[str, str] = {}
    body: str = ""
    redirect: str = ""
    delay_s: float = 0.0
    stall_at: int | None = None
    cut_at: int | None = None
    wrong_at: int | None = None
    short_at: int | None = None
    html: bool = False
    ignore_range: bool = False
    lie_range: bool = False


class FaultBook:
    """The faults that are set, and how often each was met. Safe to use from any thread."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._set: list[Fault] = []
        self._met: list[int] = []

    def add(self, fault: Fault) -> None:
        with self._changed:
            self._set.append(fault)
            self._met.append(0)

    def clear(self) -> None:
        """Nothing goes wrong any more; stalled answers go on."""
        with self._changed:
            self._set.clear()
            self._met.clear()
            self._changed.notify_all()

    def take(self, at: Where, path: str) -> Fault | None:
        """The first fault that this request meets; every one that names it counts the request."""
        with self._changed:
            hit: Fault | None = None
            for index, fault in enumerate(self._set):
                if fault.at != at or fault.path not in ("", path):
                    continue
                met = self._met[index] = self._met[index] + 1
                within = fault.skip < met and (not fault.times or met <= fault.skip + fault.times)
                if hit is None and within:
                    hit = fault
            return hit

    def wait_cleared(self, fault: Fault, timeout_s: float) -> bool:
        """Whether `fault` is no longer set; waits at most `timeout_s`."""
        with self._changed:
            return self._changed.wait_for(
                lambda: not any(one is fault for one in self._set), timeout_s
            )
