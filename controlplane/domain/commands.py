"""Decides what one command does: its changes and its outcome, or that it needs neither.

It writes wishes (a demand, a catalog entry, a stop, a cordon); placing and upkeep follow by themselves.
A gateway's `model.activate` has no outcome: the activation event is it.
"""

from datetime import timedelta
from typing import Final, assert_never

from msgspec.structs import replace

from controlplane.domain import (
    activating,
    adaptercommands,
    catalog,
    consequences,
    jobcommands,
    jobtexts,
    keys,
    mirrorcommands,
    record,
    replicacommands,
)
from controlplane.domain import activation as moves
from controlplane.domain.decision import Accepted, Change, Decision, Rejected
from controlplane.domain.index import Planned
from controlplane.domain.planedit import PlanEdit
from controlplane.domain.scene import (
    ANY,
    Hold,
    Scene,
    is_demanded,
    is_off,
)
from events.log import StoredCommand
from schemas import codes
from schemas.activation import ActivationIdle, ActivationReady, ActivationWanted
from schemas.commands import (
    AdapterAdd,
    AdapterPin,
    AdapterRemove,
    CatalogApply,
    CommandBody,
    JobCancel,
    JobRetry,
    JobServe,
    KeyChange,
    KeyCreate,
    KeyRevoke,
    MirrorGc,
    MirrorRemove,
    MirrorVerify,
    ModelActivate,
    ModelAdd,
    ModelLoad,
    ModelRemove,
    ModelScale,
    ModelUnload,
    NodeCordon,
    NodeUncordon,
    Outcome,
    ReplicaPark,
    ReplicaResume,
)
from schemas.node import NodeState, NodeStateCordoned, NodeStateUncordoned
from schemas.plan import Stop

ACTIVATE: Final = "model.activate"

LONGEST_ID: Final = 128
LONGEST_HOLD_S: Final = 10 * 365 * 86_400.0
MOST_CHANGES: Final = 900
"""Events of one command; a batch holds 1,000, and there are the outcome and the leader's line."""
MOST_PROBLEMS: Final = 50
MOST_LINES: Final = 1000
MOST_LINES_BYTES: Final = 96 * 1024
"""What an outcome tells in lines; with the subjects it names, the whole stays within one event."""
LONGEST_SENTENCE: Final = 2000
"""Characters of what an outcome says, however much of a wrong entry it repeats."""


def decide(scene: Scene, stored: StoredCommand) -> Decision | None:
    """What the command leads to; None = it is settled without an event.

    1. Its outcome is known: a repeated command has no second effect. Its id names no subject: it cannot
       have one.
    2. It cannot be read: rejected when at least its id can.
    3. It is too old: rejected, an activate is dropped.
    4. An activate: see activating.py. 5. Anything else has an outcome in the same batch.
    """
    command = stored.command
    id_ = command.id if command is not None else stored.id
    if id_ is None or not 1 <= len(id_) <= LONGEST_ID or id_ in scene.world.outcomes:  # 1
        return None
    if command is None:  # 2
        if stored.name == ACTIVATE:
            return None
        why = stored.problem or "the command cannot be read"
        return _rejected(scene, stored, id_, Rejected(code=codes.INVALID, sentence=why))
    age_s = scene.age_s(stored.stored_at)
    is_expired = age_s > command.ttl_s
    if isinstance(command.body, ModelActivate):
        return None if is_expired else activating.decide(scene, stored, command, command.body)  # 4
    if is_expired:  # 3
        late = f"it was {age_s:.0f} s old when the control plane came to it, allowed were {command.ttl_s:g} s"
        return _rejected(scene, stored, id_, Rejected(code=codes.EXPIRED, sentence=late))
    answer = _answer(scene, stored, command.body)  # 5
    if isinstance(answer, Rejected):
        return _rejected(scene, stored, id_, answer)
    if len(answer.changes) > MOST_CHANGES:
        sentence = (
            f"it would write {len(answer.changes)} events at once, at most {MOST_CHANGES} can be; "
            "name fewer at a time"
        )
        return _rejected(scene, stored, id_, Rejected(code=codes.INVALID, sentence=sentence))
    for change in answer.changes:
        head = scene.world.head(change.noun, *change.key)
        if not head.writable:
            # A head without a type is one nobody could read; with one it is of a newer version.
            code = codes.UPGRADE_REQUIRED if head.type else codes.BROKEN
            subject = scene.world.subject(change.noun, *change.key)
            return _rejected(
                scene,
                stored,
                id_,
                Rejected(code=code, sentence=f"{subject} cannot be written: {head.problem}"),
            )
    too_large = scene.unwritable(answer.changes)
    if too_large:
        return _rejected(scene, stored, id_, Rejected(code=codes.INVALID, sentence=too_large))
    outcome = Outcome(
        id=id_,
        actor=stored.actor,
        name=stored.name,
        status="accepted",
        at=scene.now,
        sentence=answer.sentence,
        refs=_refs(scene, answer),
        lines=_first(answer.lines),
    )
    return Decision(
        changes=answer.changes,
        what=f"{stored.name}: {answer.sentence}",
        cause=id_,
        actor=stored.actor,
        correlationid=command.correlationid,
        outcome=outcome,
    )


