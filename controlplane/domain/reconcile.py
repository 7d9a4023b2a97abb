"""Serves the queue for room: whoever is short of a replica, in order of arrival, gets a place or its reasons.

One replica at a time per model: a second is not started while one is on its way (inv 4). It stops only
who must make room; all other stops are decided elsewhere.
"""

from datetime import datetime
from typing import Final

from msgspec.structs import replace

from controlplane.domain import activation as moves
from controlplane.domain import holders, memory, record
from controlplane.domain.decision import Change, Decision
from controlplane.domain.placement import (
    Claims,
    Demand,
    NoNode,
    NoRoom,
    Placed,
    Wait,
    place,
    sentence,
)
from controlplane.domain.planedit import PlanEdit
from controlplane.domain.rooms import CardKey, Planned
from controlplane.domain.scene import (
    ANY,
    Scene,
    is_in_scope,
)
from controlplane.domain.shortage import queue_of
from controlplane.domain.stops import stop_decision
from schemas.activation import (
    PENDING_PHASES,
    Activation,
    ActivationIdle,
    ActivationPlacing,
    ActivationReady,
    ActivationRefused,
    ActivationWaiting,
    ActivationWanted,
)
from schemas.model import Model, Profile
from schemas.plan import Launch, PlanItem, Stop

NO_CAPACITY_RETRY_S: Final = 60.0


def serve_queue(scene: Scene) -> Decision | None:
    """The first decision the queue yields; notes in the index when time alone may yield one."""
    claims = Claims()
    due: datetime | None = None
    for demand in queue_of(scene):
        served = serve(scene, demand, claims)
        decision = scene.checked(served.decision)
        if decision is not None:
            return decision
        if served.decision is not None:
            scene.index.unserved.add(demand.model.name)
        claims.add(served.claimed)
        if served.look_at is not None:
            due = served.look_at if due is None else min(due, served.look_at)
    scene.index.queue_due = due
    return None


class Served:
    """What one demand came to: a decision or none, the cards it claims, when to look again."""

    __slots__ = ("claimed", "decision", "look_at")

    def __init__(
        self,
        decision: Decision | None = None,
        claimed: frozenset[CardKey] = frozenset(),
        look_at: datetime | None = None,
    ) -> None:
        self.decision = decision
        self.claimed = claimed
        self.look_at = look_at


def serve(scene: Scene, demand: Demand, claims: Claims) -> Served:
    """One demand:

    0. a replica of it ended and that cannot be recorded: it stays wanted, or it would start for ever;
    1. given up or in backoff: refused, with the time it may be tried again;
    2. a card was asked for and `max` is reached: one of its own replicas elsewhere makes way first;
    3. placed: a new item in the plan, or a parked replica that comes back;
    4. room must be made: victims stop, it waits;
    5. fits nowhere: refused with the report;
    6. nothing can be judged now: it stays wanted.
    """
    model = demand.model
    ended = next((p for p, hold in scene.holds_of(model.name) if hold == "ended"), None)
    if ended is not None:  # 0
        why = f"the end of {ended.item.replica} is not recorded yet"
        return Served(_unplaced(scene, demand, why))
    held_back = record.hold_back(scene.world.records.get(model.name), scene.now)
    if held_back is not None:  # 1
        return Served(
            _refuse(scene, demand, held_back.code, held_back.reason, held_back.retry_at),
            look_at=held_back.retry_at,
        )
    verdict = place(scene, demand, claims)
    if demand.scope != ANY and isinstance(verdict, Placed | Wait):  # 2
        verdict = within_max(scene, demand, verdict)
    match verdict:
        case Placed():  # 3
            return Served(_start(scene, demand, verdict))
        case Wait():  # 4
            replaced = _outdated(scene, model)
            if replaced and not verdict.kept:
                # No room for both: the old one makes it. Its successor is placed when it has left.
                return Served(
                    stop_decision(
                        scene, model.name, replaced, "changed", "no room beside the old revision"
                    ),
                    verdict.claimed,
                )
            return Served(_make_room(scene, demand, verdict), verdict.claimed, verdict.look_at)
        case NoRoom():  # 5
            return Served(_no_room(scene, demand, verdict))
        case NoNode():  # 6
            return Served(_unplaced(scene, demand, verdict.reason))


