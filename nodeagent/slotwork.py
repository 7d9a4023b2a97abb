"""Asks one engine about adapters, each call within a bound of its own, and says which of those it lists are ours.

It decides nothing and remembers nothing. A driver that raises or hangs is a bug of it: that is an answer like
any other here, because whoever waits for an adapter must be told something.
"""

import asyncio
import logging
import os
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol, TypeVar, cast

from msgspec import Struct

from nodeagent.domain.adapterfiles import set_of
from nodeagent.domain.badloads import Fault
from nodeagent.domain.listing import Seen
from nodeagent.drivers.driver import (
    AdapterDone,
    AdapterDriver,
    AdapterFault,
    Driver,
    ListedAdapter,
)
from schemas import codes
from schemas.adapter import Adapter
from schemas.adapternames import of_engine_name, pin_name

LOG = logging.getLogger(__name__)

T = TypeVar("T")

SLACK_S = 2.0
"""A driver keeps its bound itself; so much later it is not waited for any more."""


class SlotTimes(Struct, frozen=True, kw_only=True):
    """Bounds of the calls and intervals, in seconds; tests make them short.

    Each call has its own bound: a slow unload takes nothing from the load after it. `audit_s` is between two
    reads of an engine's list, `again_s` after one that failed or did not tell what became of every call, `rest_s` until
    one that runs is tried again.
    What follows a load, telling of it and looking for who leaves, takes longer than an answer: it waits
    `answered_s`, so that whoever asked has been answered by then.
    """

    load_s: float = 120.0
    unload_s: float = 30.0
    list_s: float = 5.0
    ask_s: float = 2.0
    audit_s: float = 300.0
    again_s: float = 30.0
    rest_s: float = 5.0
    catalog_s: float = 2.0
    answered_s: float = 0.002


class AdapterSource(Protocol):
    """What is needed of `nodeagent.adapterfiles.AdapterFiles`."""

    root: Path
    on_change: Callable[[frozenset[str]], None]

    @property
    def synced(self) -> bool: ...

    def adapter(self, name: str) -> Adapter | None: ...

    def folder(self, adapter: Adapter) -> Path: ...

    async def obtain(self, adapter: Adapter) -> Path: ...

    def keep(self, replica: str, sets: frozenset[str]) -> None: ...

    def give_back(self, replica: str) -> None: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineSide:
    """One engine's side of its adapters."""

    driver: AdapterDriver
    endpoint: str
    key: str
    times: SlotTimes

    async def load(self, name: str, path: Path) -> AdapterDone | Fault:
        bound_s = self.times.load_s
        asked = self.driver.load_adapter(
            self.endpoint, self.key, name=name, path=str(path), timeout_s=bound_s
        )
        answer = await self._within(asked, bound_s, "load")
        return fault_of(answer) if isinstance(answer, AdapterFault) else answer

    async def unload(self, name: str) -> AdapterDone | Fault:
        bound_s = self.times.unload_s
        asked = self.driver.unload_adapter(self.endpoint, self.key, name=name, timeout_s=bound_s)
        answer = await self._within(asked, bound_s, "unload")
        return fault_of(answer) if isinstance(answer, AdapterFault) else answer

    async def list(self) -> tuple[ListedAdapter, ...] | Fault:
        asked = self.driver.list_adapters(self.endpoint, self.key)
        answer = await self._within(asked, self.times.list_s, "list")
        return fault_of(answer) if isinstance(answer, AdapterFault) else answer

    async def running(self) -> frozenset[str] | None:
        """Engine-side names requests run on; None where it does not tell."""
        asked = self.driver.running_adapters(self.endpoint, self.key)
        answer = await self._within(asked, self.times.ask_s, "list")
        return None if isinstance(answer, AdapterFault) else answer

    async def has_routes(self) -> bool | None:
        asked = self.driver.loads_adapters(self.endpoint, self.key)
        answer = await self._within(asked, self.times.ask_s, "list")
        return None if isinstance(answer, AdapterFault) else answer

    async def _within(self, asked: Awaitable[T], bound_s: float, what: str) -> T | AdapterFault:
        late = codes.LOAD_TIMEOUT if what == "load" else codes.LOAD_FAILED
        try:
            async with asyncio.timeout(bound_s + SLACK_S):
                return await asked
        except TimeoutError:
            text = f"no answer to the {what} within {bound_s:g} s"
            return AdapterFault(whose="replica", code=late, text=text)
        except Exception as error:
            LOG.exception("a driver failed", extra={"call": what, "endpoint": self.endpoint})
            text = f"this node's driver failed: {type(error).__name__}"
            return AdapterFault(whose="replica", code=codes.LOAD_FAILED, text=text)


def engine_side(
    driver: Driver | None, endpoint: str | None, key: str, times: SlotTimes
) -> EngineSide | None:
    """The adapters' side of an engine; None when it has none."""
    if driver is None or endpoint is None or not driver.capabilities.adapters:
        return None
    return EngineSide(driver=cast(AdapterDriver, driver), endpoint=endpoint, key=key, times=times)


def fault_of(fault: AdapterFault) -> Fault:
    """What the policy is told of an engine's no."""
    return Fault(
        whose=fault.whose,
        code=fault.code,
        text=fault.text,
        known=fault.known,
        late=fault.code == codes.LOAD_TIMEOUT,
    )


def seen_in(listing: tuple[ListedAdapter, ...], files: AdapterSource) -> tuple[Seen, ...]:
    """What each listed adapter is to us, by its name and by the folder it was loaded from."""
    return tuple(_seen(one, files) for one in listing)


def seen_as(
    engine_name: str, listing: tuple[ListedAdapter, ...], files: AdapterSource
) -> Seen | None:
    """What is listed under one name, without looking at the others' folders; None: nothing is."""
    return next((_seen(one, files) for one in listing if one.name == engine_name), None)


def _seen(one: ListedAdapter, files: AdapterSource) -> Seen:
    ours = of_engine_name(one.name)
    if ours is None:
        return Seen(engine_name=one.name)
    name, version = ours
    known = files.adapter(name)
    if known is not None and pin_name(name, known.version) == pin_name(name, version):
        version = known.version
        # Of hundreds that are listed all but a few are told as they were given: no look at the disk for those.
        is_right = (
            not one.root
            or one.root == f"{files.root}/{set_of(known)}"
            or is_same(one.root, files.folder(known))
        )
        return Seen(
            engine_name=one.name,
            adapter=name,
            version=version,
            root="right" if is_right else "wrong",
        )
    # An older version, or the catalog was not read yet: all that can be told is whether it is one of our folders.
    is_below = not one.root or is_same(os.path.dirname(one.root), files.root)
    return Seen(
        engine_name=one.name,
        adapter=name,
        version=version,
        root="unknown" if is_below else "wrong",
    )


def is_same(root: str, wanted: Path) -> bool:
    """Whether an engine's path is this one; it may have resolved links on the way."""
    told = os.path.normpath(root)
    try:
        return told == str(wanted) or os.path.realpath(told) == os.path.realpath(wanted)
    except ValueError:  # no file can be called that
        return False