def _refs(scene: Scene, answer: Accepted) -> tuple[str, ...]:
    changed = (scene.world.subject(c.noun, *c.key) for c in answer.changes)
    return tuple(dict.fromkeys((*answer.refs, *changed)))


def _first(lines: tuple[str, ...]) -> tuple[str, ...]:
    """As many of the lines as one outcome tells, and how many more there are."""
    left, kept = MOST_LINES_BYTES, 0
    for line in lines[:MOST_LINES]:
        left -= jobtexts.size_of(line) + 3
        if left < 0:
            break
        kept += 1
    more = len(lines) - kept
    return lines if more <= 0 else (*lines[:kept], f"(and {more} lines more)")


def _rejected(scene: Scene, stored: StoredCommand, id_: str, rejected: Rejected) -> Decision:
    sentence = rejected.sentence[:LONGEST_SENTENCE]
    outcome = Outcome(
        id=id_,
        actor=stored.actor,
        name=stored.name,
        status="rejected",
        at=scene.now,
        code=rejected.code,
        sentence=sentence,
        problems=tuple(
            replace(p, path=p.path[:LONGEST_SENTENCE], sentence=p.sentence[:LONGEST_SENTENCE])
            for p in rejected.problems[:MOST_PROBLEMS]
        ),
    )
    return Decision(
        changes=(),
        what=f"{stored.name} refused, {rejected.code}: {sentence}",
        cause=id_,
        actor=stored.actor,
        correlationid=stored.command.correlationid if stored.command is not None else None,
        outcome=outcome,
    )


def _answer(scene: Scene, stored: StoredCommand, body: CommandBody) -> Accepted | Rejected:
    actor = stored.actor
    match body:
        case ModelAdd() | CatalogApply() | ModelRemove() | ModelScale():
            return _catalog(scene, actor, body)
        case ModelLoad():
            return _load(scene, actor, body)
        case ModelUnload():
            return _unload(scene, body)
        case AdapterAdd() | AdapterRemove() | AdapterPin():
            return adaptercommands.decide(scene, actor, body)
        case KeyCreate() | KeyChange() | KeyRevoke():
            return keys.decide(scene, actor, stored.stored_at, body)
        case NodeCordon() | NodeUncordon():
            return _cordon(scene, actor, body)
        case ReplicaPark() | ReplicaResume():
            return replicacommands.decide(scene, actor, body)
        case JobServe() | JobCancel() | JobRetry():
            return jobcommands.decide(scene, actor, body)
        case MirrorRemove() | MirrorVerify() | MirrorGc():
            return mirrorcommands.decide(scene, body)
        case ModelActivate():
            raise AssertionError("an activate has no outcome")
        case _:
            assert_never(body)


def _catalog(
    scene: Scene, actor: str, body: ModelAdd | CatalogApply | ModelRemove | ModelScale
) -> Accepted | Rejected:
    world = scene.world
    changes = catalog.decide(
        world.models,
        body,
        actor=actor,
        ids=scene.ids,
        activations=world.activations,
        records=world.records,
        files=world.files,
        adapters=world.adapters,
    )
    if isinstance(changes, Rejected):
        return changes
    lines = consequences.describe(world.models, changes, world.replicas.values())
    names = sorted({change.key[0] for change in changes if change.noun == "model"})
    said = f"{', '.join(names)} written" if names else "nothing changes"
    if isinstance(body, ModelRemove):
        said = f"{body.model} removed"
    if isinstance(body, CatalogApply) and body.dry_run:
        return Accepted(sentence="dry run, nothing was changed", lines=lines)
    return Accepted(changes=changes, sentence=said, lines=lines)


