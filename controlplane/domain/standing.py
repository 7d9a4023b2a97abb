"""Judges nodes by their heartbeats: joined, unreachable, reachable again, lost.

It judges the node and not its replicas, but for a lost one: those count as gone with it.
"""

from datetime import datetime, timedelta
from typing import Final

from msgspec.structs import replace

from controlplane.domain import activation as moves
from controlplane.domain.decision import Change, Decision
from controlplane.domain.planedit import PlanEdit
from controlplane.domain.scene import Scene, is_demanded, is_in_scope
from schemas.activation import ActivationWanted
from schemas.node import (
    NodeState,
    NodeStateEvent,
    NodeStateJoined,
    NodeStateLost,
    NodeStateReachable,
    NodeStateUnreachable,
)

SUSPECT_FROM: Final = 2
"""Fewer nodes falling silent together accuse nobody but themselves."""


def silence_s(scene: Scene, node: str) -> float:
    """Seconds without a beacon of the node's agent, as far as this leader can tell."""
    agent = scene.agents.get(node)
    return agent.age_s if agent is not None else scene.live.leading_for_s


def suspicion(scene: Scene) -> str:
    """Why this leader's own ears are in doubt, empty when they are not.

    More than half of the nodes it could hear, and at least two, fell silent and none was judged yet.
    """
    limit_s = scene.settings.unreachable_after_s
    if scene.live.leading_for_s < limit_s:
        return ""
    heard = scene.index.heard
    silent = _silent(scene)
    if len(silent) < SUSPECT_FROM or len(silent) * 2 <= len(heard):
        return ""
    return (
        f"placement is frozen: {len(silent)} of {len(heard)} nodes fell silent together, "
        "the control plane's own connection is suspected"
    )


def _silent(scene: Scene) -> list[str]:
    """Nodes that count as reachable and are silent for too long. Asked at every step: in a large yard nearly
    all are heard, and one look at the ages of all beacons says so."""
    limit_s = scene.settings.unreachable_after_s
    heard = scene.index.heard
    silent = [a.node for a in scene.live.agents if a.age_s > limit_s and a.node in heard]
    if scene.live.leading_for_s > limit_s:
        silent.extend(heard - scene.agents.keys())
    return silent


def judge(scene: Scene) -> tuple[Decision | None, datetime | None]:
    """The first node whose standing changes, and when time alone may change one.

    1. A node's inventory is seen for the first time: joined.
    2. An unreachable or lost one is heard again: reachable.
    3. Silent for 30 s: unreachable; not in a leader's first 30 s, not while its ears are in doubt.
    4. Unreachable for an hour: lost; its plan is emptied and what it ran is wanted again.
    """
    world, settings = scene.world, scene.settings
    limit_s = settings.unreachable_after_s
    may_judge = scene.live.leading_for_s >= limit_s
    silent = _silent(scene) if may_judge else []
    due = _next_silence(scene, silent)
    for node in sorted({*scene.index.away, *silent}):
        if node not in world.nodes:
            continue
        state = world.nodestates.get(node)
        if state is None:  # 1
            fresh = NodeState(node=node, since=scene.now)
            decision = _decision(scene, node, NodeStateJoined(), fresh, "it joined")
            if decision is not None:
                return decision, None
            continue
        quiet_s = silence_s(scene, node)
        agent = scene.agents.get(node)
        if state.reach != "reachable":
            if agent is not None and quiet_s <= limit_s:  # 2
                back = replace(state, reach="reachable", since=scene.now)
                decision = _decision(scene, node, NodeStateReachable(), back, "it is heard again")
                if decision is not None:
                    return decision, None
            elif state.reach == "unreachable":
                lost_at = state.since + timedelta(seconds=settings.lost_after_s - limit_s)
                if lost_at <= scene.now and may_judge and not scene.frozen:  # 4
                    decision = scene.checked(_lost(scene, node, state, quiet_s))
                    if decision is not None:
                        return decision, None
                elif lost_at > scene.now:
                    due = lost_at if due is None else min(due, lost_at)
        elif not scene.frozen:  # 3
            away = replace(state, reach="unreachable", since=scene.now)
            event = NodeStateUnreachable(silent_s=round(quiet_s, 1))
            decision = _decision(scene, node, event, away, f"silent for {quiet_s:.0f} s")
            if decision is not None:
                return decision, None
    return None, due


def _next_silence(scene: Scene, silent: list[str]) -> datetime | None:
    """When the first of the nodes that are heard may have been silent for too long."""
    limit_s, leading_for_s = scene.settings.unreachable_after_s, scene.live.leading_for_s
    heard = scene.index.heard
    if len(silent) >= len(heard):
        return None
    ages = [a.age_s for a in scene.live.agents if a.node in heard]
    if len(ages) < len(heard):
        ages.append(leading_for_s)
    if silent:
        ages = [age_s for age_s in ages if age_s <= limit_s]
    quiet_s = max(ages, default=0.0)
    grace_s = max(limit_s - leading_for_s, limit_s - quiet_s)
    return scene.after(max(grace_s, 0.0) + 0.05)


def _decision(
    scene: Scene, node: str, event: NodeStateEvent, state: NodeState, why: str
) -> Decision | None:
    change = Change(noun="nodestate", key=(node,), event=event, state=state, reason=why)
    return scene.checked(
        Decision(
            changes=(change,), what=f"node {node}: {why}", cause=scene.world.head("node", node).id
        )
    )


def _lost(scene: Scene, node: str, state: NodeState, quiet_s: float) -> Decision:
    why = "lost, its replicas count as gone"
    changes = [
        Change(
            noun="nodestate",
            key=(node,),
            event=NodeStateLost(silent_s=round(quiet_s, 1)),
            state=replace(state, reach="lost", since=scene.now),
            reason=why,
        )
    ]
    edit = PlanEdit(world=scene.world)
    gone = [p for p in scene.index.items.values() if p.node == node]
    for planned in gone:
        edit.remove(planned)
    changes.extend(edit.changes(why))
    for name in sorted({p.item.launch.model for p in gone}):
        model = scene.world.models.get(name)
        if model is None:
            continue
        left = [
            p for p, hold in scene.holds_of(name) if p.node != node and hold in ("ready", "pending")
        ]
        for activation in scene.activations_of(name):
            if not is_demanded(activation, model) or activation.phase == "wanted":
                continue
            if activation.node != node or any(is_in_scope(p, activation.scope) for p in left):
                continue
            changes.append(
                moves.move(activation, ActivationWanted(by=node), scene.now, f"node {node} is lost")
            )
    return Decision(
        changes=tuple(changes), what=f"node {node}: {why}", cause=scene.world.head("node", node).id
    )
