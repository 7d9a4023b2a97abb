"""Says which gateways count on which adapters: from their asks and beacons, until they give them up or fall silent.

A pin that stands keeps its adapter loaded, used or not; nothing here unloads. Times are seconds of the agent's
own monotonic clock, handed in: what a gateway's clock says is never compared with it.

What ends a pin, in one place:

1. a beacon of its gateway, numbered above the last ask's, that does not list it: it was given up.
2. `keep_s` without a beacon that lists it and without an ask. The gateway trusts it for less long than that.
3. its gateway is gone for an hour. Until then a request may run under it (`silent`), also when the last beacon
   told of none: it may have begun just before the gateway stopped trusting the pin.
4. its gateway is heard under a new incarnation, and 2: the process that had it is gone.
"""

from collections.abc import Iterator, Mapping
from typing import Final

from msgspec import Struct
from msgspec.structs import replace

from schemas.beacons import GatewayBeacon

FORGET_S: Final = 3600.0
"""So long after its last word a gateway that fell silent may still have requests running."""


class Pin(Struct, frozen=True, kw_only=True):
    """One gateway's pin on one adapter in one replica.

    `uses` are requests running under it by the last beacon, `used_at` its last use by what was told, `until`
    when it runs out unless it is told of again. `n` is the number above which a beacon speaks of it; `listed`
    tells that one did.
    """

    uses: int
    used_at: float
    until: float
    n: int
    listed: bool = False


PinsOf = Mapping[str, Mapping[str, Pin]]
"""By replica and pin name."""


class Gateway(Struct, frozen=True, kw_only=True):
    """One process of a gateway: its last beacon's number, when anything was heard of it, and its pins."""

    name: str
    incarnation: str
    n: int
    heard_at: float
    pins: PinsOf


class Pins(Struct, frozen=True, kw_only=True):
    """Every pin that any gateway has, by gateway and incarnation."""

    gateways: Mapping[tuple[str, str], Gateway] = {}


class Use(Struct, frozen=True, kw_only=True):
    """What is known of the use of one adapter in one replica.

    `gateways` have a pin that stands, `uses` requests run under those. `silent` requests may run under pins that
    ran out because nothing was heard of their gateway: only the engine knows whether they do. `used_at` is the last use.
    """

    gateways: tuple[str, ...] = ()
    uses: int = 0
    silent: int = 0
    used_at: float = float("-inf")


UNUSED: Final = Use()


def heard(pins: Pins, beacon: GatewayBeacon, at: float, keep_s: float) -> Pins:
    """What is known after a beacon. One that is older than the last says nothing any more."""
    who = (beacon.gateway, beacon.incarnation)
    before = pins.gateways.get(who)
    if before is not None and beacon.n <= before.n:
        return pins
    kept: PinsOf = before.pins if before is not None else {}
    told: dict[str, dict[str, Pin]] = {}
    for replica, listed in beacon.pins.items():
        for name, pin in listed.items():
            earlier = kept.get(replica, {}).get(name)
            used_at = at if pin.uses else at - max(pin.idle_s, 0.0)
            told.setdefault(replica, {})[name] = Pin(
                uses=max(pin.uses, 0),
                used_at=used_at if earlier is None else max(used_at, earlier.used_at),
                until=at + keep_s,
                n=earlier.n if earlier is not None else beacon.n,
                listed=True,
            )
    for replica, name, pin in _each(kept):
        # An ask sent behind this beacon: the next one speaks of it.
        if name not in told.get(replica, {}) and beacon.n <= pin.n:
            told.setdefault(replica, {})[name] = pin
    after = Gateway(name=who[0], incarnation=who[1], n=beacon.n, heard_at=at, pins=told)
    return Pins(gateways={**pins.gateways, who: after})


def asked(
    pins: Pins,
    gateway: str,
    incarnation: str,
    *,
    replica: str,
    name: str,
    n: int,
    at: float,
    keep_s: float,
) -> Pins:
    """A gateway asks for an adapter: pinned for it from here on, before anything is decided about the ask."""
    who = (gateway, incarnation)
    known = pins.gateways.get(who)
    if known is None:
        known = Gateway(name=gateway, incarnation=incarnation, n=0, heard_at=at, pins={})
    earlier = known.pins.get(replica, {}).get(name)
    pin = Pin(
        uses=earlier.uses if earlier is not None else 0,
        used_at=at,
        until=at + keep_s,
        n=max(n, earlier.n) if earlier is not None else n,
        listed=earlier is not None and earlier.listed,
    )
    of_replica = {**known.pins.get(replica, {}), name: pin}
    after = replace(known, heard_at=at, pins={**known.pins, replica: of_replica})
    return Pins(gateways={**pins.gateways, who: after})


