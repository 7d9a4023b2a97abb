"""Counts the gateways that have read the log up to an event, from the beacons they send.

It asks nobody: a gateway tells its position every second. One that hangs or cannot reach NATS is not heard; that
there is one only a control plane that heard it before can tell, and it is waited for until it counts as gone.
"""

import asyncio
from collections.abc import Mapping
from typing import Final

from msgspec import Struct

from events.log import Wire
from schemas.beacons import GatewayBeacon

LISTEN_S: Final = 2.5
"""Long enough for two beacons of every gateway: after that who was not heard is not there."""
PATIENCE_S: Final = 10.0
"""How long those that are behind are waited for."""


GONE_S: Final = 10.0
"""Who was not heard for so long counts as gone, as for agents (`nodeagent.gateway_gone`)."""
STILL_S: Final = 3600.0
"""So long one that fell silent without a goodbye may still be there, as for agents that park (docs/architecture.md)."""


class Silent(Struct, frozen=True, kw_only=True):
    """A gateway that was heard before and is not now."""

    name: str
    silent_s: float

    @property
    def gone_in_s(self) -> float:
        """Until it counts as gone; not above 0 when it does."""
        return GONE_S - self.silent_s


class Reached(Struct, frozen=True, kw_only=True):
    """Names of gateways, sorted: who has read the event, who is heard and has not yet, who is not heard any more."""

    known_to: tuple[str, ...] = ()
    behind: tuple[str, ...] = ()
    silent: tuple[Silent, ...] = ()


class GatewaysHeard:
    """Listens while it is entered. The last beacon of each name counts; one that leaves counts no more."""

    def __init__(
        self, wire: Wire, *, listen_s: float = LISTEN_S, patience_s: float = PATIENCE_S
    ) -> None:
        self._wire = wire
        self._listen_s = listen_s
        self._patience_s = patience_s
        self._positions: dict[str, int] = {}
        self._left: set[str] = set()
        self._news = asyncio.Event()
        self._opened_at = 0.0

    async def __aenter__(self) -> "GatewaysHeard":
        self._subscription = await self._wire.on_beacon("gateway", GatewayBeacon, self._hear)
        self._opened_at = asyncio.get_running_loop().time()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._subscription.close()

    def _hear(self, name: str, beacon: GatewayBeacon) -> None:
        if beacon.leaving:
            self._positions.pop(name, None)
            self._left.add(name)
        else:
            self._positions[name] = beacon.position
            self._left.discard(name)
        self._news.set()

    async def reached(self, seq: int, known: Mapping[str, float] | None = None) -> Reached:
        """Returns once everyone heard has read event `seq`, at the latest after the patience.

        `known` are gateways a control plane has heard, with the seconds since then: those of them that are not heard
        here either are waited for until they count as gone.
        """
        loop = asyncio.get_running_loop()
        asked_at = loop.time()
        last_at = {
            name: asked_at - silent_s
            for name, silent_s in (known or {}).items()
            if silent_s < STILL_S
        }
        heard_at = self._opened_at + self._listen_s
        until = max(loop.time(), heard_at) + self._patience_s
        while True:
            behind = tuple(sorted(name for name, at in self._positions.items() if at < seq))
            now = loop.time()
            missing = sorted(last_at.keys() - self._positions.keys() - self._left)
            gone_at = max((last_at[name] + GONE_S for name in missing), default=now)
            if (now >= heard_at and not behind and now >= gone_at) or now >= until:
                return Reached(
                    known_to=tuple(sorted(self._positions.keys() - set(behind))),
                    behind=behind,
                    silent=tuple(
                        Silent(name=name, silent_s=round(now - last_at[name], 1))
                        for name in missing
                    ),
                )
            self._news.clear()
            look_at = min(until, max(heard_at, gone_at)) if not behind else until
            try:
                async with asyncio.timeout_at(look_at if now >= heard_at else heard_at):
                    await self._news.wait()
            except TimeoutError:
                continue