def _load(scene: Scene, actor: str, body: ModelLoad) -> Accepted | Rejected:
    """One replica more, up to `max`; counts as a use or holds; lifts backoff and quarantine."""
    model = scene.world.models.get(body.model)
    if model is None:
        return catalog.not_found(scene.world.models, body.model)
    if is_off(model):
        why = f": {model.off_reason}" if model.off_reason else ""
        return Rejected(
            code=codes.CONFLICT, sentence=f"{model.name} is off (max 0); scale it up first{why}"
        )
    if body.for_s is not None and body.for_s <= 0:
        return Rejected(code=codes.INVALID, sentence="--for must be longer than nothing")
    if body.for_s is not None and body.for_s > LONGEST_HOLD_S:
        return Rejected(
            code=codes.INVALID,
            sentence="--for is at most ten years; `model scale` with a min keeps a model for good",
        )
    key = (model.name, ANY)
    known = scene.world.activations.get(key)
    live = known if known is not None and is_demanded(known, model) else None
    running = sum(
        1
        for p, hold in scene.holds_of(model.name)
        if hold in ("ready", "pending") and scene.profile_of(p) is not None
    )
    asked_for = max(running, live.replicas if live is not None else 0, model.scaling.min)
    count = min(asked_for + 1, model.scaling.max)
    changes: list[Change] = []
    lifted = scene.world.records.get(model.name)
    if lifted is not None and (lifted.failures or lifted.quarantined is not None):
        changes.append(record.cleared(lifted, "load"))
    hold_until = live.hold_until if live is not None else None
    if body.for_s is not None:
        until = scene.now + timedelta(seconds=body.for_s)
        hold_until = max(hold_until, until) if hold_until is not None else until
    why = f"load by {actor}"
    if live is not None and live.phase == "ready":
        change = moves.move(
            live,
            ActivationReady(replica=live.replica or ""),
            scene.now,
            why,
            replicas=count,
            hold_until=hold_until,
            wanted_at=scene.now,
        )
    elif live is not None:
        # It keeps its phase and its place in the queue; the wish for more joins it.
        change = Change(
            noun="activation",
            key=key,
            event=moves.same_phase(live),
            state=replace(live, replicas=count, hold_until=hold_until),
            reason=why,
        )
    else:
        wanted = moves.opened(model.name, model.incarnation, ANY, scene.now, known)
        change = moves.move(
            wanted,
            ActivationWanted(by=actor),
            scene.now,
            why,
            is_new=known is None,
            replicas=count,
            hold_until=hold_until,
        )
    changes.append(change)
    held = f", held for {body.for_s:g} s" if body.for_s is not None else ""
    if count <= running:
        sentence = f"{model.name} runs {running} of at most {model.scaling.max} already{held}"
    else:
        sentence = f"{model.name}: {count} of at most {model.scaling.max} wanted{held}"
    return Accepted(changes=tuple(changes), sentence=sentence)


def _unload(scene: Scene, body: ModelUnload) -> Accepted | Rejected:
    """All replicas stop, parked ones too, the demand and any hold end."""
    model = scene.world.models.get(body.model)
    if model is None:
        return catalog.not_found(scene.world.models, body.model)
    if is_off(model):
        return Rejected(code=codes.CONFLICT, sentence=f"{model.name} is off (max 0) already")
    if model.scaling.min > 0:
        return Rejected(
            code=codes.CONFLICT,
            sentence=f"{model.name} keeps {model.scaling.min} running (min); scale it down first",
        )
    edit = PlanEdit(world=scene.world)
    stop = Stop(
        decision=scene.ids.decision(),
        reason="unload",
        decided_at=scene.now,
        drain_timeout_s=scene.settings.drain_timeout_s,
        force=body.force,
    )
    stopping = [
        p
        for p, hold in scene.holds_of(model.name)
        if hold in ("ready", "pending", "away", "parked") or _may_go_further(scene, p, hold, body)
    ]
    for planned in stopping:
        edit.stop(planned, stop)
    changes = list(edit.changes("unloaded"))
    for activation in scene.activations_of(model.name):
        if is_demanded(activation, model):
            event = ActivationIdle(cause="unload")
            changes.append(
                moves.move(activation, event, scene.now, "unloaded", replicas=1, hold_until=None)
            )
    ids = ", ".join(p.item.replica for p in stopping)
    sentence = f"{model.name}: {ids} to stop" if ids else f"{model.name} is not loaded"
    return Accepted(changes=tuple(changes), sentence=sentence)


def _may_go_further(scene: Scene, planned: Planned, hold: Hold, body: ModelUnload) -> bool:
    """Whether a replica on its way out, even if only by its node's will, is to go faster, or may not park where it
    could have."""
    stop = planned.item.stop
    if stop is None or hold == "ended":
        return scene.is_leaving(planned)
    return (body.force and not stop.force) or stop.park != "never"


def _cordon(scene: Scene, actor: str, body: NodeCordon | NodeUncordon) -> Accepted | Rejected:
    """No new placements on the node, or again; what runs there stays."""
    state = scene.world.nodestates.get(body.node)
    if state is None and body.node in scene.world.nodes:
        state = NodeState(node=body.node, since=scene.now)
    if state is None or state.admin == "removed":
        known = ", ".join(sorted(scene.world.nodestates)) or "none"
        return Rejected(
            code=codes.NOT_FOUND, sentence=f"there is no node {body.node!r}; known: {known}"
        )
    wish = "cordoned" if isinstance(body, NodeCordon) else "open"
    if state.admin == wish and body.node in scene.world.nodestates:
        return Accepted(sentence=f"{body.node} is {wish} already")
    if state.admin == "draining":
        return Rejected(code=codes.CONFLICT, sentence=f"{body.node} is draining")
    event = (
        NodeStateCordoned(by=actor)
        if isinstance(body, NodeCordon)
        else NodeStateUncordoned(by=actor)
    )
    change = Change(
        noun="nodestate",
        key=(body.node,),
        event=event,
        state=replace(state, admin=wish),
        reason=f"by {actor}",
    )
    return Accepted(changes=(change,), sentence=f"{body.node} is {wish}")