def denied(pins: Pins, gateway: str, incarnation: str, *, replica: str, name: str, n: int) -> Pins:
    """The ask numbered `n` was answered with no: what it alone pinned is not pinned."""
    who = (gateway, incarnation)
    known = pins.gateways.get(who)
    pin = known.pins.get(replica, {}).get(name) if known is not None else None
    if known is None or pin is None or pin.listed or pin.n != n:
        return pins
    of_replica = {other: p for other, p in known.pins[replica].items() if other != name}
    after = replace(known, pins={**known.pins, replica: of_replica})
    return Pins(gateways={**pins.gateways, who: after})


def given_up(before: Pins, after: Pins) -> dict[str, dict[str, float]]:
    """By replica and name, the last use of what was pinned before and is not after, as far as it was told."""
    found: dict[str, dict[str, float]] = {}
    for who, gateway in before.gateways.items():
        later = after.gateways.get(who)
        if later is gateway:
            continue
        for replica, name, pin in _each(gateway.pins):
            if later is None or name not in later.pins.get(replica, {}):
                of_replica = found.setdefault(replica, {})
                of_replica[name] = max(of_replica.get(name, pin.used_at), pin.used_at)
    return found


def without_replica(pins: Pins, replica: str) -> Pins:
    """The launch is over."""
    if not any(replica in gateway.pins for gateway in pins.gateways.values()):
        return pins
    return Pins(
        gateways={
            who: replace(gateway, pins={r: p for r, p in gateway.pins.items() if r != replica})
            for who, gateway in pins.gateways.items()
        }
    )


def settled(pins: Pins, at: float) -> Pins:
    """Without what ended by time alone."""
    newest = _newest(pins)
    kept: dict[tuple[str, str], Gateway] = {}
    for who, gateway in pins.gateways.items():
        if at - gateway.heard_at > FORGET_S:
            continue
        replaced = newest[gateway.name] != gateway.incarnation
        standing: dict[str, dict[str, Pin]] = {}
        for replica, name, pin in _each(gateway.pins):
            if at < pin.until or not replaced:
                standing.setdefault(replica, {})[name] = pin
        if standing or not replaced:
            kept[who] = replace(gateway, pins=standing)
    return Pins(gateways=kept)


def uses_in(pins: Pins, replica: str, at: float) -> dict[str, Use]:
    """By pin name, what is known of the adapters of one replica; nothing of those nobody counts on."""
    newest = _newest(pins)
    found: dict[str, Use] = {}
    for gateway in sorted(pins.gateways.values(), key=lambda g: (g.name, g.incarnation)):
        if at - gateway.heard_at > FORGET_S:
            continue
        for name, pin in gateway.pins.get(replica, {}).items():
            before = found.get(name, UNUSED)
            used_at = max(before.used_at, pin.used_at)
            if at < pin.until:
                names = before.gateways
                found[name] = replace(
                    before,
                    gateways=names if gateway.name in names else (*names, gateway.name),
                    uses=before.uses + pin.uses,
                    used_at=used_at,
                )
            elif newest[gateway.name] == gateway.incarnation:
                silent = before.silent + max(pin.uses, 1)
                found[name] = replace(before, silent=silent, used_at=used_at)
    return found


def _newest(pins: Pins) -> dict[str, str]:
    """The incarnation of each gateway that was heard last."""
    newest: dict[str, Gateway] = {}
    for gateway in pins.gateways.values():
        other = newest.get(gateway.name)
        if other is None or (gateway.heard_at, gateway.incarnation) > (
            other.heard_at,
            other.incarnation,
        ):
            newest[gateway.name] = gateway
    return {name: gateway.incarnation for name, gateway in newest.items()}


def _each(pins: PinsOf) -> Iterator[tuple[str, str, Pin]]:
    for replica, of_replica in pins.items():
        for name, pin in of_replica.items():
            yield replica, name, pin