def within_max(scene: Scene, demand: Demand, verdict: Placed | Wait) -> Placed | Wait:
    """The verdict when one more may run; else the wait for one of the model's own replicas.

    It makes way as for another model: protected ones stay for now, and nobody else is stopped before one may go.
    It serves on until the card can be had.
    """
    if isinstance(verdict, Wait) and verdict.report.chosen is None:
        return verdict
    model = demand.model
    own: list[Planned] = []
    leaving: list[str] = []
    for planned, hold in scene.holds_of(model.name):
        if hold == "stopping":
            leaving.append(planned.item.replica)
        elif hold in ("ready", "pending") and scene.profile_of(planned) is not None:
            own.append(planned)
    if len(own) + len(leaving) < model.scaling.max:
        return verdict
    claimed = verdict.places if isinstance(verdict, Placed) else verdict.claimed
    report = verdict.report
    if len(own) < model.scaling.max:
        return Wait(victims=(), waiting_for=tuple(leaving), claimed=claimed, report=report)
    waited_s = scene.age_s(demand.wanted_at)
    found = {p.item.replica: holders.protection(scene, p, waited_s) for p in own}
    free = [p for p in own if found[p.item.replica] is None]
    victims = holders.to_stop(scene, free, 1)
    if victims and isinstance(verdict, Wait):
        return verdict
    if victims:
        ids = tuple(p.item.replica for p in victims)
        return Wait(victims=victims, waiting_for=ids, claimed=claimed, report=report)
    looks = [p.until for p in found.values() if p is not None and p.until is not None]
    return Wait(
        victims=(),
        waiting_for=tuple(found),
        claimed=claimed,
        report=report,
        look_at=min(looks, default=None),
    )


def _outdated(scene: Scene, model: Model) -> list[Planned]:
    return [
        p
        for p, hold in scene.holds_of(model.name)
        if hold == "ready" and scene.profile_of(p) is None
    ]


def _pending(demand: Demand) -> Activation | None:
    """The demand's activation while its phase tells of this wait; a ready one is answered already."""
    activation = demand.activation
    if activation is None:
        return None
    return activation if demand.fresh or activation.phase in PENDING_PHASES else None


def launch_of(scene: Scene, model: Model, profile: Profile) -> Launch:
    return Launch(
        model=model.name,
        incarnation=model.incarnation,
        profile=profile.name,
        revision=scene.index.revision(scene.world, model.name, profile),
        engine=profile.engine,
        source=model.source,
        args=profile.args,
        command=profile.command,
        env=profile.env,
        health=profile.health,
        key_env=profile.key_env,
        start_timeout_s=profile.start_timeout_s,
        weight=profile.weight,
        exclusive=profile.exclusive,
        parking=profile.parking,
        adapters=model.max_loaded_adapters,
        lora_rank=model.lora_rank if model.max_loaded_adapters > 0 else 0,
    )


def _start(scene: Scene, demand: Demand, placed: Placed) -> Decision:
    """A new item, or the end of the stop of a parked replica: it keeps its id."""
    model = demand.model
    edit = PlanEdit(world=scene.world)
    cards = "+".join(placed.cards)
    why = (
        f"{model.name} on {placed.node}/{cards}, "
        f"{memory.amount(placed.memory_bytes)}, rank {placed.rank}"
    )
    activation = _pending(demand)
    if placed.resume is not None:
        id_ = placed.resume.item.replica
        why = f"{why}, from its parked copy"
        edit.resume(placed.resume, evict=placed.evict)
    else:
        id_ = scene.ids.replica()
        edit.add(
            placed.node,
            PlanItem(
                replica=id_,
                launch=launch_of(scene, model, placed.profile),
                cards=placed.cards,
                memory_bytes=placed.memory_bytes,
                decided_at=scene.now,
                cause=f"activation {activation.scope}" if activation is not None else "min",
                card_revs=placed.card_revs,
                evict=placed.evict,
            ),
        )
    if placed.waiting_for:
        why = f"{why}, after {', '.join(placed.waiting_for)}"
    changes = list(edit.changes(why))
    if activation is not None:
        known = scene.world.records.get(model.name)
        times = (known, placed.profile.name, placed.kind)
        ready_s = (
            memory.expected_load_s(*times)
            if placed.resume is None
            else memory.expected_resume_s(*times)
        )
        changes.append(
            moves.move(
                activation,
                ActivationPlacing(replica=id_),
                scene.now,
                why,
                is_new=_is_unrecorded(scene, activation),
                replica=id_,
                node=placed.node,
                profile=placed.profile.name,
                expected_ready_at=None if ready_s is None else scene.after(ready_s),
                report=placed.report,
                waiting_for=placed.waiting_for,
                kept=False,
            )
        )
    verb = "start" if placed.resume is None else "resume"
    return Decision(
        changes=tuple(changes), what=f"{verb} {id_}: {why}", cause=_cause(scene, demand)
    )


def _make_room(scene: Scene, demand: Demand, wait: Wait) -> Decision | None:
    model = demand.model
    edit = PlanEdit(world=scene.world)
    changes: list[Change] = []
    if wait.victims:
        stop = Stop(
            decision=scene.ids.decision(),
            reason="drain",
            decided_at=scene.now,
            drain_timeout_s=scene.settings.drain_timeout_s,
            for_model=model.name,
            park="may",
        )
        for victim in wait.victims:
            replica = scene.world.replicas.get(victim.item.replica)
            is_parked = replica is not None and replica.phase == "parked"
            # What a parked engine keeps on its cards comes back with its end alone.
            edit.stop(victim, replace(stop, park="never") if is_parked else stop)
        changes.extend(edit.changes(f"room for {model.name}"))
        changes.extend(_demand_ends(scene, model.name, wait.victims))
    activation = _pending(demand)
    if activation is not None and _is_news(demand, activation, wait):
        changes.append(
            moves.move(
                activation,
                ActivationWaiting(waiting_for=wait.waiting_for),
                scene.now,
                sentence(wait.report),
                is_new=_is_unrecorded(scene, activation),
                waiting_for=wait.waiting_for,
                kept=wait.kept,
                report=wait.report,
            )
        )
    if not changes:
        return None
    names = ", ".join(v.item.replica for v in wait.victims)
    what = f"{model.name} waits for room" + (f", {names} to stop" if names else "")
    if wait.kept and wait.waiting_for:
        what = f"{model.name} waits, its cards are kept by {', '.join(wait.waiting_for)}"
    return Decision(changes=tuple(changes), what=what, cause=_cause(scene, demand))


