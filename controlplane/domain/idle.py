"""Says how long a model has been idle, over all gateways and engines, and stops what idled too long.

A stop for lack of demand may end in parking: that is the agent's choice. Silence is never idleness: whoever may still be using a replica counts as using it.
"""

from datetime import datetime, timedelta

from controlplane.domain import departures, holders
from controlplane.domain.decision import AgentLive, Change, Decision, GatewayLive
from controlplane.domain.index import Planned
from controlplane.domain.planedit import PlanEdit
from controlplane.domain.scene import Scene, is_demanded
from schemas.model import Model
from schemas.plan import Stop


def idle_s(scene: Scene, model: Model, ready: list[Planned]) -> float:
    """Seconds nobody used the model: the smallest of

    1. since the last of its replicas became ready, since it was last asked for (a `load` is a use);
    2. since this leader is connected and leading;
    3. since it had heard three beacons of each replica's agent (0 while that agent is silent);
    4. since the last use each gateway tells of (0 with requests in flight or waiting);
    5. since the engines' own counters last moved.
    """
    seconds = [scene.live.leading_for_s]  # 2
    engines_are_quiet = True
    for planned in ready:
        replica = scene.world.replicas[planned.item.replica]
        seconds.append(scene.age_s(replica.ready_at or replica.since))  # 1
        agent = scene.agents.get(planned.node)
        seconds.append(_heard_s(scene, agent))  # 3
        told = agent.replicas.get(replica.id) if agent is not None else None
        if told is None or told.counters.inflight is None:
            engines_are_quiet = False
        elif told.counters.inflight > 0:  # 5
            seconds.append(0.0)
        if told is not None and told.changed_age_s is not None:
            seconds.append(told.changed_age_s)
    seconds.extend(
        scene.age_s(activation.wanted_at)  # 1
        for activation in scene.activations_of(model.name)
        if activation.incarnation == model.incarnation
    )
    ids = {p.item.replica for p in ready}
    for gateway in scene.live.gateways:  # 4
        unused_s = _unused_s(scene, gateway, model, ids, engines_are_quiet)
        if unused_s is not None:
            seconds.append(unused_s)
    return max(min(seconds), 0.0)


def _heard_s(scene: Scene, agent: AgentLive | None) -> float:
    if agent is None or agent.trusted_for_s is None:
        return 0.0
    return 0.0 if agent.age_s >= scene.settings.unreachable_after_s else agent.trusted_for_s


def _unused_s(
    scene: Scene,
    gateway: GatewayLive,
    model: Model,
    replicas: set[str],
    engines_are_quiet: bool,
) -> float | None:
    """How long one gateway has not used the model, None when it never did.

    a. heard and in use: 0. b. silent since a use was running: in use for one more idle_timeout, or
    until the engines themselves say that nothing runs. c. otherwise since its last use.
    """
    in_use = gateway.waiting.get(model.name, 0) > 0 or any(
        gateway.inflight.get(replica, 0) > 0 for replica in replicas
    )
    if in_use and not gateway.leaving:
        if gateway.age_s <= scene.settings.stale_gateway_s:  # a
            return 0.0
        if engines_are_quiet:  # b
            return gateway.age_s
        return max(gateway.age_s - model.scaling.idle_timeout_s, 0.0)
    last_s = gateway.last_use_age_s.get(model.name)
    return None if last_s is None else last_s + gateway.age_s  # c


def not_before(scene: Scene, name: str) -> datetime | None:
    """The earliest time at which a model may have idled for long enough, from the log alone.

    None when there is nothing to stop: what beacons say can only move it later.
    """
    model = scene.world.models.get(name)
    if model is None or model.scaling.idle_timeout_s <= 0:
        return None
    since: datetime | None = None
    ready = 0
    for planned, hold in scene.holds_of(name):
        replica = scene.world.replicas.get(planned.item.replica)
        if hold == "ready" and replica is not None:
            ready += 1
            at = replica.ready_at or replica.since
            since = at if since is None else max(since, at)
    if since is None or ready <= model.scaling.min:
        return None
    for activation in scene.activations_of(name):
        if activation.incarnation == model.incarnation:
            since = max(since, activation.wanted_at)
    return since + timedelta(seconds=model.scaling.idle_timeout_s)


def stop_idle(scene: Scene, name: str) -> tuple[Decision | None, datetime | None]:
    """The stop of an idle model's replicas above `min`, or when to look again (None: not by time).

    The clock is the model's, over all its cards: a demand bound to one card ends with it. Parked replicas are not
    judged, and are none of those `min` asks for.

    Nothing is stopped while one is on its way, while a `load --for` holds it, or with timeout 0.
    """
    model = scene.world.models.get(name)
    if model is None or model.scaling.idle_timeout_s <= 0:
        return None, None
    held = scene.holds_of(name)
    ready = [p for p, hold in held if hold == "ready"]
    activations = [a for a in scene.activations_of(name) if is_demanded(a, model)]
    surplus = len(ready) - model.scaling.min
    if not ready or any(hold == "pending" for _, hold in held):
        return None, None
    if surplus <= 0:
        return None, None
    holds_until = max(
        (a.hold_until for a in activations if a.hold_until is not None), default=scene.now
    )
    if holds_until > scene.now:
        return None, holds_until
    left_s = model.scaling.idle_timeout_s - idle_s(scene, model, ready)
    if left_s > 0:
        return None, scene.after(left_s)
    stopping = holders.to_stop(scene, ready, surplus)
    return _stop(scene, model, ready, stopping), None


def _stop(
    scene: Scene, model: Model, ready: list[Planned], stopping: tuple[Planned, ...]
) -> Decision:
    edit = PlanEdit(world=scene.world)
    stop = Stop(
        decision=scene.ids.decision(),
        reason="idle",
        decided_at=scene.now,
        drain_timeout_s=scene.settings.drain_timeout_s,
        take_back=True,
        park="may",
    )
    for planned in stopping:
        edit.stop(planned, stop)
    why = f"nobody asked for {model.scaling.idle_timeout_s:g} s"
    gone = {p.item.replica for p in stopping}
    changes: list[Change] = [*edit.changes(why)]
    changes.extend(departures.withdrawn_from(scene, model, ready, gone, "idle", why))
    ids = ", ".join(sorted(gone))
    return Decision(
        changes=tuple(changes),
        what=f"{model.name} is idle, {ids} to stop",
        cause=scene.world.head("model", model.name).id,
    )
