"""Judges one drain: whether the replica may be stopped now, must be waited for, or is taken back.

Silence is never idleness: without a connection, or before the gateways had time to speak, nothing is
stopped. It reads no clock; ages come from the caller's monotonic clock. It never stops anything itself.
"""

from typing import Final, Literal

from msgspec import Struct

from schemas.beacons import EngineCounters
from schemas.plan import Stop, StopReason

OWN: Final[frozenset[StopReason]] = frozenset({"lease", "claim", "vm", "ram"})
"""Reasons of an agent's own stops: somebody at this node was promised a card."""


class GatewayHeard(Struct, frozen=True, kw_only=True):
    """A gateway's last beacon as far as one replica is concerned; `age_s` since it was heard."""

    name: str
    age_s: float
    position: int
    inflight: int
    waiting: int = 0
    leaving: bool = False


class DrainFacts(Struct, frozen=True, kw_only=True):
    """What is known when a drain is judged.

    `sequence` is where `replica.draining` stands in the log, None while it is not stored. `age_s` counts
    from the decision to drain, `connected_s` from the last (re)connection, None while there is none.
    `engine` are counters read for this very judgement, None when nobody asked yet.
    """

    stop: Stop
    sequence: int | None
    age_s: float
    connected_s: float | None
    gateways: tuple[GatewayHeard, ...]
    gateway_gone_s: float
    listen_s: float
    engine: EngineCounters | None = None


def unheard(gateways: tuple[GatewayHeard, ...], gone_s: float) -> tuple[str, ...]:
    """Gateways that fell silent without a goodbye, by name: dead, or cut off and still sending what they get."""
    return tuple(g.name for g in gateways if g.age_s > gone_s and not g.leaving)


class KeepWaiting(Struct, frozen=True, kw_only=True, tag=True):
    """Not yet; `reason` is for the log."""

    reason: str


class AskEngine(Struct, frozen=True, kw_only=True, tag=True):
    """All gateways are done with it: read the engine's own counters and judge again."""


class StopNow(Struct, frozen=True, kw_only=True, tag=True):
    """`running` requests are cut (0 when it is drained)."""

    why: Literal["drained", "forced", "bound"]
    running: int = 0


class TakeBack(Struct, frozen=True, kw_only=True, tag=True):
    """The bound passed with requests running, and the stop was not meant to end any."""

    running: int = 0


Verdict = KeepWaiting | AskEngine | StopNow | TakeBack


def judge(facts: DrainFacts) -> Verdict:
    """Decides in this order; the first case that applies wins.

    1. forced: stop, whatever runs.
    2. the bound passed and the stop may be taken back, or wants it parked and nothing else: take it back.
       Needs nobody's answer.
    3. the bound of this agent's own stop passed: stop with what runs. Whoever asks for a card of this
       machine waits for no network, so that bound holds without one.
    4. not connected, or not for `listen_s` yet: wait; neither zero nor the bound mean anything now.
    5. the bound passed: stop with what runs.
    6. the draining event is not stored: no gateway can have seen it, wait.
    7. no gateway is alive: wait `listen_s` from the start of the drain for one to speak.
    8. a live gateway has not confirmed the position, or has requests there: wait.
    9. the engine was not asked: ask it.
    10. the engine itself has requests: wait.
    11. nobody uses it: stop.
    """
    stop = facts.stop
    live = [g for g in facts.gateways if g.age_s <= facts.gateway_gone_s]
    told = facts.engine.inflight if facts.engine is not None else None
    running = max(sum(g.inflight for g in live), told or 0)
    overdue = facts.age_s >= stop.drain_timeout_s
    if stop.force:  # 1
        return StopNow(why="forced", running=running)
    if overdue and (stop.take_back or stop.park == "must"):  # 2
        return TakeBack(running=running)
    if overdue and stop.reason in OWN:  # 3
        return StopNow(why="bound", running=running)
    if facts.connected_s is None:  # 4
        return KeepWaiting(reason="no connection: nobody can tell what gateways still send")
    if facts.connected_s < facts.listen_s:
        return KeepWaiting(reason="connected just now: gateways have not spoken yet")
    if overdue:  # 5
        return StopNow(why="bound", running=running)
    if facts.sequence is None:  # 6
        return KeepWaiting(reason="replica.draining is not stored yet")
    if not live and facts.age_s < facts.listen_s:  # 7
        return KeepWaiting(reason="no gateway heard yet")
    for gateway in live:  # 8
        if gateway.inflight:
            return KeepWaiting(reason=f"{gateway.name} has {gateway.inflight} running")
        # A gateway on its way out takes nothing new; it need not follow the log to the end.
        if gateway.position < facts.sequence and not (gateway.leaving and not gateway.waiting):
            return KeepWaiting(reason=f"{gateway.name} has not seen the drain")
    if facts.engine is None:  # 9
        return AskEngine()
    if told:  # 10
        return KeepWaiting(reason=f"the engine itself has {told} running")
    return StopNow(why="drained")  # 11
