"""Decides what a gateway's `model.activate` leads to: a request found no ready replica of a model.

It has no outcome: the activation event is it. However often it is asked, one load is begun and the log grows once.
"""

from collections.abc import Sequence
from typing import Final

from msgspec.structs import replace

from controlplane.domain import activation as moves
from controlplane.domain import following, record, upkeep
from controlplane.domain.decision import Decision
from controlplane.domain.index import Planned
from controlplane.domain.placement import Demand
from controlplane.domain.planedit import PlanEdit
from controlplane.domain.reconcile import NO_CAPACITY_RETRY_S, serve
from controlplane.domain.scene import ANY, Hold, Scene, in_scope, is_off
from controlplane.domain.shortage import claims_before
from events.log import StoredCommand
from schemas.activation import PENDING_PHASES, Activation, ActivationRefused, ActivationWanted
from schemas.cardnames import readings
from schemas.commands import Command, ModelActivate

LONGEST_SCOPE: Final = 401
"""Characters; a scope names a node and a card. Percent-encoded they still fit a subject."""
MOST_STRAY_SCOPES: Final = 16
"""Of one model: demands for cards that no node has, refused and not over yet. More are not even refused."""
MOST_NAMED: Final = 8
"""So many nodes or cards a sentence lists."""


def decide(
    scene: Scene, stored: StoredCommand, command: Command, body: ModelActivate
) -> Decision | None:
    """A request found no ready replica:

    1. unknown or off: nothing, the gateway answers from its table (A4, A14, A15); so does a scope that
       is none;
    2. it is on its way, or ready and its replica is neither leaving nor parked: joined;
    3. refused and the time to try again has not come: answered by that refusal already; a scope that names a card
       no node has is refused;
    4. a replica is just being stopped for lack of demand: the stop is taken back;
    5. a replica is there or on its way (kept by `min`): the demand follows it;
    6. somebody before it is to be placed first: it gets its place in the queue;
    7. else it is placed, refused or told to wait in this very decision.
    """
    model = scene.world.models.get(body.model)
    if model is None or is_off(model) or not _is_scope(body.scope):  # 1
        return None
    key = (body.model, body.scope)
    before = scene.world.activations.get(key)
    if before is not None and before.incarnation != model.incarnation:
        before = None
    if before is not None:
        if before.phase in PENDING_PHASES:  # 2
            return None
        if before.phase == "ready" and not following.is_leaving(scene, before):
            return None
        if before.phase == "refused" and _still_refused(scene, before):  # 3
            return None
    is_new = key not in scene.world.activations
    known = scene.world.activations.get(key)
    wanted = moves.opened(model.name, model.incarnation, body.scope, scene.now, known)
    if not following.is_somewhere(scene, body.scope):  # 3
        return _stray(scene, stored, command, wanted, is_new)
    held = in_scope(scene.holds_of(model.name), body.scope)
    decision = _reuse(scene, wanted, held, is_new) or _joined(scene, wanted, held, is_new)  # 4, 5
    if decision is None:
        demand = Demand(
            model=model,
            wanted_at=scene.now,
            scope=body.scope,
            activation=wanted,
            fresh=True,
        )
        claimed = claims_before(scene, demand)
        if claimed is None:  # 6
            decision = _queued(scene, wanted, is_new)
        else:  # 7
            decision = serve(scene, demand, claimed).decision
    if decision is None:
        return None
    decision = replace(
        decision,
        cause=command.id,
        actor=stored.actor,
        correlationid=command.correlationid,
    )
    checked = scene.checked(decision)
    if checked is None:
        scene.index.unserved.add(model.name)
    return checked


def _stray(
    scene: Scene, stored: StoredCommand, command: Command, wanted: Activation, is_new: bool
) -> Decision | None:
    """Refuses a demand for a card that no node has, a few of them at a time: anybody may name cards."""
    strays = sum(following.is_nowhere(scene, a) for a in scene.activations_of(wanted.model))
    if is_new and strays >= MOST_STRAY_SCOPES:
        return None
    named = list(readings(wanted.scope))
    name, card = next((pair for pair in named if pair[0] in scene.world.nodes), named[0])
    node = scene.world.nodes.get(name)
    if node is None:
        why = f"there is no node {name}; known: {_listed(sorted(scene.world.nodes))}"
    else:
        why = f"{name} has no card {card}; it has {_listed([info.id for info in node.cards])}"
    change = moves.move(
        wanted,
        ActivationRefused(code="no_capacity"),
        scene.now,
        why,
        is_new=is_new,
        code="no_capacity",
        retry_at=scene.after(NO_CAPACITY_RETRY_S),
        replicas=1,
    )
    return scene.checked(
        Decision(
            changes=(change,),
            what=f"{wanted.model} refused, no_capacity: {change.reason}",
            cause=command.id,
            actor=stored.actor,
            correlationid=command.correlationid,
        )
    )


def _is_scope(scope: str) -> bool:
    return scope == ANY or ("~" in scope and len(scope) <= LONGEST_SCOPE)


def _still_refused(scene: Scene, before: Activation) -> bool:
    """Whether the recorded refusal still is the answer.

    Its time is ahead, and what it names holds: a backoff or quarantine that was lifted does not.
    """
    if before.retry_at is None or before.retry_at <= scene.now:
        return False
    if before.code in ("start_failed", "model_quarantined"):
        return record.hold_back(scene.world.records.get(before.model), scene.now) is not None
    return True


def _reuse(
    scene: Scene, wanted: Activation, held: Sequence[tuple[Planned, Hold]], is_new: bool
) -> Decision | None:
    for planned, hold in held:
        replica = scene.world.replicas.get(planned.item.replica)
        if hold != "stopping" or replica is None:
            continue
        if not upkeep.may_resume(scene, planned, replica):
            continue
        edit = PlanEdit(world=scene.world)
        edit.resume(planned)
        why = "demand came back"
        change = following.rejoined(scene, wanted, planned, replica, why, is_new=is_new)
        return Decision(
            changes=(*edit.changes(why), change),
            what=f"{wanted.model}: {replica.id} goes on, {why}",
        )
    return None


def _joined(
    scene: Scene, wanted: Activation, held: Sequence[tuple[Planned, Hold]], is_new: bool
) -> Decision | None:
    change = following.follow(scene, wanted, held, asked=True, is_new=is_new)
    if change is None:
        return None
    return Decision(changes=(change,), what=f"{wanted.model}: {change.reason}")


def _queued(scene: Scene, wanted: Activation, is_new: bool) -> Decision:
    change = moves.move(
        wanted,
        ActivationWanted(by="gateway"),
        scene.now,
        "asked for",
        is_new=is_new,
    )
    return Decision(changes=(change,), what=f"{wanted.model} is wanted")


def _listed(names: list[str]) -> str:
    shown = ", ".join(names[:MOST_NAMED]) or "none"
    more = len(names) - MOST_NAMED
    return f"{shown} and {more} more" if more > 0 else shown
