"""Beacons on core NATS: heard or missed, never stored; they tell who is alive and what is in use."""

from msgspec import Struct


class Pin(Struct, frozen=True, array_like=True):
    """What a gateway does with an adapter in a replica: requests running now, and seconds since its last use."""

    uses: int
    idle_s: float = 0.0


class GatewayBeacon(Struct, frozen=True, kw_only=True):
    """Every second, and at once on 0->1, 1->0 and a drain.

    `n` counts up within `incarnation`. `position` is the last event sequence this gateway applied.
    `inflight` counts requests by replica, `waiting` by model; `last_use_age_s` is by model, seconds
    since the last byte of its last request here (absent: never used since this gateway started).
    """

    gateway: str
    incarnation: str
    n: int
    position: int
    inflight: dict[str, int] = {}
    waiting: dict[str, int] = {}
    last_use_age_s: dict[str, float] = {}
    leaving: bool = False
    pins: dict[str, dict[str, Pin]] = {}
    """By replica and `schemas.adapternames.pin_name`: adapters this gateway counts on. What a beacon does not list
    any more is given back."""


class KeyUse(Struct, frozen=True, array_like=True):
    """What a key used at one gateway: requests admitted and tokens charged since that gateway's incarnation began
    (both only grow), and requests running or waiting now. `held` are the tokens reserved for those. For who hears of
    the key here for the first time: `recent_…` is what of the sums is of the last 60 s, `gone_…` what gateways that
    have ended since used in that time."""

    requests: int
    tokens: int
    running: int
    held: int = 0
    recent_requests: int = 0
    recent_tokens: int = 0
    gone_requests: int = 0
    gone_tokens: int = 0


class LimitsBeacon(Struct, frozen=True, kw_only=True):
    """Every second between gateways, and at once when much of a share is used: what limits are shared by.

    `keys` lists those used in the last 60 s, by id. `inflight` counts requests by replica. `heard` is the last
    number heard of each other incarnation: what it told by then is counted here too. `asks`: others shall tell theirs
    at once, because somebody waits for it.
    """

    gateway: str
    incarnation: str
    n: int
    keys: dict[str, KeyUse] = {}
    inflight: dict[str, int] = {}
    leaving: bool = False
    heard: dict[str, int] = {}
    asks: bool = False


class EngineCounters(Struct, frozen=True, kw_only=True):
    """What the engine itself says: requests processing + deferred now, and in total since it started.

    None where the engine does not tell.
    """

    inflight: int | None = None
    requests_total: int | None = None


class AgentBeacon(Struct, frozen=True, kw_only=True):
    """Every 5 s, and at once with a recall. `heard` is the last beacon number of each gateway; `position` the last plan event applied."""

    node: str
    epoch: int
    position: int
    replicas: dict[str, EngineCounters] = {}
    heard: dict[str, int] = {}
    leaving: bool = False
    heard_from: dict[str, str] = {}
    """The incarnation of each gateway whose number `heard` tells."""
    recall: dict[str, tuple[str, ...]] = {}
    """By replica: pins asked back. A gateway that does not use one gives it up with its next beacon, at once."""


class LeaderBeacon(Struct, frozen=True, kw_only=True):
    """Every second, by the leading control plane."""

    instance: str
    term: int
    position: int
    leaving: bool = False


class MirrorBeacon(Struct, frozen=True, kw_only=True):
    """Every 2 s, by every control plane: where its mirror's files are read (`url`, without a path).

    `free_bytes` is what may still be written there.
    """

    mirror: str
    url: str
    free_bytes: int = 0
    leaving: bool = False


class LogsRequest(Struct, frozen=True, kw_only=True):
    """Asks a node's agent for a replica's engine log from byte `offset`, or the last `tail_bytes`.

    With `wait_s` the answer is held until there is more, at most that long.
    """

    replica: str
    offset: int | None = None
    tail_bytes: int = 65536
    wait_s: float = 0.0


class LogsReply(Struct, frozen=True, kw_only=True):
    """`ended`: the process is gone and everything was read. `problem`: why there is nothing."""

    text: str = ""
    next_offset: int = 0
    ended: bool = False
    problem: str | None = None
