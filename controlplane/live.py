"""Keeps what beacons say, in arrival times on this process's own clock, and shows it as ages.

It judges nobody: who is unreachable or in use is decided in domain/ from the ages. It stores nothing.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import datetime

from controlplane.domain.decision import AgentLive, GatewayLive, Live, ReplicaLive
from schemas.api import GatewayView
from schemas.beacons import AgentBeacon, EngineCounters, GatewayBeacon

FORGET_AFTER_S = 86_400.0
"""A sender silent for this long is forgotten: longer than any use of its last words."""

BEACONS_TRUSTED = 3
"""So many beacons of an agent in a row must have been heard before its models' idleness counts."""

AGES_HOLD_S = 0.05
"""So long the ages of agents not heard meanwhile are shown as they were: a leader asks once for each decision,
and a thousand senders are a thousand ages."""

_STEP_S = 1.0
"""A wall clock that differs from this process's own clock by so much more than it did was set."""


@dataclass(slots=True)
class _Gateway:
    beacon: GatewayBeacon
    heard_at: float
    last_use_at: dict[str, float] = field(default_factory=dict)
    ages_s: dict[str, float] | None = None
    """Made of `last_use_at` when it is first asked for, as are the times on the wall clock."""
    at_s: dict[str, float] | None = None


@dataclass(slots=True)
class _Counters:
    counters: EngineCounters
    changed_at: float | None


@dataclass(slots=True)
class _Agent:
    beacon: AgentBeacon
    heard_at: float
    heard: int
    row_since: float
    trusted_since: float | None = None
    replicas: dict[str, _Counters] = field(default_factory=dict)


class LiveTracker:
    """The beacons of all gateways and agents; times are `monotonic()` seconds.

    `row_gap_s`: a longer silence of an agent ends its row of beacons heard one after another.
    """

    def __init__(
        self,
        monotonic: Callable[[], float],
        *,
        row_gap_s: float,
        now: Callable[[], datetime] | None = None,
    ) -> None:
        """`now` is the wall clock; without it uses are told as ages alone."""
        self._monotonic = monotonic
        self._wall = now
        self._ahead_s: float | None = None
        self._shown: Live | None = None
        self._shown_at = 0.0
        self._leading_since = 0.0
        self._shown_agents: dict[str, AgentLive] = {}
        self._is_new_gateway = False
        self._heard: set[str] = set()
        """Agents heard since they were shown."""
        self._row_gap_s = row_gap_s
        self._gateways: dict[str, _Gateway] = {}
        self._agents: dict[str, _Agent] = {}
        self.misnamed = 0
        """Beacons whose body named another sender than their subject; they are ignored."""

    def on_gateway(self, name: str, beacon: GatewayBeacon) -> bool:
        """Takes one beacon; True when it says something that a decision may depend on.

        A beacon that only repeats the last one, with ages grown, is not worth a wake-up.
        """
        if beacon.gateway != name:
            self.misnamed += 1
            return False
        now = self._monotonic()
        known = self._gateways.get(name)
        if known is not None and known.beacon.incarnation == beacon.incarnation:
            if beacon.n <= known.beacon.n:
                return False  # delivered out of order
            changed = (
                known.beacon.inflight != beacon.inflight
                or known.beacon.waiting != beacon.waiting
                or known.beacon.leaving != beacon.leaving
            )
        else:
            changed = True
        # The uses an earlier incarnation reported stay uses: a gateway that was killed must not make
        # a model look idle since the gateway's own restart.
        last_use_at: dict[str, float] = {}
        if known is not None:
            last_use_at = dict(known.last_use_at)
            for model in known.beacon.waiting:
                last_use_at[model] = max(last_use_at.get(model, known.heard_at), known.heard_at)
        for model, age_s in beacon.last_use_age_s.items():
            at = now - age_s if age_s > 0 else now
            before = last_use_at.get(model)
            if before is None or at > before:
                # Ages arrive rounded and late by milliseconds; a quarter of a second is a new use.
                changed = changed or before is None or at > before + 0.25
                last_use_at[model] = at
        self._gateways[name] = _Gateway(beacon=beacon, heard_at=now, last_use_at=last_use_at)
        self._is_new_gateway = True
        return changed

    def on_agent(self, name: str, beacon: AgentBeacon) -> bool:
        """Takes one beacon. Always worth a wake-up: the row of beacons heard has grown."""
        if beacon.node != name:
            self.misnamed += 1
            return False
        now = self._monotonic()
        known = self._agents.get(name)
        if known is not None and beacon.epoch < known.beacon.epoch:
            return False  # an agent that was replaced and does not know it yet
        heard, row_since, trusted_since = 1, now, None
        replicas: dict[str, _Counters] = {}
        if known is not None:
            if known.heard > 0 and now - known.heard_at <= self._row_gap_s:
                heard, row_since = known.heard + 1, known.row_since
                trusted_since = now if heard == BEACONS_TRUSTED else known.trusted_since
            replicas = known.replicas
        self._heard.add(name)
        self._agents[name] = _Agent(
            beacon=beacon,
            heard_at=now,
            heard=heard,
            row_since=row_since,
            trusted_since=trusted_since,
            replicas={
                replica: _follow_counters(replicas.get(replica), counters, now)
                for replica, counters in beacon.replicas.items()
            },
        )
        return True

    def gateways(self) -> tuple[GatewayView, ...]:
        """Those that were heard and did not say goodbye, by name."""
        now = self._monotonic()
        return tuple(
            GatewayView(
                name=name,
                position=gateway.beacon.position,
                silent_s=round(max(0.0, now - gateway.heard_at), 1),
            )
            for name, gateway in sorted(self._gateways.items())
            if not gateway.beacon.leaving and now - gateway.heard_at <= FORGET_AFTER_S
        )

    def reset(self) -> None:
        """The connection was lost: nobody counts as heard in a row any more.

        Last words are kept, because a silent gateway counts as using what it last reported.
        """
        now = self._monotonic()
        for agent in self._agents.values():
            agent.heard = 0
            agent.row_since = now
            agent.trusted_since = None
        self._shown = None

    def view(self, *, leading_since: float) -> Live:
        """Everything as ages, sorted by name so that decisions do not depend on arrival.

        It is the same object as before while that is true of it (AGES_HOLD_S).
        """
        now = self._monotonic()
        is_new_term = leading_since != self._leading_since
        shown, heard = self._shown, self._shown_agents
        if shown is None or not 0 <= now - self._shown_at < AGES_HOLD_S:
            self._forget(now)
            heard.clear()
            heard.update(
                (name, _agent_live(self._agents[name], now)) for name in sorted(self._agents)
            )
            self._shown_at = now
        elif self._heard <= heard.keys():
            heard.update((name, _agent_live(self._agents[name], now)) for name in self._heard)
            if not (self._heard or self._is_new_gateway or is_new_term):
                return shown
        else:
            self._shown = None
            return self.view(leading_since=leading_since)
        ahead_s = self._wall_ahead_s(now)
        self._shown = Live(
            leading_for_s=max(0.0, now - leading_since),
            gateways=tuple(
                _gateway_live(self._gateways[name], now, ahead_s) for name in sorted(self._gateways)
            ),
            agents=tuple(heard.values()),
        )
        self._leading_since = leading_since
        self._is_new_gateway = False
        self._heard.clear()
        return self._shown

    def _wall_ahead_s(self, now: float) -> float | None:
        """By how much the wall clock is ahead of this process's own; the same number until it was set."""
        if self._wall is None:
            return None
        ahead_s = self._wall().timestamp() - now
        if self._ahead_s is None or abs(ahead_s - self._ahead_s) > _STEP_S:
            self._ahead_s = ahead_s
            for gateway in self._gateways.values():
                gateway.at_s = None
        return self._ahead_s

    def _forget(self, now: float) -> None:
        for table in (self._gateways, self._agents):
            gone = [n for n, sender in table.items() if now - sender.heard_at > FORGET_AFTER_S]
            for name in gone:
                del table[name]


