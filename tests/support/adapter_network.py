"""What is on its way between gateways, an agent and engines in a test of adapters, and what each of them has."""

from collections import deque
from dataclasses import dataclass, field

from gateway.domain.pins import Held, Pins
from nodeagent.domain.slots import Place
from schemas.beacons import GatewayBeacon


@dataclass(slots=True)
class Ask:
    gateway: str
    incarnation: str
    n: int
    replica: str
    adapter: str
    asked_s: float
    held: Held
    gone: str = ""


@dataclass(slots=True)
class Beacon:
    body: GatewayBeacon


@dataclass(slots=True)
class Recall:
    """What an agent's beacon says to one gateway."""

    n: int
    incarnation: str
    recall: dict[str, tuple[str, ...]]


@dataclass(slots=True)
class Granted:
    ask: Ask
    engine_name: str
    """Empty: ask again, or no."""


@dataclass(slots=True)
class Stream:
    """One request at an engine, under a pin."""

    held: Held
    replica: str
    engine_name: str


@dataclass(slots=True)
class OneGateway:
    name: str
    incarnation: int = 1
    n: int = 0
    pins: Pins = field(default_factory=Pins)
    streams: list[Stream] = field(default_factory=list)
    asking: list[Ask] = field(default_factory=list)
    outgoing: deque[Ask | Beacon] = field(default_factory=deque)
    incoming: deque[Recall | Granted] = field(default_factory=deque)


@dataclass(slots=True)
class OneEngine:
    """What one engine has, and what it is being asked. A call that began comes to its end some time."""

    loaded: set[str] = field(default_factory=set)
    loading: list[tuple[int, str, Place]] = field(default_factory=list)
    unloading: list[tuple[int, str, Place, bool]] = field(default_factory=list)
    late: dict[str, float] = field(default_factory=dict)
    """Loads that nobody waits for any more, by engine-side name, with the time by which each is over."""
    lists: list[tuple[int, float, frozenset[str]]] = field(default_factory=list)
    """What was asked for when, and is not answered yet."""
    restarts: int = 0
    tells: bool = True