def _is_news(demand: Demand, activation: Activation, wait: Wait) -> bool:
    """Whether a wait is to be told: it begins, somebody is made to leave for it, or who keeps its cards changed.

    Who of many is in the way changes with every event, and is not told again.
    """
    if wait.victims or activation.phase != "waiting" or demand.fresh:
        return True
    if wait.kept != activation.kept:
        return True
    return wait.kept and wait.waiting_for != activation.waiting_for


def _demand_ends(scene: Scene, for_model: str, victims: tuple[Planned, ...]) -> list[Change]:
    """The victims' own demand shrinks with them, or the next step would start them again."""
    gone = {v.item.replica for v in victims}
    changes: list[Change] = []
    for name in sorted({v.item.launch.model for v in victims}):
        left = [
            p
            for p, hold in scene.holds_of(name)
            if hold in ("ready", "pending") and p.item.replica not in gone
        ]
        for activation in scene.activations_of(name):
            mine = [p for p in left if is_in_scope(p, activation.scope)]
            if activation.phase != "ready":
                continue
            if not mine:
                event = ActivationIdle(cause="drain")
                changes.append(
                    moves.move(activation, event, scene.now, f"drained for {for_model}", replicas=1)
                )
            elif activation.replicas > len(mine) or activation.replica in gone:
                other = min(p.item.replica for p in mine)
                changes.append(
                    moves.move(
                        activation,
                        ActivationReady(replica=other),
                        scene.now,
                        f"one drained for {for_model}",
                        replicas=min(activation.replicas, len(mine)),
                        replica=other,
                    )
                )
    return changes


def _no_room(scene: Scene, demand: Demand, verdict: NoRoom) -> Decision | None:
    model = demand.model
    reason = sentence(verdict.report)
    if demand.activation is not None and _pending(demand) is not None:
        return _refuse(
            scene,
            demand,
            "no_capacity",
            reason,
            scene.after(NO_CAPACITY_RETRY_S),
            report=verdict.report,
        )
    change = record.unplaceable(
        scene.world.records.get(model.name), model.name, model.incarnation, verdict.report
    )
    if change is None:
        return None
    return Decision(
        changes=(change,), what=f"{model.name} fits nowhere: {reason}", cause=_cause(scene, demand)
    )


def _refuse(
    scene: Scene,
    demand: Demand,
    code: record.RefusalCode,
    reason: str,
    retry_at: datetime | None,
    **fields: object,
) -> Decision | None:
    """Answers whoever waits; without a pending activation nobody does, and nothing is written.

    The same refusal again writes nothing: however much is asked, the log does not grow (inv 11).
    """
    activation = _pending(demand)
    if activation is None:
        return None
    before = scene.world.activations.get((activation.model, activation.scope))
    said = ("refused", code, retry_at, activation.incarnation)
    if before is not None and said == (
        before.phase,
        before.code,
        before.retry_at,
        before.incarnation,
    ):
        return None
    change = moves.move(
        activation,
        ActivationRefused(code=code),
        scene.now,
        reason,
        is_new=_is_unrecorded(scene, activation),
        **{"code": code, "retry_at": retry_at, "replicas": 1, "report": None, **fields},
    )
    return Decision(
        changes=(change,),
        what=f"{demand.model.name} refused, {code}: {reason}",
        cause=_cause(scene, demand),
    )


def _unplaced(scene: Scene, demand: Demand, reason: str) -> Decision | None:
    activation = _pending(demand)
    if activation is None or not (demand.fresh or activation.phase == "placing"):
        return None
    change = moves.move(
        activation,
        ActivationWanted(by="control"),
        scene.now,
        reason,
        is_new=_is_unrecorded(scene, activation),
    )
    return Decision(
        changes=(change,),
        what=f"{demand.model.name} is wanted: {reason}",
        cause=_cause(scene, demand),
    )


def _is_unrecorded(scene: Scene, activation: Activation) -> bool:
    return (activation.model, activation.scope) not in scene.world.activations


def _cause(scene: Scene, demand: Demand) -> str:
    if demand.activation is None:
        return scene.world.head("model", demand.model.name).id
    return scene.world.head("activation", demand.model.name, demand.activation.scope).id
