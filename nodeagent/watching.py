"""Watches processes until they end, by pidfd: a number that is given to another is never mistaken for the one.

It only tells; what ends with a process is decided in `domain/granting.py`. Nothing is signalled here but what
the caller names.
"""

import asyncio
import logging
import os
import signal
from collections.abc import Callable
from collections.abc import Set as AbstractSet

from nodeagent import processes
from nodeagent.keeper import boot_id
from schemas.card import ProcessRef

LOG = logging.getLogger(__name__)

LOOK_S = 1.0
"""How often a process is looked for where the kernel gives no handle on it."""


class Watching:
    """The processes that leases, claims and waiters share their lives with. One event loop."""

    def __init__(self, on_ended: Callable[[], None]) -> None:
        """`on_ended` is called after a process was found to be gone."""
        self._on_ended = on_ended
        self._handles: dict[ProcessRef, int] = {}
        self._looks: dict[ProcessRef, asyncio.TimerHandle] = {}
        self._ended: set[ProcessRef] = set()

    @property
    def ended(self) -> AbstractSet[ProcessRef]:
        """Those of the watched that are gone."""
        return self._ended

    def only(self, wanted: AbstractSet[ProcessRef]) -> None:
        """From now on watches exactly these. One that is gone already is told at once, by `ended` alone."""
        for ref in (self._handles.keys() | self._looks.keys()) - wanted:
            self._let_go(ref)
        self._ended &= wanted
        for ref in wanted - self._handles.keys() - self._looks.keys() - self._ended:
            self._begin(ref)

    def close(self) -> None:
        """Watches nothing any more."""
        self.only(frozenset())

    def signal(self, ref: ProcessRef, number: signal.Signals) -> None:
        """Signals that very process, if it is still there."""
        if not is_there(ref):
            return
        handle = self._handles.get(ref)
        try:
            if handle is not None:
                signal.pidfd_send_signal(handle, number)
            else:
                os.kill(ref.pid, number)
        except (ProcessLookupError, PermissionError) as error:
            LOG.warning("not signalled", extra={"pid": ref.pid, "problem": str(error)})

    def _begin(self, ref: ProcessRef) -> None:
        try:
            handle = os.pidfd_open(ref.pid)
        except ProcessLookupError:
            self._ended.add(ref)
            return
        except OSError:  # no such call here, or no descriptors left
            self._look(ref)
            return
        if not is_there(ref):  # the number is another's by now
            os.close(handle)
            self._ended.add(ref)
            return
        self._handles[ref] = handle
        asyncio.get_running_loop().add_reader(handle, self._over, ref)

    def _look(self, ref: ProcessRef) -> None:
        self._looks.pop(ref, None)
        if not is_there(ref):
            self._ended.add(ref)
            self._on_ended()
            return
        self._looks[ref] = asyncio.get_running_loop().call_later(LOOK_S, self._look, ref)

    def _over(self, ref: ProcessRef) -> None:
        self._let_go(ref)
        self._ended.add(ref)
        self._on_ended()

    def _let_go(self, ref: ProcessRef) -> None:
        handle = self._handles.pop(ref, None)
        if handle is not None:
            asyncio.get_running_loop().remove_reader(handle)
            os.close(handle)
        look = self._looks.pop(ref, None)
        if look is not None:
            look.cancel()


def is_there(ref: ProcessRef) -> bool:
    """Whether this very process lives: same number, same start, same boot. A zombie does not."""
    return ref.boot == boot_id() and processes.is_same(ref.pid, ref.started)