def _follow_counters(known: _Counters | None, counters: EngineCounters, now: float) -> _Counters:
    """`changed_at` is the last moment the engine showed use; unknown until it has been seen once."""
    if counters.inflight:
        return _Counters(counters=counters, changed_at=now)
    if known is None:
        return _Counters(counters=counters, changed_at=None)
    if known.counters.requests_total != counters.requests_total or known.counters.inflight:
        return _Counters(counters=counters, changed_at=now)
    return _Counters(counters=counters, changed_at=known.changed_at)


def _gateway_live(gateway: _Gateway, now: float, ahead_s: float | None) -> GatewayLive:
    beacon = gateway.beacon
    age_s = now - gateway.heard_at
    uses = gateway.last_use_at
    if gateway.ages_s is None:
        gateway.ages_s = {model: gateway.heard_at - at for model, at in uses.items()}
    if gateway.at_s is None and ahead_s is not None:
        gateway.at_s = {model: at + ahead_s for model, at in uses.items()}
    return GatewayLive(
        gateway=beacon.gateway,
        incarnation=beacon.incarnation,
        age_s=age_s,
        position=beacon.position,
        inflight=beacon.inflight,
        waiting=beacon.waiting,
        # The domain adds the age of the beacon to what the beacon said.
        last_use_age_s=gateway.ages_s,
        last_use_at_s=gateway.at_s,
        leaving=beacon.leaving,
    )


def _agent_live(agent: _Agent, now: float) -> AgentLive:
    return AgentLive(
        node=agent.beacon.node,
        epoch=agent.beacon.epoch,
        age_s=now - agent.heard_at,
        heard=agent.heard,
        heard_for_s=now - agent.row_since if agent.heard else 0.0,
        trusted_for_s=None if agent.trusted_since is None else now - agent.trusted_since,
        replicas={
            replica: ReplicaLive(
                counters=seen.counters,
                changed_age_s=None if seen.changed_at is None else now - seen.changed_at,
            )
            for replica, seen in agent.replicas.items()
        },
        leaving=agent.beacon.leaving,
    )
